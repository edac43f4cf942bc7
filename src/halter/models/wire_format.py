"""Messages in the format of the provider library, its answers in Halter's, and the usage in the bytes of an answer.

A message is converted once and the result is cached on it. What providers would refuse is corrected here: results of
calls come before text, turns alternate, no text is blank, and arguments that are no JSON object are wrapped into one.

A request that was cut off is charged by what was reported until then, so it matters which report is final:

    openai      `usage` in any chunk; final with or after the chunk that has a `finish_reason`
    anthropic   `message_start`, with all input and hardly any output; final in the `message_delta` with a `stop_reason`
    google      `usageMetadata` in any chunk; final with or after the chunk that has a `finishReason`
    responses   the `usage` of the whole response, in the event that ends it

Reports of one answer are cumulative on all three wires, so the largest count of each kind is kept; of cached input,
which costs less, the last one. The report of an answer in one piece is final, and so is one in the body of an error.
A report that cannot be read invalidates those before it, and the request settles at its hold.

Reasoning counts as output, once. Anthropic counts it within the output, Google beside the candidates. Some servers of
OpenAI's protocol count it within `completion_tokens`, others beside them: then it is in `total_tokens`, or there is
more of it than of `completion_tokens`.

Anthropic does not count a compaction of the context into the sums of its report: it is added. A report of a tier that
costs more than the listed price, or of a cache without a price, cannot be priced and counts as unreadable.
"""

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from halter.core.agent_spec import WireFormat
from halter.core.messages import VOLATILE, Message, Part, Prompt, Reply, Role, StopReason, Text, ToolCall, ToolResult
from halter.core.text import clean, to_body
from halter.core.tools import ToolSpec
from halter.core.usage import Usage

if TYPE_CHECKING:
    from pydantic_ai.messages import (
        ModelMessage,
        ModelRequest,
        ModelRequestPart,
        ModelResponse,
        ModelResponsePart,
        ModelResponseStreamEvent,
    )
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.native_tools import AbstractNativeTool
    from pydantic_ai.tools import ToolDefinition

    Shaped = ModelRequestPart | ModelResponsePart

EMPTY_MESSAGE: Final = "(empty)"
"""Stands for an empty message, which providers refuse."""

INVALID_ARGUMENTS_KEY: Final = "_invalid"
"""The key under which a model sees its own arguments again that were no JSON object."""

_KEPT: Final = "wire_parts"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def shape_history(messages: Sequence[Message], *, cache_points: bool = False) -> "list[ModelMessage]":
    """Convert a history into alternating turns.

    The newest turn has a cache point before what is true only now: a cache entry that includes it would be paid for and
    never read. The turn before has one at its end, where the request before this one left its entry: a provider looks
    back from a cache point only over so many blocks.
    """
    turns = [_turn(role, group) for role, group in groupby(filter(_shape_once, messages), key=_role)]
    if cache_points:
        from pydantic_ai.messages import ModelRequest

        asked = [turn for turn in turns if isinstance(turn, ModelRequest)]
        for turn in asked[-2:-1]:
            _mark_for_cache(turn, len(turn.parts))
        for turn in asked[-1:]:
            _mark_for_cache(turn, len(turn.parts) - _ends_volatile(messages))
    return turns


def _mark_for_cache(turn: "ModelRequest", end: int) -> None:
    from pydantic_ai.messages import CachePoint, UserPromptPart

    if end:
        turn.parts = [*turn.parts[:end], UserPromptPart([CachePoint()]), *turn.parts[end:]]


def _ends_volatile(messages: Sequence[Message]) -> bool:
    last = messages[-1].parts[-1] if messages and messages[-1].parts else None
    return isinstance(last, Text) and last.reason == VOLATILE and bool(last.text.strip())


def _role(message: Message) -> Role:
    return message.role


