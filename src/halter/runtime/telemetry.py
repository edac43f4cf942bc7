"""Where spans go: nowhere, unless the environment says so.

| `HALTER_TRACES` | meaning |
|---|---|
| not set, or `off` | nowhere: nothing is imported, and no thread is started |
| `otlp` | to a collector, as the `OTEL_EXPORTER_OTLP_…` variables say; else to this machine, port 4318 |
| `console` | to the standard error |
| `file:PATH` | to a file, as JSON lines |

Spans are made from committed events, beside the agents: nothing is measured while an agent works. The id of a span
follows from its events, so every process makes the same span. Content is left out unless it is enabled.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TextIO

import msgspec

from halter import __version__
from halter.core.clock import Clock
from halter.core.errors import ConfigError
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionResumed,
    SessionStarted,
    TurnEnded,
    TurnStarted,
)
from halter.core.ids import StreamId, session_of, session_stream
from halter.core.messages import Reply, StopReason, Text
from halter.core.money import DOLLAR, Charge
from halter.core.ports import Store, Stored
from halter.core.text import clean, from_body, shorten
from halter.core.usage import ModelName, Usage
from halter.core.vocabulary import Outcome
from halter.loop.session_runtime import cancel_and_wait, raise_if_cancelled
from halter.runtime.feed import CommitObserver, Follower, watch_growth
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

AttributeValue = str | int | float | bool | tuple[str, ...]

GOOD_ENDS: Final = frozenset(("ended", "asked", "yielded"))
"""Turn ends that are no errors."""

_PROVIDERS: Final[Mapping[str, str]] = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}
"""Providers with another name in the conventions."""

_FINISHES: Final[Mapping[StopReason, str]] = {
    "end": "stop",
    "calls": "tool_calls",
    "max_tokens": "length",
    "refused": "content_filter",
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span, in microseconds. `error` names what went wrong."""

    trace: int
    span: int
    parent: int | None
    name: str
    kind: Literal["internal", "client"]
    start: int
    end: int
    attributes: Mapping[str, AttributeValue]
    error: str = ""


class OpenSpan(msgspec.Struct, frozen=True):
    """A span that has begun."""

    at: int
    span: int
    parent: int
    event: RequestStarted | CallStarted | TurnStarted
    body: str = ""


class Trace(msgspec.Struct, frozen=True):
    """The part of a session's state that its spans need.

    `root` is its current root span: a resumed session has another.
    """

    trace: int
    session: str
    agent: str
    kind: str
    parent: str
    root: int
    since: int
    turn: OpenSpan | None = None
    flying: Mapping[str, OpenSpan] = {}


def begin_trace(first: Stored) -> Trace | None:
    """Starts a trace with the first event of a session. Its hash is the id, since names repeat across stores."""
    match first.event:
        case SessionStarted() as event:
            return Trace(
                trace=int.from_bytes(first.hash[:16]) or 1,
                session=event.session,
                agent=event.agent,
                kind=event.kind,
                parent=event.parent,
                root=_id(first),
                since=first.at,
            )
        case _:
            return None


