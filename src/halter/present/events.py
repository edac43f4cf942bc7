"""An event in a few words: what matters in it for somebody who watches.

What events of triggers and tasks say, in a few words for a person.

Moments as people read them, in their own time zone.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from halter.core.clock import SECOND, format_duration
from halter.core.events import (
    AgentSwitched,
    AnyEvent,
    ArtifactEvent,
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
    FindingReviewed,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HotStateSeen,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageAdded,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OverrunIncurred,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RuleEnded,
    RuleMade,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    StoreAccepted,
    ToolPinned,
    TriggerEnded,
    TriggerEvent,
    TriggerMade,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
    WakePosted,
    YieldRequest,
)
from halter.core.messages import Message, Reply, Text, ToolCall, ToolResult
from halter.core.money import Charge, Leg, format_micros
from halter.core.text import from_body, shorten


def format_moment(at: int) -> str:
    """Write a moment with its day."""
    return _to_local(at).strftime("%Y-%m-%d %H:%M:%S")


def format_hour(at: int) -> str:
    """Write the time of a day."""
    return _to_local(at).strftime("%H:%M:%S")


def format_relative_moment(at: int, now: int) -> str:
    """Write a moment as seen from another one: with its day, where that is not the same."""
    return format_hour(at) if _to_local(at).date() == _to_local(now).date() else format_moment(at)


def _to_local(at: int) -> datetime:
    return datetime.fromtimestamp(at / SECOND, UTC).astimezone()


def summarize_task_event(event: PhaseEntered | ContextGiven | DocumentRead | JudgesChosen | MessageRouted) -> str:
    """Tell of a task's walk."""
    match event:
        case PhaseEntered():
            return event.phase
        case ContextGiven():
            return f"{len(event.memories)} memories and {len(event.precedents)} precedents"
        case DocumentRead():
            return f"{event.name} ({event.document[:16]})"
        case JudgesChosen():
            return f"{event.chosen} of {event.wanted} for {event.items} findings{_format_task_reason(event.sentence)}"
        case MessageRouted():
            return f"{event.strategy or event.route}{_format_task_reason(event.why)}"


def summarize_artifact_event(event: ArtifactEvent) -> str:
    """Tell of findings, proposals and notifications."""
    match event:
        case FindingEmitted():
            about = f" in {event.name}" if event.name else ""
            return f"{event.finding}: {event.severity}, {event.support}{about}"
        case FindingReviewed():
            return f"{event.finding}: {event.verdict}"
        case MemoryProposed():
            return event.memory
        case PrecedentProposed():
            return f"{event.precedent}, {event.kind}"
        case ProposalDecided():
            return f"{event.about} {event.proposal}: {event.status}, by {event.by}{_format_task_reason(event.reason)}"
        case NotificationQueued():
            return f"{event.notification} over {event.channel}"
        case NotificationSent():
            return event.notification
        case NotificationFailed():
            again = f", again at {format_moment(event.next_at)}" if event.next_at is not None else ", and not again"
            return f"{event.notification}, {event.attempts} times{again}: {event.error}"


def summarize_trigger_event(event: TriggerEvent) -> str:
    """Tell of what starts sessions."""
    match event:
        case TriggerMade():
            return f"{event.trigger}, a {event.type}, by {event.by}"
        case TriggerEnded():
            return f"{event.trigger}, by {event.by}{_format_task_reason(event.reason)}"
        case RunStarted():
            attempt = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return f"{event.session} by {event.cause}{attempt}"
        case RunSkipped():
            times = (
                f"{event.count} times up to {format_moment(event.due_at)}"
                if event.count > 1
                else format_moment(event.due_at)
            )
            return f"{times}, {event.why}{_format_task_reason(event.sentence)}"
        case RunQueued():
            return f"due {format_moment(event.due_at)}"
        case RunsDelayed():
            until = f" until {format_moment(event.until)}" if event.until is not None else ""
            return f"{event.waiting} wait{until}{_format_task_reason(event.sentence)}"
        case ItemSeen():
            return f"{event.name} ({event.item[:16]}){', which does not count' if event.ignored else ''}"
        case ItemQuarantined():
            return f"{event.item[:16]} after {event.attempts} attempts{_format_task_reason(event.sentence)}"
        case ItemReleased():
            return f"{event.item[:16]}, by {event.by}"


