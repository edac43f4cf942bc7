"""Telling people something: the writes around it, and how long a channel that fails is waited for.

What is to be told is committed first, in whatever stream it comes from, and sent by the outbox afterwards. That it was
sent is written after that. So it is told at least once, and never for something that did not happen.
"""

from typing import Final

from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.events import NotificationFailed, NotificationQueued, NotificationSent
from halter.core.ids import OUTBOX
from halter.core.ports import Draft, Rows, Write
from halter.core.row import RowKey
from halter.core.task_rows import NotificationRow
from halter.core.telling import Telling

PAUSES: Final = (MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, *(7 * (DAY,)))
"""How long is waited after each failure; after one more it is given up."""


def back_off(attempts: int) -> int | None:
    """Tell how long to wait after so many failures, in microseconds; None when it is time to give up."""
    return PAUSES[attempts - 1] if attempts <= len(PAUSES) else None


def queued(notification: str, channel: str, agent: str, telling: Telling, about: str = "") -> Draft:
    """Have something told over a channel, as soon as this is committed."""
    event = NotificationQueued(notification=notification, channel=channel, agent=agent, about=about)
    return Draft(event, telling.body())


def row_of(notification: str) -> RowKey:
    """Name the row that a write about a notification must declare."""
    return (NotificationRow, (notification,))


def sent(notification: str, attempts: int) -> Write:
    """Write down that it was told. Of two who told it, the second adds nothing."""

    def decide(rows: Rows) -> list[Draft]:
        if not _waits(rows.get(NotificationRow, notification)):
            return []
        return [Draft(NotificationSent(notification=notification, attempts=attempts))]

    return Write(OUTBOX, f"sent/{notification}", decide, [row_of(notification)])


def failed(notification: str, attempts: int, error: str, *, may_retry: bool) -> Write:
    """Write down that it could not be told, and when it is tried again. Of two who tried at once, one counts."""
    pause = back_off(attempts) if may_retry else None

    def decide(rows: Rows) -> list[Draft]:
        row = rows.get(NotificationRow, notification)
        if row is None or not _waits(row) or row.attempts >= attempts:
            return []
        next_at = None if pause is None else rows.now + pause
        return [Draft(NotificationFailed(notification=notification, attempts=attempts, error=error, next_at=next_at))]

    return Write(OUTBOX, f"failed/{notification}/{attempts}", decide, [row_of(notification)])


def _waits(row: NotificationRow | None) -> bool:
    return row is not None and row.sent_at is None and not row.gave_up
