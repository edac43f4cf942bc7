"""The rows of decisions, rules and pins."""

import msgspec
from msgspec.structs import replace

from halter.core.events import (
    ApprovalGiven,
    DecisionAsked,
    DecisionEvent,
    DecisionMade,
    DecisionWithdrawn,
    RuleEnded,
    RuleMade,
    ToolPinned,
)
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore, find_session_row
from halter.core.project.sessions import change_session
from halter.core.rows import DecisionRow, PinRow, RuleRow, find_session


def project_decision_event(event: DecisionEvent, position: EventPosition, rows: MutableRows) -> None:
    match event:
        case DecisionAsked():
            rows.save(project_decision_asked(event, position, rows))
        case ApprovalGiven():
            row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
            rows.save(replace(row, first_by=event.by))
        case DecisionMade():
            rows.save(project_decision_made(event, position, rows))
            if find_session(position.stream):
                wake = {"inbox_head": position.seq, "inbox_wake": position.seq, "inbox_wake_at": position.at}
                rows.save(change_session(position, rows, **wake))
        case DecisionWithdrawn():
            # `decided_at` stays None, because no person decided it.
            row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
            rows.save(replace(row, verdict="withdrawn", decided_seq=position.seq))
        case RuleMade():
            rows.save(project_rule_made(event, position))
        case RuleEnded():
            row = rows.get(RuleRow, event.rule) or RuleRow(event.rule)
            rows.save(replace(row, ended_at=position.at, ended_by=event.by))
        case ToolPinned():
            rows.save(PinRow(event.agent, event.tool, event.digest, event.by, position.at))


def project_decision_asked(event: DecisionAsked, position: EventPosition, rows: RowsBefore) -> DecisionRow:
    session = find_session_row(position, rows)
    row = rows.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return replace(
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
    return replace(
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
