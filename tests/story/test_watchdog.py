"""A running session without activity is paused, then halted; one that works, sleeps or gets a message is not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import (
    CallSettled,
    CallStarted,
    GuardrailTriggered,
    RequestStarted,
    SessionEnded,
    SessionParked,
    SessionStarted,
)
from halter.core.ids import Digest, WorkerId, session_stream
from halter.core.messages import Text
from halter.core.money import Caps, Spender, make_legs
from halter.core.ports import Draft, Lease, Query, Store, Write, offload_body
from halter.core.rows import HoldRow, SessionRow
from halter.dispatch.dispatcher import AttendLease, RunningSessions
from halter.dispatch.heartbeat import renew_leases
from halter.dispatch.idle import IdleLimits, has_pause_expired, is_idle_too_long
from halter.guard.ledger import ActualResult
from halter.guard.request import MODEL_REQUEST_TIMEOUT
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.state.receipt import make_receipt
from halter.state.session import InFlight
from halter.testing.fakes import HoldTaken, StoreProxy, hold
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet, moment
from tests.story.dispatching import dispatcher
from tests.story.tasks import Office, paper, watch
from tests.story.test_autonomy import DESK, PRICES, sleep

pytestmark = pytest.mark.both_dispatchers

IDLE = 5 * MINUTE


def allow_time(_: str, flight: InFlight) -> int:
    return MINUTE if flight.is_call else MODEL_REQUEST_TIMEOUT


async def run_process(world: World, attend: AttendLease, worker: str = "up", idle_halt: int = IDLE) -> None:
    """Run the sessions of an agent with a watchdog, as one process does."""
    store: Store = world.store.patient(world.clock)
    async with renew_leases(store, world.clock, WorkerId(worker), world.lease - SECOND):
        sessions = RunningSessions(store, world.clock, WorkerId(worker), attend)
        sessions.idle_limits = IdleLimits(lambda _: idle_halt, allow_time)
        await dispatcher(world, sessions, ("desk",)).run()


async def begin(world: World, session: str = "desk-1") -> None:
    event = SessionStarted(session=session, agent="desk", kind="autonomous", started_by="ada")
    await world.store.commit(lifecycle.start_session(event))


async def read_session_row(world: World, session: str = "desk-1") -> SessionRow:
    (session_row,) = await world.journal.ask(Query("session", SessionRow, {"session": session}))
    return session_row


async def list_watchdog_events(world: World, session: str = "desk-1") -> list[tuple[str, str]]:
    """List the events that the watchdog recorded, with their times."""
    events = await world.events(session_stream(session))
    kinds = (GuardrailTriggered, SessionParked, SessionEnded)
    return [(stored.kind, moment(stored.at)) for stored in events if isinstance(stored.event, kinds)]


class Hangs:
    """Takes a session up, and then waits for what never comes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.attended: list[str] = []
        self.stopped = 0

    async def __call__(self, lease: Lease, _: SessionRow) -> None:
        self.attended.append(moment(self.world.now))
        session_row = await read_session_row(self.world, lease.session)
        if session_row.state != "RUNNING":
            key = f"{lease.session}/{lease.generation}/woken"
            await self.world.store.commit(lifecycle.wake_session(lease, key, "message", session_row.inbox_head))
        try:
            await self.run_first(lease)
            await asyncio.Event().wait()
        finally:
            self.stopped += 1

    async def run_first(self, lease: Lease) -> None:
        """Do something before it hangs."""


async def test_a_session_that_hangs_is_paused_and_then_halted_with_a_receipt(world: World) -> None:
    hangs = Hangs(world)
    await begin(world)
    world.spawn(run_process(world, hangs))
    await world.advance(6 * MINUTE)
    paused = await read_session_row(world)
    assert (paused.state, paused.owner, hangs.stopped) == ("PAUSED", "", 1)
    await world.advance(6 * MINUTE)
    session_row = await read_session_row(world)
    assert (session_row.state, session_row.terminal_reason) == ("HALTED", "idle_timeout")
    assert await list_watchdog_events(world) == [
        ("guardrail_triggered", "00:05:00"),
        ("session_parked", "00:05:00"),
        ("session_ended", "00:10:00"),
    ]
    assert hangs.attended == ["00:00:00"]
    receipt = make_receipt(await world.events(session_stream("desk-1")))
    assert (receipt.state, receipt.terminal_reason) == ("HALTED", "idle_timeout")
    assert [line.guardrail for line in receipt.guardrails] == ["idle_halt"]


