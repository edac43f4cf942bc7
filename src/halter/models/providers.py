"""A model by its name: its provider, address, key and price.

A provider that an agent's files describe is reached as they say, with the key that they name: a key in the environment
belongs to the provider's own address and is sent nowhere else.

Prices come from the configuration, else from the bundled table of genai-prices. A model on this machine is free. Any
other costs what the table says: at a seller's own address that seller's price, behind a gateway the price where it is
sold. An entry is compiled once into a `Tariff` of integers, because a hold is computed at every step: dollars per
million tokens are micro-dollars per token, and times SCALE every rate of the table is an integer, so that nothing is
rounded before the end.

Nothing is fetched and no updater runs. Batch and priority tiers are not priced. A hold covers cache writes that live
for minutes, which is what the wires request; `Tariff.covering` makes it cover what a request has besides: cache writes
that live for an hour, searches, and sound.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from halter.core.agent_spec import KNOWN_PROVIDERS, KnownProvider, Provider, WireFormat
from halter.core.clock import DAY
from halter.core.errors import ConfigError, explain_extra
from halter.core.text import join_names, shorten
from halter.core.usage import (
    FREE_PRICE,
    ModelName,
    ModelPrices,
    Price,
    RequestExtras,
    Unpriced,
    Usage,
    is_local_address,
    runs_locally,
)
from halter.models.cloud_credentials import FindKey, make_cloud_credentials
from halter.models.wire import NO_HABITS, ExchangeTerms, ModelHabits, WireModel

if TYPE_CHECKING:
    from genai_prices.types import ConditionalPrice, ModelInfo, ModelPrice, TieredPrices
    from genai_prices.types import Provider as Seller

    Figure = Decimal | TieredPrices | None

SCALE: Final = 10**18
MARGIN: Final = Decimal("0.02")
NO_LIMIT: Final = 10**9
"""More tokens than any model answers with."""

_TABLE_NAMES: Final = MappingProxyType(
    {
        "gemini": "google",
        "vertex": "google",
        "vertex_ai": "google",
        "bedrock": "aws",
        "azure_ai": "azure",
        "xai": "x-ai",
        "moonshot": "moonshotai",
        "together_ai": "together",
        "fireworks_ai": "fireworks",
    }
)
"""Sellers that have another name in the table than in configurations."""
_COMPARED: Final = 10_000
"""Prices are compared by requests of these sizes, input and output."""
_LAST: Final = 1 << 60
_ALWAYS: Final = -(1 << 63)
_EPOCH: Final = date(1970, 1, 1)
_NOTHING: Final = Decimal(0)


class ExtraFigures(NamedTuple):
    """What may have no price, in dollars per million tokens and per thousand searches and runs of code."""

    cache_write_1h: Decimal | None = None
    thousand_searches: Decimal | None = None
    audio: Decimal | None = None
    audio_cached: Decimal | None = None
    thousand_code_executions: Decimal | None = None


NO_EXTRAS: Final = ExtraFigures()


class Tier(msgspec.Struct, frozen=True):
    """The rates above some number of input tokens, in micro-dollars × SCALE; None where there is no price."""

    above: int
    plain: int
    cache_read: int
    cache_write: int
    output: int
    request: int
    cache_write_1h: int | None = None
    search: int | None = None
    audio: int | None = None
    audio_cached: int | None = None
    code_execution: int | None = None

    def cost(self, plain: int, read: int, write: int, output: int) -> int:
        return (
            plain * self.plain + read * self.cache_read + write * self.cache_write + output * self.output + self.request
        )

    def cost_of_extras(self, usage: Usage) -> int:
        """What is paid beside plain tokens. Without a price, the dearest cache and nothing for all else."""
        longer = self.cache_write if self.cache_write_1h is None else self.cache_write_1h
        extra = usage.cache_write_1h_tokens * max(0, longer - self.cache_write)
        extra += usage.audio_tokens * max(0, (self.audio or 0) - self.plain)
        extra += usage.audio_cached_tokens * max(0, (self.audio_cached or self.audio or 0) - self.cache_read)
        extra += usage.code_executions * (self.code_execution or 0)
        return extra + usage.web_searches * (self.search or 0)


class PricePeriod(msgspec.Struct, frozen=True):
    """Rates and when they apply: from a moment on, or daily between two times of day.

    The highest tier comes first. Beside each tier is its ceiling, which charges all input at the highest rate of this
    tier and of those below: a request that is counted into a tier may turn out smaller, and may be cached in any way.
    """

    tiers: tuple[Tier, ...]
    ceilings: tuple[Tier, ...]
    since: int = _ALWAYS
    daily: tuple[int, int] | None = None

    def holds(self, at: int) -> bool:
        if self.daily is None:
            return at >= self.since
        start, end = self.daily
        now = at % DAY
        return start <= now < end if start <= end else now >= start or now < end


class Tariff(msgspec.Struct, frozen=True):
    """The rates of one model. The first period that applies counts; the last one always does.

    Of `audio_tokens` that were sent and are not reported, all that may be among the input are charged as sound.
    """

    periods: tuple[PricePeriod, ...]
    loading: tuple[int, int]
    audio_tokens: int = 0

    def covering(self, extras: RequestExtras) -> "Tariff | str":
        return _extend_bound(self, extras)

    def cost(self, usage: Usage, at: int) -> int:
        if self.audio_tokens and not (usage.audio_tokens or usage.audio_cached_tokens):
            sound = min(self.audio_tokens, usage.input_tokens)
            usage = msgspec.structs.replace(usage, audio_tokens=sound)
        period = self.periods[-1]
        for each in self.periods[:-1]:
            if each.holds(at):
                period = each
                break
        read, write = usage.cache_read_tokens, usage.cache_write_tokens
        tier = period.tiers[0]
        if usage.input_tokens <= tier.above:
            tier = _find_tier(period.tiers, usage.input_tokens)
        exact = tier.cost(usage.input_tokens - read - write, read, write, usage.output_tokens)
        if usage.has_extras:
            exact += tier.cost_of_extras(usage)
        return -(-exact // SCALE)

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        """The most that a request of these tokens can cost, also if it is billed up to a day later."""
        if max_output_tokens < 0:
            raise ValueError(f"A request cannot have {max_output_tokens} output tokens.")
        dearest = 0
        for ceiling in self._ceilings(input_tokens, at):
            cost = input_tokens * ceiling.plain + max_output_tokens * ceiling.output + ceiling.request
            dearest = max(dearest, cost)
        numerator, denominator = self.loading
        return -(-dearest * numerator // (denominator * SCALE))

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, max_wait: int = NO_LIMIT) -> int:
        """The largest output, up to `at_most`, whose bound the budget covers; 0 if not one token fits."""
        numerator, denominator = self.loading
        capacity = budget_micros * denominator * SCALE // numerator
        fitting = (_output_in(capacity, ceiling, input_tokens) for ceiling in self._ceilings(input_tokens, at))
        return max(0, min(max_wait, *fitting))

    def _ceilings(self, input_tokens: int, at: int) -> list[Tier]:
        """What may apply when the request is billed: any time of day, and what starts within a day."""
        found: list[Tier] = []
        for period in self.periods:
            if period.since <= at + DAY:
                highest = period.ceilings[0]
                found.append(highest if input_tokens > highest.above else _find_tier(period.ceilings, input_tokens))
            if period.since <= at and period.daily is None:
                break
        return found


def _find_tier(tiers: Iterable[Tier], input_tokens: int) -> Tier:
    for tier in tiers:
        if input_tokens > tier.above:
            return tier
    raise ValueError(f"A request cannot have {input_tokens} input tokens.")


def _output_in(capacity: int, ceiling: Tier, input_tokens: int) -> int:
    remaining = capacity - ceiling.cost(input_tokens, 0, 0, 0)
    if ceiling.output:
        return remaining // ceiling.output
    return NO_LIMIT if remaining >= 0 else 0


@lru_cache(maxsize=1024)
def _extend_bound(tariff: Tariff, extras: RequestExtras) -> Tariff | str:
    periods: list[PricePeriod] = []
    for period in tariff.periods:
        if extras.long_cache and any(tier.cache_write_1h is None for tier in period.tiers):
            return "it caches for an hour, and what that costs is not listed"
        if extras.searches and any(tier.search is None for tier in period.tiers):
            return "it searches the web, and what that costs is not listed"
        if extras.code_executions and any(tier.code_execution is None for tier in period.tiers):
            return (
                "its provider may run code for it, and what that costs is not listed; write that into halter.yaml, as "
                "`code_executions` of its `price`, in dollars for a thousand runs"
            )
        if extras.audio_tokens and any(tier.audio is None for tier in period.tiers):
            return (
                "it is given audio, which it does not take, or whose price is not listed; write that into halter.yaml, "
                "as `audio` of its `price`"
            )
        ceilings = [
            _extend_ceiling(ceiling, tier, extras)
            for ceiling, tier in zip(reversed(period.ceilings), reversed(period.tiers), strict=True)
        ]
        highest = tuple(reversed(tuple(accumulate(ceilings, _dearer_tier))))
        periods.append(msgspec.structs.replace(period, ceilings=highest))
    return Tariff(tuple(periods), tariff.loading, extras.audio_tokens)


def _extend_ceiling(ceiling: Tier, tier: Tier, extras: RequestExtras) -> Tier:
    rate = max(ceiling.plain, (tier.cache_write_1h or 0) if extras.long_cache else 0)
    beside = extras.searches * (tier.search or 0) + extras.audio_tokens * max(0, (tier.audio or 0) - rate)
    beside += extras.code_executions * (tier.code_execution or 0)
    return Tier(ceiling.above, rate, rate, rate, ceiling.output, ceiling.request + beside)


class Prices:
    """The price table of a fleet; each model is looked up once.

    `own` maps `provider:model`, or a provider's name for all its models, to the configured price.
    """

    def __init__(self, own: Mapping[str, Price] = MappingProxyType({}), margin: Decimal = MARGIN) -> None:
        if not (margin.is_finite() and margin >= 0):
            raise ValueError(f"The margin of a hold is a share from 0 up, but {margin} is not.")
        self._own = {
            (str(ModelName.parse(name)) if ":" in name or "/" in name else name): price for name, price in own.items()
        }
        self._margin = margin
        self._found: dict[tuple[ModelName, str | None], Tariff | Unpriced] = {}

    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        """Look up a model, by its address if that is not the provider's default.

        The first lookup imports the bundled table, which takes a quarter of a second: do it before work starts.
        """
        found = self._found.get((model, base_url))
        if found is None:
            found = self._found[model, base_url] = self._look_up(model, base_url)
        return found

    def _look_up(self, model: ModelName, base_url: str | None) -> Tariff | Unpriced:
        own = self._own.get(str(model)) or self._own.get(model.provider)
        if own is not None:
            return compile_stated_price(_with_cache_write(own, model), self._margin)
        if runs_locally(model, base_url):
            return compile_stated_price(FREE_PRICE, self._margin)
        return _find_listed_tariff(model, base_url, self._margin)


CLAUDE_CACHE_WRITE: Final = Decimal("1.25")
"""What it costs, as a multiple of plain input, to write into a cache that lives for minutes."""


def _with_cache_write(price: Price, model: ModelName) -> Price:
    """Charge cache writes of a Claude model with their surcharge, also if the stated price leaves them out."""
    claude = model.provider == "anthropic" or "claude" in model.model.lower()
    if price.cache_write is not None or not claude:
        return price
    return msgspec.structs.replace(price, cache_write=price.input * CLAUDE_CACHE_WRITE)


def compile_stated_price(price: Price, margin: Decimal = MARGIN) -> Tariff:
    sound = _NOTHING if price.audio is None and price.input == price.output == 0 else price.audio
    extras = ExtraFigures(price.cache_write_1h, price.web_searches, sound, None, price.code_executions)
    tier = _tier(-1, price.input, price.cache_read, price.cache_write, price.output, extras=extras)
    return Tariff((_period([tier]),), _loading(margin))


def compile_listed_price(model: "ModelInfo", margin: Decimal = MARGIN, *, of_google: bool = False) -> Tariff | None:
    """Compile an entry of the bundled table; None if it lacks a rate for input or output.

    The table leaves out zeros, so an entry without rates may be free or of unknown price. For a model
    `of_google`, sound without a rate of its own costs what other input does, and running code nothing.
    """
    from genai_prices.types import ConditionalPrice, ModelPrice

    rules = model.prices
    if isinstance(rules, ModelPrice):
        rules = [ConditionalPrice(prices=rules)]
    if not rules or any(rule.prices.input_mtok is None or rule.prices.output_mtok is None for rule in rules):
        return None
    # Of several rules that hold, the last counts; if none does, the first.
    periods = [_compile_condition(rule, of_google=of_google) for rule in reversed(rules)]
    fallback = msgspec.structs.replace(periods[-1], since=_ALWAYS, daily=None)
    return Tariff((*periods, fallback), _loading(margin))


def _table() -> "list[Seller]":
    """Import the bundled table by name: a type checker would infer its 1.5 MB for minutes."""
    return import_module("genai_prices.data").providers


def _find_listed_tariff(model: ModelName, base_url: str | None, margin: Decimal) -> Tariff | Unpriced:
    providers = _table()
    seller = _seller(providers, model.provider, base_url)
    entries = _entries(providers, seller, model)
    if not entries:
        return Unpriced(model, _explain_unlisted(model, base_url, None if seller is None else seller.name))
    # All of Google's own models take sound, and code that they run is paid as tokens.
    own = {id(entry) for each in providers if each.id == "google" for entry in each.models}
    compiled = (compile_listed_price(entry, margin, of_google=id(entry) in own) for entry in entries)
    priced = [tariff for tariff in compiled if tariff is not None]
    if not priced:
        return Unpriced(model, f"the bundled price table lists {entries[0].id} without a price of its tokens")
    return max(priced, key=lambda tariff: tariff.bound(_COMPARED, _COMPARED, _LAST))


def _explain_unlisted(model: ModelName, base_url: str | None, seller: str | None) -> str:
    if seller is not None:
        return f"the bundled price table has no such model of {seller}"
    if is_local_address(base_url):
        return "an address of this machine may lead to a paid model, and the bundled price table has none of that name"
    who = f"provider {model.provider!r}" if base_url is None else f"provider at {_host(base_url)}"
    return f"the bundled price table has no {who}, and no model of that name"


@lru_cache(maxsize=256)
def find_listed_window(model: ModelName, base_url: str | None = None) -> int | None:
    providers = _table()
    entries = _entries(providers, _seller(providers, model.provider, base_url), model)
    return min((entry.context_window for entry in entries if entry.context_window), default=None)


def list_model_names(provider: str, own: Mapping[str, Price] = MappingProxyType({})) -> list[str]:
    """The models of a provider that have a price: those of the configuration, then those of the table."""
    stated = [str(name).partition(":")[2] for name in own if str(name).startswith(f"{provider}:")]
    sellers = [seller for seller in _table() if seller.id == _TABLE_NAMES.get(provider, provider)]
    listed = [model.id for seller in sellers for model in seller.models if compile_listed_price(model) is not None]
    return list(dict.fromkeys((*stated, *listed)))


def _seller(providers: Sequence["Seller"], name: str, base_url: str | None) -> "Seller | None":
    """Find who sends the bill: by the address, or without one by the name.

    Names must match exactly. The library's own lookup takes `my-openai-proxy` for OpenAI.
    """
    named = [provider for provider in providers if provider.id == _TABLE_NAMES.get(name, name)]
    if base_url is None:
        return next(iter(named), None)
    return next((seller for seller in (*named, *providers) if re.match(seller.api_pattern, base_url)), None)


def _entries(providers: "list[Seller]", seller: "Seller | None", model: ModelName) -> "list[ModelInfo]":
    """Find a model in the table: at its seller, else at every seller that its name may mean."""
    if seller is not None:
        return _find_models(providers, [seller], model.model)
    for name, spelling in _spellings(model):
        sellers = [each for each in providers if not name or each.id == name]
        if found := _find_models(providers, sellers, spelling):
            return found
    return []


def _find_models(providers: "list[Seller]", sellers: "Sequence[Seller]", spelling: str) -> "list[ModelInfo]":
    entries = (seller.find_model(spelling, all_providers=providers) for seller in sellers)
    return [entry for entry in entries if entry is not None]


def _spellings(model: ModelName) -> Iterator[tuple[str, str]]:
    """Yield the spellings of a model at gateways, each with the seller that it names, if any.

    Gateways put the seller before the model, and sometimes a tag behind it, as in `openai/gpt-5:latest`.
    """
    parts = [model.provider, *model.model.split("/")]
    splits = [(_TABLE_NAMES.get(parts[at - 1], parts[at - 1]), "/".join(parts[at:])) for at in range(1, len(parts))]
    spelled = [*splits, *(("", rest) for _, rest in splits)]
    yield from spelled
    yield from ((name, rest.rpartition(":")[0]) for name, rest in spelled if ":" in rest)


def _host(base_url: str) -> str:
    # The whole address might contain a password.
    try:
        return urlsplit(base_url).hostname or "an address without a host"
    except ValueError:
        return "an address that cannot be read"


def _compile_condition(rule: "ConditionalPrice", *, of_google: bool = False) -> PricePeriod:
    from genai_prices.types import StartDateConstraint

    tiers = _tiers(rule.prices, of_google=of_google)
    match rule.constraint:
        case None:
            return _period(tiers)
        case StartDateConstraint(start_date=day):
            return _period(tiers, since=(day - _EPOCH).days * DAY)
        case daily:
            return _period(tiers, daily=(_time_of_day(daily.start_time), _time_of_day(daily.end_time)))


def _time_of_day(moment: time) -> int:
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since_midnight = datetime.combine(_EPOCH, zoned) - datetime.combine(_EPOCH, time(tzinfo=UTC))
    return since_midnight // timedelta(microseconds=1) % DAY


def _tiers(price: "ModelPrice", *, of_google: bool = False) -> list[Tier]:
    """Compile the tiers, lowest first.

    A usage does not separate kinds of output: the highest of their rates applies.
    """
    output = (price.output_mtok, price.output_reasoning_mtok, price.output_citation_mtok)
    sound = price.input_mtok if of_google and price.input_audio_mtok is None else price.input_audio_mtok
    extras = (price.cache_write_1h_mtok, price.web_searches_kcount, sound, price.cache_audio_read_mtok)
    figures = (price.input_mtok, price.cache_read_mtok, price.cache_write_mtok, price.requests_kcount, *extras)
    return [
        _tier(
            above,
            _figure(price.input_mtok, above) or _NOTHING,
            _figure(price.cache_read_mtok, above),
            _figure(price.cache_write_mtok, above),
            max(_figure(sort, above) or _NOTHING for sort in output),
            _figure(price.requests_kcount, above) or _NOTHING,
            ExtraFigures(
                _figure(extras[0], above),
                _figure(extras[1], above),
                _figure(extras[2], above),
                _figure(extras[3], above),
                _NOTHING if of_google else None,
            ),
        )
        for above in _thresholds((*output, *figures))
    ]


def _thresholds(figures: "Iterable[Figure]") -> list[int]:
    from genai_prices.types import TieredPrices

    tiered = (figure for figure in figures if isinstance(figure, TieredPrices))
    return sorted({-1, *(tier.start for figure in tiered for tier in figure.tiers)})


def _figure(figure: "Figure", above: int) -> Decimal | None:
    from genai_prices.types import TieredPrices

    if not isinstance(figure, TieredPrices):
        return figure
    return next((tier.price for tier in reversed(figure.tiers) if tier.start <= above), figure.base)


def _tier(
    above: int,
    plain: Decimal,
    cache_read: Decimal | None,
    cache_write: Decimal | None,
    output: Decimal,
    thousand_requests: Decimal = _NOTHING,
    extras: ExtraFigures = NO_EXTRAS,
) -> Tier:
    searches, runs = _scale_extra(extras.thousand_searches), _scale_extra(extras.thousand_code_executions)
    return Tier(
        above,
        _scale_figure(plain),
        _scale_figure(plain if cache_read is None else cache_read),
        _scale_figure(plain if cache_write is None else cache_write),
        _scale_figure(output),
        _scale_figure(thousand_requests) * 1000,
        _scale_extra(extras.cache_write_1h),
        None if searches is None else searches * 1000,
        _scale_extra(extras.audio),
        _scale_extra(extras.audio_cached),
        None if runs is None else runs * 1000,
    )


def _scale_extra(figure: Decimal | None) -> int | None:
    return None if figure is None else _scale_figure(figure)


def _scale_figure(figure: Decimal) -> int:
    numerator, denominator = figure.as_integer_ratio()
    return -(-numerator * SCALE // denominator)


def _period(tiers: Sequence[Tier], since: int = _ALWAYS, daily: tuple[int, int] | None = None) -> PricePeriod:
    ceilings = accumulate((_flat(tier) for tier in tiers), _dearer_tier)
    return PricePeriod(tuple(reversed(tiers)), tuple(reversed(tuple(ceilings))), since, daily)


def _flat(tier: Tier) -> Tier:
    rate = max(tier.plain, tier.cache_read, tier.cache_write)
    return Tier(tier.above, rate, rate, rate, tier.output, tier.request)


def _dearer_tier(below: Tier, tier: Tier) -> Tier:
    rate = max(below.plain, tier.plain)
    return Tier(tier.above, rate, rate, rate, max(below.output, tier.output), max(below.request, tier.request))


def _loading(margin: Decimal) -> tuple[int, int]:
    numerator, denominator = margin.as_integer_ratio()
    return numerator + denominator, denominator


LOCAL_WINDOW: Final = 32_000
DEFAULT_WINDOW: Final = 128_000

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")
_LIBRARIES: Final = MappingProxyType({"openai": "openai", "anthropic": "anthropic", "google": "google.genai"})


class Endpoint(msgspec.Struct, frozen=True):
    wire: WireFormat
    url: str
    usual: bool


def is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def make_model(
    name: str,
    providers: Mapping[str, Provider],
    key: FindKey,
    habits: ModelHabits = NO_HABITS,
    *,
    installed: Callable[[str], bool] = is_installed,
) -> WireModel:
    parsed = _parse_model_name(name)
    described = providers.get(parsed.provider)
    place, secret = find_endpoint(parsed, providers, key)
    if not (installed("pydantic_ai") and installed(_LIBRARIES[place.wire])):
        raise ConfigError(explain_extra("models", str(parsed)))
    base_url = None if place.usual else place.url
    terms = ExchangeTerms()
    if described is not None:
        cloud = described.credentials
        terms = ExchangeTerms(
            bills_errors=described.bills_errors,
            prompt_cache=described.prompt_cache,
            credentials=cloud and make_cloud_credentials(cloud, place.url, key, installed),
        )
    return WireModel(parsed, place.wire, place.url, secret, base_url=base_url, habits=habits, terms=terms)


def find_endpoint(name: ModelName, providers: Mapping[str, Provider], key: FindKey) -> tuple["Endpoint", str]:
    """Where a model is reached, and with which key. Raises ConfigError where either is missing."""
    described = providers.get(name.provider)
    return _resolve_known(name, key) if described is None else _resolve_described(name, described, key)


@lru_cache(maxsize=256)
def estimate_window(name: ModelName, base_url: str | None = None) -> int:
    """The context window of a model: from the bundled table, else a cautious guess."""
    known = KNOWN_PROVIDERS.get(name.provider)
    own = is_local_address(base_url) or (known is not None and known.local)
    if own and runs_locally(name, base_url):
        return LOCAL_WINDOW
    return find_listed_window(name, base_url) or (LOCAL_WINDOW if own else DEFAULT_WINDOW)


def _parse_model_name(name: str) -> ModelName:
    try:
        return ModelName.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _resolve_described(name: ModelName, provider: Provider, key: FindKey) -> tuple[Endpoint, str]:
    where = f"`providers.{name.provider}`"
    return Endpoint(provider.wire, _address(provider.base_url, where), usual=False), _provider_key(name, provider, key)


def _provider_key(name: ModelName, provider: Provider, key: FindKey) -> str:
    if not provider.api_key:
        return ""
    match = _SECRET.fullmatch(provider.api_key)
    if match is None:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` is no name of a secret: "
            "keep the key out of the file and write `api_key: ${secret:NAME}`."
        )
    secret = key(match[1])
    if not secret:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` names the secret {match[1]}, which is not set: set it, "
            f"or remove the line if {name.provider} needs no key."
        )
    return secret


def _resolve_known(name: ModelName, key: FindKey) -> tuple[Endpoint, str]:
    known = KNOWN_PROVIDERS.get(name.provider)
    if known is None:
        raise ConfigError(
            f"Unknown provider {shorten(name.provider)!r} of {shorten(str(name))!r}: {_describe(name)} "
            f"Known providers are {join_names(KNOWN_PROVIDERS)}."
        )
    moved = key(known.url_from) if known.url_from else None
    if not (moved or known.base_url):
        raise ConfigError(f"{name} has no address: set {known.url_from}, or {_describe(name)}")
    url = _address(_complete_url(moved, known), known.url_from) if moved else known.base_url
    # A local server always has its address: whether it runs on this machine is seen by that.
    return Endpoint(known.wire, url, usual=not (moved or known.local)), _given_key(name, known, url, key)


def _given_key(name: ModelName, known: KnownProvider, url: str, key: FindKey) -> str:
    for variable in known.keys:
        if secret := key(variable):
            return secret
    if known.keys and not is_local_address(url):
        variables = " or ".join(known.keys)
        raise ConfigError(f"{variables} is not set, and {name} needs a key: set it, or {_describe(name, known.wire)}")
    return ""


def _describe(name: ModelName, wire: WireFormat = "openai") -> str:
    block = f"{{wire: {wire}, base_url: https://…, api_key: '${{secret:NAME}}'}}"
    return f"describe it in the agent's file as `providers: {{{shorten(name.provider)}: {block}}}`."


def _complete_url(url: str, known: KnownProvider) -> str:
    """Complete the address of a local server that was written without its path."""
    bare = known.local and urlsplit(url).path in {"", "/"}
    return f"{url.rstrip('/')}/v1" if bare else url


def _address(url: str, where: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        # The address itself is not repeated: it might contain a password.
        raise ConfigError(f"The address in {where} cannot be used: write it like https://host/v1.")
    return url
