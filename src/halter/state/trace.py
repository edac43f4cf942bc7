"""The spans of a session, folded from its events, and the caller's trace that they join.

A session's spans are one trace. It is the trace of the caller that started the session: the OpenTelemetry span that is
current in a Python program, or the `traceparent` of an HTTP request. Without a caller, the trace has an id of its own.
The start event keeps the caller, so every process that later runs the session makes spans of the same trace. Another
caller that wakes the session is linked to the turn that it causes; one that resumes an ended session gets a root span
in its own trace, which is linked to the earlier one. A sub-session joins the trace of the call that started it.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final, Literal

import msgspec

from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionResumed,
    SessionStarted,
    TurnEnded,
    TurnStarted,
    WakePosted,
)
from halter.core.ids import SUB_SESSION_SUFFIX
from halter.core.messages import Message, Part, Prompt, Reply, StopReason, Text, ToolCall, ToolResult
from halter.core.money import DOLLAR, Charge
from halter.core.ports import Stored
from halter.core.text import clean, decode_body, shorten
from halter.core.usage import ModelName, Usage
from halter.core.vocabulary import Outcome
from halter.state.trace_context import AttributeValue, SpanReference, parse_traceparent

GOOD_ENDS: Final = frozenset(("ended", "asked", "yielded"))
"""Turn ends that are not errors."""

MAX_PART_LENGTH: Final = 16_000
"""Maximum length of one text in an attribute; a longer one is cut."""
MAX_NAME_LENGTH: Final = 200

_PROVIDERS: Final[Mapping[str, str]] = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}
"""Providers that have another name in the semantic conventions."""

_FINISHES: Final[Mapping[StopReason, str]] = {
    "end": "stop",
    "calls": "tool_calls",
    "max_tokens": "length",
    "refused": "content_filter",
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span; `start` and `end` are in microseconds. `error` names the outcome of a failure.

    With `has_remote_parent`, the parent is a span of another program. A span that `is_refusal` says what the guard
    refused. One that is not sampled is not sent, since its caller is not traced; it still counts in the metrics.
    """

    trace: int
    span: int
    parent: int | None
    name: str
    kind: Literal["internal", "client"]
    start: int
    end: int
    attributes: Mapping[str, AttributeValue]
    error: str = ""
    links: tuple[SpanReference, ...] = ()
    has_remote_parent: bool = False
    is_sampled: bool = True
    is_refusal: bool = False


class OpenSpan(msgspec.Struct, frozen=True):
    """A span that has started and not ended. `caller` is its own caller's span, which is its parent then."""

    at: int
    span: int
    parent: int
    event: RequestStarted | CallStarted | TurnStarted
    body: str = ""
    links: tuple[SpanReference, ...] = ()
    caller: SpanReference | None = None


class Trace(msgspec.Struct, frozen=True):
    """The part of a session's state that its spans need.

    `root` is its current root span: a resumed session has a new one, linked to the earlier one. `above` is the parent
    of the root span: the caller's span, or the call that started a sub-session. `provider` is that of its last turn.
    `inbox_seen` is the position up to which its turns have read the inbox.
    """

    trace: int
    session: str
    agent: str
    kind: str
    parent: str
    root: int
    since: int
    above: SpanReference | None = None
    has_remote_parent: bool = False
    links: tuple[SpanReference, ...] = ()
    provider: str = ""
    inbox_seen: int = 0
    turn: OpenSpan | None = None
    flying: Mapping[str, OpenSpan] = {}

    @property
    def is_sampled(self) -> bool:
        return self.above is None or self.above.is_sampled

    @property
    def reference(self) -> SpanReference:
        """The root span, for links and sub-sessions."""
        return SpanReference(self.trace, self.root, self.is_sampled)

    def join(self, above: SpanReference | None, *, is_remote: bool) -> "Trace":
        """Return the trace as a part of another one; unchanged without one."""
        if above is None:
            return self
        return msgspec.structs.replace(self, trace=above.trace, above=above, has_remote_parent=is_remote)


def begin_trace(first: Stored) -> Trace | None:
    """Start a trace from the first event of a session: its caller's trace, or a new one.

    The id of a new one is the event's hash, because names repeat across stores.
    """
    match first.event:
        case SessionStarted() as event:
            trace = Trace(
                trace=int.from_bytes(first.hash[:16]) or 1,
                session=event.session,
                agent=event.agent,
                kind=event.kind,
                parent=event.parent,
                root=_id(first),
                since=first.at,
            )
            return trace.join(parse_traceparent(event.traceparent), is_remote=True)
        case _:
            return None


