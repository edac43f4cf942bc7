"""Calls written as text, for models without native tool calls: `<skill k7f2>read_file(path="app.log")</skill>`.

The opening tag carries a nonce that is new in every request, so a call that a model quotes, from a page or from its own
older answers, never runs. Calls in a `<parallel>` block are made concurrently, all others one after the other.

A call is `name(path="a.txt", lines=[1, 2])`: Python literals plus JSON's `true`, `false` and `null`. Nothing is
evaluated. Every character is read once and nesting is bounded, so hostile text costs no more than other text.

Also: JSON values from outside, made safe to keep, compare, look into and show on one line.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import msgspec

from halter.core.messages import Message, Text, ToolCall, ToolResult
from halter.core.text import clean, from_body, shorten
from halter.core.tools import ToolSpec

DEEPEST_LITERAL: Final = 64

Token = tuple[str, str]
"""The kind of a token, and its text. Punctuation is its own kind."""

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


class MalformedCall(ValueError):
    """Not a call with named literals."""


def tokenize_until(closing: str, text: str, start: int, limit: int) -> tuple[list[Token], int] | None:
    """Cut text into tokens up to `closing` outside of quotes; return where that ends.

    None if `closing` is missing, a quote is left open, or there are more than `most` tokens: then the end of the call
    is ambiguous.
    """
    tokens: list[Token] = []
    place = start
    while place < len(text) and len(tokens) < limit:
        if text.startswith(closing, place):
            return [*tokens, _END], place + len(closing)
        end, token = _read_token(text, place)
        if end < 0:
            return None
        if token[0] != "space":
            tokens.append(token)
        place = end
    return None


def read_call_name(text: str, start: int) -> str:
    match = _NAME.match(text, start)
    return "" if match is None else match[1]


def read_call(tokens: Sequence[Token]) -> tuple[str, dict[str, Any]]:
    name, place = _expect(tokens, 0, "word")
    _, place = _expect(tokens, place, "(")
    arguments, place = _read_items(tokens, place, ")", _read_argument)
    _expect(tokens, place, "end")
    return name, _make_mapping(arguments, once=True)


def _read_token(text: str, place: int) -> tuple[int, Token]:
    """Read one token and where it ends: -1 for a quote that is never closed."""
    if text[place] in _STOPS:
        end = _string_end(text, place)
        return end, ("string", text[place:end])
    match = _PIECE.match(text, place)
    if match is None or match.lastgroup is None:
        return -1, _END
    return match.end(), (match[0] if match.lastgroup == "sign" else match.lastgroup, match[0])


def _string_end(text: str, start: int) -> int:
    quote = text[start]
    closing = quote * 3 if text.startswith(quote * 3, start) else quote
    place = start + len(closing)
    while match := _STOPS[quote].search(text, place):
        place = match.start()
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
        raise MalformedCall(f"{sort!r} was expected, but {text!r} came.")
    return text, place + 1


def _read_items(
    tokens: Sequence[Token], place: int, closing: str, item: Callable[[Sequence[Token], int], tuple[_Item, int]]
) -> tuple[list[_Item], int]:
    """Read comma-separated items, with an optional trailing comma, up to the closing sign."""
    items: list[_Item] = []
    while tokens[place][0] != closing:
        each, place = item(tokens, place)
        items.append(each)
        if tokens[place][0] != closing:
            _, place = _expect(tokens, place, ",")
    return items, place + 1


def _read_argument(tokens: Sequence[Token], place: int) -> tuple[tuple[str, Any], int]:
    name, place = _expect(tokens, place, "word")
    _, place = _expect(tokens, place, "=")
    value, place = _read_value(tokens, place, DEEPEST_LITERAL)
    return (name, value), place


def _read_value(tokens: Sequence[Token], place: int, depth: int) -> tuple[Any, int]:
    sort, text = tokens[place]
    if not depth:
        raise MalformedCall(f"Lists and mappings are nested more than {DEEPEST_LITERAL} deep.")
    match sort:
        case "string":
            return _read_string(text), place + 1
        case "number":
            return _read_number(text), place + 1
        case "word" if text in _CONSTANTS:
            return _CONSTANTS[text], place + 1
        case "[":
            return _read_items(tokens, place + 1, "]", lambda all_, at: _read_value(all_, at, depth - 1))
        case "(":
            items, end = _read_items(tokens, place + 1, ")", lambda all_, at: _read_value(all_, at, depth - 1))
            alone = len(items) == 1 and tokens[end - 2][0] != ","
            return (items[0] if alone else items), end
        case "{":
            pairs, end = _read_items(tokens, place + 1, "}", lambda all_, at: _read_pair(all_, at, depth - 1))
            return _make_mapping(pairs), end
        case _:
            raise MalformedCall(f"A value was expected, but {text!r} came.")


def _read_pair(tokens: Sequence[Token], place: int, depth: int) -> tuple[tuple[str, Any], int]:
    """Read a key and its value; only text can be a key in JSON."""
    key, place = _expect(tokens, place, "string")
    _, place = _expect(tokens, place, ":")
    value, place = _read_value(tokens, place, depth)
    return (_read_string(key), value), place


def _make_mapping(pairs: Sequence[tuple[str, Any]], *, once: bool = False) -> dict[str, Any]:
    mapping = dict(pairs)
    if once and len(mapping) < len(pairs):
        raise MalformedCall("An argument is given twice.")
    return mapping


def _read_number(text: str) -> int | float:
    try:
        return float(text) if _FLOAT.fullmatch(text) else int(text, 0)
    except ValueError:
        raise MalformedCall(f"{text!r} is no number, or too large.") from None


def _read_string(token: str) -> str:
    quotes = 3 if token[:3] in {'"""', "'''"} else 1
    text = _ESCAPE.sub(_unescape_match, token[quotes:-quotes])
    if _SURROGATES.search(text) is None:
        return text
    # JSON writes a character beyond the first 65,536 as two escapes.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _unescape_match(match: re.Match[str]) -> str:
    sort, text = match.lastgroup, match[match.lastgroup or 0]
    match sort:
        case "octal":
            return chr(int(text, 8))
        case "name":
            return _decode_named_character(text)
        case "plain" if text in "xuUN":
            raise MalformedCall(f"The escape {match[0]!r} is not complete.")
        case "plain":
            return _PLAIN.get(text, match[0])
        case _:
            return _make_character(int(text, 16))


