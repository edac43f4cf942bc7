"""The projection of events to rows, shared by all stores and by rebuilds.

Streams are read in no guaranteed order. So each change is to a column that only one stream writes, or to a sum, or is
decided by rank (see `BudgetRow.with_cap`). A trigger's rows follow its own stream. Every column of the other rows
follows one class of streams: the session's, the fleet's, or the outbox's. If several sessions propose the same
precedent, the first by time and name provides the text, and the number of proposals is a sum.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar, get_args

import msgspec

from halter.core import money
from halter.core.events import (
    AgentSwitched,
    AnyEvent,
    ApprovalGiven,
    ArtifactEvent,
    AttendingFailed,
    BodiesErased,
    CallRefused,
    CallSettled,
    CallStarted,
    CapChanged,
    ChannelEvent,
    ContextCut,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    DocumentRead,
    FilesGiven,
    FindingEmitted,
    FindingReviewed,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HistoryGiven,
    HoldMade,
    HoldReleased,
    HotStateSeen,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageAdded,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OverrunIncurred,
    PersonSignedOn,
    PhaseEntered,
    PrecedentProposed,
    PricesChanged,
    ProposalDecided,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RuleEnded,
    RuleMade,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    SensorChanged,
    SessionEnded,
    SessionEvent,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    SignOnRefused,
    StoreAccepted,
    ToolPinned,
    TriggerEnded,
    TriggerEvent,
    TriggerMade,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.core.ids import FLEET, StreamId, parse_session_id
from halter.core.money import CARVED_CAP, MINUTE_WINDOW, Account, BudgetRow, Charge, Leg, Unit
from halter.core.rows import (
    NO_OWNER,
    AgentRow,
    AuditRow,
    DecisionRow,
    FindingRow,
    FleetPolicyRow,
    HaltRow,
    HoldRow,
    ItemRow,
    MemoryRow,
    NotificationRow,
    OutageRow,
    OutputRow,
    PinRow,
    PrecedentRow,
    RateRow,
    RuleRow,
    SessionRow,
    SpendRow,
    TriggerRow,
    find_session,
)
from halter.core.usage import Usage
from halter.core.vocabulary import Purpose, R, Row, RowKey


class RowsBefore(Protocol):
    def get(self, kind: type[R], /, *key: Any) -> R | None: ...


class MutableRows(RowsBefore, Protocol):
    """Rows that a projection reads and changes."""

    def save(self, row: Row) -> None: ...
    def drop(self, key: RowKey) -> None: ...
    def erase(self, bodies: "EraseBodies") -> None: ...


class EventPosition(Protocol):
    @property
    def stream(self) -> StreamId: ...
    @property
    def seq(self) -> int: ...
    @property
    def at(self) -> int: ...


def find_session_row(position: EventPosition, rows: RowsBefore) -> SessionRow:
    """Return the row of the session that an event belongs to, or an empty row."""
    session = parse_session_id(position.stream)
    return SessionRow("") if session is None else rows.get(SessionRow, session) or SessionRow(session)


T = TypeVar("T", bound=Row)


def project_trigger_event(event: TriggerEvent, position: EventPosition, rows: MutableRows) -> None:
    row = rows.get(TriggerRow, event.trigger) or TriggerRow(event.trigger)
    match event:
        case TriggerMade():
            rows.save(_apply_trigger_made(row, event, position))
        case TriggerEnded():
            rows.save(_replace_fields(row, ended_at=position.at, queued_at=None))
        case RunStarted():
            rows.save(_apply_run_started(row, event, position))
            if event.item:
                item = _find_item_row(rows, event.trigger, event.item)
                rows.save(_replace_fields(item, attempts=event.attempt, session=event.session))
        case RunSkipped():
            queued_at = None if row.queued_at == event.due_at else row.queued_at
            rows.save(_replace_fields(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=queued_at))
        case RunQueued():
            rows.save(_replace_fields(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=event.due_at))
        case RunsDelayed():
            rows.save(_replace_fields(row, delayed=event.sentence, delayed_until=event.until))
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            rows.save(_apply_item_event(_find_item_row(rows, event.trigger, event.item), event, position))


def _apply_trigger_made(row: TriggerRow, event: TriggerMade, position: EventPosition) -> TriggerRow:
    """Create or change a trigger; its earlier ticks stay handled."""
    return _replace_fields(
        row,
        agent=event.agent,
        type=event.type,
        digest=event.digest,
        made_by=event.by,
        made_at=position.at,
        made_seq=position.seq,
        ended_at=None,
        ticked_at=position.at,
        queued_at=None,
    )


def _apply_run_started(row: TriggerRow, event: RunStarted, position: EventPosition) -> TriggerRow:
    return _replace_fields(
        row,
        ticked_at=max(row.ticked_at, event.due_at),
        queued_at=None if row.queued_at == event.due_at else row.queued_at,
        runs=row.runs + 1,
        session=event.session,
        ran_at=position.at,
        delayed="",
        delayed_until=None,
    )


def _apply_item_event(
    row: ItemRow, event: ItemSeen | ItemQuarantined | ItemReleased, position: EventPosition
) -> ItemRow:
    match event:
        case ItemSeen():
            return _replace_fields(
                row, name=event.name, size=event.size, seen_at=position.at, ignored=int(event.ignored)
            )
        case ItemQuarantined():
            return _replace_fields(row, attempts=event.attempts, quarantined_at=position.at, sentence=event.sentence)
        case ItemReleased():
            return _replace_fields(row, attempts=0, session="", quarantined_at=None, sentence="", ignored=0)


def _find_item_row(rows: RowsBefore, trigger: str, item: str) -> ItemRow:
    return rows.get(ItemRow, trigger, item) or ItemRow(trigger, item)


def project_artifact_event(event: ArtifactEvent, position: EventPosition, rows: MutableRows) -> None:
    session = find_session(position.stream)
    match event:
        case FindingEmitted():
            row = rows.get(FindingRow, event.finding) or FindingRow(event.finding)
            facts = {key: getattr(event, key) for key in ("agent", "severity", "support", "document", "name")}
            rows.save(_replace_fields(row, session=session, emitted_at=position.at, emitted_seq=position.seq, **facts))
        case FindingReviewed():
            row = rows.get(FindingRow, event.finding) or FindingRow(event.finding)
            rows.save(_replace_fields(row, review=event.verdict, reviewed_seq=position.seq))
        case MemoryProposed():
            row = rows.get(MemoryRow, event.memory) or MemoryRow(event.memory)
            rows.save(
                _replace_fields(
                    row, session=session, agent=event.agent, proposed_at=position.at, proposed_seq=position.seq
                )
            )
        case PrecedentProposed():
            rows.save(_apply_precedent(rows.get(PrecedentRow, event.precedent), event, session, position))
        case ProposalDecided():
            rows.save(_apply_proposal_decision(event, position, rows))
        case NotificationQueued() | NotificationSent() | NotificationFailed():
            rows.save(_apply_notification(event, position, rows))


def _apply_precedent(
    row: PrecedentRow | None, event: PrecedentProposed, session: str, position: EventPosition
) -> PrecedentRow:
    row = row or PrecedentRow(event.precedent)
    sort_key = (position.at, session, position.seq)
    is_later = row.observed_count and (row.first_at, row.session, row.proposed_seq) <= sort_key
    source = {} if is_later else {"first_at": position.at, "session": session, "proposed_seq": position.seq}
    return _replace_fields(
        row,
        agent=event.agent,
        kind=event.kind,
        observed_count=row.observed_count + 1,
        last_at=max(row.last_at, position.at),
        **source,
    )


def _apply_proposal_decision(event: ProposalDecided, position: EventPosition, rows: RowsBefore) -> Row:
    decision = {"status": event.status, "by": event.by, "decided_at": position.at}
    match event.about:
        case "finding":
            return _replace_fields(rows.get(FindingRow, event.proposal) or FindingRow(event.proposal), **decision)
        case "memory":
            return _replace_fields(rows.get(MemoryRow, event.proposal) or MemoryRow(event.proposal), **decision)
        case "precedent":
            return _replace_fields(rows.get(PrecedentRow, event.proposal) or PrecedentRow(event.proposal), **decision)


def _apply_notification(
    event: NotificationQueued | NotificationSent | NotificationFailed,
    position: EventPosition,
    rows: RowsBefore,
) -> NotificationRow:
    row = rows.get(NotificationRow, event.notification) or NotificationRow(event.notification)
    match event:
        case NotificationQueued():
            facts = {"channel": event.channel, "agent": event.agent, "about": event.about, "stream": position.stream}
            return _replace_fields(row, queued_at=position.at, queued_seq=position.seq, **facts)
        case NotificationSent():
            return _replace_fields(row, sent_at=position.at, attempts=event.attempts, next_at=None, error="")
        case NotificationFailed():
            gave_up = int(event.next_at is None)
            return _replace_fields(
                row, attempts=event.attempts, next_at=event.next_at, gave_up=gave_up, error=event.error
            )


def rows_of_event(event: object) -> tuple[RowKey, ...]:
    """List the rows that a trigger or artifact event changes, for a write to declare."""
    if PROJECTIONS.get(type(event)) not in {project_trigger_event, project_artifact_event}:
        return ()
    match event:
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            return ((TriggerRow, event.trigger), (ItemRow, event.trigger, event.item))
        case RunStarted(item=item) if item:
            return ((TriggerRow, event.trigger), (ItemRow, event.trigger, item))
        case TriggerMade() | TriggerEnded() | RunStarted() | RunSkipped() | RunQueued() | RunsDelayed():
            return ((TriggerRow, event.trigger),)
        case FindingEmitted() | FindingReviewed():
            return ((FindingRow, event.finding),)
        case MemoryProposed():
            return ((MemoryRow, event.memory),)
        case PrecedentProposed():
            return ((PrecedentRow, event.precedent),)
        case ProposalDecided():
            return (_proposal_key(event),)
        case NotificationQueued() | NotificationSent() | NotificationFailed():
            return ((NotificationRow, event.notification),)
        case _:
            return ()


def _proposal_key(event: ProposalDecided) -> RowKey:
    match event.about:
        case "finding":
            return (FindingRow, event.proposal)
        case "memory":
            return (MemoryRow, event.proposal)
        case "precedent":
            return (PrecedentRow, event.proposal)


def _replace_fields(row: T, **changes: object) -> T:
    return msgspec.structs.replace(row, **changes)


def project_decision_asked(event: DecisionAsked, position: EventPosition, rows: RowsBefore) -> DecisionRow:
    session = find_session_row(position, rows)
    row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return msgspec.structs.replace(
        row,
        about=event.about,
        session=session.session,
        agent=session.agent or event.agent,
        subject=event.subject,
        name=event.name,
        digest=event.digest,
        level=event.level or "",
        risk=event.risk or "",
        asked_at=max(position.at, event.shown_at),
        expires_at=event.expires_at,
        same=event.same,
        keys=_encode_words(event.keys),
        asked_seq=position.seq,
        approvers=event.approvers,
    )


def project_decision_made(event: DecisionMade, position: EventPosition, rows: RowsBefore) -> DecisionRow:
    """Apply a decision; the order relative to `DecisionAsked` does not matter."""
    row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return msgspec.structs.replace(
        row,
        verdict=event.verdict,
        by=event.by,
        decided_digest=event.digest,
        decided_at=position.at,
        decided_seq=position.seq,
        first_by=event.first_by or row.first_by,
    )


def _encode_words(values: tuple[str, ...]) -> str:
    return msgspec.json.encode(values).decode()


def project_rule_made(event: RuleMade, position: EventPosition) -> RuleRow:
    return RuleRow(
        rule=event.rule,
        tool=event.tool,
        scope=event.scope,
        owner=event.owner,
        matcher=event.matcher,
        keys=_encode_words(event.keys),
        by=event.by,
        made_at=position.at,
        expires_at=event.expires_at,
    )


class EraseBodies(msgspec.Struct, frozen=True):
    """The bodies to erase, with the blobs that only they name."""

    stream: StreamId
    through: int


POLICY_KEY: Final[RowKey] = (FleetPolicyRow, FLEET)
PRICES_PIN: Final = "prices"
"""The pin of the fetched prices, which belongs to no agent."""
NO_USAGE: Final = Usage()
_ENCODE_LEGS: Final = msgspec.json.Encoder().encode


def project_event(event: AnyEvent, position: EventPosition, rows: MutableRows) -> None:
    """Apply an event to the rows."""
    PROJECTIONS.get(type(event), project_session_event)(event, position, rows)


def _request_started(event: RequestStarted, position: EventPosition, rows: MutableRows) -> None:
    if event.legs:
        _insert_hold(event.request, event.model, event.purpose, event.legs, position, rows)


def _request_settled(event: RequestSettled, position: EventPosition, rows: MutableRows) -> None:
    if event.charge is not None:
        _settle_hold(event.request, event, event.charge, event.usage or NO_USAGE, position, rows)


def _call_settled(event: CallSettled, position: EventPosition, rows: MutableRows) -> None:
    if event.charge is not None:
        _settle_hold(event.call, event, event.charge, NO_USAGE, position, rows)
    if event.audited:
        _settle_audit(event, position, rows)


def _project_nothing(event: ChannelEvent | TurnEnded, position: EventPosition, rows: MutableRows) -> None:
    """Change nothing: channels are folded from their streams, and the end of a turn changes no row."""


def _turn_started(event: TurnStarted, position: EventPosition, rows: MutableRows) -> None:
    row = rows.get(SessionRow, find_session(position.stream))
    # Usually the inbox is empty, and the row does not change.
    if row is None or row.inbox_seen != event.inbox_seen:
        rows.save(_change_session(position, rows, inbox_seen=event.inbox_seen))


def project_session_event(event: SessionEvent, position: EventPosition, rows: MutableRows) -> None:
    match event:
        case CallRefused():
            # Refused calls of any level are audited.
            rows.save(_make_audit_row(event, position, rows, event.outcome, settled_seq=position.seq))
        case SessionWoken() | SessionParked() | SessionResumed():
            rows.save(_move_session(event, position, rows))
            _move_outage(event, position, rows)
        case WakePosted():
            rows.save(_wake_posted(event, position, rows))
        case (
            CostCapReached()
            | OverrunIncurred()
            | RequestRefused()
            | MessageAdded()
            | ContextCut()
            | HotStateSeen()
            | TurnSkipped()
            | GuardrailTriggered()
            | SensorChanged()
            | AttendingFailed()
            | PhaseEntered()
            | ContextGiven()
            | HistoryGiven()
            | FilesGiven()
            | DocumentRead()
            | JudgesChosen()
            | MessageRouted()
            | StoreAccepted()
        ):
            pass
        case PersonSignedOn() | SignOnRefused():
            rows.save(_audit_sign_on(event, position))
        case SessionStarted() | SessionEnded() | TurnStarted() | TurnEnded():
            pass  # These and the following have their own functions in `PROJECTIONS`.
        case RequestStarted() | CallStarted() | RequestSettled() | CallSettled() | HoldMade() | HoldReleased():
            pass
        case _:
            _project_statement(event, position, rows)


_Command = (
    CapChanged
    | HaltRequested
    | HaltLifted
    | DecisionAsked
    | ApprovalGiven
    | DecisionMade
    | DecisionWithdrawn
    | RuleMade
    | RuleEnded
    | ToolPinned
    | BodiesErased
    | AgentSwitched
    | FleetPolicyAdopted
    | PricesChanged
)


def _project_statement(event: _Command, position: EventPosition, rows: MutableRows) -> None:
    """Project the events of decisions and of people's commands."""
    match event:
        case CapChanged():
            row = budget_row(rows, Account(event.scope, event.window, event.unit))
            rows.save(row.with_cap(event.cap, position.at, event.by).with_amounts(overrun=event.overrun))
        case HaltRequested() | HaltLifted():
            rows.save(_project_halt(event, position))
        case DecisionAsked():
            rows.save(project_decision_asked(event, position, rows))
        case ApprovalGiven():
            row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
            rows.save(msgspec.structs.replace(row, first_by=event.by))
        case DecisionMade():
            rows.save(project_decision_made(event, position, rows))
            if find_session(position.stream):
                rows.save(
                    _change_session(
                        position, rows, inbox_head=position.seq, inbox_wake=position.seq, inbox_wake_at=position.at
                    )
                )
        case DecisionWithdrawn():
            # `decided_at` stays None, because no person decided it.
            row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
            rows.save(msgspec.structs.replace(row, verdict="withdrawn", decided_seq=position.seq))
        case RuleMade():
            rows.save(project_rule_made(event, position))
        case RuleEnded():
            row = rows.get(RuleRow, event.rule) or RuleRow(event.rule)
            rows.save(msgspec.structs.replace(row, ended_at=position.at, ended_by=event.by))
        case ToolPinned():
            rows.save(PinRow(event.agent, event.tool, event.digest, event.by, position.at))
        case PricesChanged():
            rows.save(PinRow("", PRICES_PIN, event.prices, event.by, position.at))
        case BodiesErased():
            rows.erase(EraseBodies(StreamId(event.stream), event.through))
        case AgentSwitched():
            rows.save(AgentRow(event.agent, int(event.on), position.at, event.by, event.reason))
        case FleetPolicyAdopted():
            caps = (event.day_cap, event.month_cap)
            rows.save(
                FleetPolicyRow(position.stream, position.seq, event.policy, event.digest, position.at, event.by, *caps)
            )


