"""Two versions on one store: each takes what it understands, and what the newer has taken up stays with it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from halter import Guard
from halter.core.clock import HOUR, MINUTE, SECOND, SystemClock
from halter.core.errors import ConfigError, LeaseLost
from halter.core.events import (
    SESSION_FORMAT,
    AttendingFailed,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    WakePosted,
)
from halter.core.ids import SessionId, SortableIds, WorkerId, session_stream
from halter.core.ports import Committed, Draft, Lease, Query, Rows, Write
from halter.core.rows import SessionRow
from halter.external.guard import SessionInUse
from halter.journal.engine import Engine
from halter.journal.open import open_store
from halter.journal.verify import verify_store
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session, post_message, reopen_agent_session
from halter.state import lifecycle
from halter.testing.fakes import StoreProxy, Worker
from halter.testing.world import World
from tests.story.autonomous import Fleet

NEWER = SESSION_FORMAT + 1
SLEEPS = """
model: reflex
reflex: [{yield: {mode: sleep, sleep: 10m, reason: nothing to do}}]
autonomy: {enabled: true, idle_timeout: 0}
"""
ANSWERS = """
model: reflex
reflex: [{say: Yes.}]
"""


class Newer(StoreProxy):
    """The store as a program of the next format uses it: it takes what has that format, and says so when it does."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world.journal)
        self._engine = engine

    async def claim(
        self, worker: WorkerId, limit: int, only: SessionId | None = None, agents: Sequence[str] | None = None
    ) -> Sequence[Lease]:
        return self._engine.claim(worker, limit, NEWER, only, agents)

    async def commit(self, write: Write) -> Committed:
        def decide(rows: Rows) -> Sequence[Draft]:
            return [msgspec.structs.replace(draft, event=_newer(draft.event)) for draft in write.decide(rows)]

        return await self._store.commit(Write(write.stream, write.key, decide, write.reads, write.lease, write.others))


def _newer(event: object) -> object:
    return (
        msgspec.structs.replace(event, format=NEWER)
        if isinstance(event, SessionStarted | SessionWoken | SessionResumed)
        else event
    )


class Sleeper:
    """A process that gives each session its turn: it notes that it did, and lets it sleep for a minute."""

    def __init__(self, world: World, store: StoreProxy, name: str) -> None:
        self.world, self.store, self.name = world, store, name
        self.attended: list[str] = []

    async def turn(self, lease: Lease) -> None:
        self.attended.append(lease.session)
        (row,) = await self.store.ask(Query("session", SessionRow, {"session": lease.session}))
        key = f"{lease.session}/{lease.generation}"
        if row.state != "RUNNING" or lease.generation > 1:
            await self.store.commit(lifecycle.wake_session(lease, f"{key}/woken", "timer", row.inbox_head))
        wake_at = self.world.now + MINUTE
        event = SessionParked(state="SLEEPING", inbox_seen=row.inbox_head, wake_at=wake_at)
        await self.store.commit(lifecycle.park_session(lease, f"{key}/parked", event))

    async def run(self) -> None:
        await Worker(self.store, self.world.clock, WorkerId(self.name), self.turn).run()


async def formats(world: World) -> dict[str, int]:
    return {row.session: row.format for row in await world.journal.ask(Query("all_sessions", SessionRow))}


def newer(world: World) -> Newer:
    return Newer(world, world.journal._engine)  # noqa: SLF001  a newer program is not to be had yet


async def test_sessions_of_the_same_format_are_handed_from_one_version_to_the_other_and_back(world: World) -> None:
    await world.start("s")
    for name in ("old", "new", "old again"):
        process = Sleeper(world, world.store, name)
        running = world.spawn(process.run())
        await world.advance(3 * MINUTE)
        running.cancel()
        assert process.attended == ["s", "s", "s", "s"][: len(process.attended)]
        assert len(process.attended) >= 3
    assert (await verify_store(world.journal)).findings == ()


async def test_a_session_that_a_newer_version_claimed_is_never_claimed_or_written_to_by_an_older_one(
    world: World,
) -> None:
    for number in range(4):
        await world.start(f"s{number}")
    old = Sleeper(world, world.store, "old")
    running = world.spawn(old.run())
    await world.advance(90 * SECOND)
    running.cancel()
    assert set(old.attended) == {"s0", "s1", "s2", "s3"}
    new = newer(world)
    for name in ("s0", "s1"):
        (lease,) = await new.claim(WorkerId("new"), 1, SessionId(name))
        await Sleeper(world, new, "new").turn(lease)
    before = {name: len(await world.events(session_stream(name))) for name in ("s0", "s1")}
    old = Sleeper(world, world.store, "old again")
    world.spawn(old.run())
    await world.advance(HOUR)
    assert set(old.attended) == {"s2", "s3"}
    assert await formats(world) == {"s0": NEWER, "s1": NEWER, "s2": SESSION_FORMAT, "s3": SESSION_FORMAT}
    assert {name: len(await world.events(session_stream(name))) for name in before} == before
    assert (await verify_store(world.journal)).findings == ()


