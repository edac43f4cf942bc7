"""Detection of personal data in text: addresses, numbers and configured names. Takes linear time on hostile input.

Numbers with check digits are verified, so that most other numbers stay. Text that looks like a placeholder is a value
of kind TEXT, so that it is never mistaken for a placeholder.

All names of an agent are one automaton. It ignores word boundaries, which are checked after a match. A check function
returns how many bytes of a candidate belong to the number, or 0.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from itertools import pairwise
from typing import Final, NamedTuple

from halter.core.text import encode_body
from halter.redaction.secret_values import Regex, RegexSet, escape_bytes, join_patterns

_EDGELESS: Final = (
    ("\u0e00", "\u0eff"),
    ("\u1000", "\u109f"),
    ("\u1100", "\u11ff"),
    ("\u1780", "\u17ff"),
    ("\u3040", "\u30ff"),
    ("\u3130", "\u318f"),
    ("\u3400", "\u9fff"),
    ("\ua960", "\ua97f"),
    ("\uac00", "\ud7ff"),
    ("\uf900", "\ufaff"),
    ("\U00020000", "\U0003ffff"),
)
"""Scripts without word boundaries: they put no space between words, or append particles."""

_BREAK: Final = re.compile(rb"\\(?:[nrtbf]|u00[aA]0|u20[0-9a-fA-F]{2})\Z")
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ENDS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_BLANK: Final = (
    rb"[\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
)
_GAP: Final = rb"(?:" + _BLANK + rb"){1,4}"
_ESCAPED_GAP: Final = rb"(?:" + _BLANK + rb"|\\[nrt]|\\u00[aA]0){1,4}"
_NEAR: Final = 8
_MAX_NAME_BYTES: Final = 4096


def _has_edge(letter: str) -> bool:
    return letter.isalnum() and not any(first <= letter <= last for first, last in _EDGELESS)


class NamePatterns(NamedTuple):
    """The names of an agent: plain, and as JSON and programs escape them."""

    plain: "NameMatcher | None"
    escaped: "NameMatcher | None"
    shortest: int


class NameMatcher:
    """Finds names in text encoded by `encode_body`. With `unescape`, matches are unescaped first."""

    def __init__(self, patterns: Sequence[bytes], *, nested: bool, unescape: bool) -> None:
        self._patterns = patterns
        self._any = Regex(join_patterns(patterns))
        self._nested = nested
        self._unescape = unescape
        self._which: RegexSet | None = None

    def find(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Find names in order, without overlaps. Of two at one position, the longer one counts."""
        at, end = 0, len(data)
        while (match := self._any.search(data, at, end)) is not None:
            start = match[0]
            stop = match[1] if self._has_edges(data, *match) else self._shorter(data, start) if self._nested else -1
            if stop >= 0:
                yield start, stop
            at = stop if stop >= 0 else start + 1

    def _shorter(self, data: bytes, start: int) -> int:
        """Find a shorter name at a position where a longer one does not end at a word boundary."""
        self._which = self._which or RegexSet(self._patterns)
        for index in sorted(self._which.match(data[start : start + _MAX_NAME_BYTES])):
            stop = Regex(self._patterns[index]).match(data, start, len(data))
            if stop >= 0 and self._has_edges(data, start, stop):
                return stop
        return -1

    def _has_edges(self, data: bytes, start: int, stop: int) -> bool:
        name = data[start:stop].decode("utf-8", "surrogatepass")
        name = unescape_name(name) if self._unescape else name
        before, after = data[max(0, start - _NEAR) : start], data[stop : stop + _NEAR]
        if _has_edge(name[-1]) and _has_edge(after.decode("utf-8", "replace")[:1]):
            return False
        if not _has_edge(name[0]) or not _has_edge(before.decode("utf-8", "replace")[-1:]):
            return True
        return self._unescape and _BREAK.search(before) is not None


