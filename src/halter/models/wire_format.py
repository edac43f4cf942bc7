"""Conversion of messages to the provider library's form and of its answers, and the usage in the bytes of an answer.

A message is converted once and the result is cached on it. What providers would reject is corrected here: results of
calls come before text, turns alternate, no text is blank, and arguments that are not a JSON object are wrapped in one.

A request that was cut off is charged by its last report, so it matters which report is final:

    openai      `usage` in any chunk; final with or after the chunk that has a `finish_reason`
    anthropic   `message_start`, with all input and hardly any output; final in the `message_delta` with a `stop_reason`
    google      `usageMetadata` in any chunk; final with or after the chunk that has a `finishReason`
    responses   the `usage` of the whole response, in the event that ends it

Reports of one answer are cumulative on all wires, so the largest count of each kind is used; for cached input,
which costs less, the last one. The report of an answer without a stream is final, and so is one in the body of an
error. An unreadable report invalidates those before it, and the request settles at its hold.

Reasoning counts as output, once. Anthropic counts it within the output, Google next to the candidates. Some servers of
OpenAI's protocol count it within `completion_tokens`, others in addition to them: then it is in `total_tokens`, or it
exceeds `completion_tokens`.

Anthropic does not include a compaction of the context in the sums of its report: it is added.

`USAGE_MEMBERS` says of every member of a report what it does to the price. One that is not in it, or that has a value
without a price, and that is neither zero nor empty, could cost anything: the request settles at its hold, or at more.
"""

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import groupby
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import msgspec

from halter.core.messages import (
    VOLATILE,
    Message,
    Part,
    Prompt,
    Reasoning,
    ReasoningItem,
    Reply,
    Role,
    StopReason,
    Text,
    ToolCall,
    ToolResult,
)
from halter.core.money import DOLLAR
from halter.core.text import clean, encode_body, shorten
from halter.core.tools import ToolSpec
from halter.core.usage import ModelName, Usage, is_same_model
from halter.spec.models import WireFormat

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

T = TypeVar("T")

CacheLifetime = Literal["5m", "1h"]
"""How long a provider keeps what is cached after its last use. OpenAI's models have a lifetime of their own."""

EMPTY_MESSAGE: Final = "(empty)"
"""Replaces an empty message, which providers reject."""

INVALID_ARGUMENTS_KEY: Final = "_invalid"
"""The key under which arguments that were not a JSON object are sent back to the model."""

_SHAPED_KEY: Final = "wire_parts"
_REASONED_KEY: Final = "wire_parts_with_reasoning"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def shape_history(
    messages: Sequence[Message], cache: CacheLifetime | None = None, *, maker: str = ""
) -> "list[ModelMessage]":
    """Convert a history into alternating turns, with the reasoning that `maker` can read.

    With a `cache`, the newest turn has a cache point before its volatile text: a cache entry that includes that text
    would be paid for and never read. The user turn before has one at its end, where the previous request left its
    entry: a provider searches back from a cache point only over a limited number of blocks.
    """
    turns = [_turn(role, group, maker) for role, group in groupby(filter(_shape_once, messages), key=_role)]
    if cache:
        from pydantic_ai.messages import ModelRequest

        requests = [turn for turn in turns if isinstance(turn, ModelRequest)]
        for turn in requests[-2:-1]:
            _mark_for_cache(turn, len(turn.parts), cache)
        for turn in requests[-1:]:
            _mark_for_cache(turn, len(turn.parts) - _ends_volatile(messages), cache)
    return turns


def _mark_for_cache(turn: "ModelRequest", end: int, cache: CacheLifetime) -> None:
    from pydantic_ai.messages import CachePoint, UserPromptPart

    if end:
        turn.parts = [*turn.parts[:end], UserPromptPart([CachePoint(ttl=cache)]), *turn.parts[end:]]


def _ends_volatile(messages: Sequence[Message]) -> bool:
    last_part = messages[-1].parts[-1] if messages and messages[-1].parts else None
    return isinstance(last_part, Text) and last_part.reason == VOLATILE and bool(last_part.text.strip())


def _role(message: Message) -> Role:
    return message.role


def _turn(role: Role, messages: Iterable[Message], maker: str) -> "ModelMessage":
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolReturnPart

    parts = [
        part
        for message in messages
        for part in (
            _shape_once(message)
            if message.reasoning is None or message.reasoning.maker != maker
            else _shape_with_reasoning(message, message.reasoning)
        )
    ]
    if role == "assistant":
        return ModelResponse(parts=cast("list[ModelResponsePart]", parts))
    results_first = sorted(parts, key=lambda part: not isinstance(part, ToolReturnPart))
    return ModelRequest(parts=cast("list[ModelRequestPart]", results_first))


