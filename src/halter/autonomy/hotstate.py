"""Hot state: the typed facts with ages that the model sees every turn.

It lives in memory with whoever runs the session. A snapshot of it is kept elsewhere, and what a turn saw is journaled.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.autonomy.showing import Line, block
from halter.brain.values import Found, NotJson, canonical, checked, equal
from halter.core.pacing import FieldType, HotField
from halter.core.sensing import HealthReport
from halter.core.text import clean, listed, shorten, told

LARGEST_VALUE: Final = 64_000
"""So many bytes of JSON a field may have."""

_WANTED: Final[Mapping[FieldType, str]] = {
    "any": "any value",
    "object": "an object",
    "array": "an array",
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
}


class Changed(msgspec.Struct, frozen=True):
    """A field has another value than before."""


class Same(msgspec.Struct, frozen=True):
    """A field was written with the value that it had: only its age is new."""


class Refused(msgspec.Struct, frozen=True):
    """A value that does not fit, and why; the field keeps the one it had."""

    sentence: str


class Fact(msgspec.Struct, frozen=True):
    """A field's value, when and by whom it was written.

    After a restart it is `restored`: nobody knows what has become of it meanwhile.
    """

    value: Any
    at: int
    by: str
    restored: bool = False


class _Kept(msgspec.Struct, frozen=True):
    value: Any
    at: int
    by: str = ""


class Seen(msgspec.Struct, frozen=True):
    """What was known at one moment, without ages; equal digests mean equal values."""

    values: Mapping[str, Any]
    digest: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Seen":
        """Take values that are JSON."""
        return cls(values, sha256(canonical(dict(values))).hexdigest())

    def to_bytes(self) -> bytes:
        """Write the values down, for the journal."""
        return msgspec.json.encode(self.values, order="sorted")

    @classmethod
    def from_bytes(cls, written: bytes) -> "Seen | None":
        """Read values that were written down; None if they cannot be read."""
        try:
            read = checked(msgspec.json.decode(written, type=dict[str, Any]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return None if isinstance(read, NotJson) else cls.of(read.value)


class FieldChange(msgspec.Struct, frozen=True):
    """A field that is not what it was; UNSET where it had no value, or has none now."""

    name: str
    before: Any | UnsetType
    after: Any | UnsetType


def changes(before: Seen | None, after: Seen) -> tuple[FieldChange, ...]:
    """Tell what has changed; if nothing was seen before, everything that is known has."""
    if before is not None and before.digest == after.digest:
        return ()
    old: Mapping[str, Any] = {} if before is None else before.values
    names = (*after.values, *(name for name in old if name not in after.values))
    found = (FieldChange(name, old.get(name, UNSET), after.values.get(name, UNSET)) for name in names)
    return tuple(change for change in found if _differs(change))


def _differs(change: FieldChange) -> bool:
    if change.before is UNSET or change.after is UNSET:
        return True
    return not equal(change.before, change.after)


class HotState:
    """The facts of one session. Values are JSON, and nobody changes one in place."""

    def __init__(self, fields: Mapping[str, HotField]) -> None:
        self._fields = dict(fields)
        self._facts: dict[str, Fact] = {}

    def put(self, name: str, value: Any, at: int, *, by: str, append: bool = False) -> Changed | Same | Refused:
        """Write a field, or add to its array. What does not fit leaves everything as it was."""
        field = self._fields.get(name)
        if field is None:
            known = listed(self._fields) or "none"
            return Refused(f"{clean(by)} writes `{shorten(clean(name))}`, but the fields of hot state are {known}.")
        old = self._facts.get(name)
        fitted = _fitted(field, old, value, append=append)
        if isinstance(fitted, str):
            return Refused(f"What {clean(by)} gave for `{name}` is left out: {fitted}.")
        self._facts[name] = Fact(fitted.value, at, by)
        return Same() if old is not None and equal(old.value, fitted.value) else Changed()

    def due(self, now: int) -> Sequence[str]:
        """List the fields that ask to be refreshed before a turn: those that are not known, or not known any more."""
        return [
            name
            for name, field in self._fields.items()
            if field.auto_refresh and field.refresh_tool is not UNSET and self._wanting(name, now)
        ]

    def _wanting(self, name: str, now: int) -> bool:
        fact = self._facts.get(name)
        return fact is None or _stale(self._fields[name], fact, now)

    def values(self) -> Mapping[str, Any]:
        """Tell all that is known, in the order of the fields."""
        return {name: self._facts[name].value for name in self._fields if name in self._facts}

    def seen(self) -> Seen:
        """Take what is known now, to be compared with later."""
        return Seen.of(self.values())

    def rendered(self, now: int, *, notes: Sequence[str] = (), health: Sequence[HealthReport] = ()) -> str:
        """Say what the model sees last in its prompt: notifications, then each field with its age, then what fails."""
        return block([self._line(name, now) for name in self._fields], notes, health)

    def _line(self, name: str, now: int) -> Line:
        field, fact = self._fields[name], self._facts.get(name)
        if fact is None:
            return Line(name, field.description)
        return Line(name, field.description, fact.value, max(0, now - fact.at), _stale(field, fact, now))

    def snapshot(self) -> bytes:
        """Write all facts down, for whoever goes on with the session."""
        kept = {name: _Kept(fact.value, fact.at, clean(fact.by)) for name, fact in self._facts.items()}
        return msgspec.json.encode(kept)

    def restore(self, snapshot: bytes) -> None:
        """Take facts up from a snapshot; they are stale until they are written again.

        What cannot be read, or no longer fits its field, is left out, and what has been written since is kept.
        """
        for name, raw in _read_snapshot(snapshot).items():
            if name not in self._fields or name in self._facts:
                continue
            try:
                kept = msgspec.json.decode(raw, type=_Kept)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            fitted = _fitted(self._fields[name], None, kept.value, append=False)
            if not isinstance(fitted, str):
                self._facts[name] = Fact(fitted.value, kept.at, kept.by, restored=True)


def _read_snapshot(snapshot: bytes) -> Mapping[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(snapshot, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _stale(field: HotField, fact: Fact, now: int) -> bool:
    return fact.restored or (field.ttl is not UNSET and now - fact.at >= field.ttl)


def _fitted(field: HotField, old: Fact | None, value: Any, *, append: bool) -> Found | str:
    """Make of a value what the field is to hold, or say what is wrong with it."""
    read = checked(value)
    if isinstance(read, NotJson):
        return f"it is no JSON, since {read.reason}"
    if append:
        return _added(field, old, read.value)
    if not _is(field.type, read.value):
        return f"the field takes {_WANTED[field.type]}, and this is {told(read.value)}"
    kept = _newest(field, cast("list[Any]", read.value)) if isinstance(read.value, list) else read.value
    size = len(msgspec.json.encode(kept))
    if size > LARGEST_VALUE:
        return f"it has {size:,} bytes, and a field holds at most {LARGEST_VALUE:,}"
    return Found(kept)


def _added(field: HotField, old: Fact | None, value: Any) -> Found | str:
    """Add to an array. The oldest make room for what is new, so that a log never stops taking news."""
    before: Any = [] if old is None else old.value
    if field.type not in ("any", "array") or not isinstance(before, list):
        return "only to an array can something be added, and the field holds none"
    items = _newest(field, [*cast("list[Any]", before), value])
    first, size = 0, len(msgspec.json.encode(items))
    while size > LARGEST_VALUE and first < len(items):
        size -= len(msgspec.json.encode(items[first])) + 1
        first += 1
    if first == len(items):
        return f"alone it is more than the {LARGEST_VALUE:,} bytes that a field holds"
    return Found(items[first:])


def _newest(field: HotField, items: list[Any]) -> list[Any]:
    return items if field.max_items is UNSET else items[-field.max_items :]


def _is(wanted: FieldType, value: Any) -> bool:
    match wanted:
        case "any":
            return True
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
