"""A whole runtime in virtual time: a day of an agent's life passes in moments, and replays from one number."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from os import PathLike
from typing import Any, Final, Self, TypeVar

from halter.core.events import SessionStarted
from halter.core.ids import SessionId, StreamId, WorkerId, session_stream
from halter.core.ports import Stored
from halter.core.text import to_body
from halter.core.vocabulary import SessionKind
from halter.guard.purse import Purse
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.state.life import message, start
from halter.state.session import Session, replay
from halter.testing.crash import CRASH_KINDS, Crash, Crashed, CrashingStore
from halter.testing.fakes import SeededIds, seeded_salts
from halter.testing.seedloop import START, SeedLoop
from halter.testing.worker import Turn, Worker

T = TypeVar("T")

PAGE: Final = 1000


class World:
    """One process, its disk and its time. The seed decides every interleaving, id, salt and draw of chance.

    `journal` is the disk: it outlives crashes and is there to be looked at. `store` and `purse` are what the
    process works with; after a crash they raise `Crashed`, and `restart` puts new ones in their place.
    In an `orderly` one, what is ready together runs in the order in which it became so: long lives pass faster.
    In one without `threads`, what blocks is done at once, so that what real threads would decide replays as well.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str | PathLike[str] | None = None,
        start: int = START,
        crash: Crash | None = None,
        orderly: bool = False,
        threads: bool = True,
    ) -> None:
        self.seed = seed
        self.clock = SeedLoop(None if orderly else seed, start, threads=threads)
        self.random = random.Random(f"chance {seed}")
        self.ids = SeededIds(f"ids {seed}", self.clock.now)
        self.journal = JournalStore(self._engine(path), inline=True, salt=seeded_salts(f"salts {seed}"))
        self._runner = asyncio.Runner(loop_factory=lambda: self.clock)
        self._tasks = asyncio.TaskGroup()
        self._watching: asyncio.Task[Any] | None = None
        self._lives: list[CrashingStore] = []
        self._workers = 0
        self._begin(crash)

    def _engine(self, path: str | PathLike[str] | None) -> Engine:
        if path is None:
            return MemoryEngine(now=self.clock.now, new_id=self.ids.new)
        return SqliteEngine(str(path), now=self.clock.now, new_id=self.ids.new)

    def _begin(self, crash: Crash | None = None) -> None:
        self.store = CrashingStore(self.journal, crash, self._cancel_all)
        self.purse = Purse(self.store, self.clock)
        self._lives.append(self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<World of seed {self.seed}>"

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this world, from code that is not async. What it started in the world ends with it."""
        return self._runner.run(self._watched(main))

    def close(self) -> None:
        """End whatever still runs, and let go of the journal."""
        with self._runner:
            self._runner.run(self._end())

    @property
    def now(self) -> int:
        """The virtual time in microseconds since 1970."""
        return self.clock.now()

    async def advance(self, duration: int) -> None:
        """Let so many microseconds pass, and all that happens in them, the last one included."""
        await self.clock.sleep(duration)
        await self.clock.wait_until_quiet()

    def spawn(self, program: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let the process run something beside what runs. A crash ends it; its failure fails the whole run."""
        task = self._tasks.create_task(_mortal(program))
        # A task that is cancelled before its first step never reaches its program, which would complain of it.
        task.add_done_callback(lambda _: program.close())
        return task

    def work(self, turn: Turn) -> asyncio.Task[None]:
        """Start a worker that gives each session that is due a turn."""
        self._workers += 1
        worker = WorkerId(f"worker-{self._workers}")
        return self.spawn(Worker(self.store, self.clock, worker, turn).run())

    def crash(self) -> None:
        """Kill the process here and now: its tasks end, and it can write nothing more."""
        self.store.die()

    async def restart(self) -> None:
        """Wait until nothing of the old process runs any more, then begin a new one on the same journal."""
        self.crash()
        await self._unwound()
        self._begin()

    async def survive(self, program: "Program") -> None:
        """Run a program until it has finished, each time from its beginning when the process has crashed."""
        while True:
            await asyncio.wait([self.spawn(program(self))])
            if not self.store.dead:
                return
            await self.restart()

    @property
    def commits(self) -> int:
        """How many commits were tried since the world began."""
        return sum(life.commits for life in self._lives)

    @property
    def history(self) -> list[Stored]:
        """All events, in the order in which they were written, whether or not anybody heard of it."""
        return [stored for life in self._lives for stored in life.written]

    @property
    def acknowledged(self) -> list[Stored]:
        """The events that some process was told are durable."""
        return [stored for life in self._lives for stored in life.acknowledged]

    async def start(
        self, session: str | None = None, *, agent: str = "agent", task: str = "", kind: SessionKind = "task"
    ) -> SessionId:
        """Begin a session that a person asked for; it is due at once. To begin one a second time changes nothing."""
        name = SessionId(session or self.ids.new())
        event = SessionStarted(session=name, agent=agent, kind=kind, started_by="person")
        await self.store.commit(start(event, to_body(task)))
        return name

    async def say(self, session: str, text: str, sender: str = "person") -> None:
        """Put a message into a session's inbox."""
        await self.store.commit(message(session, self.ids.new(), to_body(text), sender))

    async def session(self, session: str) -> Session:
        """Tell where a session stands, by its events alone."""
        return replay(await self.events(session_stream(session)))

    async def events(self, stream: StreamId) -> list[Stored]:
        """Read a whole stream off the disk."""
        found: list[Stored] = []
        while page := await self.journal.read(stream, len(found), PAGE):
            found += page
        return found

    async def _watched(self, main: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine and for all tasks of the world; of several failures none is hidden."""
        self._watching = asyncio.current_task()
        failures: BaseExceptionGroup[BaseException]
        try:
            async with asyncio.TaskGroup() as self._tasks:
                result = await main
                self._cancel_all()
        except BaseExceptionGroup as group:
            failures = group
        else:
            return result
        # Raised out here a failure keeps its own cause and context.
        raise failures.exceptions[0] if len(failures.exceptions) == 1 else failures

    async def _end(self) -> None:
        self._watching = None
        self._cancel_all()
        await self._unwound()
        await self.journal.close()

    async def _unwound(self) -> None:
        while others := self._others():
            await asyncio.gather(*others, return_exceptions=True)

    def _others(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks(self.clock) - {self._watching, asyncio.current_task(self.clock)}

    def _cancel_all(self) -> None:
        for task in self._others():
            task.cancel()


Program = Callable[[World], Coroutine[Any, Any, None]]
"""What a process does from its beginning to its end; begun again after a crash, it finds what it did before."""


async def _mortal(program: Coroutine[Any, Any, None]) -> None:
    try:
        await program
    except* Crashed:
        pass


def crash_everywhere(
    program: Program, new_world: Callable[[Crash | None], World] | None = None, *, every: int = 1
) -> Iterator[World]:
    """Run a program once without a crash, then once for each of its commits and each kind of crash there.

    Of all these lives only each so many-th is tried, if that is asked for: with 3, every commit has one kind of crash.
    Yields every world with the program finished in it, the uncrashed one first, to be looked at.
    """
    new_world = new_world or (lambda crash: World(crash=crash))
    with new_world(None) as world:
        world.run(world.survive(program))
        commits = world.commits
        yield world
    for commit in range(1, commits + 1):
        for place, kind in enumerate(CRASH_KINDS):
            if (commit + place) % every:
                continue
            with new_world(Crash(commit, kind)) as world:
                world.run(world.survive(program))
                yield world
