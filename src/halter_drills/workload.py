"""The workload of the drills: an agent with its policy and guard, a ledger that holds money, and one whole session.

The session follows a plan in which every step has a fixed id and every write a key. So the successor of a dead worker
reads the journal, settles what is in doubt, and continues with the first step whose key is missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import msgspec

from halter.core.clock import HOUR, Clock
from halter.core.errors import HalterError
from halter.core.events import (
    BodiesErased,
    CallStarted,
    CostCapReached,
    RequestStarted,
    SessionParked,
    SessionStarted,
    WakePosted,
)
from halter.core.ids import FLEET, Digest, SessionId, StreamId, WorkerId, inbox_stream, session_stream
from halter.core.messages import Model
from halter.core.money import DOLLAR, Account, Cap, Caps, Spender, carve, make_legs, usd_to_micros
from halter.core.ports import AgentConcurrency, Committed, Draft, Lease, Store, Stored, Ticket, Write
from halter.core.usage import RequestExtras, Usage
from halter.core.vocabulary import Purpose, State, WakeCause
from halter.guard import judge, judge_request
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_intent import read_call_admission
from halter.guard.call_request import CallRequest, list_call_rows
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy
from halter.guard.judge_request import ModelAttempt
from halter.guard.ledger import ActualResult, Ledger, change_cap
from halter.guard.prepare import SessionContext
from halter.guard.request import RefusedRequest, read_request_refusal
from halter.models.prices import Prices
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.secrets import GivenSecrets
from halter.spec.agent import Phase, ToolsSpec
from halter.spec.policy import Policy, ToolRule
from halter.state.lifecycle import end_session, park_session, post_wake, start_child, start_session, wake_session
from halter.state.session import InFlight, Session, fold, track_request
from halter.testing.fakes import StoreProxy
from halter_drills.drill import DrillBroken

PERSON: Final = "ada"
"""The person who halts, resumes and decides."""

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
    """Make the policy of an agent with all its tools in one phase; `rules` are the fleet's rules for tools."""
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
        policies=(Policy(tools=dict(rules)), Policy(provenance="off")),
        disabled=(),
        approval_expiry=expiry,
        tools=ToolsSpec(),
        phases=(Phase("all", None),),
        allowed_models=None,
        allowed_hosts=None,
        secrets=secrets,
        prices={},
    )


def make_session_context(session: str, policy: ResolvedPolicy, trigger: str = "") -> SessionContext:
    return SessionContext(
        session=session,
        agent=policy.name,
        phase=policy.phases[0],
        policy=policy,
        policy_digest=policy.digest(),
        trigger=trigger,
        secrets=frozenset(policy.secrets),
    )


def make_guard_runtime(
    store: Store,
    clock: Clock,
    *,
    redact: Callable[[str], str] = str,
    secrets: GivenSecrets = NO_SECRETS,
    simulates: Model | None = None,
) -> GuardRuntime:
    return GuardRuntime(store, clock, redact=redact, secrets=secrets, prices=Prices(), simulates=simulates)


async def begin_session(
    store: Store, worker: WorkerId, session: str, policy: ResolvedPolicy, trigger: str = ""
) -> Lease:
    event = SessionStarted(session=session, agent=policy.name, kind="task", started_by=PERSON, trigger=trigger)
    await store.commit(start_session(event))
    leases = await store.claim(worker, 1, SessionId(session))
    if not leases:
        raise DrillBroken(f"Could not claim the drill's new session {session}.")
    return leases[0]


class ToolEffect(msgspec.Struct, frozen=True):
    """One effect of a tool on the outside world, and the key of its call."""

    tool: str
    order: int
    key: str = ""


@dataclass(slots=True)
class EffectFile:
    """The outside world: a file that records effects."""

    file: Path

    def effects(self) -> list[ToolEffect]:
        return [msgspec.json.decode(line, type=ToolEffect) for line in self.file.read_bytes().splitlines()]

    def record(self, tool: str, order: int, key: str = "") -> str:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(ToolEffect(tool, order, key)) + b"\n")
        return "done"


# Money held and settled as the guard does it, without a tool or a model.

Refusal = Answer | ApprovalRequired | RefusedRequest


def make_request(
    call: str, name: str, caps: Caps, spender: Spender, now: int, usd: int, arguments: bytes = b""
) -> CallRequest:
    """Make the request of a call that needs money and no approval."""
    return CallRequest(
        call=call,
        tool=name,
        arguments=arguments,
        session=spender.session,
        agent=spender.agent,
        now=now,
        legs=make_legs(caps, spender, now, usd=usd),
    )


