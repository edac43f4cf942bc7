"""OpenTelemetry spans of sessions. They are off unless an environment variable enables them.

| `HALTER_TRACES` | spans are sent |
|---|---|
| not set, or `off` | nowhere: nothing is imported, and no thread is started |
| `otlp` | to the collector that the `OTEL_EXPORTER_OTLP_…` variables name, by default port 4318 of this machine |
| `console` | to standard error |
| `file:PATH` | to a file, as JSON lines |

Spans are made from committed events, outside of the agents: nothing is measured while an agent works. The id of a span
derives from its events, so every process makes the same span. Content is left out unless it is enabled.
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

from halter.core.clock import Clock
from halter.core.errors import ConfigError, render_install_command
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
from halter.core.ids import StreamId, parse_session_id, session_stream
from halter.core.messages import Reply, StopReason, Text
from halter.core.money import DOLLAR, Charge
from halter.core.ports import Store, Stored
from halter.core.text import clean, decode_body, shorten
from halter.core.usage import ModelName, Usage
from halter.core.vocabulary import Outcome
from halter.loop.session_runtime import cancel_and_wait, raise_if_cancelled
from halter.runtime.feed import CommitObserver, Follower, watch_growth
from halter.runtime.runtime import Runtime
from halter_agents import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

AttributeValue = str | int | float | bool | tuple[str, ...]

GOOD_ENDS: Final = frozenset(("ended", "asked", "yielded"))
"""Turn ends that are not errors."""

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
"""Providers that have another name in the semantic conventions."""

_FINISHES: Final[Mapping[StopReason, str]] = {
    "end": "stop",
    "calls": "tool_calls",
    "max_tokens": "length",
    "refused": "content_filter",
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span; `start` and `end` are in microseconds. `error` names the outcome of a failure."""

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
    """A span that has started and not ended."""

    at: int
    span: int
    parent: int
    event: RequestStarted | CallStarted | TurnStarted
    body: str = ""


class Trace(msgspec.Struct, frozen=True):
    """The part of a session's state that its spans need.

    `root` is its current root span: a resumed session has a new one.
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
    """Start a trace from the first event of a session. Its id is the event's hash: names repeat across stores."""
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
    """Fold the next event of a session; return the span that it ends, if any."""
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
            open_span = trace.flying.get(request)
            in_flight = {name: each for name, each in trace.flying.items() if name != request}
            span = None if open_span is None else _close_span(trace, open_span, stored, content=content)
            return msgspec.structs.replace(trace, flying=in_flight), span
        case RequestRefused() as event:
            attributes = _chat(trace, event.model, event.purpose) | {"halter.outcome": event.outcome}
            return trace, _instant(trace, stored, f"chat {_model(event.model)[1]}", attributes, event.outcome)
        case CallRefused() as event:
            attributes = _tool(trace, event.tool, event.call, event.level) | {"halter.outcome": event.outcome}
            return trace, _instant(trace, stored, f"execute_tool {event.tool}", attributes, event.outcome)
        case TurnEnded() as event:
            return msgspec.structs.replace(trace, turn=None), _turn(trace, event, stored.at)
        case SessionEnded() as event:
            return msgspec.structs.replace(trace, turn=None, flying={}), _session(trace, event, stored.at)
        case _:
            return trace, None


def _id(stored: Stored) -> int:
    """Derive a span id from the hash of the event that started the span. 0 is not allowed."""
    return int.from_bytes(stored.hash[-8:]) or 1


def _add_in_flight(trace: Trace, name: str, span: OpenSpan) -> Trace:
    return msgspec.structs.replace(trace, flying={**trace.flying, name: span})


def _open_span(trace: Trace, stored: Stored, event: RequestStarted | CallStarted, *, content: bool) -> OpenSpan:
    return OpenSpan(stored.at, _id(stored), _parent_span(trace), event, _read_redacted(stored) if content else "")


def _parent_span(trace: Trace) -> int:
    return trace.root if trace.turn is None else trace.turn.span


def _read_redacted(stored: Stored) -> str:
    """Return a body from the journal, where secrets are redacted; "" if it is erased or offloaded."""
    return clean(decode_body(stored.body)) if stored.body else ""


