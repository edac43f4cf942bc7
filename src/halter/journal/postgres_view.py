"""What one connection to PostgreSQL sees."""

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg.rows import dict_row

from halter.core.ids import Digest
from halter.journal.connection import Address, Connection, translated
from halter.journal.queries import for_psycopg, load


class PostgresView:
    """What one connection sees until its transaction is over."""

    def __init__(self, connection: Connection, address: Address) -> None:
        self._connection = connection
        self._address = address

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a named query."""
        with translated(self._address):
            return answers(self._connection, name, params)

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run a named query, for its plain columns."""
        with translated(self._address):
            query = for_psycopg(load("queries.sql")[name]).encode()
            return self._connection.execute(query, params, binary=True).fetchall()

    def get(self, digest: Digest) -> bytes | None:
        """Return a blob, if it is there."""
        with translated(self._address):
            return blob(self._connection, digest)

    def flaws(self) -> Sequence[str]:
        """Tell nothing: a server looks after its own pages, and says so when it reads a damaged one."""
        return []

    def close(self) -> None:
        """End the transaction with the connection."""
        self._connection.close()


def answers(connection: Connection, name: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run a named query."""
    with connection.cursor(row_factory=dict_row, binary=True) as cursor:
        return cursor.execute(for_psycopg(load("queries.sql")[name]).encode(), params).fetchall()


def blob(connection: Connection, digest: Digest) -> bytes | None:
    """Return a blob, if it is there."""
    found = connection.execute(
        for_psycopg(load("postgres/engine.sql")["get"]).encode(), {"digest": digest}, binary=True
    )
    return next((row[0] for row in found), None)
