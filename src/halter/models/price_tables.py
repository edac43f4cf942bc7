"""The price tables in force: the bundled one, those fetched since, and guesses for models that no table knows.

A fetched file can be wrong or hostile, so it can only raise what is held and charged: of each model the highest price
of all tables counts, per unit. Only a person's yes to one file, by its digest, lets its lower prices and its free
models count. Each file is checked before it is kept, more strictly than the library does that reads it.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from halter.core.spec import ResolvedPolicy
from halter.core.text import format_count, shorten, to_one_line
from halter.core.usage import ModelName, UnknownPrice, Unpriced, is_encrypted_or_local
from halter.models.providers import (
    MARGIN,
    SCALE,
    TABLE_NAMES,
    ListedPrices,
    PriceGuess,
    PricePeriod,
    Prices,
    Tariff,
    Tier,
    compile_listed_price,
    find_listed_tariff,
    find_seller,
    find_tier,
    list_spellings,
    make_period,
    read_bundled_table,
)

if TYPE_CHECKING:
    from genai_prices import types

    Seller = types.Provider

GUESS_FACTOR: Final = 2
MAX_FILE_SIZE: Final = 32 * 1024 * 1024
MAX_ENTRIES: Final = 10_000
"""Four times as many as there are. A file is compared with each earlier one in quadratic time."""
MAX_FIGURE: Final = Decimal(100_000)
"""Dollars per million tokens. No model costs a hundredth of it."""
MAX_RULES: Final = 20
"""Prices of one model, and tiers of one price: several times as many as any model has. More take minutes to compare."""
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
_NO_ADDRESS: Final = r"(?!)"
_CLAUSES: Final = frozenset(("starts_with", "ends_with", "contains", "regex", "equals", "or", "and"))


class FetchedPrices(msgspec.Struct, frozen=True):
    """What the store keeps of fetched tables: the newest file, the one that a person accepted, and single entries.

    `kept` has the entries of files in between that are above the others, in the same format. `bundled` is the version
    of the bundled table at the acceptance: the prices of another version were not accepted. The changes are those of
    the newest file; what is `waiting` counts only after a person's yes to its `digest`.
    """

    digest: str
    source: str
    newest: bytes
    at: int = 0
    accepted: bytes = b""
    kept: bytes = b""
    bundled: str = ""
    added: tuple[str, ...] = ()
    raised: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


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
    def _newest(self) -> "list[Seller]":
        return [] if self.fetched is None else _read_packed(self.fetched.newest)

    @cached_property
    def _accepted(self) -> "list[Seller]":
        return _read_packed(self.fetched.accepted) if self.fetched and self.fetched.accepted else []

    @cached_property
    def _kept(self) -> "list[Seller]":
        return _read_packed(self.fetched.kept) if self.fetched and self.fetched.kept else []

    def list_tables(self) -> "Sequence[list[Seller]]":
        return [table for table in (self._accepted, read_bundled_table(), self._newest) if table]

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> Tariff | Unpriced:
        bundled = find_listed_tariff(read_bundled_table(), model, base_url, margin)
        if self.fetched is None:
            return bundled
        tariffs = self._find_accepted(bundled, model, base_url, margin)
        newest = find_listed_tariff(self._newest, model, base_url, margin)
        if isinstance(newest, Tariff) and (tariffs or not is_partly_free(newest)):
            tariffs.append(newest)
        tariffs += _find_all(self._kept, model, base_url, margin)
        return reduce(merge_tariffs, tariffs) if tariffs else bundled

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


def _read_packed(packed: bytes) -> "list[Seller]":
    try:
        return read_table(zlib.decompress(packed))
    except zlib.error:
        raise ConfigError("It is missing or damaged.") from None


def make_prices(policy: ResolvedPolicy, listed: ListedPrices | None = None, default: UnknownPrice = "refuse") -> Prices:
    """Make the prices of all models under a policy, which says what happens to those that no table knows."""
    unknown_price = policy.unknown_price or default
    return Prices(policy.prices, MARGIN, listed or PriceTables(), guesses=unknown_price == "dearest")


def guess_prices(
    tables: "Sequence[list[Seller]]", model: ModelName, base_url: str | None, margin: Decimal
) -> PriceGuess | None:
    """Guess the prices of an unknown model: twice the highest of its maker's current models, per unit.

    Models that cost many times as much as all others are compared only with their like.
    """
    maker, matches_names = _find_maker(tables, model, base_url)
    if maker is None:
        return None
    entries = [entry for table in tables for seller in table if seller.id == maker.id for entry in seller.models]
    if matches_names and maker.model_match is not None:
        entries = [entry for entry in entries if maker.model_match.is_match(entry.id)]
    live_entries = [
        entry for entry in entries if not (entry.deprecated or _SHUT_DOWN.fullmatch(entry.id.rpartition("/")[2]))
    ]
    is_top = _TOP.search(model.model.lower()) is not None
    like = [entry for entry in live_entries if (_TOP.search(entry.id) is not None) == is_top] or live_entries
    compiled = (compile_listed_price(entry, margin) for entry in like)
    tariffs = [tariff for tariff in compiled if tariff is not None and not is_partly_free(tariff)]
    if not tariffs:
        return None
    dearest = reduce(_merge_tiers, (period.tiers for tariff in tariffs for period in _list_current(tariff)))
    lowest = dearest[-1]
    figures = f"{_format_rate('plain', lowest.plain)}/{_format_rate('output', lowest.output)} × {GUESS_FACTOR}"
    guess = (
        f"priced at a guess until the price table knows it: {figures} per million tokens, from the highest prices of "
        f"{maker.name}"
    )
    period = make_period([_multiply(tier) for tier in reversed(dearest)])
    return PriceGuess(maker.name, Tariff((period,), tariffs[0].loading, guess=guess))


def _find_maker(
    tables: "Sequence[list[Seller]]", model: ModelName, base_url: str | None
) -> "tuple[Seller | None, bool]":
    """Find the maker of a model by the model's name, or else by who sells it, and whether the name told."""
    sellers = [seller for table in tables for seller in table]
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


