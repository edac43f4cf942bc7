"""Agents that run by themselves, on the screen: a line for whatever a person would want to know of."""

from typing import Final

import msgspec

from halter.app.words.moments import hour, moment
from halter.brain.turn import ASK_USER, YIELD
from halter.cli.styles import LOOK, NEEDED, PLAIN, Line
from halter.cli.view_tasks import Items, of_a_walk, of_what_is_left
from halter.core.clock import SECOND
from halter.core.durations import shown_duration
from halter.core.events import (
    AttendingFailed,
    CallRefused,
    CallSettled,
    CallStarted,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DocumentRead,
    GuardrailTriggered,
    JudgesChosen,
    Leaving,
    MessageRouted,
    OfTriggers,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
    Yielded,
)
from halter.core.ids import session_of
from halter.core.messages import Reply, ToolCall
from halter.core.money import shown
from halter.core.ports import Stored
from halter.core.text import clean, counted, from_body, shorten

WIDEST: Final = 200


class View:
    """Makes lines of events. It knows what each session has spent since its last turn."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._asked: dict[str, str] = {}
        self._items = Items()
        self._widest = 0

    def line(self, stored: Stored) -> Line | None:
        """Write an event on one line, if it is worth one."""
        session = session_of(stored.stream) or ""
        said = self._said(stored, session)
        if said is None:
            return None
        name = session or stored.stream.removeprefix("trigger:")
        return Line(self.placed(stored.at, name, said.text), said.style)

    def placed(self, at: int, name: str, text: str) -> str:
        """Put the time and a name before some words."""
        self._widest = max(self._widest, len(name))
        return f"{hour(at)} {name:<{self._widest}} {shorten(' '.join(clean(text).split()), WIDEST)}"

    def _said(self, stored: Stored, session: str) -> Line | None:
        if isinstance(stored.event, OfTriggers):
            return self._items.line(stored.event, stored.at)
        if isinstance(stored.event, Leaving):
            return of_what_is_left(stored.event, stored.body or b"")
        match stored.event:
            case PhaseEntered() | ContextGiven() | DocumentRead() | JudgesChosen() | MessageRouted() as event:
                return of_a_walk(event)
            case CallStarted() as event:
                self._calls[session] = self._calls.get(session, 0) + (event.tool != YIELD)
                return None
            case RequestSettled() | CallSettled() | CallRefused() | RequestRefused() as event:
                return self._of_work(session, event, stored.body or b"")
            case TurnStarted() | TurnEnded() | TurnSkipped() as event:
                return self._of_a_turn(session, event)
            case SessionParked() as event:
                return self._rests(session, event, stored.at)
            case SessionWoken() | SessionEnded() | SessionResumed() | WakePosted() as event:
                return _of_a_life(event, from_body(stored.body or b""))
            case GuardrailTriggered() | SensorChanged() | AttendingFailed() as event:
                return _of_trouble(session, event)
            case DecisionAsked() | DecisionMade() | CostCapReached() | OverrunIncurred() as event:
                return _of_people(event)
            case _:
                return None

    def _of_work(
        self, session: str, event: RequestSettled | CallSettled | CallRefused | RequestRefused, body: bytes
    ) -> Line | None:
        if isinstance(event, RequestSettled | CallSettled) and event.charge:
            self._spent[session] = self._spent.get(session, 0) + event.charge.usd
        match event:
            case RequestSettled(outcome="ok"):
                self._asked[session] = _question(body)
                return None
            case RequestSettled():
                return Line(f"the model gave no answer: {event.error or event.outcome}", LOOK)
            case CallSettled():
                return None
            case CallRefused():
                return Line(f"{event.tool} was refused ({event.outcome}): {event.sentence}", LOOK)
            case RequestRefused():
                return Line(f"{event.model} was not asked ({event.outcome}): {event.sentence}", LOOK)

    def _of_a_turn(self, session: str, event: TurnStarted | TurnEnded | TurnSkipped) -> Line:
        match event:
            case TurnStarted():
                return Line(f"turn {event.turn} begins")
            case TurnEnded():
                how = _yielded(event.yielded) if event.yielded else _ended(event, task="." in session)
                why = f": {how}" if how else ""
                return Line(f"turn {event.turn} ends{self._used(session)}{why}", LOOK if event.sentence else PLAIN)
            case TurnSkipped():
                in_a_row = f", {event.skips} in a row" if event.skips > 1 else ""
                why = f": {event.sentence}" if event.sentence else ""
                return Line(f"skips a turn{in_a_row}{self._used(session)}{why}")

    def _used(self, session: str) -> str:
        """Tell what was done and spent since the last time."""
        calls, spent = self._calls.pop(session, 0), self._spent.pop(session, 0)
        made = [counted(calls, "call")] if calls else []
        return "".join(f", {part}" for part in (*made, shown(spent)))

    def _rests(self, session: str, event: SessionParked, now: int) -> Line | None:
        match event.state:
            case "PAUSED" if event.wake_at is not None:
                ends = moment(event.wake_at, now)
                return Line(f"Needs you: it is paused, and ends at {ends} without halter on {_agent(session)}", NEEDED)
            case "SLEEPING" if event.wake_at is not None:
                early = f", or by {', '.join(event.wake_on)}" if event.wake_on else ""
                length = shown_duration(max(SECOND, event.wake_at - now + SECOND // 2))
                return Line(f"sleeps {length}, until {moment(event.wake_at, now)}{early}")
            case "SLEEPING":
                return Line(f"sleeps until {', '.join(event.wake_on) or 'somebody says something'}")
            case "WAITING_FOR_INPUT":
                question = self._asked.pop(session, "")
                return Line(f"Needs you: {question or 'it waits for a word.'} Answer it with halter chat.", NEEDED)
            case "PAUSED":
                return Line("rests until somebody says something")
            case _:
                return None


def _question(body: bytes) -> str:
    """Find what the model asks a person, if it does."""
    try:
        parts = msgspec.json.decode(body, type=Reply).parts
        asked = [part.arguments for part in parts if isinstance(part, ToolCall) and part.tool == ASK_USER]
        return msgspec.json.decode(asked[-1], type=_Asked).question if asked else ""
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""


class _Asked(msgspec.Struct, frozen=True):
    question: str = ""


def _yielded(yielded: Yielded) -> str:
    reason = f" ({yielded.reason})" if yielded.reason else ""
    match yielded.mode:
        case "continue":
            return f"on at once{reason}"
        case "sleep":
            return f"sleep {shown_duration(yielded.sleep)}{reason}"
        case "shutdown":
            return f"shut down{reason}"


def _ended(event: TurnEnded, *, task: bool) -> str:
    """Say why a turn ended. A task goes on to its next phase, and needs no word for that."""
    match event.why:
        case "ended" | "yielded":
            return event.sentence or ("" if task else "it said nothing of how to go on")
        case "asked":
            return "it asks you something"
        case _:
            return f"{event.why}. {event.sentence}".strip()


def _of_a_life(event: SessionWoken | SessionEnded | SessionResumed | WakePosted, said: str) -> Line | None:
    match event:
        case SessionWoken(cause="takeover"):
            return Line("is taken up where it stood")
        case SessionWoken():
            return Line(f"wakes, by {event.cause}")
        case SessionEnded():
            return Line(f"is over: {event.state}, {event.terminal_reason}")
        case SessionResumed():
            return Line(f"may go on, says {event.by}")
        case WakePosted(notifies=True, origin="person"):
            return Line(f"hears: {said}")
        case WakePosted(notifies=True):
            return Line(f"alert: {said}", LOOK)
        case WakePosted(cause="signal"):
            return Line(f"{event.name} of {event.sender}" if event.name != event.sender else f"{event.name} has news")
        case WakePosted(cause="message"):
            return Line(f"hears from {event.sender}")
        case WakePosted():
            return None


def _agent(session: str) -> str:
    """Tell whose session it is, by its name: those of an agent itself are numbered, and those of its triggers too."""
    return session.rpartition("-")[0].partition(".")[0]


def _of_trouble(session: str, event: GuardrailTriggered | SensorChanged | AttendingFailed) -> Line:
    match event:
        case GuardrailTriggered(guardrail="model_rate"):
            return Line(event.sentence)
        case GuardrailTriggered():
            return Line(f"guardrail {event.guardrail}: {event.sentence}", LOOK)
        case SensorChanged(health="failing"):
            return Line(f"sensor {event.sensor} fails: {event.sentence}", LOOK)
        case SensorChanged():
            return Line(f"sensor {event.sensor} reads")
        case AttendingFailed(quarantined=True):
            times = counted(event.failures, "time")
            told = f"Needs you: it broke down {times}, and goes on with halter on {_agent(session)}"
            return Line(f"{told}: {event.error}", NEEDED)
        case AttendingFailed():
            return Line(f"broke down, and is tried again: {event.error}", LOOK)


def _of_people(event: DecisionAsked | DecisionMade | CostCapReached | OverrunIncurred) -> Line:
    match event:
        case DecisionAsked():
            cap = " --cap AMOUNT" if event.about == "cap_raise" else ""
            return Line(f"Needs you: halter approve {event.decision}{cap} ({event.about} of {event.name})", NEEDED)
        case DecisionMade():
            return Line(f"{event.by} says {event.verdict}")
        case CostCapReached():
            where = f"{event.scope} {event.window}".strip()
            return Line(f"{event.name} does not fit the cap of {where}", LOOK)
        case OverrunIncurred():
            return Line(f"the cap of {event.scope} was passed", LOOK)
