"""The rows of triggers and of the documents of watches. They follow the trigger's own stream."""

from msgspec.structs import replace

from halter.core.events import (
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerEvent,
    TriggerMade,
)
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore
from halter.core.rows import ItemRow, TriggerRow
from halter.core.vocabulary import RowKey


def project_trigger_event(event: TriggerEvent, position: EventPosition, rows: MutableRows) -> None:
    row, at = rows.get(TriggerRow, event.trigger) or TriggerRow(event.trigger), position.at
    match event:
        case TriggerMade():
            row = replace(row, agent=event.agent, type=event.type, digest=event.digest, made_by=event.by)
            # Its earlier ticks stay handled.
            row = replace(row, ticked_at=at, queued_at=None, ended_at=None, made_at=at, made_seq=position.seq)
            rows.save(row)
        case TriggerEnded():
            rows.save(replace(row, ended_at=at, queued_at=None))
        case RunStarted():
            row = replace(_tick(row, event.due_at), runs=row.runs + 1, session=event.session, ran_at=at)
            rows.save(replace(row, delayed="", delayed_until=None))
            if event.item:
                item = _find_item_row(rows, event.trigger, event.item)
                rows.save(replace(item, attempts=event.attempt, session=event.session))
        case RunSkipped():
            rows.save(_tick(row, event.due_at))
        case RunQueued():
            rows.save(replace(_tick(row, event.due_at), queued_at=event.due_at))
        case RunsDelayed():
            rows.save(replace(row, delayed=event.sentence, delayed_until=event.until))
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            rows.save(_apply_item_event(_find_item_row(rows, event.trigger, event.item), event, position))


def _tick(row: TriggerRow, due_at: int) -> TriggerRow:
    """Handle a time of the trigger; a run that waited for it waits no more."""
    queued_at = None if row.queued_at == due_at else row.queued_at
    return replace(row, ticked_at=max(row.ticked_at, due_at), queued_at=queued_at)


def _apply_item_event(
    row: ItemRow, event: ItemSeen | ItemQuarantined | ItemReleased, position: EventPosition
) -> ItemRow:
    match event:
        case ItemSeen():
            return replace(row, name=event.name, size=event.size, seen_at=position.at, ignored=int(event.ignored))
        case ItemQuarantined():
            return replace(row, attempts=event.attempts, quarantined_at=position.at, sentence=event.sentence)
        case ItemReleased():
            return replace(row, attempts=0, session="", quarantined_at=None, sentence="", ignored=0)


def _find_item_row(rows: RowsBefore, trigger: str, item: str) -> ItemRow:
    return rows.get(ItemRow, trigger, item) or ItemRow(trigger, item)


def list_trigger_rows(event: TriggerEvent) -> tuple[RowKey, ...]:
    """List the rows that an event of a trigger changes."""
    trigger: RowKey = (TriggerRow, event.trigger)
    match event:
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            return (trigger, (ItemRow, event.trigger, event.item))
        case RunStarted(item=item) if item:
            return (trigger, (ItemRow, event.trigger, item))
        case TriggerMade() | TriggerEnded() | RunStarted() | RunSkipped() | RunQueued() | RunsDelayed():
            return (trigger,)
