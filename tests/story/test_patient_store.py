"""A store that goes away: what could not be recorded waits, and goes on when the store is back."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import pytest

from halter.core.clock import SECOND
from halter.core.errors import StoreUnavailable
from halter.core.events import SessionStarted
from halter.core.ids import session_stream
from halter.core.vocabulary import RowKey
from halter.journal.apply import WorkingSet
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore, StoreProblem
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
