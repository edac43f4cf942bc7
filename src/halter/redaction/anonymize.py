"""Anonymization: a model is sent placeholders such as `[EMAIL_3f9a2c]` instead of personal data.

No table is stored. A placeholder is derived from its value and a salt, so it is the same in every request. The values
are collected from the prompt when it is sent, which contains everything that a model can refer to.

A value replaces only its exact placeholder in an answer. It is always treated as text: within quotes it is escaped, so
that it cannot end them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, cast

import msgspec

from halter.core.messages import Message, Part, Prompt, Reply, Text, ToolCall, ToolResult, bound_prompt_tokens
from halter.core.text import encode_body
from halter.core.tools import ToolSpec
from halter.redaction.json_strings import change_json_strings, is_json
from halter.redaction.personal_data import (
    PLACEHOLDER_KINDS,
    PLACEHOLDER_PATTERN,
    NamePatterns,
    TextPiece,
    compile_names,
    split_pieces,
)
from halter.redaction.prompt_masker import change_texts

PLACEHOLDER_DIGITS: Final = (6, 16, 64)
"""Digits of the digest in a placeholder; more if two values would collide."""

_CACHE_KEY: Final = "anonymized"
_LOOKALIKE: Final = "text"
_NUMBER: Final = re.compile(r"(?<![\w.+-])[0-9]{7,19}(?![\w.])")
_NAME_KEYS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_WORDING_KEYS: Final = frozenset(("description", "title", "enum", "const", "default", "examples", "$comment"))

ValuePairs = frozenset[tuple[str, str]]

_NONE: Final[ValuePairs] = frozenset()


class AnonymizedPrompt(msgspec.Struct, frozen=True):
    """A prompt with placeholders, and their values.

    `counts` has the number of distinct hidden values of each kind, without text that only looked like a placeholder.
    `growth` bounds the additional tokens.
    """

    prompt: Prompt
    values: Mapping[str, str]
    counts: Mapping[str, int]
    growth: int = 0


class _HidingRules(msgspec.Struct, frozen=True):
    salt: str
    names: tuple[str, ...]
    digits: int


class _HiddenPart(msgspec.Struct, frozen=True):
    """A part with placeholders, their values, and its growth in bytes."""

    what: Any
    pairs: ValuePairs = _NONE
    growth: int = 0


def anonymize_prompt(prompt: Prompt, salt: str, names: Sequence[str]) -> AnonymizedPrompt:
    """Replace personal data in a prompt by placeholders; by longer ones if two values would share a placeholder."""
    hidden_parts: list[_HiddenPart] = []
    for digits in PLACEHOLDER_DIGITS:
        hidden_parts = _hide_prompt_parts(prompt, _HidingRules(salt, tuple(names), digits))
        pairs = _NONE.union(*(each.pairs for each in hidden_parts))
        values = dict(pairs)
        if len(values) == len(pairs):
            return _make_anonymized(prompt, hidden_parts, values, digits)
    raise AssertionError("Two values have the same digest.")


def _make_anonymized(
    prompt: Prompt, hidden_parts: Sequence[_HiddenPart], values: Mapping[str, str], digits: int
) -> AnonymizedPrompt:
    system, tools, facts, *messages = (each.what for each in hidden_parts)
    hidden_prompt = msgspec.structs.replace(prompt, system=system, tools=tools, facts=facts, messages=tuple(messages))
    counts: dict[str, int] = {}
    for placeholder in sorted(values):
        kind = placeholder[1:].partition("_")[0].lower()
        counts[kind] = counts.get(kind, 0) + 1
    counts.pop(_LOOKALIKE, None)
    # Token counts of earlier requests do not apply if the placeholders have become longer.
    growth = (
        sum(each.growth for each in hidden_parts)
        if digits == PLACEHOLDER_DIGITS[0]
        else bound_prompt_tokens(hidden_prompt)
    )
    return AnonymizedPrompt(hidden_prompt, values, counts, growth)


def _hide_prompt_parts(prompt: Prompt, rules: _HidingRules) -> list[_HiddenPart]:
    return [
        _hide_text_cached(prompt.system, rules),
        _hide_tools(prompt.tools, rules),
        _hide_facts(prompt.facts, rules),
        *(_hide_message(message, rules) for message in prompt.messages),
    ]


def _hide_message(message: Message, rules: _HidingRules) -> _HiddenPart:
    """Hide the values of a message, and cache the result: a history is sent with every request."""
    cache_entry = vars(message).get(_CACHE_KEY)
    if cache_entry is not None and cache_entry[0] == rules:
        return cache_entry[1]
    parts = [_hide_part(part, rules) for part in message.parts]
    pairs = _NONE.union(*(part.pairs for part in parts))
    is_changed = bool(pairs) or any(isinstance(part, Text) and part.data for part in message.parts)
    hidden_parts = tuple(part.what for part in parts)
    hidden_message = msgspec.structs.replace(message, parts=hidden_parts) if is_changed else message
    hidden_part = _HiddenPart(hidden_message, pairs, sum(part.growth for part in parts))
    vars(message)[_CACHE_KEY] = (rules, hidden_part)
    return hidden_part


def _hide_part(part: Part, rules: _HidingRules) -> _HiddenPart:
    """Hide the values of a part. Values in an attached file cannot be hidden, so only its label is sent."""
    match part:
        case Text(data=data) if data:
            return _hide_part(msgspec.structs.replace(part, media="", data=b"", tokens=0), rules)
        case Text(text=text) | ToolResult(text=text):
            hidden_part = _hide_text(text, rules)
            return msgspec.structs.replace(hidden_part, what=msgspec.structs.replace(part, text=hidden_part.what))
        case ToolCall(arguments=arguments):
            hidden_part = _hide_json(arguments, rules, whole=is_json(arguments))
            return msgspec.structs.replace(hidden_part, what=msgspec.structs.replace(part, arguments=hidden_part.what))


def _hide_text(text: str, rules: _HidingRules) -> _HiddenPart:
    """Hide the values of a text. In JSON they may be escaped."""
    if is_json(text):
        return _hide_json(text, rules, whole=True)
    return _hide_by_change(text, rules, lambda hide: hide(text))


def _hide_json(text: str, rules: _HidingRules, *, whole: bool) -> _HiddenPart:
    """Hide the values in JSON. A hidden number becomes text; broken JSON is searched as a whole."""
    return _hide_by_change(
        text, rules, lambda hide: change_json_strings(text, hide, _make_number_hider(hide) if whole else hide, hide)
    )


def _make_number_hider(hide: Callable[[str], str]) -> Callable[[str], str]:
    def hide_number(match: re.Match[str]) -> str:
        hidden_text = hide(match[0])
        return f'"{hidden_text}"' if hidden_text.startswith("[") else match[0]

    return lambda outside: _NUMBER.sub(hide_number, outside)


def _hide_by_change(text: str, rules: _HidingRules, change: Callable[[Callable[[str], str]], str]) -> _HiddenPart:
    pairs: set[tuple[str, str]] = set()
    names = compile_names(rules.names)
    changed_text = change(lambda part: _replace_values(part, names, rules, pairs))
    if not pairs:
        return _HiddenPart(text)
    return _HiddenPart(changed_text, frozenset(pairs), max(0, len(encode_body(changed_text)) - len(encode_body(text))))


def _replace_values(text: str, names: NamePatterns, rules: _HidingRules, pairs: set[tuple[str, str]]) -> str:
    pieces: list[str] = []
    placeholders: dict[TextPiece, str] = {}
    for piece in split_pieces(text, names):
        if not piece.kind:
            pieces.append(piece.text)
            continue
        if piece not in placeholders:
            digest = sha256(encode_body(f"{rules.salt}\0{piece.kind}\0{piece.value}")).hexdigest()
            placeholders[piece] = f"[{piece.kind}_{digest[: rules.digits]}]"
            pairs.add((placeholders[piece], piece.value))
        pieces.append(placeholders[piece])
    return "".join(pieces)


@lru_cache(maxsize=64)
def _hide_text_cached(text: str, rules: _HidingRules) -> _HiddenPart:
    return _hide_text(text, rules)


@lru_cache(maxsize=64)
def _hide_tools(tools: tuple[ToolSpec, ...], rules: _HidingRules) -> _HiddenPart:
    hidden_tools = [_hide_tool(tool, rules) for tool in tools]
    pairs = _NONE.union(*(each.pairs for each in hidden_tools))
    return _HiddenPart(tuple(each.what for each in hidden_tools), pairs, sum(each.growth for each in hidden_tools))


def _hide_tool(tool: ToolSpec, rules: _HidingRules) -> _HiddenPart:
    description = _hide_text(tool.description, rules)
    pairs: set[tuple[str, str]] = set()
    schema = _hide_schema(tool.schema, lambda text: _hide_and_collect(text, rules, pairs))
    if not pairs:
        return msgspec.structs.replace(description, what=msgspec.structs.replace(tool, description=description.what))
    growth = description.growth + max(0, len(schema) - len(tool.schema))
    spec = msgspec.structs.replace(tool, description=description.what, schema=schema)
    return _HiddenPart(spec, description.pairs | pairs, growth)


def _hide_and_collect(text: str, rules: _HidingRules, pairs: set[tuple[str, str]]) -> str:
    hidden_part = _hide_text(text, rules)
    pairs |= hidden_part.pairs
    return hidden_part.what


def _hide_schema(schema: bytes, hide: Callable[[str], str]) -> bytes:
    try:
        return msgspec.json.encode(_hide_schema_words(msgspec.json.decode(schema), hide, naming=False))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return schema


def _hide_schema_words(value: Any, hide: Callable[[str], str], *, naming: bool) -> Any:
    """Hide values in the texts of a schema. Names of properties and definitions are not changed."""
    match value:
        case dict():
            items = cast("dict[str, Any]", value).items()
            return {
                key: change_texts(each, hide)
                if key in _WORDING_KEYS and not naming
                else _hide_schema_words(each, hide, naming=key in _NAME_KEYS and not naming)
                for key, each in items
            }
        case list():
            return [_hide_schema_words(each, hide, naming=False) for each in cast("list[Any]", value)]
        case _:
            return value


def _hide_facts(facts: Mapping[str, Any], rules: _HidingRules) -> _HiddenPart:
    """Hide values among the facts, which change from turn to turn and are not cached."""
    pairs: set[tuple[str, str]] = set()
    changed_facts = change_texts(facts, lambda text: _hide_and_collect(text, rules, pairs))
    return _HiddenPart(changed_facts, frozenset(pairs)) if pairs else _HiddenPart(facts)


PlaceholderValues = Mapping[str, str]

_SHAPE: Final = re.compile(PLACEHOLDER_PATTERN)
_MAX_PLACEHOLDER_DIGITS: Final = 64
_HEX: Final = frozenset("0123456789abcdef")
_HEADS: Final = tuple(f"[{kind}_" for kind in PLACEHOLDER_KINDS)

_CLOSING: Final = "</skill>"
_INSIDE: Final = re.compile(
    r'(?P<text>"""(?:[^"\\]|\\.|"(?!""))*"""' + r"|'''(?:[^'\\]|\\.|'(?!''))*'''" + r"|(?!\"\"\"|''')"
    r"(?:\"[^\"\\]*(?:\\.[^\"\\]*)*\"|'[^'\\]*(?:\\.[^'\\]*)*'))"
    rf"|(?P<closing>{_CLOSING})|(?P<open>[\"'])|[^\"'<]+|<",
    re.DOTALL,
)
_HALF: Final = r"\\(?:[0-7]{1,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N)"
_QUOTED: Final = re.compile(rf"{_HALF}{PLACEHOLDER_PATTERN}|\\.|(?P<placeholder>{PLACEHOLDER_PATTERN})", re.DOTALL)
"""A placeholder after an incomplete escape stays: the escape would consume the first letters of the value."""
_SIGNS: Final = {"\\": "\\\\", '"': '\\"', "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def find_placeholders(text: str) -> tuple[str, ...]:
    """Find texts that look exactly like a placeholder. After rehydration, their values are unknown."""
    return tuple(dict.fromkeys(_SHAPE.findall(text)))


def rehydrate_text(text: str, values: PlaceholderValues) -> str:
    """Replace placeholders in a text by their values. Values are not searched for placeholders."""
    return _SHAPE.sub(lambda match: values.get(match[0], match[0]), text)


def rehydrate_arguments(arguments: str, values: PlaceholderValues) -> str:
    """Replace placeholders in the strings of some JSON, including keys. Values are escaped as JSON.

    A placeholder outside quotes stays: a value there would be read as syntax.
    """
    return change_json_strings(
        arguments, lambda text: rehydrate_text(text, values), _return_unchanged, _return_unchanged
    )


def _return_unchanged(text: str) -> str:
    return text


def rehydrate_reply(reply: Reply, values: PlaceholderValues, nonce: str = "") -> Reply:
    """Replace placeholders in an answer by their values. With a nonce, its text may contain calls."""
    if not values:
        return reply
    parts = _join_texts(reply.parts) if nonce else reply.parts
    return msgspec.structs.replace(reply, parts=tuple(_rehydrate_part(part, values, nonce) for part in parts))


def _join_texts(parts: Sequence[Text | ToolCall]) -> tuple[Text | ToolCall, ...]:
    """Join adjacent texts: a call in text form can span several."""
    texts = [part for part in parts if isinstance(part, Text)]
    if len(texts) < 2:  # noqa: PLR2004  a single text needs no joining
        return tuple(parts)
    joined_text = msgspec.structs.replace(texts[0], text="".join(part.text for part in texts))
    return (joined_text, *(part for part in parts if not isinstance(part, Text)))


def _rehydrate_part(part: Text | ToolCall, values: PlaceholderValues, nonce: str) -> Text | ToolCall:
    match part:
        case Text(text=text):
            return msgspec.structs.replace(part, text=_rehydrate_words(text, values, nonce))
        case ToolCall(arguments=arguments):
            return msgspec.structs.replace(part, arguments=rehydrate_arguments(arguments, values))


def _rehydrate_words(text: str, values: PlaceholderValues, nonce: str) -> str:
    """Replace placeholders in text, so that JSON stays valid and calls stay the same calls."""
    if is_json(text):
        return rehydrate_arguments(text, values)
    if not nonce:
        return rehydrate_text(text, values)
    # The nonce itself may have been hidden, if it looked like a personal number.
    opening = f"<skill {next((each for each, value in values.items() if value == nonce), nonce)}>"
    pieces: list[str] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        call_start = start + len(opening)
        pieces.append(rehydrate_text(text[position:call_start], values))
        position = _rehydrate_call(text, call_start, values, pieces)
    pieces.append(rehydrate_text(text[position:], values))
    return "".join(pieces)


def _rehydrate_call(text: str, start: int, values: PlaceholderValues, pieces: list[str]) -> int:
    """Replace placeholders in the quoted strings of one call. Returns the end of the call.

    Outside quotes, a value could become another argument. After an unclosed quote, nothing is replaced.
    """
    for match in _INSIDE.finditer(text, start):
        if match["open"]:
            pieces.append(text[match.start() :])
            return len(text)
        pieces.append(_rehydrate_quoted(match[0], values) if match["text"] else match[0])
        if match["closing"]:
            return match.end()
    return len(text)


def _rehydrate_quoted(literal: str, values: PlaceholderValues) -> str:
    def replace_placeholder(match: re.Match[str]) -> str:
        value = values.get(match[0]) if match["placeholder"] else None
        return match[0] if value is None else "".join(map(_escape_letter, value))

    return _QUOTED.sub(replace_placeholder, literal)


def _escape_letter(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"


class StreamRehydrator:
    """Replaces placeholders in a text that arrives in chunks. It holds back only what may begin a placeholder."""

    def __init__(self, values: PlaceholderValues) -> None:
        self._values = values
        self._buffer = ""

    def feed(self, chunk: str) -> str:
        text = self._buffer + chunk
        bracket = text.rfind("[")
        cut = bracket if bracket >= 0 and can_begin_placeholder(text[bracket:]) else len(text)
        self._buffer = text[cut:]
        return rehydrate_text(text[:cut], self._values)

    def finish(self) -> str:
        remaining, self._buffer = self._buffer, ""
        return rehydrate_text(remaining, self._values)


def can_begin_placeholder(text: str) -> bool:
    """Return True if a text is an incomplete placeholder."""
    for head in _HEADS:
        if len(text) <= len(head):
            if head.startswith(text):
                return True
        elif text.startswith(head):
            digits = text[len(head) :]
            return len(digits) <= _MAX_PLACEHOLDER_DIGITS and _HEX.issuperset(digits)
    return False
