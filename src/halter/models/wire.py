"""A model of a provider, over OpenAI's, Anthropic's or Google's protocol.

One `ask` is one request: it ends in one reply or one error. A reply has a usage only if the provider's final report
came; an error has the usage that was reported until then, and whether it was final.

Everything that a provider's SDK does on its own is switched off:

- No retries: only the holder of the money may ask twice.
- No deadline except for the connection: the guard cancels. A connection that is not made in time is given up here,
  because a request that was never sent costs nothing.
- Nothing from the environment is sent: a key, an organisation or a header there was not meant for an address that an
  agent's file names. Only the proxy and its certificates are taken from it.
- No continuation of an answer: that would be a second request without a hold.

Errors, as the retry policy needs them:

    nothing was sent                         unavailable   not billed
    408, 409, 425, 429, 5xx                  unavailable   not billed
    3xx: the address leads elsewhere         rejected      not billed
    too long: 413, or as a provider words it overflow      not billed
    quota or credit used up, other 4xx       rejected      not billed
    a connection lost, an answer cut off     unavailable   billed
    an answer that cannot be read            unavailable   billed

An error status is billed after all where an answer had begun, where it reports a usage, or where the configuration says
that this provider `bills_errors`: then any but 429 and 529, by which a provider refuses to begin.

A message quotes what the provider said, shortened, and never the key, an address or a header.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from halter.core.agent_spec import ThinkingEffort, WireFormat
from halter.core.clock import SECOND
from halter.core.errors import ContextOverflow, ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.messages import Prompt, Reply, TextListener, ToolResult, bound_prompt_tokens
from halter.core.text import clean, join_names, shorten
from halter.core.tools import Permit, PermitGate, ProviderTool, ProviderToolName, ToolSpec
from halter.core.usage import ModelName, Usage, is_local_address
from halter.models.cloud_credentials import CloudCredentials
from halter.models.wire_format import (
    ToolDefinitions,
    UsageReader,
    count_provider_tools,
    find_event_text,
    make_surrogate_joiner,
    parse_model_response,
    read_native_answer,
    shape_history,
)

if TYPE_CHECKING:
    import ssl

    import httpx2
    from openai import AsyncOpenAI
    from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import Model
    from pydantic_ai.settings import ModelSettings

MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
"""Far more than the longest answer has, with each token in an event of its own."""

CONNECT_TIMEOUT_SECONDS: Final = 30.0


class ExchangeTerms(msgspec.Struct, frozen=True):
    """What applies to every request to a provider.

    If it `bills_errors`, an answer with an error status counts as paid. `credentials` take the place of a key. With
    `prompt_cache`, what may be cached is marked, if the protocol has marks. At most `largest` bytes of an answer are
    read; a connection must be made within `connecting` seconds.
    """

    bills_errors: bool = False
    prompt_cache: bool = True
    credentials: CloudCredentials | None = None
    largest: int = MAX_ANSWER_BYTES
    connecting: float = CONNECT_TIMEOUT_SECONDS


DEFAULT_TERMS: Final = ExchangeTerms()


class ModelHabits(msgspec.Struct, frozen=True):
    """How a model answers: its temperature, how much it thinks, the tool whose arguments may be its answer."""

    temperature: float | None = None
    thinking: ThinkingEffort | None = None
    native_output: str = ""


NO_HABITS: Final = ModelHabits()


class Exchange:
    """One request and its answer, as far as they have come."""

    def __init__(self) -> None:
        self.sent = False
        self._opened: list[httpx2.Response] = []
        self._meter: UsageReader | None = None

    @property
    def usage(self) -> Usage | None:
        return None if self._meter is None else self._meter.usage

    @property
    def final(self) -> bool:
        return self._meter is not None and self._meter.final

    @property
    def led_elsewhere(self) -> bool:
        """Whether the answer is a redirect. It is not followed, so the request itself has no answer."""
        return bool(self._opened) and self._opened[-1].is_redirect

    def answered(self, response: "httpx2.Response", meter: UsageReader) -> None:
        self._opened.append(response)
        self._meter = meter

    async def aclose(self) -> None:
        for response in self._opened:
            await response.aclose()


current_exchange: ContextVar[Exchange] = ContextVar("current_exchange")


@asynccontextmanager
async def open_exchange() -> AsyncGenerator[Exchange]:
    """Close every answer at the end: some SDKs leave a cancelled stream open."""
    made = Exchange()
    mark = current_exchange.set(made)
    try:
        yield made
    finally:
        current_exchange.reset(mark)
        await made.aclose()


NO_KEY: Final = "no-key"
"""Sent where no key is needed: the SDKs require one, and otherwise look in the environment."""

_OWN_MODELS: Final = ("gpt-", "o1", "o3", "o4", "chatgpt-")
_SENDING: Final = ".send_request_headers.started"


async def _note_request(terms: ExchangeTerms, request: "httpx2.Request") -> None:
    """Note when a request leaves, and bound the time until then. What is signed is what leaves."""
    if terms.credentials is not None:
        terms.credentials.sign(request)
    current = current_exchange.get(None)

    async def trace(event: str, about: Mapping[str, Any]) -> None:
        # What a proxy is asked before it lets anything through is not the request.
        if current is not None and event.endswith(_SENDING) and about["request"].method != b"CONNECT":
            current.sent = True

    allowed = {**request.extensions.get("timeout", {}), "connect": terms.connecting}
    request.extensions = {**request.extensions, "timeout": allowed, "trace": trace}


async def _note_response(wire: WireFormat, largest: int, response: "httpx2.Response") -> None:
    meter = UsageReader(wire)
    current = current_exchange.get(None)
    if current is not None:
        current.answered(response, meter)
    decoder = response._get_content_decoder()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    response._decoder = _Bounded(decoder, largest, meter)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class _Bounded:
    """Decompresses an answer up to its limits of size and depth: little data may expand to much."""

    def __init__(self, decoder: "Any", largest: int, meter: UsageReader) -> None:
        self._decoder = decoder
        self._left = largest
        self._meter = meter

    def decode(self, data: bytes) -> Iterator[bytes]:
        yield from map(self._counted, self._decoder.decode(data))

    def flush(self) -> Iterator[bytes]:
        yield from map(self._counted, self._decoder.flush())
        self._meter.close()
        self._check_depth()

    def _counted(self, piece: bytes) -> bytes:
        import httpx2

        self._left -= len(piece)
        if self._left < 0:
            raise httpx2.DecodingError("The answer is too long.")
        self._meter.feed(piece)
        self._check_depth()
        return piece

    def _check_depth(self) -> None:
        if self._meter.too_deep:
            import httpx2

            raise httpx2.DecodingError("The answer is nested too deeply.")


class WireClient(msgspec.Struct, frozen=True):
    model: "Any"
    pool: "Any"


def open_wire_client(name: ModelName, wire: WireFormat, url: str, key: str, terms: ExchangeTerms) -> WireClient:
    """Import the provider's library, which takes seconds, and prepare its client. No connection is opened."""
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    hooks = {
        "request": [partial(_note_request, terms)],
        "response": [partial(_note_response, wire, terms.largest)],
    }
    # No proxy stands between this machine and itself.
    outside = not is_local_address(url)
    tls = _share_tls_context(trust_env=outside)
    pool = httpx2.AsyncClient(verify=tls, timeout=None, limits=limits, trust_env=outside, event_hooks=hooks)
    return WireClient(_model(name, wire, url, key or NO_KEY, pool, terms), pool)


