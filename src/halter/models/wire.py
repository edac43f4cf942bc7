"""A model of a provider, over one of OpenAI's two protocols, Anthropic's or Google's.

One `ask` is one request: it ends in one reply or one error. A reply has a usage only if the provider's final report
arrived. An error has the usage that was reported before, and whether it was final.

Automatic behavior of the providers' SDKs is disabled:

- No retries: each attempt needs a hold.
- No deadline except for the connection: the guard cancels. A connection that is not established in time is given up
  here, because a request that was never sent costs nothing.
- Nothing from the environment is sent: a key, an organization or a header there was not meant for an address in an
  agent's file. Only the proxy and its certificates are used.
- No continuation of an answer: that would be a second request without a hold.
- Nothing is stored at the provider, nor compared with what it stored: the journal has the whole session.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from halter.core.errors import ModelError, ModelRejected, ModelUnavailable
from halter.core.messages import VOLATILE, Prompt, Reply, Text, TextListener, bound_prompt_tokens
from halter.core.text import encode_body, join_names
from halter.core.tools import Permit, PermitGate, ProviderTool, ToolSpec
from halter.core.usage import ModelName, Usage, is_local_address
from halter.models.exchange import DEFAULT_TERMS, Exchange, ExchangeObserver, ExchangeTerms, open_exchange
from halter.models.pydantic_messages import (
    ToolDefinitions,
    count_provider_tools,
    find_event_text,
    find_reasoning,
    find_refusal,
    hide_pictures,
    make_surrogate_joiner,
    parse_model_response,
    read_native_answer,
    shape_history,
)
from halter.models.wire_errors import (
    ErrorTranslator,
    has_unreadable_reasoning,
    list_library_errors,
    make_cut_error,
    translate_library_error,
)
from halter.models.wires.table import WIRES
from halter.models.wires.wire import CacheLifetime, ModelAddress
from halter.net.client import HttpClient, HttpRequest
from halter.net.failures import HttpFailure
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.net.sdk_pool import open_sdk_pool
from halter.spec.models import ThinkingEffort, WireFormat

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.settings import ModelSettings


class ModelHabits(msgspec.Struct, frozen=True):
    """How a model answers: its temperature, its thinking effort, and the tool whose arguments can be its answer."""

    temperature: float | None = None
    thinking: ThinkingEffort | None = None
    native_output: str = ""


NO_HABITS: Final = ModelHabits()
NO_KEY: Final = "no-key"
"""Sent if no key is needed: without one, the SDKs take a key from the environment."""

PROBE_TIMEOUT_SECONDS: Final = 3.0


class WireClient(msgspec.Struct, frozen=True):
    model: "Any"
    pool: "Any"


def open_wire_client(name: ModelName, wire: WireFormat, url: str, key: str, terms: ExchangeTerms) -> WireClient:
    """Import the provider's library, which takes seconds, and create its client. No connection is opened."""
    observer = ExchangeObserver(wire, name.model, terms.credentials)
    pool = open_sdk_pool(url, observer, connect_timeout=terms.connect_timeout, max_bytes=terms.max_bytes)
    address = ModelAddress(name, url, key or NO_KEY, is_in_cloud=terms.credentials is not None)
    return WireClient(WIRES[wire].build_model(address, pool), pool)


def find_native_form(prompt: Prompt, name: str, profile: Mapping[str, Any], wire: WireFormat) -> ToolSpec | None:
    """Find the tool whose schema the provider can enforce for the answer. None if it cannot."""
    if not name or not profile.get("supports_json_schema_output", False):
        return None
    if len(prompt.tools) > 1 and not WIRES[wire].combines_schema_and_tools:
        return None
    return next((spec for spec in prompt.tools if spec.name == name), None)


def explain_missing_tools(model: ModelName, wire: WireFormat, tools: Iterable[ProviderTool]) -> str:
    """Describe why a model cannot use tools of its provider. Empty if it can."""
    missing = [tool.name for tool in tools if tool.name not in WIRES[wire].provider_tools]
    if not missing:
        return ""
    available = join_names(WIRES[wire].provider_tools) or "none"
    return (
        f"{model} cannot use {join_names(missing)} with a limit: the provider tools of the wire {wire} are "
        f"{available}. Use another model, or remove it from `provider_tools`."
    )


def make_model_settings(
    max_output_tokens: int, temperature: float | None, thinking: ThinkingEffort | None = None
) -> "ModelSettings":
    """Make the settings of a request that all protocols have.

    Thinking is output, so the limit applies to it too. A model that thinks chooses its own temperature.
    """
    settings: dict[str, Any] = {"max_tokens": max_output_tokens}
    if thinking is not None:
        settings["thinking"] = False if thinking == "off" else thinking
    if temperature is not None and thinking in (None, "off"):
        settings["temperature"] = temperature
    return settings  # pyright: ignore[reportReturnType]


