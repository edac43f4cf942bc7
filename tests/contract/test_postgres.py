"""What holds for PostgreSQL beyond what every store promises: how processes meet in it."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import psycopg
import pytest

from halter.core.clock import SECOND, SystemClock
from halter.core.errors import RowRefused
from halter.core.events import BodiesErased, CallSettled, CallStarted, SessionStarted
from halter.core.ids import FLEET, SessionId, SortableIds, StreamId, WorkerId, session_stream
from halter.core.money import Charge, Leg
from halter.core.ports import AgentConcurrency, Draft, Lease, Query, Rows, Ticket, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import HaltRow, HoldRow, SessionRow
from halter.core.vocabulary import Row
from halter.dispatch.dispatcher import DistributedDispatcher, RunningSessions, ServeTicket
from halter.dispatch.workers import WorkerRow
from halter.guard.halts import halt
from halter.journal.connection import ConnectionSlot, PostgresAddress, Statement
from halter.journal.engine import PARAMETER, Engine, StoreView, load_queries, to_psycopg_parameters
from halter.journal.open import open_store
from halter.journal.postgres import (
    MAX_HINTED_STREAMS,
    NOTIFICATION_BYTES,
    TABLES,
    PostgresEngine,
    format_hints,
    make_named_statement,
)
from halter.journal.postgres_columns import (
    BIGINT,
    TEXT,
    BytesColumn,
    IntegerColumn,
    TextColumn,
    make_batch_statements,
    register_dumpers,
)
from halter.journal.rebuild import rows_from_events
from halter.journal.sqlite import LEASE_DURATION
from halter.journal.store import JournalStore
from halter.state import lifecycle

pytestmark = pytest.mark.postgres

CLOCK = SystemClock()
LEGS = (Leg("fleet", "", "usd", 100, 1),)
ONE = session_stream("one")
WAITING = b"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, %s) > 0"


def sql(url: str, statement: str) -> None:
    """Run a statement in the schema of a store, past all code of Halter."""
    with psycopg.connect(url.partition("?")[0], autocommit=True) as server:
        server.execute(f"SET search_path TO {url.rpartition('=')[2]}".encode())
        server.execute(statement.encode())


def never() -> bool:
    return False


def somebody_waits(url: str, words: str, enough: Callable[[], bool] = never) -> None:
    """Return as soon as somebody waits for a lock with a statement that has these words, or it is enough."""
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        for _ in range(100_000):
            if connection.execute(WAITING, [words]).fetchall()[0][0] or enough():
                return
    raise AssertionError("Nobody ever waited.")


async def test_what_was_inserted_while_one_waited_for_the_stream_is_seen(postgres_schema_url: str) -> None:
    """The order of locks matters: had the missing hold been looked for first, it would be missed."""
    journal_store, other = (open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now)) for _ in range(2))
    locked, go_on = threading.Event(), threading.Event()
    reads = rows_of_hold("call", LEGS)

    def hold(_: Rows) -> Sequence[Draft]:
        locked.set()
        go_on.wait(60)
        return [Draft(CallStarted(call="call", tool="search", legs=LEGS))]

    def settle(rows: Rows) -> Sequence[Draft]:
        assert rows.get(HoldRow, "call") is not None
        return [Draft(CallSettled(call="call", outcome="ok", charge=Charge(usd=1)))]

    await journal_store.commit(Write(ONE, "first", lambda _: [Draft(CallStarted(call="before", tool="search"))]))
    holding = asyncio.create_task(journal_store.commit(Write(ONE, "hold", hold, reads)))
    await asyncio.to_thread(locked.wait, 60)
    settling = asyncio.create_task(other.commit(Write(ONE, "settle", settle, reads)))
    await asyncio.to_thread(somebody_waits, postgres_schema_url, "FROM streams own")
    go_on.set()
    await holding
    await settling
    assert await journal_store.ask(Query("holds", HoldRow)) == []
    await journal_store.close()
    await other.close()


async def test_rows_are_locked_in_one_order_whatever_order_they_are_named_in(postgres_schema_url: str) -> None:
    """Two writes that name the same rows the other way round would else wait for each other."""
    store = open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now))
    for scope in ("agent:a", "agent:b"):
        await store.commit(halt(scope, "ada", scope))
    server, _, schema = postgres_schema_url.partition("?schema=")
    halts = f"{schema}.halts".encode()
    with psycopg.connect(server) as holder:
        holder.execute(b"SELECT FROM " + halts + b" WHERE scope = 'agent:a' FOR UPDATE")
        reads = [(HaltRow, "agent:b"), (HaltRow, "agent:a")]
        drafts = [Draft(CallStarted(call="call", tool="search"))]
        writing = asyncio.create_task(store.commit(Write(ONE, "call", lambda _: drafts, reads)))
        await asyncio.to_thread(somebody_waits, postgres_schema_url, "FROM halts own")
        with psycopg.connect(server) as connection:
            connection.execute(b"SELECT FROM " + halts + b" WHERE scope = 'agent:b' FOR UPDATE NOWAIT")
    assert len((await writing).events) == 1
    await store.close()


@pytest.mark.parametrize(("table", "column"), [("streams", "at"), ("budgets", "cap_at")])
async def test_a_clock_of_the_server_set_back_reorders_nothing(
    postgres_schema_url: str, table: str, column: str
) -> None:
    store = open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now))

    async def hold(call: str) -> int:
        drafts = [Draft(CallStarted(call=call, tool="search", legs=LEGS))]
        return (await store.commit(Write(ONE, call, lambda _: drafts, rows_of_hold(call, LEGS)))).events[0].at

    before = await hold("before")
    sql(postgres_schema_url, f"UPDATE {table} SET {column} = {before + 3_600 * SECOND}")
    assert await hold("after") == before + 3_600 * SECOND
    await store.close()


async def test_a_process_that_notifies_itself_still_waits_for_others(postgres_schema_url: str) -> None:
    ids = SortableIds(CLOCK.now)
    engine = PostgresEngine(postgres_schema_url, new_id=ids.make)
    journal_store, other = JournalStore(engine), open_store(postgres_schema_url, clock=CLOCK, ids=ids)

    def note(stream: StreamId, key: str) -> Write:
        return Write(stream, key, lambda _: [Draft(CallStarted(call=key, tool="search"))])

    engine.wait_for_others(0)
    await journal_store.commit(note(FLEET, "mine"))
    waiting = asyncio.create_task(asyncio.to_thread(engine.wait_for_others, 60))
    for number in range(3):
        await journal_store.commit(note(FLEET, f"mine again {number}"))
    await other.commit(note(ONE, "theirs"))
    assert [(change.stream, change.head) for change in await waiting] == [(ONE, 1)]
    await journal_store.close()
    await other.close()


def test_hints_are_split_to_fit_into_notifications() -> None:
    heads = {StreamId(f"session:{number:0100}"): number for number in range(MAX_HINTED_STREAMS)}
    hints = format_hints(heads)
    assert len(hints) > 10
    assert all(len(hint.encode()) <= NOTIFICATION_BYTES for hint in hints)
    assert sum(hint.count("session:") for hint in hints) == MAX_HINTED_STREAMS


@pytest.mark.parametrize(
    "heads",
    [{StreamId(str(number)): 1 for number in range(MAX_HINTED_STREAMS + 1)}, {StreamId("é" * NOTIFICATION_BYTES): 1}],
    ids=["too many", "too long"],
)
def test_too_many_changes_to_list_are_notified_as_all(heads: dict[StreamId, int]) -> None:
    assert format_hints(heads) == ['{"*":0}']


async def test_blobs_that_nothing_names_go_after_a_day(postgres_schema_url: str) -> None:
    store = open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now))
    named, vain = [await store.put(data) for data in (b"named", b"vain")]
    await store.commit(Write(ONE, "names", lambda _: [Draft(CallStarted(call="1", tool="search"), blob=named)]))
    sql(postgres_schema_url, "UPDATE blobs SET put_at = put_at - 86400000000")
    fresh = await store.put(b"put just now")
    await store.scrub()
    assert [await store.get(digest) for digest in (named, fresh)] == [b"named", b"put just now"]
    with pytest.raises(KeyError):
        await store.get(vain)
    await store.close()


class Slow:
    """An engine that stands still between having saved and committing, until it is told to go on."""

    def __init__(self, engine: PostgresEngine) -> None:
        self._engine = engine
        self.saved, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def commit(self) -> None:
        self.saved.set()
        self.go_on.wait(60)
        self._engine.commit()


async def test_a_blob_is_not_erased_under_the_hands_of_whoever_names_it(postgres_schema_url: str) -> None:
    """Had the eraser looked before the other was done, it would not have seen the event that names the blob."""
    ids = SortableIds(CLOCK.now)
    slow = Slow(PostgresEngine(postgres_schema_url, new_id=ids.make))
    journal_store, other = JournalStore(cast("Engine", slow)), open_store(postgres_schema_url, clock=CLOCK, ids=ids)
    shared = await other.put(b"shared")
    names = [Draft(CallStarted(call="1", tool="search"), blob=shared)]
    await other.commit(Write(ONE, "first", lambda _: names))
    naming = asyncio.create_task(journal_store.commit(Write(session_stream("two"), "second", lambda _: names)))
    await asyncio.to_thread(slow.saved.wait, 60)
    erased = BodiesErased(stream=ONE, through=1, by="a person")
    erasing = asyncio.create_task(other.commit(Write(FLEET, "erase", lambda _: [Draft(erased)])))
    await asyncio.to_thread(somebody_waits, postgres_schema_url, "LOCK TABLE blobs", erasing.done)
    slow.go_on.set()
    await naming
    await erasing
    assert await other.get(shared) == b"shared"
    await journal_store.close()
    await other.close()


async def test_nothing_that_is_written_meanwhile_is_lost_in_a_rebuild(postgres_schema_url: str) -> None:
    ids = SortableIds(CLOCK.now)
    journal_store, other = (open_store(postgres_schema_url, clock=CLOCK, ids=ids) for _ in range(2))
    event, go_on = threading.Event(), threading.Event()

    def holding(call: str) -> Write:
        draft = Draft(CallStarted(call=call, tool="search", legs=LEGS))
        return Write(ONE, call, lambda _: [draft], rows_of_hold(call, LEGS))

    def make(view: StoreView) -> list[Row]:
        rows = list(rows_from_events(view).values())
        event.set()
        go_on.wait(60)
        return rows

    await journal_store.commit(holding("first"))
    rebuilding = asyncio.create_task(journal_store.replace(make))
    await asyncio.to_thread(event.wait, 60)
    writing = asyncio.create_task(other.commit(holding("second")))
    await asyncio.to_thread(somebody_waits, postgres_schema_url, "FROM streams own", writing.done)
    go_on.set()
    await rebuilding
    await writing
    assert [row.hold for row in await journal_store.ask(Query("all_holds", HoldRow))] == ["first", "second"]
    await journal_store.close()
    await other.close()


def begin_session(session: str) -> Write:
    return lifecycle.start_session(SessionStarted(session=session, agent="desk", kind="autonomous", started_by="ada"))


async def test_a_group_commit_takes_two_round_trips(postgres_schema_url: str) -> None:
    """One locks and loads, one saves and commits, however many writes share it."""
    engine = PostgresEngine(postgres_schema_url, new_id=SortableIds(CLOCK.now).make)
    store = JournalStore(engine)
    for count in (1, 50):
        before = engine.round_trips
        await asyncio.gather(*(store.commit(begin_session(f"desk-{count}-{number}")) for number in range(count)))
        assert engine.round_trips - before == 2
    await store.close()


async def test_what_is_asked_together_takes_one_round_trip(postgres_schema_url: str) -> None:
    engine = PostgresEngine(postgres_schema_url, new_id=SortableIds(CLOCK.now).make)
    store = JournalStore(engine)
    sessions = [SessionId(f"desk-{number}") for number in range(20)]
    await asyncio.gather(*(store.commit(begin_session(session)) for session in sessions))
    before = engine.read_round_trips
    rows, pages = await asyncio.gather(
        asyncio.gather(*(store.ask(Query("session", SessionRow, {"session": each})) for each in sessions)),
        asyncio.gather(*(store.read(session_stream(each)) for each in sessions)),
    )
    assert engine.read_round_trips - before == 1
    assert [row.session for (row,) in rows] == sessions
    assert [event.stream for (event,) in pages] == [session_stream(each) for each in sessions]
    await store.close()


async def test_a_question_that_a_server_refuses_fails_alone(postgres_schema_url: str) -> None:
    store = JournalStore(PostgresEngine(postgres_schema_url, new_id=SortableIds(CLOCK.now).make))
    await store.commit(begin_session("desk-1"))
    wrong = {"since": 0, "limit": -1}
    before, refused, after = await asyncio.gather(
        store.read(session_stream(SessionId("desk-1"))),
        store.ask(Query("sessions", SessionRow, wrong)),
        store.ask(Query("session", SessionRow, {"session": "desk-1"})),
        return_exceptions=True,
    )
    assert isinstance(refused, RowRefused)
    assert not isinstance(before, BaseException)
    assert not isinstance(after, BaseException)
    assert (len(before), [row.session for row in after]) == (1, ["desk-1"])
    await store.close()


async def test_a_question_after_the_end_is_an_error(postgres_schema_url: str) -> None:
    store = JournalStore(PostgresEngine(postgres_schema_url, new_id=SortableIds(CLOCK.now).make))
    await store.close()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(store.read(ONE), 60)


async def test_a_claim_takes_one_round_trip_and_writes_nothing_while_nothing_is_due(postgres_schema_url: str) -> None:
    engine = PostgresEngine(postgres_schema_url, new_id=SortableIds(CLOCK.now).make)
    store, worker = JournalStore(engine), WorkerId("one")
    await store.beat(worker)
    worker_rows = await store.ask(Query("all_workers", WorkerRow))
    before = engine.round_trips
    assert await store.claim(worker, 10, agents={"desk": None}) == []
    assert (engine.round_trips - before, await store.ask(Query("all_workers", WorkerRow))) == (1, worker_rows)
    await store.commit(begin_session("desk-1"))
    before = engine.round_trips
    assert [lease.session for lease in await store.claim(worker, 10, agents={"desk": None})] == ["desk-1"]
    assert engine.round_trips - before == 1
    await store.close()


async def test_a_claim_renews_a_lease_that_is_half_over(postgres_schema_url: str) -> None:
    store, worker = open_store(postgres_schema_url, clock=CLOCK, ids=SortableIds(CLOCK.now)), WorkerId("one")
    await store.claim(worker, 1)
    sql(postgres_schema_url, f"UPDATE workers SET alive_until = microseconds() + {LEASE_DURATION // 2 - SECOND}")
    (old,) = await store.ask(Query("all_workers", WorkerRow))
    await store.claim(worker, 1)
    (new,) = await store.ask(Query("all_workers", WorkerRow))
    assert new.alive_until >= old.alive_until + LEASE_DURATION // 2
    await store.close()


PARAMETERS = dict.fromkeys(
    ("now", "format", "limit", "lease", "generation", "after", "at", "before", "through"), ("bigint", BIGINT, "1")
) | {
    **dict.fromkeys(("agents", "limited", "sessions", "keys", "digests"), ("text[]", TextColumn.OID, "'{desk}'")),
    **dict.fromkeys(("most", "generations"), ("bigint[]", IntegerColumn.OID, "'{1}'")),
    "data": ("bytea[]", BytesColumn.OID, "'{}'"),
}
"""Types and values of the parameters that are no text."""
COUNTED = pytest.mark.parametrize("counted", [False, True], ids=["tables are new", "few rows were counted"])
ARRAYS = {TextColumn.OID: "text[]", IntegerColumn.OID: "bigint[]", BytesColumn.OID: "bytea[]"}
Explain = Callable[[bytes, Sequence[str], Sequence[str]], list[str]]
"""Returns the plan of a statement with parameters of these types and values."""


@contextmanager
def open_planner(url: str, *, counted: bool) -> Iterator[Explain]:
    """Explain statements as an engine's writer would run them, on tables that are empty."""
    PostgresEngine(url, new_id=SortableIds(CLOCK.now).make).close()
    ready = to_psycopg_parameters(load_queries("postgres/engine.sql")["configure_writer"]).encode()
    with psycopg.connect(url.partition("?")[0], autocommit=True, prepare_threshold=None) as server:
        server.execute(f"SET search_path TO {url.rpartition('=')[2]}".encode())
        if counted:
            server.execute(
                f"VACUUM ANALYZE {', '.join(row.TABLE for row in TABLES)}, events, workers, tickets".encode()
            )
        server.execute(ready, {"lock_timeout": "10s"})

        def explain(statement: bytes, types: Sequence[str], values: Sequence[str]) -> list[str]:
            server.execute(f"PREPARE looked ({', '.join(types)}) AS ".encode() + statement)
            plan = server.execute(f"EXPLAIN EXECUTE looked ({', '.join(values)})".encode()).fetchall()
            server.execute("DEALLOCATE looked")
            return [line for (line,) in plan]

        yield explain


