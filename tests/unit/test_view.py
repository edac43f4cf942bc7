"""What a person reads of agents that run by themselves."""

import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import (
    AnyEvent,
    AttendingFailed,
    DecisionAsked,
    DecisionMade,
    GuardrailTriggered,
    HotStateSeen,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.core.events.effects import CallRefused, CallSettled, CallStarted, CostCapReached, RequestSettled
from halter.core.events.sessions import YieldRequest
from halter.core.ids import StreamId
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.present.event_lines import EventLines
from halter.present.events import PLAIN, URGENT_STYLE, WARNING_STYLE

NOW = 1_767_225_600 * SECOND + 500_000


def stored(event: AnyEvent, body: bytes = b"", stream: str = "session:desk-1") -> Stored:
    return Stored(StreamId(stream), 1, event.KIND, 1, NOW, 1, "k", None, b"{}", body, b"", b"", b"", event)


def render_event(view: EventLines, event: AnyEvent, body: bytes = b"") -> tuple[str, str]:
    line = view.line(stored(event, body))
    return (line.text.partition(" desk-1 ")[2], line.style) if line else ("", "")


LINES: list[tuple[AnyEvent, bytes, str, str]] = [
    (TurnStarted(turn=3), b"", "turn 3 begins", PLAIN),
    (TurnEnded(turn=3, why="yielded", yielded=YieldRequest("continue")), b"", "turn 3 ends, $0.00: continue", PLAIN),
    (
        TurnEnded(turn=3, why="yielded", yielded=YieldRequest("sleep", 5 * MINUTE, (), "all\nquiet")),
        b"",
        "turn 3 ends, $0.00: sleep 5m (all quiet)",
        PLAIN,
    ),
    (TurnEnded(turn=3, why="yielded", yielded=YieldRequest("shutdown")), b"", "turn 3 ends, $0.00: shut down", PLAIN),
    (TurnEnded(turn=3, why="ended"), b"", "turn 3 ends, $0.00: answered", PLAIN),
    (
        TurnEnded(turn=3, why="model_error", sentence="It is on fire."),
        b"",
        "turn 3 ends, $0.00: model_error. It is on fire.",
        WARNING_STYLE,
    ),
    (TurnSkipped(stage="change", skips=1, sentence="Nothing new."), b"", "skips a turn, $0.00: Nothing new.", PLAIN),
    (TurnSkipped(stage="model", skips=4), b"", "skips a turn, 4 in a row, $0.00", PLAIN),
    (SessionParked(state="SLEEPING", wake_on=("jump",)), b"", "sleeps until jump", PLAIN),
    (SessionParked(state="WAITING_FOR_APPROVAL"), b"", "", ""),
    (
        SessionParked(state="WAITING_FOR_INPUT"),
        b"",
        "Needs you: Waiting for an answer. Answer with halter chat.",
        URGENT_STYLE,
    ),
    (SessionWoken(cause="timer"), b"", "wakes, by timer", PLAIN),
    (SessionWoken(cause="takeover"), b"", "continues on another worker", PLAIN),
    (SessionEnded(state="HALTED", terminal_reason="external_halt"), b"", "ended: HALTED, external_halt", PLAIN),
    (SessionResumed(by="ada"), b"", "is resumed by ada", PLAIN),
    (
        WakePosted(cause="signal", origin="sensor", sender="shop", notifies=True),
        b"Flood!",
        "alert: Flood!",
        WARNING_STYLE,
    ),
    (WakePosted(cause="message", origin="person", sender="ada", notifies=True), b"ada: Hi", "message: ada: Hi", PLAIN),
    (WakePosted(cause="signal", origin="sensor", sender="shop", name="flood"), b"", "flood of shop", PLAIN),
    (WakePosted(cause="signal", origin="sensor", sender="shop", name="shop"), b"", "shop fires", PLAIN),
    (WakePosted(cause="message", origin="person", sender="ada"), b"hello", "message from ada", PLAIN),
    (GuardrailTriggered(guardrail="model_rate", sentence="It waits.", until=9), b"", "It waits.", PLAIN),
    (
        GuardrailTriggered(guardrail="idle_timeout", sentence="It was idle."),
        b"",
        "limit idle_timeout: It was idle.",
        WARNING_STYLE,
    ),
    (
        SensorChanged(sensor="shop", health="failing", sentence="No route."),
        b"",
        "sensor shop failing: No route.",
        WARNING_STYLE,
    ),
    (SensorChanged(sensor="shop", health="ok"), b"", "sensor shop ok", PLAIN),
    (AttendingFailed(failures=1, error="Boom"), b"", "failed; retrying: Boom", WARNING_STYLE),
    (
        AttendingFailed(failures=5, error="Boom", quarantined=True),
        b"",
        "Needs you: stopped after failing 5 times; restart with halter on desk: Boom",
        URGENT_STYLE,
    ),
    (
        DecisionAsked(decision="d1", about="approval", subject="c", name="wipe", digest="", expires_at=1),
        b"",
        "Needs you: halter approve d1 (approval of wipe)",
        URGENT_STYLE,
    ),
    (
        DecisionAsked(decision="d1", about="cap_raise", subject="c", name="wipe", digest="", expires_at=1),
        b"",
        "Needs you: halter approve d1 --cap AMOUNT (cap_raise of wipe)",
        URGENT_STYLE,
    ),
    (DecisionMade(decision="d1", verdict="deny", by="ada", digest=""), b"", "ada says deny to d1", PLAIN),
    (
        CostCapReached(refused="r", name="m", scope="fleet", window="day/x", unit="usd", cap=1, spent=0, amount=9),
        b"",
        "m may cost $0.000009; the cap of fleet day/x is $0.000001",
        WARNING_STYLE,
    ),
    (
        CallRefused(call="c", tool="wipe", outcome="rate_limited", sentence="Too often."),
        b"",
        "wipe was refused (rate_limited): Too often.",
        WARNING_STYLE,
    ),
    (
        RequestSettled(request="r", outcome="error", error="Overloaded"),
        b"",
        "model request failed: Overloaded",
        WARNING_STYLE,
    ),
    (
        RequestSettled(request="r", outcome="timeout", error="TimeoutError", charge=Charge(usd=20_000)),
        b"",
        "model request failed, $0.02 (possibly billed, so the whole hold is charged): TimeoutError",
        WARNING_STYLE,
    ),
    (SessionStarted(session="desk-1", agent="desk", kind="autonomous", started_by="ada"), b"", "", ""),
    (HotStateSeen(turn=1, digest="x"), b"", "", ""),
]


@pytest.mark.parametrize(("event", "body", "text", "style"), LINES)
def test_an_event_is_one_line_or_none(event: AnyEvent, body: bytes, text: str, style: str) -> None:
    assert render_event(EventLines(), event, body) == (text, style)


def test_a_sleep_names_its_length_its_end_and_what_ends_it_before() -> None:
    early = render_event(
        EventLines(), SessionParked(state="SLEEPING", wake_at=NOW + 2 * HOUR - 1, wake_on=("jump", "message"))
    )[0]
    assert early.startswith("sleeps 2h, until ")
    assert early.endswith(", or by jump, message")


def test_a_turn_tells_what_it_cost_and_how_many_calls_it_made_since_the_last_one() -> None:
    view = EventLines()
    render_event(view, CallStarted(call="c1", tool="look"))
    render_event(view, CallSettled(call="c1", outcome="ok", charge=Charge(usd=20_000)))
    render_event(view, CallStarted(call="c2", tool="yield"))
    render_event(view, CallSettled(call="c2", outcome="ok"))
    render_event(view, RequestSettled(request="r1", outcome="ok", charge=Charge(usd=1_500)))
    event = TurnEnded(turn=1, why="ended")
    assert render_event(view, event)[0].startswith("turn 1 ends, 1 call, $0.02: ")
    assert render_event(view, event)[0].startswith("turn 1 ends, $0.00: ")


def test_a_question_of_the_agent_is_shown() -> None:
    view = EventLines()
    reply = b'{"parts":[{"part":"call","id":"1","tool":"ask_user","arguments":"{\\"question\\":\\"Which door?\\"}"}]}'
    render_event(view, RequestSettled(request="r1", outcome="ok"), reply)
    assert render_event(view, SessionParked(state="WAITING_FOR_INPUT"))[0].startswith("Needs you: Which door?")


@pytest.mark.parametrize(
    "reply", [b"", b"}", b'{"parts":[{"part":"call","id":"1","tool":"ask_user","arguments":"["}]}']
)
def test_an_answer_that_cannot_be_read_breaks_no_view(reply: bytes) -> None:
    view = EventLines()
    assert render_event(view, RequestSettled(request="r1", outcome="ok"), reply) == ("", "")


def test_what_others_wrote_stays_on_its_line_and_is_not_long() -> None:
    event = WakePosted(cause="signal", origin="sensor", sender="s", notifies=True)
    line = EventLines().line(stored(event, b"a\nb\x1b[2J " * 1000))
    assert line is not None
    assert "\n" not in line.text
    assert len(line.text) < 300
