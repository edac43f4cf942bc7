"""A store that goes away: what could not be recorded waits, and goes on when the store is back."""

import asyncio

from halter.core.clock import SECOND
from halter.core.errors import StoreUnavailable
from halter.core.events import SessionStarted
from halter.core.ids import session_stream
from halter.core.ports import Committed, Store, Write
from halter.journal.patient import PatientStore, Trouble
from halter.journal.relay import Relay
from halter.state import life
from halter.testing.world import World


class Away(Relay):
    """A store that is away for its first uses; the last of them is committed, but its answer is lost."""

    def __init__(self, store: Store, uses: int) -> None:
        super().__init__(store)
        self.left = uses

    async def commit(self, write: Write) -> Committed:
        if self.left == 0:
            return await self._store.commit(write)
        self.left -= 1
        if self.left == 0:
            await self._store.commit(write)
        raise StoreUnavailable("The disk is full. Nothing was written; free some space and it goes on.")


START = SessionStarted(session="s", agent="a", kind="task", started_by="ada")


async def test_a_write_waits_until_the_store_is_back_and_happens_once(world: World) -> None:
    patient = PatientStore(Away(world.store, uses=6), world.clock)
    before = world.now
    committed = await patient.commit(life.start(START))
    assert committed.repeated
    assert [event.seq for event in await world.store.read(session_stream("s"))] == [1]
    assert world.now - before > 2 * SECOND
    assert patient.problem == ""


async def test_whoever_looks_is_told_why_it_waits(world: World) -> None:
    patient = PatientStore(Away(world.store, uses=100), world.clock)
    waiting = asyncio.create_task(patient.commit(life.start(START)))
    await world.advance(SECOND)
    assert "disk is full" in patient.problem
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await world.store.read(session_stream("s")) == []


async def test_whoever_is_to_tell_people_hears_of_it_once_and_then_that_it_is_over(world: World) -> None:
    told: list[str] = []
    patient = PatientStore(Away(world.store, uses=6), world.clock, Trouble(told.append))
    await patient.commit(life.start(START))
    assert [sentence.partition(".")[0] for sentence in told] == ["The disk is full", ""]


async def test_it_is_not_over_while_anybody_still_waits(world: World) -> None:
    told: list[str] = []
    trouble = Trouble(told.append)
    full, fine = PatientStore(Away(world.store, uses=100), world.clock, trouble), PatientStore(world.store, world.clock)
    waiting = asyncio.create_task(full.commit(life.start(START)))
    await world.advance(SECOND)
    await PatientStore(world.store, world.clock, trouble).read(session_stream("s"))
    await fine.read(session_stream("s"))
    assert len(told) == 1
    assert "disk is full" in trouble.problem
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(told) == 1
    await PatientStore(world.store, world.clock, trouble).read(session_stream("s"))
    assert told[1:] == [""]
