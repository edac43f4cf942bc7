"""Where spans go: nowhere, unless the environment says so.

| `HALTER_TRACES` | meaning |
|---|---|
| not set, or `off` | nowhere: nothing is imported, and no thread is started |
| `otlp` | to a collector, as the `OTEL_EXPORTER_OTLP_…` variables say; else to this machine, port 4318 |
| `console` | to the standard error |
| `file:PATH` | to a file, as JSON lines |
"""

import os
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Final, TextIO

from halter import __version__
from halter.app.traces import Span
from halter.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

TRACES: Final = "HALTER_TRACES"
CONTENT: Final = "HALTER_TRACES_CONTENT"
WAYS: Final = "write otlp, console, file:PATH or off"

MOST: Final = 2048
"""So many spans may wait to be sent."""
TOGETHER: Final = 512
"""So many are sent at once."""
LAST_WORDS: Final = 2.0
"""For so many seconds it is tried, at the end, to send what is left."""


def wanted(environ: Mapping[str, str]) -> str:
    """Tell where spans are to go; nothing means nowhere."""
    said = environ.get(TRACES, "").strip()
    return "" if said.lower() in {"", "off", "0", "none"} else said


def content_wanted(environ: Mapping[str, str]) -> bool:
    """Tell whether somebody asked for what was said, in as many words."""
    return environ.get(CONTENT, "").strip() == "1"


@contextmanager
def sending(way: str, environ: Mapping[str, str]) -> Generator["Sending"]:
    """Send spans until the end, and then what is left."""
    with _exporting(way) as exporter:
        outlet = Sending(exporter, _resource(environ))
        try:
            yield outlet
        finally:
            outlet.close()


class Sending:
    """Sends spans in a thread of its own. Where they come faster than they are taken, some are lost, and counted."""

    def __init__(self, exporter: "SpanExporter", resource: "Resource", most: int = MOST) -> None:
        self._exporter = exporter
        self._resource = resource
        self._spans: Queue[Span | None] = Queue(most)
        self.lost = 0
        self._said = False
        self._thread = threading.Thread(target=self._send, name="halter-traces", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Take a span, or lose it; never wait."""
        try:
            self._spans.put_nowait(span)
        except Full:
            self.lost += 1

    def trouble(self) -> str:
        """Say once that spans are lost."""
        if self._said or not self.lost:
            return ""
        self._said = True
        return (
            "Traces are being lost, because they are not taken as fast as they come: look at the collector, and at "
            "OTEL_EXPORTER_OTLP_ENDPOINT. Agents and the journal are not touched by it."
        )

    def close(self) -> None:
        """Send what is left, if somebody takes it."""
        try:
            self._spans.put(None, timeout=LAST_WORDS)
        except Full:
            self.lost += 1
        self._thread.join(LAST_WORDS)
        self._exporter.shutdown()

    def _send(self) -> None:
        while (first := self._spans.get()) is not None:
            batch, last = self._waiting(first)
            self._export([_written(span, self._resource) for span in batch])
            if last:
                return

    def _waiting(self, first: Span) -> tuple[list[Span], bool]:
        """Take all that waits, up to a batch; tell whether that was the last of it."""
        batch = [first]
        while len(batch) < TOGETHER:
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
        except Exception:  # noqa: BLE001  what a collector or a disk does is no affair of the agents
            sent = False
        self.lost += 0 if sent else len(batch)


@contextmanager
def _exporting(way: str) -> Generator["SpanExporter"]:
    try:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter
    except ImportError as missing:
        raise _missing() from missing
    _keep_quiet()
    if way == "otlp":
        yield _otlp()
    elif way == "console":
        yield ConsoleSpanExporter(out=sys.stderr, formatter=_line)
    elif way.startswith("file:") and way != "file:":
        with _file(way.removeprefix("file:")) as file:
            yield ConsoleSpanExporter(out=file, formatter=_line)
    else:
        raise ConfigError(f"{TRACES} is {way!r}, which is no place for traces: {WAYS}.")


def _otlp() -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as missing:
        raise _missing() from missing
    return OTLPSpanExporter()


def _missing() -> ConfigError:
    return ConfigError(f"{TRACES} is set, but OpenTelemetry is not here: pip install 'halter[telemetry]', or unset it.")


def _file(path: str) -> TextIO:
    """Open a file that only its owner may read."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Traces cannot be written to {path!r} ({why}): name another file in {TRACES}.") from error


def _line(span: "ReadableSpan") -> str:
    return span.to_json(indent=None) + "\n"


def _keep_quiet() -> None:
    """Keep the exporter's complaints off the terminal: what people need to know is told once, by `trouble`."""
    import logging

    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


def _resource(environ: Mapping[str, str]) -> "Resource":
    from opentelemetry.sdk.resources import Resource

    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "halter"}
    return Resource.create({**named, "service.version": __version__})


def _written(span: Span, resource: "Resource") -> "ReadableSpan":
    """Write a span as the library has them, with the ids that it has already."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: int) -> SpanContext:
        return SpanContext(span.trace, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    failed = {"error.type": span.error} if span.error else {}
    return ReadableSpan(
        span.name,
        context=context(span.span),
        parent=None if span.parent is None else context(span.parent),
        resource=resource,
        attributes={**span.attributes, **failed},
        kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
        start_time=span.start * 1000,
        end_time=span.end * 1000,
        instrumentation_scope=InstrumentationScope("halter", __version__),
    )
