"""Spans are made of events and of nothing else: a table of what comes out of what went in."""

import hashlib
from collections.abc import Sequence

import msgspec
import pytest

from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallSettled,
    CallStarted,
    MessageAdded,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionResumed,
    SessionStarted,
    TurnEnded,
    TurnStarted,
    YieldRequest,
)
from halter.core.ids import StreamId
from halter.core.messages import Reply, Text, ToolCall
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.core.usage import Usage
from halter.core.vocabulary import Event
from halter.runtime.telemetry import Span, Trace, advance_trace, begin_trace

CANARY = "canary-7f3a"
REPLY = Reply((Text(f"I write {CANARY}"), ToolCall("c", "send", f'{{"to":"{CANARY}"}}')), "calls")


def journal(*happened: AnyEvent | tuple[AnyEvent, bytes]) -> list[Stored]:
    """Put events into a stream, a second after each other."""
    events: list[Stored] = []
    for seq, each in enumerate(happened, 1):
        event, body = each if isinstance(each, tuple) else (each, CANARY.encode())
        digest = hashlib.sha256(f"{seq}".encode()).digest()
        assert isinstance(event, Event)
        events.append(
            Stored(
                StreamId("session:desk-1"),
                seq,
                event.KIND,
                1,
                seq * 1_000_000,
                1,
                f"k{seq}",
                None,
                b"{}",
                body,
                b"salt",
                b"digest",
                digest,
                event,
            )
        )
    return events


START = SessionStarted(session="desk-1", agent="desk", kind="autonomous", started_by="ada")
ASKS = RequestStarted(request="r1", model="openai:gpt-5-mini", purpose="turn", max_output_tokens=500)
ANSWERS = RequestSettled(
    request="r1", outcome="ok", usage=Usage(120, 30, 100, 0), charge=Charge(usd=1_250), error=f"no {CANARY}"
)
CALLS = CallStarted(call="c1", tool="send", level="RESTRICTED", risk="HIGH", decided_by=f"{CANARY} person")
DONE = CallSettled(call="c1", outcome="ok", charge=Charge(usd=500_000))
ENDS_TURN = TurnEnded(turn=1, why="yielded", sentence=CANARY, yielded=YieldRequest("sleep", 1, reason=CANARY))
ENDS = SessionEnded(state="COMPLETED", terminal_reason="completed")
WHOLE = journal(START, TurnStarted(turn=1), ASKS, (ANSWERS, msgspec.json.encode(REPLY)), CALLS, DONE, ENDS_TURN, ENDS)


def spans(events: Sequence[Stored], *, content: bool = False) -> list[Span]:
    trace = begin_trace(events[0])
    assert trace is not None
    found: list[Span] = []
    for event in events[1:]:
        trace, span = advance_trace(trace, event, content=content)
        found += [span] if span is not None else []
    return found