def _decode_named_character(name: str) -> str:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        raise MalformedCall(f"No character is called {name!r}.") from None


def _make_character(number: int) -> str:
    try:
        return chr(number)
    except (ValueError, OverflowError):
        raise MalformedCall(f"There is no character {number:#x}.") from None


MOST_TEXT_CALLS: Final = 64
"""How many calls one answer may ask for; those beyond are answered as unreadable."""
MOST_TOKENS: Final = 100_000
"""How many tokens one call may have."""
LONGEST_UNREADABLE_CALL: Final = 4000
"""How much of an unreadable call is kept; the answer's text holds it all."""

_CLOSING: Final = "</skill>"
_BLOCK: Final = "<parallel>"
_BLOCK_END: Final = "</parallel>"


class ParsedAnswer(msgspec.Struct, frozen=True):
    """An answer: its whole text, then the calls in it.

    `cut`: the answer seems to end inside a call, as when a model runs out of tokens or never closes a quote.
    """

    parts: tuple[Text | ToolCall, ...]
    cut: bool = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


def read_calls(text: str, nonce: str) -> ParsedAnswer:
    """Find the calls in a model's answer; accepts any text.

    A call with the nonce that cannot be read is a call with arguments that no tool accepts, so that the model gets an
    error. Where its end is ambiguous, nothing after it is read.
    """
    if not text:
        return ParsedAnswer(())
    words = Text(text, "model", trusted=False)
    if not nonce:
        return ParsedAnswer((words,))
    calls, cut = _calls(text, f"<skill {nonce}>")
    return ParsedAnswer((words, *calls), cut)


def _calls(text: str, opening: str) -> tuple[list[ToolCall], bool]:
    calls: list[ToolCall] = []
    place, block = 0, None
    while (start := text.find(opening, place)) >= 0:
        calls, block = _blocks(text, place, start, calls, block)
        inside = start + len(opening)
        found = tokenize_until(_CLOSING, text, inside, MOST_TOKENS) if len(calls) < MOST_TEXT_CALLS else None
        end = len(text) if found is None else found[1]
        calls.append(_make_call(found and found[0], text[inside:end], calls))
        if found is None:
            return calls, len(calls) <= MOST_TEXT_CALLS
        place = end
    calls, _ = _blocks(text, place, len(text), calls, block)
    return calls, False


