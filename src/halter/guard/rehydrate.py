"""Placeholders back into what they stand for: in words, in the arguments of calls, and in a stream.

A value is put only where a model wrote exactly its placeholder; one that is split, paraphrased or unknown stays as it
stands. A value is always text: wherever quotes are around it, it is spelled so that it cannot leave them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from halter.core.messages import Reply, Text, ToolCall
from halter.guard.jsontext import in_strings, is_json
from halter.guard.recognise import KINDS, SHAPE

Values = Mapping[str, str]
"""Placeholders, and what they stand for."""

_SHAPE: Final = re.compile(SHAPE)
_LONGEST: Final = 64
_HEX: Final = frozenset("0123456789abcdef")
_HEADS: Final = tuple(f"[{kind}_" for kind in KINDS)

_CLOSING: Final = "</skill>"
_INSIDE: Final = re.compile(
    r'(?P<text>"""(?:[^"\\]|\\.|"(?!""))*"""' + r"|'''(?:[^'\\]|\\.|'(?!''))*'''" + r"|(?!\"\"\"|''')"
    r"(?:\"[^\"\\]*(?:\\.[^\"\\]*)*\"|'[^'\\]*(?:\\.[^'\\]*)*'))"
    rf"|(?P<closing>{_CLOSING})|(?P<open>[\"'])|[^\"'<]+|<",
    re.DOTALL,
)
_HALF: Final = r"\\(?:[0-7]{1,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N)"
_QUOTED: Final = re.compile(rf"{_HALF}{SHAPE}|\\.|(?P<placeholder>{SHAPE})", re.DOTALL)
"""Half an escape would take the first letters of a value for its own, so a placeholder behind one stays."""
_SIGNS: Final = {"\\": "\\\\", '"': '\\"', "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def unresolved(text: str) -> tuple[str, ...]:
    """List what looks exactly like a placeholder, each once: after rehydration, nobody knows what it stands for."""
    return tuple(dict.fromkeys(_SHAPE.findall(text)))


def rehydrated_text(text: str, values: Values) -> str:
    """Put values into a text. What a value itself contains is not looked at again."""
    return _SHAPE.sub(lambda found: values.get(found[0], found[0]), text)


def rehydrated_arguments(arguments: str, values: Values) -> str:
    """Put values into the texts of some JSON, keys included, each spelled as JSON spells it.

    Outside of quotes there is no place for a value: whatever it is, it would be read as something else.
    """
    return in_strings(arguments, lambda text: rehydrated_text(text, values), _same, _same)


def _same(text: str) -> str:
    return text


def rehydrated_reply(reply: Reply, values: Values, nonce: str = "") -> Reply:
    """Put values into everything that a model answered; with a nonce, its words may hold calls."""
    if not values:
        return reply
    parts = _joined(reply.parts) if nonce else reply.parts
    return msgspec.structs.replace(reply, parts=tuple(_part(part, values, nonce) for part in parts))


def _joined(parts: Sequence[Text | ToolCall]) -> tuple[Text | ToolCall, ...]:
    """Make one text of several: a call that is written as text may go over the border between them."""
    words = [part for part in parts if isinstance(part, Text)]
    if len(words) < 2:  # noqa: PLR2004 One has no border.
        return tuple(parts)
    whole = msgspec.structs.replace(words[0], text="".join(part.text for part in words))
    return (whole, *(part for part in parts if not isinstance(part, Text)))


def _part(part: Text | ToolCall, values: Values, nonce: str) -> Text | ToolCall:
    match part:
        case Text(text=text):
            return msgspec.structs.replace(part, text=_words(text, values, nonce))
        case ToolCall(arguments=arguments):
            return msgspec.structs.replace(part, arguments=rehydrated_arguments(arguments, values))


def _words(text: str, values: Values, nonce: str) -> str:
    """Put values into words: those that are nothing but JSON stay JSON, and calls in them stay the same calls."""
    if is_json(text):
        return rehydrated_arguments(text, values)
    if not nonce:
        return rehydrated_text(text, values)
    # The nonce itself may have looked like somebody's number.
    opening = f"<skill {next((each for each, value in values.items() if value == nonce), nonce)}>"
    put: list[str] = []
    place = 0
    while (start := text.find(opening, place)) >= 0:
        inside = start + len(opening)
        put.append(rehydrated_text(text[place:inside], values))
        place = _call(text, inside, values, put)
    put.append(rehydrated_text(text[place:], values))
    return "".join(put)


def _call(text: str, start: int, values: Values, put: list[str]) -> int:
    """Put values into the quoted texts of one call, and tell where it ends.

    Outside of quotes a value could become an argument of its own. Where a quote is never closed nobody can say what is
    inside and what is not, and everything stays as it stands.
    """
    for found in _INSIDE.finditer(text, start):
        if found["open"]:
            put.append(text[found.start() :])
            return len(text)
        put.append(_quoted(found[0], values) if found["text"] else found[0])
        if found["closing"]:
            return found.end()
    return len(text)


def _quoted(literal: str, values: Values) -> str:
    """Put values into a quoted text as a program would write it."""

    def put(found: re.Match[str]) -> str:
        value = values.get(found[0]) if found["placeholder"] else None
        return found[0] if value is None else "".join(map(_letter, value))

    return _QUOTED.sub(put, literal)


def _letter(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"


class StreamRehydrator:
    """Puts values into a text that comes in chunks, as if it had come at once.

    Only what may be the beginning of a placeholder is held back.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._held = ""

    def feed(self, chunk: str) -> str:
        """Take a chunk, and return what is certain by now."""
        text = self._held + chunk
        opened = text.rfind("[")
        cut = opened if opened >= 0 and may_begin(text[opened:]) else len(text)
        self._held = text[cut:]
        return rehydrated_text(text[:cut], self._values)

    def finish(self) -> str:
        """Return the rest: nothing more will come."""
        rest, self._held = self._held, ""
        return rehydrated_text(rest, self._values)


def may_begin(text: str) -> bool:
    """Tell whether a text is the beginning of a placeholder, and not yet all of it."""
    for head in _HEADS:
        if len(text) <= len(head):
            if head.startswith(text):
                return True
        elif text.startswith(head):
            digits = text[len(head) :]
            return len(digits) <= _LONGEST and _HEX.issuperset(digits)
    return False
