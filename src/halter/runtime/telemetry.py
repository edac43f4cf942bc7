"""OpenTelemetry spans and metrics of sessions. They are off unless an environment variable enables them.

| `HALTER_TRACES`, `HALTER_METRICS` | spans, or metrics, are sent |
|---|---|
| not set, or `off` | nowhere: nothing is imported, and no thread is started |
| `otlp` | to the collector that the `OTEL_EXPORTER_OTLP_…` variables name, by default port 4318 of this machine |
| `console` | to standard error |
| `file:PATH` | to a file, as JSON lines |

Spans are made from committed events, outside of the agents: nothing is measured while an agent works. The id of a span
derives from its events, so every process makes the same span. Content is left out unless it is enabled. Metrics are
counted from the same spans; the server counts them for `/metrics`, too, in the text format of Prometheus.
"""

import asyncio
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from importlib import import_module
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TextIO

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError, StoreError, render_install_command
from halter.core.events import RequestSettled, TurnStarted
from halter.core.ids import StreamId, inbox_stream, parse_session_id, session_stream
from halter.core.money import DOLLAR, BudgetRow
from halter.core.ports import Store, Stored
from halter.core.text import clean, shorten
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.guard.model_door import PromptLog
from halter.loop.session_runtime import cancel_and_wait, raise_if_cancelled
from halter.runtime.budgets import read_current_budgets
from halter.runtime.feed import CommitObserver, Follower, read_stream_heads, watch_growth
from halter.runtime.runtime import Runtime
from halter.state.trace import Span, SpanReference, Trace, advance_trace, begin_trace, find_waker, join_parent
from halter_agents import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricExportResult, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

TRACES_VARIABLE: Final = "HALTER_TRACES"
TRACES_CONTENT_VARIABLE: Final = "HALTER_TRACES_CONTENT"
METRICS_VARIABLE: Final = "HALTER_METRICS"
TARGET_FORMS: Final = "write otlp, console, file:PATH or off"

MAX_PENDING_SPANS: Final = 2048
"""Maximum number of spans that wait to be sent."""
SPAN_BATCH: Final = 512
"""Maximum number of spans in one export."""
FLUSH_TIMEOUT_SECONDS: Final = 2.0
"""Time limit for sending the remaining spans at the end."""


def read_target(environ: Mapping[str, str], variable: str) -> str:
    """Return the target of spans or metrics from the environment; "" if they are off."""
    text = environ.get(variable, "").strip()
    return "" if text.lower() in {"", "off", "0", "none"} else text


def is_content_traced(environ: Mapping[str, str]) -> bool:
    return environ.get(TRACES_CONTENT_VARIABLE, "").strip() == "1"


@contextmanager
def open_span_sender(target: str, environ: Mapping[str, str]) -> Generator["SpanSender"]:
    """Open a sender, and send its remaining spans after the block."""
    with _open_output(TRACES_VARIABLE, target) as output:
        sender = SpanSender(_make_span_exporter(output), _resource(environ))
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
        """Queue a span, or drop it if the queue is full; never blocks. What belongs to no sampled trace is not sent."""
        if not span.is_sampled:
            return
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


Output = TextIO | Literal["otlp"]
_LIBRARIES: Final = ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http")


@contextmanager
def _open_output(variable: str, target: str) -> Generator[Output]:
    """Open what spans or metrics are sent to. Raises ConfigError, which names the variable."""
    try:
        for name in _LIBRARIES:
            import_module(name)
    except ImportError as missing:
        raise ConfigError(
            f"{variable} is set, but OpenTelemetry is not installed: "
            f"{render_install_command('telemetry')}, or unset it."
        ) from missing
    _silence_exporter()
    if target == "otlp":
        yield "otlp"
    elif target == "console":
        yield sys.stderr
    elif target.startswith("file:") and target != "file:":
        with _file(variable, target.removeprefix("file:")) as file:
            yield file
    else:
        raise ConfigError(f"{variable} is {target!r}, which is not a valid target: {TARGET_FORMS}.")


def _make_span_exporter(output: Output) -> "SpanExporter":
    if output == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter(out=output, formatter=_line)


class MetricExporter(Protocol):
    def export(self, metrics_data: "MetricsData") -> "MetricExportResult":
        """Send the metrics."""
        ...

    def shutdown(self) -> None:
        """Close the connection."""
        ...


def _make_metric_exporter(output: Output) -> MetricExporter:
    if output == "otlp":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

    return ConsoleMetricExporter(out=output, formatter=lambda data: data.to_json(indent=None) + "\n")


