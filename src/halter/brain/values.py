"""JSON values that come from outside: made safe to keep, compared, looked into, and shown on one line."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.text import clean, shorten

DEEPEST: Final = 64
"""So many levels a value may have. What is deeper is no fact, but somebody's try at our stack."""

_WIDEST: Final = 256
"""So many bits a whole number may have."""
_EXACT: Final = 2.0**53
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")
_PATH: Final = re.compile(r"(?:[^.\[\]]+|\[\d{1,9}\])(?:\.[^.\[\]]+|\[\d{1,9}\])*")
_UNSEEN: Final = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What JSON leaves as it is, although it ends a line or turns one around."""


class NotJson(msgspec.Struct, frozen=True):
    """Something in a value that JSON has no word for, as in `it holds a number that is not finite`."""

    reason: str


class Found(msgspec.Struct, frozen=True):
    """What stands at a path."""

    value: Any


class Missing(msgspec.Struct, frozen=True):
    """There is nothing at a path, and a sentence that says where it ends."""

    sentence: str


class _NoJsonError(Exception):
    pass


def checked(value: Any) -> Found | NotJson:
    """Copy a value that is JSON, so that nobody else can change it. Characters that cannot be stored are replaced."""
    try:
        return Found(_copied(value, 0))
    except _NoJsonError as error:
        return NotJson(str(error))


def _copied(value: Any, depth: int) -> Any:
    if depth > DEEPEST:
        raise _NoJsonError(f"it has more than {DEEPEST} levels")
    # Each reading of each sensor goes through here: asking for the type first is twice as fast as matching.
    kind = cast("type[Any]", type(value))
    if kind is float:
        return _finite(value)
    if kind is str:
        return clean(value)
    if kind is dict:
        return {_key(key): _copied(each, depth + 1) for key, each in value.items()}
    match value:
        case None | bool():
            return value
        case int():
            return _whole(value)
        case float():
            return _finite(value)
        case str():
            return clean(value)
        case Mapping():
            items = cast("Mapping[Any, Any]", value).items()
            return {_key(key): _copied(each, depth + 1) for key, each in items}
        case list() | tuple():
            return [_copied(each, depth + 1) for each in cast("Sequence[Any]", value)]
        case _:
            raise _NoJsonError(f"it holds a {kind.__name__}, which JSON does not know")


def _whole(value: int) -> int:
    if value.bit_length() > _WIDEST:
        raise _NoJsonError(f"it holds a whole number of more than {_WIDEST} bits")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise _NoJsonError("it holds a number that is not finite")
    return value


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise _NoJsonError(f"it has a key that is no text, but a {type(key).__name__}")
    return clean(key)


def canonical(value: Any) -> bytes:
    """Write a checked value in the one way that equal values have in common.

    1 and 1.0 are equal, 1 and true are not.
    """
    return msgspec.json.encode(_settled(value), order="sorted")


def equal(one: Any, other: Any) -> bool:
    """Tell whether two checked values are equal, as `canonical` has it. Most need no closer look."""
    if one != other:
        return False
    return msgspec.json.encode(one) == msgspec.json.encode(other) or canonical(one) == canonical(other)


def _settled(value: Any) -> Any:
    match value:
        case float() if value.is_integer() and abs(value) < _EXACT:
            return int(value)
        case dict():
            return {key: _settled(each) for key, each in cast("dict[str, Any]", value).items()}
        case list():
            return [_settled(each) for each in cast("list[Any]", value)]
        case _:
            return value


def path_value(value: Any, path: str) -> Found | Missing:
    """Look up a part of a JSON value, as in `quotes.AAPL` or `items[0].price`; an empty path is all of it."""
    if not path:
        return Found(value)
    if _PATH.fullmatch(path) is None:
        return Missing(f"`{shorten(clean(path))}` is no path: write it like quotes.AAPL or items[0].price.")
    for name, place in _steps(path):
        match value:
            case Mapping() if name and name in value:
                value = cast("Mapping[str, Any]", value)[name]
            case list() | tuple() if place is not None and place < len(cast("Sequence[Any]", value)):
                value = cast("Sequence[Any]", value)[place]
            case _:
                return Missing(f"There is no `{name or f'[{place}]'}` where `{shorten(path)}` looks for it.")
    return Found(value)


def _steps(path: str) -> Iterator[tuple[str, int | None]]:
    for step in _STEP.finditer(path):
        yield step[1] or "", int(step[2]) if step[2] else None


def one_line(value: Any) -> str:
    """Write a checked value as compact JSON on one line, which nothing in the value can end."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", msgspec.json.encode(value).decode())


def quoted(text: str) -> str:
    """Quote anybody's words, so that they stay on their line and can be told from ours."""
    return one_line(clean(text))


def cut(text: str, most: int) -> str:
    """Keep what is shown short, and say how long it was."""
    return text if len(text) <= most else f"{text[:most]}… [cut: {len(text):,} characters in all]"