def advance_trace(trace: Trace, stored: Stored, *, content: bool = False) -> tuple[Trace, Span | None]:
    """Folds the next event of a session; returns a span where one ends."""
    match stored.event:
        case SessionResumed():
            return msgspec.structs.replace(trace, root=_id(stored), since=stored.at, turn=None, flying={}), None
        case TurnStarted() as event:
            turn = OpenSpan(stored.at, _id(stored), trace.root, event)
            return msgspec.structs.replace(trace, turn=turn), None
        case RequestStarted() as event:
            return _add_in_flight(trace, event.request, _open_span(trace, stored, event, content=content)), None
        case CallStarted() as event:
            return _add_in_flight(trace, event.call, _open_span(trace, stored, event, content=content)), None
        case RequestSettled(request=request) | CallSettled(call=request):
            begun = trace.flying.get(request)
            rest = {name: each for name, each in trace.flying.items() if name != request}
            span = None if begun is None else _close_span(trace, begun, stored, content=content)
            return msgspec.structs.replace(trace, flying=rest), span
        case RequestRefused() as event:
            known = _chat(trace, event.model, event.purpose) | {"halter.outcome": event.outcome}
            return trace, _instant(trace, stored, f"chat {_model(event.model)[1]}", known, event.outcome)
        case CallRefused() as event:
            known = _tool(trace, event.tool, event.call, event.level) | {"halter.outcome": event.outcome}
            return trace, _instant(trace, stored, f"execute_tool {event.tool}", known, event.outcome)
        case TurnEnded() as event:
            return msgspec.structs.replace(trace, turn=None), _turn(trace, event, stored.at)
        case SessionEnded() as event:
            return msgspec.structs.replace(trace, turn=None, flying={}), _session(trace, event, stored.at)
        case _:
            return trace, None


def _id(stored: Stored) -> int:
    """Derives a span id from the hash of the event that began it. 0 is not allowed."""
    return int.from_bytes(stored.hash[-8:]) or 1


def _add_in_flight(trace: Trace, name: str, span: OpenSpan) -> Trace:
    return msgspec.structs.replace(trace, flying={**trace.flying, name: span})


def _open_span(trace: Trace, stored: Stored, event: RequestStarted | CallStarted, *, content: bool) -> OpenSpan:
    return OpenSpan(stored.at, _id(stored), _parent_span(trace), event, _read_redacted(stored) if content else "")


def _parent_span(trace: Trace) -> int:
    return trace.root if trace.turn is None else trace.turn.span


def _read_redacted(stored: Stored) -> str:
    """Returns a body as the journal has it, secrets redacted. An erased or offloaded one is left out."""
    return clean(from_body(stored.body)) if stored.body else ""


def _close_span(trace: Trace, span: OpenSpan, stored: Stored, *, content: bool) -> Span | None:
    match span.event, stored.event:
        case RequestStarted() as asked, RequestSettled() as answer:
            attributes = _request(trace, asked, answer, stored) | (_message_attributes(span, stored) if content else {})
            return _span(trace, span, stored.at, f"chat {_model(asked.model)[1]}", attributes, answer.outcome)
        case CallStarted() as called, CallSettled() as result:
            attributes = _call(trace, called, result) | (_result_attributes(span, stored) if content else {})
            return _span(trace, span, stored.at, f"execute_tool {called.tool}", attributes, result.outcome)
        case _:
            return None


def _span(
    trace: Trace, span: OpenSpan, end: int, name: str, attributes: Mapping[str, AttributeValue], outcome: Outcome
) -> Span:
    client = isinstance(span.event, RequestStarted)
    return Span(
        trace=trace.trace,
        span=span.span,
        parent=span.parent,
        name=name,
        kind="client" if client else "internal",
        start=span.at,
        end=end,
        attributes=attributes,
        error="" if outcome == "ok" else outcome,
    )


def _instant(trace: Trace, stored: Stored, name: str, attributes: Mapping[str, AttributeValue], error: str) -> Span:
    """Makes a span of zero duration for a refusal."""
    return Span(
        trace=trace.trace,
        span=_id(stored),
        parent=_parent_span(trace),
        name=name,
        kind="internal",
        start=stored.at,
        end=stored.at,
        attributes=attributes,
        error=error,
    )


def _turn(trace: Trace, event: TurnEnded, at: int) -> Span | None:
    span = trace.turn
    if span is None:
        return None
    return Span(
        trace=trace.trace,
        span=span.span,
        parent=span.parent,
        name=f"turn {event.turn}",
        kind="internal",
        start=span.at,
        end=at,
        attributes=_session_attributes(trace) | {"halter.turn": event.turn, "halter.turn.end": event.why},
        error="" if event.why in GOOD_ENDS else event.why,
    )


