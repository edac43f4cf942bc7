"""One session's whole life, as a plan: it does everything that a session can do today, the same way every time.

Every step has an id that never changes, and every write of it a key. So whoever takes the session over after a
crash reads the journal, settles what was in doubt, and goes on with the first step whose key is not there.
"""

from collections.abc import Callable, Sequence
from typing import Final

from halter.core.clock import Clock
from halter.core.errors import HalterError
from halter.core.events import (
    AnyEvent,
    BodiesErased,
    CallStarted,
    CostCapReached,
    RequestStarted,
    SessionParked,
    SessionStarted,
    Unknown,
    WakePosted,
)
from halter.core.ids import FLEET, Digest, SessionId, StreamId, WorkerId, inbox_stream, session_stream
from halter.core.limits import Spender, carve, legs
from halter.core.money import Account
from halter.core.ports import Agents, Committed, Draft, Lease, Store, Stored, Ticket, Write
from halter.guard.judge import Asked
from halter.guard.purse import change_cap
from halter.guard.weigh import Asking
from halter.state.life import end, park, post, start, start_child, wake
from halter.state.session import InFlight, Session, fold
from halter.testing.relay import Relay
from halter_drills.plan import (
    AGENT,
    CAPS,
    CARVED,
    HELPER,
    HELPER_CAPS,
    TRIGGER,
    Act,
    Attach,
    Begin,
    Delegate,
    End,
    Erase,
    Rest,
    Say,
    SetCap,
    Spend,
    Step,
    Wake,
    child_of,
    plan,
)
from halter_drills.till import FlatRate, Till

Told = tuple[Stored, Session]
"""An event that was acknowledged, and the state that it left its stream in."""

Acknowledged = Callable[[Sequence[Told]], None]
"""Hears of every commit that was acknowledged, before anything else is done; of one without events, too."""

PAGE: Final = 1000
CLAIMED: Final = 100
BY: Final = "the drill"


class SessionTaken(HalterError):
    """The session that the drill works with belongs to somebody else."""


def unheard(told: Sequence[Told]) -> None:
    """Tell nobody."""


class Witness(Relay):
    """Folds every event that a store acknowledges, and says so before anybody can act on it."""

    def __init__(self, store: Store, acknowledged: Acknowledged) -> None:
        super().__init__(store)
        self._acknowledged = acknowledged
        self.states: dict[StreamId, Session] = {}
        self.done: set[str] = set()
        self.now = 0

    async def commit(self, write: Write) -> Committed:
        """Commit, fold, tell."""
        committed = await self._store.commit(write)
        if not committed.repeated:
            self._acknowledged([(stored, self._folded(stored)) for stored in committed.fresh()])
        return committed

    async def claim(
        self, worker: WorkerId, limit: int, only: SessionId | Ticket | None = None, agents: Agents | None = None
    ) -> Sequence[Lease]:
        """Claim and tell: a lease is no event, but it was acknowledged too."""
        leases = await self._store.claim(worker, limit, only, agents)
        self._acknowledged(())
        return leases

    async def put(self, data: bytes) -> Digest:
        """Put and tell: a blob is no event, but it was acknowledged too."""
        digest = await self._store.put(data)
        self._acknowledged(())
        return digest

    async def replay(self, stream: StreamId) -> None:
        """Read a stream from its start, as whoever takes a session over does."""
        while events := await self._store.read(stream, self.state(stream).head, PAGE):
            for stored in events:
                self._folded(stored)

    def state(self, stream: StreamId) -> Session:
        """Tell where a stream stands."""
        return self.states.get(stream, Session())

    def _folded(self, stored: Stored) -> Session:
        state = fold(self.state(stored.stream), stored)
        self.states[stored.stream] = state
        self.done |= {stored.key, _intended(stored.event)}
        self.now = max(self.now, stored.at)
        return state


def _intended(event: AnyEvent | Unknown) -> str:
    """Tell which call or request is over with this event, or will be once it is settled."""
    match event:
        case CallStarted(call=spend) | RequestStarted(request=spend) | CostCapReached(refused=spend):
            return spend
        case _:
            return ""