@lru_cache(maxsize=256)
def compile_names(names: tuple[str, ...]) -> NamePatterns:
    forms = {form for name in names if name.strip() for form in _list_accent_forms(name.strip())}
    if not forms:
        return NamePatterns(None, None, _MAX_NAME_BYTES)
    longest_first = sorted(forms, key=lambda name: (-len(name), name))
    has_nested = _has_nested_names(forms)
    plain_patterns = [_make_pattern(name, _GAP, _match_letter) for name in longest_first]
    escaped_patterns = [_make_pattern(name, _ESCAPED_GAP, _match_escaped_letter) for name in longest_first]
    return NamePatterns(
        NameMatcher(plain_patterns, nested=has_nested, unescape=False),
        NameMatcher(escaped_patterns, nested=has_nested, unescape=True),
        min(map(len, forms)),
    )


def _list_accent_forms(name: str) -> set[str]:
    return {name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)}


def _has_nested_names(names: set[str]) -> bool:
    folded_names = sorted({" ".join(name.split()).casefold() for name in names})
    # In sorted order, texts that begin with a name directly follow it.
    return any(next_name.startswith(name) for name, next_name in pairwise(folded_names))


def _make_pattern(name: str, gap: bytes, letter: Callable[[str], bytes]) -> bytes:
    return gap.join(b"".join(map(letter, word)) for word in name.split())


def _list_cases(letter: str) -> list[str]:
    cases = {letter, letter.lower(), letter.upper(), letter.title()}
    cases |= {"ς"} if "σ" in cases else set[str]()
    return sorted(case for case in cases if len(case) == 1)


@lru_cache(maxsize=1024)
def _match_letter(letter: str) -> bytes:
    return b"(?:" + b"|".join(escape_bytes(encode_body(case)) for case in _list_cases(letter)) + b")"


@lru_cache(maxsize=1024)
def _match_escaped_letter(letter: str) -> bytes:
    """Make a pattern for a letter within quotes: plain or escaped. A backslash is always escaped there."""
    if letter.isascii() and letter.isalnum():
        return _match_letter(letter)
    plain = () if letter == "\\" else (_match_letter(letter),)
    short = (rb"\\" + escape_bytes(letter.encode()),) if letter in "\"'\\" else ()
    return b"(?:" + b"|".join((*plain, *short, *map(_match_escape, _list_cases(letter)))) + b")"


def _match_escape(letter: str) -> bytes:
    units = letter.encode("utf-16-be", "surrogatepass").hex().encode()
    short = b"".join(rb"\\u(?i:%s)" % units[at : at + 4] for at in range(0, len(units), 4))
    return rb"%s|\\U(?i:%08x)" % (short, ord(letter))


def unescape_name(escaped: str) -> str:
    plain = _ESCAPE.sub(lambda match: _ENDS.get(match[3], match[3]) or chr(int(match[1] or match[2], 16)), escaped)
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


_LENGTHS: Final = {
    country: int(length)
    for country, length in re.findall(
        rb"([A-Z]{2})(\d\d)",
        b"AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29"
        b" ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30"
        b" KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24"
        b" PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29"
        b" VA22 VG24 XK20 YE30",
    )
}

DIGIT_IBAN_COUNTRIES: Final = (
    *("AE", "AT", "BA", "BE", "CZ", "DE", "DK", "EE", "ES", "FI", "FO", "GL", "HR", "HU", "IL", "IS", "LT", "ME", "NO"),
    *("PL", "PT", "RS", "SE", "SI", "SK", "TN"),
)
"""Countries whose account numbers have no letters, so that most texts are skipped without a check."""
LETTER_IBAN_COUNTRIES: Final = tuple(sorted({country.decode() for country in _LENGTHS} - set(DIGIT_IBAN_COUNTRIES)))
_CHECKED_NUMBERS: Final = {ord(sign): str(int(sign, 36)).encode() for sign in string.digits + string.ascii_letters}
_IBAN_MODULUS: Final = 97
_SIGNS: Final = b" -\xc2\xa0\xe2\x80\xaf"
_DOUBLED: Final = bytes.maketrans(b"0123456789", bytes((0, 2, 4, 6, 8, 1, 3, 5, 7, 9)))
_TEN: Final = 10
_DNI: Final = b"TRWAGMYFPDXBNJZSQVHLCKE"
_ODD: Final = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23)
_NO_NINO: Final = frozenset((b"BG", b"GB", b"KN", b"NK", b"NT", b"TN", b"ZZ"))
_NO_GROUP: Final = frozenset((b"000", b"666"))
_MIN_V6_GROUPS: Final = 2


