"""What is different between two JSON values, as a short list of places: what a gate's model is shown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.brain.values import canonical, cut, equal, one_line

_FURTHEST: Final = 100
"""So many of the oldest items of a list may have made room for new ones, and it is still told as that."""


class Difference(msgspec.Struct, frozen=True):
    """One place, and what stood and stands there; UNSET for nothing."""

    path: str
    before: Any | UnsetType
    after: Any | UnsetType

    def shown(self, most: int) -> Mapping[str, Any]:
        """Show it as JSON. What is longer than so many characters is cut, and then a text."""
        sides = {"before": self.before, "after": self.after}
        kept = {side: _shortened(value, most) for side, value in sides.items() if value is not UNSET}
        return {"at": cut(self.path, most), **kept}


def _shortened(value: Any, most: int) -> Any:
    written = one_line(value)
    return value if len(written) <= most else cut(written, most)


def differences(path: str, before: Any, after: Any) -> Iterator[Difference]:
    """Find the places where two values differ. Numbers are compared as numbers, and nothing equal is named."""
    match before, after:
        case dict(), dict():
            yield from _in_objects(path, cast("dict[str, Any]", before), cast("dict[str, Any]", after))
        case list(), list():
            yield from _in_lists(path, cast("list[Any]", before), cast("list[Any]", after))
        case _ if UNSET in (before, after) or not equal(before, after):
            yield Difference(path, before, after)
        case _:
            return


def _in_objects(path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Difference]:
    for key in (*before, *(key for key in after if key not in before)):
        yield from differences(f"{path}.{key}", before.get(key, UNSET), after.get(key, UNSET))


def _in_lists(path: str, before: list[Any], after: list[Any]) -> Iterator[Difference]:
    """Tell items that were added at the end, or else what differs place by place."""
    old, new = [canonical(item) for item in before], [canonical(item) for item in after]
    dropped = _dropped(old, new)
    if dropped is not None:
        for place in range(len(old) - dropped, len(new)):
            yield Difference(f"{path}[{place}]", UNSET, after[place])
        return
    for place in range(max(len(before), len(after))):
        yield from differences(f"{path}[{place}]", _at(before, place), _at(after, place))


def _dropped(old: Sequence[bytes], new: Sequence[bytes]) -> int | None:
    """Tell how many of the oldest items are gone, if that and new ones at the end is all that happened."""
    for dropped in range(min(len(old), _FURTHEST)):
        rest = len(old) - dropped
        if rest <= len(new) and old[dropped:] == new[:rest]:
            return dropped if rest < len(new) else None
    return None


def _at(items: Sequence[Any], place: int) -> Any:
    return items[place] if place < len(items) else UNSET
