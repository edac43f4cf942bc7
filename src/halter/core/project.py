"""How an event changes the rows: written once, used by every store and by every rebuild.

Streams are read in no promised order, so every change here is either to a column that only one stream writes,
or a sum, or settled by rank (see `Budget.capped`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast, get_args

import msgspec

from halter.core import rates
from halter.core.decided import decision_asked, decision_made, decision_withdrawn, rule_made
from halter.core.events import (
    AgentSwitched,
    AnyEvent,
    AttendingFailed,
    BodiesErased,
    CallRefused,
    CallSettled,
    CallStarted,
    CapChanged,
    ContextCut,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    DocumentRead,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HotStateSeen,
    JudgesChosen,
    Leaving,
    MessageAdded,
    MessageRouted,
    OfSessions,
    OfTriggers,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RuleEnded,
    RuleMade,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    StoreAccepted,
    ToolPinned,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.core.ids import FLEET, StreamId, session_of
from halter.core.money import CARVED, MINUTELY, Account, BudgetRow, Charge, Leg
from halter.core.place import Known, Place, session_at
from halter.core.row import Row, RowKey
from halter.core.rows import (
    FREE,
    AgentRow,
    AuditRow,
    DecisionRow,
    FleetPolicyRow,
    HaltRow,
    HoldRow,
    PinRow,
    RateRow,
    RuleRow,
    SessionRow,
    SpendRow,
)
from halter.core.task_project import left, of_trigger
from halter.core.task_rows import OutputRow
from halter.core.usage import Usage
from halter.core.vocabulary import Purpose


class Gone(msgspec.Struct, frozen=True):
    """A row that is no more."""

    key: RowKey


class Erase(msgspec.Struct, frozen=True):
    """Bodies that must go, with the blobs that only they name."""

    stream: StreamId
    through: int


Effect = Row | Gone | Erase

# Asking a union of types one by one takes longer than all that follows.
POLICY: Final[RowKey] = (FleetPolicyRow, (FLEET,))
"""Where the policy of the store stands."""
_OF_TRIGGERS: Final = frozenset(get_args(OfTriggers))
_LEAVING: Final = frozenset(get_args(Leaving))
_ENCODE_LEGS: Final = msgspec.json.Encoder().encode


def project(event: AnyEvent, place: Place, known: Known) -> Iterator[Effect]:
    """Give the rows as they stand after the event."""
    kind = type(event)
    if kind in _OF_TRIGGERS:
        return of_trigger(cast("OfTriggers", event), place, known)
    if kind in _LEAVING:
        return left(cast("Leaving", event), place, known)
    return _project(cast("OfSessions", event), place, known)


def _project(event: OfSessions, place: Place, known: Known) -> Iterator[Effect]:
    match event:
        case RequestStarted():
            yield from _held(event.request, event.model, event.purpose, event.legs, place, known)
        case CallStarted():
            yield from _call_started(event, place, known)
        case RequestSettled():
            yield from _settled(event.request, event, event.usage or Usage(), place, known)
        case CallSettled():
            yield from _settled(event.call, event, Usage(), place, known)
            yield from _audit_settled(event, place, known)
        case CallRefused():
            yield from _call_refused(event, place, known)
        case SessionStarted():
            yield from _session_started(event, place, known)
        case SessionWoken() | SessionParked() | SessionResumed():
            yield _session_moved(event, place, known)
        case SessionEnded():
            yield from _session_ended(event, place, known)
        case TurnStarted():
            yield _session(place, known, inbox_seen=event.inbox_seen)
        case WakePosted():
            yield _wake_posted(event, place, known)
        case CapChanged():
            row = budget_row(known, Account(event.scope, event.window, event.unit))
            yield row.capped(event.cap, place.at, event.by).moved(overrun=event.overrun)
        case HaltRequested() | HaltLifted():
            yield _halt(event, place)
        case DecisionAsked():
            yield decision_asked(event, place, known)
        case DecisionMade():
            yield decision_made(event, place, known)
            if session_of(place.stream):
                yield _session(place, known, inbox_head=place.seq, inbox_wake=place.seq, inbox_wake_at=place.at)
        case DecisionWithdrawn():
            yield decision_withdrawn(event, place, known)
        case RuleMade():
            yield rule_made(event, place)
        case RuleEnded():
            row = known.get(RuleRow, event.rule) or RuleRow(event.rule)
            yield msgspec.structs.replace(row, ended_at=place.at, ended_by=event.by)
        case ToolPinned():
            yield PinRow(event.agent, event.tool, event.digest, event.by, place.at)
        case BodiesErased():
            yield Erase(StreamId(event.stream), event.through)
        case AgentSwitched():
            yield AgentRow(event.agent, int(event.on), place.at, event.by, event.reason)
        case FleetPolicyAdopted():
            yield FleetPolicyRow(
                place.stream,
                place.seq,
                event.policy,
                event.digest,
                place.at,
                event.by,
                event.day_cap,
                event.month_cap,
            )
        case (
            CostCapReached()
            | OverrunIncurred()
            | RequestRefused()
            | MessageAdded()
            | ContextCut()
            | TurnEnded()
            | HotStateSeen()
            | TurnSkipped()
            | GuardrailTriggered()
            | SensorChanged()
            | AttendingFailed()
            | PhaseEntered()
            | ContextGiven()
            | DocumentRead()
            | JudgesChosen()
            | MessageRouted()
            | StoreAccepted()
        ):
            pass


def rows_of_hold(hold: str, legs: Sequence[Leg]) -> tuple[RowKey, ...]:
    """Name the rows that placing or settling a hold touches, for the write to declare.

    A hold that weighs on the fleet obeys the policy of the store, as it stands then.
    """
    policy = (POLICY,) if any(leg.scope == FLEET for leg in legs) else ()
    return ((HoldRow, (hold,)), *map(budget_key, legs), *policy)


def _session(place: Place, known: Known, **changes: Any) -> SessionRow:
    session = session_of(place.stream) or ""
    row = known.get(SessionRow, session) or SessionRow(session)
    return msgspec.structs.replace(row, **changes).scheduled()


def _halt(event: HaltRequested | HaltLifted, place: Place) -> HaltRow:
    match event:
        case HaltRequested():
            return HaltRow(event.scope, 1, place.at, event.by, event.reason, 0, int(event.cancels))
        case HaltLifted():
            return HaltRow(event.scope, 0, place.at, event.by, event.reason, event.ramp)


def _session_started(event: SessionStarted, place: Place, known: Known) -> Iterator[Effect]:
    yield _session(
        place,
        known,
        agent=event.agent,
        kind=event.kind,
        trigger=event.trigger,
        parent=event.parent,
        definition=event.definition,
        format=event.format,
        started_at=place.at,
        wake_at=place.at,
    )
    yield from _held(event.session, event.agent, "turn", event.carved, place, known)
    for leg in event.carved if event.bound else ():
        own = budget_row(known, Account(place.stream, "", leg.unit))
        yield own.capped(leg.amount, place.at, CARVED)


def _session_moved(event: SessionWoken | SessionParked | SessionResumed, place: Place, known: Known) -> SessionRow:
    match event:
        case SessionWoken():
            return _session_woken(event, place, known)
        case SessionParked():
            return _session_parked(event, place, known)
        case SessionResumed():
            return _session_resumed(event, place, known)


def _session_woken(event: SessionWoken, place: Place, known: Known) -> SessionRow:
    """Run, in the format of whoever woke it: an older program must not take it up again."""
    row = _session(place, known, state="RUNNING", wake_at=place.at, wake_on="", inbox_seen=event.inbox_seen)
    return msgspec.structs.replace(row, format=max(row.format, event.format))


def _session_resumed(event: SessionResumed, place: Place, known: Known) -> SessionRow:
    row = _session(place, known, state="RUNNING", terminal_reason="", ended_at=None, wake_at=place.at)
    return msgspec.structs.replace(row, format=max(row.format, event.format))


def _session_parked(event: SessionParked, place: Place, known: Known) -> SessionRow:
    kept = {} if event.resident else {"owner": FREE}
    return _session(
        place,
        known,
        state=event.state,
        inbox_seen=event.inbox_seen,
        wake_at=event.wake_at,
        wake_on=" ".join(event.wake_on),
        **kept,
    )


def _session_ended(event: SessionEnded, place: Place, known: Known) -> Iterator[Effect]:
    yield _session(
        place,
        known,
        state=event.state,
        terminal_reason=event.terminal_reason,
        ended_at=place.at,
        wake_at=None,
        wake_on="",
        owner=FREE,
    )
    session = session_of(place.stream) or ""
    hold = known.get(HoldRow, session) if event.charge is not None else None
    if hold is not None and event.charge is not None:
        yield from _freed(hold, hold.taken(), event.charge, known)


def _wake_posted(event: WakePosted, place: Place, known: Known) -> SessionRow:
    waking = {"inbox_wake": place.seq, "inbox_wake_at": place.at} if event.wakes else {}
    return _session(place, known, inbox_head=place.seq, **waking)


def _held(
    hold: str, name: str, purpose: Purpose, legs: tuple[Leg, ...], place: Place, known: Known
) -> Iterator[Effect]:
    if not legs:
        return
    session = session_of(place.stream) or ""
    yield HoldRow(hold, session, place.at, purpose, name, _ENCODE_LEGS(legs))
    for leg in legs:
        row = budget_row(known, leg)
        if leg.is_rate:
            yield from rates.moved(row, leg, held=leg.amount)
        else:
            yield row.capped(leg.cap, place.at).moved(held=leg.amount)


def _settled(
    call: str, event: CallSettled | RequestSettled, usage: Usage, place: Place, known: Known
) -> Iterator[Effect]:
    if event.charge is None:
        return
    if event.unheld is not None:
        # Nothing was held for it, which is a hold of nothing: the truth counts all the same.
        yield from _held(call, event.unheld.name, event.unheld.purpose, event.unheld.accounts, place, known)
    hold = known.get(HoldRow, call)
    if hold is not None:
        legs = hold.taken()
        yield from _freed(hold, legs, event.charge, known)
        yield _spend(hold, legs, event.charge, usage, place, known)


def _freed(hold: HoldRow, legs: Sequence[Leg], charge: Charge, known: Known) -> Iterator[Effect]:
    yield Gone(hold.key())
    for leg in legs:
        row, spent = budget_row(known, leg), charge.of(leg.unit)
        if leg.is_rate:
            yield from rates.moved(row, leg, spent=spent, held=-leg.amount)
        else:
            yield row.moved(spent=spent, held=-leg.amount)
    for over in charge.overruns:
        yield budget_row(known, over).moved(overrun=over.amount)


def _spend(hold: HoldRow, legs: Sequence[Leg], charge: Charge, usage: Usage, place: Place, known: Known) -> SpendRow:
    session = known.get(SessionRow, hold.session) or SessionRow(hold.session)
    return SpendRow(
        hold=hold.hold,
        at=place.at,
        agent=session.agent,
        session=hold.session,
        trigger=session.trigger,
        name=hold.name,
        purpose=hold.purpose,
        usd=charge.usd,
        held_usd=max([leg.amount for leg in legs if leg.unit == "usd"], default=0),
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )


def _call_started(event: CallStarted, place: Place, known: Known) -> Iterator[Effect]:
    yield from _held(event.call, event.tool, event.purpose, event.legs, place, known)
    for digest in event.writes:
        agent = session_at(place, known).agent
        before = known.get(OutputRow, agent, digest)
        yield OutputRow(agent, digest, min(place.at, before.at) if before else place.at)
    if event.rated:
        yield rate_row(known, session_at(place, known).agent, event.tool, event.rated, attempts=1)
    if event.decision:
        row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
        yield msgspec.structs.replace(row, used_at=place.at)
    if event.audit:
        session = session_at(place, known)
        yield AuditRow(
            call=event.call,
            session=session.session,
            agent=session.agent,
            tool=event.tool,
            capability_level=event.level,
            risk_level=event.risk or "",
            decision=event.decision,
            decided_by=event.decided_by,
            outcome="",
            cost_usd=0,
            duration_ms=0,
            created_at=place.at,
            shows_result=int(event.audit == "full"),
            asked_seq=place.seq,
            settled_seq=0,
        )


def _audit_settled(event: CallSettled, place: Place, known: Known) -> Iterator[Effect]:
    row = known.get(AuditRow, event.call) if event.audited else None
    if row is not None:
        yield msgspec.structs.replace(
            row,
            outcome=event.outcome,
            cost_usd=event.charge.usd if event.charge else 0,
            duration_ms=event.duration_ms,
            settled_seq=place.seq,
        )


def _call_refused(event: CallRefused, place: Place, known: Known) -> Iterator[Effect]:
    """Refused calls of any level are audited."""
    session = session_at(place, known)
    yield AuditRow(
        call=event.call,
        session=session.session,
        agent=session.agent,
        tool=event.tool,
        capability_level=event.level,
        risk_level=event.risk or "",
        decision=event.decision,
        decided_by=event.decided_by,
        outcome=event.outcome,
        cost_usd=0,
        duration_ms=0,
        created_at=place.at,
        shows_result=0,
        asked_seq=place.seq,
        settled_seq=place.seq,
    )


def rate_row(known: Known, agent: str, tool: str, piece: int, attempts: int = 0) -> RateRow:
    """Return one slice of a tool's rate, with so many more attempts."""
    row = known.get(RateRow, agent, tool, piece)
    return RateRow(agent, tool, piece, (row.attempts if row else 0) + attempts)


def budget_row(known: Known, account: Account) -> BudgetRow:
    """Return what stands against a cap, also where nothing stands yet."""
    scope, window, unit = account.scope, account.window, account.unit
    if window.startswith(MINUTELY):
        return rates.in_its_minute(known.get(BudgetRow, scope, MINUTELY, unit), account)
    row = known.get(BudgetRow, scope, window, unit)
    return row if row is not None else BudgetRow(scope, window, unit)


def budget_key(account: Account) -> RowKey:
    """Name the row of an account, for a write to declare."""
    window = account.window
    return (BudgetRow, (account.scope, MINUTELY if window.startswith(MINUTELY) else window, account.unit))
