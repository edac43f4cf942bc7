"""What tells who somebody is stays at home: in its place a model is sent placeholders such as `[EMAIL_3f9a2c]`.

Nothing is remembered. A placeholder is made of its value and a salt, so that it is the same in every request, and what
it stands for is read off the very prompt that is sent: all that a model can refer to stands there. So no table has to
be kept, and none can be lost.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, cast

import msgspec

from halter.core.counting import most_tokens
from halter.core.messages import Message, Part, Prompt, Text, ToolCall, ToolResult
from halter.core.text import to_body
from halter.core.tools import ToolSpec
from halter.guard.jsontext import in_strings, is_json
from halter.guard.names import Names, compiled
from halter.guard.recognise import Piece, pieces

DIGITS: Final = (6, 16, 64)
"""How much of its digest a placeholder carries: more only where two values would have the same one."""

_KEPT: Final = "anonymized"
"""Where a message keeps what became of it."""
_LOOKALIKE: Final = "text"
_NUMBER: Final = re.compile(r"(?<![\w.+-])[0-9]{7,19}(?![\w.])")
_NAMING: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_SAYING: Final = frozenset(("description", "title", "enum", "const", "default", "examples", "$comment"))

Pairs = frozenset[tuple[str, str]]
"""Placeholders, each with its value."""

_NONE: Final[Pairs] = frozenset()


class Anonymized(msgspec.Struct, frozen=True):
    """A prompt as it is sent, and what its placeholders stand for.

    `counts` tells how many different values of each kind were hidden; text that only looked like a placeholder does
    not count. `growth` bounds by how many tokens more is sent because of it.
    """

    prompt: Prompt
    values: Mapping[str, str]
    counts: Mapping[str, int]
    growth: int = 0


class _Veil(msgspec.Struct, frozen=True):
    """How values are hidden: by which salt, with which names, and how long their placeholders are."""

    salt: str
    names: tuple[str, ...]
    digits: int


class _Hidden(msgspec.Struct, frozen=True):
    """Something without its values, those values, and how many bytes it has become longer."""

    what: Any
    pairs: Pairs = _NONE
    growth: int = 0


def anonymized(prompt: Prompt, salt: str, names: Sequence[str]) -> Anonymized:
    """Put placeholders into a prompt. They are longer in one that holds two values which would share a placeholder."""
    made: list[_Hidden] = []
    for digits in DIGITS:
        made = _parts(prompt, _Veil(salt, tuple(names), digits))
        pairs = _NONE.union(*(each.pairs for each in made))
        values = dict(pairs)
        if len(values) == len(pairs):
            return _told(prompt, made, values, digits)
    raise AssertionError("Two values have the same digest.")


def _told(prompt: Prompt, made: Sequence[_Hidden], values: Mapping[str, str], digits: int) -> Anonymized:
    system, tools, facts, *messages = (each.what for each in made)
    sent = msgspec.structs.replace(prompt, system=system, tools=tools, facts=facts, messages=tuple(messages))
    counts: dict[str, int] = {}
    for placeholder in sorted(values):
        kind = placeholder[1:].partition("_")[0].lower()
        counts[kind] = counts.get(kind, 0) + 1
    counts.pop(_LOOKALIKE, None)
    # What was learned of earlier requests says nothing of placeholders that have become longer since.
    growth = sum(each.growth for each in made) if digits == DIGITS[0] else most_tokens(sent)
    return Anonymized(sent, values, counts, growth)


def _parts(prompt: Prompt, veil: _Veil) -> list[_Hidden]:
    return [
        _text_once(prompt.system, veil),
        _tools(prompt.tools, veil),
        _facts(prompt.facts, veil),
        *(_message(message, veil) for message in prompt.messages),
    ]


def _message(message: Message, veil: _Veil) -> _Hidden:
    """Hide what a message tells, once: a history is sent again with every request."""
    kept = vars(message).get(_KEPT)
    if kept is not None and kept[0] == veil:
        return kept[1]
    parts = [_part(part, veil) for part in message.parts]
    pairs = _NONE.union(*(part.pairs for part in parts))
    made = Message(message.role, tuple(part.what for part in parts)) if pairs else message
    hidden = _Hidden(made, pairs, sum(part.growth for part in parts))
    vars(message)[_KEPT] = (veil, hidden)
    return hidden


def _part(part: Part, veil: _Veil) -> _Hidden:
    match part:
        case Text(text=text):
            hidden = _text(text, veil)
            return msgspec.structs.replace(hidden, what=msgspec.structs.replace(part, text=hidden.what))
        case ToolCall(arguments=arguments):
            hidden = _json(arguments, veil, whole=is_json(arguments))
            return msgspec.structs.replace(hidden, what=msgspec.structs.replace(part, arguments=hidden.what))
        case ToolResult(text=text):
            hidden = _text(text, veil)
            return msgspec.structs.replace(hidden, what=msgspec.structs.replace(part, text=hidden.what))


def _text(text: str, veil: _Veil) -> _Hidden:
    """Hide what a text tells; one that is JSON may spell its values in ways of its own."""
    if is_json(text):
        return _json(text, veil, whole=True)
    return _changed(text, veil, lambda hide: hide(text))


def _json(text: str, veil: _Veil, *, whole: bool) -> _Hidden:
    """Hide what JSON tells. A number in it becomes a text; of what is no whole JSON, everything is looked at."""
    return _changed(text, veil, lambda hide: in_strings(text, hide, _numbers(hide) if whole else hide, hide))


def _numbers(hide: Callable[[str], str]) -> Callable[[str], str]:
    def quoted(found: re.Match[str]) -> str:
        hidden = hide(found[0])
        return f'"{hidden}"' if hidden.startswith("[") else found[0]

    return lambda outside: _NUMBER.sub(quoted, outside)


def _changed(text: str, veil: _Veil, change: Callable[[Callable[[str], str]], str]) -> _Hidden:
    """Change a text by something that hides the values in parts of it."""
    pairs: set[tuple[str, str]] = set()
    names = compiled(veil.names)
    made = change(lambda part: _veiled(part, names, veil, pairs))
    if not pairs:
        return _Hidden(text)
    return _Hidden(made, frozenset(pairs), max(0, len(to_body(made)) - len(to_body(text))))


def _veiled(text: str, names: Names, veil: _Veil, pairs: set[tuple[str, str]]) -> str:
    shown: list[str] = []
    known: dict[Piece, str] = {}
    for piece in pieces(text, names):
        if not piece.kind:
            shown.append(piece.text)
            continue
        if piece not in known:
            known[piece] = _placeholder(piece, veil)
            pairs.add((known[piece], piece.value))
        shown.append(known[piece])
    return "".join(shown)


def _placeholder(piece: Piece, veil: _Veil) -> str:
    digest = sha256(to_body(f"{veil.salt}\0{piece.kind}\0{piece.value}")).hexdigest()
    return f"[{piece.kind}_{digest[: veil.digits]}]"


@lru_cache(maxsize=64)
def _text_once(text: str, veil: _Veil) -> _Hidden:
    """Hide what is sent again with every request."""
    return _text(text, veil)


@lru_cache(maxsize=64)
def _tools(tools: tuple[ToolSpec, ...], veil: _Veil) -> _Hidden:
    made = [_tool(tool, veil) for tool in tools]
    pairs = _NONE.union(*(each.pairs for each in made))
    return _Hidden(tuple(each.what for each in made), pairs, sum(each.growth for each in made))


def _tool(tool: ToolSpec, veil: _Veil) -> _Hidden:
    """Hide what the description of a tool tells, and of its schema all but the names that calls need."""
    said = _text(tool.description, veil)
    found: set[tuple[str, str]] = set()
    schema = _schema(tool.schema, lambda text: _noted(text, veil, found))
    if not found:
        return msgspec.structs.replace(said, what=msgspec.structs.replace(tool, description=said.what))
    growth = said.growth + max(0, len(schema) - len(tool.schema))
    spec = msgspec.structs.replace(tool, description=said.what, schema=schema)
    return _Hidden(spec, said.pairs | found, growth)


def _noted(text: str, veil: _Veil, found: set[tuple[str, str]]) -> str:
    hidden = _text(text, veil)
    found |= hidden.pairs
    return hidden.what


def _schema(schema: bytes, hide: Callable[[str], str]) -> bytes:
    try:
        return msgspec.json.encode(_described(msgspec.json.decode(schema), hide, naming=False))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return schema


def _described(value: Any, hide: Callable[[str], str], *, naming: bool) -> Any:
    """Go through a schema; below some of its keys stand names and no words of its own."""
    match value:
        case dict():
            items = cast("dict[str, Any]", value).items()
            return {
                key: _everywhere(each, hide)
                if key in _SAYING and not naming
                else _described(each, hide, naming=key in _NAMING and not naming)
                for key, each in items
            }
        case list():
            return [_described(each, hide, naming=False) for each in cast("list[Any]", value)]
        case _:
            return value


def _everywhere(value: Any, hide: Callable[[str], str]) -> Any:
    match value:
        case str():
            return hide(value)
        case list():
            return [_everywhere(each, hide) for each in cast("list[Any]", value)]
        case dict():
            return {key: _everywhere(each, hide) for key, each in cast("dict[str, Any]", value).items()}
        case _:
            return value


def _facts(facts: Mapping[str, Any], veil: _Veil) -> _Hidden:
    """Hide what is known, whose names are the agent's own; facts are small, and change from turn to turn."""
    found: set[tuple[str, str]] = set()
    made = {key: _everywhere(value, lambda text: _noted(text, veil, found)) for key, value in facts.items()}
    return _Hidden(made, frozenset(found)) if found else _Hidden(facts)