@cache
def _share_tls_context(*, trust_env: bool) -> "ssl.SSLContext":
    """Read the machine's certificates once, not for each model."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=trust_env)


def _model(
    name: ModelName, wire: WireFormat, url: str, key: str, pool: "httpx2.AsyncClient", terms: ExchangeTerms
) -> "Model[Any]":
    match wire:
        case "openai":
            return _openai(name, url, key, pool)
        case "anthropic":
            from anthropic import AsyncAnthropic
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            client = AsyncAnthropic(api_key=key, base_url=url, max_retries=0, timeout=None, http_client=pool)
            client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            return AnthropicModel(name.model, provider=AnthropicProvider(anthropic_client=client))
        case "google":
            # The address of a cloud has the version already.
            return _google(name, url, key, pool, version="" if terms.credentials else None)


def _openai(name: ModelName, url: str, key: str, pool: "httpx2.AsyncClient") -> "Model[Any]":
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    client = AsyncOpenAI(api_key=key, admin_api_key="", base_url=url, max_retries=0, timeout=None, http_client=pool)
    _forget_environment(client)
    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=uses_new_limit(name))
    if name.provider == "openai":
        return OpenAIChatModel(name.model, provider=OpenAIProvider(openai_client=client), profile=profile)
    other = OpenAICompatibleProvider(name.provider, openai_client=client)
    return OpenAIChatModel(name.model, provider=other, profile=profile)


def _forget_environment(client: "AsyncOpenAI") -> None:
    client.organization = client.project = None
    client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def uses_new_limit(name: ModelName) -> bool:
    """Choose the name of the output limit: a server may ignore an unknown one."""
    model = name.model.rpartition("/")[2]
    return name.provider == "openai" or (model.startswith(_OWN_MODELS) and not model.startswith("gpt-oss"))


def _google(
    name: ModelName, url: str, key: str, pool: "httpx2.AsyncClient", *, version: str | None = None
) -> "Model[Any]":
    from google.genai.client import Client
    from google.genai.types import HttpOptions, HttpRetryOptions
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    class OneRequest(GoogleModel):
        """Sends one request: the SDK follows continuation tokens unless it is told not to."""

        async def _build_content_and_config(self, *args: Any, **kwargs: Any) -> Any:
            build: Any = super()._build_content_and_config  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            contents, config = await build(*args, **kwargs)
            config["automatic_continuation"] = False
            return contents, config

    tls = _share_tls_context(trust_env=True)
    options = HttpOptions(
        base_url=url,
        api_version=version,
        httpx_async_client=pool,
        # For clients that the library prepares besides, and that are never used.
        client_args={"verify": tls},
        async_client_args={"verify": tls, "ssl": tls},
        retry_options=HttpRetryOptions(attempts=1),
    )
    client = Client(vertexai=False, api_key=key, http_options=options)
    return OneRequest(name.model, provider=GoogleProvider(client=client))


_THINKING_BUDGETS: Final[Mapping[ThinkingEffort, int]] = {"off": 0, "low": 2048, "medium": 10_000, "high": 16_384}
"""What Anthropic's elder models may think at most; it is a part of the output."""


