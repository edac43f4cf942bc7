"""Messages to and from a model. Each part carries its origin, and whether that is trusted.

The system text stays the same from request to request and comes first, so that a provider can cache it. Tokens are
bounded without the provider's tokenizer: every token has at least one byte, so there are never more tokens than bytes,
plus a generous allowance for a provider's own wrapping.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, Protocol, final

import msgspec

from halter.core.text import count_bytes
from halter.core.tools import Permit, ProviderTool, ToolSpec
from halter.core.usage import ModelName, RequestExtras, Usage
from halter.core.vocabulary import Origin, Outcome


@final
class Text(msgspec.Struct, frozen=True, tag="text", tag_field="part", omit_defaults=True, gc=False):
    """Text. `reason` marks an internal message, which is not shown to people; `source` names who or what wrote it.

    Text that stands for a file brings it along: `data` of the type `media`, which may take so many `tokens`.
    """

    text: str
    origin: Origin = "person"
    trusted: bool = True
    reason: str = ""
    source: str = ""
    media: str = ""
    data: bytes = b""
    tokens: int = 0


AUDIO_PREFIX: Final = "audio/"
VOLATILE: Final = "volatile"
"""The reason of text that is true only for one request. It stands last, behind everything that a provider can cache."""


@final
class ToolCall(msgspec.Struct, frozen=True, tag="call", tag_field="part", omit_defaults=True, gc=False):
    """A call that a model asks for; its arguments are JSON as the model wrote it, which may be anything.

    Calls of one `group` run concurrently, one group after the other.
    """

    id: str
    tool: str
    arguments: str
    group: int = 0


@final
class ToolResult(msgspec.Struct, frozen=True, tag="result", tag_field="part", omit_defaults=True, gc=False):
    """The result of a call, as its model sees it."""

    id: str
    tool: str
    outcome: Outcome
    text: str
    origin: Origin = "tool"
    trusted: bool = False


Part = Text | ToolCall | ToolResult
Role = Literal["user", "assistant"]


class Message(msgspec.Struct, frozen=True, dict=True):
    """A model's answer, or everything that it is told before the next one.

    Derived values such as its size may be cached in its `__dict__`, which is not part of it.
    """

    role: Role
    parts: tuple[Part, ...]


def make_user_message(text: str, origin: Origin = "person", *, trusted: bool = True, reason: str = "") -> Message:
    return Message("user", (Text(text, origin, trusted, reason),))


NO_FACTS: Final[Mapping[str, Any]] = {}


class Prompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything that one request sends.

    `facts` are current values by name, for a rule-based model that reads no prose. `provider_tools` are those that the
    provider runs while it answers.
    """

    system: str = ""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int = 4096
    facts: Mapping[str, Any] = msgspec.field(default_factory=lambda: NO_FACTS)
    provider_tools: tuple[ProviderTool, ...] = ()

    @property
    def extras(self) -> RequestExtras:
        """What it may cost beside its tokens, without sound."""
        most = {tool.name: tool.max_uses for tool in self.provider_tools}
        return RequestExtras(searches=most.get("web_search", 0), code_executions=most.get("code_execution", 0))


class AnonymizationPolicy(msgspec.Struct, frozen=True):
    """What is hidden from models elsewhere: personal data by shape, and these names.

    Placeholders are made with a secret `salt`, or values could be guessed from them.
    """

    names: tuple[str, ...] = ()
    salt: str = ""


StopReason = Literal["end", "calls", "max_tokens", "refused"]
"""Why a model stopped: finished, wants calls, out of tokens, or refused."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A model's answer. Without a usage, the request settles at its hold."""

    parts: tuple[Text | ToolCall, ...]
    stop: StopReason = "end"
    usage: Usage | None = None

    @property
    def text(self) -> str:
        text = ""
        for part in self.parts:
            if type(part) is Text:
                text += part.text
        return text

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class StreamChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a streamed answer. Each attempt of a request ends with exactly one that is `finished`.

    `discard`: what came before belongs to a failed attempt and is withdrawn.
    """

    request: str
    text: str = ""
    discard: bool = False
    finished: bool = False


TextListener = Callable[[str], None]
"""Receives an answer's text as it streams."""


class Model(Protocol):
    """A language model. Only the guard has the permit that asking takes."""

    @property
    def name(self) -> ModelName: ...

    @property
    def base_url(self) -> str | None:
        """Its address, if not the provider's usual one."""
        ...

    def count(self, prompt: Prompt) -> int:
        """Upper bound of a prompt's input tokens."""
        ...

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        """Answer, streaming to `hear` if given.

        Raises ModelError or TimeoutError, also for a truncated answer: that is never taken for a whole one. Cancelling
        closes the connection.
        """
        ...


MESSAGE_OVERHEAD: Final = 16
"""What a provider may add around one message, part or tool."""

TOOLS_PREAMBLE: Final = 512
"""What a provider may tell a model about tools in general."""


def bound_prompt_tokens(prompt: Prompt) -> int:
    tools = TOOLS_PREAMBLE if prompt.tools else 0
    for spec in prompt.tools:
        tools += MESSAGE_OVERHEAD + count_bytes(spec.name) + count_bytes(spec.description) + len(spec.schema)
    return MESSAGE_OVERHEAD + count_bytes(prompt.system) + sum(map(bound_message_tokens, prompt.messages)) + tools


def bound_message_tokens(message: Message) -> int:
    size = MESSAGE_OVERHEAD
    for part in message.parts:
        # Of a struct that it is none, `isinstance` takes long to find out.
        if type(part) is Text:
            text, size = part.text, size + part.tokens
        else:
            text = part.id + part.tool + (part.arguments if type(part) is ToolCall else part.text)
        # Counted here: all that is said comes by.
        size += MESSAGE_OVERHEAD + (len(text) if text.isascii() else count_bytes(text))
    return size


def count_audio_tokens(messages: Iterable[Message]) -> int:
    """Upper bound of the tokens of sound, which some providers charge at a price of its own."""
    parts = (part for message in messages for part in message.parts)
    return sum(part.tokens for part in parts if isinstance(part, Text) and part.media.startswith(AUDIO_PREFIX))
