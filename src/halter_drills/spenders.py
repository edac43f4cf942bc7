"""Sessions that spend under shared caps, and the workers that own them, in virtual and in real time.

The calls of a session follow from its name alone, so a new owner finds the remaining calls from its events.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from halter.core import money
from halter.core.clock import DAY, HOUR, SECOND, Clock, window_at
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import CallStarted, CostCapReached, SessionStarted
from halter.core.ids import WorkerId
from halter.core.money import Cap, Caps, Spender, carve
from halter.core.ports import Lease, Store, Stored, Write
from halter.guard.halts import BudgetBusy
from halter.guard.ledger import ActualResult, change_cap
from halter.state.lifecycle import end_session, start_child, start_session, wake_session
from halter.state.session import InFlight, replay
from halter_drills.checker import Account
from halter_drills.workload import DrillLedger, make_request

T = TypeVar("T")

PAGE: Final = 1000
ATTEMPTS: Final = 50
"""Number of retries of a write while the store is unavailable."""


class PlannedCall(msgspec.Struct, frozen=True):
    """One call: its hold, its actual cost, and its duration."""

    call: str
    amount: int
    cost: int
    latency: int


class Member(msgspec.Struct, frozen=True):
    """One session; with a parent, its cap is carved out of the parent's."""

    session: str
    agent: str
    cap: int | None
    rounds: tuple[PlannedCall, ...]
    lanes: int = 1
    parent: str = ""


class Crowd(msgspec.Struct, frozen=True):
    """Sessions and their shared caps. `tick` is the polling interval of idle workers, `lease` their lease."""

    members: tuple[Member, ...]
    agent_caps: tuple[Cap, ...]
    fleet_caps: tuple[Cap, ...]
    tick: int
    lease: int

    def caps(self, member: Member) -> Caps:
        return Caps(session=Cap(member.cap), agent=self.agent_caps, fleet=self.fleet_caps)

    def by_name(self) -> Mapping[str, Member]:
        return {member.session: member for member in self.members}

    def children(self, parent: str) -> list[Member]:
        return [member for member in self.members if member.parent == parent]


Bill = Callable[[str, int], None]
"""Called when a call has run: the outside world bills it, even if the process dies before it settles."""