def rows_of_hold(hold: str, legs: Sequence[Leg]) -> tuple[RowKey, ...]:
    """List the rows that a hold or its settlement touches, for the write to declare.

    A hold on the fleet is checked against the current policy of the store.
    """
    keys: tuple[RowKey, ...] = ((HoldRow, hold), *map(budget_key, legs))
    return (*keys, POLICY_KEY) if any(leg.scope == FLEET for leg in legs) else keys


def _change_session(position: EventPosition, rows: RowsBefore, **changes: Any) -> SessionRow:
    session = find_session(position.stream)
    row = rows.get(SessionRow, session) or SessionRow(session)
    return msgspec.structs.replace(row, **changes).with_due_at()


def _project_halt(event: HaltRequested | HaltLifted, position: EventPosition) -> HaltRow:
    match event:
        case HaltRequested():
            return HaltRow(event.scope, 1, position.at, event.by, event.reason, 0, int(event.cancels))
        case HaltLifted():
            return HaltRow(event.scope, 0, position.at, event.by, event.reason, event.ramp)


def _session_started(event: SessionStarted, position: EventPosition, rows: MutableRows) -> None:
    rows.save(
        _change_session(
            position,
            rows,
            agent=event.agent,
            kind=event.kind,
            trigger=event.trigger,
            parent=event.parent,
            definition=event.definition,
            format=event.format,
            started_at=position.at,
            wake_at=position.at,
        )
    )
    if event.carved:
        _insert_hold(event.session, event.agent, "turn", event.carved, position, rows)
    for leg in event.carved if event.bound else ():
        budget = budget_row(rows, Account(position.stream, "", leg.unit))
        rows.save(budget.with_cap(leg.amount, position.at, CARVED_CAP))


