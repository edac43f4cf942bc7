"""What holds if two policies apply, key by key: the stricter value of each, and where they differ."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, NamedTuple, TypeVar, cast

from msgspec import UNSET, Struct, structs

from halter.policy.difference import Difference, KeyPath
from halter.policy.order import Mapped, Nested, Order, Unordered, list_orders
from halter.spec.policy import Policy

T = TypeVar("T", bound=Struct)


class Met(NamedTuple, Generic[T]):
    """What holds of two policies, and where the second one differs from the first."""

    value: T
    differences: Sequence[Difference]


class _Pair(NamedTuple):
    """Two values, and what applies where one is not set. What a `partial` second value does not set, the first sets."""

    first: Any
    second: Any
    first_default: Any
    second_default: Any
    partial: bool

    def read_key(self, key: str) -> "_Pair":
        values = [getattr(each, key, UNSET) for each in self[:4]]
        return _Pair(values[0], values[1], values[2], values[3], self.partial)

    def read_entry(self, key: Any) -> "_Pair":
        entries = [cast("Mapping[Any, Any]", each).get(key) if isinstance(each, Mapping) else None for each in self[:4]]
        return _Pair(entries[0], entries[1], entries[2], entries[3], self.partial)


def meet(
    first: T, second: T, *, defaults: T | None = None, second_defaults: T | None = None, path: KeyPath = ()
) -> Met[T]:
    """Meet two complete policies. What one does not set has its default; `second_defaults` are by default the same."""
    pair = _Pair(first, second, defaults, defaults if second_defaults is None else second_defaults, partial=False)
    return Met(*_meet_keys(type(first), pair, path))


def tighten(bound: T, value: T, *, defaults: T | None = None, path: KeyPath = ()) -> Met[T]:
    """Meet a bound and what may only tighten it. What neither the bound nor its defaults set bounds nothing."""
    return Met(*_meet_keys(type(bound), _Pair(bound, value, defaults, None, partial=True), path))


def tighten_key(
    kind: type[Struct], key: str, bound: Any, value: Any, path: KeyPath
) -> tuple[Any, Sequence[Difference]]:
    """Meet the bound of one key and a value that may only tighten it."""
    return _meet_key(list_orders(kind)[key], _Pair(bound, value, UNSET, UNSET, partial=True), path)


def meet_policies(policies: Sequence[Policy], defaults: Policy | None = None) -> tuple[Policy, ...]:
    """Return policies that all apply as those that a call is judged by: the first has the strictest value of each key.

    The others keep their rules, which are not merged, and have no value that is looser than the strictest one.
    """
    strictest = reduce(lambda first, second: meet(first, second, defaults=defaults).value, policies)
    others = [policy for index, policy in enumerate(policies) if policy not in (strictest, *policies[:index])]
    return strictest, *(_replace_looser(policy, strictest) for policy in others if policy is not policies[0])


def _replace_looser(policy: Policy, strictest: Policy) -> Policy:
    """Replace values that are looser than the strictest ones, which apply."""
    strictest_values = {
        key: getattr(strictest, key)
        for key, order in list_orders(Policy).items()
        if order.is_total and not order.beside and not order.is_within(getattr(policy, key), getattr(strictest, key))
    }
    return structs.replace(policy, **strictest_values)


def _meet_keys(kind: type[Struct], pair: _Pair, path: KeyPath) -> tuple[Any, list[Difference]]:
    values: dict[str, Any] = {}
    differences: list[Difference] = []
    for key, order in list_orders(kind).items():
        values[key], found = _meet_key(order, pair.read_key(key), (*path, key))
        differences += found
    return kind(**values), differences


def _meet_key(order: Order, pair: _Pair, path: KeyPath) -> tuple[Any, Sequence[Difference]]:
    match order:
        case Mapped():
            value, differences = _meet_entries(order, pair, path)
        case Nested():
            value, differences = _meet_keys(order.kind, pair, path)
        case Unordered():
            value, differences = _choose_value(order, pair, path)
        case _:
            value, differences = _meet_values(order, pair, path)
    return pair.first if order.beside and not pair.partial else value, differences


def _meet_entries(order: Mapped, pair: _Pair, path: KeyPath) -> tuple[Any, Sequence[Difference]]:
    values: dict[Any, Any] = {}
    differences: list[Difference] = []
    for key in dict.fromkeys((*pair.first, *pair.second)):
        if order.is_listed and key not in pair.second:
            values[key] = pair.first[key]
        elif order.is_listed and key not in pair.first:
            differences += [
                Difference((*path, key, name), "looser", each, UNSET, getattr(pair.second[key], name))
                for name, each in list_orders(order.kind).items()
            ]
        else:
            values[key], found = _meet_keys(order.kind, pair.read_entry(key), (*path, key))
            differences += found
    return values, differences


def _choose_value(order: Unordered, pair: _Pair, path: KeyPath) -> tuple[Any, Sequence[Difference]]:
    first, second = pair.first, pair.second
    value = order.meet(first, second)
    if pair.partial or first == second:
        return value, ()
    if order.is_kept:
        return value, [*_compare_entries(order, first, second, path)]
    how = order.compare(_fill_in(first, pair.first_default), _fill_in(second, pair.second_default))
    return value, [Difference(path, how, order, *pair[:4])] if how else ()


def _compare_entries(
    order: Unordered, first: Mapping[str, Any], second: Mapping[str, Any], path: KeyPath
) -> Iterator[Difference]:
    for name in dict.fromkeys((*first, *second)):
        one, other = first.get(name, UNSET), second.get(name, UNSET)
        if how := order.compare(one, other):
            yield Difference((*path, name), how, order, one, other)


def _meet_values(order: Order, pair: _Pair, path: KeyPath) -> tuple[Any, Sequence[Difference]]:
    first, second = pair.first, pair.second
    if first == second or (pair.partial and second is UNSET):
        return first, ()
    one, other = _fill_in(first, pair.first_default), _fill_in(second, pair.second_default)
    if pair.partial and (order.adds_up or (one is UNSET and not order.binds_unset)):
        return second if one is UNSET else order.meet(one, other), ()
    is_first_strict, is_second_strict = order.is_within(one, other), order.is_within(other, one)
    how = "stricter" if is_second_strict else "looser"
    differences = () if is_first_strict and is_second_strict else [Difference(path, how, order, *pair[:4])]
    if pair.partial:
        value = second if is_second_strict else order.meet(one, other)
    elif is_first_strict:
        value = first
    else:
        value = second if order.is_total else order.meet(one, other)
    return value, differences


def _fill_in(value: Any, default: Any) -> Any:
    return default if value is UNSET else value
