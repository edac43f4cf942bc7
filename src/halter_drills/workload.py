"""What the drills run: an agent with its policy and doors, money held as the doors hold it, and one whole session.

That session follows a plan in which every step has a fixed id and every write a key. So a worker that takes it over
after a crash reads the journal, settles what was in doubt, and goes on with the first step whose key is missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from halter.core.clock import HOUR, Clock
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
from halter.core.messages import Model
from halter.core.money import DOLLAR, Account, Cap, Caps, Spender, carve, make_legs, usd_to_micros
from halter.core.ports import AgentConcurrency, Committed, Draft, Lease, Store, Stored, Ticket, Write
from halter.core.spec import Phase, Policy, ResolvedPolicy, ToolRule, ToolsSpec
from halter.core.usage import Usage
from halter.core.vocabulary import Purpose, State, WakeCause
from halter.guard import judge, judge_request, model_door, tool_door
from halter.guard.guard import GuardRuntime
from halter.guard.halts import StillHeld
from halter.guard.judge import CallRequest
from halter.guard.judge_request import RequestAttempt
from halter.guard.ledger import ActualResult, Ledger, change_cap
from halter.guard.model_door import RefusedRequest
from halter.guard.prepare import SessionContext
from halter.guard.tool_door import Answer, NeedsPerson
from halter.models.providers import Prices
from halter.redaction.secrets import GivenSecrets
from halter.state.lifecycle import end_session, park_session, post_wake, start_child, start_session, wake_session
from halter.state.session import InFlight, Session, fold
from halter.testing.fakes import Relay
from halter_drills.drill import DrillBroken

# An agent of the drills' own: its policy, the doors that its sessions go through, and how a session begins.

PERSON: Final = "ada"
"""The person of the drills: whoever halts, resumes and decides."""

NO_RULES: Final = MappingProxyType[str, ToolRule]({})
NO_SECRETS: Final = GivenSecrets({})


def policy_of(
    name: str = "drill",
    *,
    expiry: int = HOUR,
    rules: Mapping[str, ToolRule] = NO_RULES,
    secrets: tuple[str, ...] = (),
    cap: int = DOLLAR,
) -> ResolvedPolicy:
    """Write down the policy of an agent that has all its tools in one phase; `rules` are the fleet's for its tools."""
    return ResolvedPolicy(
        name=name,
        mode="SEMI",
        observe=False,
        caps=Caps(session=Cap(cap), agent=(), fleet=()),
        on_cap="stop",
        max_steps=50,
        timeout=0,
        min_output_tokens=256,
        reserve_tokens=0,
        reserve_cost_fraction=0,
        policies=(Policy(tools=dict(rules)), Policy()),
        disabled=(),
        approval_expiry=expiry,
        tools=ToolsSpec(),
        phases=(Phase("all", None),),
        allowed_models=None,
        allowed_hosts=None,
        secrets=secrets,
        prices={},
    )


def standing_of(session: str, policy: ResolvedPolicy, trigger: str = "") -> SessionContext:
    return SessionContext(
        session=session,
        agent=policy.name,
        phase=policy.phases[0],
        policy=policy,
        policy_digest=policy.digest(),
        trigger=trigger,
        secrets=frozenset(policy.secrets),
    )


def doors(
    store: Store,
    clock: Clock,
    *,
    redact: Callable[[str], str] = str,
    secrets: GivenSecrets = NO_SECRETS,
    simulates: Model | None = None,
) -> GuardRuntime:
    return GuardRuntime(store, clock, redact=redact, secrets=secrets, prices=Prices(), simulates=simulates)


async def begun(store: Store, worker: WorkerId, session: str, policy: ResolvedPolicy, trigger: str = "") -> Lease:
    event = SessionStarted(session=session, agent=policy.name, kind="task", started_by=PERSON, trigger=trigger)
    await store.commit(start_session(event))
    leases = await store.claim(worker, 1, SessionId(session))
    if not leases:
        raise DrillBroken(f"The session {session} of the drill could not be claimed, though nobody else knows it.")
    return leases[0]


