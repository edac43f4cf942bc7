"""Descriptions of events: one sentence for each kind, for `halter up`, `tail`, `show` and the dashboard."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from halter.core.clock import SECOND, format_duration
from halter.core.events import (
    AgentSwitched,
    AnyEvent,
    ApprovalGiven,
    ApproverPaired,
    ApproverRemoved,
    ArtifactEvent,
    AttendingFailed,
    BodiesErased,
    CallRefused,
    CallSettled,
    CallStarted,
    CapChanged,
    ChannelEvent,
    ChannelTaken,
    ContextCut,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionShown,
    DecisionWithdrawn,
    DocumentRead,
    FilesGiven,
    FindingEmitted,
    FindingReviewed,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HistoryGiven,
    HoldMade,
    HoldReleased,
    HotStateSeen,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageAdded,
    MessageClosed,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OverrunIncurred,
    PairingOffered,
    PersonSignedOn,
    PhaseEntered,
    PrecedentProposed,
    PricesChanged,
    ProposalDecided,
    RepliesRead,
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
    SignOnRefused,
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
)
from halter.core.events.sessions import YieldRequest
from halter.core.events.tasks import describe_verdict
from halter.core.folders import AGENT_FILE_NAME
from halter.core.ids import parse_session_id
from halter.core.messages import Message, Reply, Text, ToolCall, ToolResult
from halter.core.money import Charge, Leg, format_compared, format_micros, to_unit_amount
from halter.core.ports import Stored
from halter.core.text import clean, decode_body, format_count, shorten
from halter.core.usage import Usage
from halter.core.vocabulary import SignOnRefusal
from halter.loop.turn import ASK_USER, YIELD
from halter.provenance.check import describe_flaw
from halter.state.channel import hide_topic

MAX_EVENT_TEXT: Final = 200
PLAIN: Final = ""
WARNING_STYLE: Final = "yellow"
URGENT_STYLE: Final = "bold yellow"
URGENT_SEVERITIES: Final = frozenset(("high", "critical"))


class StyledLine(msgspec.Struct, frozen=True):
    """A line of text and its style; a line in `URGENT_STYLE` needs a person."""

    text: str
    style: str = PLAIN


def describe_review(review: str | None) -> str:
    """Describe the review of a finding; "not reviewed" without one."""
    return (review or "not_reviewed").replace("_", " ")


def format_moment(at: int) -> str:
    return _to_local(at).strftime("%Y-%m-%d %H:%M:%S")


def format_hour(at: int) -> str:
    return _to_local(at).strftime("%H:%M:%S")


def format_relative_moment(at: int, now: int) -> str:
    """Format a moment, with its day if that is not today."""
    return format_hour(at) if _to_local(at).date() == _to_local(now).date() else format_moment(at)


def _to_local(at: int) -> datetime:
    return datetime.fromtimestamp(at / SECOND, UTC).astimezone()


class EventContext(msgspec.Struct, frozen=True):
    """Facts from earlier events: names of documents, the calls and cost of the turn, the model's open question."""

    documents: Mapping[str, str] = {}
    used: str = ""
    question: str = ""

    def document(self, item: str) -> str:
        return self.documents.get(item, f"document {item[:12]}")


NO_CONTEXT: Final = EventContext()


def summarize_event(stored_event: Stored, context: EventContext = NO_CONTEXT) -> StyledLine:
    """Summarize an event in one line."""
    line = _summarize(stored_event, context)
    styled_line = StyledLine(line) if isinstance(line, str) else line
    return StyledLine(shorten(" ".join(clean(styled_line.text).split()), MAX_EVENT_TEXT), styled_line.style)


