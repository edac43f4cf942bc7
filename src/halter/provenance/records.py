"""The values of a call's arguments and of a result's records, each under the name of its field."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from halter.core.provenance import split_name
from halter.core.text import make_word_set

PLAIN: Final = frozenset((str, int, float, bool, type(None)))
"""The types of values that contain no other values."""

FIGURES: Final = PLAIN - {str}
"""Those of them that contain no words."""

_NAMING: Final = make_word_set(
    "name names title subject label id key user username login handle nickname alias file filename"
)
_NAME_PARTS: Final = make_word_set(
    "first last full given family display user file nick common short long event channel"
)


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One value of a call or a record, under the name of its innermost field."""

    field: str
    path: str
    value: Any


def list_leaves(value: Any, field: str = "", path: str = "") -> list[Leaf]:
    """List the values of arguments or of a record, each with its field and path; an empty container is one value."""
    fields: dict[str, Any] = value
    if type(value) is dict and not path and PLAIN.issuperset(map(type, fields.values())):
        return [Leaf(key, key, part) for key, part in fields.items()]
    leaves: list[Leaf] = []
    stack: list[tuple[Any, str, str]] = [(value, field, path)]
    while stack:
        item, name, item_path = stack.pop()
        if isinstance(item, str):
            leaves.append(Leaf(name, item_path, item))
        elif not item and isinstance(item, Mapping | list | tuple):
            leaves.append(Leaf(name, item_path, None))
        elif isinstance(item, Mapping):
            items = cast("Mapping[Any, Any]", item).items()
            stack.extend(
                [(part, str(key), f"{item_path}.{key}" if item_path else str(key)) for key, part in items][::-1]
            )
        elif isinstance(item, list | tuple):
            elements = cast("list[Any]", item)
            stack.extend(
                (part, name, f"{item_path}[{number}]") for number, part in reversed(tuple(enumerate(elements)))
            )
        else:
            leaves.append(Leaf(name, item_path, item))
    return leaves


def normalise_path(path: str) -> str:
    return ".".join(part.split("[", 1)[0] for part in path.split("."))


def read_records(text: str) -> Iterator[tuple[Leaf, ...]]:
    """Parse the records of a result: JSON objects, blocks of `key: value` lines, or single lines."""
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        yield from _read_blocks(text)
        return
    yield from _split_records(value)


def identifies(field: str) -> bool:
    """Return whether a field names its record; a department or a manager names something else."""
    words = split_name(field)
    return not words or (words[-1] in _NAMING and set(words[:-1]) <= _NAME_PARTS)


def _split_records(value: Any) -> Iterator[tuple[Leaf, ...]]:
    """Split a value into records: each object of a list, each plain value, and each inner object that has a name."""
    stack: list[tuple[Any, str]] = [(value, "")]
    while stack:
        item, name = stack.pop()
        if isinstance(item, list):
            elements = cast("list[Any]", item)
            stack.extend((part, name) for part in reversed(elements))
        elif isinstance(item, dict):
            fields = cast("dict[str, Any]", item)
            has_only_records = all(isinstance(part, dict) for part in fields.values())
            inner_records = {key: part for key, part in fields.items() if has_only_records or _holds_records(part)}
            stack.extend((part, key if isinstance(part, dict) else "") for key, part in inner_records.items())
            if len(inner_records) < len(fields):
                own_fields = (
                    {key: part for key, part in fields.items() if key not in inner_records} if inner_records else fields
                )
                yield (*((Leaf(name, name, name),) if name else ()), *list_leaves(own_fields))
        else:
            yield (Leaf(name, name, item),)


def _holds_records(value: Any) -> bool:
    """Return whether a part of a record is a named record itself, or a list of such records."""
    if isinstance(value, list):
        return any(map(_holds_records, cast("list[Any]", value)))
    return isinstance(value, dict) and any(map(identifies, cast("dict[str, Any]", value)))


def _read_blocks(text: str) -> Iterator[tuple[Leaf, ...]]:
    block: list[Leaf] = []
    for line in (*text.splitlines(), ""):
        content = line.strip()
        is_item_start = content.startswith("- ")
        if (not content or is_item_start) and block:
            yield tuple(block)
            block = []
        content = content.removeprefix("- ").strip()
        key, colon, value = content.partition(":")
        if colon and value.startswith(" ") and key.replace("_", "").replace("-", "").replace(" ", "").isalnum():
            block.append(Leaf(key.strip(), key.strip(), value.strip().strip("'\"")))
        elif content:
            block.append(Leaf("", "", content))
