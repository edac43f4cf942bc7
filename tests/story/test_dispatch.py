"""Sessions that run in one process beside others: claimed when due, tried again when they break down, left alone."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import AttendingFailed, SessionParked, SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.ports import Lease, Query, Store, Ticket
from halter.core.rows import SessionRow
from halter.core.vocabulary import SessionKind
from halter.dispatch.dispatcher import (
    CLAIMED_AT_ONCE,
    AttendLease,
    DistributedDispatcher,
    RunningSessions,
    quarantine_session,
)
from halter.dispatch.heartbeat import renew_leases
from halter.runtime.switches import turn_on
from halter.runtime.worker import MAX_TAKEOVERS
from halter.state import lifecycle
from halter.testing.fakes import LocalTicketQueue, SharedTickets
from halter.testing.world import HEARTBEAT, World
from tests.story.autonomous import Fleet, moment
from tests.story.dispatching import dispatcher

pytestmark = pytest.mark.both_dispatchers


async def row(world: World, session: str) -> SessionRow:
    (session_row,) = await world.journal.ask(Query("session", SessionRow, {"session": session}))
    return session_row


async def begin(world: World, session: str, agent: str = "desk", kind: SessionKind = "autonomous") -> None:
    event = SessionStarted(session=session, agent=agent, kind=kind, started_by="ada")
    await world.store.commit(lifecycle.start_session(event))


class Sleeper:
    """Attends as simply as can be: notes that it did, takes its time, and lets the session sleep on."""

    def __init__(self, world: World, sleep: int = 10 * MINUTE, takes: int = 0) -> None:
        self.world = world
        self.sleep = sleep
        self.takes = takes
        self.attended: list[tuple[str, str]] = []
        self.inside: Counter[str] = Counter()
        self.most_inside: Counter[str] = Counter()

    async def __call__(self, lease: Lease, _: SessionRow) -> None:
        self.attended.append((lease.session, moment(self.world.now)))
        for name in (lease.session, "all"):
            self.inside[name] += 1
            self.most_inside[name] = max(self.most_inside[name], self.inside[name])
        try:
            await asyncio.sleep(self.takes / SECOND)
            await self.parks(lease)
        finally:
            for name in (lease.session, "all"):
                self.inside[name] -= 1

    async def parks(self, lease: Lease) -> None:
        store, session_row = self.world.store, await row(self.world, lease.session)
        key = f"{lease.session}/{lease.generation}"
        if session_row.state != "RUNNING":
            await store.commit(lifecycle.wake_session(lease, f"{key}/woken", "timer", session_row.inbox_head))
        event = SessionParked(state="SLEEPING", inbox_seen=session_row.inbox_head, wake_at=self.world.now + self.sleep)
        await store.commit(lifecycle.park_session(lease, f"{key}/parked", event))


async def works(
    world: World, attend: AttendLease, worker: str = "up", agents: Sequence[str] = ("desk",), *, together: int = 200
) -> None:
    """Be a process that runs the sessions of some agents."""
    store: Store = world.store.patient(world.clock)
    async with renew_leases(store, world.clock, WorkerId(worker), HEARTBEAT):
        sessions = RunningSessions(store, world.clock, WorkerId(worker), attend)
        await dispatcher(world, sessions, tuple(agents), together).run()


async def test_what_was_due_while_nobody_ran_is_attended_at_the_start(world: World) -> None:
    attends = Sleeper(world)
    await begin(world, "desk-1")
    first = world.spawn(works(world, attends, "first"))
    await world.advance(MINUTE)
    first.cancel()
    await world.advance(5 * HOUR)
    assert len(attends.attended) == 1
    world.spawn(works(world, attends, "second"))
    await world.advance(SECOND)
    assert attends.attended == [("desk-1", "00:00:00"), ("desk-1", "05:01:00")]


async def test_a_sleeper_is_attended_when_its_time_has_come_and_not_before(world: World) -> None:
    attends = Sleeper(world, sleep=37 * SECOND)
    await begin(world, "desk-1")
    world.spawn(works(world, attends))
    await world.advance(2 * MINUTE)
    assert attends.attended == [("desk-1", at) for at in ("00:00:00", "00:00:37", "00:01:14", "00:01:51")]


@pytest.mark.parametrize("seed", range(8))
def test_processes_on_one_store_never_run_one_session_at_the_same_time(seed: int) -> None:
    async def story(world: World) -> Sleeper:
        attends = Sleeper(world, sleep=3 * SECOND, takes=SECOND)
        for number in range(10):
            await begin(world, f"desk-{number}")
        for name in ("first", "second", "third"):
            world.spawn(works(world, attends, name))
        await world.advance(MINUTE)
        return attends

    with World(seed) as world:
        attends = world.run(story(world))
    del attends.most_inside["all"]
    assert set(attends.most_inside.values()) == {1}
    assert len(attends.attended) == 10 * 16


class Breaks(Sleeper):
    """Breaks down over one session, as often as it is told to."""

    def __init__(self, world: World, session: str, times: int) -> None:
        super().__init__(world)
        self.session = session
        self.times = times
        self.tried: list[str] = []

    async def __call__(self, lease: Lease, session_row: SessionRow) -> None:
        if lease.session == self.session:
            self.tried.append(moment(self.world.now))
            if len(self.tried) <= self.times:
                raise ValueError(f"number {len(self.tried)} of hunter2")
        await super().__call__(lease, session_row)


async def failures(world: World, session: str) -> list[AttendingFailed]:
    events = [stored.event for stored in await world.events(session_stream(session))]
    return [event for event in events if isinstance(event, AttendingFailed)]


async def test_a_breakdown_is_tried_again_more_slowly_each_time_and_then_left_to_a_person(world: World) -> None:
    attends = Breaks(world, "desk-1", times=5)
    await begin(world, "desk-1")
    world.spawn(works(world, attends))
    await world.advance(HOUR)
    assert attends.tried == ["00:00:00", "00:00:01", "00:00:03", "00:00:07", "00:00:15"]
    attending_faileds = await failures(world, "desk-1")
    assert [event.failures for event in attending_faileds] == [1, 2, 3, 4, 5]
    assert [event.quarantined for event in attending_faileds] == [False] * 4 + [True]
    assert attending_faileds[0].error == "ValueError: number 1 of hunter2"
    rests = await row(world, "desk-1")
    assert (rests.state, rests.owner, rests.due_at) == ("PAUSED", "", None)


async def test_a_message_wakes_what_was_left_to_a_person(world: World) -> None:
    attends = Breaks(world, "desk-1", times=5)
    await begin(world, "desk-1")
    world.spawn(works(world, attends))
    await world.advance(20 * MINUTE)
    await world.send_message("desk-1", "I have mended it.", "ada")
    await world.advance(SECOND)
    assert attends.tried[5:] == ["00:20:00"]
    assert (await row(world, "desk-1")).state == "SLEEPING"


async def test_one_that_breaks_down_again_after_a_persons_word_is_tried_as_often_as_before(world: World) -> None:
    attends = Breaks(world, "desk-1", times=10)
    await begin(world, "desk-1")
    world.spawn(works(world, attends))
    await world.advance(MINUTE)
    await world.send_message("desk-1", "Try again.", "ada")
    await world.advance(MINUTE)
    assert attends.tried[5:] == ["00:01:00", "00:01:01", "00:01:03", "00:01:07", "00:01:15"]
    assert (await row(world, "desk-1")).state == "PAUSED"


async def test_a_breakdown_that_is_survived_is_forgotten(world: World) -> None:
    attends = Breaks(world, "desk-1", times=4)
    await begin(world, "desk-1")
    world.spawn(works(world, attends))
    await world.advance(MINUTE)
    assert len(attends.tried) == 5
    attends.tried.clear()
    await world.advance(10 * MINUTE)
    assert attends.tried == ["00:10:15", "00:10:16", "00:10:18", "00:10:22", "00:10:30"]


async def test_a_breakdown_over_one_session_disturbs_no_other(world: World) -> None:
    attends = Breaks(world, "desk-1", times=1000)
    attends.sleep = MINUTE
    for number in (1, 2):
        await begin(world, f"desk-{number}")
    world.spawn(works(world, attends))
    await world.advance(5 * MINUTE)
    assert [at for session, at in attends.attended if session == "desk-2"] == [f"00:0{n}:00" for n in range(6)]


async def test_no_more_sessions_are_awake_at_once_than_may_be(world: World) -> None:
    attends = Sleeper(world, takes=10 * SECOND)
    for number in range(12):
        await begin(world, f"desk-{number}")
    world.spawn(works(world, attends, together=5))
    await world.advance(MINUTE)
    assert attends.most_inside["all"] == 5
    assert Counter(at for _, at in attends.attended) == {"00:00:00": 5, "00:00:10": 5, "00:00:20": 2}


async def test_chats_tasks_and_sessions_of_other_agents_are_left_alone(world: World) -> None:
    attends = Sleeper(world)
    await begin(world, "desk-1")
    await begin(world, "other-1", "other")
    await begin(world, "chat", kind="chat")
    await begin(world, "task", kind="task")
    world.spawn(works(world, attends))
    await world.advance(HOUR)
    assert {session for session, _ in attends.attended} == {"desk-1"}
    for session in ("other-1", "chat", "task"):
        assert (await row(world, session)).generation == 0


async def test_what_is_under_way_when_a_process_stops_is_left_to_the_next_start_at_once(world: World) -> None:
    attends = Sleeper(world, takes=MINUTE)
    await begin(world, "desk-1")
    first = world.spawn(works(world, attends, "first"))
    await world.advance(10 * SECOND)
    first.cancel()
    await world.advance(SECOND)
    assert (first.done(), attends.inside["desk-1"]) == (True, 0)
    world.spawn(works(world, attends, "second"))
    await world.advance(SECOND)
    assert attends.attended[1:] == [("desk-1", "00:00:11")]


async def test_a_session_that_is_taken_again_while_its_last_task_ends_is_stopped_with_the_process(world: World) -> None:
    class Lingers(Sleeper):
        async def parks(self, lease: Lease) -> None:
            await super().parks(lease)
            await asyncio.sleep(1)

    attends = Lingers(world, takes=5 * SECOND)
    await begin(world, "desk-1")
    working = world.spawn(works(world, attends))
    await world.advance(5 * SECOND)
    await world.send_message("desk-1", "Hello.")
    await world.advance(3 * SECOND)
    assert attends.inside["desk-1"] == 1
    working.cancel()
    await world.advance(SECOND)
    assert (len(attends.attended), attends.inside["desk-1"]) == (2, 0)


LIVES = """
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - {name: ticker, type: poll, interval: 5, jitter: 0, source: {tool: price}}
"""

READS = """
from halter import tool