def _turn(role: Role, messages: Iterable[Message]) -> "ModelMessage":
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolReturnPart

    parts = [part for message in messages for part in _shape_once(message)]
    if role == "assistant":
        return ModelResponse(parts=cast("list[ModelResponsePart]", parts))
    results_first = sorted(parts, key=lambda part: not isinstance(part, ToolReturnPart))
    return ModelRequest(parts=cast("list[ModelRequestPart]", results_first))


def _shape_once(message: Message) -> "list[Shaped]":
    beside = vars(message)
    if _KEPT not in beside:
        from pydantic_ai.messages import UserPromptPart

        parts = [
            _part(part, message.role)
            for part in message.parts
            if not (isinstance(part, Text) and not part.text.strip())
        ]
        beside[_KEPT] = parts or ([UserPromptPart(EMPTY_MESSAGE)] if message.role == "user" else [])
    return beside[_KEPT]


def _part(part: Part, role: Role) -> "Shaped":
    from pydantic_ai.messages import BinaryContent, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart

    match part:
        case Text(media=media) if media and role == "user":
            return UserPromptPart([clean(part.text), BinaryContent(part.data, media_type=media)])
        case Text(text=text):
            return UserPromptPart(clean(text)) if role == "user" else TextPart(clean(text))
        case ToolCall():
            return ToolCallPart(_tool_name(part.tool), _make_sendable(part.arguments), _call_id(part.id))
        case ToolResult():
            outcome = "success" if part.outcome == "ok" else "failed"
            return ToolReturnPart(_tool_name(part.tool), clean(part.text), _call_id(part.id), outcome=outcome)


def _tool_name(name: str) -> str:
    """Make a model's invented tool name one that its provider accepts back."""
    return name if _NAME.fullmatch(name) else _NO_NAME.sub("_", name)[:64] or "_"


def _call_id(name: str) -> str:
    """Give a call of another provider an id that every provider accepts; deterministic."""
    return name if _ID.fullmatch(name) else f"call_{hashlib.sha256(to_body(name)).hexdigest()[:32]}"


def _make_sendable(arguments: str) -> str:
    """Keep arguments that are a JSON object; wrap all others into one."""
    if not arguments.strip():
        return "{}"
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return msgspec.json.encode({INVALID_ARGUMENTS_KEY: clean(arguments)}).decode()


class ToolDefinitions:
    """Tool definitions of requests, each converted once."""

    def __init__(self) -> None:
        self._made: dict[ToolSpec, ToolDefinition] = {}

    def parameters(self, prompt: Prompt, form: ToolSpec | None = None) -> "ModelRequestParameters":
        """The tools and the system text; with a `form`, the answer has to fit its arguments instead of calling it."""
        made = self._parameters(prompt, form)
        return replace(made, native_tools=shape_provider_tools(prompt)) if prompt.provider_tools else made

    def _parameters(self, prompt: Prompt, form: ToolSpec | None) -> "ModelRequestParameters":
        from pydantic_ai.messages import InstructionPart
        from pydantic_ai.models import ModelRequestParameters

        system = [InstructionPart(content=clean(prompt.system))] if prompt.system.strip() else []
        tools = [self._tool(spec) for spec in prompt.tools if spec is not form]
        if form is None:
            return ModelRequestParameters(function_tools=tools, instruction_parts=system)
        from pydantic_ai.output import OutputObjectDefinition

        schema = msgspec.json.decode(form.schema, type=dict[str, Any])
        return ModelRequestParameters(
            function_tools=tools,
            instruction_parts=system,
            output_mode="native",
            output_object=OutputObjectDefinition(json_schema=schema, name=form.name, description=form.description),
        )

    def _tool(self, spec: ToolSpec) -> "ToolDefinition":
        made = self._made.get(spec)
        if made is None:
            from pydantic_ai.tools import ToolDefinition

            schema = msgspec.json.decode(spec.schema, type=dict[str, Any])
            made = self._made[spec] = ToolDefinition(
                name=spec.name, parameters_json_schema=schema, description=clean(spec.description), strict=False
            )
        return made