def _move_session(
    event: SessionWoken | SessionParked | SessionResumed, position: EventPosition, rows: RowsBefore
) -> SessionRow:
    match event:
        case SessionWoken():
            return _session_woken(event, position, rows)
        case SessionParked():
            return _session_parked(event, position, rows)
        case SessionResumed():
            return _session_resumed(event, position, rows)


def _move_outage(
    event: SessionWoken | SessionParked | SessionResumed, position: EventPosition, rows: MutableRows
) -> None:
    """Record the start or the end of an outage; a different trouble starts a new outage."""
    session = find_session(position.stream)
    match event:
        case SessionParked(trouble=trouble) if trouble:
            row = rows.get(OutageRow, session)
            is_same_outage = row is not None and row.ended_at is None and row.trouble == trouble
            began_at = row.began_at if row is not None and is_same_outage else position.at
            agent = find_session_row(position, rows).agent
            rows.save(OutageRow(session, agent, trouble, event.sentence, began_at))
        case SessionWoken(recovered=True):
            row = rows.get(OutageRow, session)
            if row is not None:
                rows.save(_replace_fields(row, ended_at=position.at))
        case _:
            pass


def _session_woken(event: SessionWoken, position: EventPosition, rows: RowsBefore) -> SessionRow:
    """Raise the format to that of the waking program: an older program must not run the session again."""
    row = _change_session(position, rows, state="RUNNING", wake_at=position.at, wake_on="", inbox_seen=event.inbox_seen)
    return msgspec.structs.replace(row, format=max(row.format, event.format))