def explain_named(explain: Explain, name: str) -> list[str]:
    names = dict.fromkeys(PARAMETER.findall(load_queries("postgres/engine.sql")[name]))
    values = {each: PARAMETERS.get(each, ("text", TEXT, "'one'")) for each in names}
    types = [(each, oid) for each, (_, oid, _) in values.items()]
    statement, order = make_named_statement("postgres/engine.sql", name, *types)
    return explain(statement.sql, [values[each][0] for each in order], [values[each][2] for each in order])


def list_whole_reads(plan: list[str]) -> list[str]:
    """The scans of a table that look up nothing in it."""
    ends = [*plan, ""]
    scans = [scan for scan, line in enumerate(plan) if re.search(r"(Seq|Index|Index Only|Bitmap Heap) Scan", line)]
    return [plan[scan].strip() for scan in scans if "Index Cond" not in ends[scan + 1]]


@COUNTED
@pytest.mark.parametrize(("name", "index"), [("claim_ready", "sessions_due"), ("offer_orphans", "sessions_owner")])
async def test_what_may_be_run_is_found_by_its_index(
    postgres_schema_url: str, name: str, index: str, *, counted: bool
) -> None:
    """Whatever the planner thinks of the tables: nothing is read whole, and nothing sorted."""
    with open_planner(postgres_schema_url, counted=counted) as explain:
        plan = explain_named(explain, name)
    assert any(f"Index Scan using {index}" in line for line in plan), plan
    assert not [line for line in plan if "Seq Scan" in line or "Sort" in line]


