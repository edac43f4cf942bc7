"""What a store on a server promises when the server, the network or its keeper fails it."""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import psycopg
import pytest

from halter.core.clock import SystemClock
from halter.core.errors import StoreUnavailable, StoreUnusable
from halter.core.events import CallStarted
from halter.core.ids import FLEET, SortableIds, StreamId
from halter.core.ports import ALL_STREAMS, Committed, Draft, Rows, Write
from halter.journal.apply import WorkingSet, WriteAnswer, apply_write
from halter.journal.open import open_store
from halter.journal.postgres import PostgresEngine
from halter.journal.store import JournalStore
from halter.journal.store_retry import StoreProblem
from halter.testing.postgres import Cluster, throwaway_cluster

if TYPE_CHECKING:
    from conftest import SmallDisk

pytestmark = pytest.mark.postgres

CLOCK = SystemClock()
IDS = SortableIds(CLOCK.now)
SECRET = "open-sesame"


def open_at(url: str) -> JournalStore:
    return open_store(url, clock=CLOCK, ids=IDS)


def note(key: str, body: bytes | None = None) -> Write:
    return Write(FLEET, key, lambda _: [Draft(CallStarted(call=key, tool="search"), body)])


async def fill(store: JournalStore, bodies: Mapping[str, bytes], values: dict[str, bytes]) -> None:
    for key, body in bodies.items():
        await store.commit(note(key, body))
        values[key] = body


def refusal(url: str, kind: type[Exception]) -> str:
    """Return the sentence that an attempt to open a store ends with; never does it hold the password."""
    with pytest.raises(kind) as refused:
        open_at(url)
    assert SECRET not in str(refused.value)
    return str(refused.value)


def at(url: str, user: str = "postgres", database: str = "postgres", query: str = "") -> str:
    split_result = urlsplit(url)
    return f"postgresql://{user}:{SECRET}@{split_result.hostname}:{split_result.port}/{database}{query}"


@contextmanager
def arranged(url: str, *statements: str, undo: Sequence[str]) -> Iterator[None]:
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        try:
            yield
        finally:
            for statement in undo:
                connection.execute(statement.encode())


