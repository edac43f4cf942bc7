"""Descriptions of events: one sentence for each kind, for `halter up`, `tail`, `show` and the dashboard."""

from collections.abc import Mapping
from typing import Final

import msgspec

from halter.core.clock import SECOND, format_duration
from halter.core.events import (
    AgentSwitched,
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
    DecisionEvent,
    DecisionMade,
    DecisionShown,
    DecisionWithdrawn,
    DocumentRead,
    EffectEvent,
    FilesGiven,
    FindingEmitted,
    FindingReviewed,
    FleetEvent,
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
    PersonSignedOff,
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
    SessionEvent,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    SignOnRefused,
    StoreAccepted,
    TaskEvent,
    ToolPinned,
    TriggerEnded,
    TriggerEvent,
    TriggerMade,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.core.events.sessions import YieldRequest
from halter.core.events.tasks import describe_verdict
from halter.core.ids import parse_session_id
from halter.core.money import Charge, Leg, Unit, format_compared, format_micros, to_unit_amount
from halter.core.ports import Stored
from halter.core.text import clean, decode_body, format_count, shorten
from halter.core.usage import Usage
from halter.core.vocabulary import SignOnRefusal
from halter.present.moments import format_moment, format_relative_moment
from halter.provenance.check import describe_flaw
from halter.state.channel import hide_topic
from halter.system.protected_paths import AGENT_FILE_NAME

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
    event, body = stored_event.event, stored_event.body or b""
    if isinstance(event, SessionEvent):
        return _summarize_session(event, stored_event, context)
    if isinstance(event, EffectEvent):
        return _summarize_effect(event)
    if isinstance(event, DecisionEvent):
        return _summarize_decision(event)
    if isinstance(event, FleetEvent):
        return _summarize_fleet(event)
    if isinstance(event, TaskEvent):
        return _summarize_task(event)
    if isinstance(event, ArtifactEvent):
        return _summarize_artifact(event, body)
    if isinstance(event, TriggerEvent):
        return _summarize_trigger(event, stored_event.at, context)
    if isinstance(event, ChannelEvent):
        return _summarize_channel(event)
    return decode_body(event.facts)


def _summarize_task(event: TaskEvent) -> str | StyledLine:
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
            return StyledLine(f"{text}{append_reason(event.sentence)}", WARNING_STYLE if has_fewer else PLAIN)
        case MessageRouted():
            return f"is routed as {event.strategy or event.route}{append_reason(event.why)}"


def _summarize_artifact(event: ArtifactEvent, body: bytes) -> str | StyledLine:
    match event:
        case FindingEmitted():
            document = f" in {event.name}" if event.name else ""
            support = "" if event.support == "supported" else f", {event.support}"
            text = f"finds ({event.severity}{support}){document}: {parse_content(body).heading or event.finding}"
            return StyledLine(text, WARNING_STYLE if event.severity in URGENT_SEVERITIES else PLAIN)
        case FindingReviewed(verdict="released"):
            return f"{event.finding} is released by its review"
        case FindingReviewed(verdict="withheld"):
            return StyledLine(f"{event.finding} is withheld by its review", WARNING_STYLE)
        case FindingReviewed():
            return StyledLine(f"{event.finding} was not reviewed", WARNING_STYLE)
        case MemoryProposed():
            return f"proposes the memory {event.memory}{append_reason(decode_body(body))}"
        case PrecedentProposed():
            return f"proposes the precedent {event.precedent} ({event.kind}){append_reason(decode_body(body))}"
        case ProposalDecided():
            verdict = describe_verdict(event.status)
            return f"{event.by} {verdict} the {event.about} {event.proposal}{append_reason(event.reason)}"
        case NotificationQueued():
            return f"sends {event.notification} over {event.channel}{append_reason(parse_content(body).heading)}"
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
            return f"{event.name} was removed by {event.by}{append_reason(event.reason)}"
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
            return f"was ended by {event.by}{append_reason(event.reason)}"
        case RunStarted():
            item = f" for {context.document(event.item)}" if event.item else ""
            attempt_text = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return f"starts {event.session}{item}, by {event.by or event.cause}{attempt_text}"
        case RunSkipped():
            times = f" {format_count(event.count, 'time')}" if event.count > 1 else ""
            return StyledLine(f"does not run{times} ({event.why}){append_reason(event.sentence)}", WARNING_STYLE)
        case RunQueued():
            return "waits for the previous run"
        case RunsDelayed():
            until_text = f" until {format_relative_moment(event.until, now)}" if event.until is not None else ""
            text = f"keeps {event.waiting} waiting{until_text} ({event.why}){append_reason(event.sentence)}"
            return StyledLine(text, WARNING_STYLE)
        case ItemSeen():
            return f"finds {event.name}{' (ignored)' if event.ignored else ''}"
        case ItemQuarantined():
            attempts_text = f" after {format_count(event.attempts, 'attempt')}" if event.attempts else ""
            text = f"{context.document(event.item)} is quarantined{attempts_text}: {event.sentence}"
            return StyledLine(text, URGENT_STYLE)
        case ItemReleased():
            return f"{context.document(event.item)} is retried for {event.by}"


def _summarize_session(event: SessionEvent, stored_event: Stored, context: EventContext) -> str | StyledLine:
    session, text = parse_session_id(stored_event.stream) or "", decode_body(stored_event.body or b"")
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
        case WakePosted():
            return _summarize_wake(event, text)
        case TurnStarted():
            return f"turn {event.turn} begins"
        case TurnEnded():
            return _summarize_turn_end(event, text, context.used, task="." in session)
        case TurnSkipped():
            in_a_row = f", {event.skips} in a row" if event.skips > 1 else ""
            return f"skips a turn{in_a_row}{context.used}{append_reason(event.sentence)}"
        case MessageAdded():
            return f"to the model, because of {event.reason}"
        case ContextCut():
            return f"messages before {event.through} are left out ({event.strategy})"
        case HotStateSeen():
            return f"by turn {event.turn}"
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


def _summarize_wake(event: WakePosted, text: str) -> str | StyledLine:
    match event:
        case WakePosted(notifies=True, origin="person"):
            return f"message: {text or event.sender}"
        case WakePosted(notifies=True):
            return StyledLine(f"alert: {text or event.sender}", WARNING_STYLE)
        case WakePosted(cause="signal"):
            return f"{event.name} of {event.sender}" if event.name != event.sender else f"{event.name} fires"
        case WakePosted(cause="message"):
            return f"message from {event.sender}"
        case _:
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


def _summarize_turn_end(event: TurnEnded, links: str, used: str, *, task: bool) -> StyledLine:
    reason = _describe_yield(event.yielded) if event.yielded else _describe_turn_end(event, task=task)
    text = f"turn {event.turn} ends{used}{append_reason(reason)}"
    if links:
        return StyledLine(f"{text}. {links}", WARNING_STYLE)
    return StyledLine(text, WARNING_STYLE if event.sentence else PLAIN)


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


def _summarize_effect(event: EffectEvent) -> str | StyledLine:
    match event:
        case CallStarted():
            by = f", approved by {event.decided_by}" if event.decided_by else ""
            return f"{event.tool} {event.level} {event.risk or ''}{_format_holds(event.legs)}{by}{_flaws(event)}"
        case CallSettled():
            took = format_duration(event.duration_ms * 1000)
            return f"{event.call} {event.outcome} in {took}{format_charge(Charge(event.cost_micros))} {event.error}"
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
            reported = f"the provider reported `{unpriced}`, which has no known price"
            text = f"{event.request} {event.outcome}{format_charge(event.charge)}: {reported}"
            return StyledLine(f"{text}, so at least what was held is charged", WARNING_STYLE)
        case RequestSettled(outcome="ok"):
            return f"{event.request} ok{format_charge(event.charge)}"
        case RequestSettled():
            assumption = ASSUMED_COST if event.charge and event.charge.usd and event.usage is None else ""
            reason = event.error or event.outcome
            return StyledLine(f"model request failed{format_charge(event.charge)}{assumption}: {reason}", WARNING_STYLE)
        case RequestRefused():
            text = f"request to {event.model} was refused ({event.outcome}): {event.sentence}"
            return StyledLine(text, WARNING_STYLE)
        case FilesGiven():
            return f"files came with {f'the result of {event.call}' if event.call else 'the next message'}"
        case HoldMade():
            amount = max([leg.amount for leg in event.legs if leg.unit == "usd"], default=0)
            return f"{format_micros(amount)} is held for {event.name} until a person decides"
        case HoldReleased():
            return f"for {event.hold}"
        case CostCapReached():
            amounts = (to_unit_amount(number, event.unit) for number in (event.amount, event.cap))
            cost_text, cap_text = format_compared(event.unit, *amounts)
            text = f"{event.name} may cost {cost_text}; the cap of {_format_account(event)} is {cap_text}"
            return StyledLine(text, WARNING_STYLE)
        case OverrunIncurred():
            amount_text = _format_unit(event.amount, event.unit)
            return StyledLine(f"{amount_text} above the cap of {_format_account(event)}", WARNING_STYLE)


def _flaws(event: CallStarted) -> str:
    """Format the findings of the provenance check about a call that ran without approval."""
    if not event.flaws or event.decided_by:
        return ""
    return f"; would have needed approval: {'; '.join(map(describe_flaw, event.flaws))}"


def _summarize_decision(event: DecisionEvent) -> str | StyledLine:
    match event:
        case DecisionAsked():
            cap = " --cap AMOUNT" if event.about == "cap_raise" else ""
            text = f"halter approve {event.decision}{cap} ({event.about} of {event.name})"
            return StyledLine(text, URGENT_STYLE)
        case ApprovalGiven():
            return f"{event.by} approves {event.decision}; another approver is needed{append_reason(event.reason)}"
        case DecisionMade():
            return f"{event.people} says {event.verdict} to {event.decision}{append_reason(event.reason)}"
        case DecisionWithdrawn():
            return f"{event.decision}{append_reason(event.why)}"
        case RuleMade():
            return f"{event.rule}: {event.tool} in {event.scope} {event.owner}, by {event.by}"
        case RuleEnded():
            return f"{event.rule}, by {event.by}{append_reason(event.reason)}"
        case ToolPinned():
            return f"{event.tool} of {event.agent}, by {event.by}"


def _format_account(account: CostCapReached | OverrunIncurred | CapChanged) -> str:
    return f"{account.scope} {account.window}".strip()


def _format_unit(amount: int, unit: Unit) -> str:
    return format_micros(amount) if unit == "usd" else f"{amount:,} tokens"


def _summarize_fleet(event: FleetEvent) -> str | StyledLine:
    match event:
        case HaltRequested():
            return f"{event.scope}{' permanently' if event.cancels else ''}, by {event.by}{append_reason(event.reason)}"
        case HaltLifted():
            return f"{event.scope}, by {event.by}{append_reason(event.reason)}"
        case AgentSwitched():
            return f"{event.agent} {'on' if event.on else 'off'}, by {event.by}{append_reason(event.reason)}"
        case FleetPolicyAdopted():
            looser = f", looser in {', '.join(event.loosens)}" if event.loosens else ""
            return f"{event.digest[:12]}{looser}, by {event.by}{append_reason(event.reason)}"
        case BodiesErased():
            return f"{event.stream} up to {event.through}, by {event.by}{append_reason(event.reason)}"
        case StoreAccepted():
            return f"by {event.by}{append_reason(event.reason)}. {event.lacks}"
        case CapChanged():
            cap = "no cap" if event.cap is None else _format_unit(event.cap, event.unit)
            return f"{_format_account(event)} has {cap}, by {event.by}{append_reason(event.reason)}"
        case PricesChanged():
            return _summarize_prices(event)
        case PersonSignedOn():
            agents = f", for {', '.join(event.agents)}" if event.agents else ""
            return f"{event.name} signs on by {event.via} ({event.role}{agents})"
        case PersonSignedOff():
            return f"{event.name} signs off"
        case SignOnRefused():
            account = f"{event.account}, " if event.account else ""
            return StyledLine(f"rejected by {event.via}: {account}{SIGN_ON_REFUSALS[event.why]}", WARNING_STYLE)


def _summarize_prices(event: PricesChanged) -> str:
    if event.accepted:
        return f"{event.digest[:12]} accepted as it is, by {event.by}{append_reason(event.reason)}"
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


def _format_holds(legs: tuple[Leg, ...]) -> str:
    limit = max((leg.amount for leg in legs if leg.unit == "usd"), default=0)
    return f", {format_micros(limit)} held" if limit else ""


ASSUMED_COST: Final = " (possibly billed, so the whole hold is charged)"
"""A note about a request that was sent and whose cost the provider did not report."""


def format_charge(charge: Charge | None) -> str:
    return f", {format_micros(charge.usd)}" if charge and charge.usd else ""


def append_reason(reason: str) -> str:
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


def parse_content(body: bytes) -> _Content:
    try:
        return msgspec.json.decode(body, type=_Content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Content()
