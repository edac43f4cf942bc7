"""The rows of sessions and of their outages."""

from typing import Any

from msgspec.structs import replace

from halter.core.events import (
    SessionEnded,
    SessionEvent,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnStarted,
    WakePosted,
)
from halter.core.money import CARVED_CAP, Account
from halter.core.project.holds import budget_row, free_hold, insert_hold
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore
from halter.core.rows import NO_OWNER, HoldRow, OutageRow, SessionRow, find_session
from halter.core.vocabulary import Note


def project_session_event(event: SessionEvent, position: EventPosition, rows: MutableRows) -> None:
    match event:
        case SessionStarted():
            project_session_started(event, position, rows)
        case SessionEnded():
            project_session_ended(event, position, rows)
        case TurnStarted():
            project_turn_started(event, position, rows)
        case SessionWoken():
            awake = {"state": "RUNNING", "wake_at": position.at, "wake_on": "", "inbox_seen": event.inbox_seen}
            rows.save(_raise_format(change_session(position, rows, **awake), event.format))
            outage = rows.get(OutageRow, find_session(position.stream)) if event.recovered else None
            if outage is not None:
                rows.save(replace(outage, ended_at=position.at))
        case SessionResumed():
            awake = {"state": "RUNNING", "terminal_reason": "", "ended_at": None, "wake_at": position.at}
            rows.save(_raise_format(change_session(position, rows, **awake), event.format))
        case SessionParked():
            _park_session(event, position, rows)
        case WakePosted():
            wake = {"inbox_wake": position.seq, "inbox_wake_at": position.at} if event.wakes else {}
            rows.save(change_session(position, rows, inbox_head=position.seq, **wake))
        case Note():
            pass


def project_turn_started(event: TurnStarted, position: EventPosition, rows: MutableRows) -> None:
    row = rows.get(SessionRow, find_session(position.stream))
    # Usually the inbox is empty, and the row does not change.
    if row is None or row.inbox_seen != event.inbox_seen:
        rows.save(change_session(position, rows, inbox_seen=event.inbox_seen))


def change_session(position: EventPosition, rows: RowsBefore, **changes: Any) -> SessionRow:
    session = find_session(position.stream)
    row = rows.get(SessionRow, session) or SessionRow(session)
    return replace(row, **changes).with_due_at()


def project_session_started(event: SessionStarted, position: EventPosition, rows: MutableRows) -> None:
    rows.save(
        change_session(
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
        insert_hold(event.session, event.agent, "turn", event.carved, position, rows)
    for leg in event.carved if event.bound else ():
        budget = budget_row(rows, Account(position.stream, "", leg.unit))
        rows.save(budget.with_cap(leg.amount, position.at, CARVED_CAP))


def _raise_format(row: SessionRow, number: int) -> SessionRow:
    """Raise the format to that of the program that runs the session: an older one must not run it again."""
    return replace(row, format=max(row.format, number))


def _park_session(event: SessionParked, position: EventPosition, rows: MutableRows) -> None:
    """Park a session. With a trouble, its outage begins or goes on; a different trouble begins a new outage."""
    parked: dict[str, Any] = {"state": event.state, "inbox_seen": event.inbox_seen, "wake_at": event.wake_at}
    if not event.resident:
        parked["owner"] = NO_OWNER
    row = change_session(position, rows, wake_on=" ".join(event.wake_on), **parked)
    rows.save(row)
    if not event.trouble:
        return
    outage = rows.get(OutageRow, row.session)
    if outage is None or outage.ended_at is not None or outage.trouble != event.trouble:
        outage = OutageRow(row.session, began_at=position.at)
    rows.save(replace(outage, agent=row.agent, trouble=event.trouble, sentence=event.sentence))


def project_session_ended(event: SessionEnded, position: EventPosition, rows: MutableRows) -> None:
    rows.save(
        change_session(
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
        free_hold(hold, event.charge, rows)