def _close_span(trace: Trace, span: OpenSpan, stored: Stored, *, content: bool) -> Span | None:
    match span.event, stored.event:
        case RequestStarted() as request, RequestSettled() as answer:
            attributes = _request(trace, request, answer, stored) | (
                _message_attributes(span, stored) if content else {}
            )
            return _span(trace, span, stored.at, f"chat {_model(request.model)[1]}", attributes, answer.outcome)
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
    """Make a span of zero duration for a refusal."""
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
    base: dict[str, AttributeValue] = {"gen_ai.operation.name": "invoke_agent", "halter.session.kind": trace.kind}
    end: dict[str, AttributeValue] = {
        "halter.session.state": event.state,
        "halter.session.end": event.terminal_reason,
    }
    parent: dict[str, AttributeValue] = {"halter.session.parent": trace.parent} if trace.parent else {}
    return Span(
        trace=trace.trace,
        span=trace.root,
        parent=None,
        name=f"invoke_agent {trace.agent}",
        kind="internal",
        start=trace.since,
        end=at,
        attributes=_session_attributes(trace) | base | end | parent,
        error="" if event.state == "COMPLETED" else event.terminal_reason,
    )


def _session_attributes(trace: Trace) -> dict[str, AttributeValue]:
    return {"gen_ai.agent.name": trace.agent, "gen_ai.conversation.id": trace.session}


def _model(name: str) -> tuple[str, str]:
    """Return the provider, by its name in the semantic conventions, and the model."""
    try:
        model_name = ModelName.parse(name)
    except ValueError:
        return "halter", name
    return _PROVIDERS.get(model_name.provider, model_name.provider), model_name.model


def _chat(trace: Trace, model: str, purpose: str) -> dict[str, AttributeValue]:
    provider, name = _model(model)
    return _session_attributes(trace) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": name,
        "halter.purpose": purpose,
    }


def _request(
    trace: Trace, request: RequestStarted, answer: RequestSettled, stored: Stored
) -> dict[str, AttributeValue]:
    limits: dict[str, AttributeValue] = {}
    if request.max_output_tokens:
        limits["gen_ai.request.max_tokens"] = request.max_output_tokens
    attributes = _chat(trace, request.model, request.purpose) | limits | _usage(answer.usage)
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


def _call(trace: Trace, call_event: CallStarted, result: CallSettled) -> dict[str, AttributeValue]:
    risk: dict[str, AttributeValue] = {"halter.risk": call_event.risk} if call_event.risk else {}
    return (
        _tool(trace, call_event.tool, call_event.call, call_event.level)
        | risk
        | _outcome_attributes(result.outcome, result.charge)
    )


def _reply(stored: Stored) -> Reply | None:
    """Decode the reply in the body of an event; None if the body is missing or is not a reply."""
    try:
        return msgspec.json.decode(stored.body, type=Reply) if stored.body else None
    except msgspec.DecodeError:
        return None


def _message_attributes(span: OpenSpan, stored: Stored) -> dict[str, AttributeValue]:
    """Return the sent and received messages as attributes of the semantic conventions."""
    reply = _reply(stored)
    attributes: dict[str, AttributeValue] = {"halter.request.sent": span.body} if span.body else {}
    if reply is None:
        return attributes
    parts = [
        {"type": "text", "content": clean(part.text)}
        if isinstance(part, Text)
        else {"type": "tool_call", "id": part.id, "name": part.tool, "arguments": clean(part.arguments)}
        for part in reply.parts
    ]
    message = {"role": "assistant", "parts": parts, "finish_reason": _FINISHES[reply.stop]}
    return attributes | {"gen_ai.output.messages": msgspec.json.encode([message]).decode()}


def _result_attributes(span: OpenSpan, stored: Stored) -> dict[str, AttributeValue]:
    attributes = {"gen_ai.tool.call.arguments": span.body, "gen_ai.tool.call.result": _read_redacted(stored)}
    return {name: text for name, text in attributes.items() if text}


TRACES_VARIABLE: Final = "HALTER_TRACES"
TRACES_CONTENT_VARIABLE: Final = "HALTER_TRACES_CONTENT"
TRACES_FORMS: Final = "write otlp, console, file:PATH or off"

MAX_PENDING_SPANS: Final = 2048
"""Maximum number of spans that wait to be sent."""
SPAN_BATCH: Final = 512
"""Maximum number of spans in one export."""
FLUSH_TIMEOUT_SECONDS: Final = 2.0
"""Time limit for sending the remaining spans at the end."""


