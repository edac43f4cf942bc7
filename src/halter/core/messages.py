"""What is said to a model and by it. Each part carries where it came from, and whether that place is trusted.

The system text is what stays the same from request to request; it comes first, so that a provider's cache can keep it.
"""

from typing import Literal, Protocol

import msgspec

from halter.core.events import Origin, Outcome
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import ModelName, Usage


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="part", omit_defaults=True):
    """Words. `reason` names an internal message, which no person is shown."""

    text: str
    origin: Origin = "person"
    trusted: bool = True
    reason: str = ""


class ToolCall(msgspec.Struct, frozen=True, tag="call", tag_field="part", omit_defaults=True):
    """A call that a model asks for; its arguments are JSON as the model wrote it, which may be anything."""

    id: str
    tool: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, tag="result", tag_field="part", omit_defaults=True):
    """What became of a call, as its model is told."""

    id: str
    tool: str
    outcome: Outcome
    text: str
    origin: Origin = "tool"
    trusted: bool = False


Part = Text | ToolCall | ToolResult
Role = Literal["user", "assistant"]


class Message(msgspec.Struct, frozen=True):
    """One side's say: a model's answer, or everything that it is told before the next one."""

    role: Role
    parts: tuple[Part, ...]


def user(text: str, origin: Origin = "person", *, trusted: bool = True, reason: str = "") -> Message:
    """Say one thing to a model."""
    return Message("user", (Text(text, origin, trusted, reason),))


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one request sends."""

    system: str = ""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int = 4096


Stop = Literal["end", "calls", "max_tokens", "refused"]
"""Why a model stopped: it had finished, it wants calls made, it ran out of tokens, or it will not answer."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model answered. Without a usage nothing was reported, and the request settles at its hold."""

    parts: tuple[Text | ToolCall, ...]
    stop: Stop = "end"
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """All words of the answer."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that it asks for, in order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class Model(Protocol):
    """Somebody who answers. Only the guard has the permit that asking takes."""

    @property
    def name(self) -> ModelName:
        """The provider and the model."""
        ...

    @property
    def base_url(self) -> str | None:
        """Where it is reached, if not at the provider's usual address."""
        ...

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        ...

    async def ask(self, prompt: Prompt, permit: Permit) -> Reply:
        """Answer. Raises ModelError or TimeoutError; cancelling it lets go of the connection."""
        ...
