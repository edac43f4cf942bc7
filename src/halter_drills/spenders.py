"""Sessions that spend under shared caps, and the workers that own them: the same in virtual and in real time.

What a session will do follows from its name alone. So whoever takes it over knows what is left to do from the
session's own events, as a real owner would.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from halter.core.clock import SECOND, Clock
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import CallStarted, CostCapReached, SessionStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.limits import Cap, Caps, Spender, carve, legs
from halter.core.ports import Lease, Store, Stored, Write
from halter.guard.flight import StillHeld
from halter.guard.judge import Asked
from halter.guard.purse import Truth
from halter.state.life import end, start, start_child, wake
from halter.state.session import InFlight, replay
from halter_drills.till import Till

T = TypeVar("T")

PAGE: Final = 1000
ATTEMPTS: Final = 50
"""How often a write is repeated while the store is away."""


@dataclass(frozen=True, slots=True)
class Round:
    """One call: what is held for it, what it costs in truth, and how long it takes."""

    call: str
    amount: int
    truth: int
    latency: int


@dataclass(frozen=True, slots=True)
class Member:
    """One session of the crowd; one with a parent has its cap carved out of the parent's."""

    session: str
    agent: str
    cap: int | None
    rounds: tuple[Round, ...]
    lanes: int = 1
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who spends, and under which shared caps. `tick` is how long idle workers wait; `lease` how long they live."""

    members: tuple[Member, ...]
    agent_caps: tuple[Cap, ...]
    fleet_caps: tuple[Cap, ...]
    tick: int
    lease: int

    def caps(self, member: Member) -> Caps:
        """Tell the caps that a session spends under."""
        return Caps(session=Cap(member.cap), agent=self.agent_caps, fleet=self.fleet_caps)

    def named(self) -> Mapping[str, Member]:
        """Return the sessions by name."""
        return {member.session: member for member in self.members}

    def children(self, parent: str) -> list[Member]:
        """Return the sub-sessions of a session."""
        return [member for member in self.members if member.parent == parent]


Bill = Callable[[str, int], None]
"""What the outside world does when a call has run: it asks for its money, whether anybody survives to pay or not."""


@dataclass(slots=True)
class Worker:
    """One process: it claims sessions, works on all of them at once, and renews its leases.

    `finished` tells whether there is nothing left to do for anybody.
    """

    name: WorkerId
    store: Store
    clock: Clock
    crowd: Crowd
    bill: Bill
    finished: Callable[[], Awaitable[bool]]
    slots: int
    till: type[Till] = Till
    mine: set[str] = field(default_factory=set[str])

    async def run(self) -> None:
        """Work until nothing is left to do; whatever ends this ends all that it does."""
        till = self.till(self.store, self.clock)
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat())
            while self.mine or not await self.finished():
                free = self.slots - len(self.mine)
                for lease in await self.store.claim(self.name, free) if free else ():
                    self.mine.add(lease.session)
                    tasks.create_task(self._own(lease, till))
                await self.clock.sleep(self.crowd.tick)
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            await self.clock.sleep(self.crowd.lease // 4)
            await self.store.beat(self.name)

    async def _own(self, lease: Lease, till: Till) -> None:
        try:
            await Owner(self, lease, till).run()
        except* LeaseLost:
            """Somebody else goes on with this session; that is what leases are for."""
        finally:
            self.mine.discard(lease.session)


class Owner:
    """The owner of one session: it does what is left to do, and ends it."""

    def __init__(self, worker: Worker, lease: Lease, till: Till) -> None:
        self._worker = worker
        self._store = worker.store
        self._clock = worker.clock
        self._crowd = worker.crowd
        self._lease = lease
        self._till = till
        self._member = worker.crowd.named()[lease.session]
        self._refused = False

    async def run(self) -> None:
        """Read what happened, settle what is in doubt, do the rest, end."""
        events = await self._events()
        state = replay(events)
        if state.ended:
            return
        if self._lease.generation > 1:
            key = f"{self._lease.session}/{self._lease.generation}/woken"
            await self._surely(lambda: self._store.commit(wake(self._lease, key, None, 0)))
        for flight in state.in_flight.values():
            await self._surely(lambda flight=flight: self._till.settle_in_doubt(self._lease, [flight]))
        self._refused = state.cost_cap_reached
        for child in self._crowd.children(self._member.session):
            await self._delegate(child)
        await self._spend(_left(self._member, events))
        await self._end()

    async def _events(self) -> list[Stored]:
        events: list[Stored] = []
        stream = session_stream(self._lease.session)
        while page := await self._store.read(stream, len(events), PAGE):
            events += page
        return events

    async def _spend(self, left: Sequence[Round]) -> None:
        lanes = self._member.lanes
        async with asyncio.TaskGroup() as tasks:
            for lane in range(lanes):
                tasks.create_task(self._one_by_one(left[lane::lanes]))

    async def _one_by_one(self, rounds: Sequence[Round]) -> None:
        for a_round in rounds:
            if self._refused:
                return
            await self._go(a_round)

    async def _go(self, a_round: Round) -> None:
        """Hold, act, settle; where others hold the money for longer than the till waits, ask again."""
        asked = self._asked(a_round)
        while True:
            match await self._surely(lambda: self._till.admit(self._lease, asked)):
                case InFlight() as flight:
                    return await self._act(a_round, flight)
                case StillHeld():
                    await self._clock.sleep(self._crowd.tick)
                case _:
                    self._refused = True
                    return None

    async def _act(self, a_round: Round, flight: InFlight) -> None:
        await self._clock.sleep(a_round.latency)
        self._worker.bill(a_round.call, a_round.truth)
        truth = Truth("ok", usd=a_round.truth)
        await self._surely(lambda: self._till.settle(self._lease, flight, truth))

    def _asked(self, a_round: Round) -> Asked:
        member, now = self._member, self._clock.now()
        spread = legs(self._crowd.caps(member), Spender(member.session, member.agent), now, usd=a_round.amount)
        return Asked(
            call=a_round.call,
            tool="work",
            arguments=b"",
            session=member.session,
            agent=member.agent,
            now=now,
            legs=spread,
        )

    async def _delegate(self, child: Member) -> None:
        """Start a sub-session, or learn that there is no room for it; where others hold the room, wait."""
        event = SessionStarted(
            session=child.session,
            agent=child.agent,
            kind="task",
            started_by=self._member.agent,
            origin="agent",
            parent=self._member.session,
            carved=carve(self._member.session, child.cap or 0, self._member.cap),
        )
        await self._until_written(start_child(event, self._lease))

    async def _end(self) -> None:
        """End as soon as nothing is held any more: a parent waits for its sub-sessions here."""
        state = "BUDGET_EXCEEDED" if self._refused else "COMPLETED"
        reason = "cost_cap_reached" if self._refused else "completed"
        await self._until_written(end(self._lease, state, reason, self._member.parent))

    async def _until_written(self, write: Write) -> None:
        while not (await self._surely(lambda: self._store.commit(write))).events:
            await self._clock.sleep(self._crowd.tick)

    async def _surely(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await surely(attempt, self._clock)


async def surely(attempt: Callable[[], Awaitable[T]], clock: Clock) -> T:
    """Repeat a write, under the same key, until the store answers."""
    for _ in range(ATTEMPTS):
        try:
            return await attempt()
        except StoreUnavailable:
            await clock.sleep(SECOND // 20)
    return await attempt()


def _left(member: Member, events: Sequence[Stored]) -> list[Round]:
    """Tell which calls are not in the session's events yet, neither begun nor refused."""
    known: set[str] = set()
    for stored in events:
        match stored.event:
            case CallStarted(call=call) | CostCapReached(refused=call):
                known.add(call)
            case _:
                pass
    return [a_round for a_round in member.rounds if a_round.call not in known]


async def begin(store: Store, crowd: Crowd) -> None:
    """Start every session that stands on its own; sub-sessions are started by their parents."""
    for member in crowd.members:
        if not member.parent:
            event = SessionStarted(session=member.session, agent=member.agent, kind="task", started_by="the drill")
            await store.commit(start(event))