class DrillLedger(Ledger):
    """The ledger as the guard uses it, with the guard's own decision about each call and request."""

    async def admit(self, lease: Lease, request: CallRequest | ModelAttempt) -> InFlight | Refusal | BudgetBusy:
        """Commit an intent with its hold, or a refusal; retry while other holds block it. Idempotent."""
        committed = await self.commit_intent(_DrillIntent(self, lease, request), self.hold_timeout)
        answer = None if committed is None else _admission(committed, request)
        return answer or BudgetBusy(request.call if isinstance(request, CallRequest) else request.request)

    def intent(self, lease: Lease, request: CallRequest | ModelAttempt) -> Write:
        """Make the write that admits or refuses. Teeth override it."""
        stream = lease.stream
        if isinstance(request, CallRequest):
            decide, rows = partial(judge.judge_call, request), list_call_rows(request)
            return Write(stream, f"{request.call}/asked/0", decide, rows, lease)
        decide, rows = partial(judge_request.judge_attempt, request), judge_request.list_request_rows(request)
        return Write(stream, f"{request.request}/asked", decide, rows, lease)


class _DrillIntent(NamedTuple):
    till: DrillLedger
    lease: Lease
    call_request: CallRequest | ModelAttempt

    def write(self, now: int, deferred: Write | None = None) -> Write:
        write = self.till.intent(self.lease, self.call_request.at(now))
        return write if deferred is None else msgspec.structs.replace(write, first=deferred)


def _admission(committed: Committed, request: CallRequest | ModelAttempt) -> InFlight | Refusal | None:
    """Read the decision from the committed events; None while a rate limit applies."""
    if isinstance(request, CallRequest):
        return read_call_admission(committed)
    stored = committed.events[0]
    if isinstance(stored.event, RequestStarted):
        return track_request(stored.event, stored)
    refusal = read_request_refusal(committed)
    return refusal if isinstance(refusal, RefusedRequest) else None


class FlatRate(msgspec.Struct, frozen=True):
    """A fixed price per request."""

    usd: int
    guess: str = ""

    def cost(self, usage: Usage, at: int) -> int:
        return self.usd

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        return self.usd

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, limit: int = 0) -> int:
        return limit if self.usd <= budget_micros else 0

    def covering(self, extras: RequestExtras) -> "FlatRate":
        return self


# The plan of the session, as data.

AGENT: Final = "night-watch"
HELPER: Final = "reader"
TRIGGER: Final = "nightly"
MODEL: Final = "scripted:drill"
BLOB_BYTES: Final = 40_000
TURNS: Final = 6

PLENTY: Final = 1_000_000 * DOLLAR
"""A cap that is never reached: only a session's own cap refuses a call."""

CAPS: Final = Caps(
    session=Cap(1 * DOLLAR),
    trigger=(Cap(PLENTY, "month"),),
    agent=(Cap(PLENTY, "day"), Cap(PLENTY, "hour")),
    fleet=(Cap(PLENTY, "day"), Cap(None, "month")),
    token_budget=500_000,
)
CARVED: Final = usd_to_micros("0.10")
HELPER_CAPS: Final = Caps(session=Cap(CARVED), agent=CAPS.agent, fleet=CAPS.fleet)


class PlanStep(msgspec.Struct, frozen=True):
    """One step of a session. Its id is the key of its write, so that it happens once."""

    id: str
    session: str


class BeginStep(PlanStep, frozen=True):
    """The session starts, with its task as the body and its definition as a blob."""


class DelegateStep(PlanStep, frozen=True):
    """A sub-session starts, with a cap carved out of this one's."""


class SayStep(PlanStep, frozen=True):
    """A message or signal arrives in the inbox."""

    event: WakePosted
    body: bytes


class AttachStep(PlanStep, frozen=True):
    """A document arrives in the inbox that is too large for a body."""

    size: int


class WakeStep(PlanStep, frozen=True):
    """The session wakes and reads its whole inbox."""

    cause: WakeCause


class Spend(msgspec.Struct, frozen=True):
    """One call or request: its hold, result and cost."""

    id: str
    what: Literal["call", "request"]
    name: str
    result: ActualResult
    usd: int
    tokens: int = 0
    purpose: Purpose = "turn"
    body: bytes = b""


class ActStep(PlanStep, frozen=True):
    """Calls or requests that are in flight together."""

    together: tuple[Spend, ...]


