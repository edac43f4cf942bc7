"""Messages in the form of Pydantic AI, which is imported only where it is used, and back.

A message is converted once and the result is cached on it. What providers would reject is corrected here: results of
calls come before text, turns alternate, no text is blank, and arguments that are not a JSON object are wrapped in one.
"""

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from halter.core.errors import ConfigError
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
from halter.core.text import clean, encode_body, format_count
from halter.core.tools import ToolSpec
from halter.core.usage import ModelName, Usage
from halter.models.wires.wire import CacheLifetime

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