def _session_resumed(event: SessionResumed, position: EventPosition, rows: RowsBefore) -> SessionRow:
    row = _change_session(position, rows, state="RUNNING", terminal_reason="", ended_at=None, wake_at=position.at)
    return msgspec.structs.replace(row, format=max(row.format, event.format))


def _session_parked(event: SessionParked, position: EventPosition, rows: RowsBefore) -> SessionRow:
    owner = {} if event.resident else {"owner": NO_OWNER}
    return _change_session(
        position,
        rows,
        state=event.state,
        inbox_seen=event.inbox_seen,
        wake_at=event.wake_at,
        wake_on=" ".join(event.wake_on),
        **owner,
    )


def _session_ended(event: SessionEnded, position: EventPosition, rows: MutableRows) -> None:
    rows.save(
        _change_session(
            position,
            rows,
            state=event.state,
            terminal_reason=event.terminal_reason,
            ended_at=position.at,
            wake_at=None,
            wake_on="",
            owner=NO_OWNER,
        )
    )
    session = find_session(position.stream)
    hold = rows.get(HoldRow, session) if event.charge is not None else None
    if hold is not None and event.charge is not None:
        _free_hold(hold, event.charge, rows)


def _wake_posted(event: WakePosted, position: EventPosition, rows: RowsBefore) -> SessionRow:
    wake = {"inbox_wake": position.seq, "inbox_wake_at": position.at} if event.wakes else {}
    return _change_session(position, rows, inbox_head=position.seq, **wake)


