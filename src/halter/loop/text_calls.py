"""Calls written as text, for models without native tool calls: `<skill k7f2>read_file(path="app.log")</skill>`.

The opening tag has a nonce that is new in every request, so a call that a model quotes, from a page or from its own
older answers, never runs. Calls in a `<parallel>` block run concurrently, all others one after the other.

A call is `name(path="a.txt", lines=[1, 2])`: Python literals plus JSON's `true`, `false` and `null`. Nothing is
evaluated. Every character is read once and nesting is bounded, so hostile text costs no more than other text.

The second half copies, compares, queries and renders JSON values from outside safely.
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
from halter.core.text import clean, decode_body, shorten
from halter.core.tools import ToolSpec

MAX_LITERAL_DEPTH: Final = 64

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
    """A text is not a call with named literals."""


def tokenize_until(closing: str, text: str, start: int, limit: int) -> tuple[list[Token], int] | None:
    """Cut text into tokens up to `closing` outside of quotes; return the tokens and the end of `closing`.

    Returns None if the end of the call is ambiguous: `closing` is missing, a quote is open, or there are more than
    `limit` tokens.
    """
    tokens: list[Token] = []
    position = start
    while position < len(text) and len(tokens) < limit:
        if text.startswith(closing, position):
            return [*tokens, _END], position + len(closing)
        end, token = _read_token(text, position)
        if end < 0:
            return None
        if token[0] != "space":
            tokens.append(token)
        position = end
    return None


def read_call_name(text: str, start: int) -> str:
    match = _NAME.match(text, start)
    return "" if match is None else match[1]


def read_call(tokens: Sequence[Token]) -> tuple[str, dict[str, Any]]:
    name, position = _expect(tokens, 0, "word")
    _, position = _expect(tokens, position, "(")
    arguments, position = _read_items(tokens, position, ")", _read_argument)
    _expect(tokens, position, "end")
    return name, _make_mapping(arguments, is_unique=True)


def _read_token(text: str, position: int) -> tuple[int, Token]:
    """Read one token; return its end and the token. The end of an unclosed quote is -1."""
    if text[position] in _STOPS:
        end = _string_end(text, position)
        return end, ("string", text[position:end])
    match = _PIECE.match(text, position)
    if match is None or match.lastgroup is None:
        return -1, _END
    return match.end(), (match[0] if match.lastgroup == "sign" else match.lastgroup, match[0])


def _string_end(text: str, start: int) -> int:
    quote = text[start]
    closing = quote * 3 if text.startswith(quote * 3, start) else quote
    position = start + len(closing)
    while match := _STOPS[quote].search(text, position):
        position = match.start()
        if text[position] == "\\":
            position += 2
        elif text.startswith(closing, position):
            return position + len(closing)
        else:
            position += 1
    return -1


def _expect(tokens: Sequence[Token], position: int, expected_kind: str) -> tuple[str, int]:
    kind, text = tokens[position]
    if kind != expected_kind:
        raise MalformedCall(f"Expected {expected_kind!r}, found {text!r}.")
    return text, position + 1


def _read_items(
    tokens: Sequence[Token], position: int, closing: str, read_item: Callable[[Sequence[Token], int], tuple[_Item, int]]
) -> tuple[list[_Item], int]:
    """Read comma-separated items, with an optional trailing comma, up to the closing sign."""
    items: list[_Item] = []
    while tokens[position][0] != closing:
        item, position = read_item(tokens, position)
        items.append(item)
        if tokens[position][0] != closing:
            _, position = _expect(tokens, position, ",")
    return items, position + 1


def _read_argument(tokens: Sequence[Token], position: int) -> tuple[tuple[str, Any], int]:
    name, position = _expect(tokens, position, "word")
    _, position = _expect(tokens, position, "=")
    value, position = _read_value(tokens, position, MAX_LITERAL_DEPTH)
    return (name, value), position


def _read_value(tokens: Sequence[Token], position: int, depth: int) -> tuple[Any, int]:
    kind, text = tokens[position]
    if not depth:
        raise MalformedCall(f"Lists and mappings are nested more than {MAX_LITERAL_DEPTH} deep.")
    match kind:
        case "string":
            return _read_string(text), position + 1
        case "number":
            return _read_number(text), position + 1
        case "word" if text in _CONSTANTS:
            return _CONSTANTS[text], position + 1
        case "[":
            return _read_items(
                tokens, position + 1, "]", lambda all_tokens, start: _read_value(all_tokens, start, depth - 1)
            )
        case "(":
            items, end = _read_items(
                tokens, position + 1, ")", lambda all_tokens, start: _read_value(all_tokens, start, depth - 1)
            )
            is_parenthesized = len(items) == 1 and tokens[end - 2][0] != ","
            return (items[0] if is_parenthesized else items), end
        case "{":
            pairs, end = _read_items(
                tokens, position + 1, "}", lambda all_tokens, start: _read_pair(all_tokens, start, depth - 1)
            )
            return _make_mapping(pairs), end
        case _:
            raise MalformedCall(f"Expected a value, found {text!r}.")


def _read_pair(tokens: Sequence[Token], position: int, depth: int) -> tuple[tuple[str, Any], int]:
    """Read a key and its value. A key in JSON is always text."""
    key, position = _expect(tokens, position, "string")
    _, position = _expect(tokens, position, ":")
    value, position = _read_value(tokens, position, depth)
    return (_read_string(key), value), position


def _make_mapping(pairs: Sequence[tuple[str, Any]], *, is_unique: bool = False) -> dict[str, Any]:
    mapping = dict(pairs)
    if is_unique and len(mapping) < len(pairs):
        raise MalformedCall("An argument is given twice.")
    return mapping


def _read_number(text: str) -> int | float:
    try:
        return float(text) if _FLOAT.fullmatch(text) else int(text, 0)
    except ValueError:
        raise MalformedCall(f"{text!r} is not a number, or is too large.") from None


def _read_string(token: str) -> str:
    quotes = 3 if token[:3] in {'"""', "'''"} else 1
    text = _ESCAPE.sub(_unescape_match, token[quotes:-quotes])
    if _SURROGATES.search(text) is None:
        return text
    # JSON writes a character beyond the first 65,536 as two escapes.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _unescape_match(match: re.Match[str]) -> str:
    kind, text = match.lastgroup, match[match.lastgroup or 0]
    match kind:
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
        raise MalformedCall(f"There is no character named {name!r}.") from None


