"""What in a text tells who somebody is: addresses, numbers and names, each of a kind.

It takes time in proportion to the text, however hostile. Where a number has check digits they decide, so that most
numbers are left alone. Text that looks like a placeholder of ours is a value too, of the kind TEXT: so it can never be
taken for one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

from halter.core.text import to_body
from halter.guard import checksums
from halter.guard.linear import Regex
from halter.guard.names import Matcher, Names, unescaped

KINDS: Final = ("EMAIL", "IBAN", "IP", "ID", "CARD", "PHONE", "NAME", "TEXT")
SHAPE: Final = rf"\[(?:{'|'.join(KINDS)})_[0-9a-f]{{6,64}}\]"
"""What a placeholder looks like."""

Check = Callable[[bytes], int]
"""Tells how many bytes of a candidate are a value: 0 for none."""

_SPACE: Final = r"(?:[ ]|\xc2\xa0|\xe2\x80\xaf)"
_SIGN: Final = r"(?:[ ().\-/]|\xc2\xa0|\xe2\x80[\x90-\x93\xaf])"
_LETTER: Final = r"(?:[A-Za-z0-9_]|[\xc3-\xdd][\x80-\xbf])"
_LABEL: Final = rf"{_LETTER}(?:-*{_LETTER})*"
_EMAIL: Final = rf"{_LETTER}(?:[.%+'\-]*{_LETTER})*[+\-]?(?:@|%40)(?:{_LABEL}\.)+(?:[A-Za-z]|[\xc3-\xdd][\x80-\xbf])+"
_DIGITS: Final = frozenset(b"0123456789")
_WORD: Final = frozenset(byte for byte in range(128) if chr(byte).isalnum() or chr(byte) == "_")
_LEADING: Final = range(0xC3, 0xDE)
"""The first byte of a letter of two; those of three are mostly signs, or of scripts that need no edge."""
_BRACKET: Final = ord("(")
_BACKSLASH: Final = ord("\\")
_FEWEST: Final = 7
_MOST: Final = 16
_DATE: Final = re.compile(rb"\(?\d\d([./-])\d\d\1\d{4}(?!\d)")
_SPELLED: Final = re.compile(rb"\D")


class Piece(NamedTuple):
    """A part of a text. One with a kind is a value; `value` is what it stands for, whatever its spelling."""

    text: str
    kind: str = ""
    value: str = ""


class Recogniser(NamedTuple):
    """Something to look for. One with an `edge` is no part of a longer word or number.

    `run` is what the search goes on behind after a candidate that was none.
    """

    kind: str
    pattern: str
    check: Check = len
    edge: bool = True
    run: str = rf"{_LETTER}+"


def phone(found: bytes) -> int:
    """Tell a phone number from a date, and from what is too short or too long."""
    digits = len(_SPELLED.sub(b"", found))
    return len(found) if _FEWEST <= digits <= _MOST and not _DATE.match(found) else 0


_ADDRESS: Final = r"[0-9A-Fa-f:.]+"
_HEX: Final = r"[0-9A-Fa-f]"
_LONG: Final = rf"(?:{_HEX}{{1,4}}|:)(?::{_HEX}{{0,4}}){{2,7}}(?:\.\d{{1,3}}){{0,3}}"

_FIRST: Final = (Recogniser("TEXT", SHAPE, edge=False), Recogniser("EMAIL", _EMAIL, edge=False))
"""What may hold a name, and is more than that."""

_NUMBERS: Final = (
    Recogniser(
        "IBAN",
        rf"(?i:{'|'.join(checksums.OF_DIGITS)})\d\d(?:(?:{_SPACE}|-)?\d){{11,24}}"
        rf"|(?i:{'|'.join(checksums.OF_LETTERS)})\d\d(?:(?:{_SPACE}|-)?[A-Za-z0-9]){{11,30}}",
        checksums.iban,
    ),
    Recogniser("IP", _LONG, checksums.ipv6, run=_ADDRESS),
    Recogniser("IP", r"\d{1,3}(?:\.\d{1,3}){3}", checksums.ipv4, run=_ADDRESS),
    Recogniser("ID", r"\d{3}-\d{2}-\d{4}", checksums.us_ssn),
    Recogniser("ID", r"(?i)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z](?: ?\d\d){3} ?[A-D]", checksums.uk_nino),
    Recogniser("ID", r"[12] ?\d\d ?\d\d ?\d[\dABab](?: ?\d{3}){2} ?\d\d", checksums.french_insee),
    Recogniser("ID", r"[1-9]\d ?\d{3} ?\d{3} ?\d{3}", checksums.german_tax_id),
    Recogniser("ID", r"\d\d ?[0-3]\d[01]\d\d\d ?[A-Za-z] ?\d{3}", checksums.german_pension),
    Recogniser("ID", r"(?:\d{8}|[XYZxyz][- ]?\d{7})[- ]?[A-Za-z]", checksums.spanish_dni),
    Recogniser("ID", r"(?i)[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]", checksums.italian_code),
    Recogniser("CARD", r"(?:[3-6]\d{3}|2[2-7]\d\d)(?: \d{4}){3} \d{3}", checksums.card),
    Recogniser("CARD", r"(?:[3-6]\d{3}|2[2-7]\d\d)(?:(?: \d{4}){3}|(?:-\d{4}){3})", checksums.card),
    Recogniser("CARD", r"3\d{3}(?: \d{6} \d{4,5}|-\d{6}-\d{4,5})", checksums.card),
    Recogniser("CARD", r"(?:[3-6]\d|2[2-7])\d{11,17}", checksums.card),
    Recogniser("PHONE", rf"(?:\+|\(\+[1-9]\d{{0,2}}\)|00{_SPACE}?[1-9])(?:{_SIGN}{{0,2}}\d){{6,16}}", phone),
    Recogniser("PHONE", r"(?:1[ .\-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .\-])\d{3}[ .\-]\d{4}", phone),
    Recogniser("PHONE", rf"(?:\(0[1-9]\d{{0,4}}\)|0[1-9]\d{{0,4}})(?:{_SIGN}{{1,2}}\d{{2,8}}){{1,4}}", phone),
    Recogniser("PHONE", r"0[1-9]\d{8,9}", phone),
)
_SHORTEST: Final = 6
_DIGIT: Final = re.compile(r"[0-9]")


class _Search(NamedTuple):
    """A recogniser, compiled."""

    recogniser: Recogniser
    regex: Regex
    run: Regex


@cache
def _compiled(recognisers: tuple[Recogniser, ...]) -> tuple[_Search, ...]:
    return tuple(_Search(each, Regex(each.pattern.encode()), Regex(each.run.encode())) for each in recognisers)


def pieces(text: str, names: Names) -> Iterator[Piece]:
    """Take a text apart into values and what stands between them: together they are the text."""
    short = min(names.shortest, _SHORTEST)
    for first in _recognised(text, _FIRST) if "[" in text or "@" in text or "%40" in text else (Piece(text),):
        if first.kind or len(first.text) < short:
            yield first
            continue
        for piece in _named(first.text, names):
            if piece.kind or len(piece.text) < _SHORTEST or not _DIGIT.search(piece.text):
                yield piece
            else:
                yield from _recognised(piece.text, _NUMBERS)


def _named(text: str, names: Names) -> Iterator[Piece]:
    """Find names; first those with escapes, since a shorter name may be a part of one."""
    if names.escaped is None or "\\" not in text:
        yield from _matches(text, names.plain)
        return
    for piece in _matches(text, names.escaped):
        if piece.kind:
            yield piece._replace(value=unescaped(piece.text))
        else:
            yield from _matches(piece.text, names.plain)


def _matches(text: str, names: Matcher | None) -> Iterator[Piece]:
    data = to_body(text) if names else b""
    found = list(names.find(data)) if names else []
    if not found:
        yield Piece(text)
        return
    at = 0
    for start, end in found:
        if start > at:
            yield Piece(_decoded(data[at:start]))
        name = _decoded(data[start:end])
        yield Piece(name, "NAME", name)
        at = end
    if at < len(data):
        yield Piece(_decoded(data[at:]))


def _recognised(text: str, recognisers: tuple[Recogniser, ...]) -> Iterator[Piece]:
    """Find one kind after the other, each between what was found before."""
    data = to_body(text)
    spans: list[tuple[int, int, str]] = []
    for search in _compiled(recognisers):
        spans = _more(search, data, spans)
    at = 0
    for start, end, kind in spans:
        if start > at:
            yield Piece(_decoded(data[at:start]))
        value = _decoded(data[start:end])
        yield Piece(value, kind, value)
        at = end
    if at < len(data):
        yield Piece(_decoded(data[at:]))


def _more(search: _Search, data: bytes, spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    at = 0
    for span in (*spans, (len(data), len(data), "")):
        if span[0] - at >= _SHORTEST:
            found.extend(_values(search, data, at, span[0]))
        found.append(span)
        at = span[1]
    return found[:-1]


def _values(search: _Search, data: bytes, at: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Find values between two places. After a candidate that is none, the search goes on behind its first word."""
    (kind, _, check, edge, _), regex, run = search
    checked: dict[bytes, int] = {}
    while (match := regex.search(data, at, end)) is not None:
        start, stop = match
        if not edge and _escaped(data, start):
            start += 1
        found = data[start:stop]
        size = checked.get(found, -1)
        if size < 0:
            size = checked[found] = check(found)
        if size and (not edge or _has_edges(data, start, start + size)):
            at = start + size
            yield start, at, kind
        else:
            at = max(start + 1, run.match(data, start, end))


def _has_edges(data: bytes, start: int, end: int) -> bool:
    """Tell whether a value stands by itself: it is no part of a word, of a longer number or of a row of them."""
    before, after = data[max(start - 2, 0) : start], data[end : end + 2]
    in_word = before and data[start] != _BRACKET and (before[-1] in _WORD or before[0] in _LEADING)
    if in_word and not _escaped(data, start - 1):
        return False
    if after and (after[0] in _WORD or after[0] in _LEADING):
        return False
    signs = b".-:" if b":" in data[start:end] else b".-"
    inside = len(before) > 1 and before[-1] in signs and before[-2] in _DIGITS
    return not inside and not (len(after) > 1 and after[0] in signs and after[1] in _DIGITS)


def _escaped(data: bytes, place: int) -> bool:
    """Tell whether a letter is none, but the end of a line as JSON and programs write it."""
    return place > 0 and data[place] in b"nrt" and data[place - 1] == _BACKSLASH


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
