"""The session that the drills work with does everything, the same way every time, and can be taken over anywhere."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest

from halter.core.clock import SECOND
from halter.core.events import EVENTS_BY_KIND, ArtifactEvent, CallSettled, ChannelEvent, RequestSettled, TriggerEvent
from halter.core.ids import FLEET, StreamId, WorkerId, inbox_stream, session_stream
from halter.core.money import usd_to_micros
from halter.core.ports import BLOB_THRESHOLD, Lease, Stored
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.state.session import Session, replay
from halter.testing.fakes import Crash, Crashed, CrashingStore, ManualClock, SeededIds, make_seeded_salts
from halter_drills.workload import BLOB_BYTES, AckedEvent, ActStep, SessionUnavailable, Workload, child_of, plan

SESSION = "drill"
STREAMS = (session_stream(SESSION), inbox_stream(SESSION), session_stream(child_of(SESSION)), FLEET)


class Bench:
    """A store in memory, with a clock that goes on at every acknowledgment."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_767_225_600 * SECOND)
        engine = MemoryEngine(now=self.clock.now, new_id=SeededIds(1, self.clock.now).make, lease=SECOND // 2)
        self.store = JournalStore(engine, inline=True, salt=make_seeded_salts(1))
        self.told: list[AckedEvent] = []
        self.acknowledgments = 0

    def acknowledged(self, tolds: Sequence[AckedEvent]) -> None:
        self.told += tolds
        self.acknowledgments += 1
        self.clock.advance(SECOND)

    async def run(self, worker: str = "worker", crash: Crash | None = None) -> Session:
        store = CrashingStore(self.store, crash)
        return await Workload(store, self.clock, worker, SESSION, self.acknowledged).run()

    async def events(self, stream: StreamId) -> Sequence[Stored]:
        return await self.store.read(stream)

    async def settled(self) -> Counter[str]:
        events = [stored.event for stream in STREAMS for stored in await self.events(stream)]
        calls = Counter(event.call for event in events if isinstance(event, CallSettled))
        return calls + Counter(event.request for event in events if isinstance(event, RequestSettled))


@pytest.fixture
def bench() -> Bench:
    return Bench()


BY_OTHERS = {
    *("request_refused", "decision_asked", "decision_made", "halt_requested", "halt_lifted"),
    *("decision_withdrawn", "approval_given", "hold_made", "hold_released", "fleet_policy_adopted", "store_accepted"),
    "prices_changed",
    *("person_signed_on", "person_signed_off", "sign_on_refused"),
    *("rule_made", "rule_ended", "tool_pinned"),
    *("session_resumed", "turn_started", "message_added", "context_cut", "turn_ended"),
    *("hot_state_seen", "turn_skipped", "guardrail_triggered", "sensor_changed", "attending_failed", "agent_switched"),
    *(event.KIND for event in (*get_args(ArtifactEvent), *get_args(TriggerEvent), *get_args(ChannelEvent))),
    *(
        "phase_entered",
        "context_given",
        "files_given",
        "history_given",
        "document_read",
        "judges_chosen",
        "message_routed",
    ),
}
"""What only the guard and the loop write, and people through them: the plan has no tool, model or person."""


async def test_the_plan_brings_about_every_kind_of_event_but_those_of_the_guard_and_the_loop(bench: Bench) -> None:
    state = await bench.run()
    assert (state.state, state.terminal_reason) == ("COMPLETED", "completed")
    assert {event.kind for event, _ in bench.told} == set(EVENTS_BY_KIND) - BY_OTHERS
    assert 70 <= len(bench.told) <= 100
    assert (await verify_store(bench.store)).ok


async def test_every_event_is_acknowledged_once_with_the_state_that_it_leads_to(bench: Bench) -> None:
    await bench.run()
    for stream in STREAMS:
        own_acknowledged = [(stored, state) for stored, state in bench.told if stored.stream == stream]
        events = await bench.events(stream)
        assert [(stored.seq, stored.hash) for stored, _ in own_acknowledged] == [
            (event.seq, event.hash) for event in events
        ]
        assert [state for _, state in own_acknowledged] == [
            replay(events[:number]) for number in range(1, len(events) + 1)
        ]


async def test_the_plan_goes_the_same_way_every_time(bench: Bench) -> None:
    other = Bench()
    await bench.run()
    await other.run()
    assert [event.hash for event, _ in bench.told] == [event.hash for event, _ in other.told]


async def test_money_is_settled_in_every_way_there_is(bench: Bench) -> None:
    await bench.run()
    child = replay(await bench.events(session_stream(child_of(SESSION))))
    parent = replay(await bench.events(session_stream(SESSION)))
    assert (child.overrun, child.spent.usd) == (True, usd_to_micros("0.15") + usd_to_micros("0.004") + 1)
    assert (parent.overrun, parent.cost_cap_reached) == (False, True)
    refused = f"{SESSION}/closing/too-dear"
    planned = [spend.id for step in plan(SESSION) if isinstance(step, ActStep) for spend in step.together]
    assert await bench.settled() == Counter(planned) - Counter([refused])


async def test_something_too_large_for_a_body_is_kept_as_a_blob(bench: Bench) -> None:
    await bench.run()
    [blob] = [event.blob for event in await bench.events(inbox_stream(SESSION)) if event.blob]
    assert len(await bench.store.get(blob)) == BLOB_BYTES > BLOB_THRESHOLD


async def test_a_successor_resumes_from_wherever_its_predecessor_died() -> None:
    whole = Bench()
    await whole.run()
    expected = await whole.settled()
    for number in range(1, len({event.key for event, _ in whole.told}) + 1):
        bench = Bench()
        with pytest.raises(Crashed):
            await bench.run(crash=Crash(number, "after"))
        bench.clock.advance(SECOND)
        state = await bench.run("successor")
        assert (state.state, state.in_flight) == ("COMPLETED", {}), number
        assert await bench.settled() == expected, number
        assert (await verify_store(bench.store)).findings == (), number


async def test_a_session_that_has_ended_is_not_touched_again(bench: Bench) -> None:
    await bench.run()
    before = bench.acknowledgments
    await bench.run("successor")
    assert bench.acknowledgments == before


async def test_a_session_that_somebody_else_works_on_is_left_to_them(bench: Bench) -> None:
    with pytest.raises(Crashed):
        await bench.run(crash=Crash(4, "after"))
    await bench.store.beat(WorkerId("worker"))
    with pytest.raises(SessionUnavailable, match=f"Cannot claim session {SESSION}: another worker owns it"):
        await bench.run("successor")


async def test_one_worker_can_walk_many_sessions_at_once(bench: Bench) -> None:
    claimed: dict[str, Lease] = {}
    names = [f"session-{number}" for number in range(5)]
    walks = (Workload(bench.store, bench.clock, "worker", name, claimed=claimed).run() for name in names)
    states = await asyncio.gather(*walks)
    assert [(state.session, state.state) for state in states] == [(name, "COMPLETED") for name in names]
    assert (await verify_store(bench.store)).ok
