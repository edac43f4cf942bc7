"""The rows of findings, memories, precedents and notifications."""

from msgspec.structs import replace

from halter.core.events import (
    ArtifactEvent,
    FindingEmitted,
    FindingReviewed,
    MemoryProposed,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    PrecedentProposed,
    ProposalDecided,
)
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore
from halter.core.rows import FindingRow, MemoryRow, NotificationRow, PrecedentRow, find_session
from halter.core.vocabulary import Row, RowKey


def project_artifact_event(event: ArtifactEvent, position: EventPosition, rows: MutableRows) -> None:
    session = find_session(position.stream)
    match event:
        case FindingEmitted():
            row = rows.get(FindingRow, event.finding) or FindingRow(event.finding)
            facts = {key: getattr(event, key) for key in ("agent", "severity", "support", "document", "name")}
            rows.save(replace(row, session=session, emitted_at=position.at, emitted_seq=position.seq, **facts))
        case FindingReviewed():
            row = rows.get(FindingRow, event.finding) or FindingRow(event.finding)
            rows.save(replace(row, review=event.verdict, reviewed_seq=position.seq))
        case MemoryProposed():
            row = rows.get(MemoryRow, event.memory) or MemoryRow(event.memory)
            rows.save(
                replace(row, session=session, agent=event.agent, proposed_at=position.at, proposed_seq=position.seq)
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
    return replace(
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
            return replace(rows.get(FindingRow, event.proposal) or FindingRow(event.proposal), **decision)
        case "memory":
            return replace(rows.get(MemoryRow, event.proposal) or MemoryRow(event.proposal), **decision)
        case "precedent":
            return replace(rows.get(PrecedentRow, event.proposal) or PrecedentRow(event.proposal), **decision)


def _apply_notification(
    event: NotificationQueued | NotificationSent | NotificationFailed,
    position: EventPosition,
    rows: RowsBefore,
) -> NotificationRow:
    row = rows.get(NotificationRow, event.notification) or NotificationRow(event.notification)
    match event:
        case NotificationQueued():
            facts = {"channel": event.channel, "agent": event.agent, "about": event.about, "stream": position.stream}
            return replace(row, queued_at=position.at, queued_seq=position.seq, **facts)
        case NotificationSent():
            return replace(row, sent_at=position.at, attempts=event.attempts, next_at=None, error="")
        case NotificationFailed():
            gave_up = int(event.next_at is None)
            return replace(row, attempts=event.attempts, next_at=event.next_at, gave_up=gave_up, error=event.error)


def key_of_artifact(event: ArtifactEvent) -> RowKey:
    """Return the key of the row that an event changes."""
    match event:
        case FindingEmitted() | FindingReviewed():
            return (FindingRow, event.finding)
        case MemoryProposed():
            return (MemoryRow, event.memory)
        case PrecedentProposed():
            return (PrecedentRow, event.precedent)
        case ProposalDecided(about="finding"):
            return (FindingRow, event.proposal)
        case ProposalDecided(about="memory"):
            return (MemoryRow, event.proposal)
        case ProposalDecided():
            return (PrecedentRow, event.proposal)
        case NotificationQueued() | NotificationSent() | NotificationFailed():
            return (NotificationRow, event.notification)
