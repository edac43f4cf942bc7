"""The usage of a model request and its price, and which models run on this machine.

An unknown price is a value, not an error, so that no caller can forget it. Local models cost nothing unless priced, and
their prompts stay here. An address is where a request goes first: a local gateway may pass it on to a provider that
bills. So a model is local only if its provider runs models itself, at an address of this machine, and the model is not
one that only its maker runs.
"""

import re
from decimal import Decimal
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

import msgspec

_MODEL_NAME = re.compile(r"([^\s:/]+)[:/](\S|\S.*\S)")


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The tokens of one request; `input_tokens` includes those that were read from or written to a cache.

    `cache_write_1h_tokens` are those of `cache_write_tokens` that are kept for an hour instead of minutes.
    `audio_tokens` and `audio_cached_tokens` are those of the input that are sound, the latter read from a cache. A
    contradictory report is rejected: a wire treats it as not reported, and the request then settles at its hold.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    web_searches: int = 0
    audio_tokens: int = 0
    audio_cached_tokens: int = 0
    code_executions: int = 0

    def __post_init__(self) -> None:
        read, write, given = self.cache_read_tokens, self.cache_write_tokens, self.input_tokens
        if given < 0 or self.output_tokens < 0 or read < 0 or write < 0:
            raise ValueError(f"A usage cannot count fewer than no tokens, but {self} does.")
        if read + write > given:
            raise ValueError(f"Cached tokens are part of the input tokens, but in {self} they are more.")
        if self.has_extras:
            self._check_extras()

    def _check_extras(self) -> None:
        kept, sound, known = self.cache_write_1h_tokens, self.audio_tokens, self.audio_cached_tokens
        if not 0 <= kept <= self.cache_write_tokens or self.web_searches < 0 or self.code_executions < 0:
            raise ValueError(f"What is cached for an hour is part of what is cached, but in {self} it is not.")
        if sound < 0 or known < 0 or sound + known > self.input_tokens:
            raise ValueError(f"Sound is part of the input tokens, but in {self} it is more.")

    @property
    def has_extras(self) -> bool:
        """Whether something was paid beside plain tokens."""
        return bool(
            self.cache_write_1h_tokens
            or self.web_searches
            or self.code_executions
            or self.audio_tokens
            or self.audio_cached_tokens
        )

    @property
    def uncached(self) -> int:
        """What token budgets count: context read from a cache is not counted again."""
        return self.input_tokens - self.cache_read_tokens + self.output_tokens


class ModelName(msgspec.Struct, frozen=True):
    provider: str
    model: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `provider:model` or `provider/model`; all that follows the first separator is the model."""
        match = _MODEL_NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"The model {text!r} does not name its provider and itself: "
                "write provider:model, as in anthropic:claude-sonnet-4-5."
            )
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return _join_name(self.provider, self.model)


@lru_cache(maxsize=256)
def _join_name(provider: str, model: str) -> str:
    return f"{provider}:{model}"


class Price(msgspec.Struct, frozen=True):
    """A price that the configuration states, in dollars per million tokens.

    Cached tokens without a figure of their own cost what plain input costs; writes of Claude models, a quarter more.
    What is cached for an hour, sound, and searches and runs of code at the provider, of which a thousand are priced,
    have no price without a figure.
    """

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    cache_write_1h: Decimal | None = None
    web_searches: Decimal | None = None
    audio: Decimal | None = None
    code_executions: Decimal | None = None

    def __post_init__(self) -> None:
        for figure in (
            self.input,
            self.output,
            self.cache_read,
            self.cache_write,
            self.cache_write_1h,
            self.web_searches,
            self.audio,
            self.code_executions,
        ):
            if figure is not None and not (figure.is_finite() and figure >= 0):
                raise ValueError(f"A price is a number of dollars from 0 up, but {figure} is not.")


FREE_PRICE: Final = Price(Decimal(0), Decimal(0))


class Unpriced(NamedTuple):
    """The price of a model is unknown: while a cap applies it must not be asked.

    Not a struct: each request asks whether its rates are one, and of a struct that takes long to deny.
    """

    model: ModelName
    reason: str

    @property
    def sentence(self) -> str:
        return (
            f"The price of {self.model} is not known: {self.reason}. No cost cap can be kept without it. "
            f"Write it into halter.yaml, under `models` and there under `{self.model}`: either `price: free` "
            "or dollars per million tokens, as in `price: {input: 3.00, output: 15.00}`."
        )


class UnpricedFeature(Unpriced):
    """A request asks for something that has no price, of a model that has one."""

    @property
    def sentence(self) -> str:
        return f"{self.model} cannot be asked this: {self.reason}. No cost cap could be kept."


PROVIDER_TOOL_TOKENS: Final = 20_000
"""What the results of one use of a provider's tool may add to the input."""