def test_a_session_its_turns_its_requests_and_its_calls_are_spans_below_each_other() -> None:
    chat, tool, turn, session = spans(WHOLE)
    assert [span.name for span in (chat, tool, turn, session)] == [
        "chat gpt-5-mini",
        "execute_tool send",
        "turn 1",
        "invoke_agent desk",
    ]
    assert (chat.parent, tool.parent, turn.parent, session.parent) == (turn.span, turn.span, session.span, None)
    assert len({chat.trace, tool.trace, turn.trace, session.trace}) == 1
    assert len({chat.span, tool.span, turn.span, session.span}) == 4
    assert [(span.start // 10**6, span.end // 10**6) for span in (chat, tool, turn, session)] == [
        (3, 4),
        (5, 6),
        (2, 7),
        (1, 8),
    ]
    assert [span.kind for span in (chat, tool, turn, session)] == ["client", "internal", "internal", "internal"]
    assert {span.error for span in (chat, tool, turn, session)} == {""}


def test_a_request_carries_the_names_of_the_conventions_and_what_it_cost() -> None:
    assert spans(WHOLE)[0].attributes == {
        "gen_ai.agent.name": "desk",
        "gen_ai.conversation.id": "desk-1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5-mini",
        "gen_ai.request.max_tokens": 500,
        "gen_ai.response.finish_reasons": ("tool_calls",),
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 100,
        "gen_ai.usage.cache_creation.input_tokens": 0,
        "halter.purpose": "turn",
        "halter.outcome": "ok",
        "halter.cost_usd": 0.00125,
    }


def test_a_call_carries_its_tool_its_level_and_its_outcome() -> None:
    assert spans(WHOLE)[1].attributes == {
        "gen_ai.agent.name": "desk",
        "gen_ai.conversation.id": "desk-1",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "send",
        "gen_ai.tool.call.id": "c1",
        "halter.level": "RESTRICTED",
        "halter.risk": "HIGH",
        "halter.outcome": "ok",
        "halter.cost_usd": 0.5,
    }


def test_nothing_that_was_said_is_in_a_span_unless_it_is_asked_for() -> None:
    assert CANARY not in str(spans(WHOLE))
    chat, tool, _, _ = spans(WHOLE, content=True)
    assert chat.attributes["halter.request.sent"] == CANARY
    assert CANARY in str(chat.attributes["gen_ai.output.messages"])
    assert (tool.attributes["gen_ai.tool.call.arguments"], tool.attributes["gen_ai.tool.call.result"]) == (
        CANARY,
        CANARY,
    )


@pytest.mark.parametrize(
    ("events", "name", "error"),
    [
        ((ASKS, RequestSettled(request="r1", outcome="timeout")), "chat gpt-5-mini", "timeout"),
        ((CALLS, CallSettled(call="c1", outcome="unknown")), "execute_tool send", "unknown"),
        (
            (CallRefused(call="c1", tool="send", outcome="tool_not_granted", sentence=CANARY),),
            "execute_tool send",
            "tool_not_granted",
        ),
        (
            (
                RequestRefused(
                    request="r1", model="google:gemini", purpose="turn", outcome="cost_cap_reached", sentence=CANARY
                ),
            ),
            "chat gemini",
            "cost_cap_reached",
        ),
        ((TurnStarted(turn=4), TurnEnded(turn=4, why="repetition")), "turn 4", "repetition"),
        ((SessionEnded(state="HALTED", terminal_reason="external_halt"),), "invoke_agent desk", "external_halt"),
    ],
)
def test_what_did_not_go_well_says_why_and_nothing_of_what_was_said(
    events: tuple[AnyEvent, ...], name: str, error: str
) -> None:
    (span,) = spans(journal(START, *events))
    assert (span.name, span.error) == (name, error)
    assert CANARY not in str(span)


def test_a_span_has_the_same_id_whoever_makes_it_and_wherever_they_begin() -> None:
    trace = begin_trace(WHOLE[0])
    assert trace is not None
    traces: list[Trace] = []
    for event in WHOLE[1:5]:
        trace, _ = advance_trace(trace, event)
        traces.append(trace)
    again = [advance_trace(traces[-1], WHOLE[5])[1]]
    assert again == [spans(WHOLE)[1]]


def test_a_call_of_a_session_without_turns_stands_below_the_session() -> None:
    call, session = spans(journal(START, CALLS, DONE, ENDS))
    assert call.parent == session.span


def test_a_session_that_goes_on_after_its_end_has_a_second_span_of_its_own() -> None:
    first, second = spans(journal(START, ENDS, SessionResumed(by="ada"), ENDS))
    assert first.trace == second.trace
    assert first.span != second.span
    assert second.start == 3_000_000


@pytest.mark.parametrize("settled", [ANSWERS, DONE, ENDS_TURN])
def test_what_began_before_anybody_looked_has_no_span(settled: AnyEvent) -> None:
    assert spans(journal(START, settled)) == []


def test_a_body_that_is_erased_or_no_answer_is_left_out() -> None:
    for body in (b"", b"not JSON", b'{"parts":[]'):
        (chat,) = spans(journal(START, ASKS, (ANSWERS, body)), content=True)
        assert "gen_ai.response.finish_reasons" not in chat.attributes


def test_all_else_makes_no_span() -> None:
    assert spans(journal(START, MessageAdded(turn=1, reason="repetition"))) == []
    assert begin_trace(journal(ENDS)[0]) is None
