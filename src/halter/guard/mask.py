"""Secrets out of what is said to a model and by it, part by part.

Each text is masked by itself: once it is inside JSON, the quotes and line ends of a secret would be spelled otherwise.
What no JSON can carry is replaced on the way, so that what is sent, kept and handed back is one and the same.
"""

import msgspec

from halter.core.messages import Message, Part, Prompt, Reply, Text, ToolCall, ToolResult
from halter.core.text import clean
from halter.core.tools import ToolSpec
from halter.guard.flight import Redact


def masked(text: str, redact: Redact) -> str:
    """Mask one text."""
    return redact(clean(text))


def masked_prompt(prompt: Prompt, redact: Redact) -> Prompt:
    """Mask everything that a request sends."""
    return Prompt(
        system=masked(prompt.system, redact),
        messages=tuple(
            Message(message.role, tuple(_masked_part(part, redact) for part in message.parts))
            for message in prompt.messages
        ),
        tools=tuple(_masked_tool(tool, redact) for tool in prompt.tools),
        max_output_tokens=prompt.max_output_tokens,
    )


def masked_reply(reply: Reply, redact: Redact) -> Reply:
    """Mask everything that a model answered, the arguments of its calls included."""
    parts = tuple(_masked_text(part, redact) if isinstance(part, Text) else _call(part, redact) for part in reply.parts)
    return msgspec.structs.replace(reply, parts=parts)


def _masked_part(part: Part, redact: Redact) -> Part:
    match part:
        case Text():
            return _masked_text(part, redact)
        case ToolCall():
            return _call(part, redact)
        case ToolResult():
            return msgspec.structs.replace(part, text=masked(part.text, redact))


def _masked_text(part: Text, redact: Redact) -> Text:
    return msgspec.structs.replace(part, text=masked(part.text, redact))


def _call(part: ToolCall, redact: Redact) -> ToolCall:
    return ToolCall(part.id, masked(part.tool, redact), masked(part.arguments, redact))


def _masked_tool(tool: ToolSpec, redact: Redact) -> ToolSpec:
    return msgspec.structs.replace(tool, description=masked(tool.description, redact))