def _shape_once(message: Message) -> "list[Shaped]":
    attributes = vars(message)
    if _SHAPED_KEY not in attributes:
        from pydantic_ai.messages import UserPromptPart

        parts: list[Shaped] = []
        for part in message.parts:
            if isinstance(part, Text) and part.origin == "tool" and part.media and parts:
                _add_file(parts, part)
            elif not (isinstance(part, Text) and not part.text.strip()):
                parts.append(_part(part, message.role))
        attributes[_SHAPED_KEY] = parts or ([UserPromptPart(EMPTY_MESSAGE)] if message.role == "user" else [])
    return attributes[_SHAPED_KEY]


def hide_pictures(prompt: Prompt, model: ModelName) -> Prompt:
    """Replace the pictures of a prompt by a sentence, for a model that sees none."""

    def hide(part: Part) -> Part:
        if not isinstance(part, Text) or not _is_picture(part):
            return part
        sentence = f"{part.text} {model} takes no pictures, so it is not shown."
        return msgspec.structs.replace(part, text=sentence, media="", data=b"", tokens=0)

    messages = tuple(
        Message(message.role, tuple(map(hide, message.parts))) if any(map(_is_picture, message.parts)) else message
        for message in prompt.messages
    )
    return msgspec.structs.replace(prompt, messages=messages)


def _is_picture(part: Part) -> bool:
    return isinstance(part, Text) and part.media.startswith("image/")


def _add_file(parts: "list[Shaped]", file: Text) -> None:
    """Add a file of a tool to the result before it, which names it, so that it does not look like a person's."""
    from pydantic_ai.messages import BinaryContent, ToolReturnPart

    result, content = parts[-1], BinaryContent(file.data, media_type=file.media)
    if isinstance(result, ToolReturnPart):
        so_far: Any = result.content
        contents = cast("list[Any]", so_far) if isinstance(so_far, list) else [so_far]
        parts[-1] = replace(result, content=[*contents, content])
    else:
        parts.append(_part(file, "user"))


def _shape_with_reasoning(message: Message, reasoning: Reasoning) -> "list[Shaped]":
    """Shape an answer for the model that gave it, with its reasoning in its place.

    Reasoning whose text or call is not sent back is left out: a provider rejects it without what follows it. Nothing
    else has an id, because the provider looks ids up among what it stored, which is nothing.
    """
    attributes = vars(message)
    if _REASONED_KEY not in attributes:
        from pydantic_ai.messages import TextPart, ThinkingPart, ToolCallPart

        provider = reasoning.maker.partition(":")[0]
        items = {
            place: tuple(group) for place, group in groupby(reasoning.items, key=lambda item: (item.before, item.index))
        }
        shaped_parts: list[Shaped] = []
        counts = Counter[str]()
        for part in _shape_once(message):
            kind = "call" if isinstance(part, ToolCallPart) else "text"
            place_items = items.get((kind, counts[kind]), ())  # pyright: ignore[reportArgumentType]
            counts[kind] += 1
            shaped_parts += [
                ThinkingPart("", id=item.id, signature=item.encrypted, provider_name=provider)
                for item in place_items
                if item.encrypted
            ]
            phase = next((item.phase for item in place_items if item.phase), "")
            has_phase = phase and isinstance(part, TextPart)
            shaped_parts.append(
                replace(part, provider_name=provider, provider_details={"phase": phase}) if has_phase else part
            )
        attributes[_REASONED_KEY] = shaped_parts
    return attributes[_REASONED_KEY]


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
    """Make a tool name that the provider accepts, from any name that a model invented."""
    return name if _NAME.fullmatch(name) else _NO_NAME.sub("_", name)[:64] or "_"


def _call_id(name: str) -> str:
    """Make a call id that every provider accepts, deterministically from that of another provider."""
    return name if _ID.fullmatch(name) else f"call_{hashlib.sha256(encode_body(name)).hexdigest()[:32]}"


def _make_sendable(arguments: str) -> str:
    """Return arguments that are a JSON object unchanged; wrap all others in one."""
    if not arguments.strip():
        return "{}"
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return msgspec.json.encode({INVALID_ARGUMENTS_KEY: clean(arguments)}).decode()


class ToolDefinitions:
    """The tool definitions of requests, each converted once."""

    def __init__(self) -> None:
        self._definitions: dict[ToolSpec, ToolDefinition] = {}

    def parameters(self, prompt: Prompt, form: ToolSpec | None = None) -> "ModelRequestParameters":
        """Build the tools and the system text. With `form`, the answer must match its schema instead of calling it."""
        request_parameters = self._parameters(prompt, form)
        return (
            replace(request_parameters, native_tools=shape_provider_tools(prompt))
            if prompt.provider_tools
            else request_parameters
        )

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
        definition = self._definitions.get(spec)
        if definition is None:
            from pydantic_ai.tools import ToolDefinition

            schema = msgspec.json.decode(spec.schema, type=dict[str, Any])
            definition = self._definitions[spec] = ToolDefinition(
                name=spec.name, parameters_json_schema=schema, description=clean(spec.description), strict=False
            )
        return definition


