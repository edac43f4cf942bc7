"""What Halter says, as the wires' library says it; and what it answers, as Halter says it.

A message is converted once: the result is kept beside it, so the next request converts only what is new. Providers
are stricter than a history needs to be, and what they would refuse is mended here: results of calls stand before
words, turns alternate, no text is blank, and arguments that are no JSON object are wrapped into one.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from halter.core.messages import Message, Part, Prompt, Reply, Role, Stop, Text, ToolCall, ToolResult
from halter.core.text import clean, to_body
from halter.core.tools import ToolSpec
from halter.core.usage import Usage

if TYPE_CHECKING:
    from pydantic_ai.messages import (
        ModelMessage,
        ModelRequestPart,
        ModelResponse,
        ModelResponsePart,
        ModelResponseStreamEvent,
    )
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    Shaped = ModelRequestPart | ModelResponsePart

NOTHING_SAID: Final = "(empty)"
"""What stands for a message without a word, which providers refuse."""

INVALID: Final = "_invalid"
"""The key under which a model is shown arguments again that it wrote and that are no JSON object."""

_KEPT: Final = "wire_parts"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def history(messages: Sequence[Message], *, cache_points: bool = False) -> "list[ModelMessage]":
    """Shape a history into turns that alternate.

    With cache points the end of the last turn but one is marked: what comes last often holds words that change from
    request to request, and what is written to a provider's cache there is never read again.
    """
    turns = [_turn(role, group) for role, group in groupby(filter(_kept, messages), key=_role)]
    if cache_points:
        _mark(turns)
    return turns


def _role(message: Message) -> Role:
    return message.role


def _turn(role: Role, messages: Iterable[Message]) -> "ModelMessage":
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolReturnPart

    parts = [part for message in messages for part in _kept(message)]
    if role == "assistant":
        return ModelResponse(parts=cast("list[ModelResponsePart]", parts))
    results_first = sorted(parts, key=lambda part: not isinstance(part, ToolReturnPart))
    return ModelRequest(parts=cast("list[ModelRequestPart]", results_first))


def _mark(turns: "list[ModelMessage]") -> None:
    from pydantic_ai.messages import CachePoint, ModelRequest, UserPromptPart

    before_last = [turn for turn in turns if isinstance(turn, ModelRequest)][-2:-1]
    for turn in before_last:
        turn.parts = [*turn.parts, UserPromptPart([CachePoint()])]


def _kept(message: Message) -> "list[Shaped]":
    """Shape the parts of a message, once; a blank answer leaves none."""
    beside = vars(message)
    if _KEPT not in beside:
        beside[_KEPT] = _shaped(message)
    return beside[_KEPT]


def _shaped(message: Message) -> "list[Shaped]":
    from pydantic_ai.messages import UserPromptPart

    parts = [_part(part, message.role) for part in message.parts if not _blank(part)]
    return parts or ([UserPromptPart(NOTHING_SAID)] if message.role == "user" else [])


def _blank(part: Part) -> bool:
    return isinstance(part, Text) and not part.text.strip()


def _part(part: Part, role: Role) -> "Shaped":
    from pydantic_ai.messages import TextPart, ToolCallPart, ToolReturnPart, UserPromptPart

    match part:
        case Text(text=text):
            return UserPromptPart(clean(text)) if role == "user" else TextPart(clean(text))
        case ToolCall():
            return ToolCallPart(_tool_name(part.tool), _sendable(part.arguments), _call_id(part.id))
        case ToolResult():
            outcome = "success" if part.outcome == "ok" else "failed"
            return ToolReturnPart(_tool_name(part.tool), clean(part.text), _call_id(part.id), outcome=outcome)


def _tool_name(name: str) -> str:
    """Make a name that a model made up one that its provider takes back."""
    return name if _NAME.fullmatch(name) else _NO_NAME.sub("_", name)[:64] or "_"


def _call_id(name: str) -> str:
    """Give a call that another provider named an id that every provider takes: the same one each time."""
    return name if _ID.fullmatch(name) else f"call_{hashlib.sha256(to_body(name)).hexdigest()[:32]}"


def _sendable(arguments: str) -> str:
    """Leave arguments as they were written if they are a JSON object; wrap them into one if they are not."""
    if not arguments.strip():
        return "{}"
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return msgspec.json.encode({INVALID: clean(arguments)}).decode()


class Definitions:
    """The tools of requests, each shaped once, however often it is offered."""

    def __init__(self) -> None:
        self._made: dict[ToolSpec, ToolDefinition] = {}

    def parameters(self, prompt: Prompt) -> "ModelRequestParameters":
        """Shape what stays the same from request to request: the system text and the tools."""
        from pydantic_ai.messages import InstructionPart
        from pydantic_ai.models import ModelRequestParameters

        system = [InstructionPart(content=clean(prompt.system))] if prompt.system.strip() else []
        tools = [self._tool(spec) for spec in prompt.tools]
        return ModelRequestParameters(function_tools=tools, instruction_parts=system)

    def _tool(self, spec: ToolSpec) -> "ToolDefinition":
        made = self._made.get(spec)
        if made is None:
            made = self._made[spec] = _definition(spec)
        return made


def _definition(spec: ToolSpec) -> "ToolDefinition":
    """Shape a tool. It is not made strict: providers then change its schema, and arguments are checked here anyway."""
    from pydantic_ai.tools import ToolDefinition

    schema = msgspec.json.decode(spec.schema, type=dict[str, Any])
    return ToolDefinition(
        name=spec.name, parameters_json_schema=schema, description=clean(spec.description), strict=False
    )


def answer(response: "ModelResponse", usage: Usage | None) -> Reply:
    """Say what a provider answered, and what that used. What a model thought before it spoke is left out."""
    from pydantic_ai.messages import TextPart, ToolCallPart

    parts: list[Text | ToolCall] = []
    for part in response.parts:
        match part:
            case TextPart(content=content) if content:
                parts.append(_words(content))
            case ToolCallPart():
                parts.append(ToolCall(part.tool_call_id, whole(part.tool_name), _arguments(part.args)))
            case _:
                pass
    refusal = (response.provider_details or {}).get("refusal")
    if not parts and isinstance(refusal, str):
        parts.append(_words(refusal))
    return Reply(tuple(parts), _stop(response, parts), usage)


def _words(text: str) -> Text:
    return Text(whole(text), "model", trusted=False)


def _arguments(sent: object) -> str:
    """Say arguments as they were sent; a call without any has an empty object."""
    if isinstance(sent, str) and sent.strip():
        return whole(sent)
    return whole(json.dumps(sent, ensure_ascii=False, separators=(",", ":"))) if isinstance(sent, dict) else "{}"


def _stop(response: "ModelResponse", parts: Sequence[Text | ToolCall]) -> Stop:
    """Say why a model stopped. Many servers say `stop` also where calls are asked for."""
    match response.finish_reason:
        case "length":
            return "max_tokens"
        case "content_filter":
            return "refused"
        case "stop" | "tool_call" | "error" | None:
            return "calls" if any(isinstance(part, ToolCall) for part in parts) else "end"


def words_of(event: "ModelResponseStreamEvent") -> str:
    """Return the words that an event of a stream brings, if any."""
    from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta

    match event:
        case PartStartEvent(part=TextPart(content=content)):
            return content
        case PartDeltaEvent(delta=TextPartDelta(content_delta=content)):
            return content
        case _:
            return ""


def whole(text: str) -> str:
    """Join halves of characters that a server sent apart, and put a stand-in for one without its other half."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def joiner() -> Callable[[str], str]:
    """Do the same for a stream: half a character waits for the piece that brings the other half."""
    decoder = codecs.getincrementaldecoder("utf-16-le")("replace")
    return lambda text: decoder.decode(text.encode("utf-16-le", "surrogatepass"))
