"""The usage of a request, the prices of models, and which models run on this machine.

An unknown price is a value, not an error, so that no caller can overlook it. Local models are free unless they have a
price, and their prompts stay on this machine. A URL is only the first hop of a request: a local gateway may forward it
to a provider that charges. So a model is local only if its provider runs models itself, at an address of this machine,
and the model is not one that only its maker hosts.
"""

import re
from decimal import Decimal
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, Literal, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

import msgspec

_MODEL_NAME = re.compile(r"([^\s:/]+)[:/](\S|\S.*\S)")


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The tokens of one request; `input_tokens` includes those that were read from or written to a cache.

    `cache_write_1h_tokens` is the part of `cache_write_tokens` that is cached for an hour instead of minutes.
    `audio_tokens` and `audio_cached_tokens` are the audio part of the input, the latter read from a cache. A
    contradictory report is rejected: a wire treats it as missing, and the request is settled at its hold.

    `surcharge_percent` is added to the price of all tokens. `reported_cost` is what the provider says that it charged,
    in micro-dollars. `answered_by` is the model that answered, if another one was asked for. `unpriced` names what has
    no known price: such a request costs at least its hold.
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
    surcharge_percent: int = 0
    reported_cost: int = 0
    answered_by: str = ""
    unpriced: str = ""

    def __post_init__(self) -> None:
        cache_read, cache_write, input_tokens = self.cache_read_tokens, self.cache_write_tokens, self.input_tokens
        if input_tokens < 0 or self.output_tokens < 0 or cache_read < 0 or cache_write < 0:
            raise ValueError(f"Token counts must not be negative: {self}.")
        if cache_read + cache_write > input_tokens:
            raise ValueError(f"Cached tokens exceed the input tokens: {self}.")
        if self.has_extras:
            self._check_extras()

    def _check_extras(self) -> None:
        hour_writes, uncached_audio, cached_audio = (
            self.cache_write_1h_tokens,
            self.audio_tokens,
            self.audio_cached_tokens,
        )
        if not 0 <= hour_writes <= self.cache_write_tokens or self.web_searches < 0 or self.code_executions < 0:
            raise ValueError(f"Tokens cached for an hour exceed all cached tokens, or a count is negative: {self}.")
        if uncached_audio < 0 or cached_audio < 0 or uncached_audio + cached_audio > self.input_tokens:
            raise ValueError(f"Audio tokens exceed the input tokens, or a count is negative: {self}.")

    @property
    def has_extras(self) -> bool:
        """True if the request has costs in addition to plain tokens."""
        return bool(
            self.cache_write_1h_tokens
            or self.web_searches
            or self.code_executions
            or self.audio_tokens
            or self.audio_cached_tokens
            or self.surcharge_percent
        )

    @property
    def uncached(self) -> int:
        """The tokens that count towards token budgets: all except input read from a cache."""
        return self.input_tokens - self.cache_read_tokens + self.output_tokens


class ModelName(msgspec.Struct, frozen=True):
    provider: str
    model: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `provider:model` or `provider/model`; everything after the first separator is the model."""
        match = _MODEL_NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} does not name a provider and a model. "
                "Write provider:model, as in anthropic:claude-sonnet-5-5."
            )
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return _join_name(self.provider, self.model)


@lru_cache(maxsize=256)
def _join_name(provider: str, model: str) -> str:
    return f"{provider}:{model}"


class Price(msgspec.Struct, frozen=True):
    """A configured price, in dollars per million tokens, and per thousand web searches and code executions.

    Cached tokens without a configured figure cost the same as plain input; cache writes of Claude models, a quarter
    more. Tokens cached for an hour, audio, web searches and code executions have no price without a figure.
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
                raise ValueError(f"A price must be a number of dollars from 0 up, not {figure}.")


FREE_PRICE: Final = Price(Decimal(0), Decimal(0))


UnknownPrice = Literal["refuse", "dearest"]
"""What happens to a model without a known price: it is refused, or held and charged at a guess."""


class Unpriced(NamedTuple):
    """The price of a model is unknown, so while a cap applies the model must not be used.

    Not a struct: every request tests for this type, and `isinstance` is slow for a struct of another type. The maker
    may be known from the name; then its dearest price can serve as a guess.
    """

    model: ModelName
    reason: str
    maker: str = ""

    @property
    def sentence(self) -> str:
        guess = (
            f", or let a policy say `unknown_price: dearest`, which charges twice the highest price of {self.maker}"
            if self.maker
            else ""
        )
        return (
            f"Run `halter prices update`, or set the price in halter.yaml under `models`, `{self.model}`: either "
            "`price: free` or dollars per million tokens, as in `price: {input: 3.00, output: 15.00}`"
            f"{guess}. The price of {self.model} is not known: {self.reason}. Cost caps require it."
        )


class UnpricedFeature(Unpriced):
    """A request uses a feature without a price, of a model with a price."""

    @property
    def sentence(self) -> str:
        return (
            f"Leave out what has no price: {self.model} cannot serve this request: {self.reason}. "
            "Cost caps require a price."
        )


PROVIDER_TOOL_TOKENS: Final = 20_000
"""Maximum tokens that the results of one use of a provider's tool add to the input."""


