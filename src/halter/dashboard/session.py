"""Pages of sessions: the list, one session with timeline, hot state and transcript, and its receipt."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

import msgspec
from nicegui import ui

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
from halter.core.messages import Reply
from halter.core.money import ZERO_USD, micros_to_usd
from halter.core.ports import Stored, read_body
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.dashboard.home import build_decision_card
from halter.dashboard.labels import (
    KINDS,
    explain_end,
    format_age,
    format_money,
    format_span,
    format_tokens,
    label_outcome,
    label_state,
    shorten_id,
)
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
    add_arguments,
    add_box,
    add_button,
    add_cell,
    add_chip,
    add_icon,
    add_id,
    add_link,
    add_meter,
    add_preformatted,
    add_section,
    add_sheet,
    add_stat,
    add_table,
    add_text,
    chart_history,
    chart_timeline,
    make_legible,
    set_chip,
    set_meter,
)
from halter.operations import control, queries
from halter.operations.decisions import WaitingDecision, waiting
from halter.operations.queries import FactView, Saw, WorkDone
from halter.present.events import describe_event, format_hour, format_relative_moment, summarize_event
from halter.present.receipt import build_receipt_sheet

LANES: Final = ("turns", "requests", "calls", "brakes")
MAX_SERIES: Final = 5
ZOOM: Final[dict[str, Any]] = {"dataZoom": [{"type": "inside", "filterMode": "none"}]}
"""The wheel and two fingers zoom the timeline."""


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
        for whole, whole_value in saw.values.items():
            for name, value in list_values(whole, whole_value):
                if _is_number(value):
                    found.setdefault(name, []).append((saw.at, float(value)))
    found = {name: points for name, points in found.items() if len(points) > 1}
    most = sorted(found, key=lambda name: -len({value for _, value in found[name]}))[:MAX_SERIES]
    return {name: found[name] for name in found if name in most}


def list_values(name: str, value: Any) -> Sequence[tuple[str, Any]]:
    """Lists the values of a fact: each of an object that holds a number, by its own name, or the fact as it is."""
    try:
        parts = msgspec.convert(value, dict[str, Any])
    except msgspec.ValidationError:
        parts = {}
    if not any(map(_is_number, parts.values())):
        return [(name, value)]
    return [(f"{name}.{key}", each) for key, each in parts.items()]


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
            value.say(describe_value(fact.value))
            age.say(format_duration(max(0, self._room.now - fact.at)) or "0s")
            by.say(fact.by)

        show(named)
        return show


def describe_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
    icon: str = "chat"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call with its outcome, once there is one."""

    at: int
    tool: str
    asked: str
    outcome: str = ""
    answered: str = ""
    millis: int = 0
    usd: int = 0


class TranscriptPanel:
    """What was said and done in a session: each call stands with its outcome. Bodies are read once."""

    def __init__(self, room: OpenPage) -> None:
        self._room = room
        self._bodies: dict[int, str] = {}
        self._shown = KeyedList[Utterance | ToolUse](
            add_box("div", "h-talk"), lambda one: _build_spoken(room, one), "Nothing was said yet."
        )

    async def show(self, events: Sequence[Stored]) -> None:
        """Shows what these events say, the newest last."""
        found: dict[int, Utterance | ToolUse] = {}
        places: dict[str, int] = {}
        for stored in events:
            match stored.event:
                case CallStarted() as event:
                    places[event.call] = stored.seq
                    found[stored.seq] = ToolUse(stored.at, event.tool, await self._words(stored))
                case CallSettled() as event if event.call in places:
                    place = places[event.call]
                    found[place] = _settle(found[place], event, await self._words(stored))
                case CallRefused() as event:
                    found[stored.seq] = ToolUse(stored.at, event.tool, "", event.outcome, event.sentence)
                case _:
                    by, icon = _speaker(stored)
                    if by and (text := await self._words(stored)):
                        found[stored.seq] = Utterance(stored.at, by, text, icon)
        kept = {stored.seq for stored in events}
        self._bodies = {seq: text for seq, text in self._bodies.items() if seq in kept}
        self._shown.show({(seq, getattr(one, "outcome", "")): one for seq, one in found.items()})

    async def _words(self, stored: Stored) -> str:
        if stored.seq not in self._bodies:
            body = await read_body(self._room.app.store, stored)
            self._bodies[stored.seq] = _read_words(stored, body) or ("(erased)" if stored.erased else "")
        return self._bodies[stored.seq]