def _summarize(stored_event: Stored, context: EventContext) -> str | StyledLine:
    event, text = stored_event.event, decode_body(stored_event.body or b"")
    if isinstance(event, ArtifactEvent):
        return _summarize_artifact(event, stored_event.body or b"")
    if isinstance(event, TriggerEvent):
        return _summarize_trigger(event, stored_event.at, context)
    if isinstance(event, ChannelEvent):
        return _summarize_channel(event)
    match event:
        case SessionStarted() | SessionWoken() | SessionParked() | SessionResumed() | SessionEnded() | WakePosted():
            return _summarize_life(event, stored_event, text, context)
        case TurnEnded() if text:
            line = _summarize_turn(event, context.used, task="." in (parse_session_id(stored_event.stream) or ""))
            return StyledLine(f"{line if isinstance(line, str) else line.text}. {text}", WARNING_STYLE)
        case TurnStarted() | TurnEnded() | TurnSkipped() | MessageAdded() | ContextCut() | HotStateSeen():
            return _summarize_turn(event, context.used, task="." in (parse_session_id(stored_event.stream) or ""))
        case CallStarted() | CallSettled() | CallRefused() | RequestStarted() | RequestSettled() | RequestRefused():
            return _summarize_work(event)
        case DecisionAsked() | DecisionMade() | DecisionWithdrawn() | RuleMade() | RuleEnded() | ToolPinned():
            return _summarize_decision(event)
        case ApprovalGiven():
            return f"{event.by} approves {event.decision}; another approver is needed{_because(event.reason)}"
        case CostCapReached() | OverrunIncurred() | CapChanged():
            return _summarize_money(event)
        case HoldMade():
            amount = max([leg.amount for leg in event.legs if leg.unit == "usd"], default=0)
            return f"{format_micros(amount)} is held for {event.name} until a person decides"
        case HoldReleased():
            return f"for {event.hold}"
        case GuardrailTriggered() | SensorChanged() | AttendingFailed():
            return _summarize_trouble(event, parse_session_id(stored_event.stream) or "")
        case PhaseEntered() | ContextGiven() | HistoryGiven() | DocumentRead() | JudgesChosen() | MessageRouted():
            return _summarize_task(event)
        case FilesGiven():
            return f"files came with {f'the result of {event.call}' if event.call else 'the next message'}"
        case HaltRequested() | HaltLifted() | AgentSwitched() | FleetPolicyAdopted() | BodiesErased() | StoreAccepted():
            return _summarize_control(event)
        case PricesChanged():
            return _summarize_prices(event)
        case PersonSignedOn() | SignOnRefused():
            return _summarize_sign_on(event)
        case Unknown():
            return decode_body(event.facts)


def _summarize_task(
    event: PhaseEntered | ContextGiven | HistoryGiven | DocumentRead | JudgesChosen | MessageRouted,
) -> str | StyledLine:
    match event:
        case PhaseEntered():
            return f"enters {event.phase}"
        case ContextGiven():
            memories = f"{len(event.memories)} {'memory' if len(event.memories) == 1 else 'memories'}"
            return f"gets {memories} and {format_count(len(event.precedents), 'precedent')}"
        case HistoryGiven():
            source = f"event {event.through} of {event.session}" if event.session else "its program"
            return f"begins with {format_count(event.messages, 'message')} from {source}"
        case DocumentRead():
            return f"reads {event.name} ({event.document[:12]})"
        case JudgesChosen():
            has_fewer = event.chosen < event.wanted
            judges = format_count(event.wanted, "judge")
            text = f"{f'{event.chosen} of ' if has_fewer else ''}{judges} for {format_count(event.items, 'finding')}"
            return StyledLine(f"{text}{_because(event.sentence)}", WARNING_STYLE if has_fewer else PLAIN)
        case MessageRouted():
            return f"is routed as {event.strategy or event.route}{_because(event.why)}"