class RestStep(PlanStep, frozen=True):
    """The session parks: due again immediately, or until its inbox wakes it."""

    state: State = "SLEEPING"
    due: bool = True
    wake_on: tuple[str, ...] = ()
    resident: bool = False


class SetCapStep(PlanStep, frozen=True):
    """A person changes the cap of a session."""

    cap: int


class EraseStep(PlanStep, frozen=True):
    """A person erases the bodies of a finished session."""


class EndStep(PlanStep, frozen=True):
    """The session ends."""

    state: State
    terminal_reason: str


Step = (
    BeginStep | DelegateStep | SayStep | AttachStep | WakeStep | ActStep | RestStep | SetCapStep | EraseStep | EndStep
)


def child_of(session: str) -> str:
    return f"{session}-helper"


def plan(session: str, blob_bytes: int = BLOB_BYTES) -> tuple[Step, ...]:
    """Make the steps of a whole session, with ids that contain its name."""
    return (
        BeginStep(f"{session}/start", session),
        WakeStep(f"{session}/first", session, "trigger"),
        *(step for turn in range(1, TURNS + 1) for step in _turn(session, turn)),
        AttachStep(f"{session}/attach", session, blob_bytes),
        WakeStep(f"{session}/attached", session, "webhook"),
        SetCapStep(f"{session}/raise", session, 2 * DOLLAR),
        *_delegate_steps(session),
        *_closing(session),
    )


def _act(session: str, *spends: Spend) -> ActStep:
    return ActStep("", session, spends)


def _ending(session: str, state: State, reason: str) -> EndStep:
    return EndStep(f"{session_stream(session)} ends", session, state, reason)


def _turn(session: str, turn: int) -> Iterator[Step]:
    """Plan one turn: request, calls, request, park, wake. Each turn differs."""
    name = f"{session}/turn-{turn}"
    yield _act(session, _request(f"{name}/think", "turn", turn))
    yield _act(session, *(_call(f"{name}/act-{number}", turn + number) for number in range(1 + turn % 2)))
    yield _act(session, _request(f"{name}/conclude", "gate" if turn % 2 else "judge", turn + 1))
    match turn % 3:
        case 0:
            yield RestStep(f"{name}/rest", session, resident=True)
            yield WakeStep(f"{name}/wake", session, "timer")
        case 1:
            yield RestStep(f"{name}/rest", session, due=False, wake_on=("price_drop", "disk_full"))
            yield SayStep(f"{name}/other-signal", session, _signal("new_moon"), b"A signal without a listener.")
            yield SayStep(f"{name}/signal", session, _signal("price_drop"), b"\xff\x00 not text \xed\xa0\x80")
            yield WakeStep(f"{name}/wake", session, "signal")
        case _:
            message = WakePosted(cause="message", origin="person", sender="ada", trusted=True)
            yield RestStep(f"{name}/rest", session, state="WAITING_FOR_INPUT")
            yield SayStep(f"{name}/message", session, message, f"Good night {turn}, \u263d".encode())
            yield WakeStep(f"{name}/wake", session, "message")


def _delegate_steps(session: str) -> Iterator[Step]:
    """Plan a sub-session that spends more than its cap and is settled with its parent."""
    child = child_of(session)
    yield DelegateStep(f"{child}/start", session)
    yield RestStep(f"{session}/awaiting-helper", session, state="WAITING_FOR_TOOL", due=False)
    yield WakeStep(f"{child}/first", child, "trigger")
    yield _act(child, _request(f"{child}/think", "turn", 1))
    result = ActualResult("ok", usd=usd_to_micros("0.15"), tokens=0, body=b"It was a long document.")
    yield _act(child, Spend(f"{child}/read", "call", "read_document", result, usd_to_micros("0.01")))
    yield _ending(child, "BUDGET_EXCEEDED", "cost_cap_reached")
    yield SayStep(f"{child}/told", session, WakePosted(cause="child", origin="agent", sender=child), b"It is over.")
    yield WakeStep(f"{session}/helped", session, "child")


def _closing(session: str) -> Iterator[Step]:
    """Plan a refused call, a free one, one that costs more than its hold, and the end."""
    name = f"{session}/closing"
    yield _act(session, Spend(f"{name}/too-dear", "call", "buy_house", ActualResult("ok"), 5 * DOLLAR))
    yield _act(session, Spend(f"{name}/free", "call", "look_around", ActualResult("ok", body=b"All is quiet."), 0))
    unbilled = ActualResult("error", usd=0, tokens=0)
    yield _act(session, Spend(f"{name}/unbilled", "request", MODEL, unbilled, usd_to_micros("0.02"), 2000))
    result = ActualResult("ok", usd=usd_to_micros("0.03"), tokens=0)
    yield _act(session, Spend(f"{name}/dearer", "call", "translate", result, usd_to_micros("0.02")))
    yield SetCapStep(f"{session}/lower", child_of(session), usd_to_micros("0.05"))
    yield EraseStep(f"{session}/erase", child_of(session))
    yield _ending(session, "COMPLETED", "completed")