def check_card(candidate: bytes) -> int:
    digits = candidate.translate(None, b" -")
    single_digits, doubled_digits = digits[-1::-2], digits[-2::-2].translate(_DOUBLED)
    return 0 if (sum(single_digits) - len(single_digits) * ord("0") + sum(doubled_digits)) % _TEN else len(candidate)


def check_iban(candidate: bytes) -> int:
    """Check an IBAN. Its country determines the length."""
    length = _LENGTHS.get(candidate[:2].upper(), 0)
    plain = candidate.translate(None, _SIGNS)[:length]
    if not plain or len(plain) < length:
        return 0
    number = int(b"".join(map(_CHECKED_NUMBERS.__getitem__, plain[4:] + plain[:4])))
    return _find_end(candidate, length) if number % _IBAN_MODULUS == 1 else 0


def _find_end(candidate: bytes, length: int) -> int:
    positions = [position for position, byte in enumerate(candidate) if byte not in _SIGNS]
    return positions[length - 1] + 1


def check_ipv4(candidate: bytes) -> int:
    try:
        return len(candidate) if IPv4Address(candidate.decode()) else 0
    except AddressValueError:
        return 0


def check_ipv6(candidate: bytes) -> int:
    """Check an IPv6 address. `a::b` is a name in many programs, so it must have a digit."""
    groups = [group for group in candidate.split(b":") if group]
    if len(groups) < _MIN_V6_GROUPS or not any(byte in b"0123456789" for byte in candidate):
        return 0
    try:
        return len(candidate) if IPv6Address(candidate.decode()) else 0
    except AddressValueError:
        return 0


def check_us_ssn(candidate: bytes) -> int:
    area, group, serial = candidate[:3], candidate[4:6], candidate[7:]
    is_unassigned = area in _NO_GROUP or area[:1] == b"9" or group == b"00" or serial == b"0000"
    return 0 if is_unassigned else len(candidate)


def check_uk_nino(candidate: bytes) -> int:
    return 0 if candidate[:2].upper() in _NO_NINO else len(candidate)


def check_french_insee(candidate: bytes) -> int:
    plain = candidate.replace(b" ", b"").upper().replace(b"2A", b"19").replace(b"2B", b"18")
    if len(plain) != 15 or not plain.isdigit():  # noqa: PLR2004  the number of its digits
        return 0
    return len(candidate) if int(plain[:13]) % _IBAN_MODULUS == _IBAN_MODULUS - int(plain[13:]) else 0


def check_german_tax_id(candidate: bytes) -> int:
    """Check a tax id: one of the first ten digits occurs two or three times; the last is a check digit."""
    digits = _digits(candidate)
    repeat_counts = [digits[:10].count(digit) for digit in set(digits[:10]) if digits[:10].count(digit) > 1]
    if len(repeat_counts) != 1 or repeat_counts[0] > 3:  # noqa: PLR2004 See above.
        return 0
    product = _TEN
    for digit in digits[:10]:
        product = 2 * ((digit + product) % _TEN or _TEN) % 11
    return len(candidate) if (11 - product) % _TEN == digits[10] else 0


def check_german_pension(candidate: bytes) -> int:
    plain = candidate.replace(b" ", b"").upper()
    digits = _digits(plain[:8] + b"%02d" % (plain[8] - ord("A") + 1) + plain[9:])
    weights = (2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1)
    total = sum(sum(divmod(digit * weight, _TEN)) for digit, weight in zip(digits[:12], weights, strict=True))
    return len(candidate) if total % _TEN == digits[12] else 0