def _blocks(
    text: str, start: int, end: int, calls: list[ToolCall], block: int | None
) -> tuple[list[ToolCall], int | None]:
    """Find the borders of blocks between two calls; `block` is the first call of an open one.

    Only a closed block groups its calls: one after the other does no harm.
    """
    opened, closed = text.rfind(_BLOCK, start, end), text.find(_BLOCK_END, start, end)
    if block is not None and closed >= 0:
        calls = [*calls[:block], *(msgspec.structs.replace(call, group=calls[block].group) for call in calls[block:])]
        block = None
    if opened >= 0 and text.find(_BLOCK_END, opened, end) < 0:
        block = len(calls)
    return calls, block


def _make_call(tokens: list[Token] | None, raw: str, before: Sequence[ToolCall]) -> ToolCall:
    name = f"text{len(before)}"
    group = before[-1].group + 1 if before else 0
    try:
        if tokens is not None:
            tool, arguments = read_call(tokens)
            return ToolCall(name, tool, _encode_arguments(arguments), group)
    except MalformedCall:
        pass
    # No JSON begins like this, so no tool takes it for arguments.
    return ToolCall(name, read_call_name(raw, 0), f"<skill>{raw[:LONGEST_UNREADABLE_CALL]}", group)


def _encode_arguments(arguments: dict[str, Any]) -> str:
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return written if written.isascii() or _is_encodable(written) else json.dumps(arguments)
    except ValueError as error:
        raise MalformedCall(str(error)) from None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def explain_text_calls(tools: Sequence[ToolSpec]) -> str:
    """Explain the tools and the call syntax to a model: the same text for every request."""
    if not tools:
        return ""
    return "\n\n".join((_CALL_INSTRUCTIONS, *map(_describe_tool, tools)))


_CALL_INSTRUCTIONS: Final = """\
You can call tools. Write a call as one tag with the tool's name and its arguments by name:
<skill KEY>name(text="some words", count=3, items=[1, {"a": None}])</skill>
In place of KEY stands this request's key, which you are told at the end of what you are sent. A tag without it, or \
with an older one, is only text. Values are Python literals. Calls are made one after the other in the order in which \
you write them; those that do not depend on each other can be made together:
<parallel>
<skill KEY>first(a=1)</skill>
<skill KEY>second(b="x")</skill>
</parallel>
After your calls end your answer: you are sent their results. An answer without a call ends your turn.

Your tools, each with the JSON Schema of its arguments:"""


def _describe_tool(spec: ToolSpec) -> str:
    return f"{spec.name}: {spec.description}\n{from_body(spec.schema)}"


def explain_nonce(nonce: str) -> str:
    return f"In this answer a call begins with <skill {nonce}> and ends with </skill>."


def to_text_message(message: Message) -> Message:
    """Show a message to a model that knows calls and results only as text."""
    # The text of a call stands beside it, unless another model made it natively.
    written = any(isinstance(part, Text) for part in message.parts)
    shown = [part for part in message.parts if not (written and isinstance(part, ToolCall))]
    return Message(message.role, tuple(part if isinstance(part, Text) else _part_to_text(part) for part in shown))


def _part_to_text(part: ToolCall | ToolResult) -> Text:
    match part:
        case ToolCall(tool=tool, arguments=arguments):
            return Text(f"I called {tool} with {arguments}.", "model", trusted=False)
        case ToolResult(tool=tool, outcome=outcome, text=text, origin=origin, trusted=trusted):
            return Text(f"Result of {tool} ({outcome}): {text}", origin, trusted)


DEEPEST_VALUE: Final = 64
"""Deepest nesting of a value: deeper ones attack our stack."""

