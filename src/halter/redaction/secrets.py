"""Secrets by reference: the names that a call needs, the source of their values, and live values in a text.

A live value is found in every spelling: plain, escaped, encoded, in capitals, wrapped, reversed. One automaton searches
for the beginning of any spelling of any value. The pattern of a whole spelling is compiled only when its beginning is
found, so that a hundred secrets, or long ones, cost little until one of them occurs.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html.entities import html5
from typing import Final, NamedTuple, Protocol

from halter.core.text import encode_body
from halter.core.tools import find_secret_names
from halter.redaction.secret_values import Regex, RegexSet, escape_bytes, join_patterns

SECRET_PREFIX: Final = "HALTER_SECRET_"  # noqa: S105 - the name of a variable, no secret
"""The prefix of environment variables that define secrets: `HALTER_SECRET_NAME` defines NAME."""


class Secrets(Protocol):
    """The source of secret values. Only the guard reads them, when it makes a permit."""

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
    """Read the secrets in an environment. Empty variables are ignored."""
    values = {
        name.removeprefix(SECRET_PREFIX): value for name, value in environment.items() if name.startswith(SECRET_PREFIX)
    }
    return GivenSecrets({name: value for name, value in values.items() if name and value})


def list_secret_references(arguments: bytes) -> frozenset[str]:
    return find_secret_names(arguments)


def find_missing_secrets(arguments: bytes, secrets: Secrets, granted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Find the secrets in arguments that do not exist or are not granted, in order."""
    available = secrets.names() if granted is None else secrets.names() & frozenset(granted)
    return tuple(sorted(list_secret_references(arguments) - available))


def describe_missing_secrets(names: Sequence[str]) -> str:
    name_list = ", ".join(names)
    variables = ", ".join(SECRET_PREFIX + name for name in names)
    return f"Unknown secret {name_list}. Set {variables}, and list the name under `secrets` of the agent."


MIN_SECRET_LENGTH: Final = 8
"""The minimum length of a secret: shorter values are too likely to be part of ordinary words."""

PIECE_LENGTH: Final = 256
MIN_LINE_LENGTH: Final = 16

MAX_CHARACTER_LENGTH: Final = 48
"""The longest spelling of a character: four bytes as `%252525f0` each, and the separator."""
MAX_SPELLING_LENGTH: Final = MAX_CHARACTER_LENGTH * PIECE_LENGTH

_BEGINNING: Final = 6
_SHORT_ESCAPES: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_BASE64: Final = b"[A-Za-z0-9+/_-]"
_BASE32: Final = b"[A-Za-z2-7]"
_BETWEEN: Final = rb"(?:\x00|\\{1,4}(?:u0000|x00|0)|%00|=?\r?\n[ \t]{0,4})?"
"""Allowed between two characters: the NUL of a wide encoding, or a line break."""
_WRAP: Final = rb"[\s\\rn]{0,4}"
_HEX_GAP: Final = rb"[: ,-]{0,2}(?:0x|\\{1,4}x)?(?:00[: ,-]?)?"


class Spelling(NamedTuple):
    """One spelling of a value: the patterns of its characters, between them, before and after them."""

    units: tuple[bytes, ...]
    between: bytes = b""
    before: bytes = b""
    after: bytes = b""

    def beginning(self) -> bytes:
        """Make the pattern of the first characters, which is small for any value."""
        return self.before + self.between.join(self.units[:_BEGINNING])

    def whole(self) -> bytes:
        return self.before + self.between.join(self.units) + self.after


def cut_into_pieces(value: str) -> Iterator[str]:
    """Cut a value into the pieces to search for: parts of a long one, and the lines of a multi-line one."""
    if len(value) < MIN_SECRET_LENGTH:
        return
    for start in range(0, len(value), PIECE_LENGTH):
        yield value[start : start + PIECE_LENGTH] if start + MIN_SECRET_LENGTH <= len(value) else value[-PIECE_LENGTH:]
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (
            line[:PIECE_LENGTH] for line in lines if len(line) >= MIN_LINE_LENGTH and not line.startswith("-----")
        )


