"""The kinds of order: which of two values of a policy key is the stricter.

A key names its kind where it is defined, in `order` of its metadata (in `spec`); nothing else knows it. A key without
one is an error of whoever added it, which the first process that starts finds.

- a tuple: the values from the strictest to the laxest; UNSET among them if a key that is not set has its own place;
- `lower`: the lower limit is stricter; `unlimited` is the value for no limit, by default None;
- `covered`: a list is stricter if the other one covers it; a list that is not set covers everything;
- `union`: a list whose entries each forbid something; the entries of both apply;
- `price`: the higher price is stricter;
- `quiet`: more hours in which people are not asked are stricter;
- `each`, `listed`: a mapping with free keys; see `Mapped`;
- `fixed`, `free`, `local`, `declared`, `kept`: not limits; see `Unordered`.

With `beside`, two values are compared and never merged: both policies apply to a call, and their strictest result
counts, since a rule for a tool in one must not hide a stricter rule for its level in the other. `unset` are the words
for a key that is not set, where this binds an agent; None means that what applies then is not known here. `bound`
completes a value to a bound. `outranks` says in whose policies the rule of a tool replaces the rule of its level;
elsewhere both count.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache, reduce
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

from msgspec import UNSET, Meta, Struct

from halter.core.clock import format_duration
from halter.core.money import format_exact_micros
from halter.core.text import join_names
from halter.core.usage import FREE_PRICE, Price

NOT_SET: Final = "not set"

Outranks = Literal["fleet", "both", ""]
DifferenceKind = Literal["looser", "stricter", "fixed", "free"]
"""Kinds of difference: the second value allows more, or less; only the first one applies; or the key is not a limit and
the second one applies."""


def is_covered(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name, or everything that a pattern matches, is covered by one of the patterns."""
    return any(_covers(pattern, name) for pattern in patterns)


def _covers(pattern: str, name: str) -> bool:
    """Match a `*` at the start or the end of `pattern`; a `*` in `name` counts as a letter."""
    if pattern.startswith("*"):
        return name.endswith(pattern[1:]) and (len(name) > len(pattern) - 1)
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def format_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_cap(cap: int | None) -> str:
    return "none" if cap is None else format_exact_micros(cap)


def format_hourly_rate(rate: int | None) -> str:
    return "none" if rate is None else f"{rate}/hour"


def _format_number(number: int) -> str:
    return str(number) if number else "0 (none)"


def _format_time(micros: int | None) -> str:
    return "none" if micros is None else format_duration(micros) if micros else "0 (none)"


_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = MappingProxyType(
    {"dollars": format_cap, "rate": format_hourly_rate, "duration": _format_time, "lasting": _format_time}
)
"""The texts of values by the form in which a file writes them."""


class Order:
    """A kind of order. Most are total: of two values, one is at least as strict as the other."""

    is_total: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    """True if the value of an agent is never looser, since it can only add to what the fleet forbids."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self.outranks: Outranks = extra.get("outranks", "")
        self.beside = bool(extra.get("beside"))
        self.binds_unset = bool(extra.get("unset"))
        self._unset: str | None = extra.get("unset", NOT_SET)
        self._bound: str = extra.get("bound", "{}")
        self._format: Callable[[Any], str] = _FORMATS.get(extra.get("written", ""), format_word)

    def is_within(self, value: Any, bound: Any) -> bool:
        """Return whether a value allows nothing that the bound forbids."""
        raise NotImplementedError

    def meet(self, first: Any, second: Any) -> Any:
        """Return the laxest value that allows nothing that either of two values forbids."""
        return first if self.is_within(first, second) else second

    def format(self, value: Any) -> str:
        return (self._unset or NOT_SET) if value is UNSET else self._format(value)

    def explain(self, value: Any, bound: Any) -> tuple[tuple[int, ...], str, str]:
        """Say what is looser than a bound: where in the value, the value, and what is allowed."""
        return (), self.format(value), self._bound.format(self.format(bound))


class Ranked(Order):
    """Values that are listed from the strictest to the laxest. A key that is not set has the laxest one."""

    def __init__(self, values: tuple[Any, ...], extra: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(extra)
        self._values = values

    def is_within(self, value: Any, bound: Any) -> bool:
        if self._unset is None and UNSET in (value, bound):
            return value is bound or value == self._values[0]
        return self._rank(value) <= self._rank(bound)

    def _rank(self, value: Any) -> int:
        return self._values.index(value) if value in self._values else len(self._values) - 1


class Lower(Order):
    """Limits, of which the lower one is stricter. One that is not set bounds nothing, but lifts no other limit."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        super().__init__(extra)
        self._unlimited = extra.get("unlimited")
        if self._format is format_word and self._unlimited == 0:
            self._format = _format_number

    def is_within(self, value: Any, bound: Any) -> bool:
        return self._rank(value) <= self._rank(bound)

    def _rank(self, value: Any) -> tuple[float, bool]:
        if value is UNSET:
            return math.inf, False
        return (math.inf, True) if value == self._unlimited else (value, False)


