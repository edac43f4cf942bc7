"""Personal data stays local: a model is sent placeholders such as `[EMAIL_3f9a2c]` instead.

There is no table to keep or lose. A placeholder is derived from its value and a salt, so it is the same in every
request, and its value is read off the prompt that is sent, which holds all that a model can refer to.

A value is put back only where a model wrote exactly its placeholder. A value is always text: within quotes it is
escaped, so that it cannot leave them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, cast

import msgspec

from halter.core.messages import Message, Part, Prompt, Reply, Text, ToolCall, ToolResult, bound_prompt_tokens
from halter.core.text import to_body
from halter.core.tools import ToolSpec
from halter.redaction.personal_data import (
    PLACEHOLDER_KINDS,
    PLACEHOLDER_PATTERN,
    NamePatterns,
    TextPiece,
    compile_names,
    split_pieces,
)
from halter.redaction.redact import change_json_strings, change_texts, is_json

PLACEHOLDER_DIGITS: Final = (6, 16, 64)
"""Digits of the digest in a placeholder; more where two values would collide."""

_CACHE_KEY: Final = "anonymized"
_LOOKALIKE: Final = "text"
_NUMBER: Final = re.compile(r"(?<![\w.+-])[0-9]{7,19}(?![\w.])")
_NAME_KEYS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_WORDING_KEYS: Final = frozenset(("description", "title", "enum", "const", "default", "examples", "$comment"))

ValuePairs = frozenset[tuple[str, str]]

_NONE: Final[ValuePairs] = frozenset()


class AnonymizedPrompt(msgspec.Struct, frozen=True):
    """A prompt as it is sent, and the values of its placeholders.

    `counts` has the number of different hidden values of each kind, without text that only looked like a placeholder.
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
    """A part without its values, those values, and its growth in bytes."""

    what: Any
    pairs: ValuePairs = _NONE
    growth: int = 0


def anonymize_prompt(prompt: Prompt, salt: str, names: Sequence[str]) -> AnonymizedPrompt:
    """Put placeholders into a prompt; longer ones where two values would share a placeholder."""
    made: list[_HiddenPart] = []
    for digits in PLACEHOLDER_DIGITS:
        made = _hide_prompt_parts(prompt, _HidingRules(salt, tuple(names), digits))
        pairs = _NONE.union(*(each.pairs for each in made))
        values = dict(pairs)
        if len(values) == len(pairs):
            return _make_anonymized(prompt, made, values, digits)
    raise AssertionError("Two values have the same digest.")


def _make_anonymized(
    prompt: Prompt, made: Sequence[_HiddenPart], values: Mapping[str, str], digits: int
) -> AnonymizedPrompt:
    system, tools, facts, *messages = (each.what for each in made)
    sent = msgspec.structs.replace(prompt, system=system, tools=tools, facts=facts, messages=tuple(messages))
    counts: dict[str, int] = {}
    for placeholder in sorted(values):
        kind = placeholder[1:].partition("_")[0].lower()
        counts[kind] = counts.get(kind, 0) + 1
    counts.pop(_LOOKALIKE, None)
    # What was learned of earlier requests says nothing of placeholders that have become longer since.
    growth = sum(each.growth for each in made) if digits == PLACEHOLDER_DIGITS[0] else bound_prompt_tokens(sent)
    return AnonymizedPrompt(sent, values, counts, growth)


def _hide_prompt_parts(prompt: Prompt, veil: _HidingRules) -> list[_HiddenPart]:
    return [
        _hide_text_cached(prompt.system, veil),
        _hide_tools(prompt.tools, veil),
        _hide_facts(prompt.facts, veil),
        *(_hide_message(message, veil) for message in prompt.messages),
    ]


def _hide_message(message: Message, veil: _HidingRules) -> _HiddenPart:
    """Hide the values of a message, once: a history is sent again with every request."""
    kept = vars(message).get(_CACHE_KEY)
    if kept is not None and kept[0] == veil:
        return kept[1]
    parts = [_hide_part(part, veil) for part in message.parts]
    pairs = _NONE.union(*(part.pairs for part in parts))
    changed = bool(pairs) or any(isinstance(part, Text) and part.data for part in message.parts)
    made = Message(message.role, tuple(part.what for part in parts)) if changed else message
    hidden = _HiddenPart(made, pairs, sum(part.growth for part in parts))
    vars(message)[_CACHE_KEY] = (veil, hidden)
    return hidden


