"""The history of a session: its timeline, and what happened, in words and without repetition."""

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
from halter.core.money import micros_to_usd
from halter.core.ports import Stored
from halter.core.text import format_count
from halter.dashboard.labels import (
    explain_terminal,
    format_money,
    format_span,
    format_tokens,
    label_decision,
    label_outcome,
    label_state,
)
from halter.dashboard.parts import BAD, DIM, GOOD, LOOK, ChartSpan
from halter.operations.queries import TimedEvent
from halter.present.events import format_relative_moment, summarize_event

LANES: Final = ("turns", "requests", "calls", "brakes")
ZOOM: Final[dict[str, Any]] = {"dataZoom": [{"type": "inside", "filterMode": "none"}]}
"""The wheel and two fingers zoom the timeline."""


def find_spans(events: Sequence[Stored | TimedEvent], now: int) -> list[ChartSpan]:
    """Returns turns, requests and calls with start and end, and what stopped any of them."""
    made: list[ChartSpan] = []
    begun: dict[str, ChartSpan] = {}
    for stored in events:
        match stored.event:
            case TurnStarted() as event:
                begun["turn"] = ChartSpan("turns", f"turn {event.turn}", stored.at)
            case TurnEnded() as event if "turn" in begun:
                made.append(_end_span(begun.pop("turn"), stored.at, f", {event.why}", fine=not event.sentence))
            case RequestStarted() as event:
                begun[event.request] = ChartSpan("requests", event.model, stored.at, mood=GOOD)
            case RequestSettled() as event if event.request in begun:
                made.append(_settle_span(begun.pop(event.request), stored.at, event.outcome))
            case CallStarted() as event:
                begun[event.call] = ChartSpan("calls", event.tool, stored.at, mood=LOOK)
            case CallSettled() as event if event.call in begun:
                made.append(_settle_span(begun.pop(event.call), stored.at, event.outcome))
            case CallRefused() as event:
                made.append(ChartSpan("brakes", f"{event.tool}: {_name_outcome(event.outcome)}", stored.at, mood=BAD))
            case RequestRefused() as event:
                made.append(ChartSpan("brakes", f"{event.model}: {_name_outcome(event.outcome)}", stored.at, mood=BAD))
            case CostCapReached() as event:
                made.append(ChartSpan("brakes", f"{event.name}: the cap of {event.scope}", stored.at, mood=BAD))
            case GuardrailTriggered() as event:
                made.append(ChartSpan("brakes", f"guardrail {event.guardrail}", stored.at, mood=BAD))
            case _:
                pass
    return made + [_end_span(span, now, ", under way", fine=True) for span in begun.values()]


def find_skips(events: Sequence[Stored]) -> list[ChartSpan]:
    """Returns turns that the gate skipped in a row, as one span."""
    made: list[ChartSpan] = []
    run: ChartSpan | None = None
    for stored in events:
        match stored.event:
            case TurnSkipped() as event:
                start = stored.at if run is None else run.start
                run = ChartSpan("turns", f"{format_count(event.skips, 'turn')} skipped", start, stored.at, DIM)
            case TurnStarted() if run is not None:
                made.append(run)
                run = None
            case _:
                pass
    return made if run is None else [*made, run]


def _settle_span(span: ChartSpan, at: int, outcome: str) -> ChartSpan:
    return _end_span(span, at, f", {_name_outcome(outcome)}", fine=outcome == "ok")


def _name_outcome(outcome: str) -> str:
    return label_outcome(outcome).text.casefold()


def _end_span(span: ChartSpan, at: int, how: str, *, fine: bool) -> ChartSpan:
    return ChartSpan(span.lane, f"{span.name}{how}", span.start, at, span.mood if fine else BAD)


def find_health_spans(events: Sequence[Stored], now: int) -> list[ChartSpan]:
    """Returns each sensor's health, from each change to the next."""
    made: list[ChartSpan] = []
    last: dict[str, ChartSpan] = {}
    for stored in events:
        if isinstance(stored.event, SensorChanged):
            event = stored.event
            before = last.get(event.sensor)
            made += [_end_span(before, stored.at, "", fine=True)] if before else []
            mood = GOOD if event.health == "ok" else BAD
            last[event.sensor] = ChartSpan(event.sensor, f"{event.sensor}: {event.health}", stored.at, mood=mood)
    return made + [_end_span(span, now, "", fine=True) for span in last.values()]


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of a session's history; `count` is how often it happened in a row."""

    seq: int
    at: int
    kind: str
    text: str
    count: int = 1


def list_happenings(events: Sequence[Stored]) -> list[Happening]:
    """Lists what happened, the oldest first. Turns skipped in a row are one line, without the sleep between them."""
    names: dict[str, str] = {}
    made: list[Happening] = []
    for place, stored in enumerate(events):
        before, after = (events[at].event if 0 <= at < len(events) else None for at in (place - 1, place + 1))
        match stored.event:
            case SessionWoken(recovered=False) if isinstance(after, TurnSkipped):
                continue
            case SessionParked(trouble="") if isinstance(before, TurnSkipped):
                continue
            case TurnSkipped() if made and made[-1].kind == SKIPPED:
                made[-1] = Happening(made[-1].seq, stored.at, SKIPPED, _describe(stored, names), made[-1].count + 1)
                continue
            case RequestStarted() as event:
                names[event.request] = event.model
            case CallStarted() as event:
                names[event.call] = event.tool
            case _:
                pass
        made.append(Happening(stored.seq, stored.at, _name_kind(stored), _describe(stored, names)))
    return made


SKIPPED: Final = "turn skipped"


def _name_kind(stored: Stored) -> str:
    kind = stored.event.kind if isinstance(stored.event, Unknown) else stored.event.KIND
    return kind.replace("_", " ")


def _describe(stored: Stored, names: dict[str, str]) -> str:
    """Puts an event into words of the page, where its sentence for a terminal has codes, ids and commands."""
    match stored.event:
        case SessionEnded() as event:
            why = explain_terminal(event.state, event.terminal_reason)
            return f"{label_state(event.state).text}{f': {why}' if why else ''}"
        case SessionParked(trouble="") as event if event.state not in ("SLEEPING", "PAUSED"):
            until = f", until {format_relative_moment(event.wake_at, stored.at)}" if event.wake_at else ""
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
            return summarize_event(stored).text


def describe_usage(event: RequestSettled) -> str:
    """Says what a model read and wrote; "" where that is not known."""
    used = event.usage
    if used is None or not (used.input_tokens or used.output_tokens):
        return ""
    cached = f" ({format_tokens(used.cache_read_tokens)} cached)" if used.cache_read_tokens else ""
    return f"{format_tokens(used.input_tokens)} in{cached}, {format_tokens(used.output_tokens)} out"


def describe_cost(event: CallSettled | RequestSettled) -> str:
    return format_money(micros_to_usd(event.charge.usd)) if event.charge and event.charge.usd else ""


def describe_request(started: tuple[str, int] | None, event: RequestSettled, at: int) -> str:
    """Says which model answered, how much it read and wrote, what that cost, and how long it took."""
    model, began_at = started or ("", at)
    took = format_span(at - began_at) if at > began_at else ""
    return _join(model, describe_usage(event), describe_cost(event), took)


def _join(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
