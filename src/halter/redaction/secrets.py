"""Secrets by reference: the names that a call needs, and where their values come from; and live values in a text.

A known value is found in every spelling: plain, escaped, encoded, in capitals, wrapped, reversed. One automaton
searches for the beginning of any spelling of any value. The pattern of the whole is compiled only where one
begins, so that a hundred secrets, or long ones, cost little before one of them turns up.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html.entities import html5
from typing import Final, NamedTuple, Protocol

from halter.core.text import to_body
from halter.core.tools import find_secret_names
from halter.redaction.secret_values import Regex, RegexSet, escape_bytes, join_patterns

SECRET_PREFIX: Final = "HALTER_SECRET_"  # noqa: S105 - the name of a variable, no secret
"""An environment variable with this prefix is the secret of the name that follows."""


class Secrets(Protocol):
    """Where the values of secrets come from. Only the guard reads them, when it makes a permit."""

    def names(self) -> frozenset[str]: ...

    def value(self, name: str) -> str: ...


class GivenSecrets:
    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def names(self) -> frozenset[str]:
        return frozenset(self._values)

    def value(self, name: str) -> str:
        return self._values[name]


def read_environment_secrets(environment: Mapping[str, str]) -> GivenSecrets:
    """Read the secrets of an environment. An empty variable is no secret."""
    values = {
        name.removeprefix(SECRET_PREFIX): value for name, value in environment.items() if name.startswith(SECRET_PREFIX)
    }
    return GivenSecrets({name: value for name, value in values.items() if name and value})


def list_secret_references(arguments: bytes) -> frozenset[str]:
    return find_secret_names(arguments)


def find_missing_secrets(arguments: bytes, secrets: Secrets, granted: Sequence[str] | None = None) -> tuple[str, ...]:
    """The secrets that arguments refer to and that do not exist or are not granted, in order."""
    there = secrets.names() if granted is None else secrets.names() & frozenset(granted)
    return tuple(sorted(list_secret_references(arguments) - there))


def describe_missing_secrets(names: Sequence[str]) -> str:
    listed = ", ".join(names)
    variables = ", ".join(SECRET_PREFIX + name for name in names)
    return f"No secret is known by the name {listed}: set {variables}, and list it under `secrets` of the agent."


SHORTEST_SECRET: Final = 8
"""Shorter values are too likely to be part of ordinary words."""

PIECE_LENGTH: Final = 256
SHORTEST_LINE: Final = 16

LONGEST_CHARACTER: Final = 48
"""Four bytes of a letter as `%252525f0` each, and what stands between two of them."""
LONGEST_SPELLING: Final = LONGEST_CHARACTER * PIECE_LENGTH

_BEGINNING: Final = 6
_SHORT_ESCAPES: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_BASE64: Final = b"[A-Za-z0-9+/_-]"
_BASE32: Final = b"[A-Za-z2-7]"
_BETWEEN: Final = rb"(?:\x00|\\{1,4}(?:u0000|x00|0)|%00|=?\r?\n[ \t]{0,4})?"
"""What may stand between two characters: the NUL of a wide encoding, or a wrapped line."""
_WRAP: Final = rb"[\s\\rn]{0,4}"
_HEX_GAP: Final = rb"[: ,-]{0,2}(?:0x|\\{1,4}x)?(?:00[: ,-]?)?"


class Spelling(NamedTuple):
    """One way of writing a value: patterns of its characters, what may stand between them, and around."""

    units: tuple[bytes, ...]
    between: bytes = b""
    before: bytes = b""
    after: bytes = b""

    def beginning(self) -> bytes:
        """The pattern of the first characters, small however long a value is."""
        return self.before + self.between.join(self.units[:_BEGINNING])

    def whole(self) -> bytes:
        return self.before + self.between.join(self.units) + self.after


def cut_into_pieces(value: str) -> Iterator[str]:
    """What is searched for: the value, parts of a long one, and the lines of one with several."""
    if len(value) < SHORTEST_SECRET:
        return
    for start in range(0, len(value), PIECE_LENGTH):
        yield value[start : start + PIECE_LENGTH] if start + SHORTEST_SECRET <= len(value) else value[-PIECE_LENGTH:]
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (
            line[:PIECE_LENGTH] for line in lines if len(line) >= SHORTEST_LINE and not line.startswith("-----")
        )


def list_spellings(piece: str) -> Iterator[Spelling]:
    """The spellings of a piece; the first one mixes all that write it character by character."""
    data = to_body(piece)
    yield Spelling(tuple(map(_spell_character, piece)), _BETWEEN)
    yield Spelling(tuple(map(_spell_character, reversed(piece))), _BETWEEN)
    yield Spelling(tuple(b"(?i:%02x)" % byte for byte in data), _HEX_GAP)
    for encoded in dict.fromkeys((data, *_encode_wide(piece))):
        for shift in range(3):
            whole, shared = divmod((shift + len(encoded)) * 8, 6)
            core = base64.b64encode(b"\0" * shift + encoded)[-(-shift * 8 // 6) : whole]
            before, after = (_BASE64 + b"?" if each else b"" for each in (shift, shared))
            yield Spelling(tuple(map(_spell_base64_byte, core)), _WRAP, before, after + b"(?:=|%3[dD]){0,2}")
        yield from _base32(encoded)


def _encode_wide(piece: str) -> Iterator[bytes]:
    """A piece with two bytes a character, in both orders, without the NUL at either end."""
    for order in ("utf-16-le", "utf-16-be"):
        yield piece.encode(order, "surrogatepass").strip(b"\0")


@cache
def _spell_character(character: str) -> bytes:
    """Every spelling of a character, each of which may be escaped again."""
    cases = sorted({each for each in (character, character.lower(), character.upper()) if len(each) == 1})
    return b"(?i:" + b"|".join(dict.fromkeys(way for each in cases for way in _list_escapes(each))) + b")"


def _list_escapes(character: str) -> Iterator[bytes]:
    data, code = to_body(character), ord(character)
    yield escape_bytes(data) if data.isalnum() else rb"\\{0,8}" + escape_bytes(data)
    yield b"".join(b"%%(?:25){0,3}%02x" % byte for byte in data)
    yield rb"(?:=\r?\n)?".join(b"=%02x" % byte for byte in data)
    if character == " ":
        yield rb"\+"
    if character == "'":
        yield rb"'(?:\\{1,4}'|\\{0,4}\"'\\{0,4}\")'"
    if character in _SHORT_ESCAPES:
        yield rb"(?:\\{1,4}r)?\\{1,4}" + _SHORT_ESCAPES[character].encode()
    if character == "\n":
        yield rb"\r\n"
    names = b"".join(
        b"|" + name.encode() for name in sorted({name.rstrip(";") for name, each in html5.items() if each == character})
    )
    yield b"&(?:amp;){0,2}(?:#(?:0{0,4}%d|x0{0,4}%x)%s);?" % (code, code, names)
    units = character.encode("utf-16-be", "surrogatepass").hex()
    yield b"".join(rb"(?:%%|\\{1,4})u%s" % units[at : at + 4].encode() for at in range(0, len(units), 4))
    yield rb"\\{1,4}(?:u\{0{0,4}%x\}|U%08x)" % (code, code)
    yield b"".join(rb"\\{1,4}(?:x\{?%02x\}?|0?%03o)" % (byte, byte) for byte in data)


def _base32(data: bytes) -> Iterator[Spelling]:
    for shift in range(5):
        whole, shared = divmod((shift + len(data)) * 8, 5)
        core = base64.b32encode(b"\0" * shift + data)[-(-shift * 8 // 5) : whole]
        before, after = (_BASE32 + b"?" if each else b"" for each in (shift, shared))
        yield Spelling(tuple(b"(?i:%c)" % byte for byte in core), _WRAP, before, after + b"={0,6}")


def _spell_base64_byte(byte: int) -> bytes:
    """A character of base64 in both alphabets, and URL-encoded."""
    return {ord("+"): b"(?:[+-]|%2[bB])", ord("/"): b"(?:[/_]|%2[fF])"}.get(byte, bytes([byte]))


_AHEAD: Final = 8 * LONGEST_CHARACTER
"""The longest beginning of a spelling."""


class LiveSecret(NamedTuple):
    start: int
    end: int
    name: str


class LiveValues:
    def __init__(self, values: Mapping[str, str]) -> None:
        parts = {piece: name for name, value in values.items() for piece in cut_into_pieces(value)}
        # The longest comes first, so that a value hides others that are parts of it.
        longest_first = sorted(parts, key=lambda piece: (-len(piece), piece))
        self._spellings = [(parts[piece], spelling) for piece in longest_first for spelling in list_spellings(piece)]
        self._beginnings = [spelling.beginning() for _, spelling in self._spellings]
        self._any = Regex(join_patterns(self._beginnings)) if self._beginnings else None
        self._which: RegexSet | None = None
        self._patterns: dict[int, Regex] = {}

    def find(self, data: bytes, start: int, end: int) -> Iterator[LiveSecret]:
        while self._any is not None and (match := self._any.search(data, start, end)) is not None:
            found = self._at(data, match[0], end)
            start = match[0] + 1 if found is None else found.end
            if found is not None:
                yield found

    def begins(self, data: bytes, start: int, end: int) -> bool:
        return self._any is not None and self._any.search(data, start, end) is not None

    def _at(self, data: bytes, place: int, end: int) -> LiveSecret | None:
        self._which = self._which or RegexSet(self._beginnings)
        for index in sorted(self._which.match(data[place : min(end, place + _AHEAD)])):
            name, spelling = self._spellings[index]
            stop = self._compiled(index, spelling).match(data, place, end)
            if stop >= 0:
                return LiveSecret(place, stop, name)
        return None

    def _compiled(self, index: int, spelling: Spelling) -> Regex:
        if index not in self._patterns:
            self._patterns[index] = Regex(spelling.whole())
        return self._patterns[index]
