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

Errors, as the retry policy needs them:

    nothing was sent                         unavailable   not billed
    408, 409, 425, 429, 5xx                  unavailable   not billed
    3xx: a redirect                          rejected      not billed
    too long: 413, or a provider's message   overflow      not billed
    quota or credit used up, other 4xx       rejected      not billed
    a lost connection, a truncated answer    unavailable   billed
    an unreadable answer                     unavailable   billed

An error status is billed if an answer had started, if it reports a usage, or if the provider is configured with
`bills_errors`: then every status except 429 and 529, which a provider returns before it starts an answer.

An error quotes the provider's message or the beginning of an unreadable answer. It never contains the key or a header.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import ContextOverflow, ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.messages import VOLATILE, Prompt, Reply, Text, TextListener, ToolResult, bound_prompt_tokens
from halter.core.text import clean, encode_body, join_names, shorten
from halter.core.tools import Permit, PermitGate, ProviderTool, ProviderToolName, ToolSpec
from halter.core.usage import ModelName, Usage, is_local_address
from halter.models.cloud_credentials import CloudCredentials
from halter.models.wire_format import (
    MAX_ANSWER_BYTES,
    CacheLifetime,
    ToolDefinitions,
    UsageReader,
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
from halter.net.client import HttpClient, HttpRequest, ignore_sending
from halter.net.failures import HttpFailure, find_system_reason, is_unreadable, list_causes, list_sdk_errors
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.net.sdk_pool import AnswerReader, SdkRequest, SdkResponse, UnreadableAnswer, open_sdk_pool
from halter.net.tls import make_tls_context
from halter.spec.models import ThinkingEffort, WireFormat

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from openai import AsyncOpenAI
    from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import Model
    from pydantic_ai.profiles import ModelProfile
    from pydantic_ai.settings import ModelSettings

CONNECT_TIMEOUT_SECONDS: Final = 30.0


class ExchangeTerms(msgspec.Struct, frozen=True):
    """The terms of every request to a provider.

    With `bills_errors`, an answer with an error status counts as billed. `credentials` replace a key. With
    `prompt_cache`, cacheable parts are marked and the cache has a key, if the protocol has them. Without `vision`,
    pictures are only named. At most `max_bytes` bytes of an answer are read. A connection must be established within
    `connect_timeout` seconds.
    """

    bills_errors: bool = False
    prompt_cache: bool = True
    vision: bool = True
    credentials: CloudCredentials | None = None
    max_bytes: int = MAX_ANSWER_BYTES
    connect_timeout: float = CONNECT_TIMEOUT_SECONDS


DEFAULT_TERMS: Final = ExchangeTerms()


class ModelHabits(msgspec.Struct, frozen=True):
    """How a model answers: its temperature, its thinking effort, and the tool whose arguments can be its answer."""

    temperature: float | None = None
    thinking: ThinkingEffort | None = None
    native_output: str = ""


NO_HABITS: Final = ModelHabits()


class Exchange:
    """The progress of one request and its answer."""

    def __init__(self) -> None:
        self.sent = False
        self.excerpt = b""
        """The beginning of the answer's body."""
        self._opened: list[SdkResponse] = []
        self._meter: UsageReader | None = None

    @property
    def usage(self) -> Usage | None:
        return None if self._meter is None else self._meter.usage

    @property
    def final(self) -> bool:
        return self._meter is not None and self._meter.final

    @property
    def finished(self) -> bool:
        """True if the answer is marked as complete, also without a usage."""
        return self._meter is not None and self._meter.finished

    @property
    def led_elsewhere(self) -> bool:
        """True if the answer is a redirect, which is not followed."""
        return bool(self._opened) and self._opened[-1].is_redirect

    def mark_sent(self) -> None:
        self.sent = True

    def add_response(self, response: SdkResponse, reader: UsageReader) -> None:
        self._opened.append(response)
        self._meter = reader
        self.excerpt = b""

    def add_chunk(self, chunk: bytes) -> None:
        if len(self.excerpt) < MAX_EXCERPT_BYTES:
            self.excerpt += chunk[: MAX_EXCERPT_BYTES - len(self.excerpt)]

    async def aclose(self) -> None:
        for response in self._opened:
            await response.aclose()


current_exchange: ContextVar[Exchange] = ContextVar("current_exchange")


@asynccontextmanager
async def open_exchange() -> AsyncGenerator[Exchange]:
    """Open an exchange, and close its responses at the end: some SDKs leave a cancelled stream open."""
    exchange = Exchange()
    token = current_exchange.set(exchange)
    try:
        yield exchange
    finally:
        current_exchange.reset(token)
        await exchange.aclose()


NO_KEY: Final = "no-key"
"""Sent if no key is needed: without one, the SDKs take a key from the environment."""

_OWN_MODELS: Final = ("gpt-", "o1", "o3", "o4", "chatgpt-")


class _ExchangeObserver:
    """Signs the requests of one model, and reads the usage of their answers."""

    def __init__(self, wire: WireFormat, model: str, credentials: CloudCredentials | None) -> None:
        self._wire: WireFormat = wire
        self._model = model
        self._credentials = credentials

    def on_request(self, request: SdkRequest) -> Callable[[], None]:
        if self._credentials is not None:
            self._credentials.sign(request)
        exchange = current_exchange.get(None)
        return ignore_sending if exchange is None else exchange.mark_sent

    def on_response(self, response: SdkResponse) -> AnswerReader:
        meter = UsageReader(self._wire, self._model)
        exchange = current_exchange.get(None)
        if exchange is not None:
            exchange.add_response(response, meter)
        return _MeteredAnswer(meter, exchange)


class _MeteredAnswer:
    def __init__(self, meter: UsageReader, exchange: Exchange | None) -> None:
        self._meter = meter
        self._exchange = exchange

    def read(self, piece: bytes) -> None:
        if self._exchange is not None:
            self._exchange.add_chunk(piece)
        self._meter.feed(piece)
        self._check_depth()

    def end(self) -> None:
        self._meter.close()
        self._check_depth()

    def _check_depth(self) -> None:
        if self._meter.too_deep:
            raise UnreadableAnswer("The answer is nested too deeply.")


class WireClient(msgspec.Struct, frozen=True):
    model: "Any"
    pool: "Any"


def open_wire_client(name: ModelName, wire: WireFormat, url: str, key: str, terms: ExchangeTerms) -> WireClient:
    """Import the provider's library, which takes seconds, and create its client. No connection is opened."""
    observer = _ExchangeObserver(wire, name.model, terms.credentials)
    pool = open_sdk_pool(url, observer, connect_timeout=terms.connect_timeout, max_bytes=terms.max_bytes)
    return WireClient(_model(name, wire, url, key or NO_KEY, pool, terms), pool)


def _model(
    name: ModelName, wire: WireFormat, url: str, key: str, pool: "AsyncClient", terms: ExchangeTerms
) -> "Model[Any]":
    match wire:
        case "openai" | "responses":
            return _openai(name, wire, url, key, pool)
        case "anthropic":
            from anthropic import AsyncAnthropic
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            client = AsyncAnthropic(api_key=key, base_url=url, max_retries=0, timeout=None, http_client=pool)
            client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            return AnthropicModel(name.model, provider=AnthropicProvider(anthropic_client=client))
        case "google":
            # The address of a cloud includes the version.
            return _google(name, url, key, pool, version="" if terms.credentials else None)


def _openai(name: ModelName, wire: WireFormat, url: str, key: str, pool: "AsyncClient") -> "Model[Any]":
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    client = AsyncOpenAI(api_key=key, admin_api_key="", base_url=url, max_retries=0, timeout=None, http_client=pool)
    _forget_environment(client)
    provider = (
        OpenAIProvider(openai_client=client)
        if name.provider == "openai"
        else OpenAICompatibleProvider(name.provider, openai_client=client)
    )
    if wire == "responses":
        return OpenAIResponsesModel(name.model, provider=provider, profile=_make_reasoning_profile(name))
    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=uses_new_limit(name))
    return OpenAIChatModel(name.model, provider=provider, profile=profile)


