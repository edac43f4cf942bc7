"""Rows are looked up once, for as long as nobody else writes; and what was not committed was never there."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from halter.core.errors import StoreError
from halter.core.events import RequestStarted, TurnStarted, Unknown
from halter.core.ids import StreamId, WorkerId, session_stream
from halter.core.money import BudgetRow, Leg
from halter.core.ports import Draft, Query, Rows, Stored, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import HaltRow, HoldRow, StreamRow
from halter.core.vocabulary import RowKey
from halter.guard.halts import halt
from halter.journal.apply import Changes, WorkingSet
from halter.journal.engine import MAX_CACHED_ROWS, MAX_CACHED_WRITES, RowCache
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine
from halter.journal.sqlite_connection import ForkSafeConnection
from halter.journal.store import JournalStore
from halter.journal.writer import DONE_BEFORE_YIELD

FLEET: RowKey = (HaltRow, "fleet")
HALTED = HaltRow("fleet", 1, 1, "ada", "", 0)
RESUMED = HaltRow("fleet", 0, 2, "ada", "", 0)


class Table:
    """A table with one row, and how often it was looked at."""

    def __init__(self) -> None:
        self.row: HaltRow | None = HALTED
        self.looks = 0

    def look(self, _: RowKey) -> HaltRow | None:
        self.looks += 1
        return self.row


def make_changes(*rows: HaltRow, deletes: list[RowKey] | None = None) -> Changes:
    return Changes(updates={row.key(): row for row in rows}, deletes=dict.fromkeys(deletes or []))


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def known(table: Table) -> RowCache:
    return RowCache(table.look)


def test_a_row_is_looked_up_once(table: Table, known: RowCache) -> None:
    assert [known.load([FLEET])[FLEET] for _ in range(3)] == [HALTED] * 3
    assert table.looks == 1


def test_that_a_row_is_not_there_is_known_as_well(table: Table, known: RowCache) -> None:
    table.row = None
    assert [known.load([FLEET])[FLEET] for _ in range(3)] == [None] * 3
    assert table.looks == 1


def test_after_somebody_else_wrote_everything_is_looked_up_again(table: Table, known: RowCache) -> None:
    known.load([FLEET])
    table.row = RESUMED
    assert known.load([FLEET])[FLEET] == HALTED
    known.version += 1
    assert known.load([FLEET])[FLEET] == RESUMED


def test_what_is_written_counts_when_it_is_committed(known: RowCache) -> None:
    known.load([FLEET])
    known.written = make_changes(RESUMED)
    assert known.load([FLEET])[FLEET] == HALTED
    known.on_commit()
    assert known.load([FLEET])[FLEET] == RESUMED


def test_what_is_undone_was_never_there(known: RowCache) -> None:
    known.load([FLEET])
    known.written = make_changes(deletes=[FLEET])
    known.forget()
    known.on_commit()
    assert known.load([FLEET])[FLEET] == HALTED


def test_no_more_rows_are_known_than_fit(table: Table, known: RowCache) -> None:
    known.load([(HaltRow, f"session:{number}") for number in range(MAX_CACHED_ROWS + 1)])
    before = table.looks
    known.load([(HaltRow, "session:0")])
    assert table.looks == before + 1


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[], SqliteEngine]]:
    ticks = count(1)
    with ExitStack() as stack:

        def make() -> SqliteEngine:
            sqlite_engine = SqliteEngine(str(tmp_path / "halter.db"), now=lambda: next(ticks), new_id=lambda: "store")
            stack.callback(sqlite_engine.close)
            return sqlite_engine

        yield make


def write_row(engine: SqliteEngine, row: HaltRow) -> None:
    result = engine.begin([FLEET]).loaded[FLEET]
    engine.save(make_changes(row) if result else Changes({row.key(): row}))
    engine.commit()


def statements_of(engine: SqliteEngine, row: HaltRow) -> list[str]:
    """What SQLite is told when a row is written that the engine may know."""
    texts: list[str] = []
    connection = cast("ForkSafeConnection", vars(engine)["_connection"])
    connection.set_trace_callback(texts.append)
    write_row(engine, row)
    connection.set_trace_callback(None)
    return [each for each in texts if each.startswith("UPDATE")]


def test_of_a_row_that_is_known_only_what_changes_is_written(engine: Callable[[], SqliteEngine]) -> None:
    sqlite_engine = engine()
    write_row(sqlite_engine, HALTED)
    assert statements_of(sqlite_engine, HALTED) == []
    assert statements_of(sqlite_engine, RESUMED) == [
        'UPDATE halts SET "halted" = 0, "at" = 2 WHERE "scope" = \'fleet\''
    ]
    assert read_halt(sqlite_engine) == RESUMED


def test_what_another_wrote_is_compared_and_not_what_was_there_before(engine: Callable[[], SqliteEngine]) -> None:
    sqlite_engine, other = engine(), engine()
    write_row(sqlite_engine, HALTED)
    write_row(other, RESUMED)
    write_row(sqlite_engine, HALTED)
    assert read_halt(other) == HALTED


def test_what_was_undone_is_written_when_it_comes_again(engine: Callable[[], SqliteEngine]) -> None:
    sqlite_engine = engine()
    write_row(sqlite_engine, HALTED)
    sqlite_engine.begin([FLEET])
    sqlite_engine.save(make_changes(RESUMED))
    sqlite_engine.rollback()
    write_row(sqlite_engine, RESUMED)
    assert read_halt(sqlite_engine) == RESUMED


def read_halt(engine: SqliteEngine) -> object:
    try:
        return engine.begin([FLEET]).loaded[FLEET]
    finally:
        engine.rollback()


def read_by_write(engine: SqliteEngine) -> tuple[object, object]:
    """The halt of the fleet and the head of its stream, as a write finds them that changes nothing."""
    loaded = engine.begin([FLEET, (StreamRow, "fleet")]).loaded
    engine.commit()
    return loaded[FLEET], loaded[StreamRow, "fleet"]


def test_two_processes_on_one_file_see_what_the_other_wrote(engine: Callable[[], SqliteEngine]) -> None:
    sqlite_engine, other = engine(), engine()
    for row in (HALTED, RESUMED, HALTED):
        write_row(sqlite_engine, row)
        assert read_halt(other) == row
        assert read_halt(sqlite_engine) == row
        write_row(other, RESUMED)
        assert read_halt(sqlite_engine) == RESUMED


def test_a_row_that_a_person_changes_by_hand_is_seen(engine: Callable[[], SqliteEngine], tmp_path: Path) -> None:
    sqlite_engine = engine()
    write_row(sqlite_engine, HALTED)
    with sqlite3.connect(tmp_path / "halter.db") as hand:
        hand.execute("UPDATE halts SET reason = 'by hand'")
    hand.close()
    assert getattr(read_halt(sqlite_engine), "reason", "") == "by hand"


def test_what_is_made_once_is_looked_up_while_it_is_not_there_and_forgotten_when_it_is_gone() -> None:
    hold = HoldRow("call", "s", 1, "turn", "deed", b"[]")
    hold_rows: list[HoldRow] = []
    looks: list[RowKey] = []

    def look(key: RowKey) -> HoldRow | None:
        looks.append(key)
        return hold_rows[0] if hold_rows else None

    row_cache, key = RowCache(look), hold.key()
    assert [row_cache.load([key])[key] for _ in range(2)] == [None, None]
    assert len(looks) == 2
    row_cache.written = Changes({key: hold})
    row_cache.on_commit()
    assert row_cache.load([key])[key] is hold
    row_cache.written = Changes(deletes={key: None})
    row_cache.on_commit()
    assert row_cache.load([key])[key] is None


@pytest.mark.parametrize(
    ("loaded", "steps", "saved"),
    [
        (None, [HALTED], ({FLEET: HALTED}, {}, [])),
        (None, [HALTED, RESUMED], ({FLEET: RESUMED}, {}, [])),
        (None, [HALTED, None], ({}, {}, [])),
        (None, [HALTED, None, RESUMED], ({FLEET: RESUMED}, {}, [])),
        (None, [None], ({}, {}, [])),
        (HALTED, [RESUMED], ({}, {FLEET: RESUMED}, [])),
        (HALTED, [None], ({}, {}, [FLEET])),
        (HALTED, [RESUMED, None], ({}, {}, [FLEET])),
        (HALTED, [None, RESUMED], ({}, {FLEET: RESUMED}, [])),
        (HALTED, [None, RESUMED, None], ({}, {}, [FLEET])),
    ],
)
def test_a_transaction_saves_each_row_once_as_it_is_at_its_end(
    loaded: HaltRow | None, steps: list[HaltRow | None], saved: tuple[object, object, list[RowKey]]
) -> None:
    rows = WorkingSet(loaded={FLEET: loaded}, now=0)
    for row in steps:
        if row is None:
            rows.drop(FLEET)
        else:
            rows.save(row)
    assert (rows.inserts, rows.updates, list(rows.deletes)) == saved
    assert rows.get(HaltRow, "fleet") == steps[-1]


def halt_write(key: str) -> Write:
    return halt("session:s", "ada", key)


def record_queries(engine: SqliteEngine) -> list[str]:
    """The queries for earlier writes that an engine makes from now on."""
    texts: list[str] = []
    connection = engine._connection  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    connection.set_trace_callback(lambda sql: texts.append(sql) if "FROM events WHERE key IN" in sql else None)
    return texts


async def test_a_stream_that_was_started_here_is_not_searched_for_earlier_writes(
    engine: Callable[[], SqliteEngine],
) -> None:
    sqlite_engine = engine()
    store = JournalStore(sqlite_engine, inline=True)
    await store.commit(halt_write("first"))
    texts = record_queries(sqlite_engine)
    await store.claim(WorkerId("w"), 1)
    assert not (await store.commit(halt_write("second"))).is_repeated
    assert texts == []
    assert (await store.commit(halt_write("first"))).is_repeated
    assert (await store.commit(halt_write("second"))).is_repeated
    assert len(texts) == 2


async def test_a_stream_that_another_process_writes_to_is_asked_for_earlier_writes(
    engine: Callable[[], SqliteEngine],
) -> None:
    sqlite_engine, other = engine(), engine()
    first, second = JournalStore(sqlite_engine, inline=True), JournalStore(other, inline=True)
    await first.commit(halt_write("mine"))
    await second.commit(halt_write("yours"))
    texts = record_queries(sqlite_engine)
    assert (await first.commit(halt_write("yours"))).is_repeated
    assert len(texts) == 1


async def test_a_write_that_was_undone_is_made_the_second_time(
    engine: Callable[[], SqliteEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_engine = engine()
    store = JournalStore(sqlite_engine, inline=True)
    await store.commit(halt_write("first"))
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_engine, "commit", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await store.commit(halt_write("second"))
    assert not (await store.commit(halt_write("second"))).is_repeated


async def test_what_was_undone_is_not_known_after_a_write_that_decides_nothing(
    engine: Callable[[], SqliteEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_engine = engine()
    store = JournalStore(sqlite_engine, inline=True)
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_engine, "commit", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await store.commit(halt("fleet", "ada", "first"))
    await store.commit(Write(StreamId("fleet"), "nothing", lambda _: [], [FLEET]))
    assert read_by_write(sqlite_engine) == (None, None)


async def test_a_commit_whose_answer_was_lost_is_known_as_it_was_made(tmp_path: Path) -> None:
    losing: list[str] = []

    class LosesAnswer(ForkSafeConnection):
        def fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
            rows = super().fetch(sql, parameters)
            if sql in losing:
                losing.remove(sql)
                raise sqlite3.OperationalError("disk I/O error")
            return rows

    def connect(path: str) -> ForkSafeConnection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=LosesAnswer)

    sqlite_engine = SqliteEngine(str(tmp_path / "halter.db"), now=lambda: 1, new_id=lambda: "store", connect=connect)
    store = JournalStore(sqlite_engine, inline=True)
    await store.commit(Write(StreamId("fleet"), "nothing", lambda _: [], [FLEET]))
    losing.append("COMMIT")
    with pytest.raises(StoreError):
        await store.commit(halt("fleet", "ada", "first"))
    halted, head = read_by_write(sqlite_engine)
    assert isinstance(halted, HaltRow)
    assert isinstance(head, StreamRow)
    assert (await store.commit(halt("fleet", "ada", "first"))).is_repeated
    await store.close()


async def test_an_error_of_the_file_is_one_of_the_store_also_where_a_row_is_looked_up_late(tmp_path: Path) -> None:
    broken: list[str] = []

    class Breaks(ForkSafeConnection):
        def fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
            if broken and " FROM holds " in sql:
                raise sqlite3.OperationalError("disk I/O error")
            return super().fetch(sql, parameters)

    def connect(path: str) -> ForkSafeConnection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Breaks)

    def decide(rows: Rows) -> Sequence[Draft]:
        assert rows.get(HoldRow, "call") is None
        return []

    sqlite_engine = SqliteEngine(str(tmp_path / "halter.db"), now=lambda: 1, new_id=lambda: "store", connect=connect)
    store, write = (
        JournalStore(sqlite_engine, inline=True),
        Write(StreamId("fleet"), "key", decide, [(HoldRow, "call")]),
    )
    broken.append("holds")
    with pytest.raises(StoreError):
        await store.commit(write)
    broken.clear()
    await store.commit(write)
    await store.close()


async def test_of_events_of_which_the_store_refuses_one_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "halter.db"
    sqlite_engine = SqliteEngine(str(path), now=lambda: 1, new_id=lambda: "store")
    store, stream, draft = JournalStore(sqlite_engine, inline=True), session_stream("s"), Draft(TurnStarted(turn=1))
    await store.commit(Write(stream, "first", lambda _: [draft]))
    with sqlite3.connect(path) as by_hand:
        by_hand.execute("CREATE TEMP TABLE copied AS SELECT * FROM events")
        by_hand.execute("UPDATE copied SET position = 9, seq = 3, key = 'by hand'")
        by_hand.execute("INSERT INTO events SELECT * FROM copied")
    by_hand.close()
    with pytest.raises(StoreError, match="refused a row"):
        await store.commit(Write(stream, "more", lambda _: [draft] * 3))
    assert [event.key for event in await store.read(stream)] == ["first", "by hand"]
    await store.close()


async def test_a_question_to_a_file_that_fails_has_an_error_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "halter.db"
    sqlite_engine = SqliteEngine(str(path), now=lambda: 1, new_id=lambda: "store")
    with sqlite3.connect(path) as by_hand:
        by_hand.execute("DROP TABLE halts")
    by_hand.close()
    with pytest.raises(StoreError, match="no such table: halts"):
        sqlite_engine.ask("all_halts", {})
    sqlite_engine.close()


def test_rows_that_are_made_anew_are_looked_up_again(engine: Callable[[], SqliteEngine]) -> None:
    sqlite_engine = engine()
    write_row(sqlite_engine, HALTED)
    sqlite_engine.replace(lambda _: [RESUMED])
    assert read_by_write(sqlite_engine)[0] == RESUMED


async def test_a_store_that_is_opened_with_a_clock_set_back_puts_no_event_before_those_it_finds(tmp_path: Path) -> None:
    times: list[int] = []
    for now in (1_000_000, 1_000):
        engine = SqliteEngine(str(tmp_path / "halter.db"), now=lambda now=now: now, new_id=lambda: "store")
        store = JournalStore(engine, inline=True)
        times.append((await store.commit(halt_write(f"at {now}"))).events[0].at)
        await store.close()
    assert times == [1_000_000, 1_000_000]


def test_when_more_was_written_than_is_known_the_store_is_asked() -> None:
    head = StreamRow("fleet", 1, b"", 1)
    stream_rows: list[StreamRow] = []
    row_cache = RowCache(lambda _: stream_rows[0] if stream_rows else None)
    for seq in range(1, MAX_CACHED_WRITES + 2):
        row_cache.load([head.key()])
        assert not row_cache.can_repeat([head.key()], [f"key{seq}"])
        row_cache.written = Changes(
            updates={head.key(): head}, events=[make_stored(StreamId("fleet"), seq, f"key{seq}")]
        )
        row_cache.on_commit()
        stream_rows = [head]
    row_cache.load([head.key()])
    assert row_cache.can_repeat([head.key()], ["new"])


def begin_request(key: str, request: str, *, read: bool) -> Write:
    """A write that holds money under an id, and looks whether it is held already if it is to."""
    legs = (Leg("session:s", "", "usd", None, 5),)

    def decide(rows: Rows) -> list[Draft]:
        if read and rows.get(HoldRow, request) is not None:
            return []
        return [Draft(RequestStarted(request=request, model="m", purpose="turn", legs=legs))]

    return Write(StreamId("fleet"), key, decide, rows_of_hold(request, legs))


def record_hold_queries(engine: SqliteEngine) -> list[str]:
    """The queries for holds that an engine makes from now on."""
    texts: list[str] = []
    connection = engine._connection  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    connection.set_trace_callback(lambda sql: texts.append(sql) if "FROM holds WHERE" in sql else None)
    return texts


async def test_what_is_made_once_is_not_looked_up_before_it_is_made(engine: Callable[[], SqliteEngine]) -> None:
    sqlite_engine = engine()
    store, texts = JournalStore(sqlite_engine, inline=True), record_hold_queries(sqlite_engine)
    await store.commit(begin_request("first", "r1", read=False))
    assert texts == []
    await store.commit(begin_request("second", "r2", read=True))
    assert len(texts) == 1


@pytest.mark.parametrize("read", [True, False])
async def test_what_is_made_once_and_there_already_is_found_by_a_process_that_does_not_know_it(
    engine: Callable[[], SqliteEngine], *, read: bool
) -> None:
    await JournalStore(engine(), inline=True).commit(begin_request("first", "r1", read=True))
    sqlite_engine = engine()
    store, texts = JournalStore(sqlite_engine, inline=True), record_hold_queries(sqlite_engine)
    again = await store.commit(begin_request("second", "r1", read=read))
    assert len(again.events) == (0 if read else 1)
    assert len(texts) == 1
    (budget_row,) = await store.ask(Query("budget", BudgetRow, {"scope": "session:s", "window": "", "unit": "usd"}))
    assert budget_row.held == (5 if read else 10)


def test_a_row_that_was_not_looked_up_is_found_before_it_is_dropped() -> None:
    hold = HoldRow("call", "s", 1, "turn", "deed", b"[]")
    rows = WorkingSet(loaded={}, now=0, unread={hold.key()}, read_row=lambda _: hold)
    rows.drop(hold.key())
    assert list(rows.deletes) == [hold.key()]


def test_rows_that_are_looked_for_together_are_those_that_each_look_finds() -> None:
    hold, hold_row = HoldRow("call", "s", 1, "turn", "deed", b"[]"), HoldRow("gone", "s", 1, "turn", "deed", b"[]")
    rows = WorkingSet(loaded={hold_row.key(): None}, now=0, unread={hold.key()}, read_row=lambda _: hold)
    both = [(HoldRow, "gone"), (HoldRow, "call")]
    assert rows.find(both) == rows.find(both) == [None, hold]
    assert (rows.find([]), rows.find(both[:1])) == ([], [None])


def make_stored(stream: StreamId, seq: int, key: str) -> Stored:
    return Stored(
        stream, seq, "halt_requested", 1, 1, 0, key, None, b"{}", None, None, b"", b"", Unknown("x", 1, b"{}")
    )


async def test_a_task_that_writes_without_a_pause_lets_the_others_run() -> None:
    store, turns = JournalStore(MemoryEngine(now=lambda: 1, new_id=lambda: "id")), 0

    async def write(times: int) -> int:
        before = turns
        for number in range(times):
            await store.commit(halt("agent:a", "ada", f"{times}/{number}"))
        return turns - before

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take_turns())
    await write(2)
    assert await write(3 * DONE_BEFORE_YIELD) == 3
    task.cancel()
    await store.close()
