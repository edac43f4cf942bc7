"""Messages to and from a model. Each part has an origin, which is trusted or untrusted.

The system text comes first and stays the same from request to request, so that a provider can cache it. Tokens are
bounded without the provider's tokenizer: every token has at least one byte, so there are never more tokens than bytes,
plus a generous allowance for the provider's own framing.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, final

import msgspec

from halter.core.text import count_bytes
from halter.core.tools import File, Permit, ProviderTool, ToolSpec
from halter.core.usage import ModelName, RequestExtras, Usage
from halter.core.vocabulary import Origin, Outcome


@final
class Text(msgspec.Struct, frozen=True, tag="text", tag_field="part", omit_defaults=True, gc=False):
    """Text. `reason` marks an internal message, which is not shown to people; `source` names its author.

    Text that represents a file has its contents: `data` of the type `media`, of at most `tokens` tokens. A file of a
    tool follows the tool's result, whose text names it.
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
"""The reason of text that is valid for one request only. It comes last, after everything that can be cached."""


@final
class ToolCall(msgspec.Struct, frozen=True, tag="call", tag_field="part", omit_defaults=True, gc=False):
    """A call that a model requests. `arguments` is the model's text, which may not be valid JSON.

    Calls of one `group` run concurrently; the groups run one after the other.
    """

    id: str
    tool: str
    arguments: str
    group: int = 0


@final
class ToolResult(msgspec.Struct, frozen=True, tag="result", tag_field="part", omit_defaults=True, gc=False):
    """The result of a call, as the model sees it."""

    id: str
    tool: str
    outcome: Outcome
    text: str
    origin: Origin = "tool"
    trusted: bool = False


Part = Text | ToolCall | ToolResult

FileReader = Callable[[Sequence[File]], Awaitable[tuple[Text, ...]]]
"""Reads the files that a tool returned, in the form in which a model takes them. An unreadable one is a sentence."""

Role = Literal["user", "assistant"]


@final
class ReasoningItem(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a provider wants back before a text or a call of an answer: encrypted reasoning, or the phase of the text.

    `index` counts the texts of the answer that are not blank, or its calls.
    """

    before: Literal["text", "call"]
    index: int
    id: str = ""
    encrypted: str = ""
    phase: str = ""


@final
class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """What its model needs back of an answer to continue its reasoning. Nobody else can read it.

    It is kept, sent and erased as a whole with its answer, and never masked: any change would make it invalid. `maker`
    is the model with its address, and no other one is sent it. It adds at most `tokens` to the input.
    """

    maker: str
    items: tuple[ReasoningItem, ...]
    tokens: int


class Message(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A model's answer, or everything that the model receives before its next answer.

    Derived values such as the size may be cached in the `__dict__`, which is not part of the message.
    """

    role: Role
    parts: tuple[Part, ...]
    reasoning: Reasoning | None = None


def make_user_message(text: str, origin: Origin = "person", *, trusted: bool = True, reason: str = "") -> Message:
    return Message("user", (Text(text, origin, trusted, reason),))


NO_FACTS: Final[Mapping[str, Any]] = {}


class Prompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The contents of one request.

    `facts` are current values by name, for a rule-based model that cannot read text. `provider_tools` are the tools
    that the provider runs during the request. With `long_cache`, its beginning is cached for an hour, not for minutes.
    """

    system: str = ""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int = 4096
    facts: Mapping[str, Any] = msgspec.field(default_factory=lambda: NO_FACTS)
    provider_tools: tuple[ProviderTool, ...] = ()
    long_cache: bool = False

    @property
    def extras(self) -> RequestExtras:
        """The possible costs in addition to plain tokens, without audio."""
        max_uses = {tool.name: tool.max_uses for tool in self.provider_tools}
        searches, runs = max_uses.get("web_search", 0), max_uses.get("code_execution", 0)
        return RequestExtras(self.long_cache, searches, code_executions=runs)


class AnonymizationPolicy(msgspec.Struct, frozen=True):
    """The values hidden from remote models: recognised personal data, and these names.

    Placeholders depend on a secret `salt`, because values could otherwise be guessed from them.
    """

    names: tuple[str, ...] = ()
    salt: str = ""


StopReason = Literal["end", "calls", "max_tokens", "refused"]
"""The reason why a model stopped: it finished, requests calls, ran out of tokens, or refused."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A model's answer. With no usage, the request is settled at its hold.

    `model` and `id` are what the provider calls the model that answered, and the answer.
    """

    parts: tuple[Text | ToolCall, ...]
    stop: StopReason = "end"
    usage: Usage | None = None
    model: str = ""
    id: str = ""
    reasoning: Reasoning | None = None

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
    """A chunk of a streamed answer. Each attempt of a request ends with exactly one `finished` chunk.

    With `discard`, the chunks so far belong to a failed attempt and must be dropped.
    """

    request: str
    text: str = ""
    discard: bool = False
    finished: bool = False


TextListener = Callable[[str], None]
"""Receives an answer's text as it streams."""


class Model(Protocol):
    """A language model. A request requires a permit, which only the guard makes."""

    @property
    def name(self) -> ModelName: ...

    @property
    def base_url(self) -> str | None:
        """The URL of the endpoint, if it is not the provider's default."""
        ...

    def count(self, prompt: Prompt) -> int:
        """Return an upper bound of a prompt's input tokens."""
        ...

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        """Make a request and return the answer; its text is streamed to `on_text`.

        Raises ModelError or TimeoutError. A truncated answer raises too, and is never returned as complete.
        Cancellation closes the connection.
        """
        ...


MESSAGE_OVERHEAD: Final = 16
"""Maximum tokens that a provider adds to one message, part or tool."""

TOOLS_PREAMBLE: Final = 512
"""Maximum tokens that a provider adds to a request with tools."""


def bound_prompt_tokens(prompt: Prompt) -> int:
    tool_tokens = TOOLS_PREAMBLE if prompt.tools else 0
    for spec in prompt.tools:
        tool_tokens += MESSAGE_OVERHEAD + count_bytes(spec.name) + count_bytes(spec.description) + len(spec.schema)
    return MESSAGE_OVERHEAD + count_bytes(prompt.system) + sum(map(bound_message_tokens, prompt.messages)) + tool_tokens


def bound_message_tokens(message: Message) -> int:
    token_count = MESSAGE_OVERHEAD if message.reasoning is None else MESSAGE_OVERHEAD + message.reasoning.tokens
    for part in message.parts:
        # By its type: `isinstance` is slow for a struct of another type.
        if type(part) is Text:
            text, token_count = part.text, token_count + part.tokens
        else:
            text = part.id + part.tool + (part.arguments if type(part) is ToolCall else part.text)
        # `count_bytes` inlined: every text of a prompt passes here.
        token_count += MESSAGE_OVERHEAD + (len(text) if text.isascii() else count_bytes(text))
    return token_count


def count_audio_tokens(messages: Iterable[Message]) -> int:
    """Return an upper bound of the audio tokens, which some providers charge at a separate price."""
    parts = (part for message in messages for part in message.parts)
    return sum(part.tokens for part in parts if isinstance(part, Text) and part.media.startswith(AUDIO_PREFIX))
