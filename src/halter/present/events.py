"""Events in words: one sentence for each kind, wherever it is shown (`halter up`, `tail`, `show`, the dashboard)."""

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
    FindingEmitted,
    FindingReviewed,
    FleetPolicyAdopted,
    GuardrailTriggered,
    HaltLifted,
    HaltRequested,
    HistoryGiven,
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
    YieldRequest,
)
from halter.core.ids import session_of
from halter.core.messages import Message, Reply, Text, ToolCall, ToolResult
from halter.core.money import Charge, Leg, format_micros
from halter.core.ports import Stored
from halter.core.text import clean, format_count, from_body, shorten
from halter.core.vocabulary import SignOnRefusal
from halter.guard.brake import describe_flaw
from halter.loop.decide import ASK_USER, YIELD
from halter.state.channel import hide_topic

MAX_EVENT_TEXT: Final = 200
PLAIN: Final = ""
WARNING_STYLE: Final = "yellow"
URGENT_STYLE: Final = "bold yellow"
URGENT_SEVERITIES: Final = frozenset(("high", "critical"))


class StyledLine(msgspec.Struct, frozen=True):
    """A line of text and its style; an urgent one needs a person."""

    text: str
    style: str = PLAIN


def describe_review(review: str | None) -> str:
    """What a reviewer said of a finding; a finding that nothing reviewed is called so."""
    return (review or "not_reviewed").replace("_", " ")


def format_moment(at: int) -> str:
    return _to_local(at).strftime("%Y-%m-%d %H:%M:%S")


def format_hour(at: int) -> str:
    return _to_local(at).strftime("%H:%M:%S")


def format_relative_moment(at: int, now: int) -> str:
    """Write a moment; with its day, if that is not today."""
    return format_hour(at) if _to_local(at).date() == _to_local(now).date() else format_moment(at)


def _to_local(at: int) -> datetime:
    return datetime.fromtimestamp(at / SECOND, UTC).astimezone()


class EventContext(msgspec.Struct, frozen=True):
    """What earlier events tell about one: names of documents, a turn's calls and cost, the model's open question."""

    documents: Mapping[str, str] = {}
    used: str = ""
    question: str = ""

    def document(self, item: str) -> str:
        return self.documents.get(item, f"document {item[:12]}")


NO_CONTEXT: Final = EventContext()


def summarize_event(stored: Stored, context: EventContext = NO_CONTEXT) -> StyledLine:
    """Put an event into one line."""
    line = _summarize(stored, context)
    made = StyledLine(line) if isinstance(line, str) else line
    return StyledLine(shorten(" ".join(clean(made.text).split()), MAX_EVENT_TEXT), made.style)


def _summarize(stored: Stored, context: EventContext) -> str | StyledLine:
    event, text = stored.event, from_body(stored.body or b"")
    if isinstance(event, ArtifactEvent):
        return _summarize_artifact(event, stored.body or b"")
    if isinstance(event, TriggerEvent):
        return _summarize_trigger(event, stored.at, context)
    if isinstance(event, ChannelEvent):
        return _summarize_channel(event)
    match event:
        case SessionStarted() | SessionWoken() | SessionParked() | SessionResumed() | SessionEnded() | WakePosted():
            return _summarize_life(event, stored, text, context)
        case TurnEnded() if text:
            line = _summarize_turn(event, context.used, task="." in (session_of(stored.stream) or ""))
            return StyledLine(f"{line if isinstance(line, str) else line.text}. {text}", WARNING_STYLE)
        case TurnStarted() | TurnEnded() | TurnSkipped() | MessageAdded() | ContextCut() | HotStateSeen():
            return _summarize_turn(event, context.used, task="." in (session_of(stored.stream) or ""))
        case CallStarted() | CallSettled() | CallRefused() | RequestStarted() | RequestSettled() | RequestRefused():
            return _summarize_work(event)
        case DecisionAsked() | DecisionMade() | DecisionWithdrawn() | RuleMade() | RuleEnded() | ToolPinned():
            return _summarize_decision(event)
        case ApprovalGiven():
            return f"{event.by} agrees to {event.decision}, and another person must{_because(event.reason)}"
        case CostCapReached() | OverrunIncurred() | CapChanged():
            return _summarize_money(event)
        case GuardrailTriggered() | SensorChanged() | AttendingFailed():
            return _summarize_trouble(event, session_of(stored.stream) or "")
        case PhaseEntered() | ContextGiven() | HistoryGiven() | DocumentRead() | JudgesChosen() | MessageRouted():
            return _summarize_task(event)
        case HaltRequested() | HaltLifted() | AgentSwitched() | FleetPolicyAdopted() | BodiesErased() | StoreAccepted():
            return _summarize_control(event)
        case PersonSignedOn() | SignOnRefused():
            return _summarize_sign_on(event)
        case Unknown():
            return from_body(event.facts)