def merge_tariffs(first: Tariff, second: Tariff) -> Tariff:
    """Return the higher of two tariffs, per unit, at any time and for any number of tokens."""
    if first.periods == second.periods:
        return first
    # The first pair whose both periods apply is the first period of each that applies.
    pairs = [pair for pair in product(first.periods, second.periods) if _can_coincide(*pair)]
    if any(one.daily and other.daily and one.daily != other.daily for one, other in pairs):
        pairs = [(_flatten(first).periods[0], _flatten(second).periods[0])]
    periods = (
        make_period(_merge_tiers(one.tiers, other.tiers)[::-1], max(one.since, other.since), one.daily or other.daily)
        for one, other in pairs
    )
    return Tariff(tuple(periods), first.loading, max(first.audio_tokens, second.audio_tokens))


def _can_coincide(one: PricePeriod, other: PricePeriod) -> bool:
    if one.daily is None or other.daily is None:
        return True
    return one.holds(other.daily[0]) or other.holds(one.daily[0])


def _flatten(tariff: Tariff) -> Tariff:
    """Return a tariff with the highest rates of any hour at all times."""
    tiers = reduce(_merge_tiers, (period.tiers for period in tariff.periods))
    return Tariff((make_period(tiers[::-1]),), tariff.loading, tariff.audio_tokens)


