"""The rows of triggers and of what sessions leave behind, as events change them.

A trigger's rows follow its own stream. All else has each column from one class of streams: what a session says from the
session's, what people say from the fleet's, what was sent from the outbox's. Of those who met a case, the first by time
and name lends its words; how often it was met is a sum.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from halter.core.events import (
    FindingEmitted,
    FindingReviewed,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    Leaving,
    MemoryProposed,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OfTriggers,
    PrecedentProposed,
    ProposalDecided,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerMade,
)
from halter.core.ids import session_of
from halter.core.place import Known, Place
from halter.core.row import Row, RowKey
from halter.core.task_rows import FindingRow, ItemRow, MemoryRow, NotificationRow, PrecedentRow, TriggerRow

T = TypeVar("T", bound=Row)


def of_trigger(event: OfTriggers, place: Place, known: Known) -> Iterator[Row]:
    """Yield the rows of a trigger as they stand after the event."""
    row = known.get(TriggerRow, event.trigger) or TriggerRow(event.trigger)
    match event:
        case TriggerMade():
            yield _made(row, event, place)
        case TriggerEnded():
            yield _with(row, ended_at=place.at, queued_at=None)
        case RunStarted():
            yield _started(row, event, place)
            if event.item:
                item = _item(known, event.trigger, event.item)
                yield _with(item, attempts=event.attempt, session=event.session)
        case RunSkipped():
            queued = None if row.queued_at == event.due_at else row.queued_at
            yield _with(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=queued)
        case RunQueued():
            yield _with(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=event.due_at)
        case RunsDelayed():
            yield _with(row, delayed=event.sentence, delayed_until=event.until)
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            yield _of_item(_item(known, event.trigger, event.item), event, place)


def _made(row: TriggerRow, event: TriggerMade, place: Place) -> TriggerRow:
    """Begin, or change: what has been dealt with stays so."""
    return _with(
        row,
        agent=event.agent,
        type=event.type,
        digest=event.digest,
        made_by=event.by,
        made_at=place.at,
        made_seq=place.seq,
        ended_at=None,
        ticked_at=place.at,
        queued_at=None,
    )


def _started(row: TriggerRow, event: RunStarted, place: Place) -> TriggerRow:
    return _with(
        row,
        ticked_at=max(row.ticked_at, event.due_at),
        queued_at=None if row.queued_at == event.due_at else row.queued_at,
        runs=row.runs + 1,
        session=event.session,
        ran_at=place.at,
        delayed="",
        delayed_until=None,
    )


def _of_item(row: ItemRow, event: ItemSeen | ItemQuarantined | ItemReleased, place: Place) -> ItemRow:
    match event:
        case ItemSeen():
            return _with(row, name=event.name, size=event.size, seen_at=place.at, ignored=int(event.ignored))
        case ItemQuarantined():
            return _with(row, attempts=event.attempts, quarantined_at=place.at, sentence=event.sentence)
        case ItemReleased():
            return _with(row, attempts=0, session="", quarantined_at=None, sentence="", ignored=0)


def _item(known: Known, trigger: str, item: str) -> ItemRow:
    return known.get(ItemRow, trigger, item) or ItemRow(trigger, item)


def left(event: Leaving, place: Place, known: Known) -> Iterator[Row]:
    """Yield the rows of what a session leaves behind as they stand after the event."""
    session = session_of(place.stream) or ""
    match event:
        case FindingEmitted():
            row = known.get(FindingRow, event.finding) or FindingRow(event.finding)
            facts = {key: getattr(event, key) for key in ("agent", "severity", "support", "document", "name")}
            yield _with(row, session=session, emitted_at=place.at, emitted_seq=place.seq, **facts)
        case FindingReviewed():
            row = known.get(FindingRow, event.finding) or FindingRow(event.finding)
            yield _with(row, review=event.verdict, reviewed_seq=place.seq)
        case MemoryProposed():
            row = known.get(MemoryRow, event.memory) or MemoryRow(event.memory)
            yield _with(row, session=session, agent=event.agent, proposed_at=place.at, proposed_seq=place.seq)
        case PrecedentProposed():
            yield _met(known.get(PrecedentRow, event.precedent), event, session, place)
        case ProposalDecided():
            yield _decided(event, place, known)
        case NotificationQueued() | NotificationSent() | NotificationFailed():
            yield _notification(event, place, known)


def _met(row: PrecedentRow | None, event: PrecedentProposed, session: str, place: Place) -> PrecedentRow:
    row = row or PrecedentRow(event.precedent)
    mine = (place.at, session, place.seq)
    words = row.observed_count and (row.first_at, row.session, row.proposed_seq) <= mine
    first = {} if words else {"first_at": place.at, "session": session, "proposed_seq": place.seq}
    return _with(
        row,
        agent=event.agent,
        kind=event.kind,
        observed_count=row.observed_count + 1,
        last_at=max(row.last_at, place.at),
        **first,
    )


def _decided(event: ProposalDecided, place: Place, known: Known) -> Row:
    said = {"status": event.status, "by": event.by, "decided_at": place.at}
    match event.about:
        case "finding":
            return _with(known.get(FindingRow, event.proposal) or FindingRow(event.proposal), **said)
        case "memory":
            return _with(known.get(MemoryRow, event.proposal) or MemoryRow(event.proposal), **said)
        case "precedent":
            return _with(known.get(PrecedentRow, event.proposal) or PrecedentRow(event.proposal), **said)


def _notification(
    event: NotificationQueued | NotificationSent | NotificationFailed, place: Place, known: Known
) -> NotificationRow:
    row = known.get(NotificationRow, event.notification) or NotificationRow(event.notification)
    match event:
        case NotificationQueued():
            facts = {"channel": event.channel, "agent": event.agent, "about": event.about, "stream": place.stream}
            return _with(row, queued_at=place.at, queued_seq=place.seq, **facts)
        case NotificationSent():
            return _with(row, sent_at=place.at, attempts=event.attempts, next_at=None, error="")
        case NotificationFailed():
            gave_up = int(event.next_at is None)
            return _with(row, attempts=event.attempts, next_at=event.next_at, gave_up=gave_up, error=event.error)


def rows_of_event(event: object) -> tuple[RowKey, ...]:
    """Name the rows that an event of these changes, for a write to declare."""
    match event:
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            return ((TriggerRow, (event.trigger,)), (ItemRow, (event.trigger, event.item)))
        case RunStarted(item=item) if item:
            return ((TriggerRow, (event.trigger,)), (ItemRow, (event.trigger, item)))
        case TriggerMade() | TriggerEnded() | RunStarted() | RunSkipped() | RunQueued() | RunsDelayed():
            return ((TriggerRow, (event.trigger,)),)
        case FindingEmitted() | FindingReviewed():
            return ((FindingRow, (event.finding,)),)
        case MemoryProposed():
            return ((MemoryRow, (event.memory,)),)
        case PrecedentProposed():
            return ((PrecedentRow, (event.precedent,)),)
        case ProposalDecided():
            return (_proposal(event),)
        case NotificationQueued() | NotificationSent() | NotificationFailed():
            return ((NotificationRow, (event.notification,)),)
        case _:
            return ()


def _proposal(event: ProposalDecided) -> RowKey:
    match event.about:
        case "finding":
            return (FindingRow, (event.proposal,))
        case "memory":
            return (MemoryRow, (event.proposal,))
        case "precedent":
            return (PrecedentRow, (event.proposal,))


def _with(row: T, **changes: object) -> T:
    return msgspec.structs.replace(row, **changes)