def _insert_hold(
    hold: str, name: str, purpose: Purpose, legs: tuple[Leg, ...], position: EventPosition, rows: MutableRows
) -> None:
    at = position.at
    rows.save(HoldRow(hold, find_session(position.stream), at, purpose, name, _ENCODE_LEGS(legs)))
    for leg in legs:
        row = budget_row(rows, leg)
        if row.window == MINUTE_WINDOW:
            rows.save(money.add_to_minute(row, leg, held=leg.amount))
        else:
            rows.save(row.with_cap(leg.cap, at, "", leg.amount))


def _settle_hold(
    call: str,
    event: CallSettled | RequestSettled,
    charge: Charge,
    usage: Usage,
    position: EventPosition,
    rows: MutableRows,
) -> None:
    unheld = event.unheld
    if unheld is not None and unheld.accounts:
        # No hold was made: insert an empty one, so that the true cost counts.
        _insert_hold(call, unheld.name, unheld.purpose, unheld.accounts, position, rows)
    hold = rows.get(HoldRow, call)
    if hold is None:
        return
    held_usd = _free_hold(hold, charge, rows)
    session = rows.get(SessionRow, hold.session) or SessionRow(hold.session)
    rows.save(
        SpendRow(
            position.at,
            call,
            session.agent,
            hold.session,
            session.trigger,
            hold.name,
            hold.purpose,
            charge.usd,
            held_usd,
            usage.input_tokens,
            usage.output_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
        )
    )


