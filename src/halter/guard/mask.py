"""Secrets out of what is said to a model and by it, part by part.

Each text is masked by itself: once it is inside JSON, the quotes and line ends of a secret would be spelled otherwise.
What no JSON can carry is replaced on the way, so that what is sent, kept and handed back is one and the same.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import msgspec

from halter.core.messages import Message, Part, Prompt, Reply, Text, ToolCall, ToolResult
from halter.core.ports import Lease
from halter.core.text import clean
from halter.core.tools import ToolSpec
from halter.guard.flight import Redact

_MASKED: Final = "masked"
"""Where a message keeps what became of it under a redactor."""


def masked(text: str, redact: Redact) -> str:
    """Mask one text."""
    return redact(clean(text))


class Masks:
    """Masks what sessions send, request by request: each begins as the one before it, and only what is new is masked.

    What a session sent last is known for as long as somebody holds its lease.
    """

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._last: WeakKeyDictionary[Lease, tuple[tuple[Message, ...], tuple[Message, ...]]] = WeakKeyDictionary()

    def prompt(self, lease: Lease, prompt: Prompt) -> Prompt:
        """Mask everything that a request sends."""
        said, known = self._last.get(lease, ((), ()))
        if prompt.messages[: len(said)] != said:
            said, known = (), ()
        fresh = [masked_message(message, self._redact) for message in prompt.messages[len(said) :]]
        messages = (*known, *fresh)
        # The last message ends with what is true only now, so the next request says it otherwise.
        self._last[lease] = (prompt.messages[:-1], messages[:-1])
        return msgspec.structs.replace(
            prompt,
            system=_masked_once(prompt.system, self._redact),
            messages=messages,
            tools=_masked_tools(prompt.tools, self._redact),
            facts=_masked_facts(prompt.facts, self._redact) if prompt.facts else prompt.facts,
        )


def masked_message(message: Message, redact: Redact) -> Message:
    """Mask a message, once: a history is sent again with every request, and only what is new has to be looked at."""
    kept = vars(message).get(_MASKED)
    if kept is not None and kept[0] == redact:
        return kept[1]
    parts = tuple([_masked_part(part, redact) for part in message.parts])
    made = message if parts == message.parts else Message(message.role, parts)
    if made is not message:
        vars(made)[_MASKED] = (redact, made)
    vars(message)[_MASKED] = (redact, made)
    return made


def _masked_facts(facts: Mapping[str, Any], redact: Redact) -> Mapping[str, Any]:
    """Mask all text in what is known; facts are small, and change from turn to turn."""
    return {key: _masked_value(value, redact) for key, value in facts.items()}


def _masked_value(value: Any, redact: Redact) -> Any:
    match value:
        case str():
            return masked(value, redact)
        case list():
            return [_masked_value(each, redact) for each in cast("list[Any]", value)]
        case dict():
            return _masked_facts(cast("dict[str, Any]", value), redact)
        case _:
            return value


def masked_reply(reply: Reply, redact: Redact) -> Reply:
    """Mask everything that a model answered, the arguments of its calls included."""
    parts = tuple(
        [_masked_text(part, redact) if isinstance(part, Text) else _call(part, redact) for part in reply.parts]
    )
    return reply if parts == reply.parts else msgspec.structs.replace(reply, parts=parts)


def _masked_part(part: Part, redact: Redact) -> Part:
    match part:
        case Text():
            return _masked_text(part, redact)
        case ToolCall():
            return _call(part, redact)
        case ToolResult():
            text = masked(part.text, redact)
            return part if text is part.text else msgspec.structs.replace(part, text=text)


def _masked_text(part: Text, redact: Redact) -> Text:
    text = masked(part.text, redact)
    return part if text is part.text else msgspec.structs.replace(part, text=text)


def _call(part: ToolCall, redact: Redact) -> ToolCall:
    tool, arguments = masked(part.tool, redact), masked(part.arguments, redact)
    if tool is part.tool and arguments is part.arguments:
        return part
    return msgspec.structs.replace(part, tool=tool, arguments=arguments)


@lru_cache(maxsize=64)
def _masked_once(text: str, redact: Redact) -> str:
    """Mask what is sent again with every request."""
    return masked(text, redact)


@lru_cache(maxsize=64)
def _masked_tools(tools: tuple[ToolSpec, ...], redact: Redact) -> tuple[ToolSpec, ...]:
    return tuple(msgspec.structs.replace(tool, description=masked(tool.description, redact)) for tool in tools)