def shape_provider_tools(prompt: Prompt) -> "list[AbstractNativeTool]":
    from pydantic_ai.native_tools import CodeExecutionTool, WebSearchTool

    return [
        WebSearchTool(max_uses=tool.max_uses) if tool.name == "web_search" else CodeExecutionTool()
        for tool in prompt.provider_tools
    ]


def count_provider_tools(response: "ModelResponse") -> Counter[str]:
    """How often the provider used tools of its own, by their names."""
    from pydantic_ai.messages import NativeToolCallPart

    return Counter(part.tool_name for part in response.parts if isinstance(part, NativeToolCallPart))


def parse_model_response(response: "ModelResponse", usage: Usage | None) -> Reply:
    """Convert an answer. Reasoning is left out."""
    from pydantic_ai.messages import TextPart, ToolCallPart

    parts: list[Text | ToolCall] = []
    for part in response.parts:
        match part:
            case TextPart(content=content) if content:
                parts.append(_to_text(content))
            case ToolCallPart():
                parts.append(ToolCall(part.tool_call_id, join_surrogates(part.tool_name), _arguments(part.args)))
            case _:
                pass
    refusal = (response.provider_details or {}).get("refusal")
    if not parts and isinstance(refusal, str):
        parts.append(_to_text(refusal))
    return Reply(tuple(parts), _stop(response, parts), usage)


