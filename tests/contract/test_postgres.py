"""What holds for PostgreSQL beyond what every store promises: how processes meet in it."""

import asyncio
import threading
from collections.abc import Sequence

import psycopg
import pytest

from halter.core.clock import SystemClock
from halter.core.events import CallSettled, CallStarted
from halter.core.ids import SortableIds, StreamId, session_stream
from halter.core.money import Charge, Leg
from halter.core.ports import Draft, Query, Rows, Write
from halter.core.project import rows_of_hold
from halter.core.rows import HoldRow
from halter.journal.open import open_store
from halter.journal.postgres import NOTIFICATION_BYTES, STREAMS_TOLD, hints

pytestmark = pytest.mark.postgres

CLOCK = SystemClock()
LEGS = (Leg("fleet", "", "usd", 100, 1),)
ONE = session_stream("one")
WAITING = b"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, %s) > 0"


def somebody_waits(url: str, table: str) -> None:
    """Return as soon as somebody waits for a lock on a row of the table."""
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        for _ in range(100_000):
            if connection.execute(WAITING, [f"JOIN {table}"]).fetchall()[0][0]:
                return
    raise AssertionError("Nobody ever waited.")


async def test_what_was_inserted_while_one_waited_for_the_stream_is_seen(postgres_schema_url: str) -> None:
    """The order of locks matters: had the missing hold been looked for first, it would be missed."""
    one, other = (open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now)) for _ in range(2))
    locked, go_on = threading.Event(), threading.Event()
    reads = rows_of_hold("call", LEGS)

    def hold(_: Rows) -> Sequence[Draft]:
        locked.set()
        go_on.wait(60)
        return [Draft(CallStarted(call="call", tool="search", legs=LEGS))]

    def settle(rows: Rows) -> Sequence[Draft]:
        assert rows.get(HoldRow, "call") is not None
        return [Draft(CallSettled(call="call", outcome="ok", charge=Charge(usd=1)))]

    await one.commit(Write(ONE, "first", lambda _: [Draft(CallStarted(call="before", tool="search"))]))
    holding = asyncio.create_task(one.commit(Write(ONE, "hold", hold, reads)))
    await asyncio.to_thread(locked.wait, 60)
    settling = asyncio.create_task(other.commit(Write(ONE, "settle", settle, reads)))
    await asyncio.to_thread(somebody_waits, postgres_schema_url, "streams")
    go_on.set()
    await holding
    await settling
    assert await one.ask(Query("holds", HoldRow)) == []
    await one.close()
    await other.close()


def test_hints_are_split_to_fit_into_notifications() -> None:
    heads = {StreamId(f"session:{number:0100}"): number for number in range(STREAMS_TOLD)}
    told = hints(heads)
    assert len(told) > 10
    assert all(len(hint.encode()) <= NOTIFICATION_BYTES for hint in told)
    assert sum(hint.count("session:") for hint in told) == STREAMS_TOLD


@pytest.mark.parametrize(
    "heads",
    [{StreamId(str(number)): 1 for number in range(STREAMS_TOLD + 1)}, {StreamId("é" * NOTIFICATION_BYTES): 1}],
    ids=["too many", "too long"],
)
def test_what_is_too_much_to_tell_is_told_as_all(heads: dict[StreamId, int]) -> None:
    assert hints(heads) == ['{"*":0}']