def _make_character(number: int) -> str:
    try:
        return chr(number)
    except (ValueError, OverflowError):
        raise MalformedCall(f"There is no character {number:#x}.") from None


MAX_TEXT_CALLS: Final = 64
"""Maximum number of calls in an answer. One more is returned as unreadable, and the rest is not read."""
MAX_CALL_TOKENS: Final = 100_000
"""Maximum number of tokens of a call."""
MAX_UNREADABLE_CALL_LENGTH: Final = 4000
"""Maximum length of a recorded unreadable call, in characters. The answer's text has the whole call."""

_CLOSING: Final = "</skill>"
_BLOCK: Final = "<parallel>"
_BLOCK_END: Final = "</parallel>"


class ParsedAnswer(msgspec.Struct, frozen=True):
    """An answer: its whole text, then the calls in it.

    `is_cut_off`: the answer seems to end inside a call, because it ran out of tokens or has an open quote.
    """

    parts: tuple[Text | ToolCall, ...]
    is_cut_off: bool = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


def read_calls(text: str, nonce: str) -> ParsedAnswer:
    """Parse the calls in a model's answer, which may be any text.

    An unreadable call with the nonce gets arguments that no tool accepts, so that the model receives an error. If its
    end is ambiguous, the text after it is not read.
    """
    if not text:
        return ParsedAnswer(())
    text_part = Text(text, "model", trusted=False)
    if not nonce:
        return ParsedAnswer((text_part,))
    calls, is_cut_off = _calls(text, f"<skill {nonce}>")
    return ParsedAnswer((text_part, *calls), is_cut_off)


