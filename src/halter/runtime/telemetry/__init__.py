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
