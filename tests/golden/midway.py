"""Sessions that a version is left with when it is stopped for the next one: each in the middle of something else."""

from collections.abc import Sequence
from typing import Any

import msgspec

from halter.core.clock import DAY, HOUR, SECOND
from halter.core.events import (
    AnyEvent,
    CallSettled,
    CallStarted,
    DecisionAsked,
    RequestSettled,
    RequestStarted,
    SessionParked,
    SessionStarted,
    TurnEnded,
    TurnStarted,
)
from halter.core.events.sessions import YieldRequest
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.messages import Reply, ToolCall, make_user_message
from halter.core.money import DOLLAR, Cap, Caps, Spender, make_legs
from halter.core.ports import Draft, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import DecisionRow
from halter.core.usage import Usage
from halter.core.vocabulary import RowKey
from halter.journal.store import JournalStore
from halter.state import lifecycle
from halter.testing.fakes import ManualClock

AGENT = "clerk"
PRICE = DOLLAR // 4
YEAR = 365 * DAY
ASLEEP, CALLING, ASKING, SPOKEN_TO = (f"{AGENT}-{number}" for number in range(1, 5))
"""One that sleeps, one in the middle of its calls, one that waits for a person, and one with something to read."""


async def left_midway(store: JournalStore, clock: ManualClock) -> None:
    """Let each session come so far, and its owner stop there."""
    for session, happened in (
        (ASLEEP, asleep(ASLEEP)),
        (CALLING, in_calls(CALLING, clock.now())),
        (ASKING, asking(ASKING, clock.now())),
        (SPOKEN_TO, asleep(SPOKEN_TO)),
    ):
        event = SessionStarted(session=session, agent=AGENT, kind="autonomous", started_by="ada")
        await store.commit(lifecycle.start_session(event, b""))
        (lease,) = await store.claim(WorkerId(f"worker of {session}"), 1, SessionId(session))
        for number, (event, result) in enumerate(happened):
            clock.advance(SECOND)
            written = at_rest(event, clock.now()) if isinstance(event, SessionParked) else event
            draft = Draft(written, None if result is None else msgspec.json.encode(result))
            write = Write(session_stream(session), f"{number}", lambda _, draft=draft: [draft], rows(event), lease)
            await store.commit(write)
    clock.advance(SECOND)
    await store.commit(lifecycle.post_message(SPOKEN_TO, "hello", b"Are you there?", "ada"))


def at_rest(event: SessionParked, now: int) -> SessionParked:
    """Let a rest end so much after it began."""
    return msgspec.structs.replace(event, wake_at=None if event.wake_at is None else now + event.wake_at)


def rows(event: AnyEvent) -> Sequence[RowKey]:
    """Name the rows that an event changes beside its session's own."""
    match event:
        case CallStarted():
            return rows_of_hold(event.call, event.legs)
        case DecisionAsked():
            return [(DecisionRow, event.decision)]
        case _:
            return ()


def turn(session: str, *calls: ToolCall) -> list[tuple[AnyEvent, Any]]:
    """Begin a turn, in which the model asks for calls."""
    request = f"{session}.t1_0/0"
    return [
        (TurnStarted(turn=1, quiet=True), make_user_message("It is your turn.", "config", reason="observe")),
        (RequestStarted(request=request, model="m", purpose="turn"), {}),
        (RequestSettled(request=request, outcome="ok", usage=Usage(100, 20)), Reply(calls, "calls")),
    ]


def asleep(session: str) -> list[tuple[AnyEvent, Any]]:
    """Sleep for an hour after a turn."""
    sleeps = YieldRequest("sleep", HOUR, (), "nothing to do")
    return [
        *turn(session, ToolCall("m1", "yield", '{"mode":"sleep","sleep":3600}')),
        (CallStarted(call=f"{session}.c1_0_0", tool="yield", effect="read", idempotent=True, phase="work"), {}),
        (CallSettled(call=f"{session}.c1_0_0", outcome="ok"), "Your turn ends here."),
        (TurnEnded(turn=1, why="yielded", yielded=sleeps), None),
        (SessionParked(state="SLEEPING", wake_at=HOUR), None),
    ]


def in_calls(session: str, now: int) -> list[tuple[AnyEvent, Any]]:
    """Stop when a look, something that may be repeated, and something that may not, have been begun."""
    held = make_legs(Caps(session=Cap(DOLLAR)), Spender(session, AGENT), now, usd=PRICE)
    values = {"look": ("read", False), "file": ("write", True), "send": ("write", False)}
    calls = [ToolCall(f"m{number}", tool, "{}") for number, tool in enumerate(values)]
    events = [
        CallStarted(
            call=f"{session}.c1_0_{number}", tool=tool, effect=effect, idempotent=again, legs=held, phase="work"
        )
        for number, (tool, (effect, again)) in enumerate(values.items())
    ]
    return [*turn(session, *calls), *((call, {}) for call in events)]


def asking(session: str, now: int) -> list[tuple[AnyEvent, Any]]:
    """Wait for a person, who is to say what became of something that was begun in an earlier life."""
    call = f"{session}.c1_0_0"
    held = make_legs(Caps(session=Cap(DOLLAR)), Spender(session, AGENT), now, usd=PRICE)
    event = DecisionAsked(
        decision=f"{call}/unknown", about="unknown_call", subject=call, name="send", digest=call, expires_at=now + YEAR
    )
    return [
        *turn(session, ToolCall("m1", "send", "{}")),
        (CallStarted(call=call, tool="send", legs=held, phase="work"), {}),
        (event, "send was started, and it is unknown whether it was done. Was it?"),
        (SessionParked(state="WAITING_FOR_APPROVAL", wake_at=YEAR), None),
    ]
