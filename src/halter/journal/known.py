"""Rows that need not be looked up again: as a connection last saw or wrote them, while nobody else has written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from halter.core.row import Row, RowKey
from halter.journal.apply import Changes

MOST: Final = 10_000
"""How many rows are known at once: those of a thousand sessions at work, in a few megabytes."""


class KnownRows:
    """What the rows of a store are, as far as one connection knows.

    `version` tells whether another connection has committed anything; then nothing is known any more. Whatever the
    connection itself changes has to be told, and counts when it is committed.
    """

    def __init__(self, look: Callable[[RowKey], Row | None], version: Callable[[], int]) -> None:
        self._look = look
        self._version = version
        self._at = -1
        self._rows: dict[RowKey, Row | None] = {}
        self._written: dict[RowKey, Row | None] = {}

    def load(self, keys: Iterable[RowKey]) -> Mapping[RowKey, Row | None]:
        """Return rows, and look up only those that are not known."""
        version = self._version()
        if version != self._at or len(self._rows) > MOST:
            self.forget()
            self._at = version
        known, found = self._rows, dict[RowKey, Row | None]()
        for key in keys:
            if key not in known:
                known[key] = self._look(key)
            found[key] = known[key]
        return found

    def wrote(self, changes: Changes) -> None:
        """Take in what the open transaction changes. What is only ever added is hardly looked up again."""
        for row in (*changes.inserts, *changes.updates):
            key = row.key()
            if not row.APPEND_ONLY or key in self._rows:
                self._written[key] = row
        for key in changes.deletes:
            self._written[key] = None

    def committed(self) -> None:
        """Know what was written, now that everybody sees it."""
        self._rows |= self._written
        self._written.clear()

    def forget(self) -> None:
        """Know nothing any more, such as after a transaction that did not come to its end."""
        self._rows.clear()
        self._written.clear()
