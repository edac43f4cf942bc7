"""The history of a session: its timeline, and its events as a list without repetitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    GuardrailTriggered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
)
from halter.core.money import format_usd, micros_to_usd
from halter.core.ports import Stored
from halter.core.text import format_count
from halter.dashboard.labels import (
    explain_terminal,
    format_span,
    format_tokens,
    label_decision,
    label_outcome,
    label_state,
)
from halter.dashboard.widgets import BAD, DIM, GOOD, LOOK, ChartSpan
from halter.operations.queries import TimedEvent
from halter.present.events import summarize_event
from halter.present.moments import format_relative_moment

LANES: Final = ("turns", "requests", "calls", "refusals")
ZOOM: Final[dict[str, Any]] = {"dataZoom": [{"type": "inside", "filterMode": "none"}]}
"""The mouse wheel and a pinch zoom the timeline."""


def find_spans(events: Sequence[Stored | TimedEvent], now: int) -> list[ChartSpan]:
    """Return turns, requests and calls with start and end, and the refusals, caps and limits that stopped them."""
    spans: list[ChartSpan] = []
    open_spans: dict[str, ChartSpan] = {}
    for stored_event in events:
        match stored_event.event:
            case TurnStarted() as event:
                open_spans["turn"] = ChartSpan("turns", f"turn {event.turn}", stored_event.at)
            case TurnEnded() as event if "turn" in open_spans:
                spans.append(
                    _end_span(open_spans.pop("turn"), stored_event.at, f", {event.why}", fine=not event.sentence)
                )
            case RequestStarted() as event:
                open_spans[event.request] = ChartSpan("requests", event.model, stored_event.at, mood=GOOD)
            case RequestSettled() as event if event.request in open_spans:
                spans.append(_settle_span(open_spans.pop(event.request), stored_event.at, event.outcome))
            case CallStarted() as event:
                open_spans[event.call] = ChartSpan("calls", event.tool, stored_event.at, mood=LOOK)
            case CallSettled() as event if event.call in open_spans:
                spans.append(_settle_span(open_spans.pop(event.call), stored_event.at, event.outcome))
            case CallRefused() as event:
                spans.append(
                    ChartSpan("refusals", f"{event.tool}: {_name_outcome(event.outcome)}", stored_event.at, mood=BAD)
                )
            case RequestRefused() as event:
                spans.append(
                    ChartSpan("refusals", f"{event.model}: {_name_outcome(event.outcome)}", stored_event.at, mood=BAD)
                )
            case CostCapReached() as event:
                spans.append(
                    ChartSpan("refusals", f"{event.name}: the cap of {event.scope}", stored_event.at, mood=BAD)
                )
            case GuardrailTriggered() as event:
                spans.append(ChartSpan("refusals", f"limit {event.guardrail}", stored_event.at, mood=BAD))
            case _:
                pass
    return spans + [_end_span(span, now, ", running", fine=True) for span in open_spans.values()]


def find_skips(events: Sequence[Stored]) -> list[ChartSpan]:
    """Return turns that the gate skipped in a row, as one span."""
    spans: list[ChartSpan] = []
    current: ChartSpan | None = None
    for stored_event in events:
        match stored_event.event:
            case TurnSkipped() as event:
                start = stored_event.at if current is None else current.start
                current = ChartSpan(
                    "turns", f"{format_count(event.skips, 'turn')} skipped", start, stored_event.at, DIM
                )
            case TurnStarted() if current is not None:
                spans.append(current)
                current = None
            case _:
                pass
    return spans if current is None else [*spans, current]


def _settle_span(span: ChartSpan, at: int, outcome: str) -> ChartSpan:
    return _end_span(span, at, f", {_name_outcome(outcome)}", fine=outcome == "ok")


def _name_outcome(outcome: str) -> str:
    return label_outcome(outcome).text.casefold()


def _end_span(span: ChartSpan, at: int, suffix: str, *, fine: bool) -> ChartSpan:
    return ChartSpan(span.lane, f"{span.name}{suffix}", span.start, at, span.mood if fine else BAD)


def find_health_spans(events: Sequence[Stored], now: int) -> list[ChartSpan]:
    """Return each sensor's health, from each change to the next."""
    spans: list[ChartSpan] = []
    open_spans: dict[str, ChartSpan] = {}
    for stored_event in events:
        if isinstance(stored_event.event, SensorChanged):
            event = stored_event.event
            previous = open_spans.get(event.sensor)
            spans += [_end_span(previous, stored_event.at, "", fine=True)] if previous else []
            mood = GOOD if event.health == "ok" else BAD
            open_spans[event.sensor] = ChartSpan(
                event.sensor, f"{event.sensor}: {event.health}", stored_event.at, mood=mood
            )
    return spans + [_end_span(span, now, "", fine=True) for span in open_spans.values()]


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of a session's history; `count` is the number of consecutive occurrences."""

    seq: int
    at: int
    kind: str
    text: str
    count: int = 1


