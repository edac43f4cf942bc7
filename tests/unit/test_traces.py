"""Spans are made of events and of nothing else: a table of what comes out of what went in."""

import hashlib
import json
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
    WakePosted,
)
from halter.core.events.sessions import YieldRequest
from halter.core.ids import StreamId
from halter.core.messages import Message, Prompt, Reply, Text, ToolCall, ToolResult
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.core.usage import Usage
from halter.core.vocabulary import Event
from halter.state.trace import Span, Trace, advance_trace, begin_trace, find_waker, join_parent
from halter.state.trace_context import SpanReference, parse_traceparent

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
        "gen_ai.usage.cache_write.input_tokens": 0,
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


TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
CALLER = f"00-{TRACE:032x}-{SPAN:016x}-01"
OTHER = f"00-{TRACE + 1:032x}-{SPAN + 1:016x}-01"
JOINED = msgspec.structs.replace(START, traceparent=CALLER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALLER, SpanReference(TRACE, SPAN)),
        (f"00-{TRACE:032x}-{SPAN:016x}-00", SpanReference(TRACE, SPAN, is_sampled=False)),
        (f"00-{TRACE:032x}-{SPAN:016x}-03", SpanReference(TRACE, SPAN)),
        (f"cc-{TRACE:032x}-{SPAN:016x}-01-more", SpanReference(TRACE, SPAN)),
        (f"{CALLER}-more", None),
        (CALLER.upper(), None),
        (f"ff-{TRACE:032x}-{SPAN:016x}-01", None),
        (f"00-{0:032x}-{SPAN:016x}-01", None),
        (f"00-{TRACE:032x}-{0:016x}-01", None),
        (f"{CALLER}\n", None),
        ("00-1-2-03", None),
        ("", None),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(text: str, expected: SpanReference | None) -> None:
    assert parse_traceparent(text) == expected


def test_the_spans_of_a_session_join_the_trace_of_the_caller_that_started_it() -> None:
    chat, tool, turn, session = spans([*journal(JOINED), *WHOLE[1:]])
    assert {span.trace for span in (chat, tool, turn, session)} == {TRACE}
    assert (session.parent, session.has_remote_parent) == (SPAN, True)
    assert (chat.parent, turn.parent) == (turn.span, session.span)
    assert not chat.has_remote_parent


def test_a_caller_that_is_not_traced_has_its_sessions_not_traced_either() -> None:
    unsampled = msgspec.structs.replace(START, traceparent=f"{CALLER[:-2]}00")
    assert {span.is_sampled for span in spans([*journal(unsampled), *WHOLE[1:]])} == {False}
    assert {span.is_sampled for span in spans(WHOLE)} == {True}


def test_who_resumes_an_ended_session_has_it_in_their_own_trace_linked_to_the_earlier_one() -> None:
    first, second = spans(journal(JOINED, ENDS, SessionResumed(by="ada", traceparent=OTHER), ENDS))
    assert (second.trace, second.parent) == (TRACE + 1, SPAN + 1)
    assert second.links == (SpanReference(TRACE, first.span),)
    assert first.links == ()


def test_a_resumption_without_a_caller_stays_in_the_trace() -> None:
    first, second = spans(journal(JOINED, ENDS, SessionResumed(by="ada"), ENDS))
    assert (first.trace, first.parent) == (second.trace, second.parent) == (TRACE, SPAN)
    assert second.links == (SpanReference(TRACE, first.span),)


def test_a_turn_is_linked_to_the_callers_whose_messages_it_answers() -> None:
    (posted,) = journal(WakePosted(cause="message", origin="person", sender="ada", traceparent=OTHER))
    (plain,) = journal(WakePosted(cause="message", origin="person", sender="ada"))
    waker = find_waker(posted)
    assert waker == SpanReference(TRACE + 1, SPAN + 1)
    assert find_waker(plain) is None
    events = journal(JOINED, TurnStarted(turn=1, inbox_seen=1), TurnEnded(turn=1, why="ended"))
    trace = begin_trace(events[0])
    assert trace is not None
    trace, _ = advance_trace(trace, events[1], wakers=(waker,))
    _, turn = advance_trace(trace, events[2])
    assert turn is not None
    assert (turn.trace, turn.links) == (TRACE, (waker,))


def test_a_request_of_a_client_is_in_the_trace_of_the_client_linked_to_its_session() -> None:
    asks = msgspec.structs.replace(ASKS, traceparent=OTHER)
    chat, session = spans(journal(JOINED, asks, ANSWERS, ENDS))
    assert (chat.trace, chat.parent, chat.has_remote_parent) == (TRACE + 1, SPAN + 1, True)
    assert chat.links == (SpanReference(TRACE, session.span),)
    assert session.trace == TRACE


