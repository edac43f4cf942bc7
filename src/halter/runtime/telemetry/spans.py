"""Sends spans."""

import threading
from collections.abc import (
    Generator,
    Mapping,
)
from contextlib import contextmanager
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final

from halter.state.trace import Span
from halter_agents import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
from halter.runtime.telemetry.exporters import (
    FLUSH_TIMEOUT_SECONDS,
    TRACES_VARIABLE,
    make_resource,
    make_span_exporter,
    open_output,
)

MAX_PENDING_SPANS: Final = 2048
"""Maximum number of spans that wait to be sent."""


SPAN_BATCH: Final = 512
"""Maximum number of spans in one export."""


@contextmanager
def open_span_sender(target: str, environ: Mapping[str, str]) -> Generator["SpanSender"]:
    """Open a sender, and send its remaining spans after the block."""
    with open_output(TRACES_VARIABLE, target) as output:
        sender = SpanSender(make_span_exporter(output), make_resource(environ))
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