class RequestExtras(msgspec.Struct, frozen=True):
    """What a request may cost beside plain tokens: an hour's cache, uses of the provider's tools, tokens of sound."""

    long_cache: bool = False
    searches: int = 0
    audio_tokens: int = 0
    code_executions: int = 0

    @property
    def uses(self) -> int:
        return self.searches + self.code_executions

    def bound_input(self, tokens: int) -> int:
        """The most input where a provider's tools are used: each use adds its results, and all is read once more."""
        return (self.uses + 1) * (tokens + self.uses * PROVIDER_TOOL_TOKENS)

    def bound_usage(self, usage: Usage) -> Usage:
        """A usage of an answer that broke off, with all uses that may have come to pass."""
        return msgspec.structs.replace(
            usage,
            web_searches=max(usage.web_searches, self.searches),
            code_executions=max(usage.code_executions, self.code_executions),
        )


class ModelPrices(Protocol):
    """What one model costs. Amounts are micro-dollars, times are microseconds."""

    def cost(self, usage: Usage, at: int) -> int:
        """The true cost of a request made at that time, rounded up once."""
        ...

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        """An upper bound for these tokens, however the input is split and cached."""
        ...

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, max_wait: int = ...) -> int:
        """The most output, up to `at_most`, that the budget covers; 0 if not one token fits."""
        ...

    def covering(self, extras: RequestExtras) -> "ModelPrices | str":
        """The same prices with bounds that cover these too; where one has no price, why the request is refused."""
        ...


class PriceTable(Protocol):
    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced: ...


_IN_PROCESS: Final = frozenset(("scripted", "reflex"))
_LOCAL_ENGINES: Final = frozenset(("ollama", "llamacpp", "vllm", "lmstudio"))
"""Servers that run models themselves; on this machine, unless an address says otherwise."""
_HOSTED_MODEL: Final = re.compile(
    r"""
    .*[:-]cloud                              # what Ollama passes on to a service of its own
    | (?:.*[/.])?(?:                         # what only its maker runs, also as `us.anthropic.claude-…`
        chatgpt- | claude- | codex- | computer-use- | gemini- | gpt-?[3-9](?!all) | grok-(?:[3-9]|code|beta|vision)
        | mistral-medium | nova-(?:lite|micro|premier|pro) | o[134](?:-|$) | qwen[23.5]*-(?:max|plus|turbo)
        | sonar(?:-|$) | text-embedding-(?:3|ada)
    ).*
    """,
    re.VERBOSE,
)
_SOCKETS: Final = frozenset(("unix", "http+unix"))


def runs_locally(model: ModelName, base_url: str | None) -> bool:
    """Whether a model runs on this machine, so that its prompts stay here."""
    if model.provider in _IN_PROCESS:
        return base_url is None
    reached_here = base_url is None or is_local_address(base_url)
    return model.provider in _LOCAL_ENGINES and reached_here and _HOSTED_MODEL.fullmatch(model.model.lower()) is None


def is_encrypted_or_local(url: str) -> bool:
    """Whether nobody on the way can read what is sent to an address."""
    return url.startswith("https://") or (url.startswith("http://") and is_local_address(url))


@lru_cache(maxsize=256)
def is_local_address(base_url: str | None) -> bool:
    """Whether an address is on this machine. It may still forward a request."""
    try:
        parts = urlsplit(base_url or "")
        host = parts.hostname or ""
        return parts.scheme in _SOCKETS or host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