def test_a_sub_session_is_below_the_call_that_started_it() -> None:
    events = journal(JOINED, CALLS)
    parent = begin_trace(events[0])
    assert parent is not None
    parent, _ = advance_trace(parent, events[1])
    child = msgspec.structs.replace(START, session="c1.agent", agent="helper", parent="desk-1")
    by_person = msgspec.structs.replace(child, session="helper-9")
    below_call, below_session = begin_trace(journal(child)[0]), begin_trace(journal(by_person)[0])
    assert below_call is not None
    assert below_session is not None
    joined, other = join_parent(below_call, parent), join_parent(below_session, parent)
    assert (joined.trace, joined.above) == (TRACE, SpanReference(TRACE, parent.flying["c1"].span))
    assert (other.trace, other.above) == (TRACE, SpanReference(TRACE, parent.root))


def test_a_session_names_the_provider_of_its_turns() -> None:
    extra = msgspec.structs.replace(ASKS, request="s1", model="google:gemini", purpose="summary")
    done = msgspec.structs.replace(ANSWERS, request="s1")
    *_, session = spans(journal(START, ASKS, ANSWERS, extra, done, ENDS))
    assert session.attributes["gen_ai.provider.name"] == "openai"
    (without,) = spans(journal(START, ENDS))
    assert "gen_ai.provider.name" not in without.attributes


def test_an_answer_has_the_model_and_the_id_that_its_provider_gave_it() -> None:
    reply = Reply((Text("yes"),), model="gpt-5-mini-2026-01-01", id="resp_1")
    (chat,) = spans(journal(START, ASKS, (ANSWERS, msgspec.json.encode(reply))))
    assert chat.attributes["gen_ai.response.model"] == "gpt-5-mini-2026-01-01"
    assert chat.attributes["gen_ai.response.id"] == "resp_1"
    (unnamed,) = spans(journal(START, ASKS, (ANSWERS, msgspec.json.encode(REPLY))))
    assert not {"gen_ai.response.model", "gen_ai.response.id"} & {*unnamed.attributes}


PROMPT = Prompt(
    system="Be kind.",
    messages=(
        Message("user", (Text("What is the weather?"),)),
        Message("assistant", (Text("I look."), ToolCall("c1", "look", '{"at": "Paris"}'), ToolCall("c2", "look", "{"))),
        Message(
            "user", (ToolResult("c1", "look", "ok", "57 °F"), ToolResult("c2", "look", "error", "no"), Text("Go."))
        ),
    ),
)


def test_prompts_have_the_form_of_the_conventions() -> None:
    start, asks, answers = journal(START, ASKS, (ANSWERS, msgspec.json.encode(REPLY)))
    trace = begin_trace(start)
    assert trace is not None
    trace, _ = advance_trace(trace, asks, content=True)
    _, chat = advance_trace(trace, answers, content=True, prompt=PROMPT)
    assert chat is not None
    assert json.loads(str(chat.attributes["gen_ai.system_instructions"])) == [{"type": "text", "content": "Be kind."}]
    assert json.loads(str(chat.attributes["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [{"type": "text", "content": "What is the weather?"}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "I look."},
                {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "Paris"}},
                {"type": "tool_call", "id": "c2", "name": "look", "arguments": "{"},
            ],
        },
        {
            "role": "tool",
            "parts": [
                {"type": "tool_call_response", "id": "c1", "response": "57 °F"},
                {"type": "tool_call_response", "id": "c2", "response": "no"},
            ],
        },
        {"role": "user", "parts": [{"type": "text", "content": "Go."}]},
    ]
    (answer,) = json.loads(str(chat.attributes["gen_ai.output.messages"]))
    assert (answer["role"], answer["finish_reason"]) == ("assistant", "tool_calls")
    assert answer["parts"][1]["arguments"] == {"to": CANARY}


def test_a_text_of_any_length_leaves_an_attribute_that_can_be_read() -> None:
    start, asks, answers = journal(START, ASKS, ANSWERS)
    trace = begin_trace(start)
    assert trace is not None
    trace, _ = advance_trace(trace, asks, content=True)
    long = Prompt(system="x" * 10**6, messages=(Message("user", (ToolCall("c", "t", f'"{"y" * 10**6}"'),)),))
    _, chat = advance_trace(trace, answers, content=True, prompt=long)
    assert chat is not None
    for name in ("gen_ai.system_instructions", "gen_ai.input.messages"):
        assert len(str(chat.attributes[name])) < 20_000
        assert json.loads(str(chat.attributes[name]))
