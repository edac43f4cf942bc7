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
from halter.core.money import ZERO_USD, format_usd, micros_to_usd
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
    format_span,
    format_tokens,
    format_value,
    label_outcome,
    label_sensor,
    label_session,
    label_state,
    shorten_id,
)
from halter.dashboard.page import REASON, FeedChanges, FormField, FormValues, OpenPage, RefreshPage, open_dialog
from halter.dashboard.widgets import (
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
from halter.guard.approvals import PendingDecision
from halter.operations import control, messages, queries
from halter.operations.decisions import group_calls, waiting
from halter.operations.queries import FactView, HotStateShown, WorkDone
from halter.present.bodies import describe_event
from halter.present.moments import format_hour, format_relative_moment
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Facts, Listing
from halter.state.receipt import Receipt

MAX_SERIES: Final = 5


def find_number_series(snapshots: Sequence[HotStateShown]) -> Mapping[str, Sequence[Point]]:
    """Return the history of numeric facts with several readings: at most a few, those that changed most often."""
    series: dict[str, list[Point]] = {}
    for snapshot in snapshots:
        for fact_name, fact_value in snapshot.values.items():
            for name, value in list_values(fact_name, fact_value):
                if _is_number(value):
                    series.setdefault(name, []).append((snapshot.at, float(value)))
    series = {name: points for name, points in series.items() if len(points) > 1}
    names = sorted(series, key=lambda name: -len({value for _, value in series[name]}))[:MAX_SERIES]
    return {name: series[name] for name in series if name in names}


def list_values(name: str, value: Any) -> Sequence[tuple[str, Any]]:
    """List the values of a fact: each field of an object that has a number in it, or else the fact itself."""
    try:
        fields = msgspec.convert(value, dict[str, Any])
    except msgspec.ValidationError:
        fields = {}
    if not any(map(_is_number, fields.values())):
        return [(name, value)]
    return [(f"{name}.{key}", field) for key, field in fields.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_CHARTED_NUMBER


MAX_CHARTED_NUMBER: Final = 1e15
"""Larger numbers are probably ids, and are not charted."""


@dataclass(frozen=True, slots=True)
class KnownFact:
    """A value of the hot state, the fact that it is part of, and its earlier numbers."""

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
        self._facts = KeyedList[KnownFact](add_box("ul", "h-list h-lines", "Facts"), self._build_fact)
        self._numbers: Mapping[str, Sequence[Point]] = {}
        self._healths = Plot("Health of the sensors over time", "")
        self._sensors = KeyedList[SensorChanged](add_box("ul", "h-list", "Sensors"), _sensor)

    async def show(self) -> None:
        state = await queries.hot_state(self._page.actor, self._session)
        self._empty_label.show_text("" if state.facts else "No hot state.")
        facts = [
            KnownFact(name, value, fact, tuple(number for _, number in self._numbers.get(name, ())))
            for fact_name, fact in state.facts.items()
            for name, value in list_values(fact_name, fact.value)
        ]
        # The sparkline appears with the second number.
        self._facts.show({(one.name, bool(one.numbers)): one for one in facts})

    async def show_history(self, events: Sequence[Stored]) -> None:
        self._numbers = find_number_series(await queries.hot_state_history(self._page.actor, self._session))
        await self.show()
        event_by_sensor = await queries.sensors(self._page.actor, self._session)
        self._sensors.show({(name, event.health): event for name, event in event_by_sensor.items()})
        health_spans = find_health_spans(events, self._page.now)
        lanes = sorted({span.lane for span in health_spans})
        # While all sensors are healthy, their labels suffice.
        has_problem = any(span.mood == BAD for span in health_spans)
        self._healths.show(chart_timeline(health_spans, lanes), empty=not has_problem, lanes=len(lanes))

    def _build_fact(self, known_fact: KnownFact) -> Callable[[KnownFact], None]:
        with add_box("li", "h-row"):
            add_text(known_fact.name, "h-what", "span")
            value = add_text("", "h-text h-mono h-cut", "span")
            add_box("span", "h-space")
            spark = (
                add_spark(f"{known_fact.name} in the newest turns", known_fact.numbers) if known_fact.numbers else None
            )
            age = self._page.add_moment(None, "h-dim h-small")

        def show(known_fact: KnownFact) -> None:
            value.show_text(format_value(known_fact.value))
            value.props["title"] = make_legible(describe_value(known_fact.value), MAX_TITLE)
            props: dict[str, Any] = age.props
            self._page.set_moment(age, known_fact.fact.at)
            props["title"] = f"{props['title']}, by {known_fact.fact.by}" if known_fact.fact.by else props["title"]
            if spark is not None:
                set_spark(spark, known_fact.numbers)

        show(known_fact)
        return show


MAX_TITLE: Final = 500


def describe_value(value: Any) -> str:
    """Format a value as it is stored."""
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
    """A text of the transcript and its speaker."""

    at: int
    by: str
    text: str
    icon: str = "chat"
    subject: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call of the transcript, with its outcome once it has one."""

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
    """The transcript of a session: texts, and each call with its outcome. Bodies are read once."""

    def __init__(self, page: OpenPage) -> None:
        self._page = page
        self._bodies: dict[int, str] = {}
        self._by_seq: Mapping[int, Utterance | ToolUse] = {}
        self._problem_label: Any = ui.checkbox("Only calls with problems", on_change=self._show_entries)
        self._empty_label = add_text("", "h-none")
        self._entries = KeyedList[Utterance | ToolUse](
            add_box("div", "h-talk"), lambda entry: _build_spoken(page, entry)
        )

    async def show(self, events: Sequence[Stored]) -> None:
        """Show the transcript of these events, newest last."""
        entries: dict[int, Utterance | ToolUse] = {}
        seq_by_call: dict[str, int] = {}
        requests: dict[str, tuple[str, int]] = {}
        opening = ""
        for stored_event in events:
            match stored_event.event:
                case RequestStarted() as event:
                    requests[event.request] = event.model, stored_event.at
                case RequestSettled() as event:
                    subject = describe_request(requests.get(event.request), event, stored_event.at)
                    text = await self._read_text(stored_event)
                    if text or describe_usage(event):
                        entries[stored_event.seq] = Utterance(stored_event.at, MODEL, text, "agent", subject)
                case CallStarted() as event:
                    seq_by_call[event.call] = stored_event.seq
                    entries[stored_event.seq] = ToolUse(
                        stored_event.at, event.tool, await self._read_text(stored_event)
                    )
                case CallSettled() as event if event.call in seq_by_call:
                    call_seq = seq_by_call[event.call]
                    entries[call_seq] = _settle(entries[call_seq], event, await self._read_text(stored_event))
                case CallRefused() as event:
                    entries[stored_event.seq] = ToolUse(stored_event.at, event.tool, "", event.outcome, event.sentence)
                case TurnStarted():
                    by, icon = _speaker(stored_event)
                    text = await self._read_text(stored_event)
                    # Most turns begin with the same text: it is shown only when it changes.
                    entries[stored_event.seq] = Utterance(stored_event.at, by, "" if text == opening else text, icon)
                    opening = text
                case _:
                    by, icon = _speaker(stored_event)
                    if by and (text := await self._read_text(stored_event)):
                        entries[stored_event.seq] = Utterance(stored_event.at, by, text, icon)
        seqs = {stored_event.seq for stored_event in events}
        self._bodies = {seq: text for seq, text in self._bodies.items() if seq in seqs}
        self._by_seq = entries
        self._show_entries()

    def _show_entries(self) -> None:
        only_problems = bool(self._problem_label.value)
        visible = {seq: one for seq, one in self._by_seq.items() if not only_problems or went_wrong(one)}
        self._empty_label.show_text(
            "" if visible else "No calls with problems." if only_problems else "No messages yet."
        )
        self._entries.show({(seq, getattr(one, "outcome", "")): one for seq, one in visible.items()})

    async def _read_text(self, stored_event: Stored) -> str:
        if stored_event.seq not in self._bodies:
            body = await read_body(self._page.app.store, stored_event)
            self._bodies[stored_event.seq] = _read_words(stored_event, body) or (
                "(erased)" if stored_event.erased else ""
            )
        return self._bodies[stored_event.seq]


def went_wrong(entry: Utterance | ToolUse) -> bool:
    """Return True if a call was refused, failed, or has an outcome to look into."""
    return isinstance(entry, ToolUse) and bool(entry.outcome) and label_outcome(entry.outcome).mood in ("bad", "look")


def _settle(use: Utterance | ToolUse, event: CallSettled, result: str) -> Utterance | ToolUse:
    if not isinstance(use, ToolUse):
        return use
    usd = event.charge.usd if event.charge else 0
    return replace(use, outcome=event.outcome, result=result or event.error, millis=event.duration_ms, usd=usd)


def _read_words(stored_event: Stored, body: bytes) -> str:
    """Return the text of an event. The calls of a reply are left out: they are entries with their outcomes."""
    if isinstance(stored_event.event, RequestSettled):
        if stored_event.event.outcome != "ok":
            return stored_event.event.error
        try:
            return msgspec.json.decode(body, type=Reply).text
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
    return describe_event(stored_event.event, body)


def _speaker(stored_event: Stored) -> tuple[str, str]:
    """Return the speaker of an event's text and an icon, if it is part of the transcript."""
    match stored_event.event:
        case SessionStarted():
            return "Task", "paper"
        case TurnStarted():
            return f"To the model, turn {stored_event.event.turn}", "person"
        case MessageAdded():
            return f"To the model, because of {stored_event.event.reason}", "person"
        case ContextGiven() | ContextCut() | HistoryGiven():
            return "To the model, earlier context", "person"
        case RequestSettled():
            return MODEL, "agent"
        case TurnEnded() if stored_event.body:
            return "Warning", "alert"
        case FindingEmitted():
            return f"Finding, {stored_event.event.severity}", "findings"
        case NotificationQueued():
            return f"Notice over {CHANNELS.get(stored_event.event.channel, stored_event.event.channel)}", "bell"
        case _:
            return "", ""


def _build_spoken(page: OpenPage, entry: Utterance | ToolUse) -> Callable[[Utterance | ToolUse], None]:
    if isinstance(entry, ToolUse):
        _build_tool_use(page, entry)
        return lambda _: None
    with add_box("div", f"h-said {'h-own' if entry.by == MODEL else ''}"):
        with add_box("div", "h-row h-from"):
            add_icon(entry.icon)
            add_text(entry.by, "", "span")
            add_text(entry.subject, "h-about", "span")
            page.add_moment(entry.at)
        if entry.text:
            add_text(entry.text)
    return lambda _: None


def _build_tool_use(page: OpenPage, use: ToolUse) -> None:
    outcome = label_outcome(use.outcome)
    with add_box("details", "h-fold h-call"):
        with add_box("summary"):
            add_icon("tool")
            add_text(use.tool, "h-what", "span")
            add_chip(outcome.text, outcome.mood)
            duration = f"{use.millis} ms" if use.millis else ""
            cost = format_usd(micros_to_usd(use.usd)) if use.usd else ""
            add_text(" · ".join(each for each in (duration, cost) if each), "h-dim h-small", "span")
            page.add_moment(use.at, "h-dim h-small")
        if use.arguments:
            add_arguments(use.arguments)
        if use.result:
            add_preformatted(use.result)


MAX_EVENTS_DRAWN = 400
"""Number of newest events that are charted and searched; receipt and export have all events."""
MAX_EVENTS_SEARCHED = 4000
"""Number of newest events that are searched for a transcript, if the newest ones have none."""
MAX_EVENTS_LISTED = 100
"""Number of events that are listed: each line takes time on the agents' event loop."""


class SessionHead:
    """The head of a session's page: its title, state, cost and counts."""

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
                        add_link(f"sub-session of {shorten_id(row.parent)}", f"/session/{row.parent}")
                    add_id(row.session)
            self._actions = _build_actions(page, row)
        self._reason_label = add_text("", "h-text h-bad")
        with add_box("div", "h-stats").style("margin-top: 1rem"):
            with add_box("div"):
                self._cost = add_stat("Cost")
                self._meter = add_meter("Spent of its cap", 0)
            self._tokens = add_stat("Tokens")
            self._took = add_stat("Time")
            self._work_stat = add_stat("Calls")

    async def show(self, row: SessionRow) -> None:
        label = label_session(row)
        set_chip(self._state, label)
        self._actions.set_visibility(self._page.has_role("operator") and row.ended_at is None)
        self._reason_label.show_text(f"Ended: {explain_end(row)}." if row.ended_at and explain_end(row) else "")
        budget = await queries.session_budget(self._page.actor, row.session)
        cap = None if budget is None else budget.cap
        spent_usd = ZERO_USD if budget is None else budget.spent
        self._cost[0].show_text(format_usd(spent_usd))
        held_text = f", {format_usd(budget.held)} held" if budget is not None and budget.held else ""
        # Without a budget row, nothing was spent yet and the cap is unknown here.
        cap_text = "nothing spent yet" if budget is None else "no cap" if cap is None else f"of {format_usd(cap)}"
        self._cost[1].show_text(f"{cap_text}{held_text}")
        set_meter(self._meter, float((spent_usd + (budget.held if budget else ZERO_USD)) / cap) if cap else 0)
        await self._show_work(row)

    async def _show_work(self, row: SessionRow) -> None:
        self._tokens[0].show_text(format_tokens(await queries.session_tokens(self._page.actor, row.session)))
        self._tokens[1].show_text("input and output, without cached tokens")
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
    group_cards = KeyedList[Sequence[PendingDecision]](
        add_box("div", "h-cards"), lambda calls: build_group_card(page, calls)
    )
    decision_cards = KeyedList[PendingDecision](
        add_box("div", "h-cards"), lambda decision: build_decision_card(page, decision)
    )
    with add_section("Turns, calls and refusals", card=True):
        plot = Plot("Turns, requests, calls and refusals over time", "No activity yet.")
    with add_box("div", "h-wide"):
        with add_section("Transcript", card=True):
            transcript = TranscriptPanel(page)
        with add_box("div", "h-col"):
            with add_section("Hot state", card=True):
                hot_state = HotStatePanel(page, row.session)
            with add_section("Events", card=True):
                lines = KeyedList[Happening](
                    add_box("ol", "h-events", "Event list", tabindex="0"), _build_happening, "No activity yet."
                )

    async def refresh(changes: FeedChanges) -> None:
        await hot_state.show()
        if not changes.concerns(session_stream(row.session)):
            return
        open_decisions = [decision for decision in await waiting(page.actor) if decision.session == row.session]
        groups = [calls for calls in group_calls(open_decisions) if len(calls) > 1]
        group_cards.show({tuple(decision.decision for decision in calls): calls for calls in groups})
        decision_cards.show({decision.decision: decision for decision in open_decisions})
        events = await queries.newest_events(page.actor, row.session, MAX_EVENTS_DRAWN)
        await head.show(await page.actor.session(row.session))
        transcript_events = await _find_spoken(page, row.session, events)
        work = await queries.work_events(page.actor, row.session, MAX_EVENTS_DRAWN)
        spans = find_skips(transcript_events) + find_spans(work, page.now)
        plot.show(chart_timeline(spans, LANES) | ZOOM, empty=not spans)
        listed = list_happenings(transcript_events)[-MAX_EVENTS_LISTED:]
        lines.show({(one.seq, one.count): one for one in reversed(listed)})
        await transcript.show(transcript_events)
        await hot_state.show_history(events)

    await refresh(FeedChanges(everything=True))
    return refresh


async def _find_spoken(page: OpenPage, session: str, events: Sequence[Stored]) -> Sequence[Stored]:
    """Read further back if the newest events have no text, as in a session that mostly skips its turns."""
    if len(events) < MAX_EVENTS_DRAWN or any(_speaker(stored_event)[0] for stored_event in events):
        return events
    return await queries.newest_events(page.actor, session, MAX_EVENTS_SEARCHED)


def _build_happening(entry: Happening) -> Callable[[Happening], None]:
    with add_box("li"):
        add_text(format_hour(entry.at), "h-at")
        add_text(entry.kind, "h-kind")
        add_text(entry.text)
    return lambda _: None


def _build_actions(page: OpenPage, row: SessionRow) -> Element:
    """Add the links and buttons of a session; return the part that is shown until it ends."""
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
        await messages.send_message(page.actor, row.session, values["text"])
        return f"{row.session}: message sent; it wakes."

    text = FormField("text", "Message", "", "text")
    open_dialog(page, f"Send a message to {row.session}?", "It sees the message in its next turn.", (text,), "Send", do)


def _cancel(page: OpenPage, row: SessionRow) -> None:
    async def do(values: FormValues) -> str:
        result = await control.cancel(page.actor, row.session, values["reason"])
        return f"Session {result.session} is cancelled. {result.sentence}"

    message = "Ends the session and cancels its running calls. This cannot be undone."
    open_dialog(page, f"Cancel {row.session}?", message, (REASON,), "Cancel the session", do, "stop")


def _translate_receipt(part: Facts | Listing | str, receipt: Receipt) -> Facts | Listing | str:
    """Replace the states and outcomes in a receipt with the labels of the pages."""
    match part:
        case Facts():
            reason = explain_terminal(receipt.state, receipt.terminal_reason or "")
            texts = {
                "agent": f"{receipt.agent}, {KINDS.get(receipt.kind, receipt.kind)}",
                "state": f"{label_state(receipt.state).text}{f': {reason}' if reason else ''}",
            }
            return Facts("", [(name, texts.get(name, value)) for name, value in part.facts])
        case Listing() if "outcome" in part.columns:
            index = part.columns.index("outcome")
            rows = [[*row[:index], label_outcome(row[index]).text, *row[index + 1 :]] for row in part.rows]
            return replace(part, rows=rows)
        case _:
            return part


async def build_receipt_page(page: OpenPage, name: str) -> RefreshPage:
    """Show the receipt; it is not refreshed."""
    receipt = await queries.receipt(page.actor, name)
    with add_section(f"Receipt of {receipt.session}", card=True, heading=False):
        with add_box("div", "h-row"):
            add_link("Session", f"/session/{receipt.session}")
            add_link("Export with its journal", f"/download/session/{receipt.session}").props["download"] = ""
        add_sheet([_translate_receipt(part, receipt) for part in build_receipt_sheet(receipt)])

    async def refresh(_: FeedChanges) -> None:
        pass

    return refresh