def _calls(text: str, opening: str) -> tuple[list[ToolCall], bool]:
    calls: list[ToolCall] = []
    position, block = 0, None
    while (start := text.find(opening, position)) >= 0:
        calls, block = _blocks(text, position, start, calls, block)
        body_start = start + len(opening)
        tokens_and_end = (
            tokenize_until(_CLOSING, text, body_start, MAX_CALL_TOKENS) if len(calls) < MAX_TEXT_CALLS else None
        )
        end = len(text) if tokens_and_end is None else tokens_and_end[1]
        calls.append(_make_call(tokens_and_end and tokens_and_end[0], text[body_start:end], calls))
        if tokens_and_end is None:
            return calls, len(calls) <= MAX_TEXT_CALLS
        position = end
    calls, _ = _blocks(text, position, len(text), calls, block)
    return calls, False


def _blocks(
    text: str, start: int, end: int, calls: list[ToolCall], block: int | None
) -> tuple[list[ToolCall], int | None]:
    """Find the borders of blocks between two calls; `block` is the first call of an open one.

    Only a closed block groups its calls. All others run one after the other, which is safe.
    """
    open_at, close_at = text.rfind(_BLOCK, start, end), text.find(_BLOCK_END, start, end)
    if block is not None and close_at >= 0:
        calls = [*calls[:block], *(msgspec.structs.replace(call, group=calls[block].group) for call in calls[block:])]
        block = None
    if open_at >= 0 and text.find(_BLOCK_END, open_at, end) < 0:
        block = len(calls)
    return calls, block


def _make_call(tokens: list[Token] | None, raw: str, earlier_calls: Sequence[ToolCall]) -> ToolCall:
    name = f"text{len(earlier_calls)}"
    group = earlier_calls[-1].group + 1 if earlier_calls else 0
    try:
        if tokens is not None:
            tool, arguments = read_call(tokens)
            return ToolCall(name, tool, _encode_arguments(arguments), group)
    except MalformedCall:
        pass
    # No JSON begins like this, so no tool accepts it as arguments.
    return ToolCall(name, read_call_name(raw, 0), f"<skill>{raw[:MAX_UNREADABLE_CALL_LENGTH]}", group)