READ = []

@tool(level="SAFE", effect="read")
async def price() -> str:
    "Tell the price."
    READ.append(1)
    return str(len(READ))
"""

SLOW = "- {text: I am thinking., takes: 1h}\n" * 20
HOURLY = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]\n" * 9


def reads(fleet: Fleet) -> int:
    return sum(name == "autonomy:sensor_updated" for _, name, _ in fleet.pulses)


async def taken_away(world: World, session: str) -> Lease:
    """Do as if the process had stood still for so long that another one took its session."""
    await world.journal.leave(WorkerId((await row(world, session)).owner))
    (lease,) = await world.journal.claim(WorkerId("another"), 1, SessionId(session))

    async def beats() -> None:
        while True:
            await world.journal.beat(lease.worker)
            await world.clock.sleep(5 * SECOND)

    world.spawn(beats())
    return lease


async def test_a_lost_lease_ends_the_resident_and_its_sensors(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", LIVES, READS, script_yaml=HOURLY))
    await world.advance(MINUTE)
    assert reads(fleet) >= 12
    await taken_away(world, "desk-1")
    await world.advance(HEARTBEAT + SECOND)
    read = reads(fleet)
    await world.advance(2 * HOUR)
    assert reads(fleet) == read
    assert [moment(event.at) for event in await fleet.events("desk-1") if event.kind == "turn_started"] == ["00:00:00"]


async def test_one_that_the_other_process_lets_go_of_lives_here_again(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", LIVES, READS, script_yaml=HOURLY))
    await world.advance(MINUTE)
    lease = await taken_away(world, "desk-1")
    await world.advance(MINUTE)
    read = reads(fleet)
    await world.journal.commit(lifecycle.wake_session(lease, "w", None, 0))
    event = SessionParked(state="SLEEPING", inbox_seen=0, wake_at=world.now + MINUTE)
    await world.journal.commit(lifecycle.park_session(lease, "p", event))
    await world.advance(2 * MINUTE)
    assert reads(fleet) > read
    assert [moment(stored.at) for stored in await fleet.events("desk-1") if stored.kind == "turn_started"] == [
        "00:00:00",
        "00:03:00",
    ]


async def test_a_resident_that_was_asleep_is_found_asleep_by_the_next_start(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", LIVES, READS, script_yaml=HOURLY)
    first = fleet.start(folder)
    await world.advance(MINUTE)
    first.cancel()
    await world.advance(MINUTE)
    read = reads(fleet)
    assert (await row(world, "desk-1")).state == "SLEEPING"
    fleet.start(folder)
    await world.advance(50 * MINUTE)
    assert reads(fleet) > read
    await world.advance(20 * MINUTE)
    turns = [moment(event.at) for event in await fleet.events("desk-1") if event.kind == "turn_started"]
    assert turns == ["00:00:00", "01:00:00"]


async def test_switching_an_agent_on_lets_go_on_what_was_left_to_a_person(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", "model: scripted\nscript: script.yaml\n", script_yaml=HOURLY))
    await world.advance(MINUTE)
    (lease,) = await world.journal.claim(WorkerId("another"), 1, SessionId("desk-1"))
    await quarantine_session(world.journal, lease, 5, "ValueError: no", world.now)
    await world.advance(2 * HOUR)
    assert (await row(world, "desk-1")).state == "PAUSED"
    await turn_on(fleet.app, "desk")
    await world.advance(SECOND)
    session_row = await row(world, "desk-1")
    assert (session_row.state, moment(session_row.wake_at or 0)) == ("SLEEPING", "03:01:00")


async def test_processes_that_die_over_a_session_again_and_again_are_noticed(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", "model: scripted\nscript: script.yaml\n", script_yaml=SLOW)
    for _ in range(MAX_TAKEOVERS + 3):
        fleet.start(folder)
        await world.advance(16 * SECOND)
        await world.restart()
    session_row = await row(world, "desk-1")
    assert session_row.state == "PAUSED"
    (failed,) = await failures(world, "desk-1")
    assert (failed.quarantined, failed.failures) == (True, MAX_TAKEOVERS)
    assert failed.error == f"{MAX_TAKEOVERS} processes that ran it died in a row."


class Late:
    """A queue that hands a ticket to somebody who was just told to end."""

    def __init__(self, sessions: RunningSessions) -> None:
        self._sessions = sessions
        self.tickets: list[Ticket] = []
        self._came = asyncio.Event()

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        self.tickets += tickets
        self._came.set()

    async def serve(self, serve: Callable[[Ticket], Awaitable[None]], concurrency: int) -> None:
        await self._came.wait()
        self._sessions.closing.set()
        await serve(self.tickets[0])


async def test_what_comes_to_a_worker_that_is_about_to_end_is_offered_to_others_at_once(world: World) -> None:
    attends = Sleeper(world, takes=MINUTE)
    await begin(world, "desk-1")
    await begin(world, "desk-2")
    sessions = RunningSessions(world.journal, world.clock, WorkerId("ends"), attends)
    sessions.remote_capacity = 1
    queue = Late(sessions)
    world.spawn(DistributedDispatcher(sessions, lambda: {"desk": None}, queue, 1).run())
    await world.advance(5 * SECOND)
    assert len(attends.attended) == 1
    assert (await world.journal.offer(10, {"desk": None}, queue.enqueue)).tickets == tuple(queue.tickets[:1])


class Noted:
    """A queue that only notes what is put in."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        self.tickets += tickets

    async def serve(self, serve: Callable[[Ticket], Awaitable[None]], concurrency: int) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("elsewhere", [0, 3])
