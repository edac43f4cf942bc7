"""What is said to a model and by it. Each part carries where it came from, and whether that place is trusted.

The system text is what stays the same from request to request; it comes first, so that a provider's cache can keep it.

How many tokens a prompt has at most, without the provider's tokenizer.

A byte-level tokenizer makes every token of at least one byte, so it never makes more tokens than there are bytes.
Providers wrap messages, calls and tools into words of their own; a generous allowance stands for these.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import msgspec

from halter.core.text import to_body
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


def make_user_message(text: str, origin: Origin = "person", *, trusted: bool = True, reason: str = "") -> Message:
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


class AnonymizationPolicy(msgspec.Struct, frozen=True):
    """What a model that is not on this machine is not told: who somebody is, by shape, and these names.

    What stands in their place is made with a `salt` that nobody elsewhere knows, or values could be guessed from it.
    """

    names: tuple[str, ...] = ()
    salt: str = ""


StopReason = Literal["end", "calls", "max_tokens", "refused"]
"""Why a model stopped: it had finished, it wants calls made, it ran out of tokens, or it will not answer."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model answered. Without a usage nothing was reported, and the request settles at its hold."""

    parts: tuple[Text | ToolCall, ...]
    stop: StopReason = "end"
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


TextListener = Callable[[str], None]
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

    async def ask(self, prompt: Prompt, permit: Permit, hear: TextListener | None = None) -> Reply:
        """Answer, as a stream if there is somebody to hear it.

        Raises ModelError or TimeoutError, also for an answer that was cut off on its way: that is never taken for a
        whole one. Cancelling it lets go of the connection.
        """
        ...


MESSAGE_OVERHEAD: Final = 16
"""What a provider may put around one message, part or tool."""

TOOLS_PREAMBLE: Final = 512
"""What a provider may say to a model about tools in general, before it names the first."""


def bound_prompt_tokens(prompt: Prompt) -> int:
    """Bound the input tokens of a prompt from above."""
    tools = TOOLS_PREAMBLE + sum(map(_bound_tool_tokens, prompt.tools)) if prompt.tools else 0
    return MESSAGE_OVERHEAD + _count_bytes(prompt.system) + sum(map(bound_message_tokens, prompt.messages)) + tools


def bound_message_tokens(message: Message) -> int:
    """Bound the tokens of one message from above; those of several add up."""
    return MESSAGE_OVERHEAD + sum(map(_bound_part_tokens, message.parts))


def _bound_part_tokens(part: Part) -> int:
    match part:
        case Text(text=text):
            return MESSAGE_OVERHEAD + _count_bytes(text)
        case ToolCall(id=name, tool=tool, arguments=said) | ToolResult(id=name, tool=tool, text=said):
            return MESSAGE_OVERHEAD + _count_bytes(name) + _count_bytes(tool) + _count_bytes(said)


def _bound_tool_tokens(spec: ToolSpec) -> int:
    return MESSAGE_OVERHEAD + _count_bytes(spec.name) + _count_bytes(spec.description) + len(spec.schema)


def _count_bytes(text: str) -> int:
    return len(to_body(text))
