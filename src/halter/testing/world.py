"""A whole runtime in virtual time: a day of an agent passes in moments, and replays from one seed.

```python
async def test_a_night(world, tmp_path):
    fleet = Fleet(world, tmp_path)
    fleet.start("night-watch")
    await world.advance(8 * HOUR)
    assert (await fleet.receipt("night-watch-1")).cost_usd <= Decimal("0.05")
```

The seed decides which ready task runs next, so a test that fails under seed 17 always fails under seed 17. When nothing
is ready, time jumps to the next timer.

Two things stay real and do not replay: threads, sockets and processes, and the order of a set of strings, unless
PYTHONHASHSEED is set.
"""

import asyncio
import itertools
import math
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, TypeVar, TypeVarTuple, cast

from halter.config.trust import digest_folder
from halter.core.clock import MINUTE, SECOND
from halter.core.errors import HalterError
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, StreamId, WorkerId, session_stream
from halter.core.ports import Stored
from halter.core.renamed import RenamedAttribute
from halter.core.text import encode_body
from halter.core.vocabulary import SessionKind, Verdict
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.guard.ledger import Ledger
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import LEASE_DURATION, SqliteEngine
from halter.journal.store import JournalStore
from halter.runtime.assembly.folder_code import open_trust
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.runtime.worker import DispatchMode, make_embedded_mode
from halter.settings import read_settings
from halter.state.lifecycle import post_message, start_session
from halter.state.receipt import Receipt, make_receipt
from halter.state.session import Session, replay
from halter.testing.fakes import (
    CRASH_KINDS,
    Crash,
    Crashed,
    CrashingStore,
    SeededIds,
    TakeTurn,
    Worker,
    make_seeded_salts,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

VIRTUAL_START = 1_767_225_600 * SECOND
"""The first microsecond of 2026: the default start of virtual time."""

_MAX_REAL_WAIT = 0.05
"""Longest real wait, in seconds, for threads, sockets and processes."""


class Deadlock(HalterError):
    """Every task waits, and no callback, timer or outside work can wake one."""


class SeedLoop(asyncio.SelectorEventLoop):
    """An event loop that is also a clock; with `seed=None` it keeps asyncio's own order, still in virtual time.

    asyncio promises an order for `call_soon`, and its transports rely on it. It promises none for tasks that are ready
    together, nor for timers of the same moment: the seed draws those. Without `threads`, work for a thread runs inline,
    so that it replays.
    """

    def __init__(self, seed: int | None, start: int = VIRTUAL_START, *, threads: bool = True) -> None:
        self._start = start
        self._threads = threads
        self._virtual = _VirtualSelector()
        self._pool = None if seed is None else _Pool(random.Random(seed))
        self._numbers = itertools.count(1)
        super().__init__(self._virtual)
        # asyncio runs timers that are due within this many seconds. Its own value is too small to change the float
        # of half a year, and then no timer would ever be due. Timers here are whole microseconds.
        self._clock_resolution = 0.5 / SECOND

    def time(self) -> float:
        """The virtual seconds since the loop was made."""
        return self._virtual.elapsed / SECOND

    def now(self) -> int:
        """The virtual time in microseconds since 1970."""
        return self._start + self._virtual.elapsed

    def monotonic(self) -> int:
        return self._virtual.elapsed

    def set_ahead(self, duration: int) -> None:
        """Set the wall clock ahead by a duration, or back by a negative one. No time passes."""
        self._start += duration

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND)

    async def wait_until_quiet(self) -> None:
        """Wait until everything that is ready now has run."""
        quiet: asyncio.Future[None] = self.create_future()
        self._virtual.at_rest.append(quiet)
        await quiet

    @contextmanager
    def outside(self) -> Generator[None]:
        """Stop virtual time while waiting for something real. Use it in the loop's own thread."""
        self._virtual.outside += 1
        try:
            yield
        finally:
            self._virtual.outside -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if not self._threads:
            return self._run_inline(func, *args)
        future = super().run_in_executor(executor, func, *args)
        self._virtual.outside += 1
        future.add_done_callback(self._came_back)
        return future

    def _run_inline(self, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  passed to the caller, as from a thread
            future.set_exception(error)
        return future

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._virtual.outside -= 1

    async def shutdown_default_executor(self, *_limit: float | None) -> None:
        # Threads end in real time, which virtual seconds cannot limit.
        with self.outside():
            await super().shutdown_default_executor()

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        number = next(self._numbers)
        name = f"Task-{number}" if name is None else str(name)
        return _Task(number, coro, loop=self, name=name, context=context)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._pool is None:
            return super().call_soon(callback, *args, context=context)
        steps_a_task = isinstance(getattr(callback, "__self__", None), asyncio.Task)
        entry = _Entry(callback, args, self, context)
        self._enter(self._pool, entry, is_ordered=not steps_a_task)
        return entry

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if when == math.inf:
            # Never scheduled: otherwise time would pass forever instead of a Deadlock.
            return asyncio.TimerHandle(when, callback, args, self, context)
        when = self._round_time(when)
        if self._pool is None:
            return super().call_at(when, callback, *args, context=context)
        entry = _Entry(callback, args, self, context)
        entry.timer = super().call_at(when, self._enter, self._pool, entry)
        return entry.timer

    def _round_time(self, when: float) -> float:
        """Round to whole microseconds, and a time in the future to one after now.

        Otherwise `while loop.time() < deadline: await sleep(deadline - loop.time())` would never end.
        """
        moment = round(when * SECOND)
        if when > self.time():
            moment = max(moment, self._virtual.elapsed + 1)
        return moment / SECOND

    def _enter(self, pool: "_Pool", entry: "_Entry", *, is_ordered: bool = False) -> None:
        """Add an entry to the pool, and a draw to asyncio's queue, which may run this or another entry."""
        super().call_soon(pool.draw)
        pool.add(entry, is_ordered=is_ordered)


def run_in_virtual_time(main: Coroutine[Any, Any, T], *, seed: int | None = 0, start: int = VIRTUAL_START) -> T:
    """Run a coroutine in a new loop, then cancel and close everything it left behind."""
    with asyncio.Runner(loop_factory=lambda: SeedLoop(seed, start)) as runner:
        return runner.run(main)


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that advances virtual time where asyncio would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.elapsed = 0
        self.outside = 0
        self.at_rest: list[asyncio.Future[None]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        busy = timeout is not None and timeout <= 0
        # The system call is the slowest part of a step, and with nothing outside it returns nothing.
        events = super().select(0) if self.outside or not busy else []
        if events or busy:
            return events
        if self.outside:
            return super().select(_MAX_REAL_WAIT)
        if self.at_rest:
            self._notify_quiet()
        elif timeout is None:
            raise Deadlock(_describe_deadlock())
        else:
            self.elapsed += round(timeout * SECOND)
        return events

    def _notify_quiet(self) -> None:
        waiting, self.at_rest = self.at_rest, []
        for quiet in waiting:
            if not quiet.done():
                quiet.set_result(None)


def _describe_deadlock() -> str:
    names = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks())) or "no task at all"
    return (
        "Every task waits, and no callback, timer or outside work can wake one. "
        f"Waiting: {names}. Wait for sockets, threads and processes within `loop.outside()`."
    )