async def test_a_session_whose_limits_cannot_be_read_is_reported_and_the_others_are_watched(world: World) -> None:
    problems: list[tuple[str, str]] = []

    def read_limit(agent: str) -> int:
        return {"desk": IDLE}[agent]

    async def run() -> None:
        store: Store = world.store.patient(world.clock)
        async with renew_leases(store, world.clock, WorkerId("up"), world.lease - SECOND):
            sessions = RunningSessions(store, world.clock, WorkerId("up"), Hangs(world))
            sessions.idle_limits = IdleLimits(read_limit, allow_time)
            sessions.on_watch_failed = lambda agent, error: problems.append((agent, repr(error)))
            await dispatcher(world, sessions, ("desk", "clerk")).run()

    event = SessionStarted(session="clerk-1", agent="clerk", kind="autonomous", started_by="ada")
    await world.store.commit(lifecycle.start_session(event))
    await begin(world)
    running = world.spawn(run())
    await world.advance(6 * MINUTE)
    assert not running.done()
    assert set(problems) == {("clerk", "KeyError('clerk')")}
    assert [(await read_session_row(world, name)).state for name in ("desk-1", "clerk-1")] == ["PAUSED", "RUNNING"]


async def test_both_words_of_a_pause_are_one_commit(world: World) -> None:
    await begin(world)
    world.spawn(run_process(world, Hangs(world)))
    await world.advance(6 * MINUTE)
    *_, guardrail, event = await world.events(session_stream("desk-1"))
    assert (guardrail.kind, event.kind) == ("guardrail_triggered", "session_parked")
    assert guardrail.key == event.key


async def test_a_message_to_a_paused_session_resumes_it(world: World) -> None:
    hangs = Hangs(world)
    await begin(world)
    world.spawn(run_process(world, hangs))
    await world.advance(7 * MINUTE)
    await world.send_message("desk-1", "Go on, please.")
    await world.advance(SECOND)
    assert (await read_session_row(world)).state == "RUNNING"
    assert hangs.attended == ["00:00:00", "00:07:00"]
    # It has all of its time again.
    await world.advance(4 * MINUTE)
    assert (await read_session_row(world)).state == "RUNNING"


async def test_another_process_halts_what_a_dead_one_had_paused(world: World) -> None:
    hangs = Hangs(world)
    await begin(world)
    first = world.spawn(run_process(world, hangs, "first"))
    await world.advance(6 * MINUTE)
    first.cancel()
    await world.advance(HOUR)
    world.spawn(run_process(world, hangs, "second"))
    await world.advance(SECOND)
    assert (await read_session_row(world)).terminal_reason == "idle_timeout"
    assert len(hangs.attended) == 1


@CALM
async def test_no_time_at_all_means_never(world: World) -> None:
    await begin(world)
    world.spawn(run_process(world, Hangs(world), idle_halt=0))
    await world.advance(24 * HOUR)
    assert (await read_session_row(world)).state == "RUNNING"


class Asks(Hangs):
    """Starts an effect that is never settled."""

    def __init__(self, world: World, event: CallStarted | RequestStarted) -> None:
        super().__init__(world)
        self.event = event

    async def run_first(self, lease: Lease) -> None:
        write = Write(session_stream(lease.session), "begun", lambda _: [Draft(self.event)], lease=lease)
        await self.world.store.commit(write)


@pytest.mark.parametrize(
    ("event", "paused_at"),
    [
        (CallStarted(call="c", tool="look"), "00:05:00"),
        (RequestStarted(request="r", model="a:b", purpose="turn"), "00:11:00"),
    ],
)
async def test_work_within_its_own_timeout_is_waited_for(
    world: World, event: CallStarted | RequestStarted, paused_at: str
) -> None:
    await begin(world)
    world.spawn(run_process(world, Asks(world, event)))
    await world.advance(12 * MINUTE)
    assert (await list_watchdog_events(world))[0] == ("guardrail_triggered", paused_at)