def read_trace_target(environ: Mapping[str, str]) -> str:
    """Return the target of spans from the environment; "" if tracing is off."""
    text = environ.get(TRACES_VARIABLE, "").strip()
    return "" if text.lower() in {"", "off", "0", "none"} else text


def is_content_traced(environ: Mapping[str, str]) -> bool:
    return environ.get(TRACES_CONTENT_VARIABLE, "").strip() == "1"


@contextmanager
def open_span_sender(target: str, environ: Mapping[str, str]) -> Generator["SpanSender"]:
    """Open a sender, and send its remaining spans after the block."""
    with _open_exporter(target) as exporter:
        sender = SpanSender(exporter, _resource(environ))
        try:
            yield sender
        finally:
            sender.close()


class SpanSender:
    """Sends spans in a separate thread. Spans above the limit are dropped and counted."""

    def __init__(self, exporter: "SpanExporter", resource: "Resource", limit: int = MAX_PENDING_SPANS) -> None:
        self._exporter = exporter
        self._resource = resource
        self._spans: Queue[Span | None] = Queue(limit)
        self.dropped_count = 0
        self._has_reported = False
        self._thread = threading.Thread(target=self._send, name="halter-traces", daemon=True)
        self._thread.start()

    def enqueue(self, span: Span) -> None:
        """Queue a span, or drop it if the queue is full; never blocks."""
        try:
            self._spans.put_nowait(span)
        except Full:
            self.dropped_count += 1

    def trouble(self) -> str:
        if self._has_reported or not self.dropped_count:
            return ""
        self._has_reported = True
        return (
            "Traces are being lost, because they cannot be sent as fast as they are made. Check the collector and "
            "OTEL_EXPORTER_OTLP_ENDPOINT. Agents and the journal are not affected."
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
            batch, is_last = self._waiting(first)
            self._export([_to_readable_span(span, self._resource) for span in batch])
            if is_last:
                return

    def _waiting(self, first_span: Span) -> tuple[list[Span], bool]:
        """Return a batch of waiting spans, and true if the queue was closed."""
        batch = [first_span]
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
            is_sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001  a failing collector or disk may not stop an agent
            is_sent = False
        self.dropped_count += 0 if is_sent else len(batch)


@contextmanager
def _open_exporter(target: str) -> Generator["SpanExporter"]:
    try:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter
    except ImportError as missing:
        raise _missing_library_error() from missing
    _silence_exporter()
    if target == "otlp":
        yield _otlp()
    elif target == "console":
        yield ConsoleSpanExporter(out=sys.stderr, formatter=_line)
    elif target.startswith("file:") and target != "file:":
        with _file(target.removeprefix("file:")) as file:
            yield ConsoleSpanExporter(out=file, formatter=_line)
    else:
        raise ConfigError(f"{TRACES_VARIABLE} is {target!r}, which is not a valid target: {TRACES_FORMS}.")


def _otlp() -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as missing:
        raise _missing_library_error() from missing
    return OTLPSpanExporter()


def _missing_library_error() -> ConfigError:
    return ConfigError(
        f"{TRACES_VARIABLE} is set, but OpenTelemetry is not installed: "
        f"{render_install_command('telemetry')}, or unset it."
    )


def _file(path: str) -> TextIO:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"Traces cannot be written to {path!r} ({reason}). Name another file in {TRACES_VARIABLE}."
        ) from error


def _line(span: "ReadableSpan") -> str:
    return span.to_json(indent=None) + "\n"


def _silence_exporter() -> None:
    """Silence the exporter's log: `SpanSender.drain_problem` reports problems once."""
    import logging

    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


def _resource(environ: Mapping[str, str]) -> "Resource":
    from opentelemetry.sdk.resources import Resource

    name = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "halter"}
    return Resource.create({**name, "service.version": VERSION})