def test_a_server_that_is_not_there_is_named_with_what_to_do(unused_tcp_port: int) -> None:
    sentence = refusal(f"postgresql://me:{SECRET}@127.0.0.1:{unused_tcp_port}/db", StoreUnavailable)
    assert f"Cannot reach PostgreSQL at 127.0.0.1:{unused_tcp_port}" in sentence
    assert "Check that the server runs" in sentence


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"postgresql://me:{SECRET}@{SECRET}@host/db", "Write an @ of the password as %40"),
        (f"postgresql://me:{SECRET}@host:port/db", "is not a number from 1 to 65535"),
        (f"postgresql://me:{SECRET}@host:99999/db", "is not a number from 1 to 65535"),
        (f"postgresql://me:{SECRET}@host/db?port=zero", "is not a number from 1 to 65535"),
        (f"postgresql://me:{SECRET}@[bad/db", "Invalid PostgreSQL address"),
        (f"postgresql://me:{SECRET}%zz@host/db", "Invalid PostgreSQL address"),
        ("postgresql://", "Write it as postgresql://user:password@host:5432/database"),
        (f"postgresql://me:{SECRET}@/", "has neither a server nor a database"),
        (f"postgresql://me:{SECRET}@host/db?foo=bar", "has the unknown parameter 'foo'"),
        (f"postgresql://me:{SECRET}@host/db?connect_timeout=soon", "has an invalid parameter"),
        (f"postgresql://me:{SECRET}@127.0.0.1/db?sslmode=bogus", "has an invalid parameter"),
        (f"postgresql://me:{SECRET}@host/db?schema=Robert'); DROP TABLE", "Use lowercase letters"),
        (f"postgresql://me:{SECRET}@host/db?schema=pg_catalog", "Use lowercase letters"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_before_anything_is_tried(url: str, sentence: str) -> None:
    assert sentence in refusal(url, StoreUnusable)


def test_a_database_that_does_not_exist_is_called_so(postgres_url: str) -> None:
    assert "has no database of that name" in refusal(at(postgres_url, database="nowhere"), StoreUnusable)


def test_a_user_that_does_not_exist_is_called_so(postgres_url: str) -> None:
    assert "rejected the login" in refusal(at(postgres_url, user="nobody"), StoreUnusable)


def test_a_user_without_rights_gets_the_rights_to_ask_for(postgres_url: str) -> None:
    with arranged(postgres_url, "CREATE ROLE guest LOGIN", undo=["DROP ROLE guest"]):
        assert "the right to create a schema" in refusal(at(postgres_url, user="guest"), StoreUnusable)


def test_a_database_that_can_only_be_read_is_called_so(postgres_url: str) -> None:
    url = at(postgres_url, query=f"?schema=unwritable&options={quote('-cdefault_transaction_read_only=on')}")
    assert "is read-only" in refusal(url, StoreUnavailable)


async def test_a_server_that_has_become_read_only_says_so(postgres_url: str) -> None:
    made = ("CREATE ROLE turned LOGIN", "CREATE SCHEMA turned AUTHORIZATION turned")
    undo = ("DROP SCHEMA turned CASCADE", "DROP ROLE turned")
    with arranged(postgres_url, *made, undo=undo):
        url = at(postgres_url, user="turned", query="?schema=turned")
        first = open_at(url)
        await first.commit(note("key"))
        await first.close()
        with arranged(postgres_url, "ALTER ROLE turned SET default_transaction_read_only = on", undo=()):
            assert "use the address of the primary server" in refusal(url, StoreUnavailable)


def test_a_database_that_cannot_hold_every_text_is_refused(postgres_url: str) -> None:
    text = "CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'"
    with arranged(postgres_url, text, undo=["DROP DATABASE latin"]):
        assert "has the encoding LATIN1" in refusal(at(postgres_url, database="latin"), StoreUnusable)


async def test_a_server_without_a_free_connection_is_waited_for(postgres_url: str) -> None:
    made = ("CREATE ROLE tight LOGIN CONNECTION LIMIT 2", "CREATE SCHEMA tight AUTHORIZATION tight")
    undo = ("DROP SCHEMA tight CASCADE", "DROP ROLE tight")
    with arranged(postgres_url, *made, undo=undo):
        url = at(postgres_url, user="tight", query="?schema=tight")
        store = open_at(url)
        with psycopg.connect(url.partition("?")[0]):
            await store.commit(note("key"))
            with pytest.raises(StoreUnavailable, match="has no free connection"):
                await store.read(FLEET)
        events: Sequence[object] = ()
        for _ in range(100):
            try:
                events = await store.read(FLEET)
                break
            except StoreUnavailable:
                continue
        assert len(events) == 1
        await store.close()


async def test_a_store_lives_in_a_schema_of_its_own(postgres_url: str, postgres_schema_url: str) -> None:
    journal_store = open_at(postgres_schema_url)
    with arranged(postgres_url, undo=["DROP SCHEMA halter CASCADE"]):
        usual = open_at(postgres_url)
        await journal_store.commit(note("key"))
        assert await usual.read(FLEET) == []
        assert not (await usual.commit(note("key"))).is_repeated
        await usual.close()
    await journal_store.close()


async def test_a_full_disk_loses_nothing_and_work_continues_when_there_is_room(
    empty_schema_url: str, small_disk: "SmallDisk"
) -> None:
    small_disk.change("size=4m")
    shutil.chown(small_disk.folder, "postgres", "postgres")
    small_disk.folder.chmod(0o700)
    schema = empty_schema_url.rpartition("=")[2]
    text = f"CREATE TABLESPACE {schema} LOCATION '{small_disk.folder}'"
    undo = [f"DROP SCHEMA {schema} CASCADE", f"DROP TABLESPACE {schema}"]
    with arranged(empty_schema_url, text, undo=undo):
        store = open_at(f"{empty_schema_url}&options={quote(f'-cdefault_tablespace={schema}')}")
        bodies = {f"key {number}": os.urandom(100_000) for number in range(100)}
        values: dict[str, bytes] = {}
        with pytest.raises(StoreUnavailable, match=r"disk of PostgreSQL at .* is full"):
            await fill(store, bodies, values)
        assert {event.key: event.body for event in await store.read(FLEET)} == values
        small_disk.change("size=64m")
        await fill(store, bodies, values)
        assert {event.key: event.body for event in await store.read(FLEET)} == bodies
        await store.close()


async def test_rows_that_another_keeps_locked_are_waited_for_and_then_said_to_be_locked(
    postgres_schema_url: str,
) -> None:
    store = JournalStore(PostgresEngine(postgres_schema_url, new_id=IDS.make, lock_timeout="20ms"))
    await store.commit(note("first"))
    schema = postgres_schema_url.rpartition("=")[2]
    with psycopg.connect(postgres_schema_url.partition("?")[0]) as connection:
        connection.execute(f"SELECT * FROM {schema}.streams FOR UPDATE".encode())
        with pytest.raises(StoreUnavailable, match="Another process has locked rows"):
            await store.commit(note("second"))
        assert [event.key for event in await store.read(FLEET)] == ["first"]
    assert not (await store.commit(note("second"))).is_repeated
    await store.close()


async def test_a_writer_that_stands_still_does_not_keep_its_locks(postgres_schema_url: str) -> None:
    stuck = JournalStore(PostgresEngine(postgres_schema_url, new_id=IDS.make, lock_timeout="50ms"))
    journal_store = open_at(postgres_schema_url)
    await stuck.commit(note("first"))
    locked, released = threading.Event(), threading.Event()

    def decide(_: Rows) -> Sequence[Draft]:
        locked.set()
        released.wait(60)
        return [Draft(CallStarted(call="stuck", tool="search"))]

    task = asyncio.create_task(stuck.commit(Write(FLEET, "stuck", decide)))
    await asyncio.to_thread(locked.wait, 60)
    await journal_store.commit(note("second"))
    released.set()
    with pytest.raises(StoreUnavailable):
        await task
    await stuck.commit(note("stuck"))
    assert [event.key for event in await journal_store.read(FLEET)] == ["first", "second", "stuck"]
    await stuck.close()
    await journal_store.close()


@pytest.fixture(scope="module")
def own_cluster(postgres_binaries: None) -> Iterator[Cluster]:
    """A server that a test may stop, which the one for all tests must not be."""
    with throwaway_cluster() as cluster:
        yield cluster


async def test_a_restart_in_the_middle_loses_nothing_and_all_continue(own_cluster: Cluster) -> None:
    store = open_at(f"{own_cluster.url}?schema=restarted")
    acknowledged = [await store.commit(note(f"key {number}")) for number in range(20)]
    assert len(await store.read(FLEET)) == 20
    running = [asyncio.create_task(store.commit(note(f"key {number}"))) for number in range(20, 400)]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(own_cluster.stop_hard)
    answers = await asyncio.gather(*running, return_exceptions=True)
    assert {type(answer) for answer in answers} <= {Committed, StoreUnavailable}
    acknowledged += [answer for answer in answers if isinstance(answer, Committed)]
    for attempt in (store.commit(note("key 400")), store.read(FLEET), store.beat(IDS.make()), store.put(b"")):
        with pytest.raises(StoreUnavailable, match=r"Cannot reach PostgreSQL at 127\.0\.0\.1:\d+"):
            await attempt
    await asyncio.to_thread(own_cluster.start)
    results = await asyncio.gather(*(store.commit(note(f"key {number}")) for number in range(401)))
    events = await store.read(FLEET)
    assert [event.seq for event in events] == list(range(1, 402))
    assert {event for answer in acknowledged for event in answer.events} <= set(events)
    assert sum(answer.is_repeated for answer in results) >= len(acknowledged)
    await store.close()


async def test_a_recovered_server_is_used_despite_earlier_connections(own_cluster: Cluster) -> None:
    store, texts = open_at(f"{own_cluster.url}?schema=idle"), list[str]()
    patient = store.patient(CLOCK, StoreProblem(texts.append))
    await patient.commit(note("before"))
    await patient.read(FLEET)
    await asyncio.to_thread(own_cluster.stop_hard)
    await asyncio.to_thread(own_cluster.start)
    await patient.commit(note("after"))
    assert [event.key for event in await patient.read(FLEET)] == ["before", "after"]
    assert texts == []
    await store.close()


async def test_what_is_acknowledged_is_on_the_disk_also_where_the_server_usually_does_not_wait_for_it(
    own_cluster: Cluster,
) -> None:
    """Such a server writes its log every so often, here every ten seconds, and a crash in between loses the rest."""
    hasty = [f"ALTER SYSTEM SET {setting}" for setting in ("synchronous_commit = off", "wal_writer_delay = '10s'")]
    with arranged(own_cluster.url, *hasty, undo=()):
        own_cluster.stop_hard()
    own_cluster.start()
    store = open_at(f"{own_cluster.url}?schema=hasty")
    for number in range(20):
        await store.commit(note(f"key {number}"))
    own_cluster.stop_hard()
    own_cluster.start()
    assert [event.key for event in await store.read(FLEET)] == [f"key {number}" for number in range(20)]
    await store.close()
    with arranged(own_cluster.url, "ALTER SYSTEM RESET ALL", undo=()):
        own_cluster.stop_hard()
    own_cluster.start()


async def test_hints_are_received_again_after_a_restart(own_cluster: Cluster) -> None:
    journal_store, there = (open_at(f"{own_cluster.url}?schema=hinted") for _ in range(2))
    stream_ids: set[StreamId] = set()

    async def follow() -> None:
        async for change in journal_store.changes():
            stream_ids.add(change.stream)

    async def until(wanted: Callable[[], bool], prefix: str) -> None:
        for number in range(1_000):
            try:
                await there.commit(note(f"{prefix} {number}"))
            except StoreUnavailable:
                continue
            if wanted():
                return
        raise AssertionError(stream_ids)

    following = asyncio.create_task(follow())
    await until(lambda: FLEET in stream_ids, "before")
    await asyncio.to_thread(own_cluster.stop_hard)
    stream_ids.clear()  # Before the start: whoever listens may be back before the starting has returned.
    await asyncio.to_thread(own_cluster.start)
    await until(lambda: {ALL_STREAMS, FLEET} <= stream_ids, "after")
    following.cancel()
    await journal_store.close()
    await there.close()


def test_a_wrong_password_is_called_so(own_cluster: Cluster) -> None:
    rules = own_cluster.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + before)
    made = ("CREATE ROLE guarded LOGIN PASSWORD 'something else'", "SELECT pg_reload_conf()")
    with arranged(own_cluster.url, *made, undo=["DROP ROLE guarded"]):
        assert "rejected the login" in refusal(at(own_cluster.url, user="guarded"), StoreUnusable)
    rules.write_text(before)