def choose_thinking(wanted: ThinkingEffort | None, prompt: Prompt) -> ThinkingEffort | None:
    """How much a model of Anthropic's thinks about this request.

    Between a call and the end of its turn it would have to be sent its own thoughts, which are not kept: there it does
    not think anew. Neither does it where the output has no room for it.
    """
    acts = any(isinstance(part, ToolResult) for message in prompt.messages[-1:] for part in message.parts)
    fits = wanted is not None and prompt.max_output_tokens > _THINKING_BUDGETS[wanted]
    return wanted if fits and not acts else None


def find_native_form(prompt: Prompt, name: str, profile: Mapping[str, Any], wire: WireFormat) -> ToolSpec | None:
    """The tool whose arguments the provider can hold the answer to; None where it cannot.

    Google's models take either a form or tools.
    """
    if not name or not profile.get("supports_json_schema_output", False):
        return None
    if wire == "google" and len(prompt.tools) > 1:
        return None
    return next((spec for spec in prompt.tools if spec.name == name), None)


_PROVIDER_TOOLS: Final[Mapping[WireFormat, tuple[ProviderToolName, ...]]] = {
    "openai": (),
    "anthropic": ("web_search", "code_execution"),
    "google": ("code_execution",),
}
"""What a provider can be asked to run. Google searches without a limit, so its searches cannot be held."""


def explain_missing_tools(model: ModelName, wire: WireFormat, wanted: Iterable[ProviderTool]) -> str:
    """Why a model cannot have tools of its provider; empty where it can."""
    missing = [tool.name for tool in wanted if tool.name not in _PROVIDER_TOOLS[wire]]
    if not missing:
        return ""
    has = join_names(_PROVIDER_TOOLS[wire]) or "none"
    return (
        f"{model} has no {join_names(missing)} that can be held to a limit: over the wire {wire} the tools of a "
        f"provider are {has}. Take another model, or remove it from `provider_tools`."
    )


