"""Sums without a model: a tokenizer and a parser over exact fractions, with bounds on everything that can grow."""

import re
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Final

import msgspec

from halter.front_door.time_text import NUMBERS

LONGEST_SUM: Final = 300
"""Most characters of a sum."""
DEEPEST_SUM: Final = 30
"""Deepest nesting of parentheses and signs."""
MOST_BITS: Final = 3000
"""Largest number: about 900 digits."""
DECIMAL_PLACES: Final = 15
"""Digits shown of a repeating decimal."""

NUMBER_TOO_LARGE: Final = "That number is too large to be worked out here."
DIVISION_BY_ZERO: Final = "Nothing can be divided by zero."

_ASKED: Final = re.compile(
    r"(?:(?:what is|what's|whats|what are|how much is|how much are|how many is|calculate|compute|evaluate|work out"
    r"|solve|tell me(?: what)?)\s+)(?P<sum>.+?)(?: is| equals?)?"
)
_WORDS: Final = (
    (r"multiplied by|times", "*"),
    (r"divided by|over", "/"),
    (r"plus", "+"),
    (r"minus|less", "-"),
    (r"to the power of|raised to", "^"),
    (r"modulo|mod", "mod"),
    (r"squared", "^2"),
    (r"cubed", "^3"),
    (r"percent of|per cent of", "% of"),
    (r"percent|per cent", "%"),
)
_SIGNS: Final = str.maketrans(
    {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "\u00b2": "^2"}
)
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+(?:\.\d+)?(?![\d,.])|\.\d+(?![\d,.]))"
    r"|(?P<sign>\*\*|[-+*/^%()]|mod\b|of\b|x(?![a-z])))",
    re.ASCII,
)
_NO_SUM: Final = re.compile(r"24/7|50/50|\d+([-/.])\d+\1\d+|0\d+[-/]\d+|\+?\d[\d -]*-\d{3,}", re.ASCII)


class _NoSum(ValueError): ...


class _TooLarge(ValueError): ...


class _Place(msgspec.Struct):
    """The position in the tokens of a sum."""

    tokens: Sequence[str]
    at: int = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def consume(self) -> str:
        taken = self.peek()
        self.at += 1
        return taken


def evaluate_sum(sentence: str) -> str | None:
    """Evaluates a sum as a person writes it; None if the sentence is not one.

    The answer is exact, or a sentence why there is none.
    """
    written = sentence.strip().lower().translate(_SIGNS)
    if len(written) > LONGEST_SUM:
        return None
    written = re.sub(r"[\s=?.]+$", "", written) if not re.search(r"[=?]\s*[a-z0-9]", written) else written
    asked = _ASKED.fullmatch(written)
    written = asked["sum"] if asked else written
    if asked is None and _NO_SUM.fullmatch(written):
        return None
    try:
        tokens = _tokenize(_words_to_signs(written))
        return _format_result(_parse_whole(tokens))
    except _NoSum:
        return None
    except _TooLarge:
        return NUMBER_TOO_LARGE
    except ZeroDivisionError:
        return DIVISION_BY_ZERO


def _words_to_signs(written: str) -> str:
    """Writes words as signs and digits; other words stay, and make it no sum."""
    for words, sign in _WORDS:
        written = re.sub(rf"\b(?:{words})\b", f" {sign} ", written)
    return re.sub(r"[a-z-]*[a-z]", _digits, written)


def _digits(match: re.Match[str]) -> str:
    return match[0] if match[0] in {"a", "an"} else str(NUMBERS.get(match[0], match[0]))


def _tokenize(written: str) -> list[str]:
    tokens: list[str] = []
    place = 0
    written = written.strip()
    while place < len(written):
        match = _TOKEN.match(written, place)
        if match is None:
            raise _NoSum
        tokens.append(match["number"].replace(",", "") if match["number"] else match["sign"])
        place = match.end()
    if not any(token[0] not in "0123456789." for token in tokens[1:]):
        raise _NoSum
    return tokens


def _parse_whole(tokens: Sequence[str]) -> Fraction:
    place = _Place(tokens)
    result = _parse_sum(place, DEEPEST_SUM)
    if place.peek():
        raise _NoSum
    return result


def _parse_sum(place: _Place, depth: int) -> Fraction:
    left = _parse_product(place, depth)
    while (sign := place.peek()) in {"+", "-"}:
        place.consume()
        start = place.at
        right = _parse_product(place, depth)
        # 200 + 10% is 200.1 for some and 220 for others.
        if "%" in place.tokens[start : place.at] and place.tokens[place.at - 1] == "%":
            raise _NoSum
        left = _check_size(left + right if sign == "+" else left - right)
    return left


def _parse_product(place: _Place, depth: int) -> Fraction:
    left = _parse_signed(place, depth)
    while (sign := place.peek()) in {"*", "x", "/", "mod", "%", "of"}:
        if sign == "of":
            raise _NoSum
        place.consume()
        right = _parse_signed(place, depth)
        left = _check_size(_apply_operator(left, sign, right))
    return left


def _apply_operator(left: Fraction, sign: str, right: Fraction) -> Fraction:
    if sign == "/":
        return left / right
    return left * right if sign in {"*", "x"} else left % right


def _parse_signed(place: _Place, depth: int) -> Fraction:
    if depth <= 0:
        raise _NoSum
    if place.peek() in {"-", "+"}:
        sign = place.consume()
        value = _parse_signed(place, depth - 1)
        return -value if sign == "-" else value
    return _parse_power(place, depth)


def _parse_power(place: _Place, depth: int) -> Fraction:
    base = _parse_percent(place, depth)
    if place.peek() not in {"^", "**"}:
        return base
    place.consume()
    exponent = _parse_signed(place, depth - 1)
    if exponent.denominator != 1:
        raise _NoSum
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MOST_BITS:
        raise _TooLarge
    return base**exponent.numerator


def _parse_percent(place: _Place, depth: int) -> Fraction:
    """Parses a value, or a percentage: `15%`, `15% of 80`. Between two numbers, % is the remainder."""
    value = _parse_value(place, depth)
    if place.peek() != "%":
        return value
    following = place.tokens[place.at + 1] if place.at + 1 < len(place.tokens) else ""
    if following == "of":
        place.at += 2
        return _check_size(value / 100 * _parse_signed(place, depth - 1))
    if following and following[0] in "0123456789.(":
        return value
    if following in {"+", "-"}:
        raise _NoSum
    place.consume()
    return value / 100


def _parse_value(place: _Place, depth: int) -> Fraction:
    read = place.consume()
    if read == "(":
        inside = _parse_sum(place, depth - 1)
        if place.consume() != ")":
            raise _NoSum
        return inside
    if not read or read[0] not in "0123456789.":
        raise _NoSum
    return _check_size(Fraction(Decimal(read)))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise _TooLarge
    return value


def _format_result(value: Fraction) -> str:
    """Writes a result exactly; a repeating decimal also as its approximation."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, places = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        places = max(places, power)
    if rest == 1:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    near = Context(prec=DECIMAL_PLACES).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{value.numerator}/{value.denominator}, about {near.normalize()}"
