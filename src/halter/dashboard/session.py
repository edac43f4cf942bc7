"""Pages of a session: one session with timeline, hot state and transcript, and its receipt."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from nicegui import ui
from nicegui.element import Element

from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    FindingEmitted,
    HistoryGiven,
    MessageAdded,
    NotificationQueued,
    RequestSettled,
    RequestStarted,
    SensorChanged,
    SessionStarted,
    TurnEnded,
    TurnStarted,
)
from halter.core.ids import session_stream
from halter.core.messages import Reply
from halter.core.money import ZERO_USD, micros_to_usd
from halter.core.ports import Stored, read_body
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.dashboard.history import (
    LANES,
    ZOOM,
    Happening,
    describe_request,
    describe_usage,
    find_health_spans,
    find_skips,
    find_spans,
    list_happenings,
)
from halter.dashboard.home import build_decision_card, build_group_card
from halter.dashboard.labels import (
    KINDS,
    explain_end,
    explain_terminal,
    format_money,
    format_span,
    format_tokens,
    format_value,
    label_outcome,
    label_sensor,
    label_state,
    shorten_id,
)
from halter.dashboard.page import REASON, FeedChanges, FormField, FormValues, OpenPage, RefreshPage, open_dialog
from halter.dashboard.parts import (
    BAD,
    KeyedList,
    Plot,
    Point,
    add_arguments,
    add_box,
    add_button,
    add_chip,
    add_icon,
    add_id,
    add_link,
    add_meter,
    add_preformatted,
    add_section,
    add_sheet,
    add_spark,
    add_stat,
    add_text,
    chart_timeline,
    make_legible,
    set_chip,
    set_meter,
    set_spark,
)
from halter.operations import control, queries
from halter.operations.decisions import WaitingDecision, group_calls, waiting
from halter.operations.queries import FactView, HotStateShown, WorkDone
from halter.present.events import describe_event, format_hour, format_relative_moment
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Facts, Listing
from halter.state.receipt import Receipt

MAX_SERIES: Final = 5


def find_number_series(seen: Sequence[HotStateShown]) -> Mapping[str, Sequence[Point]]:
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


@dataclass(frozen=True, slots=True)
class KnownFact:
    """A value of the hot state, the fact that it is part of, and the numbers that it was before."""

    name: str
    value: Any
    fact: FactView
    numbers: tuple[float, ...] = ()


class HotStatePanel:
    """The hot state of a session's page."""

    def __init__(self, page: OpenPage, session: str) -> None:
        self._page = page
        self._session = session
        self._empty_label = add_text("", "h-none")
        self._facts = KeyedList[KnownFact](add_box("ul", "h-list h-lines", "Hot state"), self._build_fact)
        self._numbers: Mapping[str, Sequence[Point]] = {}
        self._healths = Plot("Health of the sensors over time", "")
        self._sensors = KeyedList[SensorChanged](add_box("ul", "h-list", "Sensors"), _sensor)

    async def show(self) -> None:
        state = await queries.hot_state(self._page.actor, self._session)
        self._empty_label.show_text("" if state.facts else "It has no hot state.")
        facts = [
            KnownFact(name, value, fact, tuple(number for _, number in self._numbers.get(name, ())))
            for whole, fact in state.facts.items()
            for name, value in list_values(whole, fact.value)
        ]
        # A line of numbers appears with the second number.
        self._facts.show({(one.name, bool(one.numbers)): one for one in facts})

    async def show_history(self, events: Sequence[Stored]) -> None:
        self._numbers = find_number_series(await queries.hot_state_history(self._page.actor, self._session))
        await self.show()
        found = await queries.sensors(self._page.actor, self._session)
        self._sensors.show({(name, event.health): event for name, event in found.items()})
        healths = find_health_spans(events, self._page.now)
        lanes = sorted({span.lane for span in healths})
        # Sensors that all read are told in a word each.
        unwell = any(span.mood == BAD for span in healths)
        self._healths.show(chart_timeline(healths, lanes), empty=not unwell, lanes=len(lanes))

    def _build_fact(self, one: KnownFact) -> Callable[[KnownFact], None]:
        with add_box("li", "h-row"):
            add_text(one.name, "h-what", "span")
            value = add_text("", "h-text h-mono h-cut", "span")
            add_box("span", "h-space")
            spark = add_spark(f"{one.name} in the newest turns", one.numbers) if one.numbers else None
            age = self._page.add_moment(None, "h-dim h-small")

        def show(one: KnownFact) -> None:
            value.show_text(format_value(one.value))
            value.props["title"] = make_legible(describe_value(one.value), MAX_TITLE)
            props: dict[str, Any] = age.props
            self._page.set_moment(age, one.fact.at)
            props["title"] = f"{props['title']}, by {one.fact.by}" if one.fact.by else props["title"]
            if spark is not None:
                set_spark(spark, one.numbers)

        show(one)
        return show