def _settle(use: Utterance | ToolUse, event: CallSettled, answered: str) -> Utterance | ToolUse:
    if not isinstance(use, ToolUse):
        return use
    usd = event.charge.usd if event.charge else 0
    return replace(use, outcome=event.outcome, answered=answered or event.error, millis=event.duration_ms, usd=usd)


def _read_words(stored: Stored, body: bytes) -> str:
    """Returns the text of an event. The calls of a reply are left out: they are shown with their outcomes."""
    if isinstance(stored.event, RequestSettled):
        if stored.event.outcome != "ok":
            return stored.event.error
        try:
            return msgspec.json.decode(body, type=Reply).text
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
    return describe_event(stored.event, body)


def _speaker(stored: Stored) -> tuple[str, str]:
    """Returns the speaker of an event's text and an icon, if it is part of the transcript."""
    match stored.event:
        case SessionStarted():
            return "Task", "paper"
        case TurnStarted():
            return f"To the model, turn {stored.event.turn}", "person"
        case MessageAdded():
            return f"To the model, because of {stored.event.reason}", "person"
        case ContextGiven() | ContextCut():
            return "To the model, from before", "person"
        case RequestSettled():
            return "Model", "agent"
        case FindingEmitted():
            return f"Finding, {stored.event.severity}", "findings"
        case NotificationQueued():
            return f"Notification over {stored.event.channel}", "bell"
        case _:
            return "", ""


def _build_spoken(room: OpenPage, one: Utterance | ToolUse) -> Callable[[Utterance | ToolUse], None]:
    if isinstance(one, ToolUse):
        _build_tool_use(room, one)
        return lambda _: None
    with add_box("div", f"h-said {'h-own' if one.by == 'Model' else ''}"):
        with add_box("div", "h-row h-from"):
            add_icon(one.icon)
            add_text(one.by, "", "span")
            room.add_moment(one.at)
        add_text(one.text)
    return lambda _: None


def _build_tool_use(room: OpenPage, one: ToolUse) -> None:
    outcome = label_outcome(one.outcome)
    with add_box("details", "h-fold h-call"):
        with add_box("summary"):
            add_icon("tool")
            add_text(one.tool, "h-what", "span")
            add_chip(outcome.word, outcome.mood)
            taken = f"{one.millis} ms" if one.millis else ""
            cost = format_money(micros_to_usd(one.usd)) if one.usd else ""
            add_text(" · ".join(each for each in (taken, cost) if each), "h-dim h-small", "span")
            room.add_moment(one.at, "h-dim h-small")
        if one.asked:
            add_arguments(one.asked)
        if one.answered:
            add_preformatted(one.answered)


MAX_EVENTS_DRAWN = 400
"""How many of the newest events are charted and searched; receipt and export have all of them."""
MAX_EVENTS_SEARCHED = 4000
"""How many of the newest events are searched for what was said, where the newest of all say nothing."""
MAX_EVENTS_LISTED = 100
"""How many of them are listed: each line takes time on the agents' event loop."""