def always_reasons(profile: Mapping[str, Any], effort: ThinkingEffort | None) -> bool:
    """Return True if a model of OpenAI thinks also without being told to. Then it rejects a temperature."""
    is_default = effort is None and profile.get("thinking_enabled_by_default", False)
    return bool(profile.get("openai_supports_reasoning") and (is_default or profile.get("thinking_always_enabled")))


def make_cache_key(prompt: Prompt) -> str:
    """Make the key by which OpenAI finds the machine that has cached the beginning of a prompt.

    It is the same for all requests of a session, and for sessions that begin alike. It contains no text: the digest is
    of what the same request contains anyway, masked and without personal data where that is hidden.
    """
    parts = prompt.messages[0].parts if prompt.messages else ()
    texts = [part.text for part in parts if isinstance(part, Text) and part.reason != VOLATILE]
    return sha256(encode_body("\0".join((prompt.system, *texts)))).hexdigest()[:32]


class WireModel:
    """A model of a provider. `base_url` is set if `url` is not the provider's default."""

    def __init__(
        self,
        name: ModelName,
        wire: WireFormat,
        url: str,
        key: str = "",
        *,
        base_url: str | None = None,
        habits: ModelHabits = NO_HABITS,
        terms: ExchangeTerms = DEFAULT_TERMS,
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.wire: WireFormat = wire
        self._protocol = WIRES[wire]
        self._url = url
        self._has_cache_keys = self._protocol.has_cache_keys or (name.provider == "openai" and base_url is None)
        url_parts = urlsplit(url)
        # Behind one host there can be several gateways, each at its path.
        address = f"{url_parts.netloc.rpartition('@')[2]}{url_parts.path.rstrip('/')}"
        self._maker = f"{name} at {address}" if self._protocol.returns_reasoning else ""
        self._sends_reasoning = True
        self._key = key
        self._habits = habits
        self.terms = terms
        self._definitions = ToolDefinitions()
        self._connection: WireClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    @property
    def has_long_cache(self) -> bool:
        """True if the provider can cache for an hour."""
        return self.terms.prompt_cache and self.name.provider == self._protocol.long_cache_provider

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        send = _send.open(permit)
        async with open_exchange() as exchange:
            try:
                if self.terms.credentials is not None:
                    await self.terms.credentials.renew()
                model = (await self._connect()).model
                form = find_native_form(prompt, self._habits.native_output, model.profile, self.wire)
                on_text = on_text if form is None else None
                if not (self.terms.vision and model.profile.get("supports_image_input", True)):
                    prompt = hide_pictures(prompt, self.name)
                request = self._request(prompt, model.profile, form)
                response = await send(model, request, on_text, partial(self._make_error, exchange))
            except asyncio.CancelledError:
                permit.unsent = not exchange.sent
                raise
        reply = self._finish(response, exchange, prompt, streamed=on_text is not None)
        return reply if form is None else read_native_answer(reply, form.name)

    async def probe(self) -> int:
        """Ask the provider for its list of models, which costs nothing; return the HTTP status.

        Raises OSError if the provider does not answer.
        """
        url = f"{self._url.rstrip('/')}{self._protocol.models_path}"
        headers = self._protocol.key_headers
        sent_headers = {name: value.format(key=self._key) for name, value in headers.items()} if self._key else {}
        is_remote = not is_local_address(self._url)
        terms = HttpxTerms(PROBE_TIMEOUT_SECONDS, PROBE_TIMEOUT_SECONDS, uses_environment=is_remote)
        request = HttpRequest("GET", url, sent_headers)
        try:
            async with HttpClient(HttpxTransport(terms)) as client, client.open(request) as response:
                return response.status
        except HttpFailure as failure:
            if failure.is_timeout:
                raise TimeoutError("no answer") from failure
            raise OSError(failure.reason) from failure

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.pool.aclose()

    async def _connect(self) -> WireClient:
        """Connect at the first request. Connections belong to an event loop: each loop has its own."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connection, self._connecting = loop, None, asyncio.Lock()
        async with self._connecting:
            if self._connection is None:
                # The imports take seconds, during which leases have to be renewed.
                client = await asyncio.to_thread(
                    open_wire_client, self.name, self.wire, self._url, self._key, self.terms
                )
                self._connection = client
            return self._connection

    def _request(self, prompt: Prompt, profile: Mapping[str, Any], form: ToolSpec | None = None) -> dict[str, Any]:
        can_mark = self._protocol.can_mark_cache(self.name, profile)
        lifetime: CacheLifetime | None = None
        if can_mark and self.terms.prompt_cache:
            lifetime = "1h" if prompt.long_cache and self.has_long_cache else "5m"
        effort = self._habits.thinking
        temperature = None if always_reasons(profile, effort) else self._habits.temperature
        thinking = self._protocol.choose_thinking(effort, prompt)
        settings: dict[str, Any] = {**make_model_settings(prompt.max_output_tokens, temperature, thinking)}
        settings |= self._protocol.make_settings(prompt, can_mark, lifetime)
        if self.terms.prompt_cache and self._has_cache_keys:
            settings["openai_prompt_cache_key"] = make_cache_key(prompt)
        return {
            "messages": shape_history(prompt.messages, lifetime, maker=self._maker if self._sends_reasoning else ""),
            "model_settings": settings,
            "model_request_parameters": self._definitions.parameters(prompt, form),
        }

    def _make_error(self, exchange: Exchange, error: Exception, *, is_started: bool) -> ModelError:
        failure = translate_library_error(
            error,
            self.name,
            self._key,
            exchange,
            url=self._url,
            is_started=is_started,
            bills_errors=self.terms.bills_errors,
        )
        if self._sends_reasoning and has_unreadable_reasoning(error):
            # Its key belongs to another account than the one before. The next attempt does without.
            self._sends_reasoning = False
            sentence = f"ForeignReasoning: {self.name} cannot read its earlier reasoning, which is left out from now on"
            return ModelUnavailable(sentence, billed=failure.billed, usage=failure.usage, final=failure.final)
        return failure

    def _finish(self, response: "ModelResponse", exchange: Exchange, prompt: Prompt, *, streamed: bool) -> Reply:
        """Build the reply. Accepts only an answer that is marked as complete.

        Some servers of OpenAI's protocol do not mark an answer without a stream, which cannot be truncated. The library
        takes a stream of the Responses protocol for complete after a refusal, and does not know all reasons for an
        incomplete one.
        """
        finish_reason = (response.provider_details or {}).get("finish_reason")
        is_complete = finish_reason is not None or response.finish_reason == "content_filter"
        if self._protocol.has_final_status:
            is_complete = exchange.finished and response.state == "complete"
            if response.finish_reason is None and (streamed or finish_reason is not None):
                response.finish_reason = "length"
        if not is_complete and (streamed or self._protocol.marks_whole_answers):
            raise make_cut_error(self.name, exchange)
        if response.finish_reason == "error":
            sentence = f"BadAnswer: {self.name} failed to answer: {finish_reason}"
            raise ModelUnavailable(sentence, usage=exchange.usage, final=exchange.final)
        tool_counts = count_provider_tools(response)
        unknown = sorted(tool_counts.keys() - {tool.name for tool in prompt.provider_tools})
        if unknown:
            sentence = f"UndeclaredTool: {self.name} used {join_names(unknown)} at its provider, which is not declared"
            fix = "declare it under `provider_tools` in agent.yaml, or take another model"
            raise ModelRejected(f"{sentence}: {fix}", usage=exchange.usage, final=exchange.final)
        usage = _find_final_usage(response, exchange)
        if tool_counts and usage is not None:
            searches = max(usage.web_searches, tool_counts["web_search"])
            usage = msgspec.structs.replace(usage, web_searches=searches, code_executions=tool_counts["code_execution"])
        limit = prompt.max_output_tokens if usage is None else usage.output_tokens
        return parse_model_response(response, usage, find_reasoning(response, self._maker, limit))


@PermitGate
async def _send(
    model: Any, request: dict[str, Any], on_text: TextListener | None, make_error: ErrorTranslator
) -> "ModelResponse":
    """Send one request and return the complete answer. With a listener, stream it."""
    from pydantic_ai.direct import model_request, model_request_stream

    is_started = False
    join = make_surrogate_joiner()
    try:
        if on_text is None:
            return await model_request(model, **request)
        async with model_request_stream(model, **request) as stream:
            is_started = True
            async for event in stream:
                if text := join(find_event_text(event)):
                    on_text(text)
            response = stream.get()
            if refusal := join(find_refusal(response)):
                on_text(refusal)
            return response
    except list_library_errors() as error:
        raise make_error(error, is_started=is_started) from None


def _find_final_usage(response: "ModelResponse", exchange: Exchange) -> Usage | None:
    """Find the usage of a complete answer. A report that is not final, or without output, does not count."""
    usage = exchange.usage if exchange.final else None
    return None if usage is not None and response.parts and not usage.output_tokens else usage