def _summarize_task(
    event: PhaseEntered | ContextGiven | HistoryGiven | DocumentRead | JudgesChosen | MessageRouted,
) -> str | StyledLine:
    match event:
        case PhaseEntered():
            return f"enters {event.phase}"
        case ContextGiven():
            memories = f"{len(event.memories)} {'memory' if len(event.memories) == 1 else 'memories'}"
            return f"is given {memories} and {format_count(len(event.precedents), 'precedent')}"
        case HistoryGiven():
            whence = f"event {event.through} of {event.session}" if event.session else "its program"
            return f"begins with {format_count(event.messages, 'message')} from {whence}"
        case DocumentRead():
            return f"reads {event.name} ({event.document[:12]})"
        case JudgesChosen():
            fewer = event.chosen < event.wanted
            judges = format_count(event.wanted, "judge")
            text = f"{f'{event.chosen} of ' if fewer else ''}{judges} for {format_count(event.items, 'finding')}"
            return StyledLine(f"{text}{_because(event.sentence)}", WARNING_STYLE if fewer else PLAIN)
        case MessageRouted():
            return f"takes it as {event.strategy or event.route}{_because(event.why)}"


def _summarize_artifact(event: ArtifactEvent, body: bytes) -> str | StyledLine:
    match event:
        case FindingEmitted():
            about = f" in {event.name}" if event.name else ""
            doubt = "" if event.support == "supported" else f", {event.support}"
            text = f"finds ({event.severity}{doubt}){about}: {_read_content(body).heading or event.finding}"
            return StyledLine(text, WARNING_STYLE if event.severity in URGENT_SEVERITIES else PLAIN)
        case FindingReviewed(verdict="released"):
            return f"{event.finding} is released by its review"
        case FindingReviewed(verdict="withheld"):
            return StyledLine(f"{event.finding} is withheld by its review", WARNING_STYLE)
        case FindingReviewed():
            return StyledLine(f"{event.finding} was not reviewed", WARNING_STYLE)
        case MemoryProposed():
            return f"proposes the memory {event.memory}{_because(from_body(body))}"
        case PrecedentProposed():
            return f"proposes the precedent {event.precedent} ({event.kind}){_because(from_body(body))}"
        case ProposalDecided():
            return f"{event.by} {event.status} the {event.about} {event.proposal}{_because(event.reason)}"
        case NotificationQueued():
            return f"sends {event.notification} over {event.channel}{_because(_read_content(body).heading)}"
        case NotificationSent():
            return f"sent {event.notification}"
        case NotificationFailed():
            again = "will retry" if event.next_at is not None else "gave up"
            times = format_count(event.attempts, "attempt")
            text = f"could not send {event.notification} after {times}, {again}: {event.error}"
            return StyledLine(text, WARNING_STYLE)


def _summarize_channel(event: ChannelEvent) -> str:
    match event:
        case ChannelTaken():
            return f"is served by {event.worker}"
        case PairingOffered():
            return f"offers a code to {event.name} ({event.role}), by {event.by}"
        case ApproverPaired():
            account = hide_topic(event.channel, event.account)
            return f"{event.name} ({event.role}) answers here as {account}, by {event.by}"
        case ApproverRemoved():
            return f"{event.name} answers here no longer, by {event.by}{_because(event.reason)}"
        case DecisionShown():
            return f"shows {event.decision}{', cut' if event.cut else ''} in {hide_topic(event.channel, event.place)}"
        case MessageClosed():
            return f"shows an outcome in {hide_topic(event.channel, event.place)}"
        case RepliesRead():
            return f"has read replies up to {event.mark}"