@dataclass(slots=True)
class SpendingWorker:
    """One process that claims sessions, runs them concurrently, and renews its leases."""

    name: WorkerId
    store: Store
    clock: Clock
    crowd: Crowd
    bill: Bill
    finished: Callable[[], Awaitable[bool]]
    slots: int
    till: type[DrillLedger] = DrillLedger
    mine: set[str] = field(default_factory=set[str])

    async def run(self) -> None:
        ledger = self.till(self.store, self.clock)
        async with asyncio.TaskGroup() as tasks:
            heartbeat_task = tasks.create_task(self._beat())
            while self.mine or not await self.finished():
                free = self.slots - len(self.mine)
                for lease in await self.store.claim(self.name, free) if free else ():
                    self.mine.add(lease.session)
                    tasks.create_task(self._own(lease, ledger))
                await self.clock.sleep(self.crowd.tick)
            heartbeat_task.cancel()

    async def _beat(self) -> None:
        while True:
            await self.clock.sleep(self.crowd.lease // 4)
            await self.store.beat(self.name)

    async def _own(self, lease: Lease, ledger: DrillLedger) -> None:
        try:
            await Owner(self, lease, ledger).run()
        except* LeaseLost:
            """Another worker owns this session."""
        finally:
            self.mine.discard(lease.session)


class Owner:
    """The owner of one session: runs the remaining calls, and ends it."""

    def __init__(self, worker: SpendingWorker, lease: Lease, ledger: DrillLedger) -> None:
        self._worker = worker
        self._store = worker.store
        self._clock = worker.clock
        self._crowd = worker.crowd
        self._lease = lease
        self._till = ledger
        self._member = worker.crowd.by_name()[lease.session]
        self._refused = False

    async def run(self) -> None:
        events = await self._events()
        state = replay(events)
        if state.ended:
            return
        if self._lease.generation > 1:
            key = f"{self._lease.session}/{self._lease.generation}/woken"
            await self._surely(lambda: self._store.commit(wake_session(self._lease, key, None, 0)))
        for flight in state.in_flight.values():
            await self._surely(lambda flight=flight: self._till.settle_in_doubt(self._lease, [flight]))
        self._refused = state.cost_cap_reached
        for child in self._crowd.children(self._member.session):
            await self._delegate(child)
        await self._spend(_list_open(self._member, events))
        await self._end()

    async def _events(self) -> list[Stored]:
        events: list[Stored] = []
        stream = self._lease.stream
        while page := await self._store.read(stream, len(events), PAGE):
            events += page
        return events

    async def _spend(self, calls: Sequence[PlannedCall]) -> None:
        async def run_in_order(lane_calls: Sequence[PlannedCall]) -> None:
            for call in lane_calls:
                if not self._refused:
                    await self._run_one(call)

        lanes = self._member.lanes
        async with asyncio.TaskGroup() as tasks:
            for lane in range(lanes):
                tasks.create_task(run_in_order(calls[lane::lanes]))

    async def _run_one(self, planned_call: PlannedCall) -> None:
        """Hold, act, settle; retry while other holds block it."""
        member = self._member
        spender, caps = Spender(member.session, member.agent), self._crowd.caps(member)
        request = make_request(planned_call.call, "work", caps, spender, self._clock.now(), planned_call.amount)
        while True:
            match await self._surely(lambda: self._till.admit(self._lease, request)):
                case InFlight() as flight:
                    return await self._act(planned_call, flight)
                case BudgetBusy():
                    await self._clock.sleep(self._crowd.tick)
                case _:
                    self._refused = True
                    return None

    async def _act(self, planned_call: PlannedCall, flight: InFlight) -> None:
        await self._clock.sleep(planned_call.latency)
        self._worker.bill(planned_call.call, planned_call.cost)
        result = ActualResult("ok", usd=planned_call.cost)
        await self._surely(lambda: self._till.settle(self._lease, flight, result))

    async def _delegate(self, child: Member) -> None:
        """Start a sub-session, unless refused; retry while other holds block it."""
        event = SessionStarted(
            session=child.session,
            agent=child.agent,
            kind="task",
            started_by=self._member.agent,
            origin="agent",
            parent=self._member.session,
            carved=carve(self._member.session, child.cap or 0, self._member.cap),
        )
        await self._write_until_done(start_child(event, self._lease))

    async def _end(self) -> None:
        """End once nothing is held: a parent waits for its sub-sessions here."""
        state = "BUDGET_EXCEEDED" if self._refused else "COMPLETED"
        reason = "cost_cap_reached" if self._refused else "completed"
        await self._write_until_done(end_session(self._lease, state, reason, self._member.parent))

    async def _write_until_done(self, write: Write) -> None:
        while not (await self._surely(lambda: self._store.commit(write))).events:
            await self._clock.sleep(self._crowd.tick)

    async def _surely(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await surely(attempt, self._clock)


async def surely(attempt: Callable[[], Awaitable[T]], clock: Clock) -> T:
    """Retry a write, under the same key, until the store answers."""
    for _ in range(ATTEMPTS):
        try:
            return await attempt()
        except StoreUnavailable:
            await clock.sleep(SECOND // 20)
    return await attempt()


def _list_open(member: Member, events: Sequence[Stored]) -> list[PlannedCall]:
    """List the calls that are neither started nor refused."""
    handled_calls: set[str] = set()
    for stored in events:
        match stored.event:
            case CallStarted(call=call) | CostCapReached(refused=call):
                handled_calls.add(call)
            case _:
                pass
    return [planned_call for planned_call in member.rounds if planned_call.call not in handled_calls]


async def begin(store: Store, crowd: Crowd) -> None:
    """Start every session except sub-sessions, which their parents start."""
    for member in crowd.members:
        if not member.parent:
            event = SessionStarted(session=member.session, agent=member.agent, kind="task", started_by="the drill")
            await store.commit(start_session(event))


# Crowds drawn from a seed: sessions, their calls, and caps that are too small for them.

CENT: Final = 10_000
AGENTS: Final = ("ada", "bob", "cyd")
ROOTS: Final = 16
CHILDREN: Final = 4
MANY: Final = 200
ONE_CAP: Final = 1000 * CENT


def draw_crowd(seed: int, *, latency: int, tick: int, lease: int) -> Crowd:
    """Draw 20 sessions of three agents whose calls exceed their caps; the last are sub-sessions of the first."""
    rng = random.Random(f"quarrel {seed}")
    roots = [_member(f"s{number}", rng, latency) for number in range(ROOTS)]
    parents = [Member(m.session, m.agent, 100 * CENT, m.rounds, m.lanes) for m in roots[: CHILDREN // 2]]
    sub_sessions = [_child(parents[number % 2], number, rng, latency) for number in range(CHILDREN)]
    return Crowd(
        members=(*parents, *roots[len(parents) :], *sub_sessions),
        agent_caps=(Cap(rng.randint(40, 150) * CENT, rng.choice(("hour", "day"))),),
        fleet_caps=(Cap(rng.randint(100, 300) * CENT, "day"), Cap(None, "month")),
        tick=tick,
        lease=lease,
    )


def _member(session: str, rng: random.Random, latency: int) -> Member:
    cap = rng.choice((rng.randint(5, 25) * CENT, 100 * CENT))
    calls = _calls(session, rng.randint(3, 6), latency, rng)
    return Member(session, rng.choice(AGENTS), cap, calls, lanes=rng.choice((1, 1, 2)))


def _child(parent: Member, number: int, rng: random.Random, latency: int) -> Member:
    session = f"{parent.session}-{number}"
    cap = rng.randint(5, 60) * CENT
    return Member(session, parent.agent, cap, _calls(session, 3, latency, rng), parent=parent.session)


def _calls(session: str, count: int, latency: int, rng: random.Random) -> tuple[PlannedCall, ...]:
    """Draw calls whose actual cost does not exceed their hold."""
    calls: list[PlannedCall] = []
    for number in range(count):
        amount = rng.randint(1, 10 * CENT)
        cost = rng.choice((0, amount, rng.randint(0, amount)))
        calls.append(PlannedCall(f"{session}/{number}", amount, cost, rng.randrange(1, latency)))
    return tuple(calls)


def draw_patient_crowd(seed: int, *, latency: int, tick: int, lease: int) -> Crowd:
    """Draw 200 sessions whose calls exceed one cap. Each call costs a quarter of its hold."""
    rng = random.Random(f"patience {seed}")
    return Crowd(
        members=tuple(_patient(f"p{number}", rng, latency) for number in range(MANY)),
        agent_caps=(),
        fleet_caps=(Cap(ONE_CAP, "day"),),
        tick=tick,
        lease=lease,
    )


def _patient(session: str, rng: random.Random, latency: int) -> Member:
    amounts = [4 * rng.randint(2 * CENT, 10 * CENT) for _ in range(2)]
    calls = [
        PlannedCall(f"{session}/{number}", amount, amount // 4, rng.randrange(1, latency))
        for number, amount in enumerate(amounts)
    ]
    return Member(session, "ada", None, tuple(calls))


def list_caps(crowd: Crowd, start_at: int) -> dict[Account, int | None]:
    """List every cap of the crowd, in all windows of a day from `start_at`."""
    caps: dict[Account, int | None] = {(f"session:{m.session}", "", "usd"): m.cap for m in crowd.members}
    for scope, cap in _list_shared_caps(crowd):
        for offset in range(0, DAY + SECOND, HOUR):
            caps[scope, window_at(cap.per, start_at + offset), "usd"] = cap.max_cost_usd
    return caps


def cap_change(crowd: Crowd, now: int, rng: random.Random, number: int) -> Write:
    """Draw a cap change by a person, for a scope in its current window or for a session."""
    targets = [(f"session:{m.session}", "") for m in crowd.members]
    targets += [(scope, window_at(shared.per, now)) for scope, shared in _list_shared_caps(crowd)] * 3
    scope, window = rng.choice(targets)
    cap = rng.choice((rng.randrange(50 * CENT), rng.randrange(400 * CENT), 400 * CENT))
    return change_cap(money.Account(scope, window, "usd"), cap, "ada", f"change {number}")


def _list_shared_caps(crowd: Crowd) -> list[tuple[str, Cap]]:
    agents = [(f"agent:{name}", cap) for name in AGENTS for cap in crowd.agent_caps]
    return agents + [("fleet", cap) for cap in crowd.fleet_caps]