class ToolEffect(msgspec.Struct, frozen=True):
    """One thing that a tool did to the outside world, and the key that it was given for it."""

    tool: str
    order: int
    key: str = ""


@dataclass(slots=True)
class EffectFile:
    """The outside world: a file that counts what was done."""

    file: Path

    def effects(self) -> list[ToolEffect]:
        return [msgspec.json.decode(line, type=ToolEffect) for line in self.file.read_bytes().splitlines()]

    def did(self, what: str, order: int, key: str = "") -> str:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(ToolEffect(what, order, key)) + b"\n")
        return "done"


# Money held and settled as the two doors do it, with no tool and no model behind them.

Refusal = Answer | NeedsPerson | RefusedRequest


def asked_of(
    call: str, name: str, caps: Caps, spender: Spender, now: int, usd: int, arguments: bytes = b""
) -> CallRequest:
    """Ask for a call that needs money and nobody's word."""
    return CallRequest(
        call=call,
        tool=name,
        arguments=arguments,
        session=spender.session,
        agent=spender.agent,
        now=now,
        legs=make_legs(caps, spender, now, usd=usd),
    )


class Till(Ledger):
    """The ledger as the doors use it: the product's own decision about each call and each request."""

    async def admit(self, lease: Lease, asked: CallRequest | RequestAttempt) -> InFlight | Refusal | StillHeld:
        """Commit an intent with its hold or its refusal; ask again while other holds are in the way.

        A repeated attempt answers as it did before.
        """
        committed = await self.commit_intent(lambda now: self.intent(lease, asked.at(now)), self.patience)
        answer = None if committed is None else _admission(committed, asked)
        return answer or StillHeld(asked.call if isinstance(asked, CallRequest) else asked.request)

    def intent(self, lease: Lease, asked: CallRequest | RequestAttempt) -> Write:
        stream = session_stream(lease.session)
        if isinstance(asked, CallRequest):
            return Write(
                stream, f"{asked.call}/asked/0", partial(judge.judge_call, asked), judge.list_call_rows(asked), lease
            )
        return Write(
            stream,
            f"{asked.request}/asked",
            partial(judge_request.judge_attempt, asked),
            judge_request.list_request_rows(asked),
            lease,
        )


def _admission(committed: Committed, asked: CallRequest | RequestAttempt) -> InFlight | Refusal | None:
    """Read the decision off what was written; None where a rate is waited for."""
    if isinstance(asked, CallRequest):
        return tool_door.read_call_admission(committed)
    match model_door.read_request_admission(committed):
        case model_door.AdmittedRequest(flight):
            return flight
        case RefusedRequest() as refused:
            return refused
        case _:
            return None


class FlatRate(msgspec.Struct, frozen=True):
    """A price that every request has, whatever it sends."""

    usd: int

    def cost(self, usage: Usage, at: int) -> int:
        return self.usd

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        return self.usd

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, at_most: int = 0) -> int:
        return at_most if self.usd <= budget_micros else 0


# The plan of the session that the drills work with: what it does, as data.

AGENT: Final = "night-watch"
HELPER: Final = "reader"
TRIGGER: Final = "nightly"
MODEL: Final = "scripted:drill"
BLOB_BYTES: Final = 40_000
TURNS: Final = 6

PLENTY: Final = 1_000_000 * DOLLAR
"""A cap that any number of these sessions stays under: what is refused here is refused by a session's own cap."""

CAPS: Final = Caps(
    session=Cap(1 * DOLLAR),
    trigger=(Cap(PLENTY, "month"),),
    agent=(Cap(PLENTY, "day"), Cap(PLENTY, "hour")),
    fleet=(Cap(PLENTY, "day"), Cap(None, "month")),
    token_budget=500_000,
)
CARVED: Final = usd_to_micros("0.10")
HELPER_CAPS: Final = Caps(session=Cap(CARVED), agent=CAPS.agent, fleet=CAPS.fleet)


class BeginStep(msgspec.Struct, frozen=True):
    """The session begins, with its task as the body and its definition as a blob."""

    id: str
    session: str
    task: bytes
    definition: bytes


