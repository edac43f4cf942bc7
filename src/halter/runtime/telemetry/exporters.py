"""Where spans and metrics are sent, as the environment names it."""

import os
import sys
from collections.abc import (
    Generator,
    Mapping,
)
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal, Protocol, TextIO

from halter.core.errors import ConfigError, render_install_command
from halter_agents import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

TRACES_VARIABLE: Final = "HALTER_TRACES"


TRACES_CONTENT_VARIABLE: Final = "HALTER_TRACES_CONTENT"


METRICS_VARIABLE: Final = "HALTER_METRICS"


TARGET_FORMS: Final = "write otlp, console, file:PATH or off"


FLUSH_TIMEOUT_SECONDS: Final = 2.0
"""Time limit for sending the remaining spans at the end."""


def read_target(environ: Mapping[str, str], variable: str) -> str:
    """Return the target of spans or metrics from the environment; "" if they are off."""
    text = environ.get(variable, "").strip()
    return "" if text.lower() in {"", "off", "0", "none"} else text


def is_content_traced(environ: Mapping[str, str]) -> bool:
    return environ.get(TRACES_CONTENT_VARIABLE, "").strip() == "1"


Output = TextIO | Literal["otlp"]


_LIBRARIES: Final = ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http")


@contextmanager
def open_output(variable: str, target: str) -> Generator[Output]:
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


def make_span_exporter(output: Output) -> "SpanExporter":
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


def make_metric_exporter(output: Output) -> MetricExporter:
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


def make_resource(environ: Mapping[str, str]) -> "Resource":
    from opentelemetry.sdk.resources import Resource

    name = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "halter"}
    return Resource.create({**name, "service.version": VERSION})
