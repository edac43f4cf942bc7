"""Which agents are unhealthy is read the same from every store: a fold of its sessions and their events."""

from halter.core.events import AnyEvent, CallSettled, CallStarted, RunStarted, SessionStarted, TriggerMade, TurnEnded
from halter.core.ids import SessionId, StreamId, WorkerId, session_stream, trigger_stream
from halter.core.ports import Draft, Lease, Write
from halter.core.project import rows_of_event
from halter.core.tools import Effect
from halter.core.vocabulary import SessionKind, State
from halter.guard.halts import switch_on
from halter.journal.store import JournalStore
from halter.runtime.needs import list_unhealthy
from halter.state import lifecycle

TRIGGER = "clerk/tick"


async def record(
    store: JournalStore, stream: StreamId, key: str, *events: AnyEvent, lease: Lease | None = None
) -> None:
    rows = [row for event in events for row in rows_of_event(event)]
    await store.commit(Write(stream, key, lambda _: [Draft(event, b"{}") for event in events], rows, lease))


async def run_session(
    store: JournalStore, session: str, state: State, *, kind: SessionKind = "task", effect: Effect = "read"
) -> None:
    """Run a session that makes one call and ends so; a task is started by the trigger."""
    trigger = TRIGGER if kind == "task" else ""
    if trigger:
        run = RunStarted(trigger=trigger, session=session, cause="schedule")
        await record(store, trigger_stream(trigger), session, run)
    event = SessionStarted(session=session, agent="clerk", kind=kind, started_by="ada", trigger=trigger)
    await store.commit(lifecycle.start_session(event))
    (lease,) = await store.claim(WorkerId("w"), 1, SessionId(session))
    call = CallStarted(call=f"{session}.1", tool="look", effect=effect)
    events = (call, CallSettled(call=f"{session}.1", outcome="ok"), TurnEnded(turn=1, why="max_steps"))
    await record(store, session_stream(session), f"{session}/work", *events, lease=lease)
    await store.commit(lifecycle.end_session(lease, state, "completed" if state == "COMPLETED" else "max_steps"))


async def describe(store: JournalStore) -> list[tuple[str, int, bool]]:
    """Who is unhealthy: its trigger or name, since how many attempts, and whether a person must start it."""
    return [
        (each.trigger or each.agent, each.attempts, each.until is None)
        for each in await list_unhealthy(store, await store.now())
    ]


async def test_every_store_tells_who_makes_no_progress(store: JournalStore) -> None:
    await store.commit(switch_on("clerk", "ada", "on"))
    made = TriggerMade(trigger=TRIGGER, agent="clerk", type="schedule", by="ada", digest="d")
    await record(store, trigger_stream(TRIGGER), "made", made)
    healths: list[list[tuple[str, int, bool]]] = []
    states: list[State] = ["MAX_STEPS", "ERROR", "HALTED", "BUDGET_EXCEEDED", "COMPLETED", "ERROR"]
    for number, state in enumerate(states):
        await run_session(store, f"clerk.tick-{number}", state)
        healths.append(await describe(store))
    first, second, third = [(TRIGGER, 1, False)], [(TRIGGER, 2, False)], [(TRIGGER, 3, True)]
    assert healths == [first, second, second, third, [], first]
    await run_session(store, "clerk.tick-6", "ERROR", effect="write")
    assert await describe(store) == []
    await run_session(store, "clerk.tick-7", "ERROR", effect="write")
    assert await describe(store) == first
    await store.commit(switch_on("clerk", "ada", "on again"))
    assert await describe(store) == []
    await run_session(store, "clerk-1", "ERROR", kind="autonomous")
    assert await describe(store) == [("clerk", 1, True)]