class Holds(Hangs):
    """Holds money for a call, and settles it when it is stopped, as whatever acts does."""

    settles = True

    async def run_first(self, lease: Lease) -> None:
        held = make_legs(Caps(), Spender(lease.session, "desk"), self.world.now, usd=1000)
        answer = await hold(self.world.ledger, lease, CallStarted(call="c", tool="look", legs=held), b"")
        assert isinstance(answer, HoldTaken)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.settles:
                await asyncio.shield(self.world.ledger.settle(lease, answer.flight, ActualResult("cancelled", usd=0)))
            raise


class Forgets(Holds):
    """Holds money, and does not settle it."""

    settles = False


@pytest.mark.parametrize(("attend", "outcome"), [(Holds, "cancelled"), (Forgets, "unknown")])
async def test_no_hold_keeps_a_session_from_its_end_and_none_is_freed_unsettled(
    world: World, attend: type[Holds], outcome: str
) -> None:
    await begin(world)
    world.spawn(run_process(world, attend(world)))
    await world.advance(15 * MINUTE)
    assert (await read_session_row(world)).state == "HALTED"
    events = [stored.event for stored in await world.events(session_stream("desk-1"))]
    assert [event.outcome for event in events if isinstance(event, CallSettled)] == [outcome]
    assert not await world.journal.ask(Query("holds_of", HoldRow, {"session": "desk-1"}))


class Rests(Hangs):
    """Rests in its owner's hands, as a session with sensors does."""

    async def run_first(self, lease: Lease) -> None:
        event = SessionParked(state="SLEEPING", wake_at=self.world.now + 24 * HOUR, resident=True)
        await self.world.store.commit(lifecycle.park_session(lease, "parked", event))


class Busy(Hangs):
    """Writes something every four minutes."""

    async def run_first(self, lease: Lease) -> None:
        for number in range(20):
            event = GuardrailTriggered(guardrail="active_hours", sentence="A sign of life.")
            drafts: Sequence[Draft] = [Draft(event)]
            write = Write(session_stream(lease.session), f"busy/{number}", lambda _, said=drafts: said, lease=lease)
            await self.world.store.commit(write)
            await self.world.clock.sleep(4 * MINUTE)


@pytest.mark.parametrize(("attend", "state"), [(Rests, "SLEEPING"), (Busy, "RUNNING")])
async def test_a_session_that_sleeps_or_works_is_not_interrupted(world: World, attend: type[Hangs], state: str) -> None:
    does = attend(world)
    await begin(world)
    world.spawn(run_process(world, does))
    await world.advance(HOUR)
    assert ((await read_session_row(world)).state, does.stopped) == (state, 0)


async def test_one_that_hangs_is_in_nobodys_way(world: World) -> None:
    class OnlyOne(Hangs):
        async def run_first(self, lease: Lease) -> None:
            if lease.session != "desk-1":
                await self.world.store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))
                await asyncio.sleep(0)

    for number in (1, 2, 3):
        await begin(world, f"desk-{number}")
    world.spawn(run_process(world, OnlyOne(world)))
    await world.advance(20 * MINUTE)
    assert [(await read_session_row(world, f"desk-{number}")).state for number in (1, 2, 3)] == [
        "HALTED",
        "COMPLETED",
        "COMPLETED",
    ]


class Stalls(StoreProxy):
    """A store whose blobs stop arriving at some moment: its connection is lost without an error."""

    stalled = False

    async def get(self, digest: Digest) -> bytes:
        if self.stalled:
            await asyncio.Event().wait()
        return await super().get(digest)


class Stalling(Fleet):
    """A process on such a store."""

    def __init__(self, world: World, home: Path) -> None:
        super().__init__(world, home)
        self.disk = Stalls(world.store)

    @property
    def app(self) -> Runtime:
        return replace(super().app, store=cast("Any", self.disk))


@pytest.mark.parametrize("more", ["model: scripted\nscript: script.yaml\n", DESK], ids=["row", "resident"])
async def test_an_agent_that_hangs_in_the_middle_of_a_wake_is_paused_and_halted(
    world: World, tmp_path: Path, more: str
) -> None:
    fleet = Stalling(world, tmp_path)
    fleet.start(fleet.agent("desk", more, PRICES, script_yaml=sleep("24h") * 3))
    await world.advance(MINUTE)
    assert (await read_session_row(world)).state == "SLEEPING"
    fleet.disk.stalled = True
    text = await offload_body(world.store, b"a long story, " * 3000)
    await world.store.commit(lifecycle.post_wake("desk-1", "said", lifecycle.make_message_event("ada"), *text))
    await world.advance(4 * MINUTE)
    assert (await read_session_row(world)).state == "RUNNING"
    await world.advance(3 * MINUTE)
    assert (await read_session_row(world)).state == "PAUSED"
    await world.advance(6 * MINUTE)
    session_row = await read_session_row(world)
    assert (session_row.state, session_row.terminal_reason) == ("HALTED", "idle_timeout")
    assert (
        "desk-1 has ended (HALTED: idle_timeout). Run `halter on desk` to start the next session."
        in dict(fleet.told)["desk"]
    )