def shape_provider_tools(prompt: Prompt) -> "list[AbstractNativeTool]":
    from pydantic_ai.native_tools import CodeExecutionTool, WebSearchTool

    return [
        WebSearchTool(max_uses=tool.max_uses) if tool.name == "web_search" else CodeExecutionTool()
        for tool in prompt.provider_tools
    ]


def count_provider_tools(response: "ModelResponse") -> Counter[str]:
    """Count how often the provider used its own tools, by name."""
    from pydantic_ai.messages import NativeToolCallPart

    return Counter(part.tool_name for part in response.parts if isinstance(part, NativeToolCallPart))


def find_reasoning(response: "ModelResponse", maker: str, max_tokens: int) -> Reasoning | None:
    """Find what the model needs back of its answer. None if it gave nothing that only it can read.

    Summaries are left out: they are text that anybody can read, and no model needs them back.
    """
    from pydantic_ai.messages import TextPart, ThinkingPart, ToolCallPart

    if not maker:
        return None
    items: list[ReasoningItem] = []
    pending: list[ThinkingPart] = []
    counts: Counter[Literal["text", "call"]] = Counter()
    for part in response.parts:
        match part:
            case ThinkingPart(id=str(), signature=str()):
                pending.append(part)
                continue
            case TextPart(content=content) if content.strip():
                kind: Literal["text", "call"] = "text"
                phase = str((part.provider_details or {}).get("phase") or "")
            case ToolCallPart():
                kind, phase = "call", ""
            case _:
                continue
        items += [ReasoningItem(kind, counts[kind], str(thought.id), str(thought.signature)) for thought in pending]
        if phase:
            items.append(ReasoningItem(kind, counts[kind], phase=phase))
        counts[kind] += 1
        pending.clear()
    return Reasoning(maker, tuple(items), max_tokens) if items else None


def parse_model_response(response: "ModelResponse", usage: Usage | None, reasoning: Reasoning | None = None) -> Reply:
    """Convert an answer to a reply. Thoughts are left out."""
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
    if refusal := find_refusal(response):
        parts.append(_to_text(refusal))
    model, answer_id = join_surrogates(response.model_name or ""), join_surrogates(response.provider_response_id or "")
    return Reply(tuple(parts), _stop(response, parts), usage, model, answer_id, reasoning)


def find_refusal(response: "ModelResponse") -> str:
    """Find the words of a refusal that has no other content; a stream does not have them among its text."""
    from pydantic_ai.messages import TextPart, ToolCallPart

    refusal = (response.provider_details or {}).get("refusal")
    has_content = any(isinstance(part, TextPart | ToolCallPart) for part in response.parts)
    return refusal if isinstance(refusal, str) and not has_content else ""