def list_spellings(piece: str) -> Iterator[Spelling]:
    """List the spellings of a piece. The first one combines all that spell it character by character."""
    data = encode_body(piece)
    yield Spelling(tuple(map(_spell_character, piece)), _BETWEEN)
    yield Spelling(tuple(map(_spell_character, reversed(piece))), _BETWEEN)
    yield Spelling(tuple(b"(?i:%02x)" % byte for byte in data), _HEX_GAP)
    for encoded_data in dict.fromkeys((data, *_encode_wide(piece))):
        for shift in range(3):
            whole, shared_bits = divmod((shift + len(encoded_data)) * 8, 6)
            characters = base64.b64encode(b"\0" * shift + encoded_data)[-(-shift * 8 // 6) : whole]
            before, after = (_BASE64 + b"?" if each else b"" for each in (shift, shared_bits))
            yield Spelling(tuple(map(_spell_base64_byte, characters)), _WRAP, before, after + b"(?:=|%3[dD]){0,2}")
        yield from _base32(encoded_data)


def _encode_wide(piece: str) -> Iterator[bytes]:
    """Encode a piece with two bytes per character, in both byte orders, without the NUL at either end."""
    for order in ("utf-16-le", "utf-16-be"):
        yield piece.encode(order, "surrogatepass").strip(b"\0")


@cache
def _spell_character(character: str) -> bytes:
    """Make the pattern of every spelling of a character, each of which may be escaped again."""
    cases = sorted({each for each in (character, character.lower(), character.upper()) if len(each) == 1})
    return b"(?i:" + b"|".join(dict.fromkeys(pattern for each in cases for pattern in _list_escapes(each))) + b")"


def _list_escapes(character: str) -> Iterator[bytes]:
    data, code = encode_body(character), ord(character)
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
        whole, shared_bits = divmod((shift + len(data)) * 8, 5)
        characters = base64.b32encode(b"\0" * shift + data)[-(-shift * 8 // 5) : whole]
        before, after = (_BASE32 + b"?" if each else b"" for each in (shift, shared_bits))
        yield Spelling(tuple(b"(?i:%c)" % byte for byte in characters), _WRAP, before, after + b"={0,6}")


def _spell_base64_byte(byte: int) -> bytes:
    """Make the pattern of a base64 character in both alphabets, and URL-encoded."""
    return {ord("+"): b"(?:[+-]|%2[bB])", ord("/"): b"(?:[/_]|%2[fF])"}.get(byte, bytes([byte]))


_AHEAD: Final = 8 * MAX_CHARACTER_LENGTH
"""Maximum length of the beginning of a spelling."""


class LiveSecret(NamedTuple):
    start: int
    end: int
    name: str


class LiveValues:
    def __init__(self, values: Mapping[str, str]) -> None:
        name_by_piece = {piece: name for name, value in values.items() for piece in cut_into_pieces(value)}
        # The longest comes first, so that a value takes precedence over others that are parts of it.
        longest_first = sorted(name_by_piece, key=lambda piece: (-len(piece), piece))
        self._spellings = [
            (name_by_piece[piece], spelling) for piece in longest_first for spelling in list_spellings(piece)
        ]
        self._beginnings = [spelling.beginning() for _, spelling in self._spellings]
        self._any = Regex(join_patterns(self._beginnings)) if self._beginnings else None
        self._which: RegexSet | None = None
        self._patterns: dict[int, Regex] = {}

    def find(self, data: bytes, start: int, end: int) -> Iterator[LiveSecret]:
        while self._any is not None and (match := self._any.search(data, start, end)) is not None:
            secret = self._at(data, match[0], end)
            start = match[0] + 1 if secret is None else secret.end
            if secret is not None:
                yield secret

    def begins(self, data: bytes, start: int, end: int) -> bool:
        return self._any is not None and self._any.search(data, start, end) is not None

    def _at(self, data: bytes, position: int, end: int) -> LiveSecret | None:
        self._which = self._which or RegexSet(self._beginnings)
        for index in sorted(self._which.match(data[position : min(end, position + _AHEAD)])):
            name, spelling = self._spellings[index]
            stop = self._get_pattern(index, spelling).match(data, position, end)
            if stop >= 0:
                return LiveSecret(position, stop, name)
        return None

    def _get_pattern(self, index: int, spelling: Spelling) -> Regex:
        if index not in self._patterns:
            self._patterns[index] = Regex(spelling.whole())
        return self._patterns[index]