def _summarize_trigger(event: TriggerEvent, now: int, context: EventContext) -> str | StyledLine:
    match event:
        case TriggerMade():
            return f"is a {event.type} now, by {event.by}"
        case TriggerEnded():
            return f"starts nothing any more, by {event.by}{_because(event.reason)}"
        case RunStarted():
            item = f" for {context.document(event.item)}" if event.item else ""
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return f"starts {event.session}{item}, by {event.by or event.cause}{again}"
        case RunSkipped():
            times = f" {format_count(event.count, 'time')}" if event.count > 1 else ""
            return StyledLine(f"does not run{times} ({event.why}){_because(event.sentence)}", WARNING_STYLE)
        case RunQueued():
            return "waits for the run before it"
        case RunsDelayed():
            until = f" until {format_relative_moment(event.until, now)}" if event.until is not None else ""
            text = f"keeps {event.waiting} waiting{until} ({event.why}){_because(event.sentence)}"
            return StyledLine(text, WARNING_STYLE)
        case ItemSeen():
            return f"finds {event.name}{', which does not count' if event.ignored else ''}"
        case ItemQuarantined():
            tried = f" after {format_count(event.attempts, 'attempt')}" if event.attempts else ""
            text = f"{context.document(event.item)} is quarantined{tried}: {event.sentence}"
            return StyledLine(text, URGENT_STYLE)
        case ItemReleased():
            return f"{context.document(event.item)} is tried again, by {event.by}"


def _summarize_life(
    event: SessionStarted | SessionWoken | SessionParked | SessionResumed | SessionEnded | WakePosted,
    stored: Stored,
    text: str,
    context: EventContext,
) -> str | StyledLine:
    match event:
        case SessionStarted():
            after = f", after {event.follows}: {event.because}" if event.follows else ""
            return f"{event.agent} ({event.kind}), by {event.started_by}{after}"
        case SessionWoken(cause="takeover"):
            return "continues on another worker"
        case SessionWoken(recovered=True):
            return "its model answers again"
        case SessionWoken():
            return f"wakes, by {event.cause}"
        case SessionParked():
            return _summarize_rest(event, stored, context.question)
        case SessionResumed():
            return f"is resumed by {event.by}"
        case SessionEnded():
            return f"is over: {event.state}, {event.terminal_reason}"
        case WakePosted(notifies=True, origin="person"):
            return f"hears: {text or event.sender}"
        case WakePosted(notifies=True):
            return StyledLine(f"alert: {text or event.sender}", WARNING_STYLE)
        case WakePosted(cause="signal"):
            return f"{event.name} of {event.sender}" if event.name != event.sender else f"{event.name} has news"
        case WakePosted(cause="message"):
            return f"hears from {event.sender}"
        case WakePosted():
            return f"{event.cause} {event.name} from {event.sender} ({event.origin})"


