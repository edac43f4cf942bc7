"""Numbers that prove themselves: cards, bank accounts and the ids of nations, by their check digits.

Each function is given a candidate and tells how many of its bytes are the number, or 0: what follows a number in a text
may look like a part of it.
"""

import re
import string
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

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
"""How long the bank accounts of each country are."""

OF_DIGITS: Final = (
    *("AE", "AT", "BA", "BE", "CZ", "DE", "DK", "EE", "ES", "FI", "FO", "GL", "HR", "HU", "IL", "IS", "LT", "ME", "NO"),
    *("PL", "PT", "RS", "SE", "SI", "SK", "TN"),
)
"""Where the numbers of accounts have no letters; most texts are passed over without a check."""
OF_LETTERS: Final = tuple(sorted({country.decode() for country in _LENGTHS} - set(OF_DIGITS)))
_NUMBERS: Final = {ord(sign): str(int(sign, 36)).encode() for sign in string.digits + string.ascii_letters}
"""What each letter and digit counts for in such a number."""
_CIRCLE: Final = 97
_SIGNS: Final = b" -\xc2\xa0\xe2\x80\xaf"
_DOUBLED: Final = bytes.maketrans(b"0123456789", bytes((0, 2, 4, 6, 8, 1, 3, 5, 7, 9)))
_TEN: Final = 10
_DNI: Final = b"TRWAGMYFPDXBNJZSQVHLCKE"
_ODD: Final = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23)
_NO_NINO: Final = frozenset((b"BG", b"GB", b"KN", b"NK", b"NT", b"TN", b"ZZ"))
_NO_GROUP: Final = frozenset((b"000", b"666"))
_SHORTEST_V6: Final = 2


def card(found: bytes) -> int:
    """Check the digits of a payment card, as Luhn has it."""
    digits = found.translate(None, b" -")
    single, doubled = digits[-1::-2], digits[-2::-2].translate(_DOUBLED)
    return 0 if (sum(single) - len(single) * ord("0") + sum(doubled)) % _TEN else len(found)


def iban(found: bytes) -> int:
    """Check an account's number, and find its end: its country says how long it is."""
    length = _LENGTHS.get(found[:2].upper(), 0)
    plain = found.translate(None, _SIGNS)[:length]
    if not plain or len(plain) < length:
        return 0
    number = int(b"".join(map(_NUMBERS.__getitem__, plain[4:] + plain[:4])))
    return _end_of(found, length) if number % _CIRCLE == 1 else 0


def _end_of(found: bytes, length: int) -> int:
    """Find where so many letters and digits end."""
    places = [place for place, byte in enumerate(found) if byte not in _SIGNS]
    return places[length - 1] + 1


def ipv4(found: bytes) -> int:
    """Check an address of four numbers."""
    try:
        return len(found) if IPv4Address(found.decode()) else 0
    except AddressValueError:
        return 0


def ipv6(found: bytes) -> int:
    """Check an address of colons and hex. `a::b` is a name in many programs, so it must have a digit."""
    groups = [group for group in found.split(b":") if group]
    if len(groups) < _SHORTEST_V6 or not any(byte in b"0123456789" for byte in found):
        return 0
    try:
        return len(found) if IPv6Address(found.decode()) else 0
    except AddressValueError:
        return 0


def us_ssn(found: bytes) -> int:
    """Leave out what was never given to anybody."""
    area, group, serial = found[:3], found[4:6], found[7:]
    never = area in _NO_GROUP or area[:1] == b"9" or group == b"00" or serial == b"0000"
    return 0 if never else len(found)


def uk_nino(found: bytes) -> int:
    """Leave out the prefixes that are not in use."""
    return 0 if found[:2].upper() in _NO_NINO else len(found)


def french_insee(found: bytes) -> int:
    """Check the key of a social security number; Corsica has letters."""
    plain = found.replace(b" ", b"").upper().replace(b"2A", b"19").replace(b"2B", b"18")
    if len(plain) != 15 or not plain.isdigit():  # noqa: PLR2004 That many digits it has.
        return 0
    return len(found) if int(plain[:13]) % _CIRCLE == _CIRCLE - int(plain[13:]) else 0


def german_tax_id(found: bytes) -> int:
    """Check a tax id: one of its first ten digits stands there twice or three times, and the last one proves all."""
    digits = _digits(found)
    repeated = [digits[:10].count(digit) for digit in set(digits[:10]) if digits[:10].count(digit) > 1]
    if len(repeated) != 1 or repeated[0] > 3:  # noqa: PLR2004 See above.
        return 0
    product = _TEN
    for digit in digits[:10]:
        product = 2 * ((digit + product) % _TEN or _TEN) % 11
    return len(found) if (11 - product) % _TEN == digits[10] else 0


def german_pension(found: bytes) -> int:
    """Check the number of a pension; its letter counts as two digits."""
    plain = found.replace(b" ", b"").upper()
    digits = _digits(plain[:8] + b"%02d" % (plain[8] - ord("A") + 1) + plain[9:])
    weights = (2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1)
    total = sum(sum(divmod(digit * weight, _TEN)) for digit, weight in zip(digits[:12], weights, strict=True))
    return len(found) if total % _TEN == digits[12] else 0


def spanish_dni(found: bytes) -> int:
    """Check the letter of an identity card, or of a foreigner's number."""
    plain = found.replace(b"-", b"").replace(b" ", b"").upper()
    number = int(plain[:-1].translate(bytes.maketrans(b"XYZ", b"012")))
    return len(found) if _DNI[number % len(_DNI)] == plain[-1] else 0


def italian_code(found: bytes) -> int:
    """Check the letter of a codice fiscale."""
    values = [int(chr(byte), 36) - 10 * chr(byte).isalpha() for byte in found.upper()]
    total = sum(_ODD[value] if place % 2 == 0 else value for place, value in enumerate(values[:15]))
    return len(found) if total % 26 == values[15] else 0


def _digits(found: bytes) -> list[int]:
    return [byte - ord("0") for byte in found if byte in b"0123456789"]
