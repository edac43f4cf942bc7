"""An event in a few words: what matters in it for somebody who watches."""

from collections.abc import Sequence

import msgspec

from halter.app.words.moments import written
from halter.app.words.told_tasks import in_words as words_of_a_task
from halter.app.words.told_tasks import of_a_task, of_a_trigger, of_what_is_left
from halter.core.durations import shown_duration
from halter.core.events import (
    AgentSwitched,
    AnyEvent,
    AttendingFailed,
    BodiesErased,
    CallRefused,
    CallSettled,
    CallStarted,
    CapChanged,
    ContextCut,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    DocumentRead,
    FindingEmitted,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HotStateSeen,
    JudgesChosen,
    Leaving,
    MessageAdded,
    MessageRouted,
    NotificationQueued,
    OfTriggers,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RuleEnded,
    RuleMade,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    StoreAccepted,
    ToolPinned,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
    Yielded,
)
from halter.core.messages import Message, Reply, Text, ToolCall, ToolResult
from halter.core.money import Charge, Leg, shown
from halter.core.text import from_body, shorten

WIDEST = 200


def told(event: AnyEvent | Unknown) -> str:
    """Say what an event is about."""
    return shorten(" ".join(_told(event).split()), WIDEST)


def in_words(event: AnyEvent | Unknown, body: bytes) -> str:
    """Say what was said with an event: of a message and of an answer its words, and the calls that it asks for."""
    try:
        match event:
            case TurnStarted():
                return _parts(msgspec.json.decode(body, type=Message).parts)
            case RequestSettled(outcome="ok"):
                return _parts(msgspec.json.decode(body, type=Reply).parts)
            case RequestStarted():
                return ""
            case FindingEmitted() | NotificationQueued():
                return words_of_a_task(body) or from_body(body)
            case _:
                return from_body(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return from_body(body)


def _parts(parts: Sequence[Text | ToolCall | ToolResult]) -> str:
    words = [f"{part.tool} {part.arguments}" if isinstance(part, ToolCall) else part.text for part in parts]
    return "\n".join(word for word in words if word)


def _told(event: AnyEvent | Unknown) -> str:
    if isinstance(event, Leaving):
        return of_what_is_left(event)
    if isinstance(event, OfTriggers):
        return of_a_trigger(event)
    match event:
        case SessionStarted() | SessionWoken() | SessionParked() | SessionEnded() | WakePosted():
            return _of_a_life(event)
        case SessionResumed() | TurnStarted() | MessageAdded() | ContextCut() | TurnEnded():
            return _of_a_turn(event)
        case CallStarted() | CallSettled() | CallRefused() | RequestStarted() | RequestSettled() | RequestRefused():
            return _of_work(event)
        case HaltRequested() | HaltLifted() | DecisionAsked() | DecisionMade() | RuleMade() | RuleEnded():
            return _of_people(event)
        case CostCapReached() | OverrunIncurred() | CapChanged():
            return _of_money(event)
        case HotStateSeen() | TurnSkipped() | GuardrailTriggered() | SensorChanged() | AttendingFailed():
            return _of_autonomy(event)
        case PhaseEntered() | ContextGiven() | DocumentRead() | JudgesChosen() | MessageRouted():
            return of_a_task(event)
        case AgentSwitched():
            return f"{event.agent} {'on' if event.on else 'off'}, by {event.by}{_because(event.reason)}"
        case DecisionWithdrawn():
            return f"{event.decision}{_because(event.why)}"
        case ToolPinned():
            return f"{event.tool} of {event.agent}, by {event.by}"
        case FleetPolicyAdopted():
            looser = f", looser in {', '.join(event.loosens)}" if event.loosens else ""
            return f"{event.digest[:12]}{looser}, by {event.by}{_because(event.reason)}"
        case BodiesErased():
            return f"{event.stream} up to {event.through}, by {event.by}{_because(event.reason)}"
        case StoreAccepted():
            return f"by {event.by}{_because(event.reason)}. {event.lacks}"
        case Unknown():
            return from_body(event.facts)


def _of_a_life(event: SessionStarted | SessionWoken | SessionParked | SessionEnded | WakePosted) -> str:
    match event:
        case SessionStarted():
            after = f", after {event.follows}: {event.because}" if event.follows else ""
            return f"{event.agent} ({event.kind}), by {event.started_by}{after}"
        case SessionWoken():
            return f"by {event.cause}"
        case SessionParked():
            until = f" until {written(event.wake_at)}" if event.wake_at is not None else ""
            early = f", or by {', '.join(event.wake_on)}" if event.wake_on else ""
            return f"{event.state}{until}{early}"
        case SessionEnded():
            return f"{event.state}, {event.terminal_reason}"
        case WakePosted():
            alert = ", an alert" if event.notifies else ""
            return f"{event.cause} {event.name} from {event.sender} ({event.origin}){alert}"


def _of_a_turn(event: SessionResumed | TurnStarted | MessageAdded | ContextCut | TurnEnded) -> str:
    match event:
        case SessionResumed():
            return f"by {event.by}"
        case TurnStarted():
            return f"turn {event.turn} begins"
        case MessageAdded():
            return f"to the model, because of {event.reason}"
        case ContextCut():
            return f"messages before {event.through} are left out ({event.strategy})"
        case TurnEnded():
            return f"turn {event.turn}, {event.why}{_yield(event.yielded)}{_because(event.sentence)}"


def _yield(yielded: Yielded | None) -> str:
    if yielded is None:
        return ""
    sleep = f" {shown_duration(yielded.sleep)}" if yielded.mode == "sleep" else ""
    return f", {yielded.mode}{sleep}{_because(yielded.reason)}"


def _of_autonomy(event: HotStateSeen | TurnSkipped | GuardrailTriggered | SensorChanged | AttendingFailed) -> str:
    match event:
        case HotStateSeen():
            return f"by turn {event.turn}"
        case TurnSkipped():
            return f"{event.stage}, {event.skips} in a row{_because(event.sentence)}"
        case GuardrailTriggered():
            until = f" until {written(event.until)}" if event.until is not None else ""
            return f"{event.guardrail}{until}{_because(event.sentence)}"
        case SensorChanged():
            return f"{event.sensor} is {event.health}{_because(event.sentence)}"
        case AttendingFailed():
            left = ", so it is left to a person" if event.quarantined else ""
            return f"{event.failures} in a row{left}: {event.error}"


def _of_work(
    event: CallStarted | CallSettled | CallRefused | RequestStarted | RequestSettled | RequestRefused,
) -> str:
    match event:
        case CallStarted():
            by = f", agreed to by {event.decided_by}" if event.decided_by else ""
            return f"{event.tool} {event.level} {event.risk or ''}{_held(event.legs)}{by}"
        case CallSettled():
            took = shown_duration(event.duration_ms * 1000)
            return f"{event.call} {event.outcome} in {took}{_cost(event.charge)} {event.error}"
        case CallRefused():
            return f"{event.tool} {event.outcome}: {event.sentence}"
        case RequestStarted():
            return f"{event.model} for {event.purpose}{_held(event.legs)}"
        case RequestSettled():
            return f"{event.request} {event.outcome}{_cost(event.charge)} {event.error}"
        case RequestRefused():
            return f"{event.model} for {event.purpose} {event.outcome}: {event.sentence}"


def _of_people(event: HaltRequested | HaltLifted | DecisionAsked | DecisionMade | RuleMade | RuleEnded) -> str:
    match event:
        case HaltRequested():
            return f"{event.scope}{' for good' if event.cancels else ''}, by {event.by}{_because(event.reason)}"
        case HaltLifted():
            return f"{event.scope}, by {event.by}{_because(event.reason)}"
        case DecisionAsked():
            return f"{event.about} of {event.name}, as {event.decision}"
        case DecisionMade():
            return f"{event.verdict} by {event.by} on {event.decision}{_because(event.reason)}"
        case RuleMade():
            return f"{event.rule}: {event.tool} in {event.scope} {event.owner}, by {event.by}"
        case RuleEnded():
            return f"{event.rule}, by {event.by}{_because(event.reason)}"


def _of_money(event: CostCapReached | OverrunIncurred | CapChanged) -> str:
    where = f"{event.scope} {event.window}".strip()

    def amount(number: int) -> str:
        return shown(number) if event.unit == "usd" else f"{number:,} tokens"

    match event:
        case CostCapReached():
            return f"{event.name} may cost {amount(event.amount)}, {where} has {amount(event.cap)}"
        case OverrunIncurred():
            return f"{amount(event.amount)} beyond the cap of {where}"
        case CapChanged():
            cap = "no cap" if event.cap is None else amount(event.cap)
            return f"{where} has {cap}, by {event.by}{_because(event.reason)}"


def _held(legs: tuple[Leg, ...]) -> str:
    most = max((leg.amount for leg in legs if leg.unit == "usd"), default=0)
    return f", {shown(most)} held" if most else ""


def _cost(charge: Charge | None) -> str:
    return f", {shown(charge.usd)}" if charge and charge.usd else ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
