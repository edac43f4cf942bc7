"""Where an event stands, and what is known there: all that a projection may look at."""

from typing import Any, Protocol

from halter.core.ids import StreamId, session_of
from halter.core.row import R
from halter.core.rows import SessionRow


class Known(Protocol):
    """The rows as they stand before the event."""

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a row, or None."""
        ...


class Place(Protocol):
    """Where and when the event stands."""

    @property
    def stream(self) -> StreamId: ...
    @property
    def seq(self) -> int: ...
    @property
    def at(self) -> int: ...


def session_at(place: Place, known: Known) -> SessionRow:
    """Find the session that an event belongs to; one of the whole fleet belongs to none."""
    session = session_of(place.stream)
    return SessionRow("") if session is None else known.get(SessionRow, session) or SessionRow(session)