_WIDEST: Final = 256
"""Most bits of an integer."""
_EXACT: Final = 2.0**53
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")
_PATH: Final = re.compile(r"(?:[^.\[\]]+|\[\d{1,9}\])(?:\.[^.\[\]]+|\[\d{1,9}\])*")
_UNSEEN: Final = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What JSON does not escape, although it ends a line or reverses its direction."""


class NotJson(msgspec.Struct, frozen=True):
    """A value that JSON cannot hold, as in `it holds a number that is not finite`."""

    reason: str


class PathValue(msgspec.Struct, frozen=True):
    value: Any


class MissingPath(msgspec.Struct, frozen=True):
    """Nothing stands at a path, and a sentence that says where the path ends."""

    sentence: str


class _NoJsonError(Exception):
    pass


def copy_json_value(value: Any) -> PathValue | NotJson:
    """Copy a JSON value, so that no other code can change it. Characters that cannot be stored are replaced."""
    try:
        return PathValue(_copy_value(value, 0))
    except _NoJsonError as error:
        return NotJson(str(error))


def _copy_value(value: Any, depth: int) -> Any:
    if depth > DEEPEST_VALUE:
        raise _NoJsonError(f"it has more than {DEEPEST_VALUE} levels")
    # Each reading of each sensor goes through here: asking for the type first is twice as fast as matching.
    kind = cast("type[Any]", type(value))
    if kind is float:
        return _check_float(value)
    if kind is str:
        return clean(value)
    if kind is dict:
        return {_check_key(key): _copy_value(each, depth + 1) for key, each in value.items()}
    match value:
        case None | bool():
            return value
        case int():
            return _check_integer(value)
        case float():
            return _check_float(value)
        case str():
            return clean(value)
        case Mapping():
            items = cast("Mapping[Any, Any]", value).items()
            return {_check_key(key): _copy_value(each, depth + 1) for key, each in items}
        case list() | tuple():
            return [_copy_value(each, depth + 1) for each in cast("Sequence[Any]", value)]
        case _:
            raise _NoJsonError(f"it holds a {kind.__name__}, which JSON does not know")


def _check_integer(value: int) -> int:
    if value.bit_length() > _WIDEST:
        raise _NoJsonError(f"it holds a whole number of more than {_WIDEST} bits")
    return value


def _check_float(value: float) -> float:
    if not math.isfinite(value):
        raise _NoJsonError("it holds a number that is not finite")
    return value


def _check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise _NoJsonError(f"it has a key that is no text, but a {type(key).__name__}")
    return clean(key)


def encode_canonical(value: Any) -> bytes:
    """Write a checked value so that equal values have equal bytes.

    1 and 1.0 are equal, 1 and true are not.
    """
    return msgspec.json.encode(_normalize_numbers(value), order="sorted")


def is_equal_json(one: Any, other: Any) -> bool:
    """Whether two checked values have the same canonical form. Most need no encoding."""
    if one != other:
        return False
    return msgspec.json.encode(one) == msgspec.json.encode(other) or encode_canonical(one) == encode_canonical(other)


def _normalize_numbers(value: Any) -> Any:
    match value:
        case float() if value.is_integer() and abs(value) < _EXACT:
            return int(value)
        case dict():
            return {key: _normalize_numbers(each) for key, each in cast("dict[str, Any]", value).items()}
        case list():
            return [_normalize_numbers(each) for each in cast("list[Any]", value)]
        case _:
            return value


def look_up_path(value: Any, path: str) -> PathValue | MissingPath:
    """Look up a part of a JSON value, as in `quotes.AAPL` or `items[0].price`; an empty path is all of it."""
    if not path:
        return PathValue(value)
    if _PATH.fullmatch(path) is None:
        return MissingPath(f"`{shorten(clean(path))}` is no path: write it like quotes.AAPL or items[0].price.")
    for step in _STEP.finditer(path):
        name, place = step[1] or "", int(step[2]) if step[2] else None
        match value:
            case Mapping() if name and name in value:
                value = cast("Mapping[str, Any]", value)[name]
            case list() | tuple() if place is not None and place < len(cast("Sequence[Any]", value)):
                value = cast("Sequence[Any]", value)[place]
            case _:
                return MissingPath(f"There is no `{name or f'[{place}]'}` where `{shorten(path)}` looks for it.")
    return PathValue(value)


def to_json_line(value: Any) -> str:
    """Write a checked value as compact JSON on one line, which no value can break."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", msgspec.json.encode(value).decode())


def quote_text(text: str) -> str:
    """Quote foreign text so that it stays on its line and cannot pose as ours."""
    return to_json_line(clean(text))


def cut_text(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… [cut: {len(text):,} characters in all]"