def join_parent(trace: Trace, parent: Trace) -> Trace:
    """Make a sub-session's trace a part of its parent's: below the call that started it, if that is known."""
    if trace.has_remote_parent:
        return trace
    call = parent.flying.get(trace.session.removesuffix(SUB_SESSION_SUFFIX))
    reference = parent.reference if call is None else msgspec.structs.replace(parent.reference, span=call.span)
    return trace.join(reference, is_remote=False)


def find_waker(stored: Stored) -> SpanReference | None:
    """Return the span of the caller that posted a message; None if it had none."""
    match stored.event:
        case WakePosted(traceparent=traceparent):
            return parse_traceparent(traceparent)
        case _:
            return None


def advance_trace(
    trace: Trace,
    stored: Stored,
    *,
    content: bool = False,
    prompt: Prompt | None = None,
    wakers: tuple[SpanReference, ...] = (),
) -> tuple[Trace, Span | None]:
    """Fold the next event of a session; return the span that it ends, if any.

    `content` includes what was said, and the `prompt` of a request that is settled. `wakers` are the spans whose
    messages a turn answers.
    """
    match stored.event:
        case SessionResumed() as event:
            return _resume(trace, event, stored), None
        case TurnStarted() as event:
            turn = OpenSpan(stored.at, _id(stored), trace.root, event, links=wakers)
            inbox_seen = max(trace.inbox_seen, event.inbox_seen)
            return msgspec.structs.replace(trace, turn=turn, inbox_seen=inbox_seen), None
        case RequestStarted() as event:
            provider = _model(event.model)[0] if event.purpose == "turn" or not trace.provider else trace.provider
            trace = msgspec.structs.replace(trace, provider=provider)
            return _add_in_flight(trace, event.request, _open_span(trace, stored, event, content=content)), None
        case CallStarted() as event:
            return _add_in_flight(trace, event.call, _open_span(trace, stored, event, content=content)), None
        case RequestSettled(request=request) | CallSettled(call=request):
            open_span = trace.flying.get(request)
            in_flight = {name: each for name, each in trace.flying.items() if name != request}
            span = None if open_span is None else _close_span(trace, open_span, stored, prompt, content=content)
            return msgspec.structs.replace(trace, flying=in_flight), span
        case RequestRefused() as event:
            attributes = _chat(trace, event.model, event.purpose) | {"halter.outcome": event.outcome}
            return trace, _refusal(trace, stored, f"chat {_model(event.model)[1]}", attributes, event.outcome)
        case CallRefused() as event:
            attributes = _tool(trace, event.tool, event.call, event.level) | {"halter.outcome": event.outcome}
            return trace, _refusal(trace, stored, f"execute_tool {event.tool}", attributes, event.outcome)
        case TurnEnded() as event:
            return msgspec.structs.replace(trace, turn=None), _turn(trace, event, stored.at)
        case SessionEnded() as event:
            return msgspec.structs.replace(trace, turn=None, flying={}), _session(trace, event, stored.at)
        case _:
            return trace, None


def _resume(trace: Trace, event: SessionResumed, stored: Stored) -> Trace:
    """Begin the next root span, in the trace of the caller that resumes the session, and linked to the earlier one."""
    resumed = msgspec.structs.replace(
        trace, root=_id(stored), since=stored.at, links=(trace.reference,), turn=None, flying={}
    )
    return resumed.join(parse_traceparent(event.traceparent), is_remote=True)


def _id(stored: Stored) -> int:
    """Derive a span id from the hash of the event that started the span. 0 is not allowed."""
    return int.from_bytes(stored.hash[-8:]) or 1


def _add_in_flight(trace: Trace, name: str, span: OpenSpan) -> Trace:
    return msgspec.structs.replace(trace, flying={**trace.flying, name: span})


def _open_span(trace: Trace, stored: Stored, event: RequestStarted | CallStarted, *, content: bool) -> OpenSpan:
    parent, body = _parent_span(trace), _read_redacted(stored) if content else ""
    caller = parse_traceparent(event.traceparent) if isinstance(event, RequestStarted) else None
    links = () if caller is None else (msgspec.structs.replace(trace.reference, span=parent),)
    return OpenSpan(stored.at, _id(stored), parent, event, body, links, caller)


def _parent_span(trace: Trace) -> int:
    return trace.root if trace.turn is None else trace.turn.span