def check_spanish_dni(candidate: bytes) -> int:
    plain = candidate.replace(b"-", b"").replace(b" ", b"").upper()
    number = int(plain[:-1].translate(bytes.maketrans(b"XYZ", b"012")))
    return len(candidate) if _DNI[number % len(_DNI)] == plain[-1] else 0


def check_italian_code(candidate: bytes) -> int:
    values = [int(chr(byte), 36) - 10 * chr(byte).isalpha() for byte in candidate.upper()]
    total = sum(_ODD[value] if position % 2 == 0 else value for position, value in enumerate(values[:15]))
    return len(candidate) if total % 26 == values[15] else 0


def _digits(candidate: bytes) -> list[int]:
    return [byte - ord("0") for byte in candidate if byte in b"0123456789"]


PLACEHOLDER_KINDS: Final = ("EMAIL", "IBAN", "IP", "ID", "CARD", "PHONE", "NAME", "TEXT")
PLACEHOLDER_PATTERN: Final = rf"\[(?:{'|'.join(PLACEHOLDER_KINDS)})_[0-9a-f]{{6,64}}\]"

CheckNumber = Callable[[bytes], int]

_SPACE: Final = r"(?:[ ]|\xc2\xa0|\xe2\x80\xaf)"
_SIGN: Final = r"(?:[ ().\-/]|\xc2\xa0|\xe2\x80[\x90-\x93\xaf])"
_LETTER: Final = r"(?:[A-Za-z0-9_]|[\xc3-\xdd][\x80-\xbf])"
_LABEL: Final = rf"{_LETTER}(?:-*{_LETTER})*"
_EMAIL: Final = rf"{_LETTER}(?:[.%+'\-]*{_LETTER})*[+\-]?(?:@|%40)(?:{_LABEL}\.)+(?:[A-Za-z]|[\xc3-\xdd][\x80-\xbf])+"
_DIGITS: Final = frozenset(b"0123456789")
_WORD: Final = frozenset(byte for byte in range(128) if chr(byte).isalnum() or chr(byte) == "_")
_LEADING: Final = range(0xC3, 0xDE)
"""First bytes of two-byte letters. Three-byte characters are mostly symbols, or of scripts without word boundaries."""
_BRACKET: Final = ord("(")
_BACKSLASH: Final = ord("\\")
_MIN_PHONE_DIGITS: Final = 7
_MAX_PHONE_DIGITS: Final = 16
_DATE: Final = re.compile(rb"\(?\d\d([./-])\d\d\1\d{4}(?!\d)")
_SPELLED: Final = re.compile(rb"\D")


class TextPiece(NamedTuple):
    """A piece of a text. If it has a kind, it is personal data, and `value` is its unescaped form."""

    text: str
    kind: str = ""
    value: str = ""


class Recogniser(NamedTuple):
    """A pattern to search for. With `edge`, a match is never part of a longer word or number.

    After a rejected candidate, the search continues after its `run`.
    """

    kind: str
    pattern: str
    check: CheckNumber = len
    edge: bool = True
    run: str = rf"{_LETTER}+"


def check_phone(candidate: bytes) -> int:
    """Check a phone number: it has a plausible length and is not a date."""
    digits = len(_SPELLED.sub(b"", candidate))
    return len(candidate) if _MIN_PHONE_DIGITS <= digits <= _MAX_PHONE_DIGITS and not _DATE.match(candidate) else 0


_ADDRESS: Final = r"[0-9A-Fa-f:.]+"
_HEX: Final = r"[0-9A-Fa-f]"
_LONG: Final = rf"(?:{_HEX}{{1,4}}|:)(?::{_HEX}{{0,4}}){{2,7}}(?:\.\d{{1,3}}){{0,3}}"