def _free_hold(hold: HoldRow, charge: Charge, rows: MutableRows) -> int:
    """Settle every account of a hold, and return the micro-dollars that it held."""
    rows.drop(hold.key())
    held_usd = 0
    for leg in hold.decode_legs():
        row, amount, unit = budget_row(rows, leg), leg.amount, leg.unit
        cost = charge.tokens if unit == "tokens" else charge.of(unit)
        if row.window == MINUTE_WINDOW:
            rows.save(money.add_to_minute(row, leg, spent=cost, held=-amount))
        else:
            rows.save(row.with_amounts(cost, -amount))
        if unit == "usd" and amount > held_usd:
            held_usd = amount
    for overrun in charge.overruns:
        rows.save(budget_row(rows, overrun).with_amounts(overrun=overrun.amount))
    return held_usd


def _hold_made(event: HoldMade, position: EventPosition, rows: MutableRows) -> None:
    if rows.get(HoldRow, event.hold) is not None:
        # Its release was read first, from another stream: only the caps of the accounts are left to learn.
        rows.drop((HoldRow, event.hold))
        for leg in event.legs:
            rows.save(budget_row(rows, leg).with_cap(leg.cap, position.at))
        return
    _insert_hold(event.hold, event.name, event.purpose, event.legs, position, rows)