def _read_redacted(stored: Stored) -> str:
    """Return a body from the journal, where secrets are redacted; "" if it is erased or offloaded."""
    return clean(decode_body(stored.body)) if stored.body else ""


def _close_span(trace: Trace, span: OpenSpan, stored: Stored, prompt: Prompt | None, *, content: bool) -> Span | None:
    match span.event, stored.event:
        case RequestStarted() as request, RequestSettled() as answer:
            attributes = _request(trace, request, answer, stored) | (
                _message_attributes(span, stored, prompt) if content else {}
            )
            return _span(trace, span, stored.at, f"chat {_model(request.model)[1]}", attributes, answer.outcome)
        case CallStarted() as called, CallSettled() as result:
            attributes = _call(trace, called, result) | (_result_attributes(span, stored) if content else {})
            return _span(trace, span, stored.at, f"execute_tool {called.tool}", attributes, result.outcome)
        case _:
            return None


def _span(
    trace: Trace, span: OpenSpan, end: int, name: str, attributes: Mapping[str, AttributeValue], outcome: Outcome
) -> Span:
    client, above = isinstance(span.event, RequestStarted), span.caller or trace.reference
    return Span(
        trace=above.trace,
        span=span.span,
        parent=span.parent if span.caller is None else span.caller.span,
        name=name,
        kind="client" if client else "internal",
        start=span.at,
        end=end,
        attributes=attributes,
        error="" if outcome == "ok" else outcome,
        links=span.links,
        has_remote_parent=span.caller is not None,
        is_sampled=above.is_sampled,
    )


def _refusal(trace: Trace, stored: Stored, name: str, attributes: Mapping[str, AttributeValue], error: str) -> Span:
    """Make a span of zero duration for a refusal."""
    return Span(
        trace=trace.trace,
        span=_id(stored),
        parent=_parent_span(trace),
        name=name,
        kind="internal",
        start=stored.at,
        end=stored.at,
        attributes=attributes,
        error=error,
        is_sampled=trace.is_sampled,
        is_refusal=True,
    )


def _turn(trace: Trace, event: TurnEnded, at: int) -> Span | None:
    span = trace.turn
    if span is None:
        return None
    return Span(
        trace=trace.trace,
        span=span.span,
        parent=span.parent,
        name=f"turn {event.turn}",
        kind="internal",
        start=span.at,
        end=at,
        attributes=_session_attributes(trace) | {"halter.turn": event.turn, "halter.turn.end": event.why},
        error="" if event.why in GOOD_ENDS else event.why,
        links=span.links,
        is_sampled=trace.is_sampled,
    )


def _session(trace: Trace, event: SessionEnded, at: int) -> Span:
    base: dict[str, AttributeValue] = {"gen_ai.operation.name": "invoke_agent", "halter.session.kind": trace.kind}
    end: dict[str, AttributeValue] = {
        "halter.session.state": event.state,
        "halter.session.end": event.terminal_reason,
    }
    if trace.provider:
        base["gen_ai.provider.name"] = trace.provider
    parent: dict[str, AttributeValue] = {"halter.session.parent": trace.parent} if trace.parent else {}
    return Span(
        trace=trace.trace,
        span=trace.root,
        parent=None if trace.above is None else trace.above.span,
        name=f"invoke_agent {trace.agent}",
        kind="internal",
        start=trace.since,
        end=at,
        attributes=_session_attributes(trace) | base | end | parent,
        error="" if event.state == "COMPLETED" else event.terminal_reason,
        links=trace.links,
        has_remote_parent=trace.has_remote_parent,
        is_sampled=trace.is_sampled,
    )


def _session_attributes(trace: Trace) -> dict[str, AttributeValue]:
    return {"gen_ai.agent.name": trace.agent, "gen_ai.conversation.id": trace.session}


def _model(name: str) -> tuple[str, str]:
    """Return the provider, by its name in the semantic conventions, and the model."""
    try:
        model_name = ModelName.parse(name)
    except ValueError:
        return "halter", name
    return _PROVIDERS.get(model_name.provider, model_name.provider), model_name.model


def _chat(trace: Trace, model: str, purpose: str) -> dict[str, AttributeValue]:
    provider, name = _model(model)
    return _session_attributes(trace) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": name,
        "halter.purpose": purpose,
    }