class RequestExtras(msgspec.Struct, frozen=True):
    """Possible costs of a request in addition to plain tokens: hour-long caching, provider tools, and audio."""

    long_cache: bool = False
    searches: int = 0
    audio_tokens: int = 0
    code_executions: int = 0

    @property
    def uses(self) -> int:
        return self.searches + self.code_executions

    def bound_input(self, tokens: int) -> int:
        """Return the maximum input with provider tools: each use adds its results, and reads all input again."""
        return (self.uses + 1) * (tokens + self.uses * PROVIDER_TOOL_TOKENS)

    def bound_usage(self, usage: Usage) -> Usage:
        """Return the usage of a truncated answer with all tool uses that may have happened."""
        return msgspec.structs.replace(
            usage,
            web_searches=max(usage.web_searches, self.searches),
            code_executions=max(usage.code_executions, self.code_executions),
        )


class ModelPrices(Protocol):
    """The prices of one model. Amounts are micro-dollars, times are microseconds."""

    @property
    def guess(self) -> str:
        """The words that say that these prices are a guess; empty if they are known."""
        ...

    def cost(self, usage: Usage, at: int) -> int:
        """Return the true cost of a request at a time, rounded up once."""
        ...

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        """Return an upper bound of the cost of these tokens, however the input is split and cached."""
        ...

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, limit: int = ...) -> int:
        """Return the maximum output tokens, up to the limit, that the budget covers; 0 if none fits."""
        ...

    def covering(self, extras: RequestExtras) -> "ModelPrices | str":
        """Return these prices with bounds that include the extras, or the reason why one of them has no price."""
        ...


class PriceTable(Protocol):
    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced: ...


_CLOUD_PREFIX: Final = re.compile(
    r"(?:(?:us|us-gov|eu|apac|jp|au|ca|global)\.)?(?:anthropic|amazon|meta|mistral|openai)\."
)
_VERSION: Final = re.compile(r"(?:[-:]?(?:\d{8}|\d{4}-\d\d-\d\d|\d{4}|\d{3}|latest|v\d+))*(?::[a-z0-9]+)?")
"""What a provider adds to the name of a model: a date, a version, or a variant."""


@lru_cache(maxsize=256)
def is_same_model(asked: str, answered: str) -> bool:
    """Return True if a name is that of the asked model, perhaps with its version, maker, cloud or variant."""
    asked_name, answered_name = _simplify(asked), _simplify(answered)
    if asked_name == answered_name:
        return True
    base = re.sub(r"-latest$|:[a-z]+$", "", asked_name)
    shorter, longer = sorted((base, answered_name), key=len)
    return longer.startswith(shorter) and _VERSION.fullmatch(longer[len(shorter) :]) is not None


def _simplify(name: str) -> str:
    last_part = name.lower().rpartition("/")[2].replace("@", "-")
    return _CLOUD_PREFIX.sub("", last_part, count=1).replace(".", "-")


def compute_cost(
    usage: Usage, rates: ModelPrices, others: PriceTable, model: ModelName, base_url: str | None, at: int
) -> int:
    """Compute what a request costs: its price, that of the model that answered, or what was reported, if it is more."""
    costs = [rates.cost(usage, at), usage.reported_cost]
    if usage.answered_by:
        other_rates = others.find(ModelName(model.provider, usage.answered_by), base_url)
        costs += [] if isinstance(other_rates, Unpriced) else [other_rates.cost(usage, at)]
    return max(costs)


_IN_PROCESS: Final = frozenset(("scripted", "reflex"))
_LOCAL_ENGINES: Final = frozenset(("ollama", "llamacpp", "vllm", "lmstudio"))
"""Servers that run models themselves, on this machine unless a URL names another one."""
_HOSTED_MODEL: Final = re.compile(
    r"""
    .*[:-]cloud                              # what Ollama forwards to its own cloud service
    | (?:.*[/.])?(?:                         # what only its maker hosts, also as `us.anthropic.claude-…`
        chatgpt- | claude- | codex- | computer-use- | gemini- | gpt-?[3-9](?!all) | grok-(?:[3-9]|code|beta|vision)
        | mistral-medium | nova-(?:lite|micro|premier|pro) | o[134](?:-|$) | qwen[23.5]*-(?:max|plus|turbo)
        | sonar(?:-|$) | text-embedding-(?:3|ada)
    ).*
    """,
    re.VERBOSE,
)
_SOCKETS: Final = frozenset(("unix", "http+unix"))


def runs_locally(model: ModelName, base_url: str | None) -> bool:
    """Return whether a model runs on this machine, so that its prompts stay here."""
    if model.provider in _IN_PROCESS:
        return base_url is None
    is_local = base_url is None or is_local_address(base_url)
    return model.provider in _LOCAL_ENGINES and is_local and _HOSTED_MODEL.fullmatch(model.model.lower()) is None


def is_encrypted_or_local(url: str) -> bool:
    """Return whether the traffic to a URL is encrypted or stays on this machine."""
    return url.startswith("https://") or (url.startswith("http://") and is_local_address(url))


@lru_cache(maxsize=256)
def is_local_address(base_url: str | None) -> bool:
    """Return whether a URL is on this machine. Its server may still forward a request."""
    try:
        url = urlsplit(base_url or "")
        host = url.hostname or ""
        return url.scheme in _SOCKETS or host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