def _encode_arguments(arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() or _is_encodable(text) else json.dumps(arguments)
    except ValueError as error:
        raise MalformedCall(str(error)) from None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def explain_text_calls(tools: Sequence[ToolSpec]) -> str:
    """Explain the tools and the call syntax to a model, with the same text in every request."""
    if not tools:
        return ""
    return "\n\n".join((_CALL_INSTRUCTIONS, *map(_describe_tool, tools)))


_CALL_INSTRUCTIONS: Final = """\
You can call tools. Write a call as one tag with the tool's name and its arguments by name:
<skill KEY>name(text="some words", count=3, items=[1, {"a": None}])</skill>
Replace KEY with this request's key, which is given at the end of the prompt. A tag without it, or with an older one, \
is only text. Values are Python literals. Calls are made one after the other, in the order in which you write them; \
calls that do not depend on each other can be made together:
<parallel>
<skill KEY>first(a=1)</skill>
<skill KEY>second(b="x")</skill>
</parallel>
End your answer after your calls; you then receive their results. An answer without a call ends your turn.

Your tools, each with the JSON Schema of its arguments:"""


def _describe_tool(spec: ToolSpec) -> str:
    return f"{spec.name}: {spec.description}\n{decode_body(spec.schema)}"


def explain_nonce(nonce: str) -> str:
    return f"In this answer a call begins with <skill {nonce}> and ends with </skill>."


def to_text_message(message: Message) -> Message:
    """Convert a message for a model without native tool calls: its calls and results become text."""
    # The text of a message has its calls, unless another model made them natively.
    has_text = any(isinstance(part, Text) for part in message.parts)
    visible_parts = [part for part in message.parts if not (has_text and isinstance(part, ToolCall))]
    return Message(
        message.role, tuple(part if isinstance(part, Text) else _part_to_text(part) for part in visible_parts)
    )


def _part_to_text(part: ToolCall | ToolResult) -> Text:
    match part:
        case ToolCall(tool=tool, arguments=arguments):
            return Text(f"I called {tool} with {arguments}.", "model", trusted=False)
        case ToolResult(tool=tool, outcome=outcome, text=text, origin=origin, trusted=trusted):
            return Text(f"Result of {tool} ({outcome}): {text}", origin, trusted)


MAX_VALUE_DEPTH: Final = 64
"""Maximum nesting of a value. A deeper one could exhaust the stack."""

_MAX_INTEGER_BITS: Final = 256
"""Maximum number of bits of an integer."""
_EXACT: Final = 2.0**53
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")
_PATH: Final = re.compile(r"(?:[^.\[\]]+|\[\d{1,9}\])(?:\.[^.\[\]]+|\[\d{1,9}\])*")
_UNSEEN: Final = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON does not escape, although they end a line or reverse its direction."""


class NotJson(msgspec.Struct, frozen=True):
    """A value that JSON cannot represent; `reason` is a clause, as in `it contains a number that is not finite`."""

    reason: str


class PathValue(msgspec.Struct, frozen=True):
    value: Any


class MissingPath(msgspec.Struct, frozen=True):
    """A path without a value; the sentence names the missing step."""

    sentence: str


class _NoJsonError(Exception):
    pass


def copy_json_value(value: Any) -> PathValue | NotJson:
    """Copy a JSON value, so that no other code changes it. Characters that cannot be stored are replaced."""
    try:
        return PathValue(_copy_value(value, 0))
    except _NoJsonError as error:
        return NotJson(str(error))


def _copy_value(value: Any, depth: int) -> Any:
    if depth > MAX_VALUE_DEPTH:
        raise _NoJsonError(f"it has more than {MAX_VALUE_DEPTH} levels")
    # Every sensor reading is copied here, and comparing types is twice as fast as a pattern match.
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
            raise _NoJsonError(f"it contains a {kind.__name__}, which JSON cannot represent")


def _check_integer(value: int) -> int:
    if value.bit_length() > _MAX_INTEGER_BITS:
        raise _NoJsonError(f"it contains an integer of more than {_MAX_INTEGER_BITS} bits")
    return value


def _check_float(value: float) -> float:
    if not math.isfinite(value):
        raise _NoJsonError("it contains a number that is not finite")
    return value


def _check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise _NoJsonError(f"it has a key of type {type(key).__name__}; keys must be text")
    return clean(key)


def encode_canonical(value: Any) -> bytes:
    """Encode a checked value so that equal values have equal bytes.

    1 and 1.0 are equal, 1 and true are not.
    """
    return msgspec.json.encode(_normalize_numbers(value), order="sorted")


def is_equal_json(first: Any, second: Any) -> bool:
    """Return whether two checked values have the same canonical form."""
    if first != second:
        return False
    return msgspec.json.encode(first) == msgspec.json.encode(second) or encode_canonical(first) == encode_canonical(
        second
    )


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


def find_path_value(value: Any, path: str) -> PathValue | MissingPath:
    """Find a part of a JSON value by a path such as `items[0].price`. An empty path is the whole value."""
    if not path:
        return PathValue(value)
    if _PATH.fullmatch(path) is None:
        return MissingPath(f"`{shorten(clean(path))}` is not a path. Write it like quotes.AAPL or items[0].price.")
    for step in _STEP.finditer(path):
        name, index = step[1] or "", int(step[2]) if step[2] else None
        match value:
            case Mapping() if name and name in value:
                value = cast("Mapping[str, Any]", value)[name]
            case list() | tuple() if index is not None and index < len(cast("Sequence[Any]", value)):
                value = cast("Sequence[Any]", value)[index]
            case _:
                return MissingPath(f"There is no `{name or f'[{index}]'}` at `{shorten(path)}`.")
    return PathValue(value)


def to_json_line(value: Any) -> str:
    """Encode a checked value as compact JSON on one line, whatever its texts contain."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", msgspec.json.encode(value).decode())


def quote_text(text: str) -> str:
    """Quote untrusted text so that it stays on one line and cannot pass as the runtime's own."""
    return to_json_line(clean(text))


def cut_text(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… [cut: {len(text):,} characters in all]"