def _request(
    trace: Trace, request: RequestStarted, answer: RequestSettled, stored: Stored
) -> dict[str, AttributeValue]:
    limits: dict[str, AttributeValue] = {}
    if request.max_output_tokens:
        limits["gen_ai.request.max_tokens"] = request.max_output_tokens
    attributes = _chat(trace, request.model, request.purpose) | limits | _usage(answer.usage)
    reply = _reply(stored) if answer.outcome == "ok" else None
    if reply is not None:
        attributes["gen_ai.response.finish_reasons"] = (_FINISHES[reply.stop],)
        answered_by = reply.model or (answer.usage.answered_by if answer.usage else "")
        names = {"gen_ai.response.model": answered_by, "gen_ai.response.id": reply.id}
        attributes |= {name: shorten(clean(text), MAX_NAME_LENGTH) for name, text in names.items() if text}
    return attributes | _outcome_attributes(answer.outcome, answer.charge)


def _usage(usage: Usage | None) -> dict[str, AttributeValue]:
    if usage is None:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
        "gen_ai.usage.cache_write.input_tokens": usage.cache_write_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
    }


def _outcome_attributes(outcome: Outcome, charge: Charge | None) -> dict[str, AttributeValue]:
    return {"halter.outcome": outcome, "halter.cost_usd": (charge.usd if charge else 0) / DOLLAR}


def _tool(trace: Trace, tool: str, call: str, level: str) -> dict[str, AttributeValue]:
    return _session_attributes(trace) | {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.call.id": call,
        "halter.level": level,
    }


def _call(trace: Trace, call_event: CallStarted, result: CallSettled) -> dict[str, AttributeValue]:
    risk: dict[str, AttributeValue] = {"halter.risk": call_event.risk} if call_event.risk else {}
    return (
        _tool(trace, call_event.tool, call_event.call, call_event.level)
        | risk
        | _outcome_attributes(result.outcome, result.charge)
    )


def _reply(stored: Stored) -> Reply | None:
    """Decode the reply in the body of an event; None if the body is missing or is not a reply."""
    try:
        return msgspec.json.decode(stored.body, type=Reply) if stored.body else None
    except msgspec.DecodeError:
        return None


def _message_attributes(span: OpenSpan, stored: Stored, prompt: Prompt | None) -> dict[str, AttributeValue]:
    """Return what was sent and answered as attributes of the semantic conventions."""
    reply = _reply(stored)
    attributes: dict[str, AttributeValue] = {"halter.request.sent": span.body} if span.body else {}
    if prompt is not None and prompt.messages:
        attributes["gen_ai.input.messages"] = _encode(list(_convert_messages(prompt.messages)))
    if prompt is not None and prompt.system:
        attributes["gen_ai.system_instructions"] = _encode([_convert_text(prompt.system)])
    if reply is not None:
        parts = [_convert_part(part) for part in reply.parts]
        message = {"role": "assistant", "parts": parts, "finish_reason": _FINISHES[reply.stop]}
        attributes["gen_ai.output.messages"] = _encode([message])
    return attributes


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _convert_messages(messages: Sequence[Message]) -> Generator[Mapping[str, Any]]:
    """Yield messages in the form of the conventions, where results of tools are messages of their own."""
    for message in messages:
        for is_result, parts in groupby(message.parts, lambda part: isinstance(part, ToolResult)):
            yield {"role": "tool" if is_result else message.role, "parts": [_convert_part(part) for part in parts]}


def _convert_part(part: Part) -> Mapping[str, Any]:
    """Convert a part of a message. Of a file, only the text that stands for it is shown."""
    match part:
        case Text():
            return _convert_text(part.text)
        case ToolCall():
            return {"type": "tool_call", "id": part.id, "name": part.tool, "arguments": _read_arguments(part)}
        case ToolResult():
            return {"type": "tool_call_response", "id": part.id, "response": _cut(part.text)}


def _convert_text(text: str) -> Mapping[str, str]:
    return {"type": "text", "content": _cut(text)}


def _cut(text: str) -> str:
    return shorten(clean(text), MAX_PART_LENGTH)


def _read_arguments(call: ToolCall) -> Any:
    """Return the arguments as JSON; as text if they are long, or if the model wrote something else."""
    if len(call.arguments) <= MAX_PART_LENGTH:
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(clean(call.arguments))
    return _cut(call.arguments)


def _result_attributes(span: OpenSpan, stored: Stored) -> dict[str, AttributeValue]:
    attributes = {"gen_ai.tool.call.arguments": span.body, "gen_ai.tool.call.result": _read_redacted(stored)}
    return {name: text for name, text in attributes.items() if text}