_FIRST: Final = (Recogniser("TEXT", PLACEHOLDER_PATTERN, edge=False), Recogniser("EMAIL", _EMAIL, edge=False))
"""Searched first, since these values can contain a name."""

_NUMBERS: Final = (
    Recogniser(
        "IBAN",
        rf"(?i:{'|'.join(DIGIT_IBAN_COUNTRIES)})\d\d(?:(?:{_SPACE}|-)?\d){{11,24}}"
        rf"|(?i:{'|'.join(LETTER_IBAN_COUNTRIES)})\d\d(?:(?:{_SPACE}|-)?[A-Za-z0-9]){{11,30}}",
        check_iban,
    ),
    Recogniser("IP", _LONG, check_ipv6, run=_ADDRESS),
    Recogniser("IP", r"\d{1,3}(?:\.\d{1,3}){3}", check_ipv4, run=_ADDRESS),
    Recogniser("ID", r"\d{3}-\d{2}-\d{4}", check_us_ssn),
    Recogniser("ID", r"(?i)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z](?: ?\d\d){3} ?[A-D]", check_uk_nino),
    Recogniser("ID", r"[12] ?\d\d ?\d\d ?\d[\dABab](?: ?\d{3}){2} ?\d\d", check_french_insee),
    Recogniser("ID", r"[1-9]\d ?\d{3} ?\d{3} ?\d{3}", check_german_tax_id),
    Recogniser("ID", r"\d\d ?[0-3]\d[01]\d\d\d ?[A-Za-z] ?\d{3}", check_german_pension),
    Recogniser("ID", r"(?:\d{8}|[XYZxyz][- ]?\d{7})[- ]?[A-Za-z]", check_spanish_dni),
    Recogniser("ID", r"(?i)[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]", check_italian_code),
    Recogniser("CARD", r"(?:[3-6]\d{3}|2[2-7]\d\d)(?: \d{4}){3} \d{3}", check_card),
    Recogniser("CARD", r"(?:[3-6]\d{3}|2[2-7]\d\d)(?:(?: \d{4}){3}|(?:-\d{4}){3})", check_card),
    Recogniser("CARD", r"3\d{3}(?: \d{6} \d{4,5}|-\d{6}-\d{4,5})", check_card),
    Recogniser("CARD", r"(?:[3-6]\d|2[2-7])\d{11,17}", check_card),
    Recogniser("PHONE", rf"(?:\+|\(\+[1-9]\d{{0,2}}\)|00{_SPACE}?[1-9])(?:{_SIGN}{{0,2}}\d){{6,16}}", check_phone),
    Recogniser("PHONE", r"(?:1[ .\-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .\-])\d{3}[ .\-]\d{4}", check_phone),
    Recogniser("PHONE", rf"(?:\(0[1-9]\d{{0,4}}\)|0[1-9]\d{{0,4}})(?:{_SIGN}{{1,2}}\d{{2,8}}){{1,4}}", check_phone),
    Recogniser("PHONE", r"0[1-9]\d{8,9}", check_phone),
)
_MIN_NUMBER_LENGTH: Final = 6
_DIGIT: Final = re.compile(r"[0-9]")


class _Search(NamedTuple):
    recogniser: Recogniser
    regex: Regex
    run: Regex


@cache
def _compile_recognisers(recognisers: tuple[Recogniser, ...]) -> tuple[_Search, ...]:
    return tuple(_Search(each, Regex(each.pattern.encode()), Regex(each.run.encode())) for each in recognisers)


def split_pieces(text: str, names: NamePatterns) -> Iterator[TextPiece]:
    """Split a text into personal data and the text between. Joined, the pieces are the text."""
    min_length = min(names.shortest, _MIN_NUMBER_LENGTH)
    for first_piece in (
        _find_recognised(text, _FIRST) if "[" in text or "@" in text or "%40" in text else (TextPiece(text),)
    ):
        if first_piece.kind or len(first_piece.text) < min_length:
            yield first_piece
            continue
        for piece in _find_names(first_piece.text, names):
            if piece.kind or len(piece.text) < _MIN_NUMBER_LENGTH or not _DIGIT.search(piece.text):
                yield piece
            else:
                yield from _find_recognised(piece.text, _NUMBERS)