class Cable:
    """What lies between a store and its server, and can be cut after the server did what it was asked."""

    def __init__(self, server: str) -> None:
        self._server = urlsplit(server)
        self.lose_next_answer = False
        self._ends: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            yield f"postgresql://postgres@127.0.0.1:{server.sockets[0].getsockname()[1]}/postgres"
            await asyncio.gather(*self._ends)

    def _connected(self, stream_reader: asyncio.StreamReader, stream_writer: asyncio.StreamWriter) -> None:
        self._ends.append(asyncio.create_task(self._connect(stream_reader, stream_writer)))

    async def _connect(self, stream_reader: asyncio.StreamReader, stream_writer: asyncio.StreamWriter) -> None:
        answers, asked = await asyncio.open_connection(self._server.hostname, self._server.port)
        carriers = [
            asyncio.create_task(self._carry(stream_reader, asked, answers=False)),
            asyncio.create_task(self._carry(answers, stream_writer, answers=True)),
        ]
        await asyncio.wait(carriers, return_when=asyncio.FIRST_COMPLETED)
        for carrier in carriers:
            carrier.cancel()
        for end in (asked, stream_writer):
            end.close()
            await end.wait_closed()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await source.read(65_536):
            if answers and self.lose_next_answer:
                self.lose_next_answer = False
                break
            sink.write(data)


async def test_a_commit_whose_answer_was_lost_is_repeated_harmlessly(postgres_schema_url: str) -> None:
    cable = Cable(postgres_schema_url)

    def cutting(write: Write, rows: WorkingSet, salts: Iterator[bytes]) -> WriteAnswer:
        cable.lose_next_answer = write.key == "unlucky" and not rows.earlier_by_key
        return apply_write(write, rows, salts)

    async with cable.laid() as url:
        engine = await asyncio.to_thread(
            PostgresEngine, f"{url}?{urlsplit(postgres_schema_url).query}", new_id=IDS.make
        )
        store = JournalStore(engine, applier=cutting)
        await store.commit(note("lucky"))
        with pytest.raises(StoreUnavailable, match="never applies one twice"):
            await store.commit(note("unlucky"))
        assert (await store.commit(note("unlucky"))).is_repeated
        assert [event.key for event in await store.read(FLEET)] == ["lucky", "unlucky"]
        await store.close()