class _Words(msgspec.Struct, frozen=True):
    """What findings and notifications say, as far as a person is shown it."""

    title: str = ""
    subject: str = ""
    text: str = ""
    quote: str = ""


def find_title(body: bytes) -> str:
    """Find the title of a finding, or the subject of a notification; nothing where it cannot be read."""
    words = _words(body)
    return words.title or words.subject


def describe_task_event(body: bytes) -> str:
    """Say all that a finding or a notification says, each part on lines of its own."""
    words = _words(body)
    parts = (words.title or words.subject, words.text, f'"{words.quote}"' if words.quote else "")
    return "\n".join(part for part in parts if part)


def _words(body: bytes) -> _Words:
    try:
        return msgspec.json.decode(body, type=_Words)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Words()


def _format_task_reason(reason: str) -> str:
    return f": {reason}" if reason else ""


MAX_EVENT_TEXT = 200


def summarize_event(event: AnyEvent | Unknown) -> str:
    """Say what an event is about."""
    return shorten(" ".join(_summarize(event).split()), MAX_EVENT_TEXT)


def describe_event(event: AnyEvent | Unknown, body: bytes) -> str:
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
                return describe_task_event(body) or from_body(body)
            case _:
                return from_body(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return from_body(body)


def _parts(parts: Sequence[Text | ToolCall | ToolResult]) -> str:
    words = [f"{part.tool} {part.arguments}" if isinstance(part, ToolCall) else part.text for part in parts]
    return "\n".join(word for word in words if word)


def _summarize(event: AnyEvent | Unknown) -> str:
    if isinstance(event, ArtifactEvent):
        return summarize_artifact_event(event)
    if isinstance(event, TriggerEvent):
        return summarize_trigger_event(event)
    match event:
        case SessionStarted() | SessionWoken() | SessionParked() | SessionEnded() | WakePosted():
            return _summarize_life(event)
        case SessionResumed() | TurnStarted() | MessageAdded() | ContextCut() | TurnEnded():
            return _summarize_turn(event)
        case CallStarted() | CallSettled() | CallRefused() | RequestStarted() | RequestSettled() | RequestRefused():
            return _summarize_work(event)
        case HaltRequested() | HaltLifted() | DecisionAsked() | DecisionMade() | RuleMade() | RuleEnded():
            return _summarize_people(event)
        case CostCapReached() | OverrunIncurred() | CapChanged():
            return _summarize_money(event)
        case HotStateSeen() | TurnSkipped() | GuardrailTriggered() | SensorChanged() | AttendingFailed():
            return _summarize_autonomy(event)
        case PhaseEntered() | ContextGiven() | DocumentRead() | JudgesChosen() | MessageRouted():
            return summarize_task_event(event)
        case AgentSwitched():
            return f"{event.agent} {'on' if event.on else 'off'}, by {event.by}{_format_reason(event.reason)}"
        case DecisionWithdrawn():
            return f"{event.decision}{_format_reason(event.why)}"
        case ToolPinned():
            return f"{event.tool} of {event.agent}, by {event.by}"
        case FleetPolicyAdopted():
            looser = f", looser in {', '.join(event.loosens)}" if event.loosens else ""
            return f"{event.digest[:12]}{looser}, by {event.by}{_format_reason(event.reason)}"
        case BodiesErased():
            return f"{event.stream} up to {event.through}, by {event.by}{_format_reason(event.reason)}"
        case StoreAccepted():
            return f"by {event.by}{_format_reason(event.reason)}. {event.lacks}"
        case Unknown():
            return from_body(event.facts)


def _summarize_life(event: SessionStarted | SessionWoken | SessionParked | SessionEnded | WakePosted) -> str:
    match event:
        case SessionStarted():
            after = f", after {event.follows}: {event.because}" if event.follows else ""
            return f"{event.agent} ({event.kind}), by {event.started_by}{after}"
        case SessionWoken():
            return f"by {event.cause}"
        case SessionParked():
            until = f" until {format_moment(event.wake_at)}" if event.wake_at is not None else ""
            early = f", or by {', '.join(event.wake_on)}" if event.wake_on else ""
            return f"{event.state}{until}{early}"
        case SessionEnded():
            return f"{event.state}, {event.terminal_reason}"
        case WakePosted():
            alert = ", an alert" if event.notifies else ""
            return f"{event.cause} {event.name} from {event.sender} ({event.origin}){alert}"


def _summarize_turn(event: SessionResumed | TurnStarted | MessageAdded | ContextCut | TurnEnded) -> str:
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
            return f"turn {event.turn}, {event.why}{_yield(event.yielded)}{_format_reason(event.sentence)}"


def _yield(yielded: YieldRequest | None) -> str:
    if yielded is None:
        return ""
    sleep = f" {format_duration(yielded.sleep)}" if yielded.mode == "sleep" else ""
    return f", {yielded.mode}{sleep}{_format_reason(yielded.reason)}"


def _summarize_autonomy(
    event: HotStateSeen | TurnSkipped | GuardrailTriggered | SensorChanged | AttendingFailed,
) -> str:
    match event:
        case HotStateSeen():
            return f"by turn {event.turn}"
        case TurnSkipped():
            return f"{event.stage}, {event.skips} in a row{_format_reason(event.sentence)}"
        case GuardrailTriggered():
            until = f" until {format_moment(event.until)}" if event.until is not None else ""
            return f"{event.guardrail}{until}{_format_reason(event.sentence)}"
        case SensorChanged():
            return f"{event.sensor} is {event.health}{_format_reason(event.sentence)}"
        case AttendingFailed():
            left = ", so it is left to a person" if event.quarantined else ""
            return f"{event.failures} in a row{left}: {event.error}"


def _summarize_work(
    event: CallStarted | CallSettled | CallRefused | RequestStarted | RequestSettled | RequestRefused,
) -> str:
    match event:
        case CallStarted():
            by = f", agreed to by {event.decided_by}" if event.decided_by else ""
            return f"{event.tool} {event.level} {event.risk or ''}{_format_holds(event.legs)}{by}"
        case CallSettled():
            took = format_duration(event.duration_ms * 1000)
            return f"{event.call} {event.outcome} in {took}{_cost(event.charge)} {event.error}"
        case CallRefused():
            return f"{event.tool} {event.outcome}: {event.sentence}"
        case RequestStarted():
            return f"{event.model} for {event.purpose}{_format_holds(event.legs)}"
        case RequestSettled():
            return f"{event.request} {event.outcome}{_cost(event.charge)} {event.error}"
        case RequestRefused():
            return f"{event.model} for {event.purpose} {event.outcome}: {event.sentence}"


def _summarize_people(event: HaltRequested | HaltLifted | DecisionAsked | DecisionMade | RuleMade | RuleEnded) -> str:
    match event:
        case HaltRequested():
            return f"{event.scope}{' for good' if event.cancels else ''}, by {event.by}{_format_reason(event.reason)}"
        case HaltLifted():
            return f"{event.scope}, by {event.by}{_format_reason(event.reason)}"
        case DecisionAsked():
            return f"{event.about} of {event.name}, as {event.decision}"
        case DecisionMade():
            return f"{event.verdict} by {event.by} on {event.decision}{_format_reason(event.reason)}"
        case RuleMade():
            return f"{event.rule}: {event.tool} in {event.scope} {event.owner}, by {event.by}"
        case RuleEnded():
            return f"{event.rule}, by {event.by}{_format_reason(event.reason)}"


def _summarize_money(event: CostCapReached | OverrunIncurred | CapChanged) -> str:
    where = f"{event.scope} {event.window}".strip()

    def amount(number: int) -> str:
        return format_micros(number) if event.unit == "usd" else f"{number:,} tokens"

    match event:
        case CostCapReached():
            return f"{event.name} may cost {amount(event.amount)}, {where} has {amount(event.cap)}"
        case OverrunIncurred():
            return f"{amount(event.amount)} beyond the cap of {where}"
        case CapChanged():
            cap = "no cap" if event.cap is None else amount(event.cap)
            return f"{where} has {cap}, by {event.by}{_format_reason(event.reason)}"


def _format_holds(legs: tuple[Leg, ...]) -> str:
    most = max((leg.amount for leg in legs if leg.unit == "usd"), default=0)
    return f", {format_micros(most)} held" if most else ""


def _cost(charge: Charge | None) -> str:
    return f", {format_micros(charge.usd)}" if charge and charge.usd else ""


def _format_reason(reason: str) -> str:
    return f": {reason}" if reason else ""