def _find_names(text: str, names: NamePatterns) -> Iterator[TextPiece]:
    """Find names. Escaped ones come first, since a shorter name can be part of one."""
    if names.escaped is None or "\\" not in text:
        yield from _find_matches(text, names.plain)
        return
    for piece in _find_matches(text, names.escaped):
        if piece.kind:
            yield piece._replace(value=unescape_name(piece.text))
        else:
            yield from _find_matches(piece.text, names.plain)


def _find_matches(text: str, names: NameMatcher | None) -> Iterator[TextPiece]:
    data = encode_body(text) if names else b""
    spans = [(start, end, "NAME") for start, end in names.find(data)] if names else []
    yield from _cut_pieces(data, spans) if spans else (TextPiece(text),)


def _find_recognised(text: str, recognisers: tuple[Recogniser, ...]) -> Iterator[TextPiece]:
    """Find values of one kind after the other, each between the matches of earlier kinds."""
    data = encode_body(text)
    spans: list[tuple[int, int, str]] = []
    for search in _compile_recognisers(recognisers):
        spans = _add_spans(search, data, spans)
    yield from _cut_pieces(data, spans)


def _cut_pieces(data: bytes, spans: Sequence[tuple[int, int, str]]) -> Iterator[TextPiece]:
    at = 0
    for start, end, kind in spans:
        if start > at:
            yield TextPiece(_decode_bytes(data[at:start]))
        value = _decode_bytes(data[start:end])
        yield TextPiece(value, kind, value)
        at = end
    if at < len(data):
        yield TextPiece(_decode_bytes(data[at:]))


def _add_spans(search: _Search, data: bytes, spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    merged_spans: list[tuple[int, int, str]] = []
    at = 0
    for span in (*spans, (len(data), len(data), "")):
        if span[0] - at >= _MIN_NUMBER_LENGTH:
            merged_spans.extend(_find_values(search, data, at, span[0]))
        merged_spans.append(span)
        at = span[1]
    return merged_spans[:-1]


def _find_values(search: _Search, data: bytes, at: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Find values in a range. After a rejected candidate, the search continues after its first run."""
    (kind, _, check, edge, _), regex, run = search
    size_by_candidate: dict[bytes, int] = {}
    while (match := regex.search(data, at, end)) is not None:
        start, stop = match
        if not edge and _is_escape(data, start):
            start += 1
        candidate = data[start:stop]
        size = size_by_candidate.get(candidate, -1)
        if size < 0:
            size = size_by_candidate[candidate] = check(candidate)
        if size and (not edge or _has_edges(data, start, start + size)):
            at = start + size
            yield start, at, kind
        else:
            at = max(start + 1, run.match(data, start, end))


def _has_edges(data: bytes, start: int, end: int) -> bool:
    """Return True if a value is not part of a word, a longer number or a row of numbers."""
    before, after = data[max(start - 2, 0) : start], data[end : end + 2]
    is_in_word = before and data[start] != _BRACKET and (before[-1] in _WORD or before[0] in _LEADING)
    if is_in_word and not _is_escape(data, start - 1):
        return False
    if after and (after[0] in _WORD or after[0] in _LEADING):
        return False
    signs = b".-:" if b":" in data[start:end] else b".-"
    is_in_number = len(before) > 1 and before[-1] in signs and before[-2] in _DIGITS
    return not is_in_number and not (len(after) > 1 and after[0] in signs and after[1] in _DIGITS)


def _is_escape(data: bytes, position: int) -> bool:
    """Return True if a letter is part of an escaped newline, carriage return or tab."""
    return position > 0 and data[position] in b"nrt" and data[position - 1] == _BACKSLASH


def _decode_bytes(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