def _session(trace: Trace, event: SessionEnded, at: int) -> Span:
    named: dict[str, AttributeValue] = {"gen_ai.operation.name": "invoke_agent", "halter.session.kind": trace.kind}
    ended: dict[str, AttributeValue] = {
        "halter.session.state": event.state,
        "halter.session.end": event.terminal_reason,
    }
    above: dict[str, AttributeValue] = {"halter.session.parent": trace.parent} if trace.parent else {}
    return Span(
        trace=trace.trace,
        span=trace.root,
        parent=None,
        name=f"invoke_agent {trace.agent}",
        kind="internal",
        start=trace.since,
        end=at,
        attributes=_session_attributes(trace) | named | ended | above,
        error="" if event.state == "COMPLETED" else event.terminal_reason,
    )


def _session_attributes(trace: Trace) -> dict[str, AttributeValue]:
    return {"gen_ai.agent.name": trace.agent, "gen_ai.conversation.id": trace.session}


def _model(name: str) -> tuple[str, str]:
    """Returns the provider, by its name in the conventions, and the model."""
    try:
        parsed = ModelName.parse(name)
    except ValueError:
        return "halter", name
    return _PROVIDERS.get(parsed.provider, parsed.provider), parsed.model


def _chat(trace: Trace, model: str, purpose: str) -> dict[str, AttributeValue]:
    provider, name = _model(model)
    return _session_attributes(trace) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": name,
        "halter.purpose": purpose,
    }


def _request(trace: Trace, asked: RequestStarted, answer: RequestSettled, stored: Stored) -> dict[str, AttributeValue]:
    most: dict[str, AttributeValue] = {}
    if asked.max_output_tokens:
        most["gen_ai.request.max_tokens"] = asked.max_output_tokens
    attributes = _chat(trace, asked.model, asked.purpose) | most | _usage(answer.usage)
    reply = _reply(stored) if answer.outcome == "ok" else None
    if reply is not None:
        attributes["gen_ai.response.finish_reasons"] = (_FINISHES[reply.stop],)
    return attributes | _outcome_attributes(answer.outcome, answer.charge)


def _usage(usage: Usage | None) -> dict[str, AttributeValue]:
    if usage is None:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
    }


def _outcome_attributes(outcome: Outcome, charge: Charge | None) -> dict[str, AttributeValue]:
    return {"halter.outcome": outcome, "halter.cost_usd": (charge.usd if charge else 0) / DOLLAR}


def _tool(trace: Trace, tool: str, call: str, level: str) -> dict[str, AttributeValue]:
    return _session_attributes(trace) | {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.call.id": call,
        "halter.level": level,
    }


def _call(trace: Trace, called: CallStarted, result: CallSettled) -> dict[str, AttributeValue]:
    risk: dict[str, AttributeValue] = {"halter.risk": called.risk} if called.risk else {}
    return (
        _tool(trace, called.tool, called.call, called.level) | risk | _outcome_attributes(result.outcome, result.charge)
    )


def _reply(stored: Stored) -> Reply | None:
    """Decodes a reply, if it stands beside its event."""
    try:
        return msgspec.json.decode(stored.body, type=Reply) if stored.body else None
    except msgspec.DecodeError:
        return None


def _message_attributes(span: OpenSpan, stored: Stored) -> dict[str, AttributeValue]:
    """Returns what was sent and answered, under the names of the conventions."""
    reply = _reply(stored)
    said: dict[str, AttributeValue] = {"halter.request.sent": span.body} if span.body else {}
    if reply is None:
        return said
    parts = [
        {"type": "text", "content": clean(part.text)}
        if isinstance(part, Text)
        else {"type": "tool_call", "id": part.id, "name": part.tool, "arguments": clean(part.arguments)}
        for part in reply.parts
    ]
    message = {"role": "assistant", "parts": parts, "finish_reason": _FINISHES[reply.stop]}
    return said | {"gen_ai.output.messages": msgspec.json.encode([message]).decode()}