_NEWER_MODELS: Final = re.compile(r"gpt-(?:[6-9]|[1-9]\d)(?!\d)(?!.*-chat)")
"""Models of OpenAI that all reason and cache up to marks, also if the library does not know them yet."""


def _make_reasoning_profile(name: ModelName) -> "ModelProfile | None":
    """Describe how a model of OpenAI reasons, also one behind a gateway or newer than the library; None for others.

    A newer one is sent only the efforts that nearly all of its kind accept.
    """
    from pydantic_ai.profiles import merge_profile
    from pydantic_ai.profiles.openai import OpenAIModelProfile, openai_model_profile

    model = name.model.rpartition("/")[2]
    if not model.startswith(_OWN_MODELS) or model.startswith("gpt-oss"):
        return None
    profile = openai_model_profile(model)
    if profile.get("supports_thinking") or _NEWER_MODELS.match(model) is None:
        return profile
    newer = OpenAIModelProfile(
        supports_thinking=True,
        thinking_enabled_by_default=True,
        thinking_always_enabled=True,
        openai_supports_reasoning=True,
        openai_supports_encrypted_reasoning_content=True,
        openai_supports_prompt_cache_breakpoints=True,
        openai_reasoning_efforts=frozenset(("low", "medium", "high")),
    )
    return merge_profile(profile, newer)