class _Entry(asyncio.Handle):
    """A callback that is ready, or will be once its timer is due."""

    timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        # A timer refers to its entry; dropping it here frees both without the garbage collector.
        timer, self.timer = self.timer, None
        if not self.cancelled() and not (timer and timer.cancelled()):
            # Private, but the only way to run a handle with its context and exception handler.
            self._run()


class _Pool:
    """The ready callbacks. An ordered one runs after the ordered ones before it and before all later ones.

    A task may be delayed past an ordered callback, as if it were slow; it must not overtake one, or it would see a
    half-made transport.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._free: list[_Entry] = []
        self._behind: deque[tuple[_Entry, bool]] = deque()  # Begins with an ordered entry, or is empty.

    def add(self, entry: _Entry, *, is_ordered: bool) -> None:
        if is_ordered or self._behind:
            self._behind.append((entry, is_ordered))
        else:
            self._free.append(entry)

    def draw(self) -> None:
        """Run one entry; asyncio calls this once for each entry that was added."""
        index = int(self._rng.random() * (len(self._free) + bool(self._behind)))
        if index == len(self._free):
            entry = self._next_ordered()
        else:
            self._free[index], self._free[-1] = self._free[-1], self._free[index]
            entry = self._free.pop()
        entry.run()

    def _next_ordered(self) -> _Entry:
        entry, _ = self._behind.popleft()
        while self._behind and not self._behind[0][1]:
            self._free.append(self._behind.popleft()[0])
        return entry


class _Task(asyncio.Task[T]):
    """A task with a number as its hash, so that a set of tasks has the same order in every replay.

    asyncio cancels the children of a TaskGroup in the order of a set.
    """

    def __init__(
        self,
        number: int,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        loop: asyncio.AbstractEventLoop,
        name: str,
        context: Context | None,
    ) -> None:
        self._number = number
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


PAGE: Final = 1000


def _ignore_crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what nobody awaits, except that a process crashed as planned."""
    if not isinstance(context.get("exception"), Crashed):
        loop.default_exception_handler(context)


