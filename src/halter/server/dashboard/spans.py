"""What happened in a session as things on a timeline, and its numbers as lines. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from halter.app.desk.looking import Saw
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    GuardrailTriggered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SensorChanged,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
)
from halter.core.ports import Stored
from halter.server.dashboard.charts import BAD, DIM, GOOD, LOOK, Point, Span

LANES: Final = ("turns", "requests", "calls", "brakes")
MOST_LINES: Final = 5


def spans_of(events: Sequence[Stored], now: int) -> list[Span]:
    """Find turns, requests and calls with their beginning and end, and what stopped any of them."""
    made: list[Span] = []
    begun: dict[str, Span] = {}
    for stored in events:
        match stored.event:
            case TurnStarted() as event:
                begun["turn"] = Span("turns", f"turn {event.turn}", stored.at)
            case TurnEnded() as event if "turn" in begun:
                made.append(_ended(begun.pop("turn"), stored.at, f", {event.why}", fine=not event.sentence))
            case RequestStarted() as event:
                begun[event.request] = Span("requests", event.model, stored.at, mood=GOOD)
            case RequestSettled() as event if event.request in begun:
                made.append(
                    _ended(begun.pop(event.request), stored.at, f", {event.outcome}", fine=event.outcome == "ok")
                )
            case CallStarted() as event:
                begun[event.call] = Span("calls", event.tool, stored.at, mood=LOOK)
            case CallSettled() as event if event.call in begun:
                made.append(_ended(begun.pop(event.call), stored.at, f", {event.outcome}", fine=event.outcome == "ok"))
            case CallRefused() as event:
                made.append(Span("brakes", f"{event.tool}: {event.outcome}", stored.at, mood=BAD))
            case RequestRefused() as event:
                made.append(Span("brakes", f"{event.model}: {event.outcome}", stored.at, mood=BAD))
            case CostCapReached() as event:
                made.append(Span("brakes", f"{event.name}: the cap of {event.scope}", stored.at, mood=BAD))
            case GuardrailTriggered() as event:
                made.append(Span("brakes", f"guardrail {event.guardrail}", stored.at, mood=BAD))
            case TurnSkipped() as event:
                made.append(Span("turns", f"skipped by {event.stage}", stored.at, mood=DIM))
            case _:
                pass
    return made + [_ended(span, now, ", under way", fine=True) for span in begun.values()]


def _ended(span: Span, at: int, how: str, *, fine: bool) -> Span:
    return Span(span.lane, f"{span.name}{how}", span.start, at, span.mood if fine else BAD)


def healths_of(events: Sequence[Stored], now: int) -> list[Span]:
    """Tell how each sensor was, from each change to the next."""
    made: list[Span] = []
    last: dict[str, Span] = {}
    for stored in events:
        if isinstance(stored.event, SensorChanged):
            event = stored.event
            before = last.get(event.sensor)
            made += [_ended(before, stored.at, "", fine=True)] if before else []
            mood = GOOD if event.health == "ok" else BAD
            last[event.sensor] = Span(event.sensor, f"{event.sensor}: {event.health}", stored.at, mood=mood)
    return made + [_ended(span, now, "", fine=True) for span in last.values()]


def numbers_of(seen: Sequence[Saw]) -> Mapping[str, Sequence[Point]]:
    """Find the facts that are numbers and were seen more than once; where many are, those that changed most often."""
    found: dict[str, list[Point]] = {}
    for saw in seen:
        for name, value in saw.values.items():
            if _is_number(value):
                found.setdefault(name, []).append((saw.at, float(value)))
    found = {name: points for name, points in found.items() if len(points) > 1}
    most = sorted(found, key=lambda name: -len({value for _, value in found[name]}))[:MOST_LINES]
    return {name: found[name] for name in found if name in most}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


LARGEST: Final = 1e15
"""Larger numbers are names rather than amounts, or no numbers at all."""
