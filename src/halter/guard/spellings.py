"""All the ways in which a known secret may turn up in a text: plain, escaped, percent-encoded, in hex, in base64."""

import base64
from collections.abc import Iterator
from functools import cache
from typing import Final

from halter.core.text import to_body
from halter.guard.linear import any_of, escaped

SHORTEST: Final = 8
"""Shorter values are too likely to be part of innocent words."""

PIECE: Final = 256
LINE: Final = 16

LONGEST_SPELLING: Final = 12 * PIECE
"""No spelling of a piece is longer: an emoji takes twelve characters when percent-encoded, or escaped for JSON."""

_ENTITIES: Final = {'"': "quot", "&": "amp", "'": "apos", "<": "lt", ">": "gt"}
_SHORT_ESCAPES: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_BASE64: Final = b"[A-Za-z0-9+/_-]"


def pieces(value: str) -> Iterator[str]:
    """Cut a value into what is looked for: itself; for a long one, parts; the lines of one with several, too."""
    if len(value) < SHORTEST:
        return
    for start in range(0, len(value), PIECE):
        yield value[start : start + PIECE] if start + SHORTEST <= len(value) else value[-PIECE:]
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line[:PIECE] for line in lines if len(line) >= LINE and not line.startswith("-----"))


def spellings(piece: str) -> bytes:
    """Give one pattern for all spellings of a piece, also for those that mix them."""
    data = to_body(piece)
    plain = b"".join(_spelled(character) for character in piece)
    return any_of([plain, _hex(data), *_base64(data)])


@cache
def _spelled(character: str) -> bytes:
    data = to_body(character)
    ways = [escaped(data), b"".join(b"%%(?i:%02x)" % byte for byte in data)]
    if character == " ":
        ways.append(rb"\+")
    if character.isascii() and character.isalnum():
        return b"(?:" + b"|".join(ways) + b")"
    units = character.encode("utf-16-be", "surrogatepass")
    ways.append(b"".join(rb"\\{1,4}u(?i:%02x%02x)" % (units[i], units[i + 1]) for i in range(0, len(units), 2)))
    ways.append(b"&#(?:%d|(?i:x0?%x));" % (ord(character), ord(character)))
    if character in _ENTITIES:
        ways.append(b"&%s;" % _ENTITIES[character].encode())
    if character in _SHORT_ESCAPES:
        ways.append(rb"(?:\\{1,4}r)?\\{1,4}" + _SHORT_ESCAPES[character].encode())
    if character in "\"'/\\":
        ways.append(rb"\\{1,8}" + (b"" if character == "\\" else escaped(data)))
    if character == "\n":
        ways.append(rb"\r\n")
    return b"(?:" + b"|".join(ways) + b")"


def _hex(data: bytes) -> bytes:
    """Also as `xxd` and `openssl` separate it."""
    return b"(?i:" + b"[: ]?".join(b"%02x" % byte for byte in data) + b")"


def _base64(data: bytes) -> Iterator[bytes]:
    """Give the characters that are the same whatever stands before and after, for each of the three alignments.

    The characters at both ends, which share their bits with the neighbours, are hidden with them.
    """
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + data)
        whole = (shift + len(data)) * 8 // 6
        core = encoded[(0, 2, 3)[shift] : whole]
        yield (_BASE64 + b"?" if shift else b"") + b"".join(map(_either, core)) + _BASE64 + b"?={0,2}"


def _either(byte: int) -> bytes:
    """Spell a character of base64 in both alphabets."""
    return {ord("+"): b"[+-]", ord("/"): b"[/_]"}.get(byte, bytes([byte]))
