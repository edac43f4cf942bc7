"""The rows of requests and calls: holds and costs, the rates of tools, the files written, and the audit."""

from msgspec.structs import replace

from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    EffectEvent,
    HoldMade,
    HoldReleased,
    OverrunIncurred,
    RequestSettled,
    RequestStarted,
)
from halter.core.project.holds import NO_USAGE, insert_hold, project_hold_made, project_hold_released, settle_hold
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore, find_session_row
from halter.core.rows import AuditRow, DecisionRow, OutputRow, RateRow
from halter.core.vocabulary import Note


def project_effect_event(event: EffectEvent, position: EventPosition, rows: MutableRows) -> None:
    match event:
        case RequestStarted():
            project_request_started(event, position, rows)
        case RequestSettled():
            project_request_settled(event, position, rows)
        case CallStarted():
            project_call_started(event, position, rows)
        case CallSettled():
            project_call_settled(event, position, rows)
        case CallRefused():
            # Refused calls of any level are audited.
            rows.save(_make_audit_row(event, position, rows, event.outcome, settled_seq=position.seq))
        case HoldMade():
            project_hold_made(event, position, rows)
        case HoldReleased():
            project_hold_released(event, position, rows)
        case CostCapReached() | OverrunIncurred() | Note():
            pass


def project_request_started(event: RequestStarted, position: EventPosition, rows: MutableRows) -> None:
    if event.legs:
        insert_hold(event.request, event.model, event.purpose, event.legs, position, rows)


def project_request_settled(event: RequestSettled, position: EventPosition, rows: MutableRows) -> None:
    if event.charge is not None:
        settle_hold(event.request, event, event.charge, event.usage or NO_USAGE, position, rows)


def project_call_settled(event: CallSettled, position: EventPosition, rows: MutableRows) -> None:
    if event.charge is not None:
        settle_hold(event.call, event, event.charge, NO_USAGE, position, rows)
    if event.audited:
        _settle_audit(event, position, rows)


def project_call_started(event: CallStarted, position: EventPosition, rows: MutableRows) -> None:
    if event.legs:
        insert_hold(event.call, event.tool, event.purpose, event.legs, position, rows)
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
        rows.save(replace(row, used_at=position.at))
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


def _settle_audit(event: CallSettled, position: EventPosition, rows: MutableRows) -> None:
    row = rows.get(AuditRow, event.call)
    if row is not None:
        rows.save(
            replace(
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