def _merge_tiers(first: tuple[Tier, ...], second: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """Merge tiers, the highest first. A unit that only one of them prices has that price."""
    thresholds = sorted({tier.above for tier in (*first, *second)}, reverse=True)
    return tuple(_pick_higher(above, find_tier(first, above + 1), find_tier(second, above + 1)) for above in thresholds)


def _pick_higher(above: int, one: Tier, other: Tier) -> Tier:
    rates = {
        unit: max((rate for tier in (one, other) if (rate := getattr(tier, unit)) is not None), default=None)
        for unit in UNIT_NAMES
    }
    return Tier(above, **rates)  # pyright: ignore[reportArgumentType]  As above.


def is_partly_free(tariff: Tariff) -> bool:
    """Return whether neither input nor output costs anything at some time."""
    return any(tier.plain == 0 and tier.output == 0 for period in tariff.periods for tier in period.tiers)


def _find_all(sellers: "list[Seller]", model: ModelName, base_url: str | None, margin: Decimal) -> list[Tariff]:
    """Find every entry that a name can refer to: of kept entries, the one that would match first is not known."""
    if not sellers:
        return []
    seller = find_seller(sellers, model.provider, base_url)
    names = {model.model.lower(), *(spelling.lower() for _, spelling in list_spellings(model))}
    entries = (
        entry
        for each in ([seller] if seller is not None else sellers)
        for entry in each.models
        if any(entry.is_match(name) for name in names)
    )
    tariffs = (compile_listed_price(entry, margin) for entry in entries)
    return [_flatten(tariff) for tariff in tariffs if tariff is not None]


def add_file(current: FetchedPrices | None, data: bytes, source: str, at: int) -> FetchedPrices:
    """Return the fetched prices with a new file. Raises ConfigError with a sentence if it cannot be used."""
    table = read_table(data)
    digest = sha256(data).hexdigest()
    packed = zlib.compress(data)
    before = _Layers(current)
    accepted, bundled = (current.accepted, current.bundled) if current else (b"", "")
    bare = FetchedPrices(digest, source, packed, at, accepted, b"", bundled)
    after = _Layers(bare)
    kept = _pack_entries((*_find_undercut(before, after, at), *_find_taken(before, after, at))) if current else b""
    if kept:
        # What cannot be read later would leave every model without a price.
        _read_packed(kept)
    changes = _compare(before, table, at)
    _reject_other_units(changes, at)
    return msgspec.structs.replace(
        bare,
        kept=kept,
        added=tuple(change.name for change in changes if change.before is None and not change.is_free),
        raised=tuple(text for change in changes if (text := change.describe(change.higher))),
        waiting=tuple(text for change in changes if (text := change.describe_waiting())),
    )


def accept_file(current: FetchedPrices, at: int) -> FetchedPrices:
    """Let the newest file count as it is, lower prices and free models included."""
    return FetchedPrices(
        current.digest, current.source, current.newest, at, accepted=current.newest, bundled=version("genai-prices")
    )


Excess = Mapping[str, tuple[int, int, int]]
"""By unit: the number of input tokens above which two rates differ, the lower rate and the higher one."""
_NO_EXCESS: Final[Excess] = {}


class PriceChange(msgspec.Struct, frozen=True):
    """One model of a new file beside the price in force: the rates that are higher, and those that are lower."""

    name: str
    before: Tariff | None
    after: Tariff
    higher: Excess
    lower: Excess

    @property
    def is_free(self) -> bool:
        return is_partly_free(self.after)

    def describe(self, rates: Excess) -> str:
        texts = [
            f"{UNIT_NAMES[unit]}{f' above {above:,} tokens' if above > 0 else ''} "
            f"{_format_rate(unit, old)} → {_format_rate(unit, new)}"
            for unit, (above, old, new) in rates.items()
        ]
        return f"{self.name}: {', '.join(texts)}" if texts else ""

    def describe_waiting(self) -> str:
        if self.before is None and self.is_free:
            return f"{self.name}: free"
        return self.describe(self.lower)


def _compare(before: _Layers, table: "list[Seller]", at: int) -> list[PriceChange]:
    changes: list[PriceChange] = []
    for seller in table:
        for entry in seller.models:
            name = ModelName(seller.id, entry.id)
            after = find_listed_tariff(table, name, None, MARGIN)
            if isinstance(after, Unpriced):
                continue
            old = before.find(name, None, MARGIN)
            known = old if isinstance(old, Tariff) else None
            higher = _NO_EXCESS if known is None else find_excess(after, known, at)
            lower = _NO_EXCESS if known is None else find_excess(known, after, at)
            falls = {unit: (above, high, low) for unit, (above, low, high) in lower.items()}
            changes.append(PriceChange(str(name), known, after, higher, falls))
    return changes


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


def _find_undercut(before: _Layers, after: _Layers, at: int) -> "Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]":
    """Find the entries of earlier files that the tables in force would be below: their prices stay until a yes."""
    if before.fetched is None:
        return
    for packed in filter(None, (before.fetched.newest, before.fetched.kept)):
        for raw_seller, raw_entry, entry in _pair_entries(packed):
            tariff = _compile_paid(entry)
            if tariff is not None and _is_undercut(after, raw_seller["id"], _list_names(entry), tariff, at):
                yield raw_seller, raw_entry


def _find_taken(before: _Layers, after: _Layers, at: int) -> "Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]":
    """Find the entries of the earlier file whose names a cheaper entry takes, each with the names that both match."""
    if before.fetched is None or after.fetched is None:
        return
    earlier: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any], types.ModelInfo]]] = {}
    for each in _pair_entries(before.fetched.newest):
        earlier.setdefault(each[0]["id"], []).append(each)
    for raw_taker_seller, raw_taker, taker in _pair_entries(after.fetched.newest):
        for name in filter(taker.is_match, _list_names(taker)):
            found = next((each for each in earlier.get(raw_taker_seller["id"], ()) if each[2].is_match(name)), None)
            if found is not None and found[1] == raw_taker:
                continue  # What else takes its names is a taker itself.
            tariff = None if found is None else _compile_paid(found[2])
            if found is not None and tariff and _is_undercut(after, raw_taker_seller["id"], {name}, tariff, at):
                match: Any = {"and": [raw_taker["match"], found[1]["match"]]}
                yield found[0], {**found[1], "id": name, "match": match}