def read_native_answer(reply: Reply, tool: str) -> Reply:
    """Take an answer in the form of a tool's arguments for a call of it. One that was cut off stays a text."""
    if reply.calls or reply.stop != "end":
        return reply
    try:
        fits = isinstance(msgspec.json.decode(reply.text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return reply
    return msgspec.structs.replace(reply, parts=(ToolCall("", tool, reply.text),), stop="calls") if fits else reply


def _to_text(text: str) -> Text:
    return Text(join_surrogates(text), "model", trusted=False)


def _arguments(sent: object) -> str:
    if isinstance(sent, str) and sent.strip():
        return join_surrogates(sent)
    return (
        join_surrogates(json.dumps(sent, ensure_ascii=False, separators=(",", ":"))) if isinstance(sent, dict) else "{}"
    )


def _stop(response: "ModelResponse", parts: Sequence[Text | ToolCall]) -> StopReason:
    """Why a model stopped. Many servers say `stop` also where calls are requested."""
    if response.state == "suspended":
        # The provider paused to let its own tools go on: what it said until then is no whole answer.
        return "max_tokens"
    match response.finish_reason:
        case "length":
            return "max_tokens"
        case "content_filter":
            return "refused"
        case "stop" | "tool_call" | "error" | None:
            return "calls" if any(isinstance(part, ToolCall) for part in parts) else "end"


def find_event_text(event: "ModelResponseStreamEvent") -> str:
    from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta

    match event:
        case PartStartEvent(part=TextPart(content=content)):
            return content
        case PartDeltaEvent(delta=TextPartDelta(content_delta=content)):
            return content
        case _:
            return ""


def join_surrogates(text: str) -> str:
    """Join surrogate halves that a server sent apart; replace a lone one."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def make_surrogate_joiner() -> Callable[[str], str]:
    """The same for a stream: a half waits for the chunk with the other."""
    decoder = codecs.getincrementaldecoder("utf-16-le")("replace")
    return lambda text: decoder.decode(text.encode("utf-16-le", "surrogatepass"))


_DATA: Final = b"data:"
_OPENS_JSON: Final = (b"{", b"[")
_NAMES_A_REPORT: Final = b"usage"


_SPARE_DEPTH: Final = 200
"""Levels of nesting that a reader of an answer has left."""


def _is_too_deep(data: bytes) -> bool:
    """Whether a reader would come near the limit of recursion, where finalizers fail that happen to run then."""
    if data.count(b"[") + data.count(b"{") <= _SPARE_DEPTH:
        return False
    nested = b"[" * _SPARE_DEPTH + data.removeprefix(_DATA) + b"]" * _SPARE_DEPTH
    try:
        msgspec.json.decode(nested, type=msgspec.Raw)
    except RecursionError:
        return True
    except (msgspec.DecodeError, UnicodeError):
        return False  # Its reader says what is wrong with it.
    return False


class UsageReading(msgspec.Struct, frozen=True):
    """What one event, or a whole answer, reports, and whether the answer is finished.

    Without `output` a report cannot be final. `cache_read` is None where a report leaves it out. An `unpriced` one
    names a service that costs more than is listed.
    """

    input: int = 0
    output: int | None = None
    cache_read: int | None = None
    cache_write: int = 0
    finished: bool = False
    cache_write_1h: int = 0
    searches: int = 0
    unpriced: bool = False
    audio: int = 0
    audio_cached: int = 0


UsageFormat = WireFormat | Literal["responses"]
"""The formats of reports: those of the wires, and that of OpenAI's other protocol."""
_ENDINGS: Final[Mapping[UsageFormat, bytes]] = MappingProxyType(
    {"openai": b"finish_reason", "anthropic": b"stop_reason", "google": b"finishReason", "responses": b"status"}
)
"""The member that tells whether an answer is finished."""


class UsageReader:
    """Reads the answer to one request as it comes: a stream of events, or one piece of JSON."""

    def __init__(self, wire: UsageFormat) -> None:
        self.final = False
        self.too_deep = False
        self._read = _READERS[wire]
        self._ending = _ENDINGS[wire]
        self._counts = UsageReading()
        self._finished = False
        self._spoiled = False
        self._streams: bool | None = None
        self._rest = bytearray()

    @property
    def usage(self) -> Usage | None:
        """The largest reported counts; None for a report without input, or one that contradicts itself."""
        counts = self._counts
        if not counts.input or self._spoiled:
            return None
        try:
            return Usage(
                counts.input,
                counts.output or 0,
                counts.cache_read or 0,
                counts.cache_write,
                counts.cache_write_1h,
                counts.searches,
                counts.audio,
                counts.audio_cached,
            )
        except ValueError:
            return None

    @property
    def finished(self) -> bool:
        """Whether the answer said that it is complete."""
        return self._finished

    def feed(self, piece: bytes) -> None:
        if self._streams is None and (begin := piece.lstrip()):
            self._streams = not begin.startswith(_OPENS_JSON)
        if not self._streams:
            self._rest += piece
            return
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r"))
        if end < 0:
            self._rest += piece
            return
        whole, self._rest = bytes(self._rest) + piece[:end], bytearray(piece[end + 1 :])
        self.too_deep = self.too_deep or any(map(_is_too_deep, whole.splitlines()))
        if self._can_report(whole):
            for line in whole.splitlines():
                self._read_line(line)

    def _can_report(self, data: bytes) -> bool:
        """Whether it names a report or an end. Most of a stream does neither, and need not be parsed."""
        return _NAMES_A_REPORT in data or self._ending in data

    def close(self) -> None:
        rest, self._rest = bytes(self._rest), bytearray()
        self.too_deep = self.too_deep or _is_too_deep(rest)
        if self._streams:
            self._read_line(rest)
        elif rest:
            self._finished = True
            self._read_body(rest)

    def _read_line(self, line: bytes) -> None:
        if line.startswith(_DATA) and self._can_report(line):
            self._read_body(line[len(_DATA) :])

    def _read_body(self, body: bytes) -> None:
        try:
            said = self._read(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            self._mark_unusable(_NAMES_A_REPORT in body)
            return
        self._finished = self._finished or said.finished
        self._mark_unusable(
            min(said.input, said.output or 0, said.cache_read or 0, said.cache_write) < 0 or said.unpriced
        )
        # What was written is not unwritten: a final count below an earlier one is wrong.
        self._mark_unusable(self._finished and said.output is not None and said.output < (self._counts.output or 0))
        self.final = not self._spoiled and (self.final or (self._finished and said.output is not None))
        self._counts = UsageReading(
            max(self._counts.input, said.input),
            max(self._counts.output or 0, said.output or 0),
            self._counts.cache_read if said.cache_read is None else said.cache_read,
            max(self._counts.cache_write, said.cache_write),
            cache_write_1h=max(self._counts.cache_write_1h, said.cache_write_1h),
            searches=max(self._counts.searches, said.searches),
            audio=max(self._counts.audio, said.audio),
            audio_cached=max(self._counts.audio_cached, said.audio_cached),
        )

    def _mark_unusable(self, spoils: bool) -> None:  # noqa: FBT001, it is all that this says.
        self._spoiled = self._spoiled or spoils
        self.final = self.final and not self._spoiled


def _first(*counts: int | None) -> int | None:
    """The first positive count, else the first that was reported."""
    return next((count for count in counts if count), next((count for count in counts if count is not None), None))


_DEARER_TIERS: Final = frozenset(("priority", "fast"))


class _ChatInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class _ChatOutput(msgspec.Struct):
    reasoning_tokens: int | None = None


class _ChatUsage(msgspec.Struct):
    """OpenAI's report, and where other servers of its protocol put the same counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _ChatInput | None = None
    completion_tokens_details: _ChatOutput | None = None
    reasoning_tokens: int | None = None
    citation_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    usage: _ChatUsage | None = None
    choices: Sequence[_ChatChoice] | None = None
    service_tier: str | None = None


def _chat_reading(said: _Chat) -> UsageReading:
    finished = any(choice.finish_reason for choice in said.choices or ())
    usage = said.usage
    if usage is None:
        return UsageReading(finished=finished)
    cached, reasoned = usage.prompt_tokens_details or _ChatInput(), usage.completion_tokens_details or _ChatOutput()
    read = _first(cached.cached_tokens, usage.prompt_cache_hit_tokens, usage.cache_read_input_tokens)
    write = cached.cache_write_tokens or usage.cache_creation_input_tokens or 0
    reasoning = reasoned.reasoning_tokens or usage.reasoning_tokens or 0
    dearer = said.service_tier in _DEARER_TIERS
    return UsageReading(
        usage.prompt_tokens or 0,
        _chat_output(usage, reasoning),
        read,
        write,
        finished,
        unpriced=dearer,
        audio=cached.audio_tokens or 0,
    )


def _chat_output(usage: _ChatUsage, reasoning: int) -> int | None:
    """Count all output: also what a server reports beside the completion."""
    if usage.completion_tokens is None and usage.total_tokens is None:
        return None
    said = usage.completion_tokens or 0
    beside = (usage.total_tokens or 0) - (usage.prompt_tokens or 0) - said
    apart = max(beside, reasoning if reasoning > said else 0, 0)
    return said + apart + (usage.citation_tokens or 0)


class _CacheWrites(msgspec.Struct):
    ephemeral_1h_input_tokens: int | None = None


class _ServerTools(msgspec.Struct):
    web_search_requests: int | None = None


class _Iteration(msgspec.Struct):
    type: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _MessageUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: _CacheWrites | None = None
    server_tool_use: _ServerTools | None = None
    iterations: Sequence[_Iteration] | None = None
    speed: str | None = None


class _Message(msgspec.Struct):
    usage: _MessageUsage | None = None


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None


class _MessageEvent(msgspec.Struct):
    """An event of Anthropic's stream, or its whole answer: each has the report elsewhere."""

    usage: _MessageUsage | None = None
    stop_reason: str | None = None
    message: _Message | str | None = None
    delta: _MessageDelta | None = None


def _message_reading(said: _MessageEvent) -> UsageReading:
    finished = bool(said.stop_reason or (said.delta and said.delta.stop_reason))
    usage = said.usage or (said.message.usage if isinstance(said.message, _Message) else None)
    if usage is None:
        return UsageReading(finished=finished)
    read, write = usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0
    made, output = (usage.input_tokens or 0) + (read or 0) + write, usage.output_tokens
    for beside in usage.iterations or ():
        if beside.type == "compaction":
            cached = (beside.cache_read_input_tokens or 0) + (beside.cache_creation_input_tokens or 0)
            made += (beside.input_tokens or 0) + cached
            output = (output or 0) + (beside.output_tokens or 0)
    longer = usage.cache_creation.ephemeral_1h_input_tokens or 0 if usage.cache_creation else 0
    return UsageReading(
        made,
        output,
        read,
        write,
        finished,
        longer,
        (usage.server_tool_use.web_search_requests or 0) if usage.server_tool_use else 0,
        usage.speed in _DEARER_TIERS,
    )


class _LongCache(msgspec.Struct):
    ttl_12h_tokens: int | None = None


class _ResponseInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    cache_write_tokens_details: _LongCache | None = None


class _ResponseUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _ResponseInput | None = None


class _OutputItem(msgspec.Struct):
    type: str = ""


class _Response(msgspec.Struct):
    """A whole response. Searches are not in its report, but among its output."""

    usage: _ResponseUsage | None = None
    service_tier: str | None = None
    output: Sequence[_OutputItem] | None = None
    status: str | None = None


class _ResponseEvent(_Response):
    """An event of the stream, or the whole response."""

    response: _Response | None = None


def _response_reading(said: _ResponseEvent) -> UsageReading:
    whole = said.response or said
    finished = whole.status in {"completed", "incomplete", "failed", "cancelled"}
    usage = whole.usage
    if usage is None or not finished:
        return UsageReading(finished=finished)
    details = usage.input_tokens_details or _ResponseInput()
    longer = details.cache_write_tokens_details
    searches = sum(item.type == "web_search_call" for item in whole.output or ())
    unpriced = whole.service_tier in _DEARER_TIERS or bool(longer and longer.ttl_12h_tokens)
    return UsageReading(
        usage.input_tokens or 0,
        usage.output_tokens,
        details.cached_tokens,
        details.cache_write_tokens or 0,
        finished,
        searches=searches,
        unpriced=unpriced,
    )


class _ModalityTokens(msgspec.Struct, rename="camel"):
    modality: str | None = None
    token_count: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None
    cached_content_token_count: int | None = None
    total_token_count: int | None = None
    prompt_tokens_details: Sequence[_ModalityTokens] | None = None
    cache_tokens_details: Sequence[_ModalityTokens] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    finish_reason: str | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Generated(msgspec.Struct, rename="camel"):
    usage_metadata: _Metadata | None = None
    candidates: Sequence[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None


def _generated_reading(said: _Generated) -> UsageReading:
    blocked = bool(said.prompt_feedback and said.prompt_feedback.block_reason)
    finished = blocked or any(candidate.finish_reason for candidate in said.candidates or ())
    usage = said.usage_metadata
    if usage is None:
        return UsageReading(finished=finished)
    read = (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0)
    written = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    counted = usage.candidates_token_count is not None or usage.total_token_count is not None
    output = max(written, (usage.total_token_count or 0) - read) if counted else None
    sound, cached_sound = _count_sound(usage.prompt_tokens_details), _count_sound(usage.cache_tokens_details)
    return UsageReading(
        read,
        output,
        usage.cached_content_token_count,
        0,
        finished,
        audio=max(0, sound - cached_sound),
        audio_cached=cached_sound,
    )


def _count_sound(details: Sequence[_ModalityTokens] | None) -> int:
    return sum(each.token_count or 0 for each in details or () if each.modality == "AUDIO")


def _reader(shape: Any, reading: Callable[[Any], UsageReading]) -> Callable[[bytes], UsageReading]:
    decode = msgspec.json.Decoder(shape).decode
    return lambda body: reading(decode(body))


_READERS: Final = MappingProxyType[UsageFormat, Callable[[bytes], UsageReading]](
    {
        "openai": _reader(_Chat, _chat_reading),
        "anthropic": _reader(_MessageEvent, _message_reading),
        "google": _reader(_Generated, _generated_reading),
        "responses": _reader(_ResponseEvent, _response_reading),
    }
)
