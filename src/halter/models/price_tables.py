"""The price tables in force: the bundled one, those fetched since, and guesses for models that no table knows.

A fetched file can be wrong or hostile, so it can only raise what is held and charged: a name is looked up in every
table since the last yes, in each as if it were alone, and the highest price counts, per unit. Which entry matches a
name first depends on all entries of its file and their order, so no entry is kept without them. Only a person's yes to
one file, by its digest, lets its lower prices and its free models count, and ends the earlier files. Each file is
checked before it is kept, more strictly than the library does that reads it.
"""

import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import cache, cached_property, reduce
from hashlib import sha256
from http import HTTPStatus
from importlib import import_module
from importlib.metadata import version
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from halter.core.clock import DAY
from halter.core.errors import ConfigError
from halter.core.text import format_count, shorten, to_one_line
from halter.core.usage import ModelName, UnknownPrice, Unpriced, is_encrypted_or_local
from halter.models.prices import ListedPrices, PriceGuess, Prices
from halter.models.sellers import TABLE_NAMES, Seller, find_listed_tariff, find_seller, read_bundled_table
from halter.models.tariffs import (
    ALWAYS,
    MARGIN,
    SCALE,
    PricePeriod,
    Tariff,
    Tier,
    compile_listed_price,
    find_tier,
    make_period,
)
from halter.net.client import HttpClient, HttpRequest
from halter.net.failures import HttpFailure
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.policy.evaluation import ResolvedPolicy

if TYPE_CHECKING:
    from genai_prices import types

GUESS_FACTOR: Final = 2
MAX_FILE_SIZE: Final = 32 * 1024 * 1024
MAX_ENTRIES: Final = 10_000
"""Four times as many as there are."""
MAX_COMPARISONS: Final = 50_000_000
"""Of names with clauses, for one file: about a minute. Half a year of the real table needs a fifth."""
MAX_SELLERS: Final = 500
MAX_CLAUSES: Final = 100_000
MAX_EARLIER_TABLES: Final = 200
"""Tables that count until a person's yes to a newer one: half a year of daily changes."""
MAX_FIGURE: Final = Decimal(100_000)
"""Dollars per million tokens. No model costs a hundredth of it."""
MAX_RULES: Final = 20
"""Prices of one model, and tiers of one price: several times as many as any model has. More take minutes to compare."""
MAX_PERIODS: Final = 3 * MAX_RULES
"""Periods and tiers of merged prices. What has more of them is charged at its highest rates at all times."""
MAX_FIGURE_LENGTH: Final = 40
MAX_PLACES: Final = 30
"""Decimal places of a price. A billion would be computed for hours."""
MAX_TIER_START: Final = 10**12
MAX_PATTERN_LENGTH: Final = 1000
MAX_MATCH_DEPTH: Final = 20
MAX_NAMED_CHANGES: Final = 200
OTHER_UNIT_FACTOR: Final = 50
"""If half of the known models cost less than a fiftieth, the file states its prices in another unit."""
FETCH_TIMEOUT_SECONDS: Final = 60
UNIT_NAMES: Final[Mapping[str, str]] = {
    "plain": "input",
    "cache_read": "cached input",
    "cache_write": "cache writes",
    "output": "output",
    "request": "requests",
    "cache_write_1h": "hour-long cache writes",
    "search": "web searches",
    "audio": "audio",
    "audio_cached": "cached audio",
    "code_execution": "code runs",
}
_PER_THOUSAND: Final = frozenset(("request", "search", "code_execution"))
_TOP: Final = re.compile(r"(?:^|[-./:])(?:pro|deep-research)(?:[-./:@]|$)")
"""Names of models that cost many times as much as the others of their maker."""
_SHUT_DOWN: Final = re.compile(r"gpt-4\.5-preview.*|gpt-4-32k.*|claude-(?:2|v1|instant|3-opus).*")
"""Models that cannot be used any more, without a mark in the table."""
_FIRST_DAY: Final = -(1 << 62) // DAY * DAY
"""A day before all prices that begin at a date."""
_NO_ADDRESS: Final = r"(?!)"
_CLAUSES: Final = frozenset(("starts_with", "ends_with", "contains", "regex", "equals", "or", "and"))