MAX_TITLE: Final = 500


def describe_value(value: Any) -> str:
    """Writes a value as it is kept."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sensor(event: SensorChanged) -> Callable[[SensorChanged], None]:
    label = label_sensor(event.health)
    with add_box("li", "h-row"):
        add_text(event.sensor, "h-what")
        add_chip(label.text, label.mood)
        add_text("" if event.health == "ok" else event.sentence, "h-text h-small")
    return lambda _: None


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text and its speaker."""

    at: int
    by: str
    text: str
    icon: str = "chat"
    subject: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call with its outcome, once there is one."""

    at: int
    tool: str
    arguments: str
    outcome: str = ""
    result: str = ""
    millis: int = 0
    usd: int = 0


MODEL: Final = "Model"
CHANNELS: Final = {"in_app": "the app"}


class TranscriptPanel:
    """What was said and done in a session: each call stands with its outcome. Bodies are read once."""

    def __init__(self, page: OpenPage) -> None:
        self._page = page
        self._bodies: dict[int, str] = {}
        self._by_seq: Mapping[int, Utterance | ToolUse] = {}
        self._problem_label: Any = ui.checkbox("Only calls that went wrong", on_change=self._show_found)
        self._empty_label = add_text("", "h-none")
        self._entries = KeyedList[Utterance | ToolUse](add_box("div", "h-talk"), lambda one: _build_spoken(page, one))

    async def show(self, events: Sequence[Stored]) -> None:
        """Shows what these events say, the newest last."""
        found: dict[int, Utterance | ToolUse] = {}
        places: dict[str, int] = {}
        requests: dict[str, tuple[str, int]] = {}
        opening = ""
        for stored in events:
            match stored.event:
                case RequestStarted() as event:
                    requests[event.request] = event.model, stored.at
                case RequestSettled() as event:
                    about = describe_request(requests.get(event.request), event, stored.at)
                    text = await self._read_text(stored)
                    if text or describe_usage(event):
                        found[stored.seq] = Utterance(stored.at, MODEL, text, "agent", about)
                case CallStarted() as event:
                    places[event.call] = stored.seq
                    found[stored.seq] = ToolUse(stored.at, event.tool, await self._read_text(stored))
                case CallSettled() as event if event.call in places:
                    place = places[event.call]
                    found[place] = _settle(found[place], event, await self._read_text(stored))
                case CallRefused() as event:
                    found[stored.seq] = ToolUse(stored.at, event.tool, "", event.outcome, event.sentence)
                case TurnStarted():
                    by, icon = _speaker(stored)
                    text = await self._read_text(stored)
                    # Most turns begin with the same words: they are shown where they change.
                    found[stored.seq] = Utterance(stored.at, by, "" if text == opening else text, icon)
                    opening = text
                case _:
                    by, icon = _speaker(stored)
                    if by and (text := await self._read_text(stored)):
                        found[stored.seq] = Utterance(stored.at, by, text, icon)
        kept = {stored.seq for stored in events}
        self._bodies = {seq: text for seq, text in self._bodies.items() if seq in kept}
        self._by_seq = found
        self._show_found()

    def _show_found(self) -> None:
        wrong = bool(self._problem_label.value)
        found = {seq: one for seq, one in self._by_seq.items() if not wrong or went_wrong(one)}
        self._empty_label.show_text("" if found else "No call went wrong." if wrong else "Nothing was said yet.")
        self._entries.show({(seq, getattr(one, "outcome", "")): one for seq, one in found.items()})

    async def _read_text(self, stored: Stored) -> str:
        if stored.seq not in self._bodies:
            body = await read_body(self._page.app.store, stored)
            self._bodies[stored.seq] = _read_words(stored, body) or ("(erased)" if stored.erased else "")
        return self._bodies[stored.seq]


def went_wrong(one: Utterance | ToolUse) -> bool:
    """Whether a call was refused, failed, or has an outcome that a person should look at."""
    return isinstance(one, ToolUse) and bool(one.outcome) and label_outcome(one.outcome).mood in ("bad", "look")


def _settle(use: Utterance | ToolUse, event: CallSettled, answered: str) -> Utterance | ToolUse:
    if not isinstance(use, ToolUse):
        return use
    usd = event.charge.usd if event.charge else 0
    return replace(use, outcome=event.outcome, result=answered or event.error, millis=event.duration_ms, usd=usd)


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
        case ContextGiven() | ContextCut() | HistoryGiven():
            return "To the model, from before", "person"
        case RequestSettled():
            return MODEL, "agent"
        case TurnEnded() if stored.body:
            return "Careful", "alert"
        case FindingEmitted():
            return f"Finding, {stored.event.severity}", "findings"
        case NotificationQueued():
            return f"Notice over {CHANNELS.get(stored.event.channel, stored.event.channel)}", "bell"
        case _:
            return "", ""


def _build_spoken(page: OpenPage, one: Utterance | ToolUse) -> Callable[[Utterance | ToolUse], None]:
    if isinstance(one, ToolUse):
        _build_tool_use(page, one)
        return lambda _: None
    with add_box("div", f"h-said {'h-own' if one.by == MODEL else ''}"):
        with add_box("div", "h-row h-from"):
            add_icon(one.icon)
            add_text(one.by, "", "span")
            add_text(one.subject, "h-about", "span")
            page.add_moment(one.at)
        if one.text:
            add_text(one.text)
    return lambda _: None


def _build_tool_use(page: OpenPage, one: ToolUse) -> None:
    outcome = label_outcome(one.outcome)
    with add_box("details", "h-fold h-call"):
        with add_box("summary"):
            add_icon("tool")
            add_text(one.tool, "h-what", "span")
            add_chip(outcome.text, outcome.mood)
            taken = f"{one.millis} ms" if one.millis else ""
            cost = format_money(micros_to_usd(one.usd)) if one.usd else ""
            add_text(" · ".join(each for each in (taken, cost) if each), "h-dim h-small", "span")
            page.add_moment(one.at, "h-dim h-small")
        if one.arguments:
            add_arguments(one.arguments)
        if one.result:
            add_preformatted(one.result)


MAX_EVENTS_DRAWN = 400
"""How many of the newest events are charted and searched; receipt and export have all of them."""
MAX_EVENTS_SEARCHED = 4000
"""How many of the newest events are searched for what was said, where the newest of all say nothing."""
MAX_EVENTS_LISTED = 100
"""How many of them are listed: each line takes time on the agents' event loop."""