def _forget_environment(client: "AsyncOpenAI") -> None:
    client.organization = client.project = None
    client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def uses_new_limit(name: ModelName) -> bool:
    """Return True if a model's output limit is called `max_completion_tokens`: a server may ignore an unknown name."""
    model = name.model.rpartition("/")[2]
    return name.provider == "openai" or (model.startswith(_OWN_MODELS) and not model.startswith("gpt-oss"))


def _google(name: ModelName, url: str, key: str, pool: "AsyncClient", *, version: str | None = None) -> "Model[Any]":
    from google.genai.client import Client
    from google.genai.types import HttpOptions, HttpRetryOptions
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    class OneRequest(GoogleModel):
        """Sends one request. By default the SDK follows continuation tokens."""

        async def _build_content_and_config(self, *args: Any, **kwargs: Any) -> Any:
            build: Any = super()._build_content_and_config  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            contents, config = await build(*args, **kwargs)
            config["automatic_continuation"] = False
            return contents, config

    tls = make_tls_context(uses_environment=True)
    options = HttpOptions(
        base_url=url,
        api_version=version,
        httpx_async_client=pool,
        # For other clients that the library creates and that are never used.
        client_args={"verify": tls},
        async_client_args={"verify": tls, "ssl": tls},
        retry_options=HttpRetryOptions(attempts=1),
    )
    client = Client(vertexai=False, api_key=key, http_options=options)
    return OneRequest(name.model, provider=GoogleProvider(client=client))


_THINKING_BUDGETS: Final[Mapping[ThinkingEffort, int]] = {"off": 0, "low": 2048, "medium": 10_000, "high": 16_384}
"""Maximum thinking tokens of Anthropic's older models, which are part of the output."""


def choose_thinking(effort: ThinkingEffort | None, prompt: Prompt) -> ThinkingEffort | None:
    """Choose the thinking effort of a model of Anthropic for this request.

    None directly after tool results: the model would have to be sent its earlier thoughts, which are not kept. None
    either if the thinking budget does not fit into the output limit.
    """
    has_tool_results = any(isinstance(part, ToolResult) for message in prompt.messages[-1:] for part in message.parts)
    fits_limit = effort is not None and prompt.max_output_tokens > _THINKING_BUDGETS[effort]
    return effort if fits_limit and not has_tool_results else None


def find_native_form(prompt: Prompt, name: str, profile: Mapping[str, Any], wire: WireFormat) -> ToolSpec | None:
    """Find the tool whose schema the provider can enforce for the answer. None if it cannot.

    Google's models take either a schema or tools.
    """
    if not name or not profile.get("supports_json_schema_output", False):
        return None
    if wire == "google" and len(prompt.tools) > 1:
        return None
    return next((spec for spec in prompt.tools if spec.name == name), None)


_PROVIDER_TOOLS: Final[Mapping[WireFormat, tuple[ProviderToolName, ...]]] = {
    "openai": (),
    "responses": (),
    "anthropic": ("web_search", "code_execution"),
    "google": ("code_execution",),
}
"""Tools that a provider can run. Google searches without a limit, so its searches cannot be held."""


def explain_missing_tools(model: ModelName, wire: WireFormat, tools: Iterable[ProviderTool]) -> str:
    """Describe why a model cannot use tools of its provider. Empty if it can."""
    missing = [tool.name for tool in tools if tool.name not in _PROVIDER_TOOLS[wire]]
    if not missing:
        return ""
    available = join_names(_PROVIDER_TOOLS[wire]) or "none"
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