def _summarize_artifact(event: ArtifactEvent, body: bytes) -> str | StyledLine:
    match event:
        case FindingEmitted():
            document = f" in {event.name}" if event.name else ""
            support = "" if event.support == "supported" else f", {event.support}"
            text = f"finds ({event.severity}{support}){document}: {_read_content(body).heading or event.finding}"
            return StyledLine(text, WARNING_STYLE if event.severity in URGENT_SEVERITIES else PLAIN)
        case FindingReviewed(verdict="released"):
            return f"{event.finding} is released by its review"
        case FindingReviewed(verdict="withheld"):
            return StyledLine(f"{event.finding} is withheld by its review", WARNING_STYLE)
        case FindingReviewed():
            return StyledLine(f"{event.finding} was not reviewed", WARNING_STYLE)
        case MemoryProposed():
            return f"proposes the memory {event.memory}{_because(decode_body(body))}"
        case PrecedentProposed():
            return f"proposes the precedent {event.precedent} ({event.kind}){_because(decode_body(body))}"
        case ProposalDecided():
            verdict = describe_verdict(event.status)
            return f"{event.by} {verdict} the {event.about} {event.proposal}{_because(event.reason)}"
        case NotificationQueued():
            return f"sends {event.notification} over {event.channel}{_because(_read_content(body).heading)}"
        case NotificationSent():
            return f"sent {event.notification}"
        case NotificationFailed():
            retry_text = "will retry" if event.next_at is not None else "gave up"
            times = format_count(event.attempts, "attempt")
            text = f"could not send {event.notification} after {times}, {retry_text}: {event.error}"
            return StyledLine(text, WARNING_STYLE)


def _summarize_channel(event: ChannelEvent) -> str:
    match event:
        case ChannelTaken():
            return f"is served by {event.worker}"
        case PairingOffered():
            return f"offers a code to {event.name} ({event.role}), requested by {event.by}"
        case ApproverPaired():
            account = hide_topic(event.channel, event.account)
            return f"{event.name} ({event.role}) was paired as {account} by {event.by}"
        case ApproverRemoved():
            return f"{event.name} was removed by {event.by}{_because(event.reason)}"
        case DecisionShown():
            return f"shows {event.decision}{', cut' if event.cut else ''} in {hide_topic(event.channel, event.place)}"
        case MessageClosed():
            return f"shows an outcome in {hide_topic(event.channel, event.place)}"
        case RepliesRead():
            return f"has read replies up to {event.mark}"


def _summarize_trigger(event: TriggerEvent, now: int, context: EventContext) -> str | StyledLine:
    match event:
        case TriggerMade():
            origin = f"defined in {event.by}" if event.by == AGENT_FILE_NAME else f"created by {event.by}"
            return f"is a new {event.type}, {origin}"
        case TriggerEnded():
            return f"was ended by {event.by}{_because(event.reason)}"
        case RunStarted():
            item = f" for {context.document(event.item)}" if event.item else ""
            attempt_text = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return f"starts {event.session}{item}, by {event.by or event.cause}{attempt_text}"
        case RunSkipped():
            times = f" {format_count(event.count, 'time')}" if event.count > 1 else ""
            return StyledLine(f"does not run{times} ({event.why}){_because(event.sentence)}", WARNING_STYLE)
        case RunQueued():
            return "waits for the previous run"
        case RunsDelayed():
            until_text = f" until {format_relative_moment(event.until, now)}" if event.until is not None else ""
            text = f"keeps {event.waiting} waiting{until_text} ({event.why}){_because(event.sentence)}"
            return StyledLine(text, WARNING_STYLE)
        case ItemSeen():
            return f"finds {event.name}{' (ignored)' if event.ignored else ''}"
        case ItemQuarantined():
            attempts_text = f" after {format_count(event.attempts, 'attempt')}" if event.attempts else ""
            text = f"{context.document(event.item)} is quarantined{attempts_text}: {event.sentence}"
            return StyledLine(text, URGENT_STYLE)
        case ItemReleased():
            return f"{context.document(event.item)} is retried for {event.by}"


def _summarize_life(
    event: SessionStarted | SessionWoken | SessionParked | SessionResumed | SessionEnded | WakePosted,
    stored_event: Stored,
    text: str,
    context: EventContext,
) -> str | StyledLine:
    match event:
        case SessionStarted():
            predecessor = f", after {event.follows}: {event.because}" if event.follows else ""
            return f"{event.agent} ({event.kind}), by {event.started_by}{predecessor}"
        case SessionWoken(cause="takeover"):
            return "continues on another worker"
        case SessionWoken(recovered=True):
            return "model available again"
        case SessionWoken():
            return f"wakes, by {event.cause}"
        case SessionParked():
            return _summarize_rest(event, stored_event, context.question)
        case SessionResumed():
            return f"is resumed by {event.by}"
        case SessionEnded():
            return f"ended: {event.state}, {event.terminal_reason}"
        case WakePosted(notifies=True, origin="person"):
            return f"message: {text or event.sender}"
        case WakePosted(notifies=True):
            return StyledLine(f"alert: {text or event.sender}", WARNING_STYLE)
        case WakePosted(cause="signal"):
            return f"{event.name} of {event.sender}" if event.name != event.sender else f"{event.name} fires"
        case WakePosted(cause="message"):
            return f"message from {event.sender}"
        case WakePosted():
            return f"{event.cause} {event.name} from {event.sender} ({event.origin})"


