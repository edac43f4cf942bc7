"""Metrics, counted from spans: their instruments, their table, and what sends it."""

import asyncio
import threading
from bisect import bisect_left
from collections.abc import (
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreError
from halter.core.money import DOLLAR, BudgetRow
from halter.core.ports import Store
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.runtime.budgets import read_current_budgets
from halter.state.trace import Span
from halter_agents import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData
    from opentelemetry.sdk.resources import Resource
from halter.runtime.telemetry.exporters import (
    FLUSH_TIMEOUT_SECONDS,
    METRICS_VARIABLE,
    MetricExporter,
    make_metric_exporter,
    make_resource,
    open_output,
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
    with open_output(METRICS_VARIABLE, target) as output:
        sender = MetricSender(make_metric_exporter(output), make_resource(environ), table, _read_interval(environ))
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