def _ignore_exception(_: asyncio.AbstractEventLoop, __: dict[str, Any]) -> None:
    pass


class World:
    """One process, its disk and its time. The seed decides every interleaving, id, salt and random choice.

    `journal` is the disk, which survives crashes. `store` and `ledger` belong to the process; after a crash they
    raise `Crashed`, and `restart` replaces them. With `orderly`, ready tasks run in asyncio's order, which is faster.
    Without `threads`, blocking work runs inline, so that it replays too. A `lease` of half an hour makes quiet days
    pass ten times as fast; after a crash, what the dead process ran waits until its lease expires.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str | PathLike[str] | None = None,
        start: int = VIRTUAL_START,
        crash: Crash | None = None,
        orderly: bool = False,
        threads: bool = True,
        lease: int = LEASE_DURATION,
    ) -> None:
        self.seed = seed
        self.lease = lease
        self.clock = SeedLoop(None if orderly else seed, start, threads=threads)
        self.random = random.Random(f"chance {seed}")
        self.ids = SeededIds(f"ids {seed}", self.clock.now)
        self.journal = JournalStore(self._engine(path), inline=True, salt=make_seeded_salts(f"salts {seed}"))
        self.clock.set_exception_handler(_ignore_crash)
        self._runner = asyncio.Runner(loop_factory=lambda: self.clock)
        self._tasks = asyncio.TaskGroup()
        self._watch_task: asyncio.Task[Any] | None = None
        self._lives: list[CrashingStore] = []
        self._workers = 0
        self._begin(crash)

    def _engine(self, path: str | PathLike[str] | None) -> Engine:
        if path is None:
            return MemoryEngine(now=self.clock.now, new_id=self.ids.make, lease=self.lease)
        return SqliteEngine(str(path), now=self.clock.now, new_id=self.ids.make, lease=self.lease)

    def _begin(self, crash: Crash | None = None) -> None:
        self.store = CrashingStore(self.journal, crash, self._cancel_all)
        self.ledger = Ledger(self.store, self.clock)
        self._lives.append(self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<World of seed {self.seed}>"

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this world, from sync code. Everything it spawned ends with it."""
        try:
            return self._runner.run(self._run_watched(main))
        except KeyboardInterrupt:
            # It ends a task from within; asyncio would log that its exception was never retrieved.
            self.clock.set_exception_handler(_ignore_exception)
            raise

    def close(self) -> None:
        """Cancel everything that still runs, and close the journal."""
        with self._runner:
            self._runner.run(self._end())

    @property
    def now(self) -> int:
        """The virtual time in microseconds since 1970."""
        return self.clock.now()

    async def advance(self, duration: int) -> None:
        """Let microseconds pass, with everything that happens in them, including the last moment."""
        await self.clock.sleep(duration)
        await self.clock.wait_until_quiet()

    def spawn(self, program: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a program in the process. A crash ends it; its failure fails the whole run."""
        task = self._tasks.create_task(_run_mortal(program))
        # A task cancelled before its first step never awaits its program, which would warn.
        task.add_done_callback(lambda _: program.close())
        return task

    def work(self, turn: TakeTurn) -> asyncio.Task[None]:
        """Start a worker that runs a turn of each due session."""
        self._workers += 1
        worker = WorkerId(f"worker-{self._workers}")
        return self.spawn(Worker(self.store, self.clock, worker, turn).run())

    def crash(self) -> None:
        """Kill the process now: its tasks end, and it can write nothing more."""
        self.store.die()

    async def restart(self) -> None:
        """Wait until the old process has ended, then start a new one on the same journal."""
        self.crash()
        await self._unwound()
        self._begin()

    async def survive(self, program: "WorldProgram") -> None:
        """Run a program until it finishes, from its beginning again after each crash."""
        while True:
            await asyncio.wait([self.spawn(program(self))])
            if not self.store.dead:
                return
            await self.restart()

    @property
    def commits(self) -> int:
        """The number of commits tried so far."""
        return sum(store.commits for store in self._lives)

    @property
    def history(self) -> list[Stored]:
        """All events in the order of writing, acknowledged or not."""
        return [stored for store in self._lives for stored in store.written]

    @property
    def acknowledged(self) -> list[Stored]:
        """The events that were acknowledged to a process."""
        return [stored for store in self._lives for stored in store.acknowledged]

    async def start(
        self, session: str | None = None, *, agent: str = "agent", task: str = "", kind: SessionKind = "task"
    ) -> SessionId:
        """Start a session for a person; it is due immediately. Idempotent."""
        name = SessionId(session or self.ids.make())
        event = SessionStarted(session=name, agent=agent, kind=kind, started_by="person")
        await self.store.commit(start_session(event, encode_body(task)))
        return name

    async def send_message(self, session: str, text: str, sender: str = "person") -> None:
        """Post a message into a session's inbox."""
        await self.store.commit(post_message(session, self.ids.make(), encode_body(text), sender))

    say = RenamedAttribute("send_message")

    async def session(self, session: str) -> Session:
        """Fold a session's state from its events."""
        return replay(await self.events(session_stream(session)))

    async def events(self, stream: StreamId) -> list[Stored]:
        events: list[Stored] = []
        while page := await self.journal.read(stream, len(events), PAGE):
            events += page
        return events

    async def _run_watched(self, main: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine and for all tasks of the world; raise all failures."""
        self._watch_task = asyncio.current_task()
        failures: BaseExceptionGroup[BaseException]
        try:
            async with asyncio.TaskGroup() as self._tasks:
                result = await main
                self._cancel_all()
        except BaseExceptionGroup as group:
            failures = group
        else:
            return result
        # Raised here, a failure keeps its own cause and context.
        raise failures.exceptions[0] if len(failures.exceptions) == 1 else failures

    async def _end(self) -> None:
        self._watch_task = None
        self._cancel_all()
        await self._unwound()
        await self.journal.close()

    async def _unwound(self) -> None:
        while others := self._others():
            await asyncio.gather(*others, return_exceptions=True)

    def _others(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks(self.clock) - {self._watch_task, asyncio.current_task(self.clock)}

    def _cancel_all(self) -> None:
        for task in self._others():
            task.cancel()


WorldProgram = Callable[[World], Coroutine[Any, Any, None]]
"""The program of a process. After a crash it starts again, and finds its earlier work in the store."""


async def _run_mortal(program: Coroutine[Any, Any, None]) -> None:
    try:
        await program
    except* Crashed:
        pass


def crash_everywhere(
    program: WorldProgram, new_world: Callable[[Crash | None], World] | None = None, *, every: int = 1
) -> Iterator[World]:
    """Run a program once without a crash, then once for each commit and each kind of crash there.

    With `every=3`, each commit has one kind of crash. Yields each world after the program has finished, the uncrashed
    one first.
    """
    new_world = new_world or (lambda crash: World(crash=crash))
    with new_world(None) as world:
        world.run(world.survive(program))
        commits = world.commits
        yield world
    for commit in range(1, commits + 1):
        for index, kind in enumerate(CRASH_KINDS):
            if (commit + index) % every:
                continue
            with new_world(Crash(commit, kind)) as world:
                world.run(world.survive(program))
                yield world


PERSON = "ada"
"""The person who trusts the folders of a test and decides."""
HEARTBEAT: Final = LEASE_DURATION - SECOND
"""Just before a lease expires."""


def quiet_mode(lease: int = LEASE_DURATION) -> DispatchMode:
    """Make a dispatch mode with few idle ticks, because each tick costs time in a quiet hour."""
    heartbeat, polling_interval = lease - SECOND, max(lease - SECOND, MINUTE)
    quiet = replace(
        make_embedded_mode(), heartbeat=heartbeat, polling_interval=polling_interval, upkeep_interval=polling_interval
    )
    return quiet if lease < 2 * MINUTE else replace(quiet, folder_polling_interval=MINUTE)


class Fleet:
    """One process that runs agents of folders like `halter up`, and a person who decides. `reports` is its output.

    `home` is a folder of the test, in which the fleet's file is searched. Sensors that poll tools run in virtual time;
    those that watch folders or listen to the network wait in real time.
    """

    def __init__(self, world: World, home: str | PathLike[str]) -> None:
        self.world = world
        self.reports: list[tuple[str, str]] = []
        path = Path(home)
        fleet = {"HALTER_FLEET": str(path / "halter.yaml")} if (path / "halter.yaml").exists() else {}
        self._environ = {"HALTER_TRUST": str(path / "trust.json"), "HALTER_PERSON": PERSON, **fleet}
        self._settings = read_settings(self._environ, path, "memory:")

    def start(self, *folders: str | PathLike[str]) -> asyncio.Task[None]:
        """Start the process, and trust the code in these folders."""
        paths = [Path(folder) for folder in folders]
        for path in paths:
            open_trust(self._settings).trust(path, digest_folder(path), PERSON, self.world.now)
        mode, rng = quiet_mode(self.world.lease), random.Random(self.world.seed)
        up = Supervisor(self._app(), self._on_report, _ignore, rng, mode=mode)
        return self.world.spawn(up.run(paths))

    async def receipt(self, session: str) -> Receipt:
        """Make the receipt of a session so far; an agent's sessions are NAME-1, NAME-2 and so on."""
        return make_receipt(await self.world.events(session_stream(session)))

    async def waiting(self) -> Sequence[PendingDecision]:
        """List the pending decisions."""
        return await list_pending_decisions(self.world.journal)

    async def answer(self, asked: PendingDecision, verdict: Verdict) -> None:
        """Approve or deny, as a person."""
        await self.world.store.commit(answer_decision(asked, verdict, PERSON, self.world.ids.make()))

    def _on_report(self, agent: str, sentence: str) -> None:
        self.reports.append((agent, sentence))

    def _app(self) -> Runtime:
        """Make the runtime that `halter up` opens, with the store, the clock and the ids of the world."""
        world = self.world
        store, no_log = cast("Any", world.store), cast("Any", None)
        policy = use_local_policy(self._settings)
        settings, ledger = self._settings, world.ledger
        return Runtime(settings, world.clock, world.ids, store, no_log, ledger, self._environ, policy=policy)


def _ignore(*_: object) -> None:
    """No-op listener."""
