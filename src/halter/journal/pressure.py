"""How hard the workers of a PostgreSQL store press on it: connections, and what waits in the queue that they share."""

from collections.abc import Sequence
from typing import Any

import msgspec

from halter.journal.connection import Address, Connection, connected, translated
from halter.journal.queries import for_psycopg, load


class Queued(msgspec.Struct, frozen=True):
    """What waits in one queue, and for how many microseconds the oldest has."""

    queue: str
    jobs: int
    age: int


class Pressure(msgspec.Struct, frozen=True):
    """Connections that programs may have, and that are in use; queues in which something waits."""

    most: int
    used: int
    queued: Sequence[Queued]


def pressure(url: str) -> Pressure:
    """Ask PostgreSQL, over a connection of its own. Where no worker ever was, there is no queue."""
    address = Address(url)
    with translated(address), connected(address, lambda _: None) as connection:
        connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", [address.schema])
        ((most, used),) = _asked(connection, "connections")
        ((has_queue,),) = _asked(connection, "has_queue")
        queued = _asked(connection, "queued") if has_queue else ()
        return Pressure(most, used, [Queued(*row) for row in queued])


def _asked(connection: Connection, name: str) -> Sequence[tuple[Any, ...]]:
    return connection.execute(for_psycopg(load("postgres/pressure.sql")[name]).encode()).fetchall()
