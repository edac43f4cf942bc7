"""A store that goes away: what could not be recorded waits, and goes on when the store is back."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import psycopg
import pytest

from halter.cli.command import MAX_STORE_WAIT_SECONDS, STORE_BACK_NOTICE, open_when_available
from halter.core.clock import SECOND
from halter.core.errors import StoreUnavailable
from halter.core.events import SessionStarted
from halter.core.ids import session_stream
from halter.core.vocabulary import RowKey
from halter.journal.apply import WorkingSet
from halter.journal.connection import PostgresAddress, translate_postgres_error
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite_connection import translate_sqlite_error
from halter.journal.store import JournalStore
from halter.journal.store_retry import RETRYING, StoreProblem
from halter.runtime.runtime import Runtime
from halter.state import lifecycle
from halter.testing.world import World

START = SessionStarted(session="s", agent="a", kind="task", started_by="ada")


class Away(MemoryEngine):
    """An engine that is away for its first transactions; the last of them is committed, but its answer is lost."""

    left = 0

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        if self.left > 1:
            self._fail()
        return super().begin(keys, writes, wait=wait)

    def commit(self) -> None:
        super().commit()
        if self.left:
            self._fail()

    def _fail(self) -> NoReturn:
        self.left -= 1
        raise StoreUnavailable("The disk is full. Nothing was written; free some space and it goes on.")


def away(world: World, uses: int) -> JournalStore:
    engine = Away(now=world.clock.now, new_id=world.ids.make)
    engine.left = uses
    return JournalStore(engine, inline=True)


async def test_a_write_waits_until_the_store_is_back_and_happens_once(world: World) -> None:
    store, trouble = away(world, 6), StoreProblem()
    before = world.now
    committed = await store.patient(world.clock, trouble).commit(lifecycle.start_session(START))
    assert committed.is_repeated
    assert [event.seq for event in await store.read(session_stream("s"))] == [1]
    assert world.now - before > 2 * SECOND
    assert trouble.problem == ""


async def test_the_reason_of_the_wait_is_shown_and_a_cancelled_write_never_happens(world: World) -> None:
    store, trouble = away(world, 100), StoreProblem()
    waiting = asyncio.create_task(store.patient(world.clock, trouble).commit(lifecycle.start_session(START)))
    await world.advance(SECOND)
    assert "disk is full" in trouble.problem
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await store.read(session_stream("s")) == []


async def test_the_problem_is_reported_once_and_then_its_end(world: World) -> None:
    texts: list[str] = []
    await away(world, 6).patient(world.clock, StoreProblem(texts.append)).commit(lifecycle.start_session(START))
    assert [sentence.partition(".")[0] for sentence in texts] == ["The disk is full", ""]


async def test_it_is_not_over_while_another_call_still_waits(world: World) -> None:
    texts: list[str] = []
    trouble = StoreProblem(texts.append)
    full, fine = away(world, 100).patient(world.clock, trouble), world.journal.patient(world.clock, trouble)
    waiting = asyncio.create_task(full.commit(lifecycle.start_session(START)))
    await world.advance(SECOND)
    await fine.read(session_stream("s"))
    await world.journal.patient(world.clock).read(session_stream("s"))
    assert len(texts) == 1
    assert "disk is full" in trouble.problem
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(texts) == 1
    await fine.read(session_stream("s"))
    assert texts[1:] == [""]


async def test_the_store_itself_does_not_wait(world: World) -> None:
    store = away(world, 100)
    store.patient(world.clock)
    with pytest.raises(StoreUnavailable):
        await store.commit(lifecycle.start_session(START))


LOCKED = "The store is locked by another process."


@asynccontextmanager
async def open_after(attempts: list[None], failures: int, app: Any = None) -> AsyncGenerator[Runtime]:
    attempts.append(None)
    if len(attempts) <= failures:
        raise StoreUnavailable(LOCKED)
    yield app


async def test_a_command_that_runs_sessions_waits_for_a_store_that_is_locked_at_its_start_and_says_so_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts: list[None] = []
    async with AsyncExitStack() as stack:
        await open_when_available(partial(open_after, attempts, 3), stack, MAX_STORE_WAIT_SECONDS)
    assert len(attempts) == 4
    assert capsys.readouterr().err.split("\n") == [f"{LOCKED} Retrying for up to 60 s.", STORE_BACK_NOTICE, ""]


async def test_the_wait_for_a_locked_store_ends_and_then_nothing_says_that_it_is_retried(world: World) -> None:
    before = world.now
    async with AsyncExitStack() as stack:
        with pytest.raises(StoreUnavailable) as info:
            await open_when_available(partial(open_after, [], 1000), stack, MAX_STORE_WAIT_SECONDS)
    assert str(info.value) == LOCKED
    assert world.now - before == MAX_STORE_WAIT_SECONDS * SECOND


async def test_a_command_that_runs_nothing_fails_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(StoreUnavailable):
            await open_when_available(partial(open_after, [], 1), stack, 0)
    assert capsys.readouterr().err == ""


def list_unavailable_stores() -> list[str]:
    """The sentences of all errors after which a store may be available again."""
    sentences: list[str] = []
    for name in ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR"):
        error = sqlite3.OperationalError("failed")
        error.sqlite_errorname = name
        sentences.append(str(translate_sqlite_error(error, "/nowhere/halter.db")))
    address = PostgresAddress("postgresql://server/base")
    without_code = (psycopg.OperationalError(text) for text in ("too many clients", "is starting up", "refused"))
    with_code = (psycopg.errors.lookup(code)("failed") for code in ("53300", "53100", "55P03", "57P01", "25006"))
    return [*sentences, *(str(translate_postgres_error(error, address)) for error in (*without_code, *with_code))]


def test_an_error_of_the_store_promises_no_retry_since_only_what_retries_can_say_so() -> None:
    assert [sentence for sentence in list_unavailable_stores() if "retr" in sentence.lower()] == []


async def test_what_retries_says_so(world: World) -> None:
    texts: list[str] = []
    await away(world, 2).patient(world.clock, StoreProblem(texts.append)).commit(lifecycle.start_session(START))
    assert texts[0].endswith(RETRYING)
    assert texts[-1] == ""