class SessionHead:
    """The head of a session's page: what it is, how it stands, and what it costs."""

    def __init__(self, room: OpenPage, row: SessionRow, title: str) -> None:
        self._room = room
        self._work = WorkDone()
        with add_box("div", "h-row h-apart"):
            with add_box("div"):
                add_text(title, "h-title")
                with add_box("div", "h-row h-small"):
                    self._state = add_chip("")
                    add_link(row.agent, f"/agent/{row.agent}")
                    add_text(KINDS.get(row.kind, row.kind), "h-dim", "span")
                    if row.trigger:
                        add_link(row.trigger, "/triggers")
                    if row.parent:
                        add_link(f"part of {shorten_id(row.parent)}", f"/session/{row.parent}")
                    add_id(row.session)
            _buttons(room, row)
        self._why = add_text("", "h-text h-bad")
        with add_box("div", "h-stats").style("margin-top: 1rem"):
            with add_box("div"):
                self._cost = add_stat("Cost")
                self._meter = add_meter("Spent of its cap", 0)
            self._tokens = add_stat("Tokens")
            self._took = add_stat("Time")
            self._done = add_stat("Work")

    async def show(self, row: SessionRow) -> None:
        label = label_state(row.state)
        set_chip(self._state, label)
        self._why.say(f"It ended: {explain_end(row)}." if row.ended_at and explain_end(row) else "")
        budget = await queries.session_budget(self._room.desk, row.session)
        cap = None if budget is None else budget.cap
        spent = ZERO_USD if budget is None else budget.spent
        self._cost[0].say(format_money(spent))
        held = f", {format_money(budget.held)} held" if budget is not None and budget.held else ""
        # Without a row of its own nothing was spent yet, and its cap is not known here.
        bound = "nothing spent yet" if budget is None else "no cap" if cap is None else f"of {format_money(cap)}"
        self._cost[1].say(f"{bound}{held}")
        set_meter(self._meter, float((spent + (budget.held if budget else ZERO_USD)) / cap) if cap else 0)
        await self._show_work(row)

    async def _show_work(self, row: SessionRow) -> None:
        self._tokens[0].say(format_tokens(await queries.session_tokens(self._room.desk, row.session)))
        self._tokens[1].say("read and written, without cached ones")
        self._took[0].say(format_span(max(0, (row.ended_at or self._room.now) - row.started_at)))
        began = f"began {format_relative_moment(row.started_at, self._room.now)}"
        wakes = f", wakes {format_relative_moment(row.due_at, self._room.now)}" if row.due_at else ""
        self._took[1].say(f"{began}{wakes}")
        self._work = await queries.count_work(self._room.desk, row.session, self._work)
        self._done[0].say(format_count(self._work.calls, "call"))
        self._done[1].say(f"{format_count(self._work.turns, 'turn')}, {self._work.refused:,} refused")


async def build_session_page(room: OpenPage, name: str) -> RefreshPage:
    row = await room.desk.session(name)
    with add_section("Session", card=True):
        head = SessionHead(room, row, await queries.session_title(room.desk, row))
    asked = KeyedList[WaitingDecision](add_box("div", "h-cards"), lambda one: build_decision_card(room, one))
    with add_section("Turns, calls and brakes", card=True):
        plot = Plot("Turns, requests, calls and brakes over time", "Nothing happened yet.")
    with add_box("div", "h-wide"):
        with add_section("What was said", card=True):
            saying = TranscriptPanel(room)
        with add_box("div", "h-col"):
            with add_section("What it knows", card=True):
                knowing = HotStatePanel(room, row.session)
            with add_section("What happens", card=True):
                lines = KeyedList[Stored](
                    add_box("ol", "h-events", "Events", tabindex="0"), _event, "Nothing happened yet."
                )

    async def refresh(grown: FeedChanges) -> None:
        await knowing.show()
        if not grown.of(session_stream(row.session)):
            return
        asked.show({one.decision: one for one in await waiting(room.desk) if one.session == row.session})
        events = await queries.newest_events(room.desk, row.session, MAX_EVENTS_DRAWN)
        await head.show(await room.desk.session(row.session))
        spans = find_spans(events, room.now)
        plot.show(chart_timeline(spans, LANES) | ZOOM, empty=not spans)
        lines.show({stored.seq: stored for stored in reversed(events[-MAX_EVENTS_LISTED:])})
        await saying.show(await _find_spoken(room, row.session, events))
        await knowing.show_history(events)

    await refresh(FeedChanges(everything=True))
    return refresh


async def _find_spoken(room: OpenPage, session: str, events: Sequence[Stored]) -> Sequence[Stored]:
    """Looks further back where nothing was said lately, as in a session that mostly skips its turns."""
    if len(events) < MAX_EVENTS_DRAWN or any(_speaker(stored)[0] for stored in events):
        return events
    return await queries.newest_events(room.desk, session, MAX_EVENTS_SEARCHED)


def _event(stored: Stored) -> Callable[[Stored], None]:
    kind = stored.event.kind if isinstance(stored.event, Unknown) else stored.event.KIND
    with add_box("li"):
        add_text(format_hour(stored.at), "h-at")
        add_text(kind.replace("_", " "), "h-kind")
        add_text(summarize_event(stored).text)
    return lambda _: None


def _buttons(room: OpenPage, row: SessionRow) -> None:
    with add_box("div", "h-row"):
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