class SessionHead:
    """The head of a session's page: what it is, how it stands, and what it costs."""

    def __init__(self, page: OpenPage, row: SessionRow, title: str) -> None:
        self._page = page
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
            self._actions = _build_actions(page, row)
        self._reason_label = add_text("", "h-text h-bad")
        with add_box("div", "h-stats").style("margin-top: 1rem"):
            with add_box("div"):
                self._cost = add_stat("Cost")
                self._meter = add_meter("Spent of its cap", 0)
            self._tokens = add_stat("Tokens")
            self._took = add_stat("Time")
            self._work_stat = add_stat("Work")

    async def show(self, row: SessionRow) -> None:
        label = label_state(row.state)
        set_chip(self._state, label)
        self._actions.set_visibility(self._page.has_role("operator") and row.ended_at is None)
        self._reason_label.show_text(f"It ended: {explain_end(row)}." if row.ended_at and explain_end(row) else "")
        budget = await queries.session_budget(self._page.actor, row.session)
        cap = None if budget is None else budget.cap
        spent = ZERO_USD if budget is None else budget.spent
        self._cost[0].show_text(format_money(spent))
        held = f", {format_money(budget.held)} held" if budget is not None and budget.held else ""
        # Without a row of its own nothing was spent yet, and its cap is not known here.
        bound = "nothing spent yet" if budget is None else "no cap" if cap is None else f"of {format_money(cap)}"
        self._cost[1].show_text(f"{bound}{held}")
        set_meter(self._meter, float((spent + (budget.held if budget else ZERO_USD)) / cap) if cap else 0)
        await self._show_work(row)

    async def _show_work(self, row: SessionRow) -> None:
        self._tokens[0].show_text(format_tokens(await queries.session_tokens(self._page.actor, row.session)))
        self._tokens[1].show_text("read and written, without cached ones")
        self._took[0].show_text(format_span(max(0, (row.ended_at or self._page.now) - row.started_at)))
        began = f"began {format_relative_moment(row.started_at, self._page.now)}"
        wakes = f", wakes {format_relative_moment(row.due_at, self._page.now)}" if row.due_at else ""
        self._took[1].show_text(f"{began}{wakes}")
        self._work = await queries.count_work(self._page.actor, row.session, self._work)
        self._work_stat[0].show_text(format_count(self._work.calls, "call"))
        self._work_stat[1].show_text(f"{format_count(self._work.turns, 'turn')}, {self._work.refused:,} refused")