class DelegateStep(msgspec.Struct, frozen=True):
    """A sub-session begins, with a cap carved out of this one's."""

    id: str
    session: str
    child: str
    task: bytes


class SayStep(msgspec.Struct, frozen=True):
    """Something arrives in the session's inbox."""

    id: str
    session: str
    event: WakePosted
    body: bytes


class AttachStep(msgspec.Struct, frozen=True):
    """Something arrives in the session's inbox that is too large for a body."""

    id: str
    session: str
    name: str
    data: bytes


class WakeStep(msgspec.Struct, frozen=True):
    """The session is taken up, with all that is in its inbox."""

    id: str
    session: str
    cause: WakeCause


class Spend(msgspec.Struct, frozen=True):
    """One call or request: what is held for it, and what it turns out to be and to cost."""

    id: str
    what: Literal["call", "request"]
    name: str
    truth: ActualResult
    usd: int
    tokens: int = 0
    purpose: Purpose = "turn"
    body: bytes = b""


class ActStep(msgspec.Struct, frozen=True):
    """Calls or requests that are in flight together."""

    session: str
    together: tuple[Spend, ...]


class RestStep(msgspec.Struct, frozen=True):
    """The session rests: due again at once, or until something in its inbox wakes it."""

    id: str
    session: str
    state: State = "SLEEPING"
    due: bool = True
    wake_on: tuple[str, ...] = ()
    resident: bool = False


class SetCapStep(msgspec.Struct, frozen=True):
    """A person changes the cap of a scope."""

    id: str
    scope: str
    cap: int


class EraseStep(msgspec.Struct, frozen=True):
    """A person has the bodies of a session that is over erased."""

    id: str
    session: str


class EndStep(msgspec.Struct, frozen=True):
    """The session is over."""

    session: str
    state: State
    terminal_reason: str


Step = (
    BeginStep | DelegateStep | SayStep | AttachStep | WakeStep | ActStep | RestStep | SetCapStep | EraseStep | EndStep
)


def child_of(session: str) -> str:
    return f"{session}-helper"


def spends(steps: tuple[Step, ...]) -> Iterator[Spend]:
    for step in steps:
        if isinstance(step, ActStep):
            yield from step.together


def plan(session: str, blob_bytes: int = BLOB_BYTES) -> tuple[Step, ...]:
    """Lay out the whole life of a session, with ids that nobody else has."""
    return (
        BeginStep(f"{session}/start", session, b"Watch the night.", b'{"agent": "night-watch"}'),
        WakeStep(f"{session}/first", session, "trigger"),
        *(step for turn in range(1, TURNS + 1) for step in _turn(session, turn)),
        _attached(session, blob_bytes),
        WakeStep(f"{session}/attached", session, "webhook"),
        SetCapStep(f"{session}/raise", session_stream(session), 2 * DOLLAR),
        *_delegated(session),
        *_closing(session),
    )


def _turn(session: str, turn: int) -> Iterator[Step]:
    """One turn: think, act, think, rest, and be woken; each in a way of its own."""
    name = f"{session}/turn-{turn}"
    yield ActStep(session, (_request(f"{name}/think", "turn", turn),))
    yield ActStep(session, tuple(_call(f"{name}/act-{number}", turn + number) for number in range(1 + turn % 2)))
    yield ActStep(session, (_request(f"{name}/conclude", "gate" if turn % 2 else "judge", turn + 1),))
    match turn % 3:
        case 0:
            yield RestStep(f"{name}/rest", session, resident=True)
            yield WakeStep(f"{name}/wake", session, "timer")
        case 1:
            yield RestStep(f"{name}/rest", session, due=False, wake_on=("price_drop", "disk_full"))
            yield SayStep(f"{name}/other-signal", session, _signal("new_moon"), b"A signal nobody waits for.")
            yield SayStep(f"{name}/signal", session, _signal("price_drop"), b"\xff\x00 not text \xed\xa0\x80")
            yield WakeStep(f"{name}/wake", session, "signal")
        case _:
            yield RestStep(f"{name}/rest", session, state="WAITING_FOR_INPUT")
            yield SayStep(f"{name}/message", session, _message("ada"), f"Good night {turn}, \u263d".encode())
            yield WakeStep(f"{name}/wake", session, "message")


