"""What is said to a model and by it. Each part carries where it came from, and whether that place is trusted.

The system text is what stays the same from request to request; it comes first, so that a provider's cache can keep it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from halter.core.tools import Permit, ToolSpec
from halter.core.usage import ModelName, Usage
from halter.core.vocabulary import Origin, Outcome


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="part", omit_defaults=True, gc=False):
    """Words. `reason` names an internal message, which no person is shown."""

    text: str
    origin: Origin = "person"
    trusted: bool = True
    reason: str = ""


class ToolCall(msgspec.Struct, frozen=True, tag="call", tag_field="part", omit_defaults=True, gc=False):
    """A call that a model asks for; its arguments are JSON as the model wrote it, which may be anything.

    Calls of one `group` are made together, and one group after the other.
    """

    id: str
    tool: str
    arguments: str
    group: int = 0


class ToolResult(msgspec.Struct, frozen=True, tag="result", tag_field="part", omit_defaults=True, gc=False):
    """What became of a call, as its model is told."""

    id: str
    tool: str
    outcome: Outcome
    text: str
    origin: Origin = "tool"
    trusted: bool = False


Part = Text | ToolCall | ToolResult
Role = Literal["user", "assistant"]


class Message(msgspec.Struct, frozen=True, dict=True):
    """One side's say: a model's answer, or everything that it is told before the next one.

    What is worked out from a message once, such as its size, may be kept in its `__dict__`, which is no part of it.
    """

    role: Role
    parts: tuple[Part, ...]


def user(text: str, origin: Origin = "person", *, trusted: bool = True, reason: str = "") -> Message:
    """Say one thing to a model."""
    return Message("user", (Text(text, origin, trusted, reason),))


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one request sends.

    `facts` are what the agent knows right now, as values by name: for a model that works by rules and reads no prose.
    """

    system: str = ""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int = 4096
    facts: Mapping[str, Any] = {}


class Anonymizing(msgspec.Struct, frozen=True):
    """What a model that is not on this machine is not told: who somebody is, by shape, and these names.

    What stands in their place is made with a `salt` that nobody elsewhere knows, or values could be guessed from it.
    """

    names: tuple[str, ...] = ()
    salt: str = ""


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


class StreamChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of an answer as it comes. Each attempt of a request ends with exactly one that is `finished`.

    `discard` says that what came before belongs to an attempt that failed: whoever showed it takes it back.
    """

    request: str
    text: str = ""
    discard: bool = False
    finished: bool = False


Hear = Callable[[str], None]
"""Somebody who wants to have an answer's words as they come."""


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

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Answer, as a stream if there is somebody to hear it.

        Raises ModelError or TimeoutError, also for an answer that was cut off on its way: that is never taken for a
        whole one. Cancelling it lets go of the connection.
        """
        ...