class FetchedPrices(msgspec.Struct, frozen=True):
    """What the store keeps of fetched tables: the newest file, the one that a person accepted, and those in between.

    `earlier` has the tables before the newest one and since the acceptance, as `EarlierTables`. `bundled` is the
    version of the bundled table at the acceptance: the prices of another version were not accepted. The changes are
    those of the newest file; what is `waiting` counts only after a person's yes to its `digest`.
    """

    digest: str
    source: str
    newest: bytes
    at: int = 0
    accepted: bytes = b""
    earlier: bytes = b""
    bundled: str = ""
    added: tuple[str, ...] = ()
    raised: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class EarlierTables(msgspec.Struct, frozen=True):
    """Whole tables that differ little, in the format of the file: each seller once, with each of its models once.

    A table lists its sellers by number, each with the numbers of the models that it had, in their order.
    """

    sellers: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Sequence[tuple[int, Sequence[int]]]] = ()


MISSING_PRICES: Final = FetchedPrices("", "", b"")
"""A table that the store has lost: it may have had higher prices, so no model has a price."""


class PriceTables:
    """The tables that are in force in this process. `edition` counts how often they changed."""

    def __init__(self, fetched: FetchedPrices | None = None) -> None:
        self.edition = 0
        self._layers = _Layers(fetched)

    @property
    def fetched(self) -> FetchedPrices | None:
        return self._layers.fetched

    def use(self, fetched: FetchedPrices | None) -> None:
        """Use other fetched prices from the next request on."""
        self._layers = _Layers(fetched)
        self.edition += 1

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> Tariff | Unpriced:
        try:
            return self._layers.find(model, base_url, margin)
        except ConfigError as error:
            # A table that cannot be read may have had a higher price.
            return Unpriced(model, f"the fetched price table in the store cannot be used ({error})")

    def guess(self, model: ModelName, base_url: str | None, margin: Decimal) -> PriceGuess | None:
        try:
            tables = self._layers.list_tables()
        except ConfigError:
            return None
        return guess_prices(tables, model, base_url, margin)


class _Layers:
    """The tables of one state, read on first use: most processes need few prices, and many none."""

    def __init__(self, fetched: FetchedPrices | None) -> None:
        self.fetched = fetched

    @cached_property
    def _newest(self) -> list[Seller]:
        return [] if self.fetched is None else _read_packed(self.fetched.newest)

    @cached_property
    def _accepted(self) -> list[Seller]:
        return _read_packed(self.fetched.accepted) if self.fetched and self.fetched.accepted else []

    @cached_property
    def _earlier(self) -> list[list[Seller]]:
        return _read_earlier(self.fetched.earlier) if self.fetched else []

    def list_fetched(self) -> Sequence[list[Seller]]:
        return [*self._earlier, self._newest]

    def list_tables(self) -> Sequence[list[Seller]]:
        return [table for table in (self._accepted, read_bundled_table(), *self.list_fetched()) if table]

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> Tariff | Unpriced:
        bundled = find_listed_tariff(read_bundled_table(), model, base_url, margin)
        if self.fetched is None:
            return bundled
        found = (find_listed_tariff(table, model, base_url, margin) for table in self.list_fetched())
        fetched = [tariff for tariff in found if isinstance(tariff, Tariff)]
        accepted = self._find_accepted(bundled, model, base_url, margin)
        if not accepted and (not fetched or is_partly_free(merge_all(fetched))):
            return bundled
        return merge_all([*accepted, *fetched])

    def _find_accepted(
        self, bundled: Tariff | Unpriced, model: ModelName, base_url: str | None, margin: Decimal
    ) -> list[Tariff]:
        """Find what a person let count: the file that they accepted, or else the table that they installed."""
        tariffs = [bundled] if isinstance(bundled, Tariff) else []
        if not self._accepted:
            return tariffs
        accepted = find_listed_tariff(self._accepted, model, base_url, margin)
        if not isinstance(accepted, Tariff):
            return tariffs
        is_same_bundle = self.fetched is not None and self.fetched.bundled == version("genai-prices")
        return [accepted] if is_same_bundle else [accepted, *tariffs]


def _read_packed(packed: bytes) -> list[Seller]:
    return read_table(_unpack(packed))


def _unpack(packed: bytes) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error:
        raise ConfigError("It is missing or damaged.") from None


def _read_earlier(packed: bytes) -> list[list[Seller]]:
    """Read the earlier tables. What is the same in several of them is one object, whose models are indexed once."""
    earlier = _decode_earlier(packed)
    listed_sellers = _build_sellers(earlier.sellers)
    usable_models = [
        dict(zip(_list_usable(raw["models"]), listed.models, strict=True))
        for raw, listed in zip(earlier.sellers, listed_sellers, strict=True)
    ]
    sellers: dict[tuple[int, tuple[int, ...]], Seller] = {}
    tables: list[list[Seller]] = []
    for table in earlier.tables:
        keys = [(seller, tuple(models)) for seller, models in table]
        for seller, models in keys:
            if (seller, models) not in sellers:
                listed_models = [usable_models[seller][each] for each in models if each in usable_models[seller]]
                sellers[seller, models] = Seller(replace(listed_sellers[seller], models=listed_models))
        tables.append([sellers[key] for key in keys])
    return tables