def _summarize_rest(event: SessionParked, stored_event: Stored, question: str) -> str | StyledLine:
    now, wake_sources = stored_event.at, f", or by {', '.join(event.wake_on)}" if event.wake_on else ""
    wake_text = "" if event.wake_at is None else format_relative_moment(event.wake_at, now)
    match event.state:
        case _ if event.trouble == "needs_person":
            return StyledLine(f"model unusable: {event.sentence}; retrying at {wake_text}", URGENT_STYLE)
        case _ if event.trouble:
            return StyledLine(f"model unavailable: {event.sentence}; retrying at {wake_text}", WARNING_STYLE)
        case "PAUSED" if event.wake_at is not None:
            agent = _agent(parse_session_id(stored_event.stream) or "")
            return StyledLine(f"paused; ends at {wake_text} unless you run halter on {agent}", URGENT_STYLE)
        case "PAUSED":
            return "paused until a message arrives"
        case "SLEEPING" if event.wake_at is not None:
            length = format_duration(max(SECOND, event.wake_at - now + SECOND // 2))
            return f"sleeps {length}, until {wake_text}{wake_sources}"
        case "SLEEPING":
            return f"sleeps until {', '.join(event.wake_on) or 'a message arrives'}"
        case "WAITING_FOR_INPUT":
            return StyledLine(f"{question or 'Waiting for an answer.'} Answer with halter chat.", URGENT_STYLE)
        case _:
            return f"{event.state}{f' until {wake_text}' if wake_text else ''}{wake_sources}"


def _agent(session: str) -> str:
    """Name the agent of a session: `clerk` of `clerk-1` and of `clerk.papers-1`."""
    return session.rpartition("-")[0].partition(".")[0]


def _summarize_turn(
    event: TurnStarted | TurnEnded | TurnSkipped | MessageAdded | ContextCut | HotStateSeen, used: str, *, task: bool
) -> str | StyledLine:
    match event:
        case TurnStarted():
            return f"turn {event.turn} begins"
        case TurnEnded():
            reason = _describe_yield(event.yielded) if event.yielded else _describe_turn_end(event, task=task)
            return StyledLine(
                f"turn {event.turn} ends{used}{_because(reason)}", WARNING_STYLE if event.sentence else PLAIN
            )
        case TurnSkipped():
            in_a_row = f", {event.skips} in a row" if event.skips > 1 else ""
            return f"skips a turn{in_a_row}{used}{_because(event.sentence)}"
        case MessageAdded():
            return f"to the model, because of {event.reason}"
        case ContextCut():
            return f"messages before {event.through} are left out ({event.strategy})"
        case HotStateSeen():
            return f"by turn {event.turn}"


def _describe_yield(yielded: YieldRequest) -> str:
    reason = f" ({yielded.reason})" if yielded.reason else ""
    match yielded.mode:
        case "continue":
            return f"continue{reason}"
        case "sleep":
            return f"sleep {format_duration(yielded.sleep)}{reason}"
        case "shutdown":
            return f"shut down{reason}"


def _describe_turn_end(event: TurnEnded, *, task: bool) -> str:
    """Describe why a turn ended; "" if a task just proceeds to its next phase."""
    match event.why:
        case "ended" | "yielded":
            return event.sentence or ("" if task else "answered")
        case "asked":
            return "asks you a question"
        case _:
            return f"{event.why}. {event.sentence}".strip()


def _summarize_work(
    event: CallStarted | CallSettled | CallRefused | RequestStarted | RequestSettled | RequestRefused,
) -> str | StyledLine:
    match event:
        case CallStarted():
            by = f", approved by {event.decided_by}" if event.decided_by else ""
            return f"{event.tool} {event.level} {event.risk or ''}{_format_holds(event.legs)}{by}{_flaws(event)}"
        case CallSettled():
            took = format_duration(event.duration_ms * 1000)
            return f"{event.call} {event.outcome} in {took}{_cost(Charge(event.cost_micros))} {event.error}"
        case CallRefused(staged=True):
            question = "; ".join(describe_flaw(flaw) for flaw in event.flaws)
            return f"{event.tool} waits for approval, together with similar calls of its turn ({question})"
        case CallRefused():
            return StyledLine(f"{event.tool} was refused ({event.outcome}): {event.sentence}", WARNING_STYLE)
        case RequestStarted(guess=guess) if guess:
            return StyledLine(f"{event.model} for {event.purpose}{_format_holds(event.legs)}, {guess}", WARNING_STYLE)
        case RequestStarted():
            return f"{event.model} for {event.purpose}{_format_holds(event.legs)}"
        case RequestSettled(usage=Usage(unpriced=unpriced)) if unpriced:
            return StyledLine(
                f"{event.request} {event.outcome}{_cost(event.charge)}: the provider reported `{unpriced}`, which has"
                " no known price, so at least what was held is charged",
                WARNING_STYLE,
            )
        case RequestSettled(outcome="ok"):
            return f"{event.request} ok{_cost(event.charge)}"
        case RequestSettled():
            assumption = ASSUMED_COST if event.charge and event.charge.usd and event.usage is None else ""
            reason = event.error or event.outcome
            return StyledLine(f"model request failed{_cost(event.charge)}{assumption}: {reason}", WARNING_STYLE)
        case RequestRefused():
            text = f"request to {event.model} was refused ({event.outcome}): {event.sentence}"
            return StyledLine(text, WARNING_STYLE)


def _flaws(event: CallStarted) -> str:
    """Format the findings of the provenance check about a call that ran without approval."""
    if not event.flaws or event.decided_by:
        return ""
    return f"; would have needed approval: {'; '.join(map(describe_flaw, event.flaws))}"


def _summarize_decision(
    event: DecisionAsked | DecisionMade | DecisionWithdrawn | RuleMade | RuleEnded | ToolPinned,
) -> str | StyledLine:
    match event:
        case DecisionAsked():
            cap = " --cap AMOUNT" if event.about == "cap_raise" else ""
            text = f"halter approve {event.decision}{cap} ({event.about} of {event.name})"
            return StyledLine(text, URGENT_STYLE)
        case DecisionMade():
            return f"{event.people} says {event.verdict} to {event.decision}{_because(event.reason)}"
        case DecisionWithdrawn():
            return f"{event.decision}{_because(event.why)}"
        case RuleMade():
            return f"{event.rule}: {event.tool} in {event.scope} {event.owner}, by {event.by}"
        case RuleEnded():
            return f"{event.rule}, by {event.by}{_because(event.reason)}"
        case ToolPinned():
            return f"{event.tool} of {event.agent}, by {event.by}"


def _summarize_money(event: CostCapReached | OverrunIncurred | CapChanged) -> str | StyledLine:
    where = f"{event.scope} {event.window}".strip()

    def amount(number: int) -> str:
        return format_micros(number) if event.unit == "usd" else f"{number:,} tokens"

    match event:
        case CostCapReached():
            amounts = (to_unit_amount(number, event.unit) for number in (event.amount, event.cap))
            cost_text, cap_text = format_compared(event.unit, *amounts)
            text = f"{event.name} may cost {cost_text}; the cap of {where} is {cap_text}"
            return StyledLine(text, WARNING_STYLE)
        case OverrunIncurred():
            return StyledLine(f"{amount(event.amount)} above the cap of {where}", WARNING_STYLE)
        case CapChanged():
            cap = "no cap" if event.cap is None else amount(event.cap)
            return f"{where} has {cap}, by {event.by}{_because(event.reason)}"


def _summarize_trouble(event: GuardrailTriggered | SensorChanged | AttendingFailed, session: str) -> str | StyledLine:
    match event:
        case GuardrailTriggered(guardrail="model_rate"):
            return event.sentence
        case GuardrailTriggered():
            until_text = f" until {format_moment(event.until)}" if event.until is not None else ""
            return StyledLine(f"limit {event.guardrail}{until_text}: {event.sentence}", WARNING_STYLE)
        case SensorChanged(health="failing"):
            return StyledLine(f"sensor {event.sensor} failing: {event.sentence}", WARNING_STYLE)
        case SensorChanged():
            return f"sensor {event.sensor} ok"
        case AttendingFailed(quarantined=True):
            times = format_count(event.failures, "time")
            text = f"stopped after failing {times}; restart with halter on {_agent(session)}: {event.error}"
            return StyledLine(text, URGENT_STYLE)
        case AttendingFailed():
            return StyledLine(f"failed; retrying: {event.error}", WARNING_STYLE)


def _summarize_control(
    event: HaltRequested | HaltLifted | AgentSwitched | FleetPolicyAdopted | BodiesErased | StoreAccepted,
) -> str:
    match event:
        case HaltRequested():
            return f"{event.scope}{' permanently' if event.cancels else ''}, by {event.by}{_because(event.reason)}"
        case HaltLifted():
            return f"{event.scope}, by {event.by}{_because(event.reason)}"
        case AgentSwitched():
            return f"{event.agent} {'on' if event.on else 'off'}, by {event.by}{_because(event.reason)}"
        case FleetPolicyAdopted():
            looser = f", looser in {', '.join(event.loosens)}" if event.loosens else ""
            return f"{event.digest[:12]}{looser}, by {event.by}{_because(event.reason)}"
        case BodiesErased():
            return f"{event.stream} up to {event.through}, by {event.by}{_because(event.reason)}"
        case StoreAccepted():
            return f"by {event.by}{_because(event.reason)}. {event.lacks}"


def _summarize_prices(event: PricesChanged) -> str:
    if event.accepted:
        return f"{event.digest[:12]} accepted as it is, by {event.by}{_because(event.reason)}"
    counts = (
        format_count(event.added_count, "new model"),
        f"{event.raised_count} raised",
        f"{event.waiting_count} lower or free, waiting for a person",
    )
    return f"{event.digest[:12]} fetched for {event.by}: {', '.join(counts)}"


SIGN_ON_REFUSALS: Final[Mapping[SignOnRefusal, str]] = {
    "no_role": "no group with a role",
    "no_person": "no valid user name",
    "declined": "declined by the provider",
    "invalid_token": "invalid ID token",
}


def _summarize_sign_on(event: PersonSignedOn | SignOnRefused) -> str | StyledLine:
    if isinstance(event, SignOnRefused):
        account = f"{event.account}, " if event.account else ""
        return StyledLine(f"rejected by {event.via}: {account}{SIGN_ON_REFUSALS[event.why]}", WARNING_STYLE)
    agents = f", for {', '.join(event.agents)}" if event.agents else ""
    return f"{event.name} signs on by {event.via} ({event.role}{agents})"


def _format_holds(legs: tuple[Leg, ...]) -> str:
    limit = max((leg.amount for leg in legs if leg.unit == "usd"), default=0)
    return f", {format_micros(limit)} held" if limit else ""


ASSUMED_COST: Final = " (possibly billed, so the whole hold is charged)"
"""A note about a request that was sent and whose cost the provider did not report."""


def _cost(charge: Charge | None) -> str:
    return f", {format_micros(charge.usd)}" if charge and charge.usd else ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


class _Content(msgspec.Struct, frozen=True):
    """The parts of a finding or notification that are shown."""

    title: str = ""
    subject: str = ""
    text: str = ""
    quote: str = ""

    @property
    def heading(self) -> str:
        return self.title or self.subject


def _read_content(body: bytes) -> _Content:
    try:
        return msgspec.json.decode(body, type=_Content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Content()


def describe_event(event: AnyEvent | Unknown, body: bytes) -> str:
    """Render the body of an event: the text and calls of messages and replies, the parts of findings and notices."""
    try:
        match event:
            case TurnStarted():
                return _parts(msgspec.json.decode(body, type=Message).parts)
            case FilesGiven():
                return _parts(msgspec.json.decode(body, type=list[Text]))
            case HistoryGiven():
                messages = msgspec.json.decode(body, type=list[Message])
                return "\n".join(text for message in messages if (text := _parts(message.parts)))
            case RequestSettled(outcome="ok"):
                return _parts(msgspec.json.decode(body, type=Reply).parts)
            case RequestStarted():
                return ""
            case FindingEmitted() | NotificationQueued():
                content = _read_content(body)
                parts = (content.heading, content.text, f'"{content.quote}"' if content.quote else "")
                return "\n".join(part for part in parts if part) or decode_body(body)
            case _:
                return decode_body(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return decode_body(body)


def describe_stored_event(stored_event: Stored) -> str:
    if stored_event.erased:
        return "(erased)"
    if stored_event.blob:
        return f"(blob {stored_event.blob[:12]}…)"
    return describe_event(stored_event.event, stored_event.body or b"")


MAX_ENTRY_LENGTH: Final = 2000
"""Maximum number of characters of one text in a conversation."""


def build_conversation(events: Sequence[Stored]) -> list[tuple[str, str]]:
    """Render a session as a conversation: the model's input and answers, and each call with its outcome."""
    settlement_by_call = {each.event.call: each for each in events if isinstance(each.event, CallSettled)}
    lines: list[tuple[str, str]] = []
    last_day = ""
    for stored_event in events:
        speaker, text = _render_entry(stored_event, settlement_by_call)
        if not text:
            continue
        day, _, hour = format_moment(stored_event.at).partition(" ")
        if day != last_day:
            last_day = day
            lines.append(("date", day))
        lines.append((hour, f"{speaker}: {text}"))
    return lines


def _render_entry(stored_event: Stored, settled: Mapping[str, Stored]) -> tuple[str, str]:
    event = stored_event.event
    match event:
        case TurnStarted():
            return "asked", shorten(describe_stored_event(stored_event), MAX_ENTRY_LENGTH)
        case RequestSettled(outcome="ok"):
            return "answer", shorten(_read_reply_text(stored_event), MAX_ENTRY_LENGTH)
        case CallStarted():
            return f"call {event.tool}", _pair(describe_stored_event(stored_event), settled.get(event.call))
        case CallRefused():
            arguments = shorten(describe_stored_event(stored_event), MAX_ENTRY_LENGTH)
            return f"call {event.tool}", f"{arguments}\n→ {event.outcome}: {event.sentence}".lstrip()
        case DecisionAsked() | DecisionMade() | CostCapReached() | GuardrailTriggered() | SessionEnded():
            return stored_event.kind.replace("_", " "), summarize_event(stored_event).text
        case _:
            return "", ""


def _read_reply_text(stored_event: Stored) -> str:
    """Return the text of a reply; its calls are shown where they start."""
    if stored_event.erased or stored_event.blob:
        return describe_stored_event(stored_event)
    try:
        return msgspec.json.decode(stored_event.body or b"", type=Reply).text
    except (msgspec.DecodeError, ValueError, RecursionError):
        return describe_stored_event(stored_event)


def _pair(arguments: str, end: Stored | None) -> str:
    call_text = shorten(arguments, MAX_ENTRY_LENGTH)
    if end is None or not isinstance(end.event, CallSettled):
        return f"{call_text}\n→ running, or outcome unknown".lstrip()
    outcome = f"{end.event.outcome}{_cost(end.event.charge)}"
    text = end.event.error or describe_stored_event(end)
    return f"{call_text}\n→ {outcome}{_because(shorten(text, MAX_ENTRY_LENGTH))}".lstrip()


def _parts(parts: Sequence[Text | ToolCall | ToolResult]) -> str:
    texts = [f"{part.tool} {part.arguments}" if isinstance(part, ToolCall) else part.text for part in parts]
    return "\n".join(text for text in texts if text)


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