def _summarize_rest(event: SessionParked, stored: Stored, question: str) -> str | StyledLine:
    now, early = stored.at, f", or by {', '.join(event.wake_on)}" if event.wake_on else ""
    until = "" if event.wake_at is None else format_relative_moment(event.wake_at, now)
    match event.state:
        case _ if event.trouble == "needs_person":
            return StyledLine(f"its model cannot be used: {event.sentence}; it tries again at {until}", URGENT_STYLE)
        case _ if event.trouble:
            return StyledLine(f"no model answers: {event.sentence}; it tries again at {until}", WARNING_STYLE)
        case "PAUSED" if event.wake_at is not None:
            agent = _agent(session_of(stored.stream) or "")
            return StyledLine(f"it is paused, and ends at {until} without halter on {agent}", URGENT_STYLE)
        case "PAUSED":
            return "rests until a message comes"
        case "SLEEPING" if event.wake_at is not None:
            length = format_duration(max(SECOND, event.wake_at - now + SECOND // 2))
            return f"sleeps {length}, until {until}{early}"
        case "SLEEPING":
            return f"sleeps until {', '.join(event.wake_on) or 'a message comes'}"
        case "WAITING_FOR_INPUT":
            return StyledLine(f"{question or 'it waits for an answer.'} Answer it with halter chat.", URGENT_STYLE)
        case _:
            return f"{event.state}{f' until {until}' if until else ''}{early}"


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
            how = _describe_yield(event.yielded) if event.yielded else _describe_turn_end(event, task=task)
            return StyledLine(
                f"turn {event.turn} ends{used}{_because(how)}", WARNING_STYLE if event.sentence else PLAIN
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
            return f"on at once{reason}"
        case "sleep":
            return f"sleep {format_duration(yielded.sleep)}{reason}"
        case "shutdown":
            return f"shut down{reason}"


def _describe_turn_end(event: TurnEnded, *, task: bool) -> str:
    """Say why a turn ended. A task proceeds to its next phase, which needs no mention."""
    match event.why:
        case "ended" | "yielded":
            return event.sentence or ("" if task else "it answered")
        case "asked":
            return "it asks you something"
        case _:
            return f"{event.why}. {event.sentence}".strip()


def _summarize_work(
    event: CallStarted | CallSettled | CallRefused | RequestStarted | RequestSettled | RequestRefused,
) -> str | StyledLine:
    match event:
        case CallStarted():
            by = f", agreed to by {event.decided_by}" if event.decided_by else ""
            return f"{event.tool} {event.level} {event.risk or ''}{_format_holds(event.legs)}{by}{_flaws(event)}"
        case CallSettled():
            took = format_duration(event.duration_ms * 1000)
            return f"{event.call} {event.outcome} in {took}{_cost(event.charge)} {event.error}"
        case CallRefused(staged=True):
            question = "; ".join(describe_flaw(flaw) for flaw in event.flaws)
            return f"{event.tool} waits for the end of the turn, when a person is asked ({question})"
        case CallRefused():
            return StyledLine(f"{event.tool} was refused ({event.outcome}): {event.sentence}", WARNING_STYLE)
        case RequestStarted():
            return f"{event.model} for {event.purpose}{_format_holds(event.legs)}"
        case RequestSettled(outcome="ok"):
            return f"{event.request} ok{_cost(event.charge)}"
        case RequestSettled():
            worst = ASSUMED_COST if event.charge and event.charge.usd and event.usage is None else ""
            why = event.error or event.outcome
            return StyledLine(f"the model gave no answer{_cost(event.charge)}{worst}: {why}", WARNING_STYLE)
        case RequestRefused():
            text = f"{event.model} was not asked ({event.outcome}): {event.sentence}"
            return StyledLine(text, WARNING_STYLE)


def _flaws(event: CallStarted) -> str:
    """What the injection brake found in a call that ran without a question."""
    if not event.flaws or event.decided_by:
        return ""
    return f"; a person would have been asked about {'; '.join(map(describe_flaw, event.flaws))}"


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
            text = f"{event.name} may cost {amount(event.amount)}; the cap of {where} is {amount(event.cap)}"
            return StyledLine(text, WARNING_STYLE)
        case OverrunIncurred():
            return StyledLine(f"{amount(event.amount)} beyond the cap of {where}", WARNING_STYLE)
        case CapChanged():
            cap = "no cap" if event.cap is None else amount(event.cap)
            return f"{where} has {cap}, by {event.by}{_because(event.reason)}"


def _summarize_trouble(event: GuardrailTriggered | SensorChanged | AttendingFailed, session: str) -> str | StyledLine:
    match event:
        case GuardrailTriggered(guardrail="model_rate"):
            return event.sentence
        case GuardrailTriggered():
            until = f" until {format_moment(event.until)}" if event.until is not None else ""
            return StyledLine(f"guardrail {event.guardrail}{until}: {event.sentence}", WARNING_STYLE)
        case SensorChanged(health="failing"):
            return StyledLine(f"sensor {event.sensor} fails: {event.sentence}", WARNING_STYLE)
        case SensorChanged():
            return f"sensor {event.sensor} reads"
        case AttendingFailed(quarantined=True):
            times = format_count(event.failures, "time")
            text = f"it failed {times} and is stopped; restart it with halter on {_agent(session)}: {event.error}"
            return StyledLine(text, URGENT_STYLE)
        case AttendingFailed():
            return StyledLine(f"failed, and is retried: {event.error}", WARNING_STYLE)


def _summarize_control(
    event: HaltRequested | HaltLifted | AgentSwitched | FleetPolicyAdopted | BodiesErased | StoreAccepted,
) -> str:
    match event:
        case HaltRequested():
            return f"{event.scope}{' for good' if event.cancels else ''}, by {event.by}{_because(event.reason)}"
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


SIGN_ON_REFUSALS: Final[Mapping[SignOnRefusal, str]] = {
    "no_role": "in no group that has a role",
    "no_person": "no name that could be a person's",
    "declined": "the provider did not sign them on",
    "invalid_token": "an ID token that is not valid",
}


def _summarize_sign_on(event: PersonSignedOn | SignOnRefused) -> str | StyledLine:
    if isinstance(event, SignOnRefused):
        who = f"{event.account}, " if event.account else ""
        return StyledLine(f"not let in by {event.via}: {who}{SIGN_ON_REFUSALS[event.why]}", WARNING_STYLE)
    some = f", for {', '.join(event.agents)}" if event.agents else ""
    return f"{event.name} signs on by {event.via} ({event.role}{some})"


def _format_holds(legs: tuple[Leg, ...]) -> str:
    limit = max((leg.amount for leg in legs if leg.unit == "usd"), default=0)
    return f", {format_micros(limit)} held" if limit else ""


ASSUMED_COST: Final = " (it may have been billed, so all that was held is charged)"
"""Said of a request that was sent and whose cost no provider reported."""


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
    """Show the body of an event: of messages and replies the text and calls, of findings and notices each part."""
    try:
        match event:
            case TurnStarted():
                return _parts(msgspec.json.decode(body, type=Message).parts)
            case HistoryGiven():
                messages = msgspec.json.decode(body, type=list[Message])
                return "\n".join(words for message in messages if (words := _parts(message.parts)))
            case RequestSettled(outcome="ok"):
                return _parts(msgspec.json.decode(body, type=Reply).parts)
            case RequestStarted():
                return ""
            case FindingEmitted() | NotificationQueued():
                content = _read_content(body)
                parts = (content.heading, content.text, f'"{content.quote}"' if content.quote else "")
                return "\n".join(part for part in parts if part) or from_body(body)
            case _:
                return from_body(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return from_body(body)


def describe_stored_event(stored: Stored) -> str:
    if stored.erased:
        return "(erased)"
    if stored.blob:
        return f"(blob {stored.blob[:12]}…)"
    return describe_event(stored.event, stored.body or b"")


MOST_SAID: Final = 2000
"""How many characters of one text a conversation shows."""


def build_conversation(events: Sequence[Stored]) -> list[tuple[str, str]]:
    """Tell a session as a conversation: what was said to the model and by it, and each call with its outcome."""
    settled = {each.event.call: each for each in events if isinstance(each.event, CallSettled)}
    told: list[tuple[str, str]] = []
    last = ""
    for stored in events:
        who, text = _describe(stored, settled)
        if not text:
            continue
        day, _, hour = format_moment(stored.at).partition(" ")
        if day != last:
            last = day
            told.append(("date", day))
        told.append((hour, f"{who}: {text}"))
    return told


def _describe(stored: Stored, settled: Mapping[str, Stored]) -> tuple[str, str]:
    event = stored.event
    match event:
        case TurnStarted():
            return "asked", shorten(describe_stored_event(stored), MOST_SAID)
        case RequestSettled(outcome="ok"):
            return "answer", shorten(_read_reply_text(stored), MOST_SAID)
        case CallStarted():
            return f"call {event.tool}", _pair(describe_stored_event(stored), settled.get(event.call))
        case CallRefused():
            arguments = shorten(describe_stored_event(stored), MOST_SAID)
            return f"call {event.tool}", f"{arguments}\n→ {event.outcome}: {event.sentence}".lstrip()
        case DecisionAsked() | DecisionMade() | CostCapReached() | GuardrailTriggered() | SessionEnded():
            return stored.kind.replace("_", " "), summarize_event(stored).text
        case _:
            return "", ""


def _read_reply_text(stored: Stored) -> str:
    """Return the words of a reply; its calls are shown where they begin."""
    if stored.erased or stored.blob:
        return describe_stored_event(stored)
    try:
        return msgspec.json.decode(stored.body or b"", type=Reply).text
    except (msgspec.DecodeError, ValueError, RecursionError):
        return describe_stored_event(stored)


def _pair(arguments: str, end: Stored | None) -> str:
    question = shorten(arguments, MOST_SAID)
    if end is None or not isinstance(end.event, CallSettled):
        return f"{question}\n→ under way, or its outcome is not known".lstrip()
    came = f"{end.event.outcome}{_cost(end.event.charge)}"
    text = end.event.error or describe_stored_event(end)
    return f"{question}\n→ {came}{_because(shorten(text, MOST_SAID))}".lstrip()


def _parts(parts: Sequence[Text | ToolCall | ToolResult]) -> str:
    words = [f"{part.tool} {part.arguments}" if isinstance(part, ToolCall) else part.text for part in parts]
    return "\n".join(word for word in words if word)


class EventLines:
    """The lines of `halter up`: events worth one, in the context of those before them."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._questions: dict[str, str] = {}
        self._documents: dict[str, str] = {}
        self._widest = 0

    def line(self, stored: Stored) -> StyledLine | None:
        """Write an event on one line, if it is worth one."""
        session = session_of(stored.stream) or ""
        self._note(session, stored)
        if not _is_news(stored.event):
            return None
        used, question = "", ""
        if isinstance(stored.event, TurnEnded | TurnSkipped):
            calls, spent = self._calls.pop(session, 0), self._spent.pop(session, 0)
            made = [format_count(calls, "call")] if calls else []
            used = "".join(f", {part}" for part in (*made, format_micros(spent)))
        if isinstance(stored.event, SessionParked) and stored.event.state == "WAITING_FOR_INPUT":
            question = self._questions.pop(session, "")
        line = summarize_event(stored, EventContext(self._documents, used, question))
        text = f"Needs you: {line.text}" if line.style == URGENT_STYLE else line.text
        return StyledLine(self.place(stored.at, session or stored.stream.removeprefix("trigger:"), text), line.style)

    def place(self, at: int, name: str, text: str) -> str:
        self._widest = max(self._widest, len(name))
        return f"{format_hour(at)} {name:<{self._widest}} {shorten(' '.join(clean(text).split()), MAX_EVENT_TEXT)}"

    def _note(self, session: str, stored: Stored) -> None:
        match stored.event:
            case ItemSeen() as event:
                self._documents[event.item] = event.name
            case CallStarted() as event:
                self._calls[session] = self._calls.get(session, 0) + (event.tool != YIELD)
            case RequestSettled() | CallSettled() as event:
                if event.charge:
                    self._spent[session] = self._spent.get(session, 0) + event.charge.usd
                if isinstance(event, RequestSettled) and event.outcome == "ok":
                    self._questions[session] = _find_question(stored.body or b"")
            case _:
                pass


def _is_news(event: AnyEvent | Unknown) -> bool:
    match event:
        case ItemSeen():
            return not event.ignored
        case RequestSettled():
            return event.outcome != "ok"
        case SessionParked():
            return event.state in {"SLEEPING", "PAUSED", "WAITING_FOR_INPUT"}
        case WakePosted():
            return event.notifies or event.cause in {"signal", "message"}
        case _:
            return isinstance(event, _News)


_News = (
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


class _Asked(msgspec.Struct, frozen=True):
    question: str = ""


def _find_question(body: bytes) -> str:
    try:
        parts = msgspec.json.decode(body, type=Reply).parts
        questions = [part.arguments for part in parts if isinstance(part, ToolCall) and part.tool == ASK_USER]
        return msgspec.json.decode(questions[-1], type=_Asked).question if questions else ""
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""
