"""Conversion of histories from and to Pydantic AI, which is imported only where it is used."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from halter.core.errors import ConfigError
from halter.core.messages import Message, Part, Text, ToolCall, ToolResult
from halter.core.text import format_count
from halter.models.wire_format import shape_history

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage


def write_pydantic_messages(messages: Sequence[Message]) -> "list[ModelMessage]":
    """Convert messages to Pydantic AI's form, for `message_history`."""
    return shape_history(messages)


def read_history(history: Iterable[Any]) -> tuple[Message, ...]:
    """Read a history of messages of Halter or Pydantic AI.

    System prompts and reasoning are left out, since an agent has its own instructions. Tool results are never trusted.
    """
    messages = [each if isinstance(each, Message) else _read_message(each) for each in history]
    return tuple(message for message in messages if message.parts)


def _read_message(message: Any) -> Message:
    match getattr(message, "kind", None):
        case "request":
            return Message(
                "user", tuple(converted_part for part in message.parts if (converted_part := _read_request_part(part)))
            )
        case "response":
            return Message(
                "assistant",
                tuple(converted_part for part in message.parts if (converted_part := _read_response_part(part))),
            )
        case _:
            raise ConfigError(
                f"A history must be a list of messages of Halter or Pydantic AI, but it has a {type(message).__name__}."
            )


def _read_request_part(part: Any) -> Part | None:
    match part.part_kind:
        case "user-prompt":
            return Text(_read_words(part.content))
        case "tool-return":
            outcome = "ok" if getattr(part, "outcome", "success") == "success" else "error"
            return ToolResult(part.tool_call_id, part.tool_name, outcome, part.model_response_str())
        case "retry-prompt" if part.tool_name:
            return ToolResult(part.tool_call_id, part.tool_name, "error", part.model_response())
        case "retry-prompt":
            return _read_feedback(part.model_response())
        case "retry-feedback":
            return _read_feedback(str(part.content))
        case _:
            return None


def _read_feedback(text: str) -> Text:
    """Read a framework's feedback to its model as untrusted text, since it may quote anything."""
    return Text(text, "config", trusted=False, reason="output_expected")


def _read_response_part(part: Any) -> Part | None:
    match part.part_kind:
        case "text":
            return Text(part.content, "model", trusted=False) if part.content.strip() else None
        case "tool-call":
            return ToolCall(part.tool_call_id, part.tool_name, part.args_as_json_str())
        case _:
            return None


def _read_words(content: Any) -> str:
    if isinstance(content, str):
        return content
    contents = [each if isinstance(each, str) else getattr(each, "content", None) for each in content]
    texts = [text for text in contents if isinstance(text, str)]
    if len(texts) < len(contents):
        raise ConfigError(
            f"A history may contain only text, but {format_count(len(contents) - len(texts), 'part')} is not text."
        )
    return "\n".join(texts)