BY_KEY = """claim_orphans claim_due claim_ready claim_tasks claim_one offer_orphans offer_due offer_tasks free_slots
renew renew_before_claim save_snapshots release read by_keys drop_ticket"""
SHORT = re.compile("sessions_owner|workers_pkey|tickets")
"""What is awake, workers and tickets: there are never many of these."""


@COUNTED
async def test_no_plan_that_the_server_made_while_tables_were_small_reads_them_whole(
    postgres_schema_url: str, *, counted: bool
) -> None:
    """It keeps its plans while they grow. Where a plan begins with a table, each write would read all that there is."""
    with open_planner(postgres_schema_url, counted=counted) as explain:
        plans = {name: explain_named(explain, name) for name in BY_KEY.split()}
        for table in TABLES:
            batch_statements = make_batch_statements(table)
            for name in ("lock", "update", "delete"):
                statement: Statement = getattr(batch_statements, name)
                types = [ARRAYS[oid] for oid in statement.types]
                plans[f"{name} {table.TABLE}"] = explain(statement.sql, types, ["NULL"] * len(types))
    whole = {name: [line for line in list_whole_reads(plan) if not SHORT.search(line)] for name, plan in plans.items()}
    assert {name: lines for name, lines in whole.items() if lines} == {}


class NoTickets:
    """A queue into which nothing may be put."""

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        raise AssertionError(tickets)

    async def serve(self, serve: ServeTicket, concurrency: int) -> None:
        await asyncio.Event().wait()