def _request(spend: str, purpose: Purpose, size: int) -> Spend:
    usage = Usage(1000 * size, 100 * size, 400 * size, 200 * size)
    usd, body = usd_to_micros("0.004") + size, b"I think so. " * size
    result = ActualResult("ok", usd=usd, tokens=usage.uncached, usage=usage, body=body)
    return Spend(spend, "request", MODEL, result, usd_to_micros("0.01"), 2000 * size, purpose)


def _call(spend: str, size: int) -> Spend:
    outcome = "error" if size % 4 == 0 else "ok"
    result = ActualResult(outcome, usd=usd_to_micros("0.001") * size, tokens=0, body=b"\x00" * size)
    return Spend(spend, "call", "fetch_page", result, usd_to_micros("0.02"), body=b'{"page": %d}' % size)


def _signal(name: str) -> WakePosted:
    return WakePosted(cause="signal", origin="sensor", sender="drill", name=name)


AckedEvent = tuple[Stored, Session]
"""An acknowledged event, and the state of its stream after it."""

Acknowledged = Callable[[Sequence[AckedEvent]], None]
"""Called after every acknowledged commit, before anything else happens, even if the commit has no events."""

PAGE: Final = 1000
CLAIMED: Final = 100
BY: Final = "the drill"


class SessionUnavailable(HalterError):
    """The session of the drill belongs to another worker."""