def make_message_settings(prompt: Prompt, lifetime: CacheLifetime | None) -> dict[str, Any]:
    """Make the settings of Anthropic's protocol. It caches only up to marks, and for the lifetime of each.

    Tools and system text are constant in a session, so their ends are marks. All have one lifetime: a mark of minutes
    before one of an hour is rejected.
    """
    settings: dict[str, Any] = {}
    if lifetime:
        settings |= {"anthropic_cache_tool_definitions": lifetime, "anthropic_cache_instructions": lifetime}
    if prompt.provider_tools:
        # Otherwise its newer models search from code that runs at the provider, even if that is not declared.
        settings["anthropic_web_tools_allowed_callers"] = ["direct"]
    return settings


def make_response_settings(*, can_mark: bool, marks_cache: bool) -> dict[str, Any]:
    """Make the settings of the Responses protocol: nothing is stored, nor compared with a stored answer.

    A model that caches up to marks sets one by default at the very end, after what is true only for this request: what
    it wrote there would be paid for and never read. So it gets only the marks of the history, or none.
    """
    settings: dict[str, Any] = {"openai_store": False, "openai_prompt_cache_diagnostics": False}
    if can_mark:
        settings["openai_prompt_cache_options"] = {"mode": "explicit"}
    if marks_cache:
        settings["openai_cache_instructions"] = True
    return settings


def make_cache_key(prompt: Prompt) -> str:
    """Make the key by which OpenAI finds the machine that has cached the beginning of a prompt.

    It is the same for all requests of a session, and for sessions that begin alike. It contains no text: the digest is
    of what the same request contains anyway, masked and without personal data where that is hidden.
    """
    parts = prompt.messages[0].parts if prompt.messages else ()
    texts = [part.text for part in parts if isinstance(part, Text) and part.reason != VOLATILE]
    return sha256(encode_body("\0".join((prompt.system, *texts)))).hexdigest()[:32]


MAX_QUOTED_LENGTH: Final = 300
MAX_EXCERPT_BYTES: Final = 4096
"""Most that is quoted of an answer that cannot be read."""

MAX_RETRY_AFTER: Final = 24 * 3600 * SECOND
"""The maximum accepted `retry-after`."""

_TOO_LARGE: Final = 413
_MAY_PASS: Final = frozenset((408, 409, 425, 429))
_NOT_SERVED: Final = frozenset((503, 529))
_NEVER_BILLED: Final = frozenset((429, 529))
_SERVER_ERRORS: Final = 500
_SPACE: Final = re.compile(r"\s+")
_NEEDS_PERSON: Final = {401: "Unauthorized", 402: "QuotaExceeded", 403: "Forbidden", 404: "NotFound"}
"""Statuses that a person has to resolve: a wrong key, missing credit or rights, an unknown model or address."""


def list_library_errors() -> tuple[type[Exception], ...]:
    """List every error that the library raises or passes on.

    It reads some answers without validating them; the errors that this raises mean an unreadable answer.
    """
    from pydantic_ai.exceptions import AgentRunError, UserError

    unreadable = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    return (AgentRunError, UserError, *list_sdk_errors(), *unreadable)


def translate_library_error(
    error: Exception,
    name: ModelName,
    key: str,
    exchange: "Exchange",
    *,
    url: str = "",
    is_started: bool = False,
    bills_errors: bool = False,
) -> ModelError:
    from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError, UserError

    for cause in list_causes(error):
        if is_unreadable(cause):
            return _make_bad_answer_error(name, key, exchange, cause)
    if exchange.led_elsewhere:
        sentence = f"Redirected: {name} answered with a redirect; set `base_url` to the address it redirects to"
        return ModelUnusable(sentence, billed=False)
    is_connection_lost = isinstance(error, (ModelConnectionError, *list_sdk_errors()))
    match error:
        case ModelHTTPError():
            return _status(
                error, name, key, exchange, is_started=is_started or error.in_stream, bills_errors=bills_errors
            )
        case _ if is_connection_lost and not exchange.sent:
            return ModelUnavailable(f"ConnectionFailed: {_describe_unreachable(error, name, key, url)}", billed=False)
        case _ if is_connection_lost:
            if is_started:
                return make_cut_error(name, exchange)
            return _unfinished_error(f"ConnectionLost: {name} gave no answer: {_quote_error(error, key)}", exchange)
        case ModelAPIError(provider_error_code=str()):
            return _translate_reported_error(error, name, key, exchange)
        case ModelAPIError(in_stream=True):
            return _unfinished_error(f"ProviderError: {name} broke off: {_find_provider_message(error, key)}", exchange)
        case UserError() | NotImplementedError():
            return ModelRejected(
                f"Unsendable: {name} does not support this request: {_quote_error(error, key)}", billed=False
            )
        case _:
            return _make_bad_answer_error(name, key, exchange, error)