async def test_an_agent_that_hung_resumes_where_it_stopped_when_somebody_writes(world: World, tmp_path: Path) -> None:
    fleet = Stalling(world, tmp_path)
    more = "model: scripted\nscript: script.yaml\n"
    fleet.start(fleet.agent("desk", more, script_yaml=sleep("24h") * 3))
    await world.advance(MINUTE)
    fleet.disk.stalled = True
    await world.store.commit(
        lifecycle.post_wake(
            "desk-1",
            "said",
            lifecycle.make_message_event("ada"),
            *await offload_body(world.store, b"a long story, " * 3000),
        )
    )
    await world.advance(7 * MINUTE)
    assert (await read_session_row(world)).state == "PAUSED"
    fleet.disk.stalled = False
    await world.send_message("desk-1", "The disk is back.")
    await world.advance(SECOND)
    assert (await read_session_row(world)).state == "SLEEPING"
    output = "".join(
        part.text for message in fleet.prompts("desk")[-1].messages for part in message.parts if isinstance(part, Text)
    )
    assert "a long story" in output
    assert "The disk is back." in output


async def test_requests_and_tools_have_the_time_that_is_theirs(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("desk", DESK, PRICES, script_yaml=sleep("24h")))
    await world.advance(SECOND)
    assert fleet.up is not None
    living = fleet.up.agents["desk"]
    flights = [
        InFlight("f", name, "turn", (), 0, is_call=name != "m") for name in ("m", "ponder", "price", "run_skill")
    ]
    assert [living.find_time_limit(flight) for flight in flights] == [
        MODEL_REQUEST_TIMEOUT,
        10 * MINUTE,
        MINUTE,
        MINUTE,
    ]
    assert living.context.definition.tasks.idle_halt == IDLE


@pytest.mark.parametrize(("still", "idle_halt", "is_idle"), [(299, 300, False), (300, 300, True), (10**9, 0, False)])
def test_a_session_idles_from_the_very_moment_on(still: int, idle_halt: int, is_idle: object) -> None:
    assert is_idle_too_long(0, idle_halt, still) is is_idle


def test_a_session_that_was_left_to_a_person_is_never_halted_for_being_still() -> None:
    assert not has_pause_expired(SessionRow("s", state="PAUSED", wake_at=1), [], 5)


async def test_what_somebody_wrote_while_no_process_ran_counts_however_late_it_is_found(world: World) -> None:
    does = Forgets(world)
    await begin(world)
    first = world.spawn(run_process(world, does, "first"))
    await world.advance(6 * MINUTE)
    first.cancel()
    await world.send_message("desk-1", "Go on, please.")
    await world.advance(HOUR)
    world.spawn(run_process(world, Hangs(world), "second"))
    await world.advance(SECOND)
    assert (await read_session_row(world)).state == "RUNNING"
    assert [flight.id for flight in (await world.session("desk-1")).in_flight.values()] == ["c"]


class StallingOffice(Office):
    """An agent that works on documents, on such a store."""

    def __init__(self, world: World, home: Path) -> None:
        super().__init__(world, home)
        self.disk = Stalls(world.store)

    @property
    def app(self) -> Runtime:
        return replace(super().app, store=cast("Any", self.disk))


async def test_a_document_over_which_sessions_hang_is_left_to_a_person(world: World, tmp_path: Path) -> None:
    office = StallingOffice(world, tmp_path)
    office.reviewer(watch().replace("A paper has come in.", "A paper has come in. " * 3000))
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    office.disk.stalled = True
    office.drop("a.txt", paper(1))
    await world.advance(2 * HOUR)
    assert await office.states() == {"HALTED": 3}
    (item,) = await office.items()
    assert item.quarantined_at is not None