def _result_attributes(span: OpenSpan, stored: Stored) -> dict[str, AttributeValue]:
    named = {"gen_ai.tool.call.arguments": span.body, "gen_ai.tool.call.result": _read_redacted(stored)}
    return {name: text for name, text in named.items() if text}


TRACES_VARIABLE: Final = "HALTER_TRACES"
TRACES_CONTENT_VARIABLE: Final = "HALTER_TRACES_CONTENT"
TRACES_FORMS: Final = "write otlp, console, file:PATH or off"

MAX_PENDING_SPANS: Final = 2048
"""Most spans that wait to be sent."""
SPAN_BATCH: Final = 512
"""Most spans sent at once."""
FLUSH_TIMEOUT_SECONDS: Final = 2.0
"""How long the rest may take to be sent at the end."""


def read_trace_target(environ: Mapping[str, str]) -> str:
    """Returns where spans go; "" is nowhere."""
    text = environ.get(TRACES_VARIABLE, "").strip()
    return "" if text.lower() in {"", "off", "0", "none"} else text


def is_content_wanted(environ: Mapping[str, str]) -> bool:
    return environ.get(TRACES_CONTENT_VARIABLE, "").strip() == "1"


@contextmanager
def open_span_sender(way: str, environ: Mapping[str, str]) -> Generator["SpanSender"]:
    """Sends spans, and what is left at the end."""
    with _open_exporter(way) as exporter:
        outlet = SpanSender(exporter, _resource(environ))
        try:
            yield outlet
        finally:
            outlet.close()


class SpanSender:
    """Sends spans in a thread of its own. When they come too fast, some are dropped and counted."""

    def __init__(self, exporter: "SpanExporter", resource: "Resource", limit: int = MAX_PENDING_SPANS) -> None:
        self._exporter = exporter
        self._resource = resource
        self._spans: Queue[Span | None] = Queue(limit)
        self.dropped_count = 0
        self._has_reported = False
        self._thread = threading.Thread(target=self._send, name="halter-traces", daemon=True)
        self._thread.start()

    def enqueue(self, span: Span) -> None:
        """Queues a span or drops it; never blocks."""
        try:
            self._spans.put_nowait(span)
        except Full:
            self.dropped_count += 1

    def trouble(self) -> str:
        if self._has_reported or not self.dropped_count:
            return ""
        self._has_reported = True
        return (
            "Traces are being lost, because they are not taken as fast as they come: look at the collector, and at "
            "OTEL_EXPORTER_OTLP_ENDPOINT. Agents and the journal are not touched by it."
        )

    def close(self) -> None:
        try:
            self._spans.put(None, timeout=FLUSH_TIMEOUT_SECONDS)
        except Full:
            self.dropped_count += 1
        self._thread.join(FLUSH_TIMEOUT_SECONDS)
        self._exporter.shutdown()

    def _send(self) -> None:
        while (first := self._spans.get()) is not None:
            batch, last = self._waiting(first)
            self._export([_to_readable_span(span, self._resource) for span in batch])
            if last:
                return

    def _waiting(self, first: Span) -> tuple[list[Span], bool]:
        """Returns up to a batch of what waits, and whether that was the last of it."""
        batch = [first]
        while len(batch) < SPAN_BATCH:
            try:
                span = self._spans.get_nowait()
            except Empty:
                break
            if span is None:
                return batch, True
            batch.append(span)
        return batch, False

    def _export(self, batch: "list[ReadableSpan]") -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001  a failing collector or disk may not stop an agent
            sent = False
        self.dropped_count += 0 if sent else len(batch)


@contextmanager
def _open_exporter(way: str) -> Generator["SpanExporter"]:
    try:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter
    except ImportError as missing:
        raise _missing_library_error() from missing
    _silence_exporter()
    if way == "otlp":
        yield _otlp()
    elif way == "console":
        yield ConsoleSpanExporter(out=sys.stderr, formatter=_line)
    elif way.startswith("file:") and way != "file:":
        with _file(way.removeprefix("file:")) as file:
            yield ConsoleSpanExporter(out=file, formatter=_line)
    else:
        raise ConfigError(f"{TRACES_VARIABLE} is {way!r}, which is no place for traces: {TRACES_FORMS}.")


