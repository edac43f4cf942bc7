"""Arithmetic without a model: a tokenizer and a parser over exact fractions, with bounds on all that can grow."""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from operator import add, mod, mul, sub
from typing import Final

import msgspec

from halter.front_door.time_grammar import NUMBERS

MAX_SUM_LENGTH: Final = 300
"""Maximum characters of a sum."""
MAX_SUM_DEPTH: Final = 30
"""Maximum nesting of parentheses and signs."""
MAX_BITS: Final = 3000
"""Maximum bits of a number: about 900 digits."""
DECIMAL_PLACES: Final = 15
"""Number of digits shown of a repeating decimal."""

NUMBER_TOO_LARGE: Final = "The result is too large."
DIVISION_BY_ZERO: Final = "Cannot divide by zero."

_QUESTION: Final = re.compile(
    r"(?:(?:what is|what's|whats|what are|how much is|how much are|how many is|calculate|compute|evaluate|work out"
    r"|solve|tell me(?: what)?)\s+)(?P<sum>.+?)(?: is| equals?)?"
)
_SIGN_WORDS: Final = (
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
_SIGNS: Final = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"})
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+(?:\.\d+)?(?![\d,.])|\.\d+(?![\d,.]))"
    r"|(?P<power>\^|\*\*)|(?P<times>\*|(?<!\b0)x(?![a-z]))|(?P<mod>mod\b|%(?=\s*[\d.(]))|(?P<part>%\s*of\b)"
    r"|(?P<sign>[-+/()]|%(?!\s*[-+])))",
    re.ASCII,
)
"""A number or a sign. Between two numbers % is the remainder, before `of` a part, else a percentage."""
_OPERATORS: Final[Sequence[Mapping[str, Callable[[Fraction, Fraction], Fraction]]]] = (
    {"+": add, "-": sub},
    {"times": mul, "/": lambda left, right: left / right, "mod": mod},
)
_DIGITS: Final = "0123456789."
_NOT_A_SUM: Final = re.compile(r"24/7|50/50|\d+([-/.])\d+\1\d+|0\d+[-/]\d+|\+?\d[\d -]*-\d{3,}", re.ASCII)


class _NoSum(ValueError): ...


class _TooLarge(ValueError): ...


class _TokenCursor(msgspec.Struct):
    """The position in the tokens of a sum."""

    tokens: Sequence[str]
    at: int = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def consume(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        is_next = self.peek() == token
        self.at += is_next
        return is_next


def evaluate_sum(sentence: str) -> str | None:
    """Evaluate a sum as a person writes it. Returns None if the sentence is not one.

    The answer is the exact result, or a sentence with the reason why there is none.
    """
    text = sentence.strip().lower().translate(_SIGNS)
    if len(text) > MAX_SUM_LENGTH:
        return None
    text = re.sub(r"[\s=?.]+$", "", text) if not re.search(r"[=?]\s*[a-z0-9]", text) else text
    question = _QUESTION.fullmatch(text)
    text = question["sum"] if question else text
    if question is None and _NOT_A_SUM.fullmatch(text):
        return None
    try:
        tokens = _tokenize(_words_to_signs(text))
        return _format_result(_parse_whole(tokens))
    except _NoSum:
        return None
    except _TooLarge:
        return NUMBER_TOO_LARGE
    except ZeroDivisionError:
        return DIVISION_BY_ZERO


def _words_to_signs(text: str) -> str:
    """Replace words by signs and digits. Other words stay, and the text is then not a sum."""
    for words, sign in _SIGN_WORDS:
        text = re.sub(rf"\b(?:{words})\b", f" {sign} ", text)
    return re.sub(r"[a-z-]*[a-z]", _digits, text)


def _digits(match: re.Match[str]) -> str:
    return match[0] if match[0] in {"a", "an"} else str(NUMBERS.get(match[0], match[0]))


def _tokenize(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NoSum
        name = match.lastgroup or ""
        tokens.append(match[name].replace(",", "") if name in {"number", "sign"} else name)
        position = match.end()
    if all(token[0] in _DIGITS for token in tokens[1:]):
        raise _NoSum
    return tokens


def _parse_whole(tokens: Sequence[str]) -> Fraction:
    cursor = _TokenCursor(tokens)
    result = _parse_operators(cursor, MAX_SUM_DEPTH)
    if cursor.peek():
        raise _NoSum
    return result


def _parse_operators(cursor: _TokenCursor, depth: int, level: int = 0) -> Fraction:
    if level == len(_OPERATORS):
        return _parse_signed(cursor, depth)
    left = _parse_operators(cursor, depth, level + 1)
    while operate := _OPERATORS[level].get(cursor.peek()):
        cursor.consume()
        right = _parse_operators(cursor, depth, level + 1)
        # 200 + 10% is ambiguous: 200.1 or 220.
        if level == 0 and cursor.tokens[cursor.at - 1] == "%":
            raise _NoSum
        left = _check_size(operate(left, right))
    return left


def _parse_signed(cursor: _TokenCursor, depth: int) -> Fraction:
    if depth <= 0:
        raise _NoSum
    if cursor.accept("-"):
        return -_parse_signed(cursor, depth - 1)
    if cursor.accept("+"):
        return _parse_signed(cursor, depth - 1)
    value = _parse_value(cursor, depth)
    if cursor.accept("%"):
        value /= 100
    elif cursor.accept("part"):
        value = _check_size(value / 100 * _parse_signed(cursor, depth - 1))
    return _raise_to_power(value, _parse_signed(cursor, depth - 1)) if cursor.accept("power") else value


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NoSum
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
        raise _TooLarge
    return base**exponent.numerator


def _parse_value(cursor: _TokenCursor, depth: int) -> Fraction:
    symbol = cursor.consume()
    if symbol == "(":
        value = _parse_operators(cursor, depth - 1)
        if not cursor.accept(")"):
            raise _NoSum
        return value
    if not symbol or symbol[0] not in _DIGITS:
        raise _NoSum
    return _check_size(Fraction(Decimal(symbol)))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _TooLarge
    return value


def _format_result(value: Fraction) -> str:
    """Format a result exactly; a repeating decimal as a fraction with an approximation."""
    if value.denominator == 1:
        return str(value.numerator)
    remainder, decimals = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while remainder % prime == 0:
            remainder, power = remainder // prime, power + 1
        decimals = max(decimals, power)
    if remainder == 1:
        digits = str(abs(value.numerator) * 10**decimals // value.denominator).rjust(decimals + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-decimals]}.{digits[-decimals:]}"
    approximation = Context(prec=DECIMAL_PLACES).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{value.numerator}/{value.denominator}, about {approximation.normalize()}"