def _translate_reported_error(error: "ModelAPIError", name: ModelName, key: str, exchange: "Exchange") -> ModelError:
    """Translate an error inside an answer whose status was a success."""
    from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelRequestRejectedError

    usage, final = exchange.usage, exchange.final
    text = f"{name} failed to answer: {_quote_error(error, key)}"
    if isinstance(error, ModelContextWindowExceededError):
        return ContextOverflow(f"ContextOverflow: {text}", billed=exchange.sent, usage=usage, final=final)
    if isinstance(error, ModelRequestRejectedError):
        return ModelRejected(f"Rejected: {text}", billed=exchange.sent, usage=usage, final=final)
    return _unfinished_error(f"ProviderError: {text}", exchange)


def _make_bad_answer_error(name: ModelName, key: str, exchange: "Exchange", error: BaseException) -> ModelUnavailable:
    """Make the error of an unreadable answer, which quotes it.

    The quote is longer than what is recorded, so that the guard masks a secret before it shortens the sentence.
    """
    reason = _tidy(str(error).partition("\n")[0], key, MAX_EXCERPT_BYTES) or type(error).__name__
    excerpt = _tidy(exchange.excerpt.decode("utf-8", "replace"), key, MAX_EXCERPT_BYTES) or "it was empty"
    sentence = f"BadAnswer: {name} sent an answer that cannot be read ({reason.removesuffix('.')}): {excerpt}"
    return _unfinished_error(sentence, exchange)


def _describe_unreachable(error: Exception, name: ModelName, key: str, url: str) -> str:
    """Describe the address that cannot be reached, the reason, and where it is configured."""
    url_parts = urlsplit(url)
    host = url_parts.netloc.rpartition("@")[2]
    location = f"{url_parts.scheme}://{host}{url_parts.path}" if host else str(name)
    remedy = f"check the server, the network, and `providers.{name.provider}.base_url` in agent.yaml"
    return f"cannot reach {location} for {name} ({find_system_reason(error) or _quote_error(error, key)}): {remedy}"


def has_unreadable_reasoning(error: Exception) -> bool:
    """Return True if a provider rejected reasoning that it did not encrypt itself, or not for this account."""
    match getattr(error, "body", None):
        case {"code": "invalid_encrypted_content"} | {"error": {"code": "invalid_encrypted_content"}}:
            return True
        case _:
            return False


def make_cut_error(name: ModelName, exchange: "Exchange") -> ModelUnavailable:
    """Make the error for an answer that ended before it was complete, even if the connection was closed cleanly."""
    return _unfinished_error(f"CutStream: the answer of {name} ended before it was complete", exchange)


def _unfinished_error(sentence: str, exchange: "Exchange") -> ModelUnavailable:
    # A report without output does not count for an answer that had started.
    is_final = exchange.final and exchange.usage is not None and exchange.usage.output_tokens > 0
    return ModelUnavailable(sentence, billed=exchange.sent, usage=exchange.usage, final=is_final)


def _status(
    error: "ModelHTTPError", name: ModelName, key: str, exchange: "Exchange", *, is_started: bool, bills_errors: bool
) -> ModelError:
    """Translate a status: an outage, a problem that a person has to fix, or an invalid request."""
    from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelQuotaExceededError

    status, text = error.status_code, f"{name} answered {error.status_code}: {_find_provider_message(error, key)}"
    usage, final = exchange.usage, exchange.final
    is_billed = is_started or usage is not None or (bills_errors and status not in _NEVER_BILLED)
    if isinstance(error, ModelContextWindowExceededError) or status == _TOO_LARGE:
        return ContextOverflow(f"ContextOverflow: {text}", billed=is_billed, usage=usage, final=final)
    if isinstance(error, ModelQuotaExceededError) or status in _NEEDS_PERSON:
        kind = _NEEDS_PERSON.get(status, "QuotaExceeded")
        return ModelUnusable(f"{kind}: {text}", billed=is_billed, usage=usage, final=final)
    if status in _MAY_PASS or status >= _SERVER_ERRORS:
        retry_after = _micros(error.retry_after)
        sentence = f"{_name_passing_failure(status)}: {text}"
        return ModelUnavailable(sentence, billed=is_billed, usage=usage, final=final, retry_after=retry_after)
    return ModelRejected(f"Rejected: {text}", billed=is_billed, usage=usage, final=final)


