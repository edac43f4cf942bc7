"""Pages of sessions: the list, one session with timeline, hot state and transcript, and its receipt."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nicegui.element import Element

from halter.core.clock import format_duration
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    CostCapReached,
    FindingEmitted,
    GuardrailTriggered,
    MessageAdded,
    NotificationQueued,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SensorChanged,
    SessionStarted,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
)
from halter.core.ids import session_stream
from halter.core.ports import Stored, read_body
from halter.core.rows import SessionRow
from halter.dashboard.page import REASON, FeedChanges, FormField, FormValues, OpenPage, RefreshPage, open_dialog
from halter.dashboard.parts import (
    BAD,
    DIM,
    GOOD,
    LOOK,
    ChartSpan,
    KeyedList,
    Plot,
    Point,
    add_box,
    add_button,
    add_cell,
    add_facts,
    add_link,
    add_section,
    add_sheet,
    add_table,
    add_text,
    chart_history,
    chart_timeline,
)
from halter.operations import control, queries
from halter.operations.queries import FactView, Saw
from halter.present.events import describe_event, format_hour, format_relative_moment, summarize_event
from halter.present.receipt import build_receipt_sheet

LANES: Final = ("turns", "requests", "calls", "brakes")
MAX_SERIES: Final = 5


def find_spans(events: Sequence[Stored], now: int) -> list[ChartSpan]:
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
                made.append(
                    _end_span(begun.pop(event.request), stored.at, f", {event.outcome}", fine=event.outcome == "ok")
                )
            case CallStarted() as event:
                begun[event.call] = ChartSpan("calls", event.tool, stored.at, mood=LOOK)
            case CallSettled() as event if event.call in begun:
                made.append(
                    _end_span(begun.pop(event.call), stored.at, f", {event.outcome}", fine=event.outcome == "ok")
                )
            case CallRefused() as event:
                made.append(ChartSpan("brakes", f"{event.tool}: {event.outcome}", stored.at, mood=BAD))
            case RequestRefused() as event:
                made.append(ChartSpan("brakes", f"{event.model}: {event.outcome}", stored.at, mood=BAD))
            case CostCapReached() as event:
                made.append(ChartSpan("brakes", f"{event.name}: the cap of {event.scope}", stored.at, mood=BAD))
            case GuardrailTriggered() as event:
                made.append(ChartSpan("brakes", f"guardrail {event.guardrail}", stored.at, mood=BAD))
            case TurnSkipped() as event:
                made.append(ChartSpan("turns", f"skipped by {event.stage}", stored.at, mood=DIM))
            case _:
                pass
    return made + [_end_span(span, now, ", under way", fine=True) for span in begun.values()]


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


def find_number_series(seen: Sequence[Saw]) -> Mapping[str, Sequence[Point]]:
    """Returns numeric facts that were seen more than once; of many, those that changed most often."""
    found: dict[str, list[Point]] = {}
    for saw in seen:
        for name, value in saw.values.items():
            if _is_number(value):
                found.setdefault(name, []).append((saw.at, float(value)))
    found = {name: points for name, points in found.items() if len(points) > 1}
    most = sorted(found, key=lambda name: -len({value for _, value in found[name]}))[:MAX_SERIES]
    return {name: found[name] for name in found if name in most}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_CHARTED_NUMBER


MAX_CHARTED_NUMBER: Final = 1e15
"""Larger numbers are ids rather than amounts."""


class HotStatePanel:
    """The hot state of a session's page."""

    def __init__(self, room: OpenPage, session: str) -> None:
        self._room = room
        self._session = session
        self._none = add_text("", "h-none")
        self._facts = KeyedList[tuple[str, FactView]](
            add_table("Hot state", ("fact", "value", "age", "by")), self._fact
        )
        self._history = Plot("How the numbers of the hot state went", "")
        self._healths = Plot("Health of the sensors over time", "")
        self._sensors = KeyedList[SensorChanged](add_box("ul", "h-list", "Sensors"), _sensor)

    async def show(self) -> None:
        state = await queries.hot_state(self._room.desk, self._session)
        self._none.say("" if state.facts else "It has no hot state.")
        self._facts.show({name: (name, fact) for name, fact in state.facts.items()})

    async def show_history(self, events: Sequence[Stored]) -> None:
        numbers = find_number_series(await queries.hot_state_history(self._room.desk, self._session))
        self._history.show(chart_history(numbers), empty=not numbers)
        found = await queries.sensors(self._room.desk, self._session)
        self._sensors.show({(name, event.health): event for name, event in found.items()})
        healths = find_health_spans(events, self._room.now)
        lanes = sorted({span.lane for span in healths})
        self._healths.show(chart_timeline(healths, lanes), empty=not healths, lanes=len(lanes))

    def _fact(self, named: tuple[str, FactView]) -> Callable[[tuple[str, FactView]], None]:
        with add_box("tr"):
            add_cell(named[0], "h-what")
            value, age, by = add_cell(), add_cell("", "h-short"), add_cell()

        def show(named: tuple[str, FactView]) -> None:
            fact = named[1]
            value.say(_describe_written(fact))
            age.say(format_duration(max(0, self._room.now - fact.at)) or "0s")
            by.say(fact.by)

        show(named)
        return show


