"""What an older program could not read comes with a higher format, so that it leaves such sessions alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from halter.core.events import EVENTS_BY_KIND, SESSION_FORMAT

FILE = Path(__file__).parent / f"format-{SESSION_FORMAT}.json"
"""What a program of this format reads. Written by `python -m tests.golden.test_format`, once for each format."""


def read_by_this_program() -> dict[str, list[str]]:
    """List each kind with its version, and all words that its facts may hold in place of free text."""
    found: dict[str, list[str]] = {}
    for kind, event in EVENTS_BY_KIND.items():
        _, fields = msgspec.json.schema_components([event])
        found[f"{kind} {event.VERSION}"] = sorted({word for result in fields.values() for word in _words(result)})
    return found


def _words(schema: Any) -> Iterator[str]:
    match schema:
        case dict():
            yield from (str(word) for word in schema.get("enum", ()))
            for part in schema.values():
                yield from _words(part)
        case list():
            for part in schema:
                yield from _words(part)
        case _:
            pass


def unreadable(newer: Mapping[str, list[str]], older: Mapping[str, list[str]]) -> list[str]:
    """Name what a program that reads the older facts could not read of the newer ones."""
    new = [kind for kind in newer if kind not in older]
    words = [f"{kind}: {word}" for kind in newer if kind in older for word in newer[kind] if word not in older[kind]]
    return [*new, *words]


def test_no_event_says_what_a_program_of_the_same_format_cannot_read() -> None:
    """Raise FORMAT and write its file. Only what never stands in a session's own stream may be added to this one."""
    older = msgspec.json.decode(FILE.read_bytes(), type=dict[str, list[str]])
    assert unreadable(read_by_this_program(), older) == []


def test_a_new_kind_a_new_version_and_a_new_word_are_found() -> None:
    older = {"woken 1": ["timer"], "parked 1": []}
    newer = {"woken 1": ["moon", "timer"], "parked 2": [], "dreamt 1": []}
    assert unreadable(newer, older) == ["parked 2", "dreamt 1", "woken 1: moon"]


if __name__ == "__main__":
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(read_by_this_program()), indent=1) + b"\n")
