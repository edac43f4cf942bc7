"""Money stays exact when the process crashes at any commit: before it, after it, or with the answer lost."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TypeVar

import msgspec
import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import StoreUnavailable
from halter.core.events import CallSettled, CallStarted, SessionEnded, SessionParked, SessionStarted
from halter.core.ids import inbox_stream, session_stream
from halter.core.money import DOLLAR, BudgetRow, Cap, Caps, Spender, carve, make_legs
from halter.core.ports import Lease, Query, Stored, Write
from halter.core.rows import HoldRow, SessionRow
from halter.guard.ledger import ActualResult
from halter.journal.apply import WorkingSet
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.verify import verify_store
from halter.state.lifecycle import end_session, park_session, post_message, start_child, wake_session
from halter.state.session import InFlight, Session, fold
from halter.testing.fakes import CRASH_KINDS, Crash, HoldTaken, hold
from halter.testing.world import World, crash_everywhere

T = TypeVar("T")

CENT = DOLLAR // 100
LONG_ENOUGH = 10
FORGOTTEN = 8
CARVED = 30 * CENT
CAPS = Caps(session=Cap(1 * DOLLAR), agent=(Cap(3 * DOLLAR, "day"),), fleet=(Cap(5 * DOLLAR, "day"),))
CHILD_CAPS = Caps(session=Cap(CARVED), agent=CAPS.agent, fleet=CAPS.fleet)


@dataclass(frozen=True)
class Call:
    """The hold of a call and its true cost."""

    held: int
    cost: int


TURNS = {
    "parent": [[Call(20 * CENT, 5 * CENT)], [Call(10 * CENT, 10 * CENT)]],
    "other": [[Call(7 * CENT, 9 * CENT), Call(8 * CENT, 0)]],
    "child": [[Call(30 * CENT, 4 * CENT)]],
}
CALLS = {
    f"{session}/{turn}/{number}": call
    for session, turns in TURNS.items()
    for turn, calls in enumerate(turns, start=1)
    for number, call in enumerate(calls)
}


async def patiently(world: World, act: Callable[[], Awaitable[T]]) -> T:
    """Do the same again, with the same key, for as long as the store does not answer."""
    while True:
        try:
            return await act()
        except StoreUnavailable:
            await world.clock.sleep(SECOND)


class Household:
    """Three sessions that spend, park and end; one of them is carved out of another.

    What acts in the outside world is counted there, where no crash reaches.
    """

    def __init__(self) -> None:
        self.acted: defaultdict[World, Counter[str]] = defaultdict(Counter)

    async def program(self, world: World) -> None:
        for name in ("parent", "other"):
            await patiently(world, partial(world.start, name, agent="household"))
        world.work(partial(self.turn, world))
        await self.commit(world, post_message("other", "greeting", b"Good morning.", "person"))
        for _ in range(LONG_ENOUGH):
            await world.advance(MINUTE)
            if sum(isinstance(stored.event, SessionEnded) for stored in world.history) == len(TURNS):
                return
        pytest.fail("Some session cannot end.")

    async def commit(self, world: World, write: Write) -> int:
        return len((await patiently(world, lambda: world.store.commit(write))).events)

    async def turn(self, world: World, lease: Lease) -> None:
        """Resume the session at its current point, do the next work, and park or end."""
        session = await world.session(lease.session)
        await patiently(world, lambda: self.settle_in_doubt(world, lease, list(session.in_flight.values())))
        cause = None if session.state == "RUNNING" and session.head > 1 else "timer"
        inbox_count = len(await world.events(inbox_stream(lease.session)))
        await self.commit(world, wake_session(lease, f"{lease.session}/{lease.generation}/wake", cause, inbox_count))
        if lease.session == "parent":
            await self.delegate(world, lease)
        if await self.next_calls(world, lease):
            await self.rest(world, lease, inbox_count)
            return
        parent = "parent" if lease.session == "child" else ""
        if not await self.commit(world, end_session(lease, "COMPLETED", "completed", parent)):
            await self.rest(world, lease, inbox_count)

    async def settle_in_doubt(self, world: World, lease: Lease, flights: Sequence[InFlight]) -> None:
        await world.ledger.settle_in_doubt(lease, flights)

    async def delegate(self, world: World, lease: Lease) -> None:
        child = SessionStarted(
            session="child",
            agent="household",
            kind="task",
            started_by="parent",
            origin="agent",
            parent="parent",
            carved=carve("parent", CARVED, CAPS.session.max_cost_usd),
        )
        await self.commit(world, start_child(child, lease))

    async def next_calls(self, world: World, lease: Lease) -> bool:
        """Make the missing calls of the first turn that has some; return True if another turn follows."""
        events = await world.events(session_stream(lease.session))
        texts = self.list_started_calls(events)
        for turn, calls in enumerate(TURNS[lease.session], start=1):
            names = [f"{lease.session}/{turn}/{number}" for number in range(len(calls))]
            if not texts.issuperset(names):
                async with asyncio.TaskGroup() as together:
                    for name in names:
                        if name not in texts:
                            together.create_task(self.call(world, lease, name))
                return turn < len(TURNS[lease.session])
        return False

    def list_started_calls(self, events: Sequence[Stored]) -> set[str]:
        return {stored.event.call for stored in events if isinstance(stored.event, CallStarted)}

    async def call(self, world: World, lease: Lease, name: str) -> None:
        call, caps = CALLS[name], CHILD_CAPS if lease.session == "child" else CAPS
        amounts = make_legs(caps, Spender(lease.session, "household"), world.now, usd=call.held)
        outcome = await patiently(
            world, lambda: hold(world.ledger, lease, CallStarted(call=name, tool="spend", legs=amounts))
        )
        assert isinstance(outcome, HoldTaken)
        self.acted[world][name] += 1
        await world.clock.sleep(SECOND)
        await patiently(world, lambda: world.ledger.settle(lease, outcome.flight, ActualResult("ok", usd=call.cost)))

    async def rest(self, world: World, lease: Lease, inbox_count: int) -> None:
        """Rest for a minute; if the inbox has grown meanwhile, whatever it is can wait that long too."""
        while True:
            event = SessionParked(state="SLEEPING", inbox_seen=inbox_count, wake_at=world.now + MINUTE)
            if await self.commit(world, park_session(lease, f"{lease.session}/{lease.generation}/park", event)):
                return
            inbox_count = len(await world.events(inbox_stream(lease.session)))


async def check(world: World, acted: Counter[str]) -> None:
    await check_that_nothing_is_lost(world)
    await check_that_live_state_is_replayed_state(world)
    await check_the_money(world, check_that_nothing_happens_twice(world, acted))
    report = await verify_store(world.journal)
    assert report.findings == ()
    assert report.compared


async def check_that_nothing_is_lost(world: World) -> None:
    streams = {event.stream for event in world.history}
    values = {(event.stream, event.seq): event for stream in streams for event in await world.events(stream)}
    for acknowledged in world.acknowledged:
        assert values.get((acknowledged.stream, acknowledged.seq)) == acknowledged
    assert sorted(values) == sorted((event.stream, event.seq) for event in world.history)


async def check_that_live_state_is_replayed_state(world: World) -> None:
    for name in TURNS:
        live = Session()
        for event in world.history:
            if event.stream == session_stream(name):
                live = fold(live, event)
        replayed = await world.session(name)
        assert replayed == live
        row = (await world.journal.ask(Query("session", SessionRow, {"session": name})))[0]
        assert (row.state, row.ended_at, row.terminal_reason) == ("COMPLETED", replayed.ended_at, "completed")
        assert replayed.in_flight == {}


def check_that_nothing_happens_twice(world: World, acted: Counter[str]) -> dict[str, int]:
    """Check that each call was held and settled once and acted at most once; return what each must have cost."""
    counts = Counter(stored.event.call for stored in world.history if isinstance(stored.event, CallStarted))
    events = {stored.event.call: stored.event for stored in world.history if isinstance(stored.event, CallSettled)}
    assert counts == Counter(dict.fromkeys(CALLS, 1))
    assert events.keys() == CALLS.keys()
    assert sum(isinstance(stored.event, CallSettled) for stored in world.history) == len(CALLS)
    assert all(times == 1 for times in acted.values())
    costs: dict[str, int] = {}
    for name, event in events.items():
        is_known = event.outcome == "ok"
        assert acted[name] == 1 or not is_known
        costs[name] = CALLS[name].cost if is_known else CALLS[name].held
        assert event.charge is not None
        assert event.charge.usd == costs[name]
    return costs


async def check_the_money(world: World, costs: dict[str, int]) -> None:
    def sum_costs(*sessions: str) -> int:
        return sum(cost for name, cost in costs.items() if name.partition("/")[0] in sessions)

    day = "day/2026-01-01"
    rows = await world.journal.ask(Query("budgets", BudgetRow))
    assert {(row.scope, row.window): (row.spent, row.held, row.overrun) for row in rows if row.unit == "usd"} == {
        ("session:parent", ""): (sum_costs("parent", "child"), 0, 0),
        ("session:other", ""): (sum_costs("other"), 0, 0),
        ("session:child", ""): (sum_costs("child"), 0, 0),
        ("agent:household", day): (sum_costs(*TURNS), 0, 0),
        ("fleet", day): (sum_costs(*TURNS), 0, 0),
    }
    assert await world.journal.ask(Query("holds", HoldRow)) == []


def crash_and_check(new_world: Callable[[Crash | None], World], household: Household, every: int = 1) -> int:
    worlds = 0
    for world in crash_everywhere(household.program, new_world, every=every):
        world.run(check(world, household.acted[world]))
        worlds += 1
    return worlds


@pytest.mark.parametrize("every", [len(CRASH_KINDS), pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("seed", "path"), [(0, None), (1, None), (2, ":memory:")], ids=["0", "1", "2 on SQLite"])
def test_a_crash_at_any_commit_loses_nothing_repeats_nothing_and_keeps_the_money_exact(
    seed: int, path: str | None, every: int
) -> None:
    worlds = crash_and_check(lambda crash: World(seed, path=path, crash=crash), Household(), every)
    assert worlds > 20 * len(CRASH_KINDS) // every


def test_without_a_crash_every_call_costs_what_it_costs() -> None:
    household = Household()
    with World(1) as world:
        world.run(world.survive(household.program))
        assert household.acted[world] == Counter(dict.fromkeys(CALLS, 1))
        costs = check_that_nothing_happens_twice(world, household.acted[world])
        assert costs == {name: call.cost for name, call in CALLS.items()}


class Generous(Household):
    """Believes that what was in doubt cost nothing."""

    async def settle_in_doubt(self, world: World, lease: Lease, flights: Sequence[InFlight]) -> None:
        for flight in flights:
            await world.ledger.settle(lease, flight, ActualResult("unknown", usd=0))


class Eager(Household):
    """Broken on purpose: repeats a call that was started and whose outcome is unknown."""

    def list_started_calls(self, events: Sequence[Stored]) -> set[str]:
        return {
            stored.event.call
            for stored in events
            if isinstance(stored.event, CallSettled) and stored.event.outcome == "ok"
        }


class Hasty(Household):
    """Sends a write again under another key when it heard no answer."""

    async def commit(self, world: World, write: Write) -> int:
        try:
            return len((await world.store.commit(write)).events)
        except StoreUnavailable:
            again = msgspec.structs.replace(write, key=f"{write.key} again")
            return len((await world.store.commit(again)).events)


@pytest.mark.parametrize("broken", [Generous, Eager, Hasty])
def test_a_recovery_that_is_wrong_is_found_by_some_crash(broken: type[Household]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        crash_and_check(lambda crash: World(0, crash=crash), broken())


class ForgetfulEngine(MemoryEngine):
    """Keeps the rows of every write, but loses one event that it has acknowledged."""

    saved = 0

    def save(self, changes: WorkingSet) -> None:
        self.saved += 1
        super().save(msgspec.structs.replace(changes, events=[]) if self.saved == FORGOTTEN else changes)


class ForgetfulWorld(World):
    def _engine(self, path: str | PathLike[str] | None) -> Engine:
        return ForgetfulEngine(now=self.clock.now, new_id=self.ids.make)


def test_a_store_that_loses_what_it_acknowledged_is_found() -> None:
    household = Household()
    with ForgetfulWorld() as world:
        world.run(world.survive(household.program))
        with pytest.raises(AssertionError):
            world.run(check_that_nothing_is_lost(world))