def _describe_written(fact: FactView) -> str:
    return fact.value if isinstance(fact.value, str) else json.dumps(fact.value, ensure_ascii=False)


def _sensor(event: SensorChanged) -> Callable[[SensorChanged], None]:
    with add_box("li", "h-row"):
        add_text(event.sensor, "h-what")
        add_text(f"{event.health} {event.sentence}".strip(), "h-good" if event.health == "ok" else "h-bad")
    return lambda _: None


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text and its speaker."""

    at: int
    by: str
    text: str


class TranscriptPanel:
    """The transcript of a session's page. Bodies are read once."""

    def __init__(self, room: OpenPage) -> None:
        self._room = room
        self._known: dict[int, Utterance | None] = {}
        self._shown = KeyedList[Utterance](add_box("div"), _build_utterance, "Nothing was said yet.")

    async def show(self, events: Sequence[Stored]) -> None:
        """Shows what these events say, the newest last."""
        tools = {stored.event.call: stored.event.tool for stored in events if isinstance(stored.event, CallStarted)}
        for stored in events:
            if stored.seq not in self._known:
                self._known[stored.seq] = await self._words(stored, tools)
        kept = {stored.seq: self._known[stored.seq] for stored in events}
        self._known = kept
        self._shown.show({seq: one for seq, one in kept.items() if one is not None})

    async def _words(self, stored: Stored, tools: dict[str, str]) -> Utterance | None:
        by = _speaker(stored, tools)
        if not by:
            return None
        text = describe_event(stored.event, await read_body(self._room.app.store, stored))
        return (
            Utterance(stored.at, by, text or ("(erased)" if stored.erased else "")) if text or stored.erased else None
        )


def _speaker(stored: Stored, tools: dict[str, str]) -> str:
    """Returns the speaker of an event's text, if it is part of the transcript."""
    match stored.event:
        case SessionStarted():
            return "task"
        case TurnStarted():
            return f"to the model, turn {stored.event.turn}"
        case MessageAdded():
            return f"to the model, because of {stored.event.reason}"
        case ContextGiven() | ContextCut():
            return "to the model, from before"
        case RequestSettled():
            return "model"
        case CallSettled():
            return f"tool {tools.get(stored.event.call, stored.event.call)}"
        case FindingEmitted():
            return f"finding, {stored.event.severity}"
        case NotificationQueued():
            return f"notification over {stored.event.channel}"
        case _:
            return ""


def _build_utterance(one: Utterance) -> Callable[[Utterance], None]:
    with add_box("div", "h-said"):
        add_text(f"{format_hour(one.at)} {one.by}", "h-from")
        add_text(one.text)
    return lambda _: None


MAX_EVENTS_DRAWN = 400
"""How many of the newest events are charted and searched; receipt and export have all of them."""
MAX_EVENTS_LISTED = 100
"""How many of them are listed: each line takes time on the agents' event loop."""


async def build_session_page(room: OpenPage, name: str) -> RefreshPage:
    row = await room.desk.session(name)
    with add_section("Session", card=True):
        head = add_box("div")
        _buttons(room, row)
    with add_section("Turns, calls and brakes", card=True):
        plot = Plot("Turns, requests, calls and brakes over time", "Nothing happened yet.")
    with add_box("div", "h-two"):
        with add_section("What happens", card=True):
            lines = KeyedList[Stored](
                add_box("ol", "h-events", "Events", tabindex="0"), _event, "Nothing happened yet."
            )
        with add_section("What it knows", card=True):
            knowing = HotStatePanel(room, row.session)
    with add_section("What was said", card=True):
        saying = TranscriptPanel(room)

    async def refresh(grown: FeedChanges) -> None:
        await knowing.show()
        if not grown.of(session_stream(row.session)):
            return
        events = await queries.newest_events(room.desk, row.session, MAX_EVENTS_DRAWN)
        _show_head(room, head, await room.desk.session(row.session))
        plot.show(chart_timeline(find_spans(events, room.now), LANES), empty=not find_spans(events, room.now))
        lines.show({stored.seq: stored for stored in reversed(events[-MAX_EVENTS_LISTED:])})
        await saying.show(events)
        await knowing.show_history(events)

    await refresh(FeedChanges(everything=True))
    return refresh