def make_model_settings(
    max_output_tokens: int, temperature: float | None, thinking: ThinkingEffort | None = None, *, cache_points: bool
) -> "ModelSettings":
    """Settings of a request. Tools and system text stay the same in a session, so their ends are cache points.

    What a model thinks is output, so the limit bounds it too. A model that thinks chooses its own temperature.
    """
    made: dict[str, Any] = {"max_tokens": max_output_tokens}
    if thinking is not None:
        made["thinking"] = False if thinking == "off" else thinking
    if temperature is not None and thinking in (None, "off"):
        made["temperature"] = temperature
    if cache_points:
        made |= {"anthropic_cache_tool_definitions": True, "anthropic_cache_instructions": True}
    return made  # pyright: ignore[reportReturnType]


MAX_QUOTED_LENGTH: Final = 300

LONGEST_WAIT: Final = 24 * 3600 * SECOND
"""The longest `retry-after` that is believed."""

_TOO_LARGE: Final = 413
_MAY_PASS: Final = frozenset((408, 409, 425, 429))
_NOT_SERVED: Final = frozenset((503, 529))
_NOT_BEGUN: Final = frozenset((429, 529))
_SERVER_ERRORS: Final = 500
_SPACE: Final = re.compile(r"\s+")
_NEEDS_PERSON: Final = {401: "Unauthorized", 402: "QuotaExceeded", 403: "Forbidden", 404: "NotFound"}
"""A wrong key, an account without credit or rights, an unknown model or address."""


def list_library_errors() -> tuple[type[Exception], ...]:
    """Every error that the library raises or lets through.

    It reads some answers without a check of their shape; what that raises means an unreadable answer.
    """
    import httpx2
    from pydantic_ai.exceptions import AgentRunError, UserError

    unreadable = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    return (AgentRunError, UserError, httpx2.HTTPError, httpx2.StreamError, *unreadable)


def translate_library_error(
    error: Exception,
    name: ModelName,
    key: str,
    seen: "Exchange",
    *,
    url: str = "",
    begun: bool = False,
    bills_errors: bool = False,
) -> ModelError:
    import httpx2
    from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError, UserError

    for cause in _list_causes(error):
        if isinstance(cause, httpx2.DecodingError):
            return _unfinished_error(f"BadAnswer: {name} sent what cannot be read: {_quote_error(cause, key)}", seen)
    if seen.led_elsewhere:
        sentence = f"Redirected: {name} redirects elsewhere; write the address it redirects to as `base_url`"
        return ModelUnusable(sentence, billed=False)
    match error:
        case ModelHTTPError():
            return _status(error, name, key, seen, begun=begun or error.in_stream, bills_errors=bills_errors)
        case ModelConnectionError() | httpx2.HTTPError() | httpx2.StreamError() if not seen.sent:
            return ModelUnavailable(f"ConnectionFailed: {_describe_unreachable(error, name, key, url)}", billed=False)
        case ModelConnectionError() | httpx2.HTTPError() | httpx2.StreamError():
            if begun:
                return make_cut_error(name, seen)
            return _unfinished_error(f"ConnectionLost: {name} gave no answer: {_quote_error(error, key)}", seen)
        case ModelAPIError(in_stream=True):
            return _unfinished_error(f"ProviderError: {name} broke off: {_find_provider_message(error, key)}", seen)
        case UserError() | NotImplementedError():
            return ModelRejected(f"Unsendable: {name} cannot be asked this: {_quote_error(error, key)}", billed=False)
        case _:
            return _unfinished_error(f"BadAnswer: {name} sent what cannot be read: {_quote_error(error, key)}", seen)


