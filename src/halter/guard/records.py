"""The values of a call's arguments and of a result's records, each under the name of its field."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from halter.core.provenance import split_name
from halter.core.text import word_set

PLAIN: Final = frozenset((str, int, float, bool, type(None)))
"""The types of values that hold no others."""

FIGURES: Final = PLAIN - {str}
"""Those of them that hold no words."""

_NAMING: Final = word_set(
    "name names title subject label id key user username login handle nickname alias file filename"
)
_NAME_PARTS: Final = word_set("first last full given family display user file nick common short long event channel")


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One value of a call or a record, under the name of its innermost field."""

    field: str
    path: str
    value: Any


def list_leaves(value: Any, field: str = "", path: str = "") -> list[Leaf]:
    """The values of arguments or of a record, each with the name of its field and its path; what is empty is one."""
    fields: dict[str, Any] = value
    if type(value) is dict and not path and PLAIN.issuperset(map(type, fields.values())):
        return [Leaf(key, key, part) for key, part in fields.items()]
    leaves: list[Leaf] = []
    stack: list[tuple[Any, str, str]] = [(value, field, path)]
    while stack:
        found, name, place = stack.pop()
        if isinstance(found, str):
            leaves.append(Leaf(name, place, found))
        elif not found and isinstance(found, Mapping | list | tuple):
            leaves.append(Leaf(name, place, None))
        elif isinstance(found, Mapping):
            items = cast("Mapping[Any, Any]", found).items()
            stack.extend([(part, str(key), f"{place}.{key}" if place else str(key)) for key, part in items][::-1])
        elif isinstance(found, list | tuple):
            parts = cast("list[Any]", found)
            stack.extend((part, name, f"{place}[{number}]") for number, part in reversed(tuple(enumerate(parts))))
        else:
            leaves.append(Leaf(name, place, found))
    return leaves


def normalise_path(path: str) -> str:
    return ".".join(part.split("[", 1)[0] for part in path.split("."))


def read_records(text: str) -> Iterator[tuple[Leaf, ...]]:
    """The records of a result: objects of JSON, or blocks of `key: value` lines, or single lines."""
    try:
        found: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        yield from _read_blocks(text)
        return
    yield from _split_records(found)


def identifies(field: str) -> bool:
    """Whether a field says what its record is called: a department or a manager names another thing."""
    words = split_name(field)
    return not words or (words[-1] in _NAMING and set(words[:-1]) <= _NAME_PARTS)


def _split_records(value: Any) -> Iterator[tuple[Leaf, ...]]:
    """Each object of a list is a record of its own, and so is a bare value, and an object within that has a name."""
    stack: list[tuple[Any, str]] = [(value, "")]
    while stack:
        found, name = stack.pop()
        if isinstance(found, list):
            parts = cast("list[Any]", found)
            stack.extend((part, name) for part in reversed(parts))
        elif isinstance(found, dict):
            fields = cast("dict[str, Any]", found)
            keyed = all(isinstance(part, dict) for part in fields.values())
            within = {key: part for key, part in fields.items() if keyed or _holds_records(part)}
            stack.extend((part, key if isinstance(part, dict) else "") for key, part in within.items())
            if len(within) < len(fields):
                own = {key: part for key, part in fields.items() if key not in within} if within else fields
                yield (*((Leaf(name, name, name),) if name else ()), *list_leaves(own))
        else:
            yield (Leaf(name, name, found),)


def _holds_records(value: Any) -> bool:
    """Whether a part of a record is another one, with a name of its own, or a list of such."""
    if isinstance(value, list):
        return any(map(_holds_records, cast("list[Any]", value)))
    return isinstance(value, dict) and any(map(identifies, cast("dict[str, Any]", value)))


def _read_blocks(text: str) -> Iterator[tuple[Leaf, ...]]:
    block: list[Leaf] = []
    for line in (*text.splitlines(), ""):
        plain = line.strip()
        begins = plain.startswith("- ")
        if (not plain or begins) and block:
            yield tuple(block)
            block = []
        plain = plain.removeprefix("- ").strip()
        key, colon, value = plain.partition(":")
        if colon and value.startswith(" ") and key.replace("_", "").replace("-", "").replace(" ", "").isalnum():
            block.append(Leaf(key.strip(), key.strip(), value.strip().strip("'\"")))
        elif plain:
            block.append(Leaf("", "", plain))