def _file(variable: str, path: str) -> TextIO:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = "Traces" if variable == TRACES_VARIABLE else "Metrics"
        raise ConfigError(
            f"{what} cannot be written to {path!r} ({reason}). Name another file in {variable}."
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
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def span_context(trace: int, span_id: int, *, is_remote: bool = False, is_sampled: bool = True) -> SpanContext:
        flags = TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT
        return SpanContext(trace, span_id, is_remote=is_remote, trace_flags=TraceFlags(flags))

    error_attributes = {"error.type": span.error} if span.error else {}
    parent = None if span.parent is None else span_context(span.trace, span.parent, is_remote=span.has_remote_parent)
    return ReadableSpan(
        span.name,
        context=span_context(span.trace, span.span),
        parent=parent,
        resource=resource,
        attributes={**span.attributes, **error_attributes},
        links=[
            Link(span_context(each.trace, each.span, is_remote=True, is_sampled=each.is_sampled)) for each in span.links
        ],
        kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
        start_time=span.start * 1000,
        end_time=span.end * 1000,
        instrumentation_scope=InstrumentationScope("halter", VERSION),
    )


Labels = tuple[tuple[str, str], ...]


class Instrument(msgspec.Struct, frozen=True):
    """A metric: its name and unit in OpenTelemetry. A histogram has the bounds of its buckets."""

    name: str
    unit: str
    description: str
    kind: Literal["histogram", "counter", "gauge"]
    bounds: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The name as a collector translates it for Prometheus."""
        unit = {"s": "_seconds", "USD": "_USD"}.get(self.unit, "")
        return self.name.replace(".", "_") + unit + ("_total" if self.kind == "counter" else "")


TOKEN_USAGE: Final = Instrument(
    "gen_ai.client.token.usage",
    "{token}",
    "Number of input and output tokens used.",
    "histogram",
    tuple(4**power for power in range(14)),
)
OPERATION_DURATION: Final = Instrument(
    "gen_ai.client.operation.duration",
    "s",
    "GenAI operation duration.",
    "histogram",
    tuple(2**power / 100 for power in range(14)),
)
SPEND: Final = Instrument("halter.spend", "USD", "Cost of requests and calls.", "counter")
REFUSALS: Final = Instrument("halter.refusals", "{refusal}", "Requests and calls that the guard refused.", "counter")
WAITING: Final = Instrument("halter.decisions.waiting", "{decision}", "Decisions that wait for a person.", "gauge")
BUDGET_SPENT: Final = Instrument("halter.budget.spent", "USD", "Spent and held against a current cap.", "gauge")
BUDGET_CAP: Final = Instrument("halter.budget.cap", "USD", "A current cap.", "gauge")
INSTRUMENTS: Final = (TOKEN_USAGE, OPERATION_DURATION, SPEND, REFUSALS, WAITING, BUDGET_SPENT, BUDGET_CAP)

AGENT_LABEL: Final = "gen_ai.agent.name"
_TOOL_LABEL: Final = "gen_ai.tool.name"
_REQUEST_LABELS: Final = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    AGENT_LABEL,
)
_EFFECT_LABELS: Final = ("gen_ai.operation.name", "gen_ai.request.model", _TOOL_LABEL, AGENT_LABEL)
_OTHER_TOOLS: Final = "_OTHER"
"""The label of names that no tool is known to have: a model can invent any number of them."""
_OUTCOMES_OF_TOOLS: Final = frozenset(
    ("tool_not_granted", "disabled", "quarantined", "approval_denied", "approval_expired", "untrusted")
)
"""Reasons to refuse a call that only a tool has that exists."""
_OVERFLOW: Final[Labels] = (("otel.metric.overflow", "true"),)
MAX_SERIES: Final = 2000
"""Maximum number of series of one metric; the rest is counted in one more."""
GAUGE_INTERVAL: Final = 10 * SECOND
COUNT_RETRY_DELAY: Final = SECOND
DEFAULT_EXPORT_INTERVAL_MS: Final = 60_000
MAX_INTERVAL_DIGITS: Final = 9


class Series(msgspec.Struct):
    """One series: a sum, and for a histogram the count of values in each bucket."""

    total: float = 0
    buckets: list[int] = []
    low: float = 0
    high: float = 0

    def observe(self, value: float, bounds: Sequence[float]) -> None:
        if not self.buckets:
            self.buckets, self.low, self.high = [0] * (len(bounds) + 1), value, value
        self.buckets[bisect_left(bounds, value)] += 1
        self.total, self.low, self.high = self.total + value, min(self.low, value), max(self.high, value)


class MetricTable:
    """The metrics of one process, counted from spans since its start. Any thread may read it."""

    def __init__(self, clock: Clock) -> None:
        self.has_begun = asyncio.Event()
        """Set once events are counted."""
        self._clock = clock
        self._started_at = clock.now()
        self._lock = threading.Lock()
        self._series: dict[Instrument, dict[Labels, Series]] = {instrument: {} for instrument in INSTRUMENTS}
        self._known_tools = set[object]()

    def enqueue(self, span: Span) -> None:
        """Count a span."""
        with self._lock:
            if not span.is_refusal or span.error in _OUTCOMES_OF_TOOLS:
                self._known_tools.add(span.attributes.get(_TOOL_LABEL))
            if span.is_refusal:
                self._find(REFUSALS, self._label_refusal(span)).total += 1
                return
            cost_usd = span.attributes.get("halter.cost_usd")
            if isinstance(cost_usd, float) and cost_usd:
                self._find(SPEND, _label(span, *_EFFECT_LABELS)).total += cost_usd
            if span.attributes.get("gen_ai.operation.name") != "chat":
                return
            error = (("error.type", span.error),) if span.error else ()
            duration = self._find(OPERATION_DURATION, (*_label(span, *_REQUEST_LABELS), *error))
            duration.observe((span.end - span.start) / SECOND, OPERATION_DURATION.bounds)
            for kind in ("input", "output"):
                count = span.attributes.get(f"gen_ai.usage.{kind}_tokens")
                if isinstance(count, int):
                    labels = (*_label(span, *_REQUEST_LABELS), ("gen_ai.token.type", kind))
                    self._find(TOKEN_USAGE, labels).observe(count, TOKEN_USAGE.bounds)

    def trouble(self) -> str:
        """Return "": counting has no problems of its own."""
        return ""

    async def watch(self, store: Store) -> None:
        """Read the gauges at intervals, until cancelled. While the store is unavailable, they stay as they are."""
        while True:
            with suppress(StoreError):
                await self.read_gauges(store)
            await self._clock.sleep(GAUGE_INTERVAL)

    async def read_gauges(self, store: Store) -> None:
        """Read what waits for people, and what is spent of current caps."""
        now = self._clock.now()
        decisions, budgets = await list_pending_decisions(store, now), await read_current_budgets(store, now, 0)
        with self._lock:
            for instrument in (WAITING, BUDGET_SPENT, BUDGET_CAP):
                self._series[instrument] = {}
            for decision in decisions:
                self._find(WAITING, _label_decision(decision)).total += 1
            for row in budgets:
                if row.unit == "usd" and not row.scope.startswith("session:"):
                    labels = _label_budget(row)
                    self._find(BUDGET_SPENT, labels).total = (row.spent + row.held) / DOLLAR
                    if row.cap is not None:
                        self._find(BUDGET_CAP, labels).total = row.cap / DOLLAR

    def render(self, can_see: Callable[[str], bool] = lambda _: True) -> str:
        """Render the series of the agents that can be seen, in the text format of Prometheus.

        What is counted for the whole fleet belongs to the agent "".
        """
        with self._lock:
            return "".join(
                line + "\n"
                for instrument, by_labels in self._series.items()
                for line in _render_instrument(
                    instrument, {each: series for each, series in by_labels.items() if can_see(_find_agent(each))}
                )
            )

    def to_metrics_data(self, resource: "Resource") -> "MetricsData":
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        start, now = self._started_at * 1000, self._clock.now() * 1000
        with self._lock:
            metrics = [_to_metric(each, series, start, now) for each, series in self._series.items() if series]
        return MetricsData(
            [ResourceMetrics(resource, [ScopeMetrics(InstrumentationScope("halter", VERSION), metrics, "")], "")]
        )

    def _label_refusal(self, span: Span) -> Labels:
        labels = _label(span, *_EFFECT_LABELS, "halter.outcome")
        known = self._known_tools
        return tuple(
            (name, _OTHER_TOOLS if name == _TOOL_LABEL and text not in known else text) for name, text in labels
        )

    def _find(self, instrument: Instrument, labels: Labels) -> Series:
        series = self._series[instrument]
        if labels not in series and len(series) >= MAX_SERIES:
            labels = _OVERFLOW
        return series.setdefault(labels, Series())


def _label(span: Span, *names: str) -> Labels:
    return tuple((name, str(value)) for name in names if (value := span.attributes.get(name)) is not None)


def _label_decision(decision: PendingDecision) -> Labels:
    return (("halter.decision.about", decision.about), (AGENT_LABEL, decision.agent))


def _label_budget(row: BudgetRow) -> Labels:
    kind, _, name = row.scope.partition(":")
    agent = ((AGENT_LABEL, name.partition("/")[0]),) if kind != "fleet" else ()
    return (("halter.scope", row.scope), ("halter.window", row.window.partition("/")[0]), *agent)


def _find_agent(labels: Labels) -> str:
    return dict(labels).get(AGENT_LABEL, "")


def _render_instrument(instrument: Instrument, by_labels: Mapping[Labels, Series]) -> Iterator[str]:
    name = instrument.prometheus_name
    yield f"# HELP {name} {instrument.description}"
    yield f"# TYPE {name} {instrument.kind}"
    for labels, series in sorted(by_labels.items()):
        if instrument.kind != "histogram":
            yield f"{name}{_render_labels(labels)} {_render_number(series.total)}"
            continue
        count = 0
        for bound, bucket in zip((*map(str, instrument.bounds), "+Inf"), series.buckets, strict=True):
            count += bucket
            yield f"{name}_bucket{_render_labels((*labels, ('le', bound)))} {count}"
        yield f"{name}_sum{_render_labels(labels)} {_render_number(series.total)}"
        yield f"{name}_count{_render_labels(labels)} {count}"


def _render_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _render_labels(labels: Labels) -> str:
    pairs = ",".join(f'{name.replace(".", "_")}="{_escape(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _to_metric(instrument: Instrument, by_labels: Mapping[Labels, Series], start: int, now: int) -> "Metric":
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        NumberDataPoint,
        Sum,
    )

    cumulative = AggregationTemporality.CUMULATIVE
    if instrument.kind == "histogram":
        points = [
            HistogramDataPoint(
                dict(labels),
                start,
                now,
                sum(series.buckets),
                series.total,
                tuple(series.buckets),
                instrument.bounds,
                series.low,
                series.high,
            )
            for labels, series in by_labels.items()
        ]
        data = Histogram(points, cumulative)
    else:
        numbers = [NumberDataPoint(dict(labels), start, now, series.total) for labels, series in by_labels.items()]
        data = Gauge(numbers) if instrument.kind == "gauge" else Sum(numbers, cumulative, is_monotonic=True)
    return Metric(instrument.name, instrument.description, instrument.unit, data)


@contextmanager
def open_metric_sender(target: str, environ: Mapping[str, str], table: MetricTable) -> Generator["MetricSender"]:
    """Open a sender of a table, and send it once more after the block."""
    with _open_output(METRICS_VARIABLE, target) as output:
        sender = MetricSender(_make_metric_exporter(output), _resource(environ), table, _read_interval(environ))
        try:
            yield sender
        finally:
            sender.close()


def _read_interval(environ: Mapping[str, str]) -> float:
    """Return the seconds between two exports."""
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    milliseconds = int(text) if text.isdecimal() and len(text) <= MAX_INTERVAL_DIGITS else 0
    return (milliseconds or DEFAULT_EXPORT_INTERVAL_MS) / 1000


class MetricSender:
    """Counts spans, and sends the counts at intervals in a separate thread."""

    def __init__(self, exporter: MetricExporter, resource: "Resource", table: MetricTable, interval: float) -> None:
        self._exporter = exporter
        self._resource = resource
        self._interval = interval
        self._failed_count = 0
        self._has_reported = False
        self._closing = threading.Event()
        self._table = table
        self.enqueue = table.enqueue
        self._thread = threading.Thread(target=self._send, name="halter-metrics", daemon=True)
        self._thread.start()

    def trouble(self) -> str:
        if self._has_reported or not self._failed_count:
            return ""
        self._has_reported = True
        return (
            "Metrics cannot be sent. Check the collector and OTEL_EXPORTER_OTLP_ENDPOINT. Agents and the journal are "
            "not affected."
        )

    def close(self) -> None:
        self._closing.set()
        self._thread.join(FLUSH_TIMEOUT_SECONDS)
        self._exporter.shutdown()

    def _send(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._interval)
            self._export()

    def _export(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        try:
            is_sent = self._exporter.export(self._table.to_metrics_data(self._resource)) is MetricExportResult.SUCCESS
        except Exception:  # noqa: BLE001  a failing collector or disk may not stop an agent
            is_sent = False
        self._failed_count += 0 if is_sent else 1


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