def _describe_unreachable(error: Exception, name: ModelName, key: str, url: str) -> str:
    """Name the address that cannot be reached, why, and where it is written."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    place = f"{parts.scheme}://{host}{parts.path}" if host else str(name)
    remedy = f"check that it runs, the network, and `providers.{name.provider}.base_url` in agent.yaml"
    return f"cannot reach {place} for {name} ({_find_system_reason(error) or _quote_error(error, key)}): {remedy}"


def _find_system_reason(error: BaseException) -> str:
    """What the system said of a connection, somewhere below the libraries' own errors."""
    for cause in _list_causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return os.strerror(cause.errno).lower() if cause.errno and cause.errno > 0 else cause.strerror
    return ""


def _list_causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def make_cut_error(name: ModelName, seen: "Exchange") -> ModelUnavailable:
    """The error for an answer that stopped in the middle, also where the connection was closed cleanly."""
    return _unfinished_error(f"CutStream: the answer of {name} ended before it was finished", seen)


def _unfinished_error(sentence: str, seen: "Exchange") -> ModelUnavailable:
    # A report of no output at all says nothing of an answer that had begun.
    final = seen.final and seen.usage is not None and seen.usage.output_tokens > 0
    return ModelUnavailable(sentence, billed=seen.sent, usage=seen.usage, final=final)


def _status(
    error: "ModelHTTPError", name: ModelName, key: str, seen: "Exchange", *, begun: bool, bills_errors: bool
) -> ModelError:
    """Decide what a status means: an outage, something that a person must mend, or the request's own error."""
    from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelQuotaExceededError

    status, text = error.status_code, f"{name} answered {error.status_code}: {_find_provider_message(error, key)}"
    usage, final = seen.usage, seen.final
    billed = begun or usage is not None or (bills_errors and status not in _NOT_BEGUN)
    if isinstance(error, ModelContextWindowExceededError) or status == _TOO_LARGE:
        return ContextOverflow(f"ContextOverflow: {text}", billed=billed, usage=usage, final=final)
    if isinstance(error, ModelQuotaExceededError) or status in _NEEDS_PERSON:
        kind = _NEEDS_PERSON.get(status, "QuotaExceeded")
        return ModelUnusable(f"{kind}: {text}", billed=billed, usage=usage, final=final)
    if status in _MAY_PASS or status >= _SERVER_ERRORS:
        wait = _micros(error.retry_after)
        sentence = f"{_name_passing_failure(status)}: {text}"
        return ModelUnavailable(sentence, billed=billed, usage=usage, final=final, retry_after=wait)
    return ModelRejected(f"Rejected: {text}", billed=billed, usage=usage, final=final)


def _name_passing_failure(status: int) -> str:
    if status == 429:  # noqa: PLR2004 - the status that everybody knows by its number
        return "RateLimited"
    if status in _NOT_SERVED:
        return "Overloaded"
    return "ServerError" if status >= _SERVER_ERRORS else "Conflict"


def _micros(seconds: float | None) -> int | None:
    if seconds is None or not seconds >= 0:
        return None
    return round(min(seconds * SECOND, LONGEST_WAIT))


def _find_provider_message(error: "ModelAPIError", key: str) -> str:
    return _tidy(_message(error.body), key) or "nothing more"


def _message(body: Any) -> str:
    match body:
        case str():
            return body
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"error": str(message)}:
            return message
        case _:
            return ""


def _quote_error(error: Exception, key: str) -> str:
    return _tidy(str(error), key) or type(error).__name__