def _show_head(room: OpenPage, head: Element, row: SessionRow) -> None:
    head.clear()
    with head:
        add_facts(_facts(room, row))


def _facts(room: OpenPage, row: SessionRow) -> Sequence[tuple[str, str]]:
    return [
        ("agent", f"{row.agent} ({row.kind})"),
        ("state", f"{row.state} {row.terminal_reason}".strip()),
        ("began", format_relative_moment(row.started_at, room.now)),
        ("ended", format_relative_moment(row.ended_at, room.now) if row.ended_at else ""),
        ("next wake", format_relative_moment(row.due_at, room.now) if row.due_at else ""),
        ("trigger", row.trigger),
        ("part of", row.parent),
    ]


def _event(stored: Stored) -> Callable[[Stored], None]:
    kind = stored.event.kind if isinstance(stored.event, Unknown) else stored.event.KIND
    with add_box("li"):
        add_text(format_hour(stored.at), "h-at")
        add_text(kind.replace("_", " "), "h-kind")
        add_text(summarize_event(stored).text)
    return lambda _: None


def _buttons(room: OpenPage, row: SessionRow) -> None:
    with add_box("div", "h-row").style("margin-top: 0.7rem"):
        add_link("Receipt", f"/receipt/{row.session}")
        add_link("Export", f"/download/session/{row.session}").props["download"] = ""
        if room.may("operator") and row.ended_at is None:
            add_button("Message…", lambda: _message(room, row))
            add_button("Cancel session…", lambda: _cancel(room, row), "stop")


def _message(room: OpenPage, row: SessionRow) -> None:
    async def do(given: FormValues) -> str:
        await control.tell(room.desk, row.session, given["text"])
        return f"{row.session} is told, and wakes."

    text = FormField("text", "Your words", "", "text")
    open_dialog(room, f"Say something to {row.session}?", "It sees your words in its next turn.", (text,), "Say it", do)


def _cancel(room: OpenPage, row: SessionRow) -> None:
    async def do(given: FormValues) -> str:
        came = await control.cancel(room.desk, row.session, given["reason"])
        return f"Session {came.session} is cancelled. {came.sentence}"

    says = "It ends for good: what it has in flight is stopped, and nothing of it starts again."
    open_dialog(room, f"Cancel {row.session}?", says, (REASON,), "Cancel the session", do, "stop")


SESSION_COLUMNS = ("session", "agent", "kind", "state", "began", "ended", "next wake", "trigger")
PAGE = 50


async def build_sessions_page(room: OpenPage) -> RefreshPage:
    shown = [PAGE]
    with add_section("Sessions", card=True):
        lines = KeyedList[SessionRow](add_table("Sessions", SESSION_COLUMNS), lambda row: _row(room, row))
        none = add_text("", "h-none")
        older = add_button("Older", lambda: None)

    async def refresh(_: FeedChanges) -> None:
        rows = await queries.sessions(room.desk, limit=shown[0] + 1)
        lines.show({row.session: row for row in rows[: shown[0]]})
        older.set_visibility(len(rows) > shown[0])
        none.say("" if rows else "There is no session yet.")

    async def more() -> None:
        shown[0] += PAGE
        await refresh(FeedChanges())

    older.on_click(more)
    await refresh(FeedChanges())
    return refresh


def _row(room: OpenPage, row: SessionRow) -> Callable[[SessionRow], None]:
    with add_box("tr"):
        with add_box("td"):
            add_link(row.session, f"/session/{row.session}")
        add_cell(row.agent)
        add_cell(row.kind)
        state = add_cell()
        add_cell(format_relative_moment(row.started_at, room.now), "h-short")
        ended, wake = add_cell("", "h-short"), add_cell("", "h-short")
        add_cell(row.trigger)

    def show(row: SessionRow) -> None:
        state.say(f"{row.state} {row.terminal_reason}".strip())
        ended.say(format_relative_moment(row.ended_at, room.now) if row.ended_at else "")
        wake.say(format_relative_moment(row.due_at, room.now) if row.due_at else "")

    show(row)
    return show


async def build_receipt_page(room: OpenPage, name: str) -> RefreshPage:
    """Shows the receipt as it was when the page was opened."""
    made = await queries.receipt(room.desk, name)
    with add_section(f"Receipt of {made.session}", card=True):
        with add_box("div", "h-row"):
            add_link("Session", f"/session/{made.session}")
            add_link("Export with its journal", f"/download/session/{made.session}").props["download"] = ""
        add_sheet(build_receipt_sheet(made))

    async def refresh(_: FeedChanges) -> None:
        pass

    return refresh
