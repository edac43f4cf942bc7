"""How an event changes the rows: written once, used by every store and by every rebuild.

Streams are read in no promised order, so every change is either to a column that only one stream writes, or a sum, or
settled by rank (see `BudgetRow.capped`). A trigger's rows follow its own stream. All else has each column from one
class of streams: the session's, the fleet's, or the outbox's. Of several sessions that met a case, the first by time
and name provides its text; how often it was met is a sum.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar, get_args

import msgspec

from halter.core import events as ev
from halter.core import money
from halter.core.ids import FLEET, StreamId, session_of
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
    """Rows that events change."""

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


def find_session_row(position: EventPosition, known: RowsBefore) -> SessionRow:
    """The session that an event belongs to, if any."""
    session = session_of(position.stream)
    return SessionRow("") if session is None else known.get(SessionRow, session) or SessionRow(session)


T = TypeVar("T", bound=Row)


def project_trigger_event(event: ev.TriggerEvent, position: EventPosition, known: MutableRows) -> None:
    row = known.get(TriggerRow, event.trigger) or TriggerRow(event.trigger)
    match event:
        case ev.TriggerMade():
            known.save(_apply_trigger_made(row, event, position))
        case ev.TriggerEnded():
            known.save(_replace_fields(row, ended_at=position.at, queued_at=None))
        case ev.RunStarted():
            known.save(_apply_run_started(row, event, position))
            if event.item:
                item = _find_item_row(known, event.trigger, event.item)
                known.save(_replace_fields(item, attempts=event.attempt, session=event.session))
        case ev.RunSkipped():
            queued = None if row.queued_at == event.due_at else row.queued_at
            known.save(_replace_fields(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=queued))
        case ev.RunQueued():
            known.save(_replace_fields(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=event.due_at))
        case ev.RunsDelayed():
            known.save(_replace_fields(row, delayed=event.sentence, delayed_until=event.until))
        case ev.ItemSeen() | ev.ItemQuarantined() | ev.ItemReleased():
            known.save(_apply_item_event(_find_item_row(known, event.trigger, event.item), event, position))


def _apply_trigger_made(row: TriggerRow, event: ev.TriggerMade, position: EventPosition) -> TriggerRow:
    """Create or change a trigger; what has been dealt with stays so."""
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


def _apply_run_started(row: TriggerRow, event: ev.RunStarted, position: EventPosition) -> TriggerRow:
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
    row: ItemRow, event: ev.ItemSeen | ev.ItemQuarantined | ev.ItemReleased, position: EventPosition
) -> ItemRow:
    match event:
        case ev.ItemSeen():
            return _replace_fields(
                row, name=event.name, size=event.size, seen_at=position.at, ignored=int(event.ignored)
            )
        case ev.ItemQuarantined():
            return _replace_fields(row, attempts=event.attempts, quarantined_at=position.at, sentence=event.sentence)
        case ev.ItemReleased():
            return _replace_fields(row, attempts=0, session="", quarantined_at=None, sentence="", ignored=0)


def _find_item_row(known: RowsBefore, trigger: str, item: str) -> ItemRow:
    return known.get(ItemRow, trigger, item) or ItemRow(trigger, item)


def project_artifact_event(event: ev.ArtifactEvent, position: EventPosition, known: MutableRows) -> None:
    session = find_session(position.stream)
    match event:
        case ev.FindingEmitted():
            row = known.get(FindingRow, event.finding) or FindingRow(event.finding)
            facts = {key: getattr(event, key) for key in ("agent", "severity", "support", "document", "name")}
            known.save(_replace_fields(row, session=session, emitted_at=position.at, emitted_seq=position.seq, **facts))
        case ev.FindingReviewed():
            row = known.get(FindingRow, event.finding) or FindingRow(event.finding)
            known.save(_replace_fields(row, review=event.verdict, reviewed_seq=position.seq))
        case ev.MemoryProposed():
            row = known.get(MemoryRow, event.memory) or MemoryRow(event.memory)
            known.save(
                _replace_fields(
                    row, session=session, agent=event.agent, proposed_at=position.at, proposed_seq=position.seq
                )
            )
        case ev.PrecedentProposed():
            known.save(_apply_precedent(known.get(PrecedentRow, event.precedent), event, session, position))
        case ev.ProposalDecided():
            known.save(_apply_proposal_decision(event, position, known))
        case ev.NotificationQueued() | ev.NotificationSent() | ev.NotificationFailed():
            known.save(_apply_notification(event, position, known))


def _apply_precedent(
    row: PrecedentRow | None, event: ev.PrecedentProposed, session: str, position: EventPosition
) -> PrecedentRow:
    row = row or PrecedentRow(event.precedent)
    mine = (position.at, session, position.seq)
    words = row.observed_count and (row.first_at, row.session, row.proposed_seq) <= mine
    first = {} if words else {"first_at": position.at, "session": session, "proposed_seq": position.seq}
    return _replace_fields(
        row,
        agent=event.agent,
        kind=event.kind,
        observed_count=row.observed_count + 1,
        last_at=max(row.last_at, position.at),
        **first,
    )


def _apply_proposal_decision(event: ev.ProposalDecided, position: EventPosition, known: RowsBefore) -> Row:
    said = {"status": event.status, "by": event.by, "decided_at": position.at}
    match event.about:
        case "finding":
            return _replace_fields(known.get(FindingRow, event.proposal) or FindingRow(event.proposal), **said)
        case "memory":
            return _replace_fields(known.get(MemoryRow, event.proposal) or MemoryRow(event.proposal), **said)
        case "precedent":
            return _replace_fields(known.get(PrecedentRow, event.proposal) or PrecedentRow(event.proposal), **said)


def _apply_notification(
    event: ev.NotificationQueued | ev.NotificationSent | ev.NotificationFailed,
    position: EventPosition,
    known: RowsBefore,
) -> NotificationRow:
    row = known.get(NotificationRow, event.notification) or NotificationRow(event.notification)
    match event:
        case ev.NotificationQueued():
            facts = {"channel": event.channel, "agent": event.agent, "about": event.about, "stream": position.stream}
            return _replace_fields(row, queued_at=position.at, queued_seq=position.seq, **facts)
        case ev.NotificationSent():
            return _replace_fields(row, sent_at=position.at, attempts=event.attempts, next_at=None, error="")
        case ev.NotificationFailed():
            gave_up = int(event.next_at is None)
            return _replace_fields(
                row, attempts=event.attempts, next_at=event.next_at, gave_up=gave_up, error=event.error
            )


def rows_of_event(event: object) -> tuple[RowKey, ...]:
    """The rows that such an event changes, for a write to declare."""
    if PROJECTIONS.get(type(event)) not in {project_trigger_event, project_artifact_event}:
        return ()
    match event:
        case ev.ItemSeen() | ev.ItemQuarantined() | ev.ItemReleased():
            return ((TriggerRow, event.trigger), (ItemRow, event.trigger, event.item))
        case ev.RunStarted(item=item) if item:
            return ((TriggerRow, event.trigger), (ItemRow, event.trigger, item))
        case (
            ev.TriggerMade() | ev.TriggerEnded() | ev.RunStarted() | ev.RunSkipped() | ev.RunQueued() | ev.RunsDelayed()
        ):
            return ((TriggerRow, event.trigger),)
        case ev.FindingEmitted() | ev.FindingReviewed():
            return ((FindingRow, event.finding),)
        case ev.MemoryProposed():
            return ((MemoryRow, event.memory),)
        case ev.PrecedentProposed():
            return ((PrecedentRow, event.precedent),)
        case ev.ProposalDecided():
            return (_proposal_key(event),)
        case ev.NotificationQueued() | ev.NotificationSent() | ev.NotificationFailed():
            return ((NotificationRow, event.notification),)
        case _:
            return ()


def _proposal_key(event: ev.ProposalDecided) -> RowKey:
    match event.about:
        case "finding":
            return (FindingRow, event.proposal)
        case "memory":
            return (MemoryRow, event.proposal)
        case "precedent":
            return (PrecedentRow, event.proposal)


def _replace_fields(row: T, **changes: object) -> T:
    return msgspec.structs.replace(row, **changes)


def project_decision_asked(event: ev.DecisionAsked, position: EventPosition, known: RowsBefore) -> DecisionRow:
    session = find_session_row(position, known)
    row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
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
        asked_at=position.at,
        expires_at=event.expires_at,
        same=event.same,
        keys=_encode_words(event.keys),
        asked_seq=position.seq,
        approvers=event.approvers,
    )


def project_decision_made(event: ev.DecisionMade, position: EventPosition, known: RowsBefore) -> DecisionRow:
    """Order-independent with the question."""
    row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return msgspec.structs.replace(
        row,
        verdict=event.verdict,
        by=event.by,
        decided_digest=event.digest,
        decided_at=position.at,
        decided_seq=position.seq,
        first_by=event.first_by or row.first_by,
    )


def _encode_words(words: tuple[str, ...]) -> str:
    return msgspec.json.encode(words).decode()


def project_rule_made(event: ev.RuleMade, position: EventPosition) -> RuleRow:
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
    """Bodies to erase, with the blobs that only they name."""

    stream: StreamId
    through: int


POLICY_KEY: Final[RowKey] = (FleetPolicyRow, FLEET)
NO_USAGE: Final = Usage()
_ENCODE_LEGS: Final = msgspec.json.Encoder().encode


def project_event(event: ev.AnyEvent, position: EventPosition, known: MutableRows) -> None:
    """Change the rows as an event says."""
    PROJECTIONS.get(type(event), project_session_event)(event, position, known)


def _request_started(event: ev.RequestStarted, position: EventPosition, known: MutableRows) -> None:
    if event.legs:
        _insert_hold(event.request, event.model, event.purpose, event.legs, position, known)


def _request_settled(event: ev.RequestSettled, position: EventPosition, known: MutableRows) -> None:
    if event.charge is not None:
        _settle_hold(event.request, event, event.charge, event.usage or NO_USAGE, position, known)


def _call_settled(event: ev.CallSettled, position: EventPosition, known: MutableRows) -> None:
    if event.charge is not None:
        _settle_hold(event.call, event, event.charge, NO_USAGE, position, known)
    if event.audited:
        _settle_audit(event, position, known)


def _project_nothing(event: ev.ChannelEvent | ev.TurnEnded, position: EventPosition, known: MutableRows) -> None:
    """A channel is folded from its stream, and the end of a turn says nothing of its session: they have no rows."""


def _turn_started(event: ev.TurnStarted, position: EventPosition, known: MutableRows) -> None:
    row = known.get(SessionRow, find_session(position.stream))
    # Mostly nothing came, and the row stays as it is.
    if row is None or row.inbox_seen != event.inbox_seen:
        known.save(_change_session(position, known, inbox_seen=event.inbox_seen))


def project_session_event(event: ev.SessionEvent, position: EventPosition, known: MutableRows) -> None:
    match event:
        case ev.CallRefused():
            # Refused calls of any level are audited.
            known.save(_make_audit_row(event, position, known, event.outcome, settled_seq=position.seq))
        case ev.SessionWoken() | ev.SessionParked() | ev.SessionResumed():
            known.save(_move_session(event, position, known))
            _move_outage(event, position, known)
        case ev.WakePosted():
            known.save(_wake_posted(event, position, known))
        case (
            ev.CostCapReached()
            | ev.OverrunIncurred()
            | ev.RequestRefused()
            | ev.MessageAdded()
            | ev.ContextCut()
            | ev.HotStateSeen()
            | ev.TurnSkipped()
            | ev.GuardrailTriggered()
            | ev.SensorChanged()
            | ev.AttendingFailed()
            | ev.PhaseEntered()
            | ev.ContextGiven()
            | ev.HistoryGiven()
            | ev.DocumentRead()
            | ev.JudgesChosen()
            | ev.MessageRouted()
            | ev.StoreAccepted()
        ):
            pass
        case ev.PersonSignedOn() | ev.SignOnRefused():
            known.save(_audit_sign_on(event, position))
        case ev.SessionStarted() | ev.SessionEnded() | ev.TurnStarted() | ev.TurnEnded():
            pass  # By functions of their own, as these:
        case ev.RequestStarted() | ev.CallStarted() | ev.RequestSettled() | ev.CallSettled():
            pass
        case _:
            _project_statement(event, position, known)


_Statement = (
    ev.CapChanged
    | ev.HaltRequested
    | ev.HaltLifted
    | ev.DecisionAsked
    | ev.ApprovalGiven
    | ev.DecisionMade
    | ev.DecisionWithdrawn
    | ev.RuleMade
    | ev.RuleEnded
    | ev.ToolPinned
    | ev.BodiesErased
    | ev.AgentSwitched
    | ev.FleetPolicyAdopted
)


def _project_statement(event: _Statement, position: EventPosition, known: MutableRows) -> None:
    """Yield the rows of what people are asked and say."""
    match event:
        case ev.CapChanged():
            row = budget_row(known, Account(event.scope, event.window, event.unit))
            known.save(row.with_cap(event.cap, position.at, event.by).with_amounts(overrun=event.overrun))
        case ev.HaltRequested() | ev.HaltLifted():
            known.save(_project_halt(event, position))
        case ev.DecisionAsked():
            known.save(project_decision_asked(event, position, known))
        case ev.ApprovalGiven():
            row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
            known.save(msgspec.structs.replace(row, first_by=event.by))
        case ev.DecisionMade():
            known.save(project_decision_made(event, position, known))
            if find_session(position.stream):
                known.save(
                    _change_session(
                        position, known, inbox_head=position.seq, inbox_wake=position.seq, inbox_wake_at=position.at
                    )
                )
        case ev.DecisionWithdrawn():
            # The missing time shows that no person decided it.
            row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
            known.save(msgspec.structs.replace(row, verdict="withdrawn", decided_seq=position.seq))
        case ev.RuleMade():
            known.save(project_rule_made(event, position))
        case ev.RuleEnded():
            row = known.get(RuleRow, event.rule) or RuleRow(event.rule)
            known.save(msgspec.structs.replace(row, ended_at=position.at, ended_by=event.by))
        case ev.ToolPinned():
            known.save(PinRow(event.agent, event.tool, event.digest, event.by, position.at))
        case ev.BodiesErased():
            known.erase(EraseBodies(StreamId(event.stream), event.through))
        case ev.AgentSwitched():
            known.save(AgentRow(event.agent, int(event.on), position.at, event.by, event.reason))
        case ev.FleetPolicyAdopted():
            caps = (event.day_cap, event.month_cap)
            known.save(
                FleetPolicyRow(position.stream, position.seq, event.policy, event.digest, position.at, event.by, *caps)
            )


def rows_of_hold(hold: str, legs: Sequence[Leg]) -> tuple[RowKey, ...]:
    """The rows that placing or settling a hold touches, for the write to declare.

    A hold on the fleet obeys the current policy of the store.
    """
    keys: tuple[RowKey, ...] = ((HoldRow, hold), *map(budget_key, legs))
    return (*keys, POLICY_KEY) if any(leg.scope == FLEET for leg in legs) else keys


def _change_session(position: EventPosition, known: RowsBefore, **changes: Any) -> SessionRow:
    session = find_session(position.stream)
    row = known.get(SessionRow, session) or SessionRow(session)
    return msgspec.structs.replace(row, **changes).scheduled()


def _project_halt(event: ev.HaltRequested | ev.HaltLifted, position: EventPosition) -> HaltRow:
    match event:
        case ev.HaltRequested():
            return HaltRow(event.scope, 1, position.at, event.by, event.reason, 0, int(event.cancels))
        case ev.HaltLifted():
            return HaltRow(event.scope, 0, position.at, event.by, event.reason, event.ramp)


def _session_started(event: ev.SessionStarted, position: EventPosition, known: MutableRows) -> None:
    known.save(
        _change_session(
            position,
            known,
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
        _insert_hold(event.session, event.agent, "turn", event.carved, position, known)
    for leg in event.carved if event.bound else ():
        own = budget_row(known, Account(position.stream, "", leg.unit))
        known.save(own.with_cap(leg.amount, position.at, CARVED_CAP))


def _move_session(
    event: ev.SessionWoken | ev.SessionParked | ev.SessionResumed, position: EventPosition, known: RowsBefore
) -> SessionRow:
    match event:
        case ev.SessionWoken():
            return _session_woken(event, position, known)
        case ev.SessionParked():
            return _session_parked(event, position, known)
        case ev.SessionResumed():
            return _session_resumed(event, position, known)


def _move_outage(
    event: ev.SessionWoken | ev.SessionParked | ev.SessionResumed, position: EventPosition, known: MutableRows
) -> None:
    """Keep since when no model answers a session; another trouble is another outage."""
    session = find_session(position.stream)
    match event:
        case ev.SessionParked(trouble=trouble) if trouble:
            row = known.get(OutageRow, session)
            going_on = row is not None and row.ended_at is None and row.trouble == trouble
            began_at = row.began_at if row is not None and going_on else position.at
            agent = find_session_row(position, known).agent
            known.save(OutageRow(session, agent, trouble, event.sentence, began_at))
        case ev.SessionWoken(recovered=True):
            row = known.get(OutageRow, session)
            if row is not None:
                known.save(_replace_fields(row, ended_at=position.at))
        case _:
            pass


def _session_woken(event: ev.SessionWoken, position: EventPosition, known: RowsBefore) -> SessionRow:
    """Run in the format of the waking program: an older one must not take it up again."""
    row = _change_session(
        position, known, state="RUNNING", wake_at=position.at, wake_on="", inbox_seen=event.inbox_seen
    )
    return msgspec.structs.replace(row, format=max(row.format, event.format))


def _session_resumed(event: ev.SessionResumed, position: EventPosition, known: RowsBefore) -> SessionRow:
    row = _change_session(position, known, state="RUNNING", terminal_reason="", ended_at=None, wake_at=position.at)
    return msgspec.structs.replace(row, format=max(row.format, event.format))


def _session_parked(event: ev.SessionParked, position: EventPosition, known: RowsBefore) -> SessionRow:
    kept = {} if event.resident else {"owner": NO_OWNER}
    return _change_session(
        position,
        known,
        state=event.state,
        inbox_seen=event.inbox_seen,
        wake_at=event.wake_at,
        wake_on=" ".join(event.wake_on),
        **kept,
    )


def _session_ended(event: ev.SessionEnded, position: EventPosition, known: MutableRows) -> None:
    known.save(
        _change_session(
            position,
            known,
            state=event.state,
            terminal_reason=event.terminal_reason,
            ended_at=position.at,
            wake_at=None,
            wake_on="",
            owner=NO_OWNER,
        )
    )
    session = find_session(position.stream)
    hold = known.get(HoldRow, session) if event.charge is not None else None
    if hold is not None and event.charge is not None:
        _free_hold(hold, event.charge, known)


def _wake_posted(event: ev.WakePosted, position: EventPosition, known: RowsBefore) -> SessionRow:
    waking = {"inbox_wake": position.seq, "inbox_wake_at": position.at} if event.wakes else {}
    return _change_session(position, known, inbox_head=position.seq, **waking)


def _insert_hold(
    hold: str, name: str, purpose: Purpose, legs: tuple[Leg, ...], position: EventPosition, known: MutableRows
) -> None:
    at = position.at
    known.save(HoldRow(hold, find_session(position.stream), at, purpose, name, _ENCODE_LEGS(legs)))
    for leg in legs:
        row = budget_row(known, leg)
        if row.window == MINUTE_WINDOW:
            known.save(money.add_to_minute(row, leg, held=leg.amount))
        else:
            known.save(row.with_cap(leg.cap, at, "", leg.amount))


def _settle_hold(
    call: str,
    event: ev.CallSettled | ev.RequestSettled,
    charge: Charge,
    usage: Usage,
    position: EventPosition,
    known: MutableRows,
) -> None:
    unheld = event.unheld
    if unheld is not None and unheld.accounts:
        # Nothing was held for it, which is a hold of nothing: the truth counts all the same.
        _insert_hold(call, unheld.name, unheld.purpose, unheld.accounts, position, known)
    hold = known.get(HoldRow, call)
    if hold is None:
        return
    held_usd = _free_hold(hold, charge, known)
    session = known.get(SessionRow, hold.session) or SessionRow(hold.session)
    known.save(
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


def _free_hold(hold: HoldRow, charge: Charge, known: MutableRows) -> int:
    """Settle every account of a hold, and return the dollars that it held."""
    known.drop(hold.key())
    held_usd = 0
    for leg in hold.taken():
        row, amount, unit = budget_row(known, leg), leg.amount, leg.unit
        spent = charge.tokens if unit == "tokens" else charge.of(unit)
        if row.window == MINUTE_WINDOW:
            known.save(money.add_to_minute(row, leg, spent=spent, held=-amount))
        else:
            known.save(row.with_amounts(spent, -amount))
        if unit == "usd" and amount > held_usd:
            held_usd = amount
    for over in charge.overruns:
        known.save(budget_row(known, over).with_amounts(overrun=over.amount))
    return held_usd


def _call_started(event: ev.CallStarted, position: EventPosition, known: MutableRows) -> None:
    if event.legs:
        _insert_hold(event.call, event.tool, event.purpose, event.legs, position, known)
    for digest in event.writes:
        agent = find_session_row(position, known).agent
        before = known.get(OutputRow, agent, digest)
        known.save(OutputRow(agent, digest, min(position.at, before.at) if before else position.at))
    if event.rated:
        known.save(rate_row(known, find_session_row(position, known).agent, event.tool, event.rated, attempts=1))
    if event.decision:
        row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
        known.save(msgspec.structs.replace(row, used_at=position.at))
    if event.audit:
        known.save(_make_audit_row(event, position, known, shows_result=int(event.audit == "full")))


def _make_audit_row(
    event: ev.CallStarted | ev.CallRefused,
    position: EventPosition,
    known: RowsBefore,
    outcome: str = "",
    shows_result: int = 0,
    settled_seq: int = 0,
) -> AuditRow:
    session = find_session_row(position, known)
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


def _audit_sign_on(event: ev.PersonSignedOn | ev.SignOnRefused, position: EventPosition) -> AuditRow:
    entered = isinstance(event, ev.PersonSignedOn)
    return AuditRow(
        call=event.id,
        session="",
        agent="",
        tool=f"sign_on {event.via}",
        capability_level=event.role if entered else "",
        risk_level="",
        decision="",
        decided_by=event.name if entered else event.account,
        outcome="ok" if entered else event.why,
        cost_usd=0,
        duration_ms=0,
        created_at=position.at,
        shows_result=0,
        asked_seq=position.seq,
        settled_seq=position.seq,
    )


def _settle_audit(event: ev.CallSettled, position: EventPosition, known: MutableRows) -> None:
    row = known.get(AuditRow, event.call)
    if row is not None:
        known.save(
            msgspec.structs.replace(
                row,
                outcome=event.outcome,
                cost_usd=event.charge.usd if event.charge else 0,
                duration_ms=event.duration_ms,
                settled_seq=position.seq,
            )
        )


def rate_row(known: RowsBefore, agent: str, tool: str, piece: int, attempts: int = 0) -> RateRow:
    """One slice of a tool's rate, with more attempts added."""
    row = known.get(RateRow, agent, tool, piece)
    return RateRow(agent, tool, piece, (row.attempts if row else 0) + attempts)


