"""How many tokens a prompt has at most, without the provider's tokenizer.

A byte-level tokenizer makes every token of at least one byte, so it never makes more tokens than there are bytes.
Providers wrap messages, calls and tools into words of their own; a generous allowance stands for these.
"""

from typing import Final

from halter.core.messages import Message, Part, Prompt, Text, ToolCall, ToolResult
from halter.core.text import to_body
from halter.core.tools import ToolSpec

WRAPPING: Final = 16
"""What a provider may put around one message, part or tool."""

TOOLS_PREAMBLE: Final = 512
"""What a provider may say to a model about tools in general, before it names the first."""


def most_tokens(prompt: Prompt) -> int:
    """Bound the input tokens of a prompt from above."""
    tools = TOOLS_PREAMBLE + sum(map(_tool, prompt.tools)) if prompt.tools else 0
    return WRAPPING + _bytes(prompt.system) + sum(map(message_tokens, prompt.messages)) + tools


def message_tokens(message: Message) -> int:
    """Bound the tokens of one message from above; those of several add up."""
    return WRAPPING + sum(map(_part, message.parts))


def _part(part: Part) -> int:
    match part:
        case Text(text=text):
            return WRAPPING + _bytes(text)
        case ToolCall(id=name, tool=tool, arguments=said) | ToolResult(id=name, tool=tool, text=said):
            return WRAPPING + _bytes(name) + _bytes(tool) + _bytes(said)


def _tool(spec: ToolSpec) -> int:
    return WRAPPING + _bytes(spec.name) + _bytes(spec.description) + len(spec.schema)


def _bytes(text: str) -> int:
    return len(to_body(text))
