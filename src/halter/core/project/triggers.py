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
    row = rows.get(TriggerRow, event.trigger) or TriggerRow(event.trigger)
    match event:
        case TriggerMade():
            rows.save(_apply_trigger_made(row, event, position))
        case TriggerEnded():
            rows.save(replace(row, ended_at=position.at, queued_at=None))
        case RunStarted():
            rows.save(_apply_run_started(row, event, position))
            if event.item:
                item = _find_item_row(rows, event.trigger, event.item)
                rows.save(replace(item, attempts=event.attempt, session=event.session))
        case RunSkipped():
            queued_at = None if row.queued_at == event.due_at else row.queued_at
            rows.save(replace(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=queued_at))
        case RunQueued():
            rows.save(replace(row, ticked_at=max(row.ticked_at, event.due_at), queued_at=event.due_at))
        case RunsDelayed():
            rows.save(replace(row, delayed=event.sentence, delayed_until=event.until))
        case ItemSeen() | ItemQuarantined() | ItemReleased():
            rows.save(_apply_item_event(_find_item_row(rows, event.trigger, event.item), event, position))


def _apply_trigger_made(row: TriggerRow, event: TriggerMade, position: EventPosition) -> TriggerRow:
    """Create or change a trigger; its earlier ticks stay handled."""
    return replace(
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
    return replace(
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