def _decode_earlier(packed: bytes) -> EarlierTables:
    try:
        return msgspec.json.decode(_unpack(packed), type=EarlierTables) if packed else EarlierTables()
    except msgspec.MsgspecError:
        raise ConfigError("It is missing or damaged.") from None


def _list_usable(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    return [position for position, entry in enumerate(entries) if _is_usable(entry)]


def make_prices(policy: ResolvedPolicy, listed: ListedPrices | None = None, default: UnknownPrice = "refuse") -> Prices:
    """Make the prices of all models under a policy, which says what happens to those that no table knows."""
    unknown_price = policy.unknown_price or default
    return Prices(policy.prices, MARGIN, listed or PriceTables(), guesses=unknown_price == "dearest")


def guess_prices(
    tables: Sequence[list[Seller]], model: ModelName, base_url: str | None, margin: Decimal
) -> PriceGuess | None:
    """Guess the prices of an unknown model: twice the highest of its maker's current models, per unit.

    Models that cost many times as much as all others are compared only with their like.
    """
    makers = {maker.name: maker.id for table in tables if (maker := _find_maker(table, model, base_url)[0])}
    # Each table has its say alone, so that a further one can only raise the guess.
    like = {id(entry): entry for table in tables for entry in _list_like(table, model, base_url)}
    compiled = (compile_listed_price(entry, margin) for entry in like.values())
    tariffs = [tariff for tariff in compiled if tariff is not None and not is_partly_free(tariff)]
    if not tariffs:
        return None
    maker = next(iter(makers))
    dearest = reduce(_merge_tiers, (period.tiers for tariff in tariffs for period in _list_current(tariff)))
    lowest = dearest[-1]
    figures = f"{_format_rate('plain', lowest.plain)}/{_format_rate('output', lowest.output)} × {GUESS_FACTOR}"
    guess = (
        f"priced at a guess until the price table knows it: {figures} per million tokens, from the highest prices of "
        f"{maker}"
    )
    period = make_period([_multiply(tier) for tier in reversed(dearest)])
    return PriceGuess(maker, Tariff((period,), tariffs[0].loading, guess=guess))


def _list_like(table: list[Seller], model: ModelName, base_url: str | None) -> "list[types.ModelInfo]":
    """List the current models of a table from the maker of a model, of its class if there are any."""
    maker, matches_names = _find_maker(table, model, base_url)
    if maker is None:
        return []
    entries = [entry for seller in table if seller.id == maker.id for entry in seller.models]
    if matches_names and maker.model_match is not None:
        entries = [entry for entry in entries if maker.model_match.is_match(entry.id)]
    live_entries = [
        entry for entry in entries if not (entry.deprecated or _SHUT_DOWN.fullmatch(entry.id.rpartition("/")[2]))
    ]
    is_top = _TOP.search(model.model.lower()) is not None
    return [entry for entry in live_entries if (_TOP.search(entry.id) is not None) == is_top] or live_entries


def _find_maker(sellers: list[Seller], model: ModelName, base_url: str | None) -> tuple[Seller | None, bool]:
    """Find the maker of a model by the model's name, or else by who sells it, and whether the name told."""
    *makers, name = model.model.lower().split("/")
    for seller in sellers:
        if seller.model_match is not None and seller.model_match.is_match(name):
            return seller, True
    for maker in reversed(makers):
        if named := next((seller for seller in sellers if seller.id == TABLE_NAMES.get(maker, maker)), None):
            return named, False
    return find_seller(sellers, model.provider, base_url), False


def _list_current(tariff: Tariff) -> Iterator[PricePeriod]:
    """List the newest period of a tariff with its times of day, and what is announced."""
    for period in tariff.periods:
        yield period
        if period.daily is None:
            return


def _multiply(tier: Tier) -> Tier:
    rates = {unit: None if (rate := getattr(tier, unit)) is None else rate * GUESS_FACTOR for unit in UNIT_NAMES}
    return Tier(tier.above, **rates)  # pyright: ignore[reportArgumentType]  A rate is None only where it may be.


def merge_all(tariffs: Iterable[Tariff]) -> Tariff:
    return reduce(merge_tariffs, tariffs)


def merge_tariffs(first: Tariff, second: Tariff) -> Tariff:
    """Return the higher of two tariffs, per unit, at any time and for any number of tokens."""
    if first.periods == second.periods:
        return first
    both = (*first.periods, *second.periods)
    windows = {period.daily for period in both if period.daily}
    dates = sorted({ALWAYS, *(period.since for period in both)}, reverse=True)
    if len(windows) > 1 or len(dates) * (1 + len(windows)) > MAX_PERIODS:
        return _merge_always(first, second)
    periods: list[PricePeriod] = []
    for since in dates:
        # A price begins at the start of a day, and no time of day holds at its own end.
        day = max(since, _FIRST_DAY)
        for window in (*windows, None):
            at = day if not windows else day + (window[0] if window else next(iter(windows))[1])
            tiers = _merge_tiers(first.find_period(at).tiers, second.find_period(at).tiers)
            periods.append(make_period(tiers[::-1], since, window))
    return Tariff(tuple(periods), first.loading, max(first.audio_tokens, second.audio_tokens))


def _merge_always(first: Tariff, second: Tariff) -> Tariff:
    """Return the highest rates of two tariffs at any time, at all times."""
    tiers = reduce(_merge_tiers, (period.tiers for period in (*first.periods, *second.periods)))
    return Tariff((make_period(tiers[::-1]),), first.loading, max(first.audio_tokens, second.audio_tokens))


def _merge_tiers(first: tuple[Tier, ...], second: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """Merge tiers, the highest first. A unit that only one of them prices has that price."""
    thresholds = sorted({tier.above for tier in (*first, *second)}, reverse=True)
    if len(thresholds) > MAX_PERIODS:
        return (reduce(lambda one, other: _pick_higher(-1, one, other), (*first, *second)),)
    return tuple(_pick_higher(above, find_tier(first, above + 1), find_tier(second, above + 1)) for above in thresholds)


def _pick_higher(above: int, one: Tier, other: Tier) -> Tier:
    rates = {
        unit: max((rate for tier in (one, other) if (rate := getattr(tier, unit)) is not None), default=None)
        for unit in UNIT_NAMES
    }
    if rates["audio_cached"] is not None:
        # Where cached audio has no price, it costs what other audio does.
        rates["audio_cached"] = max(tier.audio_cached or tier.audio or 0 for tier in (one, other))
    return Tier(above, **rates)  # pyright: ignore[reportArgumentType]  As above.


def is_partly_free(tariff: Tariff) -> bool:
    """Return whether neither input nor output costs anything at some time."""
    return any(tier.plain == 0 and tier.output == 0 for period in tariff.periods for tier in period.tiers)


def add_file(current: FetchedPrices | None, data: bytes, source: str, at: int) -> FetchedPrices:
    """Return the fetched prices with a new file. Raises ConfigError with a sentence if it cannot be used."""
    table = read_table(data)
    digest = sha256(data).hexdigest()
    before = _Layers(current)
    listed_names = [ModelName(seller.id, entry.id) for seller in table for entry in seller.models]
    # A name that no entry has as its own any more can fall, too.
    moved_names = _list_moved_names(before, table) - {*listed_names}
    if _count_comparisons((*listed_names, *moved_names), (*before.list_fetched(), table)) > MAX_COMPARISONS:
        raise ConfigError(
            "It and the tables in force have too many names and too many models with `contains` or `regex` to be "
            "compared. Look at `halter prices`; a yes to the newest table with `halter prices accept` ends all others."
        )
    changes = [change for name in listed_names if (change := _compare(before, table, name, at))]
    _reject_other_units(changes, at)
    changes += [change for name in sorted(moved_names, key=str) if (change := _compare(before, table, name, at))]
    return FetchedPrices(
        digest,
        source,
        zlib.compress(data),
        at,
        accepted=current.accepted if current else b"",
        earlier=_pack_earlier(current, _decode(data)) if current else b"",
        bundled=current.bundled if current else "",
        added=tuple(change.name for change in changes if change.before is None and not change.is_free),
        raised=tuple(text for change in changes if (text := change.describe(change.higher))),
        waiting=tuple(text for change in changes if (text := change.describe_waiting())),
    )


def _pack_earlier(current: FetchedPrices, newest: Any) -> bytes:
    """Add the newest table so far to the earlier ones, unless it prices every name as another one does."""
    earlier = _decode_earlier(current.earlier)
    tables: list[list[Mapping[str, Any]]] = [
        [
            {**earlier.sellers[seller], "models": [earlier.sellers[seller]["models"][each] for each in models]}
            for seller, models in table
        ]
        for table in earlier.tables
    ]
    newest_so_far = [_strip(seller) for seller in _decode(_unpack(current.newest))]
    others = [[_strip(seller) for seller in newest], *tables]
    if current.newest != current.accepted and newest_so_far not in others:
        tables.append(newest_so_far)
    if len(tables) > MAX_EARLIER_TABLES:
        raise _explain_too_many(current)
    packed = msgspec.json.encode(_join_tables(tables))
    if len(packed) > MAX_FILE_SIZE:
        raise _explain_too_many(current)
    return zlib.compress(packed)


def _explain_too_many(current: FetchedPrices) -> ConfigError:
    return ConfigError(
        "Too many earlier tables count until a person's yes to a newer one. Look at `halter prices`, and accept the "
        f"newest with `halter prices accept {current.digest[:12]}`."
    )


def _join_tables(tables: "Iterable[Iterable[Mapping[str, Any]]]") -> EarlierTables:
    numbers: dict[bytes, int] = {}
    model_numbers: list[dict[bytes, int]] = []
    sellers: list[Mapping[str, Any]] = []
    joined: list[list[tuple[int, list[int]]]] = []
    for table in tables:
        joined.append([])
        for seller in table:
            number = numbers.setdefault(msgspec.json.encode({**seller, "models": ()}), len(sellers))
            if number == len(sellers):
                sellers.append({**seller, "models": []})
                model_numbers.append({})
            pairs = [(msgspec.json.encode(model), model) for model in seller["models"]]
            for key, model in pairs:
                if model_numbers[number].setdefault(key, len(model_numbers[number])) == len(sellers[number]["models"]):
                    sellers[number]["models"].append(model)
            joined[-1].append((number, [model_numbers[number][key] for key, _ in pairs]))
    return EarlierTables(sellers, joined)


def accept_file(current: FetchedPrices, at: int) -> FetchedPrices:
    """Let the newest file count as it is, lower prices and free models included."""
    return FetchedPrices(
        current.digest, current.source, current.newest, at, accepted=current.newest, bundled=version("genai-prices")
    )


Excess = Mapping[str, tuple[int, int, int]]
"""By unit: the number of input tokens above which two rates differ, the lower rate and the higher one."""
_NO_EXCESS: Final[Excess] = {}


class PriceChange(msgspec.Struct, frozen=True):
    """One model beside the price in force: its rates after a yes to the new file that are higher, and lower."""

    name: str
    before: Tariff | None
    after: Tariff | None
    higher: Excess
    lower: Excess

    @property
    def is_free(self) -> bool:
        return self.after is not None and is_partly_free(self.after)

    def describe(self, rates: Excess) -> str:
        texts = [
            f"{UNIT_NAMES[unit]}{f' above {above:,} tokens' if above > 0 else ''} "
            f"{_format_rate(unit, old)} → {_format_rate(unit, new)}"
            for unit, (above, old, new) in rates.items()
        ]
        return f"{self.name}: {', '.join(texts)}" if texts else ""

    def describe_waiting(self) -> str:
        if self.after is None:
            return f"{self.name}: no longer listed"
        if self.before is None and self.is_free:
            return f"{self.name}: free"
        return self.describe(self.lower)


def _compare(before: _Layers, table: list[Seller], name: ModelName, at: int) -> PriceChange | None:
    old = before.find(name, None, MARGIN)
    new = find_listed_tariff(table, name, None, MARGIN)
    if isinstance(new, Unpriced):
        new = find_listed_tariff(read_bundled_table(), name, None, MARGIN)
    known, after = (tariff if isinstance(tariff, Tariff) else None for tariff in (old, new))
    if known is None or after is None:
        return None if known is after else PriceChange(str(name), known, after, _NO_EXCESS, _NO_EXCESS)
    lower = find_excess(known, after, at)
    falls = {unit: (above, high, low) for unit, (above, low, high) in lower.items()}
    return PriceChange(str(name), known, after, find_excess(after, known, at), falls)


def _list_moved_names(before: _Layers, table: list[Seller]) -> set[ModelName]:
    """List the names that entries of earlier files have, and that another entry of a new one has, or none."""
    sellers = {seller.id: seller for seller in reversed(table)}
    entries = {
        (seller.id, id(entry)): entry
        for earlier_table in before.list_fetched()
        for seller in earlier_table
        for entry in seller.models
    }
    moved_names: set[ModelName] = set()
    for (seller_id, _), entry in entries.items():
        seller = sellers.get(seller_id)
        for name in {entry.id, *_list_literals(entry.match)}:
            found = seller and seller.find_model(name, table)
            if not found or found[1].id != entry.id:
                moved_names.add(ModelName(seller_id, name))
    return moved_names


def _count_comparisons(names: Collection[ModelName], tables: Iterable[list[Seller]]) -> int:
    """Count how many clauses these names are compared with, at most, to find their prices in these tables."""
    names_by_seller = Counter(name.provider for name in names)
    count = 0
    for table in tables:
        most = {seller.id: seller.max_comparisons for seller in table}
        total = sum(most.values())
        count += sum(each * (1 + most.get(seller, total)) for seller, each in names_by_seller.items())
    return count


def _list_literals(clause: Any) -> Iterator[str]:
    for part in _list_clauses(clause):
        for attribute in ("equals", "starts_with"):
            if literal := getattr(part, attribute, ""):
                yield literal


def find_excess(tariff: Tariff, other: Tariff, at: int) -> Excess:
    """Find the units in which a tariff is higher than another one now or later, with the first two such rates.

    A unit that only one of them prices is not compared.
    """
    periods = (*tariff.periods, *other.periods)
    days = sorted({at, *(each.since for each in periods if each.since > at)})
    # A time of day is compared at each date: what holds outside of it may have a date of its own.
    times = {time for each in periods if each.daily for time in each.daily}
    moments = [*days, *(day - day % DAY + DAY + time for day in days for time in sorted(times))]
    thresholds = sorted({tier.above for each in periods for tier in each.tiers})
    excess: dict[str, tuple[int, int, int]] = {}
    for moment, above in product(moments, thresholds):
        rates, other_rates = tariff.find_rates(above + 1, moment), other.find_rates(above + 1, moment)
        for unit in UNIT_NAMES:
            rate, other_rate = getattr(rates, unit), getattr(other_rates, unit)
            if unit not in excess and rate is not None and other_rate is not None and rate > other_rate:
                excess[unit] = (above, other_rate, rate)
    return excess


def _reject_other_units(changes: Iterable[PriceChange], at: int) -> None:
    ratios = [
        change.after.find_rates(0, at).plain / rate
        for change in changes
        if change.before is not None and change.after and (rate := change.before.find_rates(0, at).plain)
    ]
    if ratios and median(ratios) * OTHER_UNIT_FACTOR < 1:
        raise ConfigError(
            f"Its prices are in another unit: half of the models cost less than 1/{OTHER_UNIT_FACTOR} of the prices in "
            "force. Prices must be in dollars per million tokens."
        )


def _format_rate(unit: str, rate: int) -> str:
    dollars = Decimal(rate) / SCALE / (1000 if unit in _PER_THOUSAND else 1)
    return f"${dollars.normalize():f}" + (" per thousand" if unit in _PER_THOUSAND else "")


def read_table(data: bytes) -> list[Seller]:
    """Read a table in the format of genai-prices. Raises ConfigError if any part of it cannot be relied upon."""
    raw = _decode(data)
    _check_table(raw)
    return [Seller(listed) for listed in _build_sellers([_strip(seller) for seller in raw])]


def _build_sellers(sellers: Sequence[Mapping[str, Any]]) -> "list[types.Provider]":
    """Build what the library makes of sellers, without the models that have a pattern which cannot be used here."""
    usable = [{**seller, "models": [each for each in seller["models"] if _is_usable(each)]} for seller in sellers]
    try:
        # Only this function of the library reads its format; `UpdatePrices` does so without a bound and a digest.
        listed: list[types.Provider] = import_module("genai_prices.types")._providers_from_raw(usable)  # noqa: SLF001
    except (ValueError, TypeError, AssertionError, RecursionError) as error:
        problem = shorten(to_one_line(" ".join(str(error).split())), 300)
        raise ConfigError(f"It is not a table of genai-prices: {problem}") from None
    for seller in listed:
        _restrict(seller)
    return listed


def _decode(data: bytes) -> Any:
    if len(data) > MAX_FILE_SIZE:
        raise ConfigError(f"It is larger than {MAX_FILE_SIZE // 1024 // 1024} MB.")
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"It is not JSON: {error}") from None


def _check_table(raw: Any) -> None:
    if not isinstance(raw, list) or not raw:
        raise ConfigError("It is not a list of providers.")
    sellers = cast("list[Any]", raw)
    if len(sellers) > MAX_SELLERS:
        raise ConfigError(f"It has more than {format_count(MAX_SELLERS, 'provider')}.")
    entry_count = clause_count = 0
    for index, seller in enumerate(sellers):
        location = f"provider {index + 1}"
        _require_members(seller, ("id", "name", "api_pattern", "models"), location)
        location = _name(seller["id"], location)
        fallbacks = seller.get("fallback_model_providers")
        _check_count(cast("list[Any]", fallbacks) if isinstance(fallbacks, list) else (), "fallbacks", location)
        entries = seller["models"]
        if not isinstance(entries, list):
            raise ConfigError(f"The models of {location} are not a list.")
        entry_count += len(cast("list[Any]", entries))
        if entry_count > MAX_ENTRIES:
            raise ConfigError(f"It has more than {format_count(MAX_ENTRIES, 'model')}.")
        for position, entry in enumerate(cast("list[Any]", entries)):
            entry_location = f"model {position + 1} of {location}"
            _require_members(entry, ("id", "match", "prices"), entry_location)
            entry_location = f"{location}:{_name(entry['id'], entry_location)}"
            clause_count += _check_match(entry["match"], entry_location)
            if clause_count > MAX_CLAUSES:
                raise ConfigError(f"The `match` of its models have more than {MAX_CLAUSES:,} clauses.")
            _check_rules(entry["prices"], entry_location)
    if not entry_count:
        raise ConfigError("It has no models.")


def _require_members(value: Any, members: Sequence[str], location: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{location} is not an object.")
    for member in members:
        if member not in value:
            raise ConfigError(f"{location} has no `{member}`.")


def _name(value: Any, location: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PATTERN_LENGTH:
        raise ConfigError(f"The `id` of {location} is not a name.")
    return shorten(to_one_line(value), 80)


def _check_match(clause: Any, location: str, depth: int = 0) -> int:
    """Check a clause and count those that it consists of.

    Patterns of a fetched file are matched in linear time, so some patterns cannot be used.
    """
    members = cast("dict[str, Any]", clause) if isinstance(clause, dict) else {}
    kind = next(iter(members), "")
    if len(members) != 1 or kind not in _CLAUSES or depth > MAX_MATCH_DEPTH:
        raise ConfigError(f"The `match` of {location} is not a clause of the format.")
    operand = members[kind]
    if kind in {"or", "and"} and isinstance(operand, list):
        return 1 + sum(_check_match(part, location, depth + 1) for part in cast("list[Any]", operand))
    if kind in {"or", "and"} or not isinstance(operand, str) or not operand or len(operand) > MAX_PATTERN_LENGTH:
        raise ConfigError(f"The `match` of {location} is not a clause of the format.")
    return 1


def _check_rules(rules: Any, location: str) -> None:
    if isinstance(rules, dict):
        _check_prices(cast("dict[str, Any]", rules), location)
        return
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"The `prices` of {location} are neither an object nor a list.")
    _check_count(cast("list[Any]", rules), "prices", location)
    for rule in cast("list[Any]", rules):
        _require_members(rule, ("prices",), f"a price of {location}")
        if not isinstance(rule["prices"], dict):
            raise ConfigError(f"A price of {location} is not an object.")
        _check_prices(cast("dict[str, Any]", rule["prices"]), location)


def _check_prices(prices: Mapping[str, Any], location: str) -> None:
    of_library: Any = import_module("genai_prices.types").ModelPrice
    for unit, figure in prices.items():
        # An object without prices has None for each unit that the library knows.
        if unit.startswith("_") or hasattr(of_library, unit) or not hasattr(of_library(), unit):
            raise ConfigError(
                f"{location} has a price in the unit {shorten(to_one_line(unit), 60)!r}, which the installed "
                f"genai-prices {version('genai-prices')} does not know. Install a newer genai-prices if it is right."
            )
        if isinstance(figure, dict):
            tiers = cast("dict[str, Any]", figure)
            _require_members(tiers, ("base", "tiers"), f"`{unit}` of {location}")
            _check_figure(tiers["base"], unit, location)
            if not isinstance(tiers["tiers"], list):
                raise ConfigError(f"The `tiers` of `{unit}` of {location} are not a list.")
            _check_count(cast("list[Any]", tiers["tiers"]), f"tiers of `{unit}`", location)
            _check_tiers(cast("list[Any]", tiers["tiers"]), unit, location)
        elif figure is not None:
            _check_figure(figure, unit, location)


def _check_tiers(tiers: Sequence[Any], unit: str, location: str) -> None:
    """Check tiers. They may come in any order: the library sorts them."""
    for tier in tiers:
        _require_members(tier, ("start", "price"), f"a tier of `{unit}` of {location}")
        if type(tier["start"]) is not int or not 0 <= tier["start"] <= MAX_TIER_START:
            raise ConfigError(f"A tier of `{unit}` of {location} does not start at a number of tokens.")
        _check_figure(tier["price"], unit, location)
    if len({tier["start"] for tier in tiers}) < len(tiers):
        raise ConfigError(f"Two tiers of `{unit}` of {location} start at the same number of tokens.")


def _check_count(items: Sequence[Any], what: str, location: str) -> None:
    if len(items) > MAX_RULES:
        raise ConfigError(f"{location} has {len(items):,} {what}; at most {MAX_RULES} can be used.")


def _check_figure(figure: Any, unit: str, location: str) -> None:
    text = str(figure) if isinstance(figure, int | float | str) and not isinstance(figure, bool) else ""
    try:
        amount = Decimal(text) if len(text) <= MAX_FIGURE_LENGTH else None
    except InvalidOperation:
        amount = None
    if amount is None or not amount.is_finite() or not 0 <= amount <= MAX_FIGURE or _count_places(amount) > MAX_PLACES:
        raise ConfigError(
            f"`{unit}` of {location} is {shorten(to_one_line(str(figure)), 40)}, not a number of dollars from 0 to "
            f"{MAX_FIGURE:,} per million tokens."
        )


def _count_places(amount: Decimal) -> int:
    return abs(cast("int", amount.as_tuple().exponent))


def _strip(seller: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what prices do not need: rules for reading usage, and texts."""
    models = [
        {key: value for key, value in entry.items() if key in {"id", "match", "context_window", "deprecated", "prices"}}
        for entry in seller["models"]
    ]
    members = {key: seller[key] for key in ("id", "name", "api_pattern", "fallback_model_providers") if key in seller}
    return {**members, "models": models}


def _is_usable(entry: Mapping[str, Any]) -> bool:
    return not any(_is_unusable(pattern) for pattern in _list_patterns(entry["match"]))


def _list_patterns(clause: Mapping[str, Any]) -> Iterator[str]:
    for kind, operand in clause.items():
        if kind == "regex":
            yield operand
        elif kind in {"or", "and"}:
            for part in operand:
                yield from _list_patterns(part)


def _is_unusable(pattern: str) -> bool:
    try:
        _compile_pattern(pattern)
    except ValueError:
        return True
    return False


@cache
def _compile_pattern(pattern: str) -> Any:
    """Compile a pattern that is matched in linear time, or that the bundled table has. Raises ValueError otherwise."""
    import re2  # pyright: ignore[reportMissingTypeStubs]

    module: Any = re2
    options = module.Options()
    options.log_errors = False
    try:
        return module.compile(pattern, options)
    except module.error as error:
        if pattern in _list_bundled_patterns():
            return re.compile(pattern)
        raise ValueError(str(error)) from None


@cache
def _list_bundled_patterns() -> frozenset[str]:
    return frozenset(
        clause.regex
        for seller in read_bundled_table()
        for entry in seller.models
        for clause in _list_clauses(entry.match)
        if hasattr(clause, "regex")
    )


def _list_clauses(clause: Any) -> Iterator[Any]:
    yield clause
    for attribute in ("or_", "and_"):
        for part in getattr(clause, attribute, ()):
            yield from _list_clauses(part)


class _Pattern(NamedTuple):
    """A clause with a pattern. The library's own would run a hostile pattern for hours."""

    regex: str

    def is_match(self, text: str) -> bool:
        return _compile_pattern(self.regex).search(text) is not None


def _restrict(seller: "types.Provider") -> None:
    """Let a fetched file say neither whose an address is, nor how patterns are matched."""
    known = next((each for each in read_bundled_table() if each.id == seller.id), None)
    seller.api_pattern = _NO_ADDRESS if known is None else known.api_pattern
    if known is not None:
        seller.model_match = known.model_match
    for entry in seller.models:
        entry.match = _restrict_clause(entry.match)


def _restrict_clause(clause: Any) -> Any:
    for attribute in ("or_", "and_"):
        if parts := getattr(clause, attribute, None):
            setattr(clause, attribute, [_restrict_clause(part) for part in parts])
    return _Pattern(clause.regex) if hasattr(clause, "regex") else clause


async def fetch_file(url: str) -> bytes:
    """Fetch a price table. Raises ConfigError with a sentence if it cannot be had."""
    if not is_encrypted_or_local(url):
        raise ConfigError("The address of the price table must begin with https://.")
    terms = HttpxTerms(FETCH_TIMEOUT_SECONDS, FETCH_TIMEOUT_SECONDS, uses_environment=True)
    try:
        async with HttpClient(HttpxTransport(terms)) as client, client.open(HttpRequest("GET", url)) as response:
            if response.status != HTTPStatus.OK:
                raise ConfigError(f"{_host(url)} answered with HTTP {response.status}.")
            return await response.read(MAX_FILE_SIZE)
    except HttpFailure as failure:
        if failure.kind == "TooLarge":
            raise ConfigError(f"The file is larger than {MAX_FILE_SIZE // 1024 // 1024} MB.") from None
        raise ConfigError(f"{_host(url)} cannot be reached ({failure.reason}).") from None


def find_default_url() -> str:
    return import_module("genai_prices.update_prices").DEFAULT_UPDATE_URL


def _host(url: str) -> str:
    # The full address might contain a password.
    try:
        return urlsplit(url).hostname or "The address"
    except ValueError:
        return "The address"