class Workload:
    """A worker that walks the plan of one session and of its sub-session, from wherever they stand.

    A claim takes whatever is due. So where one worker has several sessions, they share what it has `claimed`.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        worker: str,
        session: str = "drill",
        acknowledged: Acknowledged = unheard,
        claimed: dict[str, Lease] | None = None,
    ) -> None:
        self._session = session
        self._clock = clock
        self._worker = WorkerId(worker)
        self._store = Witness(store, acknowledged)
        self._till = Till(self._store, clock)
        self._claimed: dict[str, Lease] = {} if claimed is None else claimed
        self._leases: dict[str, Lease] = {}

    async def run(self, steps: Sequence[Step] | None = None) -> Session:
        """Do every step that is not done yet, and return the state that the session is in then."""
        await self._catch_up()
        for step in plan(self._session) if steps is None else steps:
            await self._do(step)
        return self._state(self._session)

    async def _catch_up(self) -> None:
        """Read what happened so far."""
        for session in (self._session, child_of(self._session)):
            await self._store.replay(session_stream(session))
            await self._store.replay(inbox_stream(session))
        await self._store.replay(FLEET)

    def _state(self, session: str) -> Session:
        return self._store.state(session_stream(session))

    async def _do(self, step: Step) -> None:
        match step:
            case Act():
                await self._act(step)
            case End():
                await self._end(step)
            case _ if step.id in self._store.done:
                pass
            case Begin():
                await self._begin(step)
            case Delegate():
                await self._delegate(step)
            case Say():
                await self._store.commit(post(step.session, step.id, step.event, step.body))
            case Attach():
                await self._attach(step)
            case Wake():
                await self._wake(step)
            case Rest():
                await self._rest(step)
            case SetCap():
                account = Account(step.scope, "", "usd")
                await self._store.commit(change_cap(account, step.cap, BY, step.id, "The plan says so."))
            case Erase():
                await self._erase(step)

    async def _begin(self, step: Begin) -> None:
        event = SessionStarted(
            session=step.session,
            agent=AGENT,
            kind="autonomous",
            started_by=BY,
            origin="config",
            trigger=TRIGGER,
            definition=await self._store.put(step.definition),
        )
        await self._store.commit(start(event, step.task))

    async def _delegate(self, step: Delegate) -> None:
        event = SessionStarted(
            session=step.child,
            agent=HELPER,
            kind="task",
            started_by=AGENT,
            origin="agent",
            trusted=False,
            parent=step.session,
            carved=carve(step.session, CARVED, CAPS.session.max_cost_usd),
        )
        await self._store.commit(start_child(event, await self._lease(step.session), step.task))

    async def _attach(self, step: Attach) -> None:
        digest = await self._store.put(step.data)
        event = WakePosted(cause="webhook", origin="document", sender=BY, name=step.name)
        await self._store.commit(Write(inbox_stream(step.session), step.id, lambda _: [Draft(event, blob=digest)]))

    async def _wake(self, step: Wake) -> None:
        seen = self._store.state(inbox_stream(step.session)).head
        await self._store.commit(wake(await self._lease(step.session), step.id, step.cause, seen))

    async def _act(self, step: Act) -> None:
        """Hold for all that act together, and settle them in the opposite order."""
        held: list[tuple[Spend, InFlight]] = []
        for spend in step.together:
            if spend.id not in self._store.done:
                answer = await self._till.admit(await self._lease(step.session), self._asked(step, spend))
                if isinstance(answer, InFlight):
                    held.append((spend, answer))
        for spend, flight in reversed(held):
            await self._till.settle(await self._lease(step.session), flight, spend.truth)

    def _asked(self, step: Act, spend: Spend) -> Asked | Asking:
        state, now = self._state(step.session), self._clock.now()
        caps = HELPER_CAPS if state.parent else CAPS
        spender = Spender(step.session, state.agent, state.trigger)
        if spend.what == "call":
            return Asked(
                call=spend.id,
                tool=spend.name,
                arguments=spend.body,
                session=step.session,
                agent=state.agent,
                now=now,
                legs=legs(caps, spender, now, usd=spend.usd),
            )
        return Asking(
            request=spend.id,
            model=spend.name,
            purpose=spend.purpose,
            spender=spender,
            caps=caps,
            now=now,
            rates=FlatRate(spend.usd),
            input_tokens=spend.tokens // 2,
            max_output_tokens=spend.tokens // 2,
            min_output_tokens=spend.tokens // 2,
        )

    async def _rest(self, step: Rest) -> None:
        event = SessionParked(
            state=step.state,
            inbox_seen=self._state(step.session).inbox_seen,
            wake_at=self._store.now if step.due else None,
            wake_on=step.wake_on,
            resident=step.resident,
        )
        await self._store.commit(park(await self._lease(step.session), step.id, event))
        if not step.resident:
            del self._leases[step.session]

    async def _end(self, step: End) -> None:
        state = self._state(step.session)
        if not state.ended:
            lease = await self._lease(step.session)
            await self._store.commit(end(lease, step.state, step.terminal_reason, state.parent))
            del self._leases[step.session]

    async def _erase(self, step: Erase) -> None:
        stream = session_stream(step.session)
        through = self._store.state(stream).head
        event = BodiesErased(stream=stream, through=through, by=BY, reason="The plan says so.")
        await self._store.commit(Write(FLEET, step.id, lambda _: [Draft(event)], others=(stream,)))

    async def _lease(self, session: str) -> Lease:
        if session not in self._leases:
            lease = await self._claim(session)
            state = self._state(session)
            self._leases[session] = lease
            if lease.generation > 1 and state.state == "RUNNING":
                await self._take_over(lease, state)
        return self._leases[session]

    async def _claim(self, session: str) -> Lease:
        if session not in self._claimed:
            self._claimed |= {lease.session: lease for lease in await self._store.claim(self._worker, CLAIMED)}
        if session not in self._claimed:
            raise SessionTaken(f"Session {session} cannot be claimed: another owner has it, or it is not due.")
        return self._claimed.pop(session)

    async def _take_over(self, lease: Lease, state: Session) -> None:
        """Say that the owner went away, and settle what it left in doubt at its maximum."""
        key = f"{lease.session}/{lease.generation}/takeover"
        await self._store.commit(wake(lease, key, None, state.inbox_seen))
        await self._till.settle_in_doubt(lease, list(state.in_flight.values()))