def _hide_part(part: Part, veil: _HidingRules) -> _HiddenPart:
    """Hide the values of a part. Names and numbers in a file cannot be hidden: only what it is called is left."""
    match part:
        case Text(data=data) if data:
            return _hide_part(msgspec.structs.replace(part, media="", data=b"", tokens=0), veil)
        case Text(text=text) | ToolResult(text=text):
            hidden = _hide_text(text, veil)
            return msgspec.structs.replace(hidden, what=msgspec.structs.replace(part, text=hidden.what))
        case ToolCall(arguments=arguments):
            hidden = _hide_json(arguments, veil, whole=is_json(arguments))
            return msgspec.structs.replace(hidden, what=msgspec.structs.replace(part, arguments=hidden.what))


def _hide_text(text: str, veil: _HidingRules) -> _HiddenPart:
    """Hide the values of a text; JSON may escape its values."""
    if is_json(text):
        return _hide_json(text, veil, whole=True)
    return _hide_by_change(text, veil, lambda hide: hide(text))


def _hide_json(text: str, veil: _HidingRules, *, whole: bool) -> _HiddenPart:
    """Hide the values in JSON. A hidden number becomes text; broken JSON is searched as a whole."""
    return _hide_by_change(
        text, veil, lambda hide: change_json_strings(text, hide, _make_number_hider(hide) if whole else hide, hide)
    )


def _make_number_hider(hide: Callable[[str], str]) -> Callable[[str], str]:
    def quoted(match: re.Match[str]) -> str:
        hidden = hide(match[0])
        return f'"{hidden}"' if hidden.startswith("[") else match[0]

    return lambda outside: _NUMBER.sub(quoted, outside)


def _hide_by_change(text: str, veil: _HidingRules, change: Callable[[Callable[[str], str]], str]) -> _HiddenPart:
    pairs: set[tuple[str, str]] = set()
    names = compile_names(veil.names)
    made = change(lambda part: _replace_values(part, names, veil, pairs))
    if not pairs:
        return _HiddenPart(text)
    return _HiddenPart(made, frozenset(pairs), max(0, len(to_body(made)) - len(to_body(text))))


def _replace_values(text: str, names: NamePatterns, veil: _HidingRules, pairs: set[tuple[str, str]]) -> str:
    shown: list[str] = []
    known: dict[TextPiece, str] = {}
    for piece in split_pieces(text, names):
        if not piece.kind:
            shown.append(piece.text)
            continue
        if piece not in known:
            digest = sha256(to_body(f"{veil.salt}\0{piece.kind}\0{piece.value}")).hexdigest()
            known[piece] = f"[{piece.kind}_{digest[: veil.digits]}]"
            pairs.add((known[piece], piece.value))
        shown.append(known[piece])
    return "".join(shown)


@lru_cache(maxsize=64)
def _hide_text_cached(text: str, veil: _HidingRules) -> _HiddenPart:
    return _hide_text(text, veil)


@lru_cache(maxsize=64)
def _hide_tools(tools: tuple[ToolSpec, ...], veil: _HidingRules) -> _HiddenPart:
    made = [_hide_tool(tool, veil) for tool in tools]
    pairs = _NONE.union(*(each.pairs for each in made))
    return _HiddenPart(tuple(each.what for each in made), pairs, sum(each.growth for each in made))


def _hide_tool(tool: ToolSpec, veil: _HidingRules) -> _HiddenPart:
    said = _hide_text(tool.description, veil)
    found: set[tuple[str, str]] = set()
    schema = _hide_schema(tool.schema, lambda text: _hide_and_collect(text, veil, found))
    if not found:
        return msgspec.structs.replace(said, what=msgspec.structs.replace(tool, description=said.what))
    growth = said.growth + max(0, len(schema) - len(tool.schema))
    spec = msgspec.structs.replace(tool, description=said.what, schema=schema)
    return _HiddenPart(spec, said.pairs | found, growth)


def _hide_and_collect(text: str, veil: _HidingRules, found: set[tuple[str, str]]) -> str:
    hidden = _hide_text(text, veil)
    found |= hidden.pairs
    return hidden.what


def _hide_schema(schema: bytes, hide: Callable[[str], str]) -> bytes:
    try:
        return msgspec.json.encode(_hide_schema_words(msgspec.json.decode(schema), hide, naming=False))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return schema


def _hide_schema_words(value: Any, hide: Callable[[str], str], *, naming: bool) -> Any:
    """Walk a schema; names below some of its keys are not text."""
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


def _hide_facts(facts: Mapping[str, Any], veil: _HidingRules) -> _HiddenPart:
    """Hide values among the facts, which change from turn to turn and are not cached."""
    found: set[tuple[str, str]] = set()
    made = change_texts(facts, lambda text: _hide_and_collect(text, veil, found))
    return _HiddenPart(made, frozenset(found)) if found else _HiddenPart(facts)


PlaceholderValues = Mapping[str, str]