def _name_passing_failure(status: int) -> str:
    if status == 429:  # noqa: PLR2004 - a well-known status
        return "RateLimited"
    if status in _NOT_SERVED:
        return "Overloaded"
    return "ServerError" if status >= _SERVER_ERRORS else "Conflict"


def _micros(seconds: float | None) -> int | None:
    if seconds is None or not seconds >= 0:
        return None
    return round(min(seconds * SECOND, MAX_RETRY_AFTER))


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


def _tidy(text: str, key: str, limit: int = MAX_QUOTED_LENGTH) -> str:
    masked_text = text.replace(key, "***") if key else text
    return shorten(_SPACE.sub(" ", clean(masked_text)).strip(), limit)


PROBE_TIMEOUT_SECONDS: Final = 3.0
_PROBES: Final[Mapping[WireFormat, tuple[str, Mapping[str, str]]]] = {
    "openai": ("/models", {"Authorization": "Bearer {key}"}),
    "responses": ("/models", {"Authorization": "Bearer {key}"}),
    "anthropic": ("/v1/models", {"x-api-key": "{key}", "anthropic-version": "2023-06-01"}),
    "google": ("/v1beta/models", {"x-goog-api-key": "{key}"}),
}
"""Where each kind of provider lists its models, and the headers with the key."""


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
        self._has_cache_keys = wire == "responses" or (name.provider == "openai" and base_url is None)
        url_parts = urlsplit(url)
        # Behind one host there can be several gateways, each at its path.
        address = f"{url_parts.netloc.rpartition('@')[2]}{url_parts.path.rstrip('/')}"
        self._maker = f"{name} at {address}" if wire == "responses" else ""
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
        """True if the provider can cache for an hour. Only Anthropic itself is known to take that."""
        return self.wire == "anthropic" and self.name.provider == "anthropic" and self.terms.prompt_cache

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
        path, headers = _PROBES[self.wire]
        url = f"{self._url.rstrip('/')}{path}"
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
        # Only OpenAI itself is known to take marks.
        can_mark = self.wire == "anthropic" or (
            self.wire == "responses"
            and self.name.provider == "openai"
            and profile.get("openai_supports_prompt_cache_breakpoints", False)
        )
        marks_cache = can_mark and self.terms.prompt_cache
        lifetime: CacheLifetime = "1h" if prompt.long_cache and self.has_long_cache else "5m"
        effort = self._habits.thinking
        temperature = None if always_reasons(profile, effort) else self._habits.temperature
        thinking = choose_thinking(effort, prompt) if self.wire == "anthropic" else effort
        settings: dict[str, Any] = {**make_model_settings(prompt.max_output_tokens, temperature, thinking)}
        match self.wire:
            case "anthropic":
                settings |= make_message_settings(prompt, lifetime if marks_cache else None)
            case "responses":
                settings |= make_response_settings(can_mark=can_mark, marks_cache=marks_cache)
            case "openai" | "google":
                pass
        if self.terms.prompt_cache and self._has_cache_keys:
            settings["openai_prompt_cache_key"] = make_cache_key(prompt)
        return {
            "messages": shape_history(
                prompt.messages, lifetime if marks_cache else None, maker=self._maker if self._sends_reasoning else ""
            ),
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
        if self.wire == "responses":
            is_complete = exchange.finished and response.state == "complete"
            if response.finish_reason is None and (streamed or finish_reason is not None):
                response.finish_reason = "length"
        if not is_complete and (streamed or self.wire != "openai"):
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
    model: Any, request: dict[str, Any], on_text: TextListener | None, make_error: "ErrorTranslator"
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


class ErrorTranslator(Protocol):
    """Translates an error of the library. `is_started` is True if an answer had started."""

    def __call__(self, error: Exception, *, is_started: bool) -> ModelError: ...


def _find_final_usage(response: "ModelResponse", exchange: Exchange) -> Usage | None:
    """Find the usage of a complete answer. A report that is not final, or without output, does not count."""
    usage = exchange.usage if exchange.final else None
    return None if usage is not None and response.parts and not usage.output_tokens else usage
