"""A golden journal moved to a server: its events are all that it takes, and what was in flight goes on there."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import pytest_asyncio

from halter.core.clock import SystemClock
from halter.core.ids import SessionId, SortableIds, WorkerId, session_stream
from halter.core.ports import Query
from halter.core.rows import HoldRow, SessionRow
from halter.guard.ledger import Ledger
from halter.journal.open import open_store
from halter.journal.rebuild import rebuild_tables
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.state import lifecycle
from halter.state.session import replay

pytestmark = pytest.mark.postgres

HERE = Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/store.db"))
CLOCK = SystemClock()
MOVED = {
    "events": "stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash",
    "streams": "stream, head, hash, at",
    "blobs": "digest, data",
}


def move(version: Path, url: str) -> None:
    """Copy the journal and nothing that was made of it, with plain SQL."""
    text, _, schema = url.partition("?schema=")
    golden = f"file:{version / 'store.db'}?mode=ro&immutable=1"
    with closing(sqlite3.connect(golden, uri=True)) as file, psycopg.connect(text) as server:
        server.execute(f"SET search_path TO {schema}".encode())
        for table, columns in MOVED.items():
            order = "position" if table == "events" else columns
            rows = file.execute(f"SELECT {columns} FROM {table} ORDER BY {order}").fetchall()
            output = ", ".join(["%s"] * len(columns.split(",")))
            with server.cursor() as cursor:
                cursor.executemany(f"INSERT INTO {table} ({columns}) VALUES ({output})".encode(), rows)


@pytest_asyncio.fixture(params=VERSIONS)
async def moved(request: pytest.FixtureRequest, postgres_schema_url: str) -> AsyncIterator[tuple[JournalStore, Path]]:
    store = open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now))
    version = HERE / request.param
    move(version, postgres_schema_url)
    await rebuild_tables(store)
    yield store, version
    await store.close()


async def test_what_an_earlier_version_left_in_flight_is_finished_on_a_server_that_its_events_were_moved_to(
    moved: tuple[JournalStore, Path],
) -> None:
    store, version = moved
    expected: dict[str, Any] = msgspec.json.decode((version / "expected.json").read_bytes())
    unfinished = {session for session, state in expected["states"].items() if state["ended_at"] is None}
    report = await verify_store(store)
    assert (report.findings, report.compared) == ((), True)
    while leases := await store.claim(WorkerId("successor"), 100):
        for lease in leases:
            await finish(store, lease)
    # Who sleeps, or waits for a person, is not due: it is asked for by its name.
    for session in sorted(unfinished):
        for lease in await store.claim(WorkerId("successor"), 1, SessionId(session)):
            await finish(store, lease)
    rows = {row.session: row for row in await store.ask(Query("all_sessions", SessionRow))}
    assert {rows[session].terminal_reason for session in unfinished} == {"cancelled"}
    assert await store.ask(Query("holds", HoldRow)) == []
    assert (await verify_store(store)).findings == ()


async def finish(store: JournalStore, lease: Any) -> None:
    """Take a session over, settle what is in doubt, and end it, which tells its parent."""
    state = replay(await store.read(session_stream(lease.session)))
    await store.commit(
        lifecycle.wake_session(lease, f"{lease.session}/{lease.generation}/wake", None, state.inbox_seen)
    )
    await Ledger(store, CLOCK).settle_in_doubt(lease, list(state.in_flight.values()))
    await store.commit(lifecycle.end_session(lease, "CANCELLED", "cancelled", state.parent))
