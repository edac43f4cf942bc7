"""All the ways in which a known secret may turn up: plain, escaped, encoded, in capitals, wrapped, reversed."""

import base64
from collections.abc import Iterator
from functools import cache
from html.entities import html5
from typing import Final, NamedTuple

from halter.core.text import to_body
from halter.guard.linear import escaped

SHORTEST: Final = 8
"""Shorter values are too likely to be part of innocent words."""

PIECE: Final = 256
LINE: Final = 16

LONGEST_CHARACTER: Final = 48
"""No character takes more: four bytes of a letter as `%252525f0` each, and what stands between two of them."""
LONGEST_SPELLING: Final = LONGEST_CHARACTER * PIECE

_BEGINNING: Final = 6
_SHORT_ESCAPES: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_BASE64: Final = b"[A-Za-z0-9+/_-]"
_BASE32: Final = b"[A-Za-z2-7]"
_BETWEEN: Final = rb"(?:\x00|\\{1,4}(?:u0000|x00|0)|%00|=?\r?\n[ \t]{0,4})?"
"""What may stand between two characters: a text of two bytes a character has a NUL there, and lines are wrapped."""
_WRAP: Final = rb"[\s\\rn]{0,4}"
_HEX_GAP: Final = rb"[: ,-]{0,2}(?:0x|\\{1,4}x)?(?:00[: ,-]?)?"


class Spelling(NamedTuple):
    """One way of writing a value: the patterns of its characters, what may stand between them, and around."""

    units: tuple[bytes, ...]
    between: bytes = b""
    before: bytes = b""
    after: bytes = b""

    def beginning(self) -> bytes:
        """Give a pattern for the first characters, which stays small however long a value is."""
        return self.before + self.between.join(self.units[:_BEGINNING])

    def whole(self) -> bytes:
        """Give a pattern for all of it."""
        return self.before + self.between.join(self.units) + self.after


def pieces(value: str) -> Iterator[str]:
    """Cut a value into what is looked for: itself; for a long one, parts; the lines of one with several, too."""
    if len(value) < SHORTEST:
        return
    for start in range(0, len(value), PIECE):
        yield value[start : start + PIECE] if start + SHORTEST <= len(value) else value[-PIECE:]
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line[:PIECE] for line in lines if len(line) >= LINE and not line.startswith("-----"))


def spellings(piece: str) -> Iterator[Spelling]:
    """Give the spellings of a piece; the first one mixes all that write it character by character."""
    data = to_body(piece)
    yield Spelling(tuple(map(_spelled, piece)), _BETWEEN)
    yield Spelling(tuple(map(_spelled, reversed(piece))), _BETWEEN)
    yield Spelling(tuple(b"(?i:%02x)" % byte for byte in data), _HEX_GAP)
    for encoded in dict.fromkeys((data, *_wide(piece))):
        yield from _base64(encoded)
        yield from _base32(encoded)


def _wide(piece: str) -> Iterator[bytes]:
    """Write a piece with two bytes a character, in both orders, without the NUL at either end."""
    for order in ("utf-16-le", "utf-16-be"):
        yield piece.encode(order, "surrogatepass").strip(b"\0")


@cache
def _spelled(character: str) -> bytes:
    """Spell one character in every way, of which each may be escaped again."""
    cases = sorted({each for each in (character, character.lower(), character.upper()) if len(each) == 1})
    return b"(?i:" + b"|".join(dict.fromkeys(way for each in cases for way in _ways(each))) + b")"


def _ways(character: str) -> Iterator[bytes]:
    data, code = to_body(character), ord(character)
    yield escaped(data) if data.isalnum() else rb"\\{0,8}" + escaped(data)
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
    names = b"".join(b"|" + name.encode() for name in _entities(character))
    yield b"&(?:amp;){0,2}(?:#(?:0{0,4}%d|x0{0,4}%x)%s);?" % (code, code, names)
    units = character.encode("utf-16-be", "surrogatepass").hex()
    yield b"".join(rb"(?:%%|\\{1,4})u%s" % units[at : at + 4].encode() for at in range(0, len(units), 4))
    yield rb"\\{1,4}(?:u\{0{0,4}%x\}|U%08x)" % (code, code)
    yield b"".join(rb"\\{1,4}(?:x\{?%02x\}?|0?%03o)" % (byte, byte) for byte in data)


def _entities(character: str) -> list[str]:
    return sorted({name.rstrip(";") for name, each in html5.items() if each == character})


def _base64(data: bytes) -> Iterator[Spelling]:
    """Give the characters that are the same whatever stands before and after, for each of the three alignments.

    The characters at both ends, which share their bits with the neighbours, are hidden with them.
    """
    for shift in range(3):
        whole, shared = divmod((shift + len(data)) * 8, 6)
        core = base64.b64encode(b"\0" * shift + data)[-(-shift * 8 // 6) : whole]
        before, after = (_BASE64 + b"?" if each else b"" for each in (shift, shared))
        yield Spelling(tuple(map(_either, core)), _WRAP, before, after + b"(?:=|%3[dD]){0,2}")


def _base32(data: bytes) -> Iterator[Spelling]:
    """Do the same for the five alignments of base32."""
    for shift in range(5):
        whole, shared = divmod((shift + len(data)) * 8, 5)
        core = base64.b32encode(b"\0" * shift + data)[-(-shift * 8 // 5) : whole]
        before, after = (_BASE32 + b"?" if each else b"" for each in (shift, shared))
        yield Spelling(tuple(b"(?i:%c)" % byte for byte in core), _WRAP, before, after + b"={0,6}")


def _either(byte: int) -> bytes:
    """Spell a character of base64 in both alphabets, and as URLs carry it."""
    return {ord("+"): b"(?:[+-]|%2[bB])", ord("/"): b"(?:[/_]|%2[fF])"}.get(byte, bytes([byte]))