def _hold_released(event: HoldReleased, position: EventPosition, rows: MutableRows) -> None:
    hold = rows.get(HoldRow, event.hold)
    if hold is None:
        # A rebuild reads streams in any order: this empty hold says that the hold to come is already released.
        rows.save(HoldRow(event.hold, "", position.at, "turn", "", b"[]"))
        return
    rows.drop(hold.key())
    for leg in hold.decode_legs():
        rows.save(budget_row(rows, leg).with_amounts(held=-leg.amount))


def _call_started(event: CallStarted, position: EventPosition, rows: MutableRows) -> None:
    if event.legs:
        _insert_hold(event.call, event.tool, event.purpose, event.legs, position, rows)
    for digest in event.writes:
        agent = find_session_row(position, rows).agent
        output = rows.get(OutputRow, agent, digest)
        rows.save(OutputRow(agent, digest, min(position.at, output.at) if output else position.at))
    if event.rated:
        rows.save(rate_row(rows, find_session_row(position, rows).agent, event.tool, event.rated, attempts=1))
    for stream, slot in event.action_slots:
        row = rows.get(RateRow, stream, "", slot)
        rows.save(RateRow(stream, "", slot, max(position.at, row.attempts if row else 0)))
    if event.decision:
        row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
        rows.save(msgspec.structs.replace(row, used_at=position.at))
    if event.audit:
        rows.save(_make_audit_row(event, position, rows, shows_result=int(event.audit == "full")))


def _make_audit_row(
    event: CallStarted | CallRefused,
    position: EventPosition,
    rows: RowsBefore,
    outcome: str = "",
    shows_result: int = 0,
    settled_seq: int = 0,
) -> AuditRow:
    session = find_session_row(position, rows)
    return AuditRow(
        call=event.call,
        session=session.session,
        agent=session.agent,
        tool=event.tool,
        capability_level=event.level,
        risk_level=event.risk or "",
        decision=event.decision,
        decided_by=event.decided_by,
        outcome=outcome,
        cost_usd=0,
        duration_ms=0,
        created_at=position.at,
        shows_result=shows_result,
        asked_seq=position.seq,
        settled_seq=settled_seq,
    )