class Counting(PostgresEngine):
    """Counts the claims that found nothing: a dispatcher may look at any time."""

    idle = 0
    after_commit = 0

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: AgentConcurrency | None = None,
    ) -> Sequence[Lease]:
        leases = super().claim(worker, limit, program_format, only, agents)
        self.idle += not leases
        return leases

    def commit(self) -> None:
        super().commit()
        self.after_commit = self.round_trips - self.idle


async def test_a_due_session_is_awake_after_two_transactions(postgres_schema_url: str) -> None:
    """One claims it, in one round trip; the other records that it is awake, in two. No job is made for it."""
    engine = Counting(postgres_schema_url, new_id=SortableIds(CLOCK.now).make)
    store, worker = JournalStore(engine), WorkerId("one")
    await store.commit(begin_session("desk-1"))
    await store.beat(worker)
    before, future = engine.round_trips, asyncio.get_running_loop().create_future()

    async def wake(lease: Lease, _: SessionRow) -> None:
        await store.commit(lifecycle.wake_session(lease, "woken", "timer", 0))
        if not future.done():
            future.set_result(engine.after_commit - before)

    dispatcher = DistributedDispatcher(RunningSessions(store, CLOCK, worker, wake), lambda: {"desk": None}, NoTickets())
    running = asyncio.create_task(dispatcher.run())
    try:
        async with asyncio.timeout(60):
            assert await future == 3
    finally:
        running.cancel()
        await asyncio.wait([running])
        await store.close()