def read_native_answer(reply: Reply, tool: str) -> Reply:
    """Convert an answer in the form of a tool's arguments to a call of it. A truncated answer stays text."""
    if reply.calls or reply.stop != "end":
        return reply
    try:
        fits = isinstance(msgspec.json.decode(reply.text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return reply
    return msgspec.structs.replace(reply, parts=(ToolCall("", tool, reply.text),), stop="calls") if fits else reply


def _to_text(text: str) -> Text:
    return Text(join_surrogates(text), "model", trusted=False)


def _arguments(arguments: object) -> str:
    if isinstance(arguments, str) and arguments.strip():
        return join_surrogates(arguments)
    return (
        join_surrogates(json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))
        if isinstance(arguments, dict)
        else "{}"
    )


def _stop(response: "ModelResponse", parts: Sequence[Text | ToolCall]) -> StopReason:
    """Read why a model stopped. Many servers report `stop` even if calls are requested."""
    if response.state == "suspended":
        # The provider paused while its own tools run: the answer is incomplete.
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
    """Join surrogate halves that a server sent separately, and replace lone ones."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def make_surrogate_joiner() -> Callable[[str], str]:
    """Make a function that does the same for the chunks of a stream: one half waits for the other."""
    decoder = codecs.getincrementaldecoder("utf-16-le")("replace")
    return lambda text: decoder.decode(text.encode("utf-16-le", "surrogatepass"))


_DATA: Final = b"data:"
_OPENS_JSON: Final = (b"{", b"[")
_NAMES_A_REPORT: Final = b"usage"
_NAMES_A_TIER: Final = b"service_tier"


_SPARE_DEPTH: Final = 200
"""Levels of nesting reserved for the parsers of an answer."""


def _is_too_deep(data: bytes) -> bool:
    """Return True if parsing would come near the recursion limit, where finalizers that run then would fail."""
    if data.count(b"[") + data.count(b"{") <= _SPARE_DEPTH:
        return False
    nested_data = b"[" * _SPARE_DEPTH + data.removeprefix(_DATA) + b"]" * _SPARE_DEPTH
    try:
        msgspec.json.decode(nested_data, type=msgspec.Raw)
    except RecursionError:
        return True
    except (msgspec.DecodeError, UnicodeError):
        return False  # The parser reports the error.
    return False


class UsageReading(msgspec.Struct, frozen=True):
    """The counts in one event or a whole answer, and whether the answer is finished.

    Without `output_tokens` a report cannot be final. `cache_read_tokens` is None if a report omits it. `model` is the
    model that answered, and `cost_micros` what the provider says that it charged. `surcharge` is in percent of the
    price of all tokens, and `unpriced` names a member without a known price.
    """

    input_tokens: int = 0
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int = 0
    finished: bool = False
    cache_write_1h: int = 0
    searches: int = 0
    audio: int = 0
    audio_cached: int = 0
    model: str = ""
    cost_micros: int = 0
    surcharge: int = 0
    unpriced: str = ""


MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
"""Far more than the longest answer has, with each token in a separate event."""
_ENDINGS: Final[Mapping[WireFormat, bytes]] = MappingProxyType(
    {"openai": b"finish_reason", "anthropic": b"stop_reason", "google": b"finishReason", "responses": b"status"}
)
"""The JSON member that marks an answer as finished."""


class UsageReader:
    """Reads the usage from the bytes of an answer as they arrive: a stream of events, or one JSON document.

    `asked` is the model that was asked for; without it, the model that answers is not compared. An event, or an answer
    without a stream, of more than `max_size` bytes is not parsed, which would hold the event loop; it leaves no usage.
    """

    def __init__(self, wire: WireFormat, asked: str = "", max_size: int = MAX_ANSWER_BYTES) -> None:
        self._asked = asked
        self._max_size = max_size
        self._skips_line = False
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
    def model(self) -> str:
        """The model that answered, as the provider calls it."""
        return self._counts.model

    @property
    def answered_by(self) -> str:
        """The model that answered, if another one was asked for."""
        model = self._counts.model
        return model if self._asked and model and not is_same_model(self._asked, model) else ""

    @property
    def usage(self) -> Usage | None:
        """The largest reported counts. None without input tokens, or if the counts are inconsistent."""
        counts = self._counts
        if not counts.input_tokens or self._spoiled:
            return None
        try:
            return Usage(
                counts.input_tokens,
                counts.output_tokens or 0,
                counts.cache_read_tokens or 0,
                counts.cache_write_tokens,
                counts.cache_write_1h,
                counts.searches,
                counts.audio,
                counts.audio_cached,
                surcharge_percent=counts.surcharge,
                reported_cost=counts.cost_micros,
                answered_by=self.answered_by,
                unpriced=counts.unpriced,
            )
        except ValueError:
            return None

    @property
    def finished(self) -> bool:
        """True if the answer is marked as complete."""
        return self._finished

    def feed(self, piece: bytes) -> None:
        if self._streams is None and (beginning := piece.lstrip()):
            self._streams = not beginning.startswith(_OPENS_JSON)
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) if self._streams else -1
        if end < 0:
            self._extend(piece)
            return
        if self._skips_line:
            self._skips_line = False
            line_end = re.search(rb"[\r\n]", piece)
            self.feed(b"\n" if line_end is None else piece[line_end.start() :])
            return
        complete, self._rest = bytes(self._rest) + piece[:end], bytearray(piece[end + 1 :])
        self.too_deep = self.too_deep or any(map(_is_too_deep, complete.splitlines()))
        if self._can_report(complete):
            for line in complete.splitlines():
                self._read_line(line)

    def _extend(self, piece: bytes) -> None:
        if len(self._rest) + len(piece) > self._max_size:
            self._rest.clear()
            self._skips_line = self._finished = True
            self._mark_unusable(spoils=True)
        if not self._skips_line:
            self._rest += piece

    def _can_report(self, data: bytes) -> bool:
        """Return True if the data can contain a report, an end or a tier. What does not is not parsed."""
        return _NAMES_A_REPORT in data or self._ending in data or _NAMES_A_TIER in data

    def close(self) -> None:
        remaining, self._rest = bytes(self._rest), bytearray()
        self.too_deep = self.too_deep or _is_too_deep(remaining)
        if self._streams:
            self._read_line(remaining)
        elif remaining:
            self._finished = True
            self._read_body(remaining)

    def _read_line(self, line: bytes) -> None:
        if line.startswith(_DATA) and self._can_report(line):
            self._read_body(line[len(_DATA) :])

    def _read_body(self, body: bytes) -> None:
        try:
            reading = self._read(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            self._mark_unusable(_NAMES_A_REPORT in body)
            return
        self._finished = self._finished or reading.finished
        self._mark_unusable(
            min(
                reading.input_tokens,
                reading.output_tokens or 0,
                reading.cache_read_tokens or 0,
                reading.cache_write_tokens,
            )
            < 0
        )
        # Output never decreases: a final count below an earlier one is wrong.
        self._mark_unusable(
            self._finished
            and reading.output_tokens is not None
            and reading.output_tokens < (self._counts.output_tokens or 0)
        )
        self.final = not self._spoiled and (self.final or (self._finished and reading.output_tokens is not None))
        self._counts = UsageReading(
            max(self._counts.input_tokens, reading.input_tokens),
            max(self._counts.output_tokens or 0, reading.output_tokens or 0),
            self._counts.cache_read_tokens if reading.cache_read_tokens is None else reading.cache_read_tokens,
            max(self._counts.cache_write_tokens, reading.cache_write_tokens),
            cache_write_1h=max(self._counts.cache_write_1h, reading.cache_write_1h),
            searches=max(self._counts.searches, reading.searches),
            audio=max(self._counts.audio, reading.audio),
            audio_cached=max(self._counts.audio_cached, reading.audio_cached),
            model=reading.model or self._counts.model,
            cost_micros=max(self._counts.cost_micros, reading.cost_micros),
            surcharge=max(self._counts.surcharge, reading.surcharge),
            unpriced=self._counts.unpriced or reading.unpriced,
        )

    def _mark_unusable(self, spoils: bool) -> None:  # noqa: FBT001  the only parameter
        self._spoiled = self._spoiled or spoils
        self.final = self.final and not self._spoiled


def _first(*counts: int | None) -> int | None:
    """Pick the first positive count, or else the first that was reported."""
    return next((count for count in counts if count), next((count for count in counts if count is not None), None))


UNPRICED: Final = -1
"""The effect of a value that costs more than what is listed, or an unknown amount."""
_COUNTED: Final = 0
MemberEffect = int | Mapping[str, int]
"""What a member does to the price: nothing but what is counted, or a surcharge in percent for each of its values."""

_TIERS: Final[Mapping[str, int]] = MappingProxyType[str, int](
    {
        **dict.fromkeys(("auto", "batch", "default", "flex", "scale", "standard", "unspecified"), _COUNTED),
        **dict.fromkeys(("fast", "priority"), UNPRICED),
    }
)
_TRAFFIC: Final[Mapping[str, int]] = MappingProxyType(
    dict.fromkeys(("traffic_type_unspecified", "on_demand", "on_demand_flex", "on_demand_offpeak"), _COUNTED)
    | {"provisioned_throughput": _COUNTED, "on_demand_priority": UNPRICED}
)
_PROMPT_DETAILS: Final = "cached_tokens cache_write_tokens audio_tokens text_tokens image_tokens video_tokens"
_COMPLETION_DETAILS: Final = (
    "reasoning_tokens text_tokens accepted_prediction_tokens rejected_prediction_tokens thinking_tokens"
)
_CACHE_WRITES: Final = "ephemeral_5m_input_tokens ephemeral_1h_input_tokens"
_FURTHER: Final = """
    queue_time prompt_time completion_time total_time total_latency time_to_first_token latency_checkpoint start_time
    end_time is_last_response acceptance_rate stop_reason completion_tokens_per_sec total_tokens_per_sec
    completion_tokens_after_first_per_sec completion_tokens_after_first_per_sec_first_ten
    completion_tokens_after_first_per_sec_graph num_search_queries search_context_size
"""
"""What servers of OpenAI's protocol report beside the counts: times, and searches that their costs include."""


def _list_paths(names: str, parent: str = "") -> dict[str, int]:
    return {f"{parent}.{name}" if parent else name: _COUNTED for name in names.split()}


_PLACES: Final = {"global": _COUNTED, "not_available": _COUNTED, "us": 10}
_SPEEDS: Final = {"standard": _COUNTED, "fast": UNPRICED}
_COMMON: Final = {
    **_list_paths("cost cost_details estimated_cost cost_in_usd_ticks is_byok"),
    **_list_paths("web_search_requests tool_calls_requested tool_calls_executed", "server_tool_use"),
    **_list_paths("web_search_requests tool_calls_requested tool_calls_executed", "server_tool_use_details"),
    "service_tier": _TIERS,
    "speed": _SPEEDS,
    "inference_geo": _PLACES,
}
_MODALITIES: Final = {"text": _COUNTED, "image": _COUNTED, "video": _COUNTED, "audio": _COUNTED, "document": _COUNTED}

USAGE_MEMBERS: Final[Mapping[WireFormat, Mapping[str, MemberEffect]]] = MappingProxyType(
    {
        "openai": {
            **_COMMON,
            **_list_paths("prompt_tokens completion_tokens total_tokens reasoning_tokens citation_tokens"),
            **_list_paths("cached_tokens"),
            **_list_paths("prompt_cache_hit_tokens prompt_cache_miss_tokens"),
            **_list_paths("cache_read_input_tokens cache_creation_input_tokens"),
            **_list_paths(_PROMPT_DETAILS, "prompt_tokens_details"),
            **_list_paths("cache_creation_tokens", "prompt_tokens_details"),
            **_list_paths(_COMPLETION_DETAILS, "completion_tokens_details"),
            **_list_paths(_FURTHER),
            "extra_properties.google.traffic_type": _TRAFFIC,
        },
        "anthropic": {
            **_COMMON,
            **_list_paths("input_tokens output_tokens cache_read_input_tokens cache_creation_input_tokens"),
            **_list_paths(_CACHE_WRITES, "cache_creation"),
            **_list_paths("thinking_tokens", "output_tokens_details"),
            **_list_paths("web_fetch_requests tool_search_requests code_execution_requests", "server_tool_use"),
            **_list_paths("input_tokens output_tokens model", "iterations"),
            **_list_paths("cache_read_input_tokens cache_creation_input_tokens", "iterations"),
            **_list_paths(_CACHE_WRITES, "iterations.cache_creation"),
            "iterations.type": {"message": _COUNTED, "compaction": _COUNTED},
        },
        "responses": {
            **_COMMON,
            **_list_paths("input_tokens output_tokens total_tokens"),
            **_list_paths(_PROMPT_DETAILS, "input_tokens_details"),
            **_list_paths("ttl_30m_tokens", "input_tokens_details.cache_write_tokens_details"),
            **_list_paths(_COMPLETION_DETAILS, "output_tokens_details"),
        },
        "google": {
            **_list_paths("promptTokenCount candidatesTokenCount responseTokenCount totalTokenCount"),
            **_list_paths("thoughtsTokenCount toolUsePromptTokenCount cachedContentTokenCount"),
            "promptTokensDetails.modality": _MODALITIES,
            "cacheTokensDetails.modality": _MODALITIES,
            "toolUsePromptTokensDetails.modality": _MODALITIES,
            "candidatesTokensDetails.modality": {"text": _COUNTED},
            "responseTokensDetails.modality": {"text": _COUNTED},
            **{
                f"{side}TokensDetails.tokenCount": _COUNTED
                for side in ("prompt", "cache", "toolUsePrompt", "candidates", "response")
            },
            "serviceTier": _TIERS,
            "trafficType": _TRAFFIC,
        },
    }
)
"""What every member of a usage report does to the price, in the SDKs of the makers and of OpenRouter.

A count that is part of another one costs nothing more. The output of a picture or of sound has no listed price.
"""


class _PriceEffects(msgspec.Struct, frozen=True):
    surcharge: int = 0
    unpriced: str = ""


def read_price_effects(wire: WireFormat, report: Mapping[str, Any] | None, tier: str | None = None) -> _PriceEffects:
    """Read what a report and the tier beside it do to the price besides the counts. The dearest of all applies."""
    effects = list(_list_effects(USAGE_MEMBERS[wire], [report, {"service_tier": tier}], ""))
    unpriced = next((name for name, effect in effects if effect == UNPRICED), "")
    return _PriceEffects(max(0, 0, *(effect for _, effect in effects)), shorten(unpriced, 80))


def _list_effects(members: Mapping[str, MemberEffect], node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the effect of each member that is neither zero nor empty."""
    if members.get(path) == _COUNTED:
        return
    if isinstance(node, dict):
        for name, value in cast("dict[str, Any]", node).items():
            yield from _list_effects(members, value, f"{path}.{name}" if path else name)
    elif isinstance(node, list):
        for value in cast("list[Any]", node):
            yield from _list_effects(members, value, path)
    elif node:
        effect = members.get(path)
        if isinstance(effect, Mapping):
            yield f"{path}: {node}", effect.get(str(node).lower(), UNPRICED)
        else:
            yield path, UNPRICED


def _convert(report: Mapping[str, Any] | None, shape: type[T]) -> T | None:
    return None if report is None else msgspec.convert(report, shape)


_MAX_REPORTED_USD: Final = 1_000_000
_TICKS_PER_USD: Final = 10**10


class _CostDetails(msgspec.Struct):
    upstream_inference_cost: float | None = None


class _CostSums(msgspec.Struct):
    total_cost: float | None = None


class _ReportedCost(msgspec.Struct):
    """What a gateway charged, in dollars; with a key of one's own at the maker, the maker's cost comes on top."""

    cost: float | _CostSums | None = None
    estimated_cost: float | None = None
    cost_in_usd_ticks: int | None = None
    is_byok: bool | None = None
    cost_details: _CostDetails | None = None

    @property
    def cost_micros(self) -> int:
        upstream = self.cost_details.upstream_inference_cost if self.is_byok and self.cost_details else None
        cost = self.cost.total_cost if isinstance(self.cost, _CostSums) else self.cost
        ticks_usd = (self.cost_in_usd_ticks or 0) / _TICKS_PER_USD
        usd = max((cost or 0) + (upstream or 0), self.estimated_cost or 0, ticks_usd)
        return ceil(Decimal(str(usd)) * DOLLAR) if 0 < usd < _MAX_REPORTED_USD else 0


class _ChatInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class _ServerTools(msgspec.Struct):
    web_search_requests: int | None = None

    @property
    def searches(self) -> int:
        return self.web_search_requests or 0


_NO_TOOLS: Final = _ServerTools()


class _ChatOutput(msgspec.Struct):
    reasoning_tokens: int | None = None


class _ChatUsage(_ReportedCost):
    """OpenAI's report, with the fields in which other servers of its protocol put the same counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _ChatInput | None = None
    completion_tokens_details: _ChatOutput | None = None
    reasoning_tokens: int | None = None
    citation_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    server_tool_use: _ServerTools | None = None
    server_tool_use_details: _ServerTools | None = None


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    usage: dict[str, Any] | None = None
    choices: Sequence[_ChatChoice] | None = None
    service_tier: str | None = None
    model: str | None = None


def _chat_reading(chunk: _Chat) -> UsageReading:
    is_finished = any(choice.finish_reason for choice in chunk.choices or ())
    usage = _convert(chunk.usage, _ChatUsage)
    effects = read_price_effects("openai", chunk.usage, chunk.service_tier)
    if usage is None:
        return UsageReading(
            finished=is_finished, model=chunk.model or "", surcharge=effects.surcharge, unpriced=effects.unpriced
        )
    input_details, output_details = (
        usage.prompt_tokens_details or _ChatInput(),
        usage.completion_tokens_details or _ChatOutput(),
    )
    read = _first(
        input_details.cached_tokens, usage.prompt_cache_hit_tokens, usage.cache_read_input_tokens, usage.cached_tokens
    )
    write = input_details.cache_write_tokens or usage.cache_creation_input_tokens or 0
    reasoning = output_details.reasoning_tokens or usage.reasoning_tokens or 0
    tools = usage.server_tool_use or usage.server_tool_use_details or _NO_TOOLS
    return UsageReading(
        usage.prompt_tokens or 0,
        _chat_output(usage, reasoning),
        read,
        write,
        is_finished,
        searches=tools.searches,
        audio=input_details.audio_tokens or 0,
        model=chunk.model or "",
        cost_micros=usage.cost_micros,
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


def _chat_output(usage: _ChatUsage, reasoning: int) -> int | None:
    output = _count_all_output(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, reasoning)
    return None if output is None else output + (usage.citation_tokens or 0)


def _count_all_output(prompt: int | None, completion: int | None, total: int | None, reasoning: int) -> int | None:
    """Count all output, including what a server reports in addition to the completion."""
    if completion is None and total is None:
        return None
    unexplained_tokens = (total or 0) - (prompt or 0) - (completion or 0)
    return (completion or 0) + max(unexplained_tokens, reasoning if reasoning > (completion or 0) else 0, 0)


class _CacheWrites(msgspec.Struct):
    ephemeral_1h_input_tokens: int | None = None


class _Iteration(_ReportedCost):
    type: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: _CacheWrites | None = None

    @property
    def long_cache_tokens(self) -> int:
        return self.cache_creation.ephemeral_1h_input_tokens or 0 if self.cache_creation else 0


class _MessageUsage(_Iteration):
    server_tool_use: _ServerTools | None = None
    iterations: Sequence[_Iteration] | None = None


class _Message(msgspec.Struct):
    usage: dict[str, Any] | None = None
    model: str | None = None


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None


class _MessageEvent(msgspec.Struct):
    """An event of Anthropic's stream, or its whole answer. Each has the report in another place."""

    usage: dict[str, Any] | None = None
    stop_reason: str | None = None
    message: _Message | str | None = None
    delta: _MessageDelta | None = None
    model: str | None = None


def _message_reading(event: _MessageEvent) -> UsageReading:
    is_finished = bool(event.stop_reason or (event.delta and event.delta.stop_reason))
    report = event.usage or (event.message.usage if isinstance(event.message, _Message) else None)
    model = event.model or (event.message.model if isinstance(event.message, _Message) else None) or ""
    usage = _convert(report, _MessageUsage)
    if report is None or usage is None:
        return UsageReading(finished=is_finished, model=model)
    parts: list[_Iteration] = [usage, *(each for each in usage.iterations or () if each.type == "compaction")]
    read = sum(part.cache_read_input_tokens or 0 for part in parts)
    write = sum(part.cache_creation_input_tokens or 0 for part in parts)
    output_counts = [part.output_tokens for part in parts if part.output_tokens is not None]
    effects = read_price_effects("anthropic", report)
    return UsageReading(
        sum(part.input_tokens or 0 for part in parts) + read + write,
        sum(output_counts) if output_counts else None,
        None if usage.cache_read_input_tokens is None and not read else read,
        write,
        is_finished,
        sum(part.long_cache_tokens for part in parts),
        (usage.server_tool_use or _NO_TOOLS).searches,
        model=model,
        cost_micros=usage.cost_micros,
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


class _ResponseInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class _ResponseUsage(_ReportedCost):
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    output_tokens_details: _ChatOutput | None = None
    input_tokens_details: _ResponseInput | None = None
    server_tool_use: _ServerTools | None = None
    server_tool_use_details: _ServerTools | None = None


class _OutputItem(msgspec.Struct):
    type: str = ""


class _Response(msgspec.Struct):
    """A whole response. Searches are not counted in its report, but listed in its output."""

    usage: dict[str, Any] | None = None
    service_tier: str | None = None
    output: Sequence[_OutputItem] | None = None
    status: str | None = None
    model: str | None = None


class _ResponseEvent(_Response):
    """An event of the stream, or the whole response."""

    response: _Response | None = None


def _response_reading(event: _ResponseEvent) -> UsageReading:
    response = event.response or event
    is_finished = response.status in {"completed", "incomplete", "failed", "cancelled"}
    # What a response reports under way is no bill yet; a refusal, which has no status, can report one.
    report = None if response.status in {"queued", "in_progress"} else response.usage
    usage = _convert(report, _ResponseUsage)
    effects = read_price_effects("responses", report, response.service_tier)
    if usage is None:
        return UsageReading(
            finished=is_finished, model=response.model or "", surcharge=effects.surcharge, unpriced=effects.unpriced
        )
    details = usage.input_tokens_details or _ResponseInput()
    tools = usage.server_tool_use or usage.server_tool_use_details or _NO_TOOLS
    reasoning = (usage.output_tokens_details or _ChatOutput()).reasoning_tokens or 0
    return UsageReading(
        usage.input_tokens or 0,
        _count_all_output(usage.input_tokens, usage.output_tokens, usage.total_tokens, reasoning),
        details.cached_tokens,
        details.cache_write_tokens or 0,
        is_finished,
        searches=max(tools.searches, sum(item.type == "web_search_call" for item in response.output or ())),
        audio=details.audio_tokens or 0,
        model=response.model or "",
        cost_micros=usage.cost_micros,
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
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
    usage_metadata: dict[str, Any] | None = None
    candidates: Sequence[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None
    model_version: str | None = None


def _generated_reading(chunk: _Generated) -> UsageReading:
    is_blocked = bool(chunk.prompt_feedback and chunk.prompt_feedback.block_reason)
    is_finished = is_blocked or any(candidate.finish_reason for candidate in chunk.candidates or ())
    usage = _convert(chunk.usage_metadata, _Metadata)
    if chunk.usage_metadata is None or usage is None:
        return UsageReading(finished=is_finished, model=chunk.model_version or "")
    input_tokens = (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0)
    output_tokens = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    is_counted = usage.candidates_token_count is not None or usage.total_token_count is not None
    output = max(output_tokens, (usage.total_token_count or 0) - input_tokens) if is_counted else None
    sound, cached_sound = _count_sound(usage.prompt_tokens_details), _count_sound(usage.cache_tokens_details)
    effects = read_price_effects("google", chunk.usage_metadata)
    return UsageReading(
        input_tokens,
        output,
        usage.cached_content_token_count,
        0,
        is_finished,
        audio=max(0, sound - cached_sound),
        audio_cached=cached_sound,
        model=chunk.model_version or "",
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


def _count_sound(details: Sequence[_ModalityTokens] | None) -> int:
    return sum(each.token_count or 0 for each in details or () if each.modality == "AUDIO")


def _reader(shape: Any, reading: Callable[[Any], UsageReading]) -> Callable[[bytes], UsageReading]:
    decode = msgspec.json.Decoder(shape).decode
    return lambda body: reading(decode(body))


_READERS: Final = MappingProxyType[WireFormat, Callable[[bytes], UsageReading]](
    {
        "openai": _reader(_Chat, _chat_reading),
        "anthropic": _reader(_MessageEvent, _message_reading),
        "google": _reader(_Generated, _generated_reading),
        "responses": _reader(_ResponseEvent, _response_reading),
    }
)
