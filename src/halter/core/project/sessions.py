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
from halter.core.project.projection import EventPosition, MutableRows, RowsBefore, find_session_row
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
        case SessionWoken() | SessionParked() | SessionResumed():
            rows.save(_move_session(event, position, rows))
            _move_outage(event, position, rows)
        case WakePosted():
            rows.save(_wake_posted(event, position, rows))
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
                rows.save(replace(row, ended_at=position.at))
        case _:
            pass


def _session_woken(event: SessionWoken, position: EventPosition, rows: RowsBefore) -> SessionRow:
    """Raise the format to that of the waking program: an older program must not run the session again."""
    row = change_session(position, rows, state="RUNNING", wake_at=position.at, wake_on="", inbox_seen=event.inbox_seen)
    return replace(row, format=max(row.format, event.format))


def _session_resumed(event: SessionResumed, position: EventPosition, rows: RowsBefore) -> SessionRow:
    row = change_session(position, rows, state="RUNNING", terminal_reason="", ended_at=None, wake_at=position.at)
    return replace(row, format=max(row.format, event.format))


def _session_parked(event: SessionParked, position: EventPosition, rows: RowsBefore) -> SessionRow:
    owner = {} if event.resident else {"owner": NO_OWNER}
    return change_session(
        position,
        rows,
        state=event.state,
        inbox_seen=event.inbox_seen,
        wake_at=event.wake_at,
        wake_on=" ".join(event.wake_on),
        **owner,
    )


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


def _wake_posted(event: WakePosted, position: EventPosition, rows: RowsBefore) -> SessionRow:
    wake = {"inbox_wake": position.seq, "inbox_wake_at": position.at} if event.wakes else {}
    return change_session(position, rows, inbox_head=position.seq, **wake)