async def test_a_worker_without_room_offers_what_is_due_to_those_that_have_some(world: World, elsewhere: int) -> None:
    for number in range(5):
        await begin(world, f"desk-{number}")
    sessions = RunningSessions(world.journal, world.clock, WorkerId("full"), Sleeper(world, takes=MINUTE))
    sessions.remote_capacity, queue = elsewhere, Noted()
    world.spawn(DistributedDispatcher(sessions, lambda: {"desk": None}, queue, 1).run())
    await world.advance(10 * SECOND)
    assert len(queue.tickets) == elsewhere
    assert not {ticket.session for ticket in queue.tickets} & {lease.session for lease in sessions.leases()}


async def test_room_elsewhere_is_offered_once_though_its_tickets_come_to_nothing(world: World) -> None:
    for number in range(5):
        await begin(world, f"desk-{number}")
    sessions = RunningSessions(world.journal, world.clock, WorkerId("full"), Sleeper(world, takes=MINUTE))
    sessions.remote_capacity, queue = 2, Noted()
    world.spawn(DistributedDispatcher(sessions, lambda: {"desk": None}, queue, 1).run())
    for _ in range(10):
        await world.advance(SECOND)
        for ticket in queue.tickets:
            await world.journal.claim(WorkerId("late"), 0, ticket)
    assert len(queue.tickets) == 2