def list_happenings(events: Sequence[Stored]) -> list[Happening]:
    """List the events, oldest first. Consecutive skipped turns are one line, without the sleep between them."""
    names: dict[str, str] = {}
    entries: list[Happening] = []
    for index, stored_event in enumerate(events):
        previous, following = (
            events[position].event if 0 <= position < len(events) else None for position in (index - 1, index + 1)
        )
        match stored_event.event:
            case SessionWoken(recovered=False) if isinstance(following, TurnSkipped):
                continue
            case SessionParked(trouble="") if isinstance(previous, TurnSkipped):
                continue
            case TurnSkipped() if entries and entries[-1].kind == SKIPPED:
                entries[-1] = Happening(
                    entries[-1].seq, stored_event.at, SKIPPED, _describe(stored_event, names), entries[-1].count + 1
                )
                continue
            case RequestStarted() as event:
                names[event.request] = event.model
            case CallStarted() as event:
                names[event.call] = event.tool
            case _:
                pass
        entries.append(
            Happening(stored_event.seq, stored_event.at, _name_kind(stored_event), _describe(stored_event, names))
        )
    return entries


SKIPPED: Final = "turn skipped"


def _name_kind(stored_event: Stored) -> str:
    kind = stored_event.event.kind if isinstance(stored_event.event, Unknown) else stored_event.event.KIND
    return kind.replace("_", " ")


def _describe(stored_event: Stored, names: dict[str, str]) -> str:
    """Describe an event for the page, where its sentence for a terminal has codes, ids and commands."""
    match stored_event.event:
        case SessionEnded() as event:
            reason = explain_terminal(event.state, event.terminal_reason)
            return f"{label_state(event.state).text}{f': {reason}' if reason else ''}"
        case SessionParked(trouble="") as event if event.state not in ("SLEEPING", "PAUSED"):
            until = f", until {format_relative_moment(event.wake_at, stored_event.at)}" if event.wake_at else ""
            return f"{label_state(event.state).text}{until}"
        case DecisionAsked() as event:
            return f"{label_decision(event.about).text}: {event.name}"
        case CallSettled() as event:
            sentences = [names.get(event.call, event.call), label_outcome(event.outcome).text.casefold()]
            took = [f"{event.duration_ms:,} ms"] if event.duration_ms else []
            return _join(*sentences, *took, describe_cost(event), event.error)
        case RequestSettled(outcome="ok") as event:
            return _join(names.get(event.request, event.request), describe_usage(event), describe_cost(event))
        case _:
            return summarize_event(stored_event).text


def describe_usage(event: RequestSettled) -> str:
    """Format the token usage of a request; "" where it is unknown."""
    used = event.usage
    if used is None or not (used.input_tokens or used.output_tokens):
        return ""
    cached = f" ({format_tokens(used.cache_read_tokens)} cached)" if used.cache_read_tokens else ""
    return f"{format_tokens(used.input_tokens)} in{cached}, {format_tokens(used.output_tokens)} out"


def describe_cost(event: CallSettled | RequestSettled) -> str:
    return format_usd(micros_to_usd(event.charge.usd)) if event.charge and event.charge.usd else ""


def describe_request(start_event: tuple[str, int] | None, event: RequestSettled, at: int) -> str:
    """Describe the model, the usage, the cost and the duration of a request."""
    model, began_at = start_event or ("", at)
    took = format_span(at - began_at) if at > began_at else ""
    return _join(model, describe_usage(event), describe_cost(event), took)


def _join(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
