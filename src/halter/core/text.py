"""Any text is storable: the two doors through which text enters and leaves the journal; and words for sentences."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

LAST: Final = "\U0010ffff"
"""Sorts after every other character: whatever begins with a text sorts before that text with this behind it."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """Make text fit for a fact: visible stand-ins for NUL and for lone surrogates.

    Facts are projected into text columns, and PostgreSQL stores no NUL there; no JSON
    encoder of ours writes half a surrogate pair. Bodies keep such characters as they are.
    """
    if (text.isascii() and "\x00" not in text) or _UNSTORABLE.search(text) is None:
        return text
    return _UNSTORABLE.sub(lambda match: "␀" if match[0] == "\x00" else "�", text)


def to_body(text: str) -> bytes:
    """Encode any Python string, lone surrogates included, so that `from_body` restores it exactly."""
    return text.encode("utf-8", "surrogatepass")


def from_body(body: bytes) -> str:
    """Decode a body; bytes that never were text become stand-ins rather than an error."""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body.decode("utf-8", "replace")


def told(value: Any) -> str:
    """Say what was written, shortly."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {shorten(value)!r}"
        case dict():
            return "a mapping"
        case _:
            return "a list"


def shorten(text: str, most: int = 40) -> str:
    """Keep a sentence readable whatever it quotes."""
    return text if len(text) <= most else f"{text[:most]}…"


def one_line(name: str) -> str:
    """Write a name on one line, whatever somebody called a file, and without what steers a terminal."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(name.split()))


def listed(names: Iterable[Any]) -> str:
    """List names for a sentence."""
    return ", ".join(f"`{name}`" for name in names)


def nearest(word: str, known: Sequence[str], what: str) -> str:
    """End a sentence about an unknown word with what may have been meant, and with what there is."""
    swapped = [one for one in known if sorted(one) == sorted(word)]
    close = swapped or difflib.get_close_matches(word, known, 1, 0.6)
    there = f"{what} are {listed(known) or 'none'}."
    return f"did you mean `{close[0]}`? {there[0].upper()}{there[1:]}" if close else there


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: 1 session, 2,000 sessions."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
