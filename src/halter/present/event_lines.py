"""The lines of `halter up`: the events worth showing, in the context of earlier events."""

import msgspec

from halter.core.events import (
    AnyEvent,
    ArtifactEvent,
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
    HistoryGiven,
    ItemSeen,
    JudgesChosen,
    MessageRouted,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionWoken,
    TriggerEvent,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
)
from halter.core.ids import parse_session_id
from halter.core.messages import Reply, ToolCall
from halter.core.money import format_micros
from halter.core.ports import Stored
from halter.core.text import clean, format_count, shorten
from halter.loop.turn import ASK_USER, YIELD
from halter.present.events import MAX_EVENT_TEXT, URGENT_STYLE, EventContext, StyledLine, summarize_event
from halter.present.moments import format_hour


class EventLines:
    """The lines of `halter up`: the events worth showing, in the context of earlier events."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._questions: dict[str, str] = {}
        self._documents: dict[str, str] = {}
        self._widest = 0

    def line(self, stored_event: Stored) -> StyledLine | None:
        """Render an event as one line; None if it is not worth showing."""
        session = parse_session_id(stored_event.stream) or ""
        self._note(session, stored_event)
        if not _is_notable(stored_event.event):
            return None
        used, question = "", ""
        if isinstance(stored_event.event, TurnEnded | TurnSkipped):
            calls, spent_micros = self._calls.pop(session, 0), self._spent.pop(session, 0)
            counts = [format_count(calls, "call")] if calls else []
            used = "".join(f", {part}" for part in (*counts, format_micros(spent_micros)))
        if isinstance(stored_event.event, SessionParked) and stored_event.event.state == "WAITING_FOR_INPUT":
            question = self._questions.pop(session, "")
        line = summarize_event(stored_event, EventContext(self._documents, used, question))
        text = f"Needs you: {line.text}" if line.style == URGENT_STYLE else line.text
        return StyledLine(
            self.format_line(stored_event.at, session or stored_event.stream.removeprefix("trigger:"), text), line.style
        )

    def format_line(self, at: int, name: str, text: str) -> str:
        self._widest = max(self._widest, len(name))
        return f"{format_hour(at)} {name:<{self._widest}} {shorten(' '.join(clean(text).split()), MAX_EVENT_TEXT)}"

    def _note(self, session: str, stored_event: Stored) -> None:
        match stored_event.event:
            case ItemSeen() as event:
                self._documents[event.item] = event.name
            case CallStarted() as event:
                self._calls[session] = self._calls.get(session, 0) + (event.tool != YIELD)
            case CallSettled() as event:
                self._spent[session] = self._spent.get(session, 0) + event.cost_micros
            case RequestSettled() as event:
                if event.charge:
                    self._spent[session] = self._spent.get(session, 0) + event.charge.usd
                if event.outcome == "ok":
                    self._questions[session] = _find_question(stored_event.body or b"")
            case _:
                pass


def _is_notable(event: AnyEvent | Unknown) -> bool:
    match event:
        case ItemSeen():
            return not event.ignored
        case RequestSettled():
            return event.outcome != "ok" or bool(event.usage and event.usage.unpriced)
        case SessionParked():
            return event.state in {"SLEEPING", "PAUSED", "WAITING_FOR_INPUT"}
        case WakePosted():
            return event.notifies or event.cause in {"signal", "message"}
        case _:
            return isinstance(event, _NotableEvent)


_NotableEvent = (
    ArtifactEvent
    | TriggerEvent
    | PhaseEntered
    | ContextGiven
    | HistoryGiven
    | DocumentRead
    | JudgesChosen
    | MessageRouted
    | CallRefused
    | RequestRefused
    | TurnStarted
    | TurnEnded
    | TurnSkipped
    | SessionWoken
    | SessionEnded
    | SessionResumed
    | GuardrailTriggered
    | SensorChanged
    | AttendingFailed
    | DecisionAsked
    | DecisionMade
    | CostCapReached
    | OverrunIncurred
)


class _QuestionArguments(msgspec.Struct, frozen=True):
    question: str = ""


def _find_question(body: bytes) -> str:
    try:
        parts = msgspec.json.decode(body, type=Reply).parts
        questions = [part.arguments for part in parts if isinstance(part, ToolCall) and part.tool == ASK_USER]
        return msgspec.json.decode(questions[-1], type=_QuestionArguments).question if questions else ""
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