def _to_readable_span(span: Span, resource: "Resource") -> "ReadableSpan":
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def span_context(span_id: int) -> SpanContext:
        return SpanContext(span.trace, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    error_attributes = {"error.type": span.error} if span.error else {}
    return ReadableSpan(
        span.name,
        context=span_context(span.span),
        parent=None if span.parent is None else span_context(span.parent),
        resource=resource,
        attributes={**span.attributes, **error_attributes},
        kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
        start_time=span.start * 1000,
        end_time=span.end * 1000,
        instrumentation_scope=InstrumentationScope("halter", VERSION),
    )


MAX_EVENTS_TRACED_BACK: Final = 1000
"""Maximum number of events that are searched for the start of an open span."""
MAX_TRACED_SESSIONS: Final = 10_000
"""Maximum number of sessions in memory."""


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
    """Yield the jobs that trace our agents from these positions on; none unless tracing is enabled."""
    target = read_trace_target(app.environ)
    if not target:
        yield ()
        return
    with open_span_sender(target, app.environ) as sender:
        tracer = SessionTracer(store, app.clock, sender, on_problem, ours, content=is_content_traced(app.environ))
        yield (lambda: tracer.run(positions),)


@contextmanager
def trace_worker(app: Runtime, store: Store, on_problem: TraceProblemListener) -> Generator[Sequence[Job]]:
    """Yield the jobs that trace the commits of this worker; none unless tracing is enabled.

    Other workers trace their own. A session that moves between workers stays one trace.
    """
    target = read_trace_target(app.environ)
    if not target:
        yield ()
        return
    observer = CommitObserver(asyncio.get_running_loop(), _is_session)
    with open_span_sender(target, app.environ) as sender:
        tracer = SessionTracer(store, app.clock, sender, on_problem, content=is_content_traced(app.environ))
        app.store.observe(observer)
        yield (lambda: tracer.run_here(observer),)


LAST_SPANS_SECONDS: Final = 5.0
"""Time limit for making the last spans when a process ends."""


@asynccontextmanager
async def trace_process(app: Runtime, on_problem: TraceProblemListener) -> AsyncGenerator[None]:
    """Trace all commits of this process, including the last ones before the end. Does nothing unless enabled."""
    target = read_trace_target(app.environ)
    if not target:
        yield
        return
    observer = CommitObserver(asyncio.get_running_loop(), _is_session)
    with open_span_sender(target, app.environ) as sender:
        tracer = SessionTracer(app.patient(), app.clock, sender, on_problem, content=is_content_traced(app.environ))
        app.store.observe(observer)
        task = asyncio.create_task(tracer.run_here(observer), name="traces")
        try:
            yield
        finally:
            observer.close()
            await asyncio.wait((task,), timeout=LAST_SPANS_SECONDS)
            await cancel_and_wait(task)


class SpanSink(Protocol):
    def enqueue(self, span: Span) -> None:
        """Queue a span, or drop it if the queue is full; never blocks."""
        ...

    def trouble(self) -> str:
        """Return a sentence about a new problem since the last call; "" if there is none."""
        ...


class SessionTracer:
    """Makes the spans of the sessions of some agents."""

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
        """Trace all events after these positions, until cancelled."""
        await self._run_safely(self._follow(positions))

    async def run_here(self, observer: CommitObserver) -> None:
        """Trace the commits of this process, until cancelled."""
        await self._run_safely(self._follow_here(observer))

    async def _run_safely(self, job: Awaitable[None]) -> None:
        try:
            await job
        except Exception as error:  # noqa: BLE001  no failure here may stop an agent
            raise_if_cancelled()
            sentence = shorten(clean(f"{type(error).__name__}: {error}"), 300)
            self._on_problem(f"Tracing failed and is off until the next start; agents continue ({sentence}).")

    async def _follow(self, positions: Mapping[StreamId, int]) -> None:
        follower = Follower(self._store, positions, includes_stream=_is_session)
        async with aclosing(watch_growth(self._store, self._clock)) as changes:
            async for change in changes:
                async with aclosing(follower.follow_change(change)) as pages:
                    async for page in pages:
                        for stored in page:
                            await self._trace_event(stored)
                self._report_trouble()

    async def _follow_here(self, observer: CommitObserver) -> None:
        async with aclosing(observer.batches()) as batches:
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
        next_trace, span = advance_trace(trace, stored, content=self._content)
        self._traces[stored.stream] = stored.seq, next_trace
        if span is not None:
            self._sink.enqueue(span)

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
        trace = None if first is None else begin_trace(first)
        if trace is None or not self._ours(trace.agent):
            return None
        start = max(1, stored.seq - 1 - MAX_EVENTS_TRACED_BACK)
        for earlier in await self._store.read(stored.stream, start, max(0, stored.seq - 1 - start)):
            trace, _ = advance_trace(trace, earlier, content=self._content)
        return trace


def _is_session(stream: StreamId) -> bool:
    session = parse_session_id(stream)
    return session is not None and stream == session_stream(session)