_SHAPE: Final = re.compile(PLACEHOLDER_PATTERN)
_LONGEST: Final = 64
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
"""A placeholder behind half an escape stays: the escape would take the first letters of the value."""
_SIGNS: Final = {"\\": "\\\\", '"': '\\"', "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def find_placeholders(text: str) -> tuple[str, ...]:
    """List what looks exactly like a placeholder: after rehydration, its value is unknown."""
    return tuple(dict.fromkeys(_SHAPE.findall(text)))


def rehydrate_text(text: str, values: PlaceholderValues) -> str:
    """Put values into a text. A value is not searched again."""
    return _SHAPE.sub(lambda match: values.get(match[0], match[0]), text)


def rehydrate_arguments(arguments: str, values: PlaceholderValues) -> str:
    """Put values into the strings of some JSON, keys included, escaped as JSON.

    A placeholder outside of quotes stays: a value there would be read as syntax.
    """
    return change_json_strings(arguments, lambda text: rehydrate_text(text, values), _keep_text, _keep_text)


def _keep_text(text: str) -> str:
    return text


def rehydrate_reply(reply: Reply, values: PlaceholderValues, nonce: str = "") -> Reply:
    """Put values into an answer; with a nonce, its text may contain calls."""
    if not values:
        return reply
    parts = _join_texts(reply.parts) if nonce else reply.parts
    return msgspec.structs.replace(reply, parts=tuple(_rehydrate_part(part, values, nonce) for part in parts))


def _join_texts(parts: Sequence[Text | ToolCall]) -> tuple[Text | ToolCall, ...]:
    """Join adjacent texts: a call in text form may cross their border."""
    words = [part for part in parts if isinstance(part, Text)]
    if len(words) < 2:  # noqa: PLR2004 One has no border.
        return tuple(parts)
    whole = msgspec.structs.replace(words[0], text="".join(part.text for part in words))
    return (whole, *(part for part in parts if not isinstance(part, Text)))


def _rehydrate_part(part: Text | ToolCall, values: PlaceholderValues, nonce: str) -> Text | ToolCall:
    match part:
        case Text(text=text):
            return msgspec.structs.replace(part, text=_rehydrate_words(text, values, nonce))
        case ToolCall(arguments=arguments):
            return msgspec.structs.replace(part, arguments=rehydrate_arguments(arguments, values))


def _rehydrate_words(text: str, values: PlaceholderValues, nonce: str) -> str:
    """Put values into text: JSON stays JSON, and calls stay the same calls."""
    if is_json(text):
        return rehydrate_arguments(text, values)
    if not nonce:
        return rehydrate_text(text, values)
    # The nonce itself may have looked like a personal number.
    opening = f"<skill {next((each for each, value in values.items() if value == nonce), nonce)}>"
    put: list[str] = []
    place = 0
    while (start := text.find(opening, place)) >= 0:
        inside = start + len(opening)
        put.append(rehydrate_text(text[place:inside], values))
        place = _rehydrate_call(text, inside, values, put)
    put.append(rehydrate_text(text[place:], values))
    return "".join(put)


def _rehydrate_call(text: str, start: int, values: PlaceholderValues, put: list[str]) -> int:
    """Put values into the quoted strings of one call, and return where it ends.

    Outside of quotes a value could become another argument. Where a quote is never closed, everything stays.
    """
    for match in _INSIDE.finditer(text, start):
        if match["open"]:
            put.append(text[match.start() :])
            return len(text)
        put.append(_rehydrate_quoted(match[0], values) if match["text"] else match[0])
        if match["closing"]:
            return match.end()
    return len(text)


def _rehydrate_quoted(literal: str, values: PlaceholderValues) -> str:
    def put(match: re.Match[str]) -> str:
        value = values.get(match[0]) if match["placeholder"] else None
        return match[0] if value is None else "".join(map(_escape_letter, value))

    return _QUOTED.sub(put, literal)


def _escape_letter(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"


class StreamRehydrator:
    """Puts values into a text that comes in chunks; holds back only what may begin a placeholder."""

    def __init__(self, values: PlaceholderValues) -> None:
        self._values = values
        self._buffer = ""

    def feed(self, chunk: str) -> str:
        text = self._buffer + chunk
        opened = text.rfind("[")
        cut = opened if opened >= 0 and may_begin_placeholder(text[opened:]) else len(text)
        self._buffer = text[cut:]
        return rehydrate_text(text[:cut], self._values)

    def finish(self) -> str:
        rest, self._buffer = self._buffer, ""
        return rehydrate_text(rest, self._values)


def may_begin_placeholder(text: str) -> bool:
    """Whether a text is the beginning of a placeholder, but not all of it."""
    for head in _HEADS:
        if len(text) <= len(head):
            if head.startswith(text):
                return True
        elif text.startswith(head):
            digits = text[len(head) :]
            return len(digits) <= _LONGEST and _HEX.issuperset(digits)
    return False