def _pair_entries(packed: bytes) -> "Iterator[tuple[Mapping[str, Any], Mapping[str, Any], types.ModelInfo]]":
    """Pair each entry that can be used with its seller and itself in the file's own format."""
    data = zlib.decompress(packed)
    for raw_seller, seller in zip(msgspec.json.decode(data), read_table(data), strict=True):
        raw_entries: list[Mapping[str, Any]] = [each for each in raw_seller["models"] if _is_usable(each)]
        for raw_entry, entry in zip(raw_entries, seller.models, strict=True):
            yield raw_seller, raw_entry, entry


def _compile_paid(entry: "types.ModelInfo") -> Tariff | None:
    tariff = compile_listed_price(entry)
    return None if tariff is None or is_partly_free(tariff) else tariff


def _is_undercut(after: _Layers, seller: str, names: Iterable[str], tariff: Tariff, at: int) -> bool:
    for name in names:
        found = after.find(ModelName(seller, name), None, MARGIN)
        if isinstance(found, Unpriced) or _list_units(tariff) - _list_units(found) or find_excess(tariff, found, at):
            return True
    return False


def _list_units(tariff: Tariff) -> set[str]:
    """List the units that a tariff prices at some time."""
    tiers = [tier for period in tariff.periods for tier in period.tiers]
    return {unit for unit in UNIT_NAMES if any(getattr(tier, unit) is not None for tier in tiers)}


def _list_names(entry: "types.ModelInfo") -> set[str]:
    return {entry.id, *_list_literals(entry.match)}


def _list_literals(clause: Any) -> Iterator[str]:
    for part in _list_clauses(clause):
        for attribute in ("equals", "starts_with"):
            if literal := getattr(part, attribute, ""):
                yield literal


def _pack_entries(entries: "Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]") -> bytes:
    models_by_seller: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    for raw_seller, raw_entry in entries:
        models = models_by_seller.setdefault(raw_seller["id"], (raw_seller, []))[1]
        if raw_entry not in models:
            models.append(raw_entry)
    table = [{**raw_seller, "models": models} for raw_seller, models in models_by_seller.values()]
    return zlib.compress(msgspec.json.encode(table)) if table else b""


def _reject_other_units(changes: Iterable[PriceChange], at: int) -> None:
    ratios = [
        change.after.find_rates(0, at).plain / rate
        for change in changes
        if change.before is not None and (rate := change.before.find_rates(0, at).plain)
    ]
    if ratios and median(ratios) * OTHER_UNIT_FACTOR < 1:
        raise ConfigError(
            f"Its prices are in another unit: half of the models cost less than 1/{OTHER_UNIT_FACTOR} of the prices in "
            "force. Prices must be in dollars per million tokens."
        )


def _format_rate(unit: str, rate: int) -> str:
    dollars = Decimal(rate) / SCALE / (1000 if unit in _PER_THOUSAND else 1)
    return f"${dollars.normalize():f}" + (" per thousand" if unit in _PER_THOUSAND else "")