def _otlp() -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as missing:
        raise _missing_library_error() from missing
    return OTLPSpanExporter()


def _missing_library_error() -> ConfigError:
    return ConfigError(
        f"{TRACES_VARIABLE} is set, but OpenTelemetry is not here: pip install 'halter[telemetry]', or unset it."
    )


def _file(path: str) -> TextIO:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"Traces cannot be written to {path!r} ({why}): name another file in {TRACES_VARIABLE}."
        ) from error


def _line(span: "ReadableSpan") -> str:
    return span.to_json(indent=None) + "\n"


def _silence_exporter() -> None:
    """Silences the exporter's log: `trouble` reports problems once."""
    import logging

    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


def _resource(environ: Mapping[str, str]) -> "Resource":
    from opentelemetry.sdk.resources import Resource

    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "halter"}
    return Resource.create({**named, "service.version": __version__})


def _to_readable_span(span: Span, resource: "Resource") -> "ReadableSpan":
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def span_context(span_id: int) -> SpanContext:
        return SpanContext(span.trace, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    failed = {"error.type": span.error} if span.error else {}
    return ReadableSpan(
        span.name,
        context=span_context(span.span),
        parent=None if span.parent is None else span_context(span.parent),
        resource=resource,
        attributes={**span.attributes, **failed},
        kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
        start_time=span.start * 1000,
        end_time=span.end * 1000,
        instrumentation_scope=InstrumentationScope("halter", __version__),
    )


MAX_EVENTS_TRACED_BACK: Final = 1000
"""Most events that are searched for the start of an open span."""
MAX_TRACED_SESSIONS: Final = 10_000
"""Most sessions kept in memory."""


TraceProblemListener = Callable[[str], None]
"""Called with a sentence."""
Job = Callable[[], Coroutine[Any, Any, None]]


@contextmanager
def trace_agents(
    app: Runtime,
    store: Store,
    on_problem: TraceProblemListener,
    ours: Callable[[str], bool],
    positions: Mapping[StreamId, int],
) -> Generator[Sequence[Job]]:
    """Yields the jobs that trace our agents from now on; none unless tracing is enabled."""
    way = read_trace_target(app.environ)
    if not way:
        yield ()
        return
    with open_span_sender(way, app.environ) as sink:
        tracing = SessionTracer(store, app.clock, sink, on_problem, ours, content=is_content_wanted(app.environ))
        yield (lambda: tracing.run(positions),)


@contextmanager
def trace_worker(app: Runtime, store: Store, on_problem: TraceProblemListener) -> Generator[Sequence[Job]]:
    """Yields the jobs that trace what this worker commits; none unless tracing is enabled.

    Other workers trace their own. A session that moves between workers stays one trace.
    """
    way = read_trace_target(app.environ)
    if not way:
        yield ()
        return
    committed = CommitObserver(asyncio.get_running_loop(), _is_session)
    with open_span_sender(way, app.environ) as sink:
        tracing = SessionTracer(store, app.clock, sink, on_problem, content=is_content_wanted(app.environ))
        app.store.observe(committed)
        yield (lambda: tracing.run_here(committed),)


LAST_SPANS_SECONDS: Final = 5.0
"""How long the end of a process may wait for its last spans to be made."""


@asynccontextmanager
async def trace_process(app: Runtime, on_problem: TraceProblemListener) -> AsyncGenerator[None]:
    """Traces what this process commits, until the end and with all of it; does nothing unless tracing is enabled."""
    way = read_trace_target(app.environ)
    if not way:
        yield
        return
    committed = CommitObserver(asyncio.get_running_loop(), _is_session)
    with open_span_sender(way, app.environ) as sink:
        tracing = SessionTracer(app.patient(), app.clock, sink, on_problem, content=is_content_wanted(app.environ))
        app.store.observe(committed)
        reading = asyncio.create_task(tracing.run_here(committed), name="traces")
        try:
            yield
        finally:
            committed.close()
            await asyncio.wait((reading,), timeout=LAST_SPANS_SECONDS)
            await cancel_and_wait(reading)


class SpanSink(Protocol):
    def enqueue(self, span: Span) -> None:
        """Queues a span or drops it; never blocks."""
        ...

    def trouble(self) -> str:
        """Returns what went wrong since the last call; "" if nothing."""
        ...


class SessionTracer:
    """Makes spans of the sessions of some agents."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sink: SpanSink,
        on_problem: TraceProblemListener,
        ours: Callable[[str], bool] = lambda _: True,
        *,
        content: bool = False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sink = sink
        self._on_problem = on_problem
        self._ours = ours
        self._content = content
        self._traces: dict[StreamId, tuple[int, Trace | None]] = {}

    async def run(self, positions: Mapping[StreamId, int]) -> None:
        """Traces what follows what was seen, until cancelled."""
        await self._run_safely(self._follow(positions))

    async def run_here(self, committed: CommitObserver) -> None:
        """Traces what this process commits, until cancelled."""
        await self._run_safely(self._follow_here(committed))

    async def _run_safely(self, following: Awaitable[None]) -> None:
        try:
            await following
        except Exception as error:  # noqa: BLE001  no failure here may stop an agent
            raise_if_cancelled()
            sentence = shorten(clean(f"{type(error).__name__}: {error}"), 300)
            self._on_problem(
                f"There are no more traces until the next start, because of a breakdown; agents go on ({sentence})."
            )

    async def _follow(self, positions: Mapping[StreamId, int]) -> None:
        follower = Follower(self._store, positions, wanted=_is_session)
        async with aclosing(watch_growth(self._store, self._clock)) as changes:
            async for change in changes:
                async with aclosing(follower.follow_change(change)) as pages:
                    async for page in pages:
                        for stored in page:
                            await self._trace_event(stored)
                self._report_trouble()

    async def _follow_here(self, committed: CommitObserver) -> None:
        async with aclosing(committed.batches()) as batches:
            async for events in batches:
                for stored in events:
                    await self._trace_event(stored)
                self._report_trouble()

    def _report_trouble(self) -> None:
        if trouble := self._sink.trouble():
            self._on_problem(trouble)

    async def _trace_event(self, stored: Stored) -> None:
        trace = await self._find_trace(stored)
        if trace is None:
            return
        after, span = advance_trace(trace, stored, content=self._content)
        self._traces[stored.stream] = stored.seq, after
        if span is not None:
            self._sink.enqueue(span)

    async def _find_trace(self, stored: Stored) -> Trace | None:
        """Returns a session's state before an event. What other processes did in between is looked up."""
        seq, trace = self._traces.get(stored.stream, (0, None))
        if trace is None and seq:
            # Not one of our agents.
            return None
        if seq == 0 or seq != stored.seq - 1:
            if len(self._traces) >= MAX_TRACED_SESSIONS:
                self._traces.clear()
            trace = await self._read_trace(stored)
            self._traces[stored.stream] = stored.seq, trace
        return trace

    async def _read_trace(self, stored: Stored) -> Trace | None:
        first = stored if stored.seq == 1 else next(iter(await self._store.read(stored.stream, 0, 1)), None)
        trace = None if first is None else begin_trace(first)
        if trace is None or not self._ours(trace.agent):
            return None
        after = max(1, stored.seq - 1 - MAX_EVENTS_TRACED_BACK)
        for earlier in await self._store.read(stored.stream, after, max(0, stored.seq - 1 - after)):
            trace, _ = advance_trace(trace, earlier, content=self._content)
        return trace


def _is_session(stream: StreamId) -> bool:
    session = session_of(stream)
    return session is not None and stream == session_stream(session)
