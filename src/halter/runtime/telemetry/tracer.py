"""Makes the spans of sessions from committed events, outside of the agents."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, Protocol

import msgspec

from halter.core.clock import Clock
from halter.core.errors import StoreError
from halter.core.events import RequestSettled, TurnStarted
from halter.core.ids import StreamId, inbox_stream, parse_session_id, session_stream
from halter.core.ports import Store, Stored
from halter.core.text import clean, shorten
from halter.guard.model_door import PromptLog
from halter.loop.concurrency import cancel_and_wait, raise_if_cancelled
from halter.runtime.feed import CommitObserver, Follower, read_stream_heads, watch_growth
from halter.runtime.runtime import Runtime
from halter.runtime.telemetry.exporters import METRICS_VARIABLE, TRACES_VARIABLE, is_content_traced, read_target
from halter.runtime.telemetry.metrics import COUNT_RETRY_DELAY, MetricTable, open_metric_sender
from halter.runtime.telemetry.spans import open_span_sender
from halter.state.trace import Span, Trace, advance_trace, begin_trace, find_waker, join_parent
from halter.state.trace_context import SpanReference

MAX_EVENTS_TRACED_BACK: Final = 1000
"""Maximum number of events that are searched for the start of an open span."""


MAX_TRACED_SESSIONS: Final = 10_000
"""Maximum number of sessions in memory."""


MAX_LINKS: Final = 128
"""Maximum number of messages to which a turn is linked."""


TraceProblemListener = Callable[[str], None]
"""Called with a sentence about a problem."""


Job = Callable[[], Coroutine[Any, Any, None]]


@contextmanager
def trace_agents(
    app: Runtime,
    store: Store,
    on_problem: TraceProblemListener,
    ours: Callable[[str], bool],
    positions: Mapping[StreamId, int],
) -> Generator[Sequence[Job]]:
    """Yield the jobs that trace our agents from these positions on; none unless spans or metrics are enabled."""
    with _open_sinks(app, store) as sinks:
        if not sinks.sinks:
            yield ()
            return
        with _open_tracer(app, store, sinks, on_problem, lambda trace: ours(trace.agent)) as tracer:
            yield (lambda: tracer.run(positions), *sinks.jobs)


@contextmanager
def trace_worker(app: Runtime, store: Store, on_problem: TraceProblemListener) -> Generator[Sequence[Job]]:
    """Yield the jobs that trace the commits of this worker; none unless spans or metrics are enabled.

    Other workers trace their own. A session that moves between workers stays one trace.
    """
    with _open_sinks(app, store) as sinks:
        if not sinks.sinks:
            yield ()
            return
        observer = CommitObserver(asyncio.get_running_loop(), _is_session)
        with _open_tracer(app, store, sinks, on_problem) as tracer:
            app.store.observe(observer)
            yield (lambda: tracer.run_here(observer), *sinks.jobs)


LAST_SPANS_SECONDS: Final = 5.0
"""Time limit for making the last spans when a process ends."""


@asynccontextmanager
async def trace_process(
    app: Runtime, on_problem: TraceProblemListener, kinds: Collection[str] | None = None
) -> AsyncGenerator[None]:
    """Trace all commits of this process, or those of some kinds of sessions, including the last ones before the end.

    Does nothing unless spans or metrics are enabled.
    """
    with _open_sinks(app, app.patient()) as sinks:
        if not sinks.sinks:
            yield
            return
        observer = CommitObserver(asyncio.get_running_loop(), _is_session)
        with _open_tracer(
            app, app.patient(), sinks, on_problem, lambda trace: kinds is None or trace.kind in kinds
        ) as tracer:
            app.store.observe(observer)
            side_jobs = [asyncio.create_task(_start(job), name="metrics") for job in sinks.jobs]
            task = asyncio.create_task(tracer.run_here(observer), name="traces")
            try:
                yield
            finally:
                observer.close()
                last_jobs = [task, *(asyncio.create_task(_start(job)) for job in sinks.last_jobs)]
                await asyncio.wait(last_jobs, timeout=LAST_SPANS_SECONDS)
                await cancel_and_wait(*last_jobs, *side_jobs)


async def _start(job: Job) -> None:
    await job()


class _Sinks(msgspec.Struct, frozen=True):
    """Where the spans of this process go, and the jobs that belong to it: while it runs, and at its end."""

    sinks: Sequence["SpanSink"]
    jobs: Sequence[Job] = ()
    last_jobs: Sequence[Job] = ()


@contextmanager
def _open_sinks(app: Runtime, store: Store) -> Generator[_Sinks]:
    """Open what the environment names: a sender of spans, a sender of metrics, both or none."""
    with ExitStack() as stack:
        sinks, jobs, last_jobs = list[SpanSink](), list[Job](), list[Job]()
        if target := read_target(app.environ, TRACES_VARIABLE):
            sinks.append(stack.enter_context(open_span_sender(target, app.environ)))
        if target := read_target(app.environ, METRICS_VARIABLE):
            table = MetricTable(app.clock)
            sinks.append(stack.enter_context(open_metric_sender(target, app.environ, table)))
            jobs.append(lambda: table.watch(store))
            last_jobs.append(lambda: table.read_gauges(store))
        yield _Sinks(sinks, jobs, last_jobs)


@contextmanager
def _open_tracer(
    app: Runtime,
    store: Store,
    sinks: _Sinks,
    on_problem: TraceProblemListener,
    ours: Callable[[Trace], bool] = lambda _: True,
) -> Generator["SessionTracer"]:
    """Make a tracer. While it is open, the prompts of requests are kept for it if it includes content."""
    has_content = bool(read_target(app.environ, TRACES_VARIABLE)) and is_content_traced(app.environ)
    prompts = app.prompts if has_content else None
    if prompts is None:
        yield SessionTracer(store, app.clock, sinks.sinks, on_problem, ours)
        return
    with prompts.record():
        yield SessionTracer(store, app.clock, sinks.sinks, on_problem, ours, prompts=prompts)


async def count_metrics(store: Store, clock: Clock, table: MetricTable, on_problem: TraceProblemListener) -> None:
    """Count what happens in the whole store from now on, until cancelled.

    If it cannot be read, that is reported, and it is read again from the first event that is not counted.
    """
    tracer = SessionTracer(store, clock, [table], on_problem)

    async def count() -> None:
        follower, problem = None, ""
        while True:
            try:
                follower = follower or tracer.make_follower(dict(await read_stream_heads(store)))
                table.has_begun.set()
                await tracer.follow(follower)
            except StoreError as error:
                if problem != (problem := shorten(clean(str(error)), 300)):
                    on_problem(f"Metrics are late, because the store cannot be read. It is read again. ({problem})")
            await clock.sleep(COUNT_RETRY_DELAY)

    await tracer.run_safely(count())


class SpanSink(Protocol):
    def enqueue(self, span: Span) -> None:
        """Queue a span, or drop it if the queue is full; never blocks."""
        ...

    def trouble(self) -> str:
        """Return a sentence about a new problem since the last call; "" if there is none."""
        ...


class SessionTracer:
    """Makes the spans of the sessions of some agents. With `prompts`, they include what was said."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sinks: Sequence[SpanSink],
        on_problem: TraceProblemListener,
        ours: Callable[[Trace], bool] = lambda _: True,
        *,
        prompts: PromptLog | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sinks = sinks
        self._on_problem = on_problem
        self._ours = ours
        self._prompts = prompts
        self._traces: dict[StreamId, tuple[int, Trace | None]] = {}

    async def run(self, positions: Mapping[StreamId, int]) -> None:
        """Trace all events after these positions, until cancelled."""
        await self.run_safely(self.follow(self.make_follower(positions)))

    async def run_here(self, observer: CommitObserver) -> None:
        """Trace the commits of this process, until cancelled."""
        await self.run_safely(self._follow_here(observer))

    async def run_safely(self, job: Awaitable[None]) -> None:
        try:
            await job
        except Exception as error:  # noqa: BLE001  no failure here may stop an agent
            raise_if_cancelled()
            sentence = shorten(clean(f"{type(error).__name__}: {error}"), 300)
            self._on_problem(f"Tracing failed and is off until the next start; agents continue ({sentence}).")

    def make_follower(self, positions: Mapping[StreamId, int]) -> Follower:
        return Follower(self._store, positions, includes_stream=_is_session)

    async def follow(self, follower: Follower) -> None:
        """Trace all events after the follower's positions. If it fails, they are those of the last traced events."""
        async with aclosing(watch_growth(self._store, self._clock)) as changes:
            async for change in changes:
                async with aclosing(follower.follow_change(change)) as pages:
                    async for page in pages:
                        for stored in page:
                            await self._trace_event(stored)
                            follower.positions[stored.stream] = stored.seq
                self._report_trouble()

    async def _follow_here(self, observer: CommitObserver) -> None:
        async with aclosing(observer.batches()) as batches:
            async for events in batches:
                for stored in events:
                    await self._trace_event(stored)
                self._report_trouble()

    def _report_trouble(self) -> None:
        for sink in self._sinks:
            if trouble := sink.trouble():
                self._on_problem(trouble)

    async def _trace_event(self, stored: Stored) -> None:
        trace = await self._find_trace(stored)
        if trace is None:
            return
        next_trace, span = await self._advance(trace, stored)
        self._traces[stored.stream] = stored.seq, next_trace
        if span is not None:
            for sink in self._sinks:
                sink.enqueue(span)

    async def _advance(self, trace: Trace, stored: Stored) -> tuple[Trace, Span | None]:
        wakers, prompt = (), None
        match stored.event:
            case TurnStarted() as event if event.inbox_seen > trace.inbox_seen:
                wakers = await self._find_wakers(trace, event.inbox_seen)
            case RequestSettled() as event if self._prompts is not None:
                prompt = self._prompts.pop(event.request)
            case _:
                pass
        return advance_trace(trace, stored, content=self._prompts is not None, prompt=prompt, wakers=wakers)

    async def _find_wakers(self, trace: Trace, inbox_seen: int) -> tuple[SpanReference, ...]:
        """Find the spans of other callers whose messages a turn answers."""
        count = min(inbox_seen - trace.inbox_seen, MAX_LINKS)
        messages = await self._store.read(inbox_stream(trace.session), inbox_seen - count, count)
        wakers = dict.fromkeys(waker for stored in messages if (waker := find_waker(stored)) is not None)
        return tuple(waker for waker in wakers if waker != trace.above)

    async def _find_trace(self, stored: Stored) -> Trace | None:
        """Return a session's trace before an event; None if it is not ours.

        Events that other processes committed in between are read from the store.
        """
        seq, trace = self._traces.get(stored.stream, (0, None))
        if trace is None and seq:
            # The session of another agent.
            return None
        if seq == 0 or seq != stored.seq - 1:
            if len(self._traces) >= MAX_TRACED_SESSIONS:
                self._traces.clear()
            trace = await self._read_trace(stored)
            self._traces[stored.stream] = stored.seq, trace
        return trace

    async def _read_trace(self, stored: Stored) -> Trace | None:
        first = stored if stored.seq == 1 else next(iter(await self._store.read(stored.stream, 0, 1)), None)
        trace = None if first is None else await self._begin(first)
        if trace is None or not self._ours(trace):
            return None
        start = max(1, stored.seq - 1 - MAX_EVENTS_TRACED_BACK)
        for earlier in await self._store.read(stored.stream, start, max(0, stored.seq - 1 - start)):
            trace, _ = await self._advance(trace, earlier)
        return trace

    async def _begin(self, first: Stored) -> Trace | None:
        """Begin the trace of a session; that of a sub-session is a part of its parent's."""
        trace = begin_trace(first)
        if trace is None or not trace.parent:
            return trace
        stream = session_stream(trace.parent)
        _, parent = self._traces.get(stream, (0, None))
        if parent is None and (events := await self._store.read(stream, 0, 1)):
            parent = await self._begin(events[0])
        return trace if parent is None else join_parent(trace, parent)


def _is_session(stream: StreamId) -> bool:
    session = parse_session_id(stream)
    return session is not None and stream == session_stream(session)