async def test_few_tickets_wait_however_much_room_there_is_elsewhere(world: World) -> None:
    for number in range(3 * CLAIMED_AT_ONCE):
        await begin(world, f"desk-{number}")
    sessions = RunningSessions(world.journal, world.clock, WorkerId("full"), Sleeper(world, takes=MINUTE))
    sessions.remote_capacity, queue = 2 * CLAIMED_AT_ONCE, Noted()
    world.spawn(DistributedDispatcher(sessions, lambda: {"desk": None}, queue, 1).run())
    await world.advance(3 * SECOND)
    assert len(queue.tickets) == CLAIMED_AT_ONCE
    for ticket in queue.tickets[:5]:
        await world.journal.claim(WorkerId("there"), 1, ticket)
    await world.advance(SECOND)
    assert len(queue.tickets) == CLAIMED_AT_ONCE + 5


async def test_a_ticket_waits_until_there_is_room_for_its_session(world: World) -> None:
    attends = Sleeper(world, takes=10 * SECOND)
    for number in range(2):
        await begin(world, f"desk-{number}")
    tickets = SharedTickets()
    sessions = RunningSessions(world.journal, world.clock, WorkerId("full"), attends)
    sessions.remote_capacity, queue = 1, LocalTicketQueue(tickets, {"desk": "1"})
    world.spawn(DistributedDispatcher(sessions, lambda: {"desk": None}, queue, 1).run())
    await world.advance(25 * SECOND)
    assert (len(attends.attended), attends.most_inside["all"]) == (2, 1)