class Witness(StoreProxy):
    """Folds every event that a store acknowledges, and reports it before the workload continues."""

    def __init__(self, store: Store, on_acknowledged: Acknowledged) -> None:
        super().__init__(store)
        self._acknowledged = on_acknowledged
        self.states: dict[StreamId, Session] = {}
        self.done: set[str] = set()
        self.now = 0

    async def commit(self, write: Write) -> Committed:
        committed = await self._store.commit(write)
        if not committed.is_repeated:
            self._acknowledged([(stored, self._fold(stored)) for stored in committed.fresh()])
        return committed

    async def claim(
        self,
        worker: WorkerId,
        limit: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        """Claim and report the acknowledgment: a lease has no event."""
        leases = await self._store.claim(worker, limit, only, agents)
        self._acknowledged(())
        return leases

    async def put(self, data: bytes) -> Digest:
        """Put and report the acknowledgment: a blob has no event."""
        digest = await self._store.put(data)
        self._acknowledged(())
        return digest

    async def replay(self, stream: StreamId) -> None:
        """Read a stream from its start, as the successor of a dead worker does."""
        while events := await self._store.read(stream, self.state(stream).head, PAGE):
            for stored in events:
                self._fold(stored)

    def state(self, stream: StreamId) -> Session:
        return self.states.get(stream, Session())

    def _fold(self, stored: Stored) -> Session:
        state = fold(self.state(stored.stream), stored)
        self.states[stored.stream] = state
        match stored.event:
            case CallStarted(call=spend) | RequestStarted(request=spend) | CostCapReached(refused=spend):
                self.done |= {stored.key, spend}
            case _:
                self.done.add(stored.key)
        self.now = max(self.now, stored.at)
        return state


class Workload:
    """A worker that runs the remaining steps of one session and its sub-session.

    A claim takes every due session, so several workloads of one worker share `claimed`.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        worker: str,
        session: str = "drill",
        acknowledged: Acknowledged = lambda _: None,
        claimed: dict[str, Lease] | None = None,
    ) -> None:
        self._session = session
        self._clock = clock
        self._worker = WorkerId(worker)
        self._store = Witness(store, acknowledged)
        self._till = DrillLedger(self._store, clock)
        self._claimed: dict[str, Lease] = {} if claimed is None else claimed
        self._leases: dict[str, Lease] = {}

    async def run(self, steps: Sequence[Step] | None = None) -> Session:
        """Run every remaining step; return the session's state."""
        for session in (self._session, child_of(self._session)):
            await self._store.replay(session_stream(session))
            await self._store.replay(inbox_stream(session))
        await self._store.replay(FLEET)
        for step in plan(self._session) if steps is None else steps:
            await self._do(step)
        return self._state(self._session)

    def _state(self, session: str) -> Session:
        return self._store.state(session_stream(session))

    async def _do(self, step: Step) -> None:
        stream = session_stream(step.session)
        match step:
            case ActStep():
                await self._act(step)
            case EndStep():
                state = self._state(step.session)
                if not state.ended:
                    lease = await self._lease(step.session)
                    await self._store.commit(end_session(lease, step.state, step.terminal_reason, state.parent))
                    del self._leases[step.session]
            case _ if step.id in self._store.done:
                pass
            case BeginStep():
                await self._begin(step)
            case DelegateStep():
                await self._delegate(step)
            case SayStep():
                await self._store.commit(post_wake(step.session, step.id, step.event, step.body))
            case AttachStep():
                data = b"".join(b"%08d" % number for number in range(-(-step.size // 8)))[: step.size]
                event = WakePosted(cause="webhook", origin="document", sender=BY, name="report.txt")
                draft = Draft(event, blob=await self._store.put(data))
                await self._store.commit(Write(inbox_stream(step.session), step.id, lambda _: [draft]))
            case WakeStep():
                inbox_head = self._store.state(inbox_stream(step.session)).head
                await self._store.commit(wake_session(await self._lease(step.session), step.id, step.cause, inbox_head))
            case RestStep():
                await self._rest_step(step)
            case SetCapStep():
                account = Account(stream, "", "usd")
                await self._store.commit(change_cap(account, step.cap, BY, step.id, "The plan says so."))
            case EraseStep():
                head = self._store.state(stream).head
                erasure = BodiesErased(stream=stream, through=head, by=BY, reason="The plan says so.")
                await self._store.commit(Write(FLEET, step.id, lambda _: [Draft(erasure)], others=(stream,)))

    async def _begin(self, step: BeginStep) -> None:
        event = SessionStarted(
            session=step.session,
            agent=AGENT,
            kind="autonomous",
            started_by=BY,
            origin="config",
            trigger=TRIGGER,
            definition=await self._store.put(b'{"agent": "night-watch"}'),
        )
        await self._store.commit(start_session(event, b"Watch the night."))

    async def _delegate(self, step: DelegateStep) -> None:
        event = SessionStarted(
            session=child_of(step.session),
            agent=HELPER,
            kind="task",
            started_by=AGENT,
            origin="agent",
            trusted=False,
            parent=step.session,
            carved=carve(step.session, CARVED, CAPS.session.max_cost_usd),
        )
        await self._store.commit(start_child(event, await self._lease(step.session), b"Read what was attached."))

    async def _act(self, step: ActStep) -> None:
        """Hold money for all effects of a step, and settle them in reverse order."""
        flights: list[tuple[Spend, InFlight]] = []
        for spend in step.together:
            if spend.id not in self._store.done:
                answer = await self._till.admit(await self._lease(step.session), self._make_request(step, spend))
                if isinstance(answer, InFlight):
                    flights.append((spend, answer))
        for spend, flight in reversed(flights):
            await self._till.settle(await self._lease(step.session), flight, spend.result)

    def _make_request(self, step: ActStep, spend: Spend) -> CallRequest | ModelAttempt:
        state, now = self._state(step.session), self._clock.now()
        caps = HELPER_CAPS if state.parent else CAPS
        spender = Spender(step.session, state.agent, state.trigger)
        if spend.what == "call":
            return make_request(spend.id, spend.name, caps, spender, now, spend.usd, spend.body)
        return ModelAttempt(
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

    async def _rest_step(self, step: RestStep) -> None:
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

    async def _lease(self, session: str) -> Lease:
        if session not in self._leases:
            lease = await self._claim(session)
            state = self._state(session)
            self._leases[session] = lease
            if lease.generation > 1 and state.state == "RUNNING":
                await self._take_over_session(lease, state)
        return self._leases[session]

    async def _claim(self, session: str) -> Lease:
        if session not in self._claimed:
            self._claimed |= {lease.session: lease for lease in await self._store.claim(self._worker, CLAIMED)}
        if session not in self._claimed:
            raise SessionUnavailable(f"Cannot claim session {session}: another worker owns it, or it is not due.")
        return self._claimed.pop(session)

    async def _take_over_session(self, lease: Lease, state: Session) -> None:
        """Record the new owner, and settle effects in doubt at their maximum cost."""
        key = f"{lease.session}/{lease.generation}/takeover"
        await self._store.commit(wake_session(lease, key, None, state.inbox_seen))
        await self._till.settle_in_doubt(lease, list(state.in_flight.values()))