BudgetKey = tuple[type[BudgetRow], str, str, Unit]
FindCaps = Callable[[int], tuple[Sequence[BudgetKey], Sequence[int | None]]]
"""The rows of all accounts of a session at a time, and the caps that are configured for them."""


def budget_row(known: RowsBefore, account: Account) -> BudgetRow:
    """What stands against a cap, or an empty row."""
    window = account.window
    if window and window.startswith(MINUTE_WINDOW):
        return money.start_minute_row(known.get(BudgetRow, account.scope, MINUTE_WINDOW, account.unit), account)
    row = known.get(BudgetRow, account.scope, window, account.unit)
    return row if row is not None else BudgetRow(account.scope, window, account.unit)


def budget_key(account: Account) -> BudgetKey:
    scope, window, unit = account.scope, account.window, account.unit
    return _make_shared_key(scope, window, unit) if window else (BudgetRow, scope, window, unit)


# A window is that of an agent, a trigger, a model or the fleet: many sessions ask for the same.
@lru_cache(maxsize=256)
def _make_shared_key(scope: str, window: str, unit: Unit) -> BudgetKey:
    return (BudgetRow, scope, MINUTE_WINDOW if window.startswith(MINUTE_WINDOW) else window, unit)


PROJECTIONS: Final[dict[type[Any], Callable[[Any, EventPosition, MutableRows], None]]] = {
    **dict.fromkeys(get_args(ev.AnyEvent), project_session_event),
    ev.SessionStarted: _session_started,
    ev.SessionEnded: _session_ended,
    ev.TurnStarted: _turn_started,
    ev.RequestStarted: _request_started,
    ev.RequestSettled: _request_settled,
    ev.CallStarted: _call_started,
    ev.CallSettled: _call_settled,
    **dict.fromkeys(get_args(ev.TriggerEvent), project_trigger_event),
    **dict.fromkeys(get_args(ev.ArtifactEvent), project_artifact_event),
    **dict.fromkeys((ev.TurnEnded, *get_args(ev.ChannelEvent)), _project_nothing),
}
"""How each known kind of event changes the rows; others are a session's."""