def _delegated(session: str) -> Iterator[Step]:
    """A sub-session that spends beyond its cap, and is settled with its parent all the same."""
    child = child_of(session)
    yield DelegateStep(f"{child}/start", session, child, b"Read what was attached.")
    yield RestStep(f"{session}/awaiting-helper", session, state="WAITING_FOR_TOOL", due=False)
    yield WakeStep(f"{child}/first", child, "trigger")
    yield ActStep(child, (_request(f"{child}/think", "turn", 1),))
    over = ActualResult("ok", usd=usd_to_micros("0.15"), tokens=0, body=b"It was a long document.")
    yield ActStep(child, (Spend(f"{child}/read", "call", "read_document", over, usd_to_micros("0.01")),))
    yield EndStep(child, "BUDGET_EXCEEDED", "cost_cap_reached")
    yield SayStep(f"{child}/told", session, WakePosted(cause="child", origin="agent", sender=child), b"It is over.")
    yield WakeStep(f"{session}/helped", session, "child")


def _closing(session: str) -> Iterator[Step]:
    """What is refused, what costs nothing, what costs more than was held; and the end."""
    name = f"{session}/closing"
    yield ActStep(session, (Spend(f"{name}/too-dear", "call", "buy_house", ActualResult("ok"), 5 * DOLLAR),))
    yield ActStep(
        session, (Spend(f"{name}/free", "call", "look_around", ActualResult("ok", body=b"All is quiet."), 0),)
    )
    released = ActualResult("error", usd=0, tokens=0)
    yield ActStep(session, (Spend(f"{name}/unbilled", "request", MODEL, released, usd_to_micros("0.02"), 2000),))
    over = ActualResult("ok", usd=usd_to_micros("0.03"), tokens=0)
    yield ActStep(session, (Spend(f"{name}/dearer", "call", "translate", over, usd_to_micros("0.02")),))
    yield SetCapStep(f"{session}/lower", session_stream(child_of(session)), usd_to_micros("0.05"))
    yield EraseStep(f"{session}/erase", child_of(session))
    yield EndStep(session, "COMPLETED", "completed")


def _request(spend: str, purpose: Purpose, size: int) -> Spend:
    usage = Usage(1000 * size, 100 * size, 400 * size, 200 * size)
    truth = ActualResult(
        "ok", usd=usd_to_micros("0.004") + size, tokens=usage.uncached, usage=usage, body=b"I think so. " * size
    )
    return Spend(spend, "request", MODEL, truth, usd_to_micros("0.01"), 2000 * size, purpose)


def _call(spend: str, size: int) -> Spend:
    truth = ActualResult(
        "error" if size % 4 == 0 else "ok", usd=usd_to_micros("0.001") * size, tokens=0, body=b"\x00" * size
    )
    return Spend(spend, "call", "fetch_page", truth, usd_to_micros("0.02"), body=b'{"page": %d}' % size)


def _message(sender: str) -> WakePosted:
    return WakePosted(cause="message", origin="person", sender=sender, trusted=True)


def _signal(name: str) -> WakePosted:
    return WakePosted(cause="signal", origin="sensor", sender="drill", name=name)