SESSION_COLUMNS = ("session", "state", "agent", "cost", "time", "began")
PAGE = 25
SEARCHED = 200
"""How many of the newest sessions are searched."""
FILTERS: Final = ("Every state", "Under way", "Waiting for a person", "Ended well", "Ended badly")


def fits_filter(row: SessionRow, wanted: str) -> bool:
    mood, over = label_state(row.state).mood, row.ended_at is not None
    match wanted:
        case "Under way":
            return not over
        case "Waiting for a person":
            return not over and mood == "look"
        case "Ended well":
            return over and mood == "good"
        case "Ended badly":
            return over and mood == "bad"
        case _:
            return True


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session as the list shows it."""

    row: SessionRow
    title: str
    spent: Decimal
    tokens: int


async def build_sessions_page(room: OpenPage) -> RefreshPage:
    shown, titles = [PAGE], dict[str, str]()
    every = "Every agent"
    with add_box("div", "h-filters", "Filter the sessions", role="search"):
        text: Any = ui.input("Search").props("outlined dense clearable")
        state: Any = ui.select(list(FILTERS), value=FILTERS[0], label="State").props("outlined dense")
        named = make_legible(room.asked_for("agent")) or every
        agent: Any = ui.select([every, *({named} - {every})], value=named, label="Agent").props("outlined dense")
    with add_section("Sessions", card=True):
        lines = KeyedList[ListedSession](add_table("Sessions", SESSION_COLUMNS, ("cost",)), lambda one: _row(room, one))
        none = add_text("", "h-none")
        older = add_button("Older", lambda: None)

    async def title(row: SessionRow) -> str:
        if row.session not in titles:
            titles[row.session] = await queries.session_title(room.desk, row)
        return titles[row.session]

    async def list_session(row: SessionRow) -> ListedSession:
        spent = await queries.session_spent(room.desk, row.session)
        return ListedSession(row, await title(row), spent, await queries.session_tokens(room.desk, row.session))

    async def refresh(_: FeedChanges) -> None:
        words = str(text.value or "").strip().casefold()
        of = "" if agent.value == every else str(agent.value)
        wide = bool(words) or state.value != FILTERS[0]
        rows = await queries.sessions(room.desk, of, limit=SEARCHED if wide else shown[0] + 1)
        found = [row for row in rows if fits_filter(row, str(state.value))]
        if words:
            found = [row for row in found if words in f"{await title(row)} {row.session} {row.agent}".casefold()]
        listed = [await list_session(row) for row in found[: shown[0]]]
        lines.show({one.row.session: one for one in listed})
        older.set_visibility(len(found) > shown[0])
        none.say("" if listed else "No session fits." if wide or of else "There is no session yet.")
        known = [every, *sorted({line.agent for line in rows} | set(agent.options[1:]))]
        if agent.options != known:
            agent.set_options(known)

    async def more() -> None:
        shown[0] += PAGE
        await refresh(FeedChanges())

    async def again() -> None:
        shown[0] = PAGE
        await refresh(FeedChanges())

    for each in (text, state, agent):
        each.on_value_change(again)
    older.on_click(more)
    await refresh(FeedChanges())
    return refresh


def _row(room: OpenPage, one: ListedSession) -> Callable[[ListedSession], None]:
    row = one.row
    with add_box("tr"):
        with add_box("td"):
            add_link(one.title, f"/session/{row.session}").classes("h-what")
            with add_box("div", "h-row"):
                add_id(row.session)
        with add_box("td"):
            state = add_chip("")
            why = add_text("", "h-dim h-small")
        add_cell(f"{row.agent}\n{row.trigger or KINDS.get(row.kind, row.kind)}")
        with add_box("td", "h-num"):
            cost, tokens = add_text("", ""), add_text("", "h-dim h-small")
        took = add_cell("", "h-short")
        with add_box("td", "h-short"):
            room.add_moment(row.started_at)

    def show(one: ListedSession) -> None:
        row = one.row
        set_chip(state, label_state(row.state))
        wakes = f"wakes {format_age(row.due_at, room.now)}" if row.due_at and row.due_at > room.now else ""
        why.say(explain_end(row) if row.ended_at is not None else wakes)
        cost.say(format_money(one.spent))
        tokens.say(f"{format_tokens(one.tokens)} tokens" if one.tokens else "")
        took.say(format_span(max(0, (row.ended_at or room.now) - row.started_at)))

    show(one)
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