async def test_workers_that_look_at_the_same_moment_share_what_is_due(world: World) -> None:
    attends = {name: Sleeper(world, takes=MINUTE) for name in ("here", "there")}
    for number in range(4 * CLAIMED_AT_ONCE):
        await begin(world, f"desk-{number}")
    for name, attend in attends.items():
        sessions = RunningSessions(world.journal, world.clock, WorkerId(name), attend)
        world.spawn(DistributedDispatcher(sessions, lambda: {"desk": None}, Noted()).run())
    await world.advance(SECOND)
    assert sum(len(attend.attended) for attend in attends.values()) == 4 * CLAIMED_AT_ONCE
    assert min(len(attend.attended) for attend in attends.values()) >= CLAIMED_AT_ONCE


class SlowClaims:
    """A store whose claims take as long as they are made to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.go_on = asyncio.Event()

    async def claim(self, *asked: Any, **named: Any) -> Sequence[Lease]:
        await self.go_on.wait()
        return await self._store.claim(*asked, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_what_is_being_claimed_takes_up_room(world: World) -> None:
    for number in range(3):
        await begin(world, f"desk-{number}")
    store = SlowClaims(world.journal)
    sessions = RunningSessions(cast("Store", store), world.clock, WorkerId("one"), Sleeper(world, takes=MINUTE))
    claimed = asyncio.create_task(sessions.claim(2, {"desk": None}))
    await world.advance(SECOND)
    assert sessions.capacity(5) == 3
    fetched = asyncio.create_task(sessions.fetch(SessionId("desk-2")))
    await world.advance(SECOND)
    assert sessions.capacity(5) == 2
    store.go_on.set()
    await world.advance(SECOND)
    assert (await claimed, (await fetched) is not None) == (2, True)
    assert (sessions.capacity(5), sessions.count_running) == (2, 3)
    await sessions.stop()