@pytest.mark.parametrize("seed", range(5))
def test_with_both_at_work_every_session_continues_and_none_goes_back(seed: int) -> None:
    async def story(world: World) -> None:
        for number in range(6):
            await world.start(f"s{number}")
        old, new = Sleeper(world, world.store, "old"), Sleeper(world, newer(world), "new")
        world.spawn(old.run())
        await world.advance(150 * SECOND)
        world.spawn(new.run())
        await world.advance(30 * MINUTE)
        for session, format_ in (await formats(world)).items():
            numbers = [_format(stored.event) for stored in await world.events(session_stream(session))]
            counts = [each for each in numbers if each]
            assert counts == sorted(counts), session
            assert counts[-1] == format_
            assert len(counts) >= 30, session
        assert (await verify_store(world.journal)).findings == ()

    with World(seed) as world:
        world.run(story(world))


def _format(event: object) -> int:
    return event.format if isinstance(event, SessionStarted | SessionWoken) else 0


async def test_a_word_for_a_session_of_a_newer_version_reaches_it_and_its_own_stream_stays_untouched(
    world: World,
) -> None:
    await world.start("s")
    new = newer(world)
    (lease,) = await new.claim(WorkerId("new"), 1)
    await new.commit(lifecycle.wake_session(lease, "woken", "trigger", 0))
    await new.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))
    with pytest.raises(LeaseLost, match=rf"Session s was run by a newer Halter \(it has format {NEWER}.*Nothing"):
        await world.store.commit(lifecycle.reopen_session("s", "again", "ada"))
    assert (await world.session("s")).ended
    await new.commit(lifecycle.start_session(SessionStarted(session="t", agent="a", kind="task", started_by="ada")))
    await world.send_message("t", "hello")
    assert await world.store.claim(WorkerId("old"), 10) == []
    assert [lease.session for lease in await new.claim(WorkerId("new"), 10)] == ["t"]


async def test_an_agent_whose_session_a_newer_version_owns_is_left_to_it_and_that_is_reported_once(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("watch", SLEEPS)
    running = fleet.start(folder)
    await world.advance(MINUTE)
    running.cancel()
    await world.advance(MINUTE)
    new = newer(world)
    (lease,) = await new.claim(WorkerId("new"), 1, SessionId("watch-1"))
    await Sleeper(world, new, "new").turn(lease)
    before = await fleet.events("watch-1")
    fleet.told.clear()
    fleet.start(folder)
    await world.advance(3 * HOUR)
    assert await fleet.events("watch-1") == before
    assert len(await fleet.sessions("watch")) == 1
    texts = [sentence for agent, sentence in fleet.told if agent == "watch" and "newer Halter" in sentence]
    assert len(texts) == 1
    assert "was run by a newer Halter" in texts[0]


class NewerWord(WakePosted, frozen=True, kw_only=True):
    """A word in the way that a newer version may write it."""

    VERSION: ClassVar[int] = 2


def test_a_word_that_only_a_newer_version_can_read_is_not_passed_over_by_an_older_one(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, tmp_path)
        fleet.start(fleet.agent("watch", SLEEPS))
        await world.advance(MINUTE)
        before = await fleet.kinds("watch-1")
        word = NewerWord(cause="message", origin="person", sender="ada", trusted=True)
        await world.store.commit(lifecycle.post_wake("watch-1", "word", word, b"Stop it."))
        await world.advance(HOUR)
        after = [stored.event for stored in await fleet.events("watch-1")][len(before) :]
        assert {type(event) for event in after} == {AttendingFailed, SessionParked}
        attending_failed = [event for event in after if isinstance(event, AttendingFailed)][-1]
        assert attending_failed.quarantined
        assert (
            "is a wake_posted of version 2, which this program does not know. Use the newer Halter"
            in attending_failed.error
        )

    with World(3, path=tmp_path / "store.db") as world:
        world.run(story(world))


async def test_a_chat_with_a_session_of_a_newer_version_is_refused_with_the_program_to_use(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    folder = fleet.agent("desk", ANSWERS)
    async with open_folder_agent(fleet.app, folder, WorkerId("talk")) as agent:
        context = msgspec.structs.replace(agent, rng=random.Random(1))
        chat = await begin_session(context, "Are you there?", "chat")
        await attend_session(context, chat)
        new = newer(world)
        (lease,) = await new.claim(WorkerId("new"), 1, chat)
        await Sleeper(world, new, "new").turn(lease)
        await post_message(context, chat, "And now?")
        before, began = await fleet.events(chat), world.now
        for way in (attend_session, reopen_agent_session):
            with pytest.raises(ConfigError, match=r"was run by a newer Halter .* Use the newer Halter for it\.$"):
                await way(context, chat)
        assert world.now - began < SECOND
        assert await fleet.events(chat) == before


async def test_a_program_that_continues_a_session_of_a_newer_version_gets_an_error_with_the_program_to_use(
    tmp_path: Path,
) -> None:
    guard = Guard(tmp_path / "runs.db", agent="desk", environ={"HOME": str(tmp_path)}, person="ada")
    async with guard:
        clock = SystemClock()
        store = open_store(str(tmp_path / "runs.db"), clock=clock, ids=SortableIds(clock.now))
        event = SessionStarted(session="s", agent="desk", kind="task", started_by="ada", format=NEWER)
        await store.commit(lifecycle.start_session(event))
        await store.close()
        with pytest.raises(SessionInUse, match=r"Session s was run by a newer Halter"):
            async with guard.session(id="s"):
                pass
