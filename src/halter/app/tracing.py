"""Following the journal to make spans of it, beside the agents and never in their way.

It begins with what is committed from now on. What was begun before, by a process that is gone, is looked up where it
stands, so that a span has the same id and the same beginning whoever makes it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final, Protocol

from halter.app.committed import Committed
from halter.app.follow import Follower, growing
from halter.app.opened import App
from halter.app.telemetry import content_wanted, sending, wanted
from halter.app.traces import Span, Trace, follow, trace_of
from halter.brain.together import demand_wanted
from halter.core.clock import Clock
from halter.core.ids import StreamId, session_of, session_stream
from halter.core.ports import Store, Stored
from halter.core.text import clean, shorten

BACK: Final = 1000
"""So many events are looked back through for the beginning of what is under way."""
KEPT: Final = 10_000
"""So many sessions are remembered."""


Tell = Callable[[str], None]
"""Somebody who is told a sentence."""
Job = Callable[[], Coroutine[Any, Any, None]]


@contextmanager
def traced(
    app: App, store: Store, tell: Tell, ours: Callable[[str], bool], seen: Mapping[StreamId, int]
) -> Generator[Sequence[Job]]:
    """Give what is to run beside our agents to make spans of what they do from now on: nothing, unless it is wanted."""
    way = wanted(app.environ)
    if not way:
        yield ()
        return
    with sending(way, app.environ) as sink:
        tracing = Tracing(store, app.clock, sink, tell, ours, content=content_wanted(app.environ))
        yield (lambda: tracing.run(seen),)


@contextmanager
def traced_here(app: App, store: Store, tell: Tell) -> Generator[Sequence[Job]]:
    """Give what is to run beside one of many workers to make spans of what it does itself: nothing, unless wanted.

    Others make those of what they do. A session that moves between them stays one trace, for its ids follow from it.
    """
    way = wanted(app.environ)
    if not way:
        yield ()
        return
    committed = Committed(asyncio.get_running_loop(), _is_session)
    with sending(way, app.environ) as sink:
        tracing = Tracing(store, app.clock, sink, tell, content=content_wanted(app.environ))
        app.store.observe(committed)
        yield (lambda: tracing.run_here(committed),)


class Sink(Protocol):
    """Somebody who takes spans."""

    def put(self, span: Span) -> None:
        """Take a span, or lose it; never wait."""
        ...

    def trouble(self) -> str:
        """Say what went wrong since this was last asked, if anything did."""
        ...


class Tracing:
    """Makes spans of the sessions of some agents."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sink: Sink,
        tell: Tell,
        ours: Callable[[str], bool] = lambda _: True,
        *,
        content: bool = False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sink = sink
        self._tell = tell
        self._ours = ours
        self._content = content
        self._traces: dict[StreamId, tuple[int, Trace | None]] = {}

    async def run(self, seen: Mapping[StreamId, int]) -> None:
        """Follow what comes after what was seen, until cancelled."""
        await self._unharmed(self._follow(seen))

    async def run_here(self, committed: Committed) -> None:
        """Follow what this process commits, until cancelled."""
        await self._unharmed(self._follow_here(committed))

    async def _unharmed(self, following: Awaitable[None]) -> None:
        """Whatever breaks down here stops no agent."""
        try:
            await following
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may suffer from it
            demand_wanted()
            told = shorten(clean(f"{type(error).__name__}: {error}"), 300)
            self._tell(f"There are no more traces until the next start, because of a breakdown; agents go on ({told}).")

    async def _follow(self, seen: Mapping[StreamId, int]) -> None:
        follower = Follower(self._store, seen, wanted=_is_session)
        async with aclosing(growing(self._store, self._clock)) as changes:
            async for change in changes:
                async with aclosing(follower.new(change)) as pages:
                    async for page in pages:
                        for stored in page:
                            await self._see(stored)
                self._tell_trouble()

    async def _follow_here(self, committed: Committed) -> None:
        async with aclosing(committed.each()) as events:
            async for stored in events:
                await self._see(stored)
                self._tell_trouble()

    def _tell_trouble(self) -> None:
        if trouble := self._sink.trouble():
            self._tell(trouble)

    async def _see(self, stored: Stored) -> None:
        trace = await self._known(stored)
        if trace is None:
            return
        after, span = follow(trace, stored, content=self._content)
        self._traces[stored.stream] = stored.seq, after
        if span is not None:
            self._sink.put(span)

    async def _known(self, stored: Stored) -> Trace | None:
        """Find where a session stands before an event. What another process did in between is looked up."""
        seq, trace = self._traces.get(stored.stream, (0, None))
        if trace is None and seq:
            # It is not ours, whatever happens there.
            return None
        if seq == 0 or seq != stored.seq - 1:
            if len(self._traces) >= KEPT:
                self._traces.clear()
            trace = await self._looked_up(stored)
            self._traces[stored.stream] = stored.seq, trace
        return trace

    async def _looked_up(self, stored: Stored) -> Trace | None:
        first = stored if stored.seq == 1 else next(iter(await self._store.read(stored.stream, 0, 1)), None)
        trace = None if first is None else trace_of(first)
        if trace is None or not self._ours(trace.agent):
            return None
        after = max(1, stored.seq - 1 - BACK)
        for earlier in await self._store.read(stored.stream, after, max(0, stored.seq - 1 - after)):
            trace, _ = follow(trace, earlier, content=self._content)
        return trace


def _is_session(stream: StreamId) -> bool:
    session = session_of(stream)
    return session is not None and stream == session_stream(session)