async def build_session_page(page: OpenPage, name: str) -> RefreshPage:
    row = await page.actor.session(name)
    with add_section("Session", card=True, heading=False):
        head = SessionHead(page, row, await queries.session_title(page.actor, row))
    together = KeyedList[Sequence[WaitingDecision]](
        add_box("div", "h-cards"), lambda calls: build_group_card(page, calls)
    )
    asked = KeyedList[WaitingDecision](add_box("div", "h-cards"), lambda decision: build_decision_card(page, decision))
    with add_section("Turns, calls and brakes", card=True):
        plot = Plot("Turns, requests, calls and brakes over time", "Nothing happened yet.")
    with add_box("div", "h-wide"):
        with add_section("What was said", card=True):
            saying = TranscriptPanel(page)
        with add_box("div", "h-col"):
            with add_section("What it knows", card=True):
                knowing = HotStatePanel(page, row.session)
            with add_section("What happens", card=True):
                lines = KeyedList[Happening](
                    add_box("ol", "h-events", "Events", tabindex="0"), _build_happening, "Nothing happened yet."
                )

    async def refresh(changes: FeedChanges) -> None:
        await knowing.show()
        if not changes.concerns(session_stream(row.session)):
            return
        found = [decision for decision in await waiting(page.actor) if decision.session == row.session]
        groups = [calls for calls in group_calls(found) if len(calls) > 1]
        together.show({tuple(decision.decision for decision in calls): calls for calls in groups})
        asked.show({decision.decision: decision for decision in found})
        events = await queries.newest_events(page.actor, row.session, MAX_EVENTS_DRAWN)
        await head.show(await page.actor.session(row.session))
        spoken = await _find_spoken(page, row.session, events)
        work = await queries.work_events(page.actor, row.session, MAX_EVENTS_DRAWN)
        spans = find_skips(spoken) + find_spans(work, page.now)
        plot.show(chart_timeline(spans, LANES) | ZOOM, empty=not spans)
        listed = list_happenings(spoken)[-MAX_EVENTS_LISTED:]
        lines.show({(one.seq, one.count): one for one in reversed(listed)})
        await saying.show(spoken)
        await knowing.show_history(events)

    await refresh(FeedChanges(everything=True))
    return refresh


