"""A call as a program would write it, `name(path="a.txt", lines=[1, 2])`, read token by token.

Values are Python's literals, and JSON's `true`, `false` and `null` as well; a text may go over several lines. Nothing
is evaluated. Every place is looked at once, so that hostile text costs no more than other text, and nesting, which
would use up the stack, is bounded.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

DEEPEST: Final = 64
"""How deeply lists and mappings may be nested."""

Token = tuple[str, str]
"""What sort a piece is of, and its text. Signs are their own sort."""

_Item = TypeVar("_Item")

_PIECE: Final = re.compile(
    r"(?P<space>[ \t\r\n\f]+)"
    r"|(?P<number>[+-]?\.?[0-9](?:[eE][+-]|[0-9A-Za-z_.])*)"
    r"|(?P<word>[^\W\d][\w.-]*)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_FLOAT: Final = re.compile(r"[+-]?[0-9_]*[.eE][0-9_.eE+-]*")
_NAME: Final = re.compile(r"\s*([^\W\d][\w.-]*)")
_STOPS: Final = MappingProxyType({'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")})
_ESCAPE: Final = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<byte>[0-9a-fA-F]{2})|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})"
    r"|N\{(?P<name>[^{}\\]{1,100})\}|(?P<plain>\r\n|.))",
    re.DOTALL,
)
_PLAIN: Final = MappingProxyType(
    {"\n": "", "\r\n": "", "\\": "\\", "'": "'", '"': '"'}
    | {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
)
_CONSTANTS: Final = MappingProxyType(
    {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
)
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_END: Final[Token] = ("end", "")


class Malformed(ValueError):
    """Something that is no call with named literals."""


def tokens_until(closing: str, text: str, start: int, most: int) -> tuple[list[Token], int] | None:
    """Cut text into tokens up to `closing`, wherever it stands outside of quotes, and tell where that ends.

    None if it does not come, if a quote is left open, or if there are more than `most` tokens: nobody can say then what
    is inside and what is not.
    """
    tokens: list[Token] = []
    place = start
    while place < len(text) and len(tokens) < most:
        if text.startswith(closing, place):
            return [*tokens, _END], place + len(closing)
        end, token = _token(text, place)
        if end < 0:
            return None
        if token[0] != "space":
            tokens.append(token)
        place = end
    return None


def name_at(text: str, start: int) -> str:
    """Read the name with which a call begins, if that much can be read."""
    found = _NAME.match(text, start)
    return "" if found is None else found[1]


def read_call(tokens: Sequence[Token]) -> tuple[str, dict[str, Any]]:
    """Read a name and its arguments, or raise Malformed."""
    name, place = _expect(tokens, 0, "word")
    _, place = _expect(tokens, place, "(")
    arguments, place = _separated(tokens, place, ")", _argument)
    _expect(tokens, place, "end")
    return name, _mapping(arguments, once=True)


def _token(text: str, place: int) -> tuple[int, Token]:
    """Tell what stands at a place and where it ends: -1 for a quote that is never closed."""
    if text[place] in _STOPS:
        end = _string_end(text, place)
        return end, ("string", text[place:end])
    found = _PIECE.match(text, place)
    if found is None or found.lastgroup is None:
        return -1, _END
    return found.end(), (found[0] if found.lastgroup == "sign" else found.lastgroup, found[0])


def _string_end(text: str, start: int) -> int:
    quote = text[start]
    closing = quote * 3 if text.startswith(quote * 3, start) else quote
    place = start + len(closing)
    while found := _STOPS[quote].search(text, place):
        place = found.start()
        if text[place] == "\\":
            place += 2
        elif text.startswith(closing, place):
            return place + len(closing)
        else:
            place += 1
    return -1


def _expect(tokens: Sequence[Token], place: int, sort: str) -> tuple[str, int]:
    found, text = tokens[place]
    if found != sort:
        raise Malformed(f"{sort!r} was expected, but {text!r} came.")
    return text, place + 1


def _separated(
    tokens: Sequence[Token], place: int, closing: str, item: Callable[[Sequence[Token], int], tuple[_Item, int]]
) -> tuple[list[_Item], int]:
    """Read items with commas between them, and perhaps one more, up to the closing sign."""
    items: list[_Item] = []
    while tokens[place][0] != closing:
        each, place = item(tokens, place)
        items.append(each)
        if tokens[place][0] != closing:
            _, place = _expect(tokens, place, ",")
    return items, place + 1


def _argument(tokens: Sequence[Token], place: int) -> tuple[tuple[str, Any], int]:
    name, place = _expect(tokens, place, "word")
    _, place = _expect(tokens, place, "=")
    value, place = _value(tokens, place, DEEPEST)
    return (name, value), place


def _value(tokens: Sequence[Token], place: int, depth: int) -> tuple[Any, int]:
    sort, text = tokens[place]
    if not depth:
        raise Malformed(f"Lists and mappings are nested more than {DEEPEST} deep.")
    match sort:
        case "string":
            return _string(text), place + 1
        case "number":
            return _number(text), place + 1
        case "word" if text in _CONSTANTS:
            return _CONSTANTS[text], place + 1
        case "[":
            return _separated(tokens, place + 1, "]", lambda all_, at: _value(all_, at, depth - 1))
        case "(":
            items, end = _separated(tokens, place + 1, ")", lambda all_, at: _value(all_, at, depth - 1))
            alone = len(items) == 1 and tokens[end - 2][0] != ","
            return (items[0] if alone else items), end
        case "{":
            pairs, end = _separated(tokens, place + 1, "}", lambda all_, at: _pair(all_, at, depth - 1))
            return _mapping(pairs), end
        case _:
            raise Malformed(f"A value was expected, but {text!r} came.")


def _pair(tokens: Sequence[Token], place: int, depth: int) -> tuple[tuple[str, Any], int]:
    """Read a key and its value; only text can be a key, since JSON has no other."""
    key, place = _expect(tokens, place, "string")
    _, place = _expect(tokens, place, ":")
    value, place = _value(tokens, place, depth)
    return (_string(key), value), place


def _mapping(pairs: Sequence[tuple[str, Any]], *, once: bool = False) -> dict[str, Any]:
    mapping = dict(pairs)
    if once and len(mapping) < len(pairs):
        raise Malformed("An argument is given twice.")
    return mapping


def _number(text: str) -> int | float:
    try:
        return float(text) if _FLOAT.fullmatch(text) else int(text, 0)
    except ValueError:
        raise Malformed(f"{text!r} is no number, or too large.") from None


def _string(token: str) -> str:
    quotes = 3 if token[:3] in {'"""', "'''"} else 1
    text = _ESCAPE.sub(_unescaped, token[quotes:-quotes])
    if _SURROGATES.search(text) is None:
        return text
    # JSON writes a character beyond the first 65,536 as two escapes.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _unescaped(found: re.Match[str]) -> str:
    sort, text = found.lastgroup, found[found.lastgroup or 0]
    match sort:
        case "octal":
            return chr(int(text, 8))
        case "name":
            return _named(text)
        case "plain" if text in "xuUN":
            raise Malformed(f"The escape {found[0]!r} is not complete.")
        case "plain":
            return _PLAIN.get(text, found[0])
        case _:
            return _character(int(text, 16))


def _named(name: str) -> str:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        raise Malformed(f"No character is called {name!r}.") from None


def _character(number: int) -> str:
    try:
        return chr(number)
    except (ValueError, OverflowError):
        raise Malformed(f"There is no character {number:#x}.") from None
