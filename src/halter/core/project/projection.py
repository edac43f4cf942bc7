"""What a projection reads and changes."""

from typing import Any, Protocol

import msgspec

from halter.core.ids import StreamId, parse_session_id
from halter.core.rows import SessionRow
from halter.core.vocabulary import R, Row, RowKey


class RowsBefore(Protocol):
    def get(self, kind: type[R], /, *key: Any) -> R | None: ...


class MutableRows(RowsBefore, Protocol):
    """Rows that a projection reads and changes."""

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


def find_session_row(position: EventPosition, rows: RowsBefore) -> SessionRow:
    """Return the row of the session that an event belongs to, or an empty row."""
    session = parse_session_id(position.stream)
    return SessionRow("") if session is None else rows.get(SessionRow, session) or SessionRow(session)


class EraseBodies(msgspec.Struct, frozen=True):
    """The bodies to erase, with the blobs that only they name."""

    stream: StreamId
    through: int