class Covered(Order):
    """Lists of what is allowed, by name or pattern."""

    is_total: ClassVar[bool] = False

    def is_within(self, value: Any, bound: Any) -> bool:
        if bound is UNSET or value is UNSET:
            return bound is UNSET
        return all(is_covered(name, bound) for name in value)

    def meet(self, first: Any, second: Any) -> Any:
        if first is UNSET or second is UNSET:
            return second if first is UNSET else first
        names = [name for name in second if is_covered(name, first)]
        return tuple(dict.fromkeys((*names, *(name for name in first if is_covered(name, second)))))

    def format(self, value: Any) -> str:
        return "all" if value is UNSET else join_names(value) or "nothing"

    def explain(self, value: Any, bound: Any) -> tuple[tuple[int, ...], str, str]:
        index = next(index for index, name in enumerate(value) if not is_covered(name, bound))
        return (index,), f"`{value[index]}`", self.format(bound)


class Forbidden(Order):
    """Lists of what is forbidden, by name."""

    is_total: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    def is_within(self, value: Any, bound: Any) -> bool:
        return set(bound) <= set(value)

    def meet(self, first: Any, second: Any) -> Any:
        return tuple(dict.fromkeys((*first, *second)))

    def format(self, value: Any) -> str:
        return join_names(value) or "none"


class HigherPrice(Order):
    """Prices, of which the higher one holds more money. A figure that one of them lacks is missing in both."""

    is_total: ClassVar[bool] = False

    def is_within(self, value: Any, bound: Any) -> bool:
        return self.meet(value, bound) == self.meet(value, value)

    def meet(self, first: Any, second: Any) -> Any:
        one, other = _read_price(first), _read_price(second)

        def find_highest(key: str) -> Decimal:
            return max(_find_cached_price(one, key), _find_cached_price(other, key))

        def find_stated(key: str) -> Decimal | None:
            figures = getattr(one, key), getattr(other, key)
            return None if None in figures else max(figures)

        return Price(
            max(one.input, other.input),
            max(one.output, other.output),
            find_highest("cache_read"),
            find_highest("cache_write"),
            find_stated("cache_write_1h"),
            find_stated("web_searches"),
            find_stated("audio"),
            find_stated("code_executions"),
        )

    def format(self, value: Any) -> str:
        if value is UNSET:
            return NOT_SET
        price = _read_price(value)
        if price == FREE_PRICE:
            return "free"
        names = ("cache_read", "cache_write", "cache_write_1h", "web_searches", "audio", "code_executions")
        extra_figures = {name: figure for name in names if (figure := getattr(price, name)) is not None}
        figures = {"in": price.input, "out": price.output, **extra_figures}
        return ", ".join(f"${figure} {name}" for name, figure in figures.items())


class MoreQuiet(Order):
    """Daily hours in which people are not asked. Hours in different zones are not compared: clocks change apart."""

    is_total: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    def is_within(self, value: Any, bound: Any) -> bool:
        if value is UNSET or bound is UNSET or value.timezone != bound.timezone:
            return bound is UNSET
        bound_start, bound_end, value_end = (
            self._count_minutes(value.start, each) for each in (bound.start, bound.end, value.end)
        )
        return bound_start < bound_end <= value_end

    def format(self, value: Any) -> str:
        return NOT_SET if value is UNSET else f"{value.start} to {value.end} {value.timezone or ''}".rstrip()

    def _count_minutes(self, start: str, end: str) -> int:
        """Count the minutes from one time of day to another one."""
        (start_hour, start_minute), (end_hour, end_minute) = (map(int, each.split(":")) for each in (start, end))
        return ((end_hour - start_hour) * 60 + end_minute - start_minute) % (24 * 60)


def _read_price(price: Price | Literal["free"]) -> Price:
    return FREE_PRICE if isinstance(price, str) else price