def _tidy(text: str, key: str) -> str:
    hidden = text.replace(key, "***") if key else text
    return shorten(_SPACE.sub(" ", clean(hidden)).strip(), MAX_QUOTED_LENGTH)


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
        self._url = url
        self._key = key
        self._habits = habits
        self.terms = terms
        self._definitions = ToolDefinitions()
        self._connection: WireClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        send = _send.open(permit)
        async with open_exchange() as seen:
            try:
                if self.terms.credentials is not None:
                    await self.terms.credentials.renew()
                model = (await self._connect()).model
                form = find_native_form(prompt, self._habits.native_output, model.profile, self.wire)
                on_text = on_text if form is None else None
                response = await send(model, self._request(prompt, form), on_text, partial(self._make_error, seen))
            except asyncio.CancelledError:
                permit.unsent = not seen.sent
                raise
        reply = self._finish(response, seen, prompt, streamed=on_text is not None)
        return reply if form is None else read_native_answer(reply, form.name)

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
                # The imports take seconds, in which leases have to be renewed.
                made = await asyncio.to_thread(open_wire_client, self.name, self.wire, self._url, self._key, self.terms)
                self._connection = made
            return self._connection

    def _request(self, prompt: Prompt, form: ToolSpec | None = None) -> dict[str, Any]:
        # Anthropic caches only what is marked, here for minutes; the others cache prefixes by themselves.
        marks = self.wire == "anthropic" and self.terms.prompt_cache
        wanted, temperature = self._habits.thinking, self._habits.temperature
        thinking = choose_thinking(wanted, prompt) if self.wire == "anthropic" else wanted
        settings = make_model_settings(prompt.max_output_tokens, temperature, thinking, cache_points=marks)
        if prompt.provider_tools and self.wire == "anthropic":
            # Otherwise its newer models search from code that runs at the provider, declared or not.
            settings["anthropic_web_tools_allowed_callers"] = ["direct"]  # pyright: ignore[reportGeneralTypeIssues]
        return {
            "messages": shape_history(prompt.messages, cache_points=marks),
            "model_settings": settings,
            "model_request_parameters": self._definitions.parameters(prompt, form),
        }

    def _make_error(self, seen: Exchange, error: Exception, *, begun: bool) -> ModelError:
        terms = self.terms
        return translate_library_error(
            error, self.name, self._key, seen, url=self._url, begun=begun, bills_errors=terms.bills_errors
        )

    def _finish(self, response: "ModelResponse", seen: Exchange, prompt: Prompt, *, streamed: bool) -> Reply:
        """Accept only an answer that says it is complete.

        Some servers of OpenAI's protocol do not say so in an answer that comes in one piece, which cannot be cut.
        """
        said = (response.provider_details or {}).get("finish_reason")
        ended = said is not None or response.finish_reason == "content_filter"
        if not ended and (streamed or self.wire != "openai"):
            raise make_cut_error(self.name, seen)
        if response.finish_reason == "error":
            sentence = f"BadAnswer: {self.name} failed to answer: {said}"
            raise ModelUnavailable(sentence, usage=seen.usage, final=seen.final)
        used = count_provider_tools(response)
        unknown = sorted(used.keys() - {tool.name for tool in prompt.provider_tools})
        if unknown:
            sentence = f"UndeclaredTool: {self.name} used {join_names(unknown)} at its provider, which is not declared"
            fix = "declare it under `provider_tools` in agent.yaml, or take another model"
            raise ModelRejected(f"{sentence}: {fix}", usage=seen.usage, final=seen.final)
        usage = _find_final_usage(response, seen)
        if used and usage is not None:
            searches = max(usage.web_searches, used["web_search"])
            usage = msgspec.structs.replace(usage, web_searches=searches, code_executions=used["code_execution"])
        return parse_model_response(response, usage)


@PermitGate
async def _send(
    model: Any, request: dict[str, Any], on_text: TextListener | None, failed: "ErrorTranslator"
) -> "ModelResponse":
    """Send one request and return the whole answer; with a listener, stream it."""
    from pydantic_ai.direct import model_request, model_request_stream

    begun = False
    join = make_surrogate_joiner()
    try:
        if on_text is None:
            return await model_request(model, **request)
        async with model_request_stream(model, **request) as stream:
            begun = True
            async for event in stream:
                if words := join(find_event_text(event)):
                    on_text(words)
            return stream.get()
    except list_library_errors() as error:
        raise failed(error, begun=begun) from None


class ErrorTranslator(Protocol):
    """Translates an error of the library; `begun` says that an answer had begun."""

    def __call__(self, error: Exception, *, begun: bool) -> ModelError: ...


def _find_final_usage(response: "ModelResponse", seen: Exchange) -> Usage | None:
    """The usage of a complete answer. A report that came too early, or without output, does not count."""
    usage = seen.usage if seen.final else None
    return None if usage is not None and response.parts and not usage.output_tokens else usage