def _attached(session: str, size: int) -> AttachStep:
    data = b"".join(b"%08d" % number for number in range(-(-size // 8)))[:size]
    return AttachStep(f"{session}/attach", session, "report.txt", data)


Told = tuple[Stored, Session]
"""An event that was acknowledged, and the state that it left its stream in."""

Acknowledged = Callable[[Sequence[Told]], None]
"""Hears of every commit that was acknowledged, before anything else is done; of one without events, too."""

PAGE: Final = 1000
CLAIMED: Final = 100
BY: Final = "the drill"


class SessionUnavailable(HalterError):
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
        committed = await self._store.commit(write)
        if not committed.repeated:
            self._acknowledged([(stored, self._folded(stored)) for stored in committed.fresh()])
        return committed

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
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
        for session in (self._session, child_of(self._session)):
            await self._store.replay(session_stream(session))
            await self._store.replay(inbox_stream(session))
        await self._store.replay(FLEET)

    def _state(self, session: str) -> Session:
        return self._store.state(session_stream(session))

    async def _do(self, step: Step) -> None:
        match step:
            case ActStep():
                await self._act(step)
            case EndStep():
                await self._end(step)
            case _ if step.id in self._store.done:
                pass
            case BeginStep():
                await self._begin(step)
            case DelegateStep():
                await self._delegate(step)
            case SayStep():
                await self._store.commit(post_wake(step.session, step.id, step.event, step.body))
            case AttachStep():
                await self._attach(step)
            case WakeStep():
                await self._wake(step)
            case RestStep():
                await self._rest(step)
            case SetCapStep():
                account = Account(step.scope, "", "usd")
                await self._store.commit(change_cap(account, step.cap, BY, step.id, "The plan says so."))
            case EraseStep():
                await self._erase(step)

    async def _begin(self, step: BeginStep) -> None:
        event = SessionStarted(
            session=step.session,
            agent=AGENT,
            kind="autonomous",
            started_by=BY,
            origin="config",
            trigger=TRIGGER,
            definition=await self._store.put(step.definition),
        )
        await self._store.commit(start_session(event, step.task))

    async def _delegate(self, step: DelegateStep) -> None:
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

    async def _attach(self, step: AttachStep) -> None:
        digest = await self._store.put(step.data)
        event = WakePosted(cause="webhook", origin="document", sender=BY, name=step.name)
        await self._store.commit(Write(inbox_stream(step.session), step.id, lambda _: [Draft(event, blob=digest)]))

    async def _wake(self, step: WakeStep) -> None:
        seen = self._store.state(inbox_stream(step.session)).head
        await self._store.commit(wake_session(await self._lease(step.session), step.id, step.cause, seen))

    async def _act(self, step: ActStep) -> None:
        """Hold for all that act together, and settle them in the opposite order."""
        held: list[tuple[Spend, InFlight]] = []
        for spend in step.together:
            if spend.id not in self._store.done:
                answer = await self._till.admit(await self._lease(step.session), self._asked(step, spend))
                if isinstance(answer, InFlight):
                    held.append((spend, answer))
        for spend, flight in reversed(held):
            await self._till.settle(await self._lease(step.session), flight, spend.truth)

    def _asked(self, step: ActStep, spend: Spend) -> CallRequest | RequestAttempt:
        state, now = self._state(step.session), self._clock.now()
        caps = HELPER_CAPS if state.parent else CAPS
        spender = Spender(step.session, state.agent, state.trigger)
        if spend.what == "call":
            return asked_of(spend.id, spend.name, caps, spender, now, spend.usd, spend.body)
        return RequestAttempt(
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

    async def _rest(self, step: RestStep) -> None:
        event = SessionParked(
            state=step.state,
            inbox_seen=self._state(step.session).inbox_seen,
            wake_at=self._store.now if step.due else None,
            wake_on=step.wake_on,
            resident=step.resident,
        )
        await self._store.commit(park_session(await self._lease(step.session), step.id, event))
        if not step.resident:
            del self._leases[step.session]

    async def _end(self, step: EndStep) -> None:
        state = self._state(step.session)
        if not state.ended:
            lease = await self._lease(step.session)
            await self._store.commit(end_session(lease, step.state, step.terminal_reason, state.parent))
            del self._leases[step.session]

    async def _erase(self, step: EraseStep) -> None:
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
            raise SessionUnavailable(f"Session {session} cannot be claimed: another owner has it, or it is not due.")
        return self._claimed.pop(session)

    async def _take_over(self, lease: Lease, state: Session) -> None:
        """Say that the owner went away, and settle what it left in doubt at its maximum."""
        key = f"{lease.session}/{lease.generation}/takeover"
        await self._store.commit(wake_session(lease, key, None, state.inbox_seen))
        await self._till.settle_in_doubt(lease, list(state.in_flight.values()))
