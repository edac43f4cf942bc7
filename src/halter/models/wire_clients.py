"""Connections to providers. Everything that a provider's SDK would do on its own is switched off here.

- It retries nothing: only who holds the money may ask twice.
- It has no deadline but for the connection itself: the guard cancels. A connection that does not come about in time is
  given up here, because a request that was never sent costs nothing.
- It sends nothing that it finds in the environment: a key, an organisation or a header that stands there was not meant
  for an address that an agent's file names. Only the way out, a proxy and its certificates, is taken from there.
- It does not go on with an answer by itself: that would be a second request that nobody has held money for.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.core.here import on_this_machine
from halter.core.mind import WireFormat
from halter.core.usage import ModelName
from halter.models.wire_exchange import Terms, current_exchange
from halter.models.wire_usage import Meter

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI
    from pydantic_ai.models import Model
    from pydantic_ai.settings import ModelSettings

NO_KEY: Final = "no-key"
"""What is sent where no key is needed: the SDKs insist on one, and look for it in the environment otherwise."""

_OWN_MODELS: Final = ("gpt-", "o1", "o3", "o4", "chatgpt-")
_SENDING: Final = ".send_request_headers.started"


async def _note_request(connecting: float, request: "httpx2.Request") -> None:
    """Watch for the moment at which a request leaves, and bound the time until then."""
    current = current_exchange.get(None)

    async def trace(event: str, about: Mapping[str, Any]) -> None:
        # What a proxy is asked before it lets anything through is not the request.
        if current is not None and event.endswith(_SENDING) and about["request"].method != b"CONNECT":
            current.sent = True

    allowed = {**request.extensions.get("timeout", {}), "connect": connecting}
    request.extensions = {**request.extensions, "timeout": allowed, "trace": trace}


async def _note_response(wire: WireFormat, largest: int, response: "httpx2.Response") -> None:
    meter = Meter(wire)
    current = current_exchange.get(None)
    if current is not None:
        current.answered(response, meter)
    decoder = response._get_content_decoder()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    response._decoder = _Bounded(decoder, largest, meter)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class _Bounded:
    """Unpacks an answer only as far as any answer goes: a server may send for ever, and little may unpack to much."""

    def __init__(self, decoder: "Any", largest: int, meter: Meter) -> None:
        self._decoder = decoder
        self._left = largest
        self._meter = meter

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Unpack what came."""
        yield from map(self._counted, self._decoder.decode(data))

    def flush(self) -> Iterator[bytes]:
        """Unpack the rest."""
        yield from map(self._counted, self._decoder.flush())
        self._meter.close()

    def _counted(self, piece: bytes) -> bytes:
        import httpx2

        self._left -= len(piece)
        if self._left < 0:
            raise httpx2.DecodingError("The answer is longer than any answer is.")
        self._meter.feed(piece)
        return piece


class Connection(msgspec.Struct, frozen=True):
    """A model of the wires' library, and the pool of connections below it."""

    model: "Any"
    pool: "Any"


def connect(name: ModelName, wire: WireFormat, url: str, key: str, terms: Terms) -> Connection:
    """Make what is needed to reach a model. This imports the libraries, which takes seconds, and opens nothing."""
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    hooks = {
        "request": [partial(_note_request, terms.connecting)],
        "response": [partial(_note_response, wire, terms.largest)],
    }
    # No proxy stands between this machine and itself.
    outside = not on_this_machine(url)
    pool = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=outside, event_hooks=hooks)
    return Connection(_model(name, wire, url, key or NO_KEY, pool), pool)


def _model(name: ModelName, wire: WireFormat, url: str, key: str, pool: "httpx2.AsyncClient") -> "Model[Any]":
    match wire:
        case "openai":
            return _openai(name, url, key, pool)
        case "anthropic":
            return _anthropic(name, url, key, pool)
        case "google":
            return _google(name, url, key, pool)


def _openai(name: ModelName, url: str, key: str, pool: "httpx2.AsyncClient") -> "Model[Any]":
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    client = AsyncOpenAI(api_key=key, admin_api_key="", base_url=url, max_retries=0, timeout=None, http_client=pool)
    _forget_environment(client)
    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=_new_limit(name))
    if name.provider == "openai":
        return OpenAIChatModel(name.model, provider=OpenAIProvider(openai_client=client), profile=profile)
    other = OpenAICompatibleProvider(name.provider, openai_client=client)
    return OpenAIChatModel(name.model, provider=other, profile=profile)


def _forget_environment(client: "AsyncOpenAI") -> None:
    client.organization = client.project = None
    client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _new_limit(name: ModelName) -> bool:
    """Tell by which name a server knows the most that may be written: one that it does not know, it may ignore."""
    model = name.model.rpartition("/")[2]
    return name.provider == "openai" or (model.startswith(_OWN_MODELS) and not model.startswith("gpt-oss"))


def _anthropic(name: ModelName, url: str, key: str, pool: "httpx2.AsyncClient") -> "Model[Any]":
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(api_key=key, base_url=url, max_retries=0, timeout=None, http_client=pool)
    client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return AnthropicModel(name.model, provider=AnthropicProvider(anthropic_client=client))


def _google(name: ModelName, url: str, key: str, pool: "httpx2.AsyncClient") -> "Model[Any]":
    from google.genai.client import Client
    from google.genai.types import HttpOptions, HttpRetryOptions
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    class OneRequest(GoogleModel):
        """A model that is asked once: the SDK follows continuation tokens unless it is told not to."""

        async def _build_content_and_config(self, *args: Any, **kwargs: Any) -> Any:
            build: Any = super()._build_content_and_config  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            contents, config = await build(*args, **kwargs)
            config["automatic_continuation"] = False
            return contents, config

    options = HttpOptions(base_url=url, httpx_async_client=pool, retry_options=HttpRetryOptions(attempts=1))
    client = Client(vertexai=False, api_key=key, http_options=options)
    return OneRequest(name.model, provider=GoogleProvider(client=client))


def settings(wire: WireFormat, max_output_tokens: int, temperature: float | None) -> "ModelSettings":
    """Say how an answer is to be made. Anthropic keeps in its cache only what it is told to, here for minutes."""
    made: dict[str, Any] = {"max_tokens": max_output_tokens}
    if temperature is not None:
        made["temperature"] = temperature
    if wire == "anthropic":
        made |= dict.fromkeys(_KEPT_BY_ANTHROPIC, True)
    return made  # pyright: ignore[reportReturnType]


_KEPT_BY_ANTHROPIC: Final = (
    "anthropic_cache_tool_definitions",
    "anthropic_cache_instructions",
    "anthropic_cache_messages",
)
