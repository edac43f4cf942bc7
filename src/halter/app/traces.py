"""Spans, made of the journal's events: what a session did and how long it took, in the words of OpenTelemetry.

Nothing here is measured while an agent works. A span follows from events that are committed, and so does its id:
whoever makes it again makes the same. What was said is left out unless it is asked for.
"""

from collections.abc import Mapping
from typing import Final, Literal

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
)
from halter.core.messages import Reply, Stop, Text
from halter.core.money import DOLLAR, Charge
from halter.core.ports import Stored
from halter.core.text import clean, from_body
from halter.core.usage import ModelName, Usage
from halter.core.vocabulary import Outcome

Value = str | int | float | bool | tuple[str, ...]

GOOD_ENDS: Final = frozenset(("ended", "asked", "yielded"))
"""How a turn ends that nothing stopped."""

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
"""Providers that the conventions call by another name; all others are called as the configuration calls them."""

_FINISHES: Final[Mapping[Stop, str]] = {
    "end": "stop",
    "calls": "tool_calls",
    "max_tokens": "length",
    "refused": "content_filter",
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took its time, from microsecond to microsecond. `error` names what kept it from going well."""

    trace: int
    span: int
    parent: int | None
    name: str
    kind: Literal["internal", "client"]
    start: int
    end: int
    attributes: Mapping[str, Value]
    error: str = ""


class Begun(msgspec.Struct, frozen=True):
    """Something that has begun: when, under which id, and below what."""

    at: int
    span: int
    parent: int
    event: RequestStarted | CallStarted | TurnStarted
    body: str = ""


class Trace(msgspec.Struct, frozen=True):
    """A session as far as its spans need it. `root` is the span of its present life: a resumed one has another."""

    trace: int
    session: str
    agent: str
    kind: str
    parent: str
    root: int
    since: int
    turn: Begun | None = None
    flying: Mapping[str, Begun] = {}


def trace_of(first: Stored) -> Trace | None:
    """Begin with the first event of a session. Its hash is the id: sessions of two stores may have the same name."""
    match first.event:
        case SessionStarted() as event:
            return Trace(
                trace=int.from_bytes(first.hash[:16]) or 1,
                session=event.session,
                agent=event.agent,
                kind=event.kind,
                parent=event.parent,
                root=_id(first),
                since=first.at,
            )
        case _:
            return None


def follow(trace: Trace, stored: Stored, *, content: bool = False) -> tuple[Trace, Span | None]:
    """Take the next event of a session into account; where something has come to its end, make its span."""
    match stored.event:
        case SessionResumed():
            return msgspec.structs.replace(trace, root=_id(stored), since=stored.at, turn=None, flying={}), None
        case TurnStarted() as event:
            turn = Begun(stored.at, _id(stored), trace.root, event)
            return msgspec.structs.replace(trace, turn=turn), None
        case RequestStarted() as event:
            return _flies(trace, event.request, _begun(trace, stored, event, content=content)), None
        case CallStarted() as event:
            return _flies(trace, event.call, _begun(trace, stored, event, content=content)), None
        case RequestSettled(request=request) | CallSettled(call=request):
            begun = trace.flying.get(request)
            rest = {name: each for name, each in trace.flying.items() if name != request}
            span = None if begun is None else _settled(trace, begun, stored, content=content)
            return msgspec.structs.replace(trace, flying=rest), span
        case RequestRefused() as event:
            known = _chat(trace, event.model, event.purpose) | {"halter.outcome": event.outcome}
            return trace, _instant(trace, stored, f"chat {_model(event.model)[1]}", known, event.outcome)
        case CallRefused() as event:
            known = _tool(trace, event.tool, event.call, event.level) | {"halter.outcome": event.outcome}
            return trace, _instant(trace, stored, f"execute_tool {event.tool}", known, event.outcome)
        case TurnEnded() as event:
            return msgspec.structs.replace(trace, turn=None), _turn(trace, event, stored.at)
        case SessionEnded() as event:
            return msgspec.structs.replace(trace, turn=None, flying={}), _session(trace, event, stored.at)
        case _:
            return trace, None


def _id(stored: Stored) -> int:
    """Name a span by the hash of the event that began it. No span may be called 0."""
    return int.from_bytes(stored.hash[-8:]) or 1


def _flies(trace: Trace, name: str, begun: Begun) -> Trace:
    return msgspec.structs.replace(trace, flying={**trace.flying, name: begun})


def _begun(trace: Trace, stored: Stored, event: RequestStarted | CallStarted, *, content: bool) -> Begun:
    return Begun(stored.at, _id(stored), _above(trace), event, _words(stored) if content else "")


def _above(trace: Trace) -> int:
    return trace.root if trace.turn is None else trace.turn.span


def _words(stored: Stored) -> str:
    """Read a body as it stands in the journal, secrets replaced. What is erased, or too large for it, is left out."""
    return clean(from_body(stored.body)) if stored.body else ""


def _settled(trace: Trace, begun: Begun, stored: Stored, *, content: bool) -> Span | None:
    match begun.event, stored.event:
        case RequestStarted() as asked, RequestSettled() as answer:
            attributes = _request(trace, asked, answer, stored) | (_said(begun, stored) if content else {})
            return _span(trace, begun, stored.at, f"chat {_model(asked.model)[1]}", attributes, answer.outcome)
        case CallStarted() as called, CallSettled() as result:
            attributes = _call(trace, called, result) | (_done(begun, stored) if content else {})
            return _span(trace, begun, stored.at, f"execute_tool {called.tool}", attributes, result.outcome)
        case _:
            return None


def _span(trace: Trace, begun: Begun, end: int, name: str, attributes: Mapping[str, Value], outcome: Outcome) -> Span:
    client = isinstance(begun.event, RequestStarted)
    return Span(
        trace=trace.trace,
        span=begun.span,
        parent=begun.parent,
        name=name,
        kind="client" if client else "internal",
        start=begun.at,
        end=end,
        attributes=attributes,
        error="" if outcome == "ok" else outcome,
    )


def _instant(trace: Trace, stored: Stored, name: str, attributes: Mapping[str, Value], error: str) -> Span:
    """Make a span of what a brake refused: it took no time, since nothing was done."""
    return Span(
        trace=trace.trace,
        span=_id(stored),
        parent=_above(trace),
        name=name,
        kind="internal",
        start=stored.at,
        end=stored.at,
        attributes=attributes,
        error=error,
    )


def _turn(trace: Trace, event: TurnEnded, at: int) -> Span | None:
    begun = trace.turn
    if begun is None:
        return None
    return Span(
        trace=trace.trace,
        span=begun.span,
        parent=begun.parent,
        name=f"turn {event.turn}",
        kind="internal",
        start=begun.at,
        end=at,
        attributes=_whose(trace) | {"halter.turn": event.turn, "halter.turn.end": event.why},
        error="" if event.why in GOOD_ENDS else event.why,
    )


def _session(trace: Trace, event: SessionEnded, at: int) -> Span:
    named: dict[str, Value] = {"gen_ai.operation.name": "invoke_agent", "halter.session.kind": trace.kind}
    ended: dict[str, Value] = {"halter.session.state": event.state, "halter.session.end": event.terminal_reason}
    above: dict[str, Value] = {"halter.session.parent": trace.parent} if trace.parent else {}
    return Span(
        trace=trace.trace,
        span=trace.root,
        parent=None,
        name=f"invoke_agent {trace.agent}",
        kind="internal",
        start=trace.since,
        end=at,
        attributes=_whose(trace) | named | ended | above,
        error="" if event.state == "COMPLETED" else event.terminal_reason,
    )


def _whose(trace: Trace) -> dict[str, Value]:
    return {"gen_ai.agent.name": trace.agent, "gen_ai.conversation.id": trace.session}


def _model(name: str) -> tuple[str, str]:
    """Tell the provider, as the conventions call it, and the model."""
    try:
        parsed = ModelName.parse(name)
    except ValueError:
        return "halter", name
    return _PROVIDERS.get(parsed.provider, parsed.provider), parsed.model


def _chat(trace: Trace, model: str, purpose: str) -> dict[str, Value]:
    provider, name = _model(model)
    return _whose(trace) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": name,
        "halter.purpose": purpose,
    }


def _request(trace: Trace, asked: RequestStarted, answer: RequestSettled, stored: Stored) -> dict[str, Value]:
    most: dict[str, Value] = {}
    if asked.max_output_tokens:
        most["gen_ai.request.max_tokens"] = asked.max_output_tokens
    attributes = _chat(trace, asked.model, asked.purpose) | most | _usage(answer.usage)
    reply = _reply(stored) if answer.outcome == "ok" else None
    if reply is not None:
        attributes["gen_ai.response.finish_reasons"] = (_FINISHES[reply.stop],)
    return attributes | _came_to(answer.outcome, answer.charge)


def _usage(usage: Usage | None) -> dict[str, Value]:
    if usage is None:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
    }


def _came_to(outcome: Outcome, charge: Charge | None) -> dict[str, Value]:
    return {"halter.outcome": outcome, "halter.cost_usd": (charge.usd if charge else 0) / DOLLAR}


def _tool(trace: Trace, tool: str, call: str, level: str) -> dict[str, Value]:
    return _whose(trace) | {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.call.id": call,
        "halter.level": level,
    }


def _call(trace: Trace, called: CallStarted, result: CallSettled) -> dict[str, Value]:
    risk: dict[str, Value] = {"halter.risk": called.risk} if called.risk else {}
    return _tool(trace, called.tool, called.call, called.level) | risk | _came_to(result.outcome, result.charge)


def _reply(stored: Stored) -> Reply | None:
    """Read an answer, as far as it stands beside its event."""
    try:
        return msgspec.json.decode(stored.body, type=Reply) if stored.body else None
    except msgspec.DecodeError:
        return None


def _said(begun: Begun, stored: Stored) -> dict[str, Value]:
    """Write down what was sent, and what was answered, as the conventions have it."""
    reply = _reply(stored)
    said: dict[str, Value] = {"halter.request.sent": begun.body} if begun.body else {}
    if reply is None:
        return said
    parts = [
        {"type": "text", "content": clean(part.text)}
        if isinstance(part, Text)
        else {"type": "tool_call", "id": part.id, "name": part.tool, "arguments": clean(part.arguments)}
        for part in reply.parts
    ]
    message = {"role": "assistant", "parts": parts, "finish_reason": _FINISHES[reply.stop]}
    return said | {"gen_ai.output.messages": msgspec.json.encode([message]).decode()}


def _done(begun: Begun, stored: Stored) -> dict[str, Value]:
    named = {"gen_ai.tool.call.arguments": begun.body, "gen_ai.tool.call.result": _words(stored)}
    return {name: text for name, text in named.items() if text}
