"""Text: its form in the journal, and its form in messages. Any Python string can be stored."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

LAST_CHARACTER: Final = "\U0010ffff"
"""The last character in sort order: a prefix plus this character is an upper bound of all texts with the prefix."""

T = TypeVar("T")


def make_word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def expand_names(table: Mapping[str, T]) -> dict[str, T]:
    """Expand a table whose keys contain several names, separated by spaces, to a table of single names."""
    return {name: value for names, value in table.items() for name in names.split()}


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """Replace NUL and lone surrogates by visible characters, so that the text can be a fact.

    Facts are projected to text columns, and PostgreSQL cannot store NUL there; the JSON encoder cannot write a lone
    surrogate. Bodies keep such characters unchanged.
    """
    if (text.isascii() and "\x00" not in text) or _UNSTORABLE.search(text) is None:
        return text
    return _UNSTORABLE.sub(lambda match: "␀" if match[0] == "\x00" else "�", text)


def encode_body(text: str) -> bytes:
    """Encode any Python string, lone surrogates included, so that `decode_body` restores it exactly."""
    return text.encode("utf-8", "surrogatepass")


def count_bytes(text: str) -> int:
    """Return the length of a text as a body, in bytes."""
    return len(text) if text.isascii() else len(encode_body(text))


def decode_body(body: bytes) -> str:
    """Decode a body; invalid bytes are replaced instead of raising an error."""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body.decode("utf-8", "replace")


def describe_value(value: Any) -> str:
    """Describe a value for a message."""
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


def shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def to_one_line(name: str) -> str:
    """Format a name on one line, without control characters."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(name.split()))


_BLANK: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that are printable by their class but invisible."""


def escape_hidden(text: str) -> str:
    """Escape invisible, control and bidirectional characters as JSON does, for text on which a person decides."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _is_visible(each) else _escape(each) for each in text)


def _escape(character: str) -> str:
    """Escape a character with four digits per surrogate, so that a following digit is not part of the escape."""
    return json.dumps(character)[1:-1] if character > "\uffff" else f"\\u{ord(character):04x}"


def _is_visible(character: str) -> bool:
    return character == "\n" or (character.isprintable() and _BLANK.match(character) is None)


def join_names(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def suggest_nearest(name: str, candidates: Sequence[str], noun: str) -> str:
    """Return the end of a sentence about an unknown name: the nearest candidate, or all if none is surely meant."""
    from difflib import get_close_matches  # Loaded only where a mistake is reported.

    letters = sorted(name.casefold())
    anagrams = [candidate for candidate in candidates if sorted(candidate.casefold()) == letters]
    if sure := anagrams or get_close_matches(name, candidates, 1, 0.75):
        return f"did you mean `{sure[0]}`?"
    listing = f"{noun} are {join_names(candidates) or 'none'}."
    nearest = get_close_matches(name, candidates, 1, 0.6)
    return f"did you mean `{nearest[0]}`? {listing[0].upper()}{listing[1:]}" if nearest else listing


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 session, 2,000 sessions."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def describe_need_count(count: int, noun: str = "") -> str:
    """Describe how many things need a person. Every face says it in these words."""
    if not count:
        return "nothing needs you"
    return f"{format_count(count, noun) if noun else f'{count:,}'} {'needs' if count == 1 else 'need'} you"