@pytest.mark.parametrize(
    "texts",
    [
        ("", "null", None, "NULL", " spaces ", "{braces, commas}", "ü€😀", "it's"),
        ('a "quoted" word', None, "null", "C:\\new\\u0041\\\\", "two\nlines", "\ta tab", "\x01\x1f\x7f", ""),
    ],
    ids=["plain", "escaped"],
)
def test_texts_and_numbers_reach_the_server_as_they_are(
    postgres_schema_url: str, texts: tuple[str | None, ...]
) -> None:
    numbers = (0, 1, -1, None, 2**63 - 1, -(2**63), 10, 5)
    columns = (TextColumn(texts), IntegerColumn(numbers))
    slot = ConnectionSlot(PostgresAddress(postgres_schema_url), register_dumpers)
    statement = Statement(b"SELECT * FROM unnest($1, $2)", tuple(column.OID for column in columns))
    (by_pipeline,) = slot.run([(statement, [column.encode() for column in columns])])
    with slot.use() as connection:
        by_psycopg = connection.execute("SELECT * FROM unnest(%s, %s)", columns).fetchall()
    slot.drop()
    assert list(by_pipeline) == by_psycopg == list(zip(texts, numbers, strict=True))


def test_a_query_may_hold_a_percent_sign(postgres_schema_url: str) -> None:
    engine = PostgresEngine(postgres_schema_url, new_id=SortableIds(CLOCK.now).make)
    assert "LIKE 'outage:%'" in load_queries("queries.sql")["outage_notices"]
    assert engine.ask("outage_notices", {"since": 0}) == []
    engine.close()