def _audit_sign_on(event: PersonSignedOn | SignOnRefused, position: EventPosition) -> AuditRow:
    is_admitted = isinstance(event, PersonSignedOn)
    return AuditRow(
        call=event.id,
        session="",
        agent="",
        tool=f"sign_on {event.via}",
        capability_level=event.role if is_admitted else "",
        risk_level="",
        decision="",
        decided_by=event.name if is_admitted else event.account,
        outcome="ok" if is_admitted else event.why,
        cost_usd=0,
        duration_ms=0,
        created_at=position.at,
        shows_result=0,
        asked_seq=position.seq,
        settled_seq=position.seq,
    )


def _settle_audit(event: CallSettled, position: EventPosition, rows: MutableRows) -> None:
    row = rows.get(AuditRow, event.call)
    if row is not None:
        rows.save(
            msgspec.structs.replace(
                row,
                outcome=event.outcome,
                cost_usd=event.charge.usd if event.charge else 0,
                duration_ms=event.duration_ms,
                settled_seq=position.seq,
            )
        )


def rate_row(rows: RowsBefore, agent: str, tool: str, time_slice: int, attempts: int = 0) -> RateRow:
    """Return the row of one slice of a tool's rate, with attempts added."""
    row = rows.get(RateRow, agent, tool, time_slice)
    return RateRow(agent, tool, time_slice, (row.attempts if row else 0) + attempts)


BudgetKey = tuple[type[BudgetRow], str, str, Unit]
PrepareCapCheck = Callable[[int], tuple[Sequence[BudgetKey], Callable[[Sequence[BudgetRow | None]], bool]]]
"""Returns the rows of all accounts of a session at a moment, and a check of whether any is near its cap."""


def budget_row(rows: RowsBefore, account: Account) -> BudgetRow:
    """Return the row of an account, or an empty row."""
    window = account.window
    if window and window.startswith(MINUTE_WINDOW):
        return money.start_minute_row(rows.get(BudgetRow, account.scope, MINUTE_WINDOW, account.unit), account)
    row = rows.get(BudgetRow, account.scope, window, account.unit)
    return row if row is not None else BudgetRow(account.scope, window, account.unit)


def budget_key(account: Account) -> BudgetKey:
    scope, window, unit = account.scope, account.window, account.unit
    return _make_shared_key(scope, window, unit) if window else (BudgetRow, scope, window, unit)


# Cached: accounts with a window belong to an agent, a trigger, a model or the fleet, which sessions share.
@lru_cache(maxsize=256)
def _make_shared_key(scope: str, window: str, unit: Unit) -> BudgetKey:
    return (BudgetRow, scope, MINUTE_WINDOW if window.startswith(MINUTE_WINDOW) else window, unit)


PROJECTIONS: Final[dict[type[Any], Callable[[Any, EventPosition, MutableRows], None]]] = {
    **dict.fromkeys(get_args(AnyEvent), project_session_event),
    SessionStarted: _session_started,
    SessionEnded: _session_ended,
    TurnStarted: _turn_started,
    RequestStarted: _request_started,
    RequestSettled: _request_settled,
    CallStarted: _call_started,
    CallSettled: _call_settled,
    HoldMade: _hold_made,
    HoldReleased: _hold_released,
    **dict.fromkeys(get_args(TriggerEvent), project_trigger_event),
    **dict.fromkeys(get_args(ArtifactEvent), project_artifact_event),
    **dict.fromkeys((TurnEnded, *get_args(ChannelEvent)), _project_nothing),
}
"""The projection of each kind of event; `project_session_event` is the default."""
