"""The redaction of prompts and messages."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec

from halter.core.messages import Message, Part, Prompt, ToolCall
from halter.core.ports import Lease
from halter.core.text import clean
from halter.core.tools import ToolSpec
from halter.redaction.redact import CleanTexts, Redact

_P = TypeVar("_P", bound=Part)


def mask_text(text: str, redact: Redact) -> str:
    return redact(text if text.isascii() and "\x00" not in text else clean(text))


class _LastRequest(msgspec.Struct, eq=False):
    """The common beginning of a session's requests, original and masked."""

    messages: tuple[Message, ...] = ()
    masked_messages: tuple[Message, ...] | None = None
    """The masked messages, if any of them had to be masked."""
    system: str = ""
    masked_system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    masked_tools: tuple[ToolSpec, ...] = ()


class PromptMasker:
    """Masks requests of sessions and their answers. A request begins like the previous one, so only the rest is masked.

    The last request of a session is cached while its lease object exists. Texts without a secret are cached too.
    """

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._last: WeakKeyDictionary[Lease, _LastRequest] = WeakKeyDictionary()
        self._clean = CleanTexts()

    def prompt(self, lease: Lease, prompt: Prompt) -> Prompt:
        cached_request = self._last.get(lease)
        last_request, messages = cached_request or _LastRequest(), prompt.messages
        count = len(last_request.messages)
        if messages[:count] != last_request.messages:
            count, last_request.masked_messages = 0, None
        # The last message ends with volatile text, so the next request has another one in its place.
        last_request.messages = messages[:-1]
        new_messages = messages[count:]
        masked_messages = self._messages(new_messages)
        if last_request.masked_messages is not None or masked_messages is not new_messages:
            messages = (
                *(messages[:count] if last_request.masked_messages is None else last_request.masked_messages),
                *masked_messages,
            )
            last_request.masked_messages = messages[:-1]
        if cached_request is None and last_request.messages:
            # A session that waits for its first answer has one message, so there is nothing to cache.
            self._last[lease] = last_request
        if prompt.system is not last_request.system or prompt.tools is not last_request.tools:
            last_request.system, last_request.masked_system = (
                prompt.system,
                _mask_text_cached(prompt.system, self._redact),
            )
            last_request.tools, last_request.masked_tools = prompt.tools, _mask_tools(prompt.tools, self._redact)
        is_clean = messages is prompt.messages and last_request.masked_system is prompt.system
        if is_clean and last_request.masked_tools is prompt.tools and not prompt.facts:
            return prompt
        return msgspec.structs.replace(
            prompt,
            system=last_request.masked_system,
            messages=messages,
            tools=last_request.masked_tools,
            facts=change_texts(prompt.facts, partial(mask_text, redact=self._redact)) if prompt.facts else prompt.facts,
        )

    def _messages(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        masked_messages: list[Message] | None = None
        for index, message in enumerate(messages):
            parts = self.parts(message.parts)
            if parts is not message.parts:
                masked_messages = masked_messages or list(messages)
                masked_messages[index] = msgspec.structs.replace(message, parts=parts)
        return messages if masked_messages is None else tuple(masked_messages)

    def parts(self, parts: tuple[_P, ...]) -> tuple[_P, ...]:
        """Mask every text of a message; the same tuple, if there is nothing to mask."""
        clean_texts = self._clean
        for part in parts:
            if type(part) is not ToolCall:
                if part.text not in clean_texts:
                    break
            elif part.tool not in clean_texts or part.arguments not in clean_texts:
                break
        else:
            return parts
        masked_parts = _mask_parts(parts, self._redact)
        if masked_parts is parts:
            for part in parts:
                for text in (part.tool, part.arguments) if isinstance(part, ToolCall) else (part.text,):
                    clean_texts.remember(text)
        return masked_parts


def mask_message(message: Message, redact: Redact) -> Message:
    parts = _mask_parts(message.parts, redact)
    return message if parts is message.parts else msgspec.structs.replace(message, parts=parts)


def change_texts(value: Any, change: Redact) -> Any:
    """Change every text in a JSON value, except keys."""
    match value:
        case str():
            return change(value)
        case list():
            return [change_texts(each, change) for each in cast("list[Any]", value)]
        case Mapping():
            return {key: change_texts(each, change) for key, each in cast("Mapping[str, Any]", value).items()}
        case _:
            return value


def _mask_parts(parts: tuple[_P, ...], redact: Redact) -> tuple[_P, ...]:
    """Mask every text of a message; the same tuple, if there is nothing to mask."""
    masked_parts: list[_P] | None = None
    for index, part in enumerate(parts):
        if isinstance(part, ToolCall):
            tool, arguments = mask_text(part.tool, redact), mask_text(part.arguments, redact)
            if tool is part.tool and arguments is part.arguments:
                continue
            changed_part = msgspec.structs.replace(part, tool=tool, arguments=arguments)
        else:
            text = mask_text(part.text, redact)
            if text is part.text:
                continue
            changed_part = msgspec.structs.replace(part, text=text)
        masked_parts = masked_parts or list(parts)
        masked_parts[index] = changed_part
    return parts if masked_parts is None else tuple(masked_parts)


@lru_cache(maxsize=64)
def _mask_text_cached(text: str, redact: Redact) -> str:
    return mask_text(text, redact)


@lru_cache(maxsize=64)
def _mask_tools(tools: tuple[ToolSpec, ...], redact: Redact) -> tuple[ToolSpec, ...]:
    masked_tools = tuple(
        msgspec.structs.replace(tool, description=mask_text(tool.description, redact)) for tool in tools
    )
    return tools if masked_tools == tools else masked_tools


ChangeText = Callable[[str], str]