def read_table(data: bytes) -> "list[Seller]":
    """Read a table in the format of genai-prices. Raises ConfigError if any part of it cannot be relied upon."""
    raw = _decode(data)
    _check_table(raw)
    sellers = [_strip(seller) for seller in cast("list[dict[str, Any]]", raw)]
    try:
        # Only this function of the library reads its format; `UpdatePrices` does so without a bound and a digest.
        table: list[Seller] = import_module("genai_prices.types")._providers_from_raw(sellers)  # noqa: SLF001
    except (ValueError, TypeError, AssertionError, RecursionError) as error:
        problem = shorten(to_one_line(" ".join(str(error).split())), 300)
        raise ConfigError(f"It is not a table of genai-prices: {problem}") from None
    for seller in table:
        _restrict(seller)
    return table


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
    entry_count = 0
    for index, seller in enumerate(sellers):
        location = f"provider {index + 1}"
        _require_members(seller, ("id", "name", "api_pattern", "models"), location)
        location = _name(seller["id"], location)
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
            _check_match(entry["match"], entry_location)
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
    if not isinstance(value, str) or not value:
        raise ConfigError(f"The `id` of {location} is not a name.")
    return shorten(to_one_line(value), 80)


def _check_match(clause: Any, location: str, depth: int = 0) -> None:
    """Check a clause: patterns of a fetched file are matched in linear time, so some patterns cannot be used."""
    members = cast("dict[str, Any]", clause) if isinstance(clause, dict) else {}
    kind = next(iter(members), "")
    if len(members) != 1 or kind not in _CLAUSES or depth > MAX_MATCH_DEPTH:
        raise ConfigError(f"The `match` of {location} is not a clause of the format.")
    operand = members[kind]
    if kind in {"or", "and"} and isinstance(operand, list):
        for part in cast("list[Any]", operand):
            _check_match(part, location, depth + 1)
    elif kind in {"or", "and"} or not isinstance(operand, str) or not operand or len(operand) > MAX_PATTERN_LENGTH:
        raise ConfigError(f"The `match` of {location} is not a clause of the format.")


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
            for tier in cast("list[Any]", tiers["tiers"]):
                _require_members(tier, ("start", "price"), f"a tier of `{unit}` of {location}")
                if type(tier["start"]) is not int or tier["start"] < 0:
                    raise ConfigError(f"A tier of `{unit}` of {location} does not start at a number of tokens.")
                _check_figure(tier["price"], unit, location)
        elif figure is not None:
            _check_figure(figure, unit, location)


def _check_count(items: Sequence[Any], what: str, location: str) -> None:
    if len(items) > MAX_RULES:
        raise ConfigError(f"{location} has {len(items):,} {what}; at most {MAX_RULES} can be used.")


def _check_figure(figure: Any, unit: str, location: str) -> None:
    try:
        amount = Decimal(str(figure)) if isinstance(figure, int | float | str) and figure is not True else None
    except InvalidOperation:
        amount = None
    if figure is False or amount is None or not amount.is_finite() or not 0 <= amount <= MAX_FIGURE:
        raise ConfigError(
            f"`{unit}` of {location} is {shorten(to_one_line(str(figure)), 40)}, not a number of dollars from 0 to "
            f"{MAX_FIGURE:,} per million tokens."
        )


def _strip(seller: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what prices do not need: rules for reading usage, and texts."""
    models = [
        {
            key: value
            for key, value in entry.items()
            if key in {"id", "match", "name", "context_window", "deprecated", "prices"}
        }
        for entry in seller["models"]
        if _is_usable(entry)
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


def _restrict(seller: "Seller") -> None:
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
    from httpx2 import AsyncClient, HTTPError, InvalidURL

    if not is_encrypted_or_local(url):
        raise ConfigError("The address of the price table must begin with https://.")
    data = bytearray()
    try:
        async with (
            AsyncClient(timeout=FETCH_TIMEOUT_SECONDS) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != HTTPStatus.OK:
                raise ConfigError(f"{_host(url)} answered with HTTP {response.status_code}.")
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_FILE_SIZE:
                    raise ConfigError(f"The file is larger than {MAX_FILE_SIZE // 1024 // 1024} MB.")
    except (HTTPError, InvalidURL, OSError) as error:
        raise ConfigError(
            f"{_host(url)} cannot be reached ({shorten(str(error) or type(error).__name__, 200)})."
        ) from None
    return bytes(data)


def find_default_url() -> str:
    return import_module("genai_prices.update_prices").DEFAULT_UPDATE_URL


def _host(url: str) -> str:
    # The full address might contain a password.
    try:
        return urlsplit(url).hostname or "The address"
    except ValueError:
        return "The address"