async def _find_spoken(page: OpenPage, session: str, events: Sequence[Stored]) -> Sequence[Stored]:
    """Looks further back where nothing was said lately, as in a session that mostly skips its turns."""
    if len(events) < MAX_EVENTS_DRAWN or any(_speaker(stored)[0] for stored in events):
        return events
    return await queries.newest_events(page.actor, session, MAX_EVENTS_SEARCHED)


def _build_happening(one: Happening) -> Callable[[Happening], None]:
    with add_box("li"):
        add_text(format_hour(one.at), "h-at")
        add_text(one.kind, "h-kind")
        add_text(one.text)
    return lambda _: None


def _build_actions(page: OpenPage, row: SessionRow) -> Element:
    """Adds what can be done with a session; the part that is returned is for one that is not over."""
    with add_box("div", "h-row"):
        add_link("Receipt", f"/receipt/{row.session}")
        add_link("Export", f"/download/session/{row.session}").props["download"] = ""
        with add_box("div", "h-row") as actions:
            if page.has_role("operator"):
                add_button("Message…", lambda: _message(page, row))
                add_button("Cancel session…", lambda: _cancel(page, row), "stop")
    return actions


def _message(page: OpenPage, row: SessionRow) -> None:
    async def do(values: FormValues) -> str:
        await control.send_message(page.actor, row.session, values["text"])
        return f"{row.session} is told, and wakes."

    text = FormField("text", "Your words", "", "text")
    open_dialog(page, f"Say something to {row.session}?", "It sees your words in its next turn.", (text,), "Say it", do)


def _cancel(page: OpenPage, row: SessionRow) -> None:
    async def do(values: FormValues) -> str:
        came = await control.cancel(page.actor, row.session, values["reason"])
        return f"Session {came.session} is cancelled. {came.sentence}"

    says = "It ends for good: what it has in flight is stopped, and nothing of it starts again."
    open_dialog(page, f"Cancel {row.session}?", says, (REASON,), "Cancel the session", do, "stop")


def _translate_receipt(part: Facts | Listing | str, receipt: Receipt) -> Facts | Listing | str:
    """Puts states and outcomes of a receipt into the words of the pages."""
    match part:
        case Facts():
            why = explain_terminal(receipt.state, receipt.terminal_reason or "")
            words = {
                "agent": f"{receipt.agent}, {KINDS.get(receipt.kind, receipt.kind)}",
                "state": f"{label_state(receipt.state).text}{f': {why}' if why else ''}",
            }
            return Facts("", [(name, words.get(name, value)) for name, value in part.facts])
        case Listing() if "outcome" in part.columns:
            place = part.columns.index("outcome")
            rows = [[*row[:place], label_outcome(row[place]).text, *row[place + 1 :]] for row in part.rows]
            return replace(part, rows=rows)
        case _:
            return part


async def build_receipt_page(page: OpenPage, name: str) -> RefreshPage:
    """Shows the receipt as it was when the page was opened."""
    receipt = await queries.receipt(page.actor, name)
    with add_section(f"Receipt of {receipt.session}", card=True, heading=False):
        with add_box("div", "h-row"):
            add_link("Session", f"/session/{receipt.session}")
            add_link("Export with its journal", f"/download/session/{receipt.session}").props["download"] = ""
        add_sheet([_translate_receipt(part, receipt) for part in build_receipt_sheet(receipt)])

    async def refresh(_: FeedChanges) -> None:
        pass

    return refresh
