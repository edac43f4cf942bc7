"""An event loop in virtual time, where a number decides which ready task runs next.

A test that fails under number 17 fails under number 17 for ever: it replays the same interleaving.
Time costs nothing: when nothing is ready, it jumps to the next timer, so a week passes in seconds.

Two things stay real and therefore cannot be replayed: work that is outside (threads, sockets, processes), and
the order of a set of strings, which Python shuffles anew in each process unless PYTHONHASHSEED is set.
"""

import asyncio
import itertools
import math
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from halter.core.clock import SECOND
from halter.core.errors import HalterError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START = 1_767_225_600 * SECOND
"""The first microsecond of 2026: where virtual time begins unless told otherwise."""

_REAL_WAIT = 0.05
"""Seconds of real waiting in one go while something is outside; what comes back cuts it short."""


class Deadlock(HalterError):
    """Every task waits, and neither a callback, a timer nor anything outside can wake one of them."""


class SeedLoop(asyncio.SelectorEventLoop):
    """A loop that is also a clock; with `seed=None` it keeps asyncio's own order, still in virtual time.

    asyncio promises an order for `call_soon`, and its transports rely on it. It promises none for tasks that
    are ready together, nor for timers of the same moment. So those, and only those, are drawn by the seed.
    One without `threads` does at once what would be done in one: then nothing depends on which of two is faster.
    """

    def __init__(self, seed: int | None, start: int = START, *, threads: bool = True) -> None:
        self._start = start
        self._threads = threads
        self._virtual = _VirtualSelector()
        self._pool = None if seed is None else _Pool(random.Random(seed))
        self._numbers = itertools.count(1)
        super().__init__(self._virtual)
        # asyncio runs a timer that is due within this many seconds. Its own value is too small to change the
        # float of half a year, and then no timer would ever be due. Timers here stand on whole microseconds.
        self._clock_resolution = 0.5 / SECOND

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._virtual.elapsed / SECOND

    def now(self) -> int:
        """Return the virtual time in microseconds since 1970."""
        return self._start + self._virtual.elapsed

    async def sleep(self, duration: int) -> None:
        """Let that many virtual microseconds pass."""
        await asyncio.sleep(duration / SECOND)

    async def wait_until_quiet(self) -> None:
        """Wait until all that can happen at this moment has happened, and time would have to pass for more."""
        quiet: asyncio.Future[None] = self.create_future()
        self._virtual.at_rest.append(quiet)
        await quiet

    @contextmanager
    def outside(self) -> Generator[None]:
        """Hold virtual time while something real is waited for. To be used in the loop's own thread."""
        self._virtual.outside += 1
        try:
            yield
        finally:
            self._virtual.outside -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if not self._threads:
            return self._done_at_once(func, *args)
        future = super().run_in_executor(executor, func, *args)
        self._virtual.outside += 1
        future.add_done_callback(self._came_back)
        return future

    def _done_at_once(self, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  whatever it is, it is for whoever waits, as from a thread
            future.set_exception(error)
        return future

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._virtual.outside -= 1

    async def shutdown_default_executor(self, *_limit: float | None) -> None:
        # The threads end in real time, so that virtual seconds cannot limit them.
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
        self._enter(self._pool, entry, ordered=not steps_a_task)
        return entry

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if when == math.inf:
            # Never scheduled: otherwise time would run on for ever where a deadlock should be seen.
            return asyncio.TimerHandle(when, callback, args, self, context)
        when = self._whole(when)
        if self._pool is None:
            return super().call_at(when, callback, *args, context=context)
        entry = _Entry(callback, args, self, context)
        entry.timer = super().call_at(when, self._enter, self._pool, entry)
        return entry.timer

    def _whole(self, when: float) -> float:
        """Put a time on a whole microsecond, and one that is still to come after now.

        Otherwise `while loop.time() < deadline: await sleep(deadline - loop.time())` would never end.
        """
        moment = round(when * SECOND)
        if when > self.time():
            moment = max(moment, self._virtual.elapsed + 1)
        return moment / SECOND

    def _enter(self, pool: "_Pool", entry: "_Entry", *, ordered: bool = False) -> None:
        """Put an entry into the pool, and into asyncio's queue a draw, which may get this or another one."""
        super().call_soon(pool.draw)
        pool.add(entry, ordered=ordered)


def run(main: Coroutine[Any, Any, T], *, seed: int | None = 0, start: int = START) -> T:
    """Run a coroutine to its end in a loop of its own, then cancel and close all that it left behind."""
    with asyncio.Runner(loop_factory=lambda: SeedLoop(seed, start)) as runner:
        return runner.run(main)


class _VirtualSelector(selectors.DefaultSelector):
    """Where asyncio would wait for time to pass, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.elapsed = 0
        self.outside = 0
        self.at_rest: list[asyncio.Future[None]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        busy = timeout is not None and timeout <= 0
        # Asking the system is the dearest part of a step, and with nothing outside it has nothing to tell.
        events = super().select(0) if self.outside or not busy else []
        if events or busy:
            return events
        if self.outside:
            return super().select(_REAL_WAIT)
        if self.at_rest:
            self._tell_quiet()
        elif timeout is None:
            raise Deadlock(_deadlock())
        else:
            self.elapsed += round(timeout * SECOND)
        return events

    def _tell_quiet(self) -> None:
        waiting, self.at_rest = self.at_rest, []
        for quiet in waiting:
            if not quiet.done():
                quiet.set_result(None)


def _deadlock() -> str:
    names = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks())) or "no task at all"
    return (
        "Every task waits and nothing can wake them: no callback is ready, no timer is set, nothing is "
        f"outside. Waiting: {names}. What waits for a socket, a thread or a process must do so within "
        "`loop.outside()`."
    )


class _Entry(asyncio.Handle):
    """A callback that is ready, or will be once its timer is due."""

    timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        # A timer refers to its entry; letting go of it here frees both without the garbage collector.
        timer, self.timer = self.timer, None
        if not self.cancelled() and not (timer and timer.cancelled()):
            # Private, but the only way to run a handle with its context and the loop's exception handler.
            self._run()


class _Pool:
    """The ready callbacks. An ordered one runs after the ordered ones before it and before all later ones.

    Delaying a task past an ordered callback only looks as if the task were slow; overtaking one would show
    a task a half-made transport.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._free: list[_Entry] = []
        self._behind: deque[tuple[_Entry, bool]] = deque()  # Begins with an ordered entry, or is empty.

    def add(self, entry: _Entry, *, ordered: bool) -> None:
        if ordered or self._behind:
            self._behind.append((entry, ordered))
        else:
            self._free.append(entry)

    def draw(self) -> None:
        """Run one entry; asyncio calls this once for each entry that was added."""
        index = int(self._chance.random() * (len(self._free) + bool(self._behind)))
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
    """A task with a number for its hash, so that a set of tasks has the same order in every replay.

    asyncio cancels the children of a TaskGroup in the order of a set; by address, that order would be chance.
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