def _find_cached_price(price: Price, key: str) -> Decimal:
    figure: Decimal | None = getattr(price, key)
    return price.input if figure is None else figure


class Unordered(Order):
    """A key that is no limit, so that neither value is the stricter.

    `fixed` always has the first value, and `local` the second one, which stays in the file of a machine. `free` has the
    second value where it is set. `declared` has the first value where it is set, and so has each entry of a mapping
    that is `kept`.
    """

    def __init__(self, kind: str, extra: Mapping[str, Any]) -> None:
        super().__init__(extra)
        self._kind = kind
        self.is_kept = kind == "kept"

    def is_within(self, value: Any, bound: Any) -> bool:
        return True

    def meet(self, first: Any, second: Any) -> Any:
        match self._kind:
            case "kept":
                return {**second, **first}
            case "fixed":
                return first
            case "local":
                return second
            case "free":
                return first if second is UNSET else second
            case _:
                return second if first is UNSET else first

    def compare(self, first: Any, second: Any) -> DifferenceKind | None:
        """Return which of two values applies; None if they are equal, or nobody else is bound by the key."""
        if first == second or self._kind == "local":
            return None
        is_fixed = self._kind == "fixed" or (self._kind in ("declared", "kept") and UNSET not in (first, second))
        return "fixed" if is_fixed else "free"

    def format(self, value: Any) -> str:
        return "set" if isinstance(value, Mapping | tuple | Struct) else super().format(value)


class Nested(Order):
    """A mapping with keys that have orders of their own."""

    def __init__(self, kind: type[Struct], extra: Mapping[str, Any]) -> None:
        super().__init__(extra)
        self.kind = kind
        list_orders(kind)


class Mapped(Nested):
    """A mapping with free keys, each of which leads to keys that have orders of their own.

    `each`: in an entry that is missing, no key is set. `listed`: only the first value may have entries.
    """

    def __init__(self, kind: type[Struct], extra: Mapping[str, Any]) -> None:
        super().__init__(kind, extra)
        self.is_listed = extra["order"] == "listed"


_ORDERS: Final[Mapping[str, type[Order]]] = MappingProxyType(
    {"lower": Lower, "covered": Covered, "union": Forbidden, "price": HigherPrice, "quiet": MoreQuiet}
)
_MAPS: Final = ("each", "listed")
_UNORDERED: Final = ("fixed", "free", "local", "declared", "kept")


@cache
def list_orders(kind: type[Struct]) -> Mapping[str, Order]:
    """Return the order of each key of a struct. Raises TypeError for a key whose metadata has none."""
    types = get_type_hints(kind, include_extras=True)
    return MappingProxyType({key: _find_order(f"{kind.__name__}.{key}", types[key]) for key in kind.__struct_fields__})


def find_strictest(kind: type[Struct], key: str, values: Iterable[Any]) -> Any:
    """Return the strictest of the values of a key."""
    return reduce(list_orders(kind)[key].meet, values)


def _find_order(key: str, annotation: Any) -> Order:
    types, extra = [*_list_types(annotation)], _read_extra(annotation)
    order: Any = extra.get("order")
    structs = [each for each in types if isinstance(each, type) and issubclass(each, Struct)]
    match order:
        case None if len(structs) == 1 and types[0] is structs[0]:
            return Nested(structs[0], extra)
        case tuple():
            return Ranked(cast("tuple[Any, ...]", order), extra)
        case str() if order in _MAPS and structs:
            return Mapped(structs[0], extra)
        case str() if order in _UNORDERED:
            return Unordered(order, extra)
        case str() if order in _ORDERS:
            return _ORDERS[order](extra)
        case _:
            raise TypeError(
                f"The policy key {key} does not say which of two values is the stricter. Write `order` in its "
                "metadata, as halter.policy.order describes it."
            )


def _list_types(annotation: Any) -> Iterator[Any]:
    """List the types that a value of a key can have, and the types of the entries of a mapping."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _list_types(get_args(annotation)[0])
    elif origin in (Union, UnionType) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        for each in get_args(annotation):
            yield from _list_types(each)
    else:
        yield annotation


def _read_extra(annotation: Any) -> Mapping[str, Any]:
    """Join the metadata of a key with those of its type."""
    if get_origin(annotation) in (Union, UnionType):
        return {key: value for each in get_args(annotation) for key, value in _read_extra(each).items()}
    metas = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Meta)]
    return {key: value for meta in metas for key, value in (meta.extra or {}).items()}
