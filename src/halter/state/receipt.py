"""The receipt of a session: a pure function of its events.

It lists what the session did, read and spent, which brakes it passed and which stopped it, who decided what, and why it
ended. Who answered a question is in the session's inbox: without it, a receipt shows only the effect of the answer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from halter.core.effect_events import ReviewOutcome, Severity, Support
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    GuardrailTriggered,
    JudgesChosen,
    MemoryProposed,
    MessageRouted,
    NotificationQueued,
    OverrunIncurred,
    PhaseEntered,
    PrecedentProposed,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnEnded,
    TurnStarted,
    Unknown,
    WakePosted,
)
from halter.core.money import ZERO_USD, Amount, Charge, Leg, Unit, Usd, micros_to_usd, to_unit_amount
from halter.core.ports import Stored
from halter.core.usage import Usage
from halter.core.vocabulary import Guardrail, Origin, Outcome, Purpose, SessionKind, State, WakeCause

BrakeName = Literal["halt", "grants", "budget"]
BRAKES: Final[tuple[BrakeName, ...]] = ("halt", "grants", "budget")


class ReceiptLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call or request: what was held and what it cost. Without an outcome it is in doubt.

    `observed` are refusals in observe mode. `egress`: its arguments chose where data goes. `anonymized` counts, by
    kind, the values hidden from its model.
    """

    id: str
    name: str
    purpose: Purpose
    started_at: int
    held_usd: Usd = ZERO_USD
    cost_usd: Usd = ZERO_USD
    outcome: Outcome | None = None
    settled_at: int | None = None
    usage: Usage | None = None
    level: str = ""
    risk: str = ""
    effect: str = ""
    egress: bool = False
    phase: str = ""
    parallel_group: str = ""
    observed: tuple[Outcome, ...] = ()
    decision: str = ""
    decided_by: str = ""
    duration_ms: int = 0
    error: str = ""
    anonymized: Mapping[str, int] = {}


class Brake(msgspec.Struct, frozen=True):
    code: str
    at: int
    refused: str
    name: str
    scope: str
    window: str
    brake: BrakeName = "budget"
    sentence: str = ""
    level: str = ""
    risk: str = ""
    phase: str = ""
    decision: str = ""
    decided_by: str = ""


class Decision(msgspec.Struct, frozen=True):
    """A question to a person, the answer, and whether the answer was used."""

    decision: str
    about: str
    name: str
    subject: str
    asked_at: int
    verdict: str = ""
    by: str = ""
    decided_at: int | None = None
    reason: str = ""
    used: bool = False


class TurnLine(msgspec.Struct, frozen=True):
    """One turn: its model answers and why it ended; no reason means that it is still open."""

    turn: int
    started_at: int
    ended_at: int | None = None
    steps: int = 0
    why: str = ""
    sentence: str = ""


class InboundLine(msgspec.Struct, frozen=True):
    """An inbox message: its origin, and whether it is trusted."""

    cause: WakeCause
    origin: Origin
    sender: str
    at: int
    trusted: bool = False


class ModelLine(msgspec.Struct, frozen=True):
    """All requests to one model. `input_tokens` includes tokens read from or written to a cache."""

    model: str
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    held_usd: Usd = ZERO_USD
    cost_usd: Usd = ZERO_USD


class OverrunLine(msgspec.Struct, frozen=True):
    hold: str
    scope: str
    window: str
    unit: Unit
    amount: Amount


class ChildLine(msgspec.Struct, frozen=True):
    session: str
    ended_at: int


def sum_by_model(requests: Iterable[ReceiptLine]) -> tuple[ModelLine, ...]:
    """Sum requests by model, in order of first use. Money was priced per request."""
    models: dict[str, ModelLine] = {}
    for line in requests:
        models[line.name] = _add_to_model(models.get(line.name, ModelLine(line.name)), line)
    return tuple(models.values())


def _add_to_model(model: ModelLine, line: ReceiptLine) -> ModelLine:
    usage = line.usage or Usage()
    return ModelLine(
        model=model.model,
        requests=model.requests + 1,
        failed=model.failed + (line.outcome not in {"ok", None}),
        input_tokens=model.input_tokens + usage.input_tokens,
        output_tokens=model.output_tokens + usage.output_tokens,
        cache_read_tokens=model.cache_read_tokens + usage.cache_read_tokens,
        cache_write_tokens=model.cache_write_tokens + usage.cache_write_tokens,
        held_usd=model.held_usd + line.held_usd,
        cost_usd=model.cost_usd + line.cost_usd,
    )


class PhaseLine(msgspec.Struct, frozen=True):
    """One phase and its duration; the last one ends with the session."""

    phase: str
    number: int
    entered_at: int
    left_at: int | None = None


class DocumentLine(msgspec.Struct, frozen=True):
    """A document that was read; `document` is the digest of its content."""

    document: str
    name: str
    collection: str
    read_at: int
    times: int = 1


class FindingLine(msgspec.Struct, frozen=True):
    """A finding, whether its source supports it, and the review, if any."""

    finding: str
    severity: Severity
    support: Support
    emitted_at: int
    document: str = ""
    name: str = ""
    by: str = ""
    review: ReviewOutcome | None = None
    judges: tuple[str, ...] = ()
    reviewed_at: int | None = None


class JudgesLine(msgspec.Struct, frozen=True):
    """How many judges reviewed findings, and why fewer than wanted."""

    wanted: int
    chosen: int
    items: int
    most_usd: Usd
    cap_usd: Usd | None
    sentence: str
    at: int


class ProposalLine(msgspec.Struct, frozen=True):
    proposal: str
    at: int
    kind: str = ""


class NotificationLine(msgspec.Struct, frozen=True):
    """A queued notification. Whether it was delivered is known to the store, not to the session."""

    notification: str
    channel: str
    about: str
    queued_at: int


class GuardrailLine(msgspec.Struct, frozen=True):
    """A guardrail that held the session back; waits for one model rate are one line."""

    guardrail: Guardrail
    at: int
    sentence: str
    turn: int = 0
    until: int | None = None
    times: int = 1


class RouteLine(msgspec.Struct, frozen=True):
    route: str
    strategy: str
    why: str
    at: int


class ReceiptArtifacts(msgspec.Struct, frozen=True):
    phases: tuple[PhaseLine, ...] = ()
    documents: tuple[DocumentLine, ...] = ()
    findings: tuple[FindingLine, ...] = ()
    judges: tuple[JudgesLine, ...] = ()
    memories_given: tuple[str, ...] = ()
    precedents_given: tuple[str, ...] = ()
    memories_proposed: tuple[ProposalLine, ...] = ()
    precedents_proposed: tuple[ProposalLine, ...] = ()
    notifications: tuple[NotificationLine, ...] = ()
    guardrails: tuple[GuardrailLine, ...] = ()
    routes: tuple[RouteLine, ...] = ()


class _ArtifactCollector:
    def __init__(self) -> None:
        self._phases: list[PhaseLine] = []
        self._documents: dict[tuple[str, str, str], DocumentLine] = {}
        self._findings: dict[str, FindingLine] = {}
        self._judges: list[JudgesLine] = []
        self._memories: dict[str, None] = {}
        self._precedents: dict[str, None] = {}
        self._proposed_memories: list[ProposalLine] = []
        self._proposed_precedents: list[ProposalLine] = []
        self._notifications: list[NotificationLine] = []
        self._guardrails: list[GuardrailLine] = []
        self._routes: list[RouteLine] = []

    def take(self, stored: Stored) -> None:
        at = stored.at
        match stored.event:
            case CallStarted() | CallSettled() | RequestStarted() | RequestSettled():
                # Most events are about none of it.
                pass
            case PhaseEntered() as entered:
                self._leave(at)
                self._phases.append(PhaseLine(entered.phase, entered.number, at))
            case SessionEnded():
                self._leave(at)
            case SessionResumed():
                self._leave(None)
            case DocumentRead() as read:
                self._read(read, at)
            case FindingEmitted() | FindingReviewed() | JudgesChosen() as event:
                self._found(event, at)
            case ContextGiven() as given:
                self._memories |= dict.fromkeys(given.memories)
                self._precedents |= dict.fromkeys(given.precedents)
            case MemoryProposed() as memory:
                self._proposed_memories.append(ProposalLine(memory.memory, at))
            case PrecedentProposed() as precedent:
                self._proposed_precedents.append(ProposalLine(precedent.precedent, at, precedent.kind))
            case NotificationQueued() as told:
                self._notifications.append(NotificationLine(told.notification, told.channel, told.about, at))
            case GuardrailTriggered() as held:
                self._hold_back(GuardrailLine(held.guardrail, at, held.sentence, held.turn, held.until))
            case MessageRouted() as routed:
                self._routes.append(RouteLine(routed.route, routed.strategy, routed.why, at))
            case _:
                pass

    def _leave(self, at: int | None) -> None:
        if self._phases:
            self._phases[-1] = msgspec.structs.replace(self._phases[-1], left_at=at)

    def _hold_back(self, line: GuardrailLine) -> None:
        """Keep a line; repeated waits for the same rate, which may come every minute of a night, are merged."""
        last = self._guardrails[-1] if self._guardrails else None
        if last is not None and line.guardrail == "model_rate" and _rate_of_line(last) == _rate_of_line(line):
            self._guardrails[-1] = msgspec.structs.replace(line, at=last.at, times=last.times + 1)
        else:
            self._guardrails.append(line)

    def _read(self, event: DocumentRead, at: int) -> None:
        key = (event.document, event.name, event.collection)
        known = self._documents.get(key)
        line = DocumentLine(*key, at) if known is None else msgspec.structs.replace(known, times=known.times + 1)
        self._documents[key] = line

    def _found(self, event: FindingEmitted | FindingReviewed | JudgesChosen, at: int) -> None:
        match event:
            case FindingEmitted():
                line = FindingLine(event.finding, event.severity, event.support, at)
                line = msgspec.structs.replace(line, document=event.document, name=event.name, by=event.by)
                self._findings[event.finding] = line
            case FindingReviewed():
                known = self._findings.get(event.finding)
                if known is not None:
                    self._findings[event.finding] = msgspec.structs.replace(
                        known, review=event.verdict, judges=event.judges, reviewed_at=at
                    )
            case JudgesChosen():
                most, cap = micros_to_usd(event.usd), None if event.cap is None else micros_to_usd(event.cap)
                facts = (event.wanted, event.chosen, event.items, most, cap, event.sentence)
                self._judges.append(JudgesLine(*facts, at))

    def left(self) -> ReceiptArtifacts:
        return ReceiptArtifacts(
            phases=tuple(self._phases),
            documents=tuple(self._documents.values()),
            findings=tuple(self._findings.values()),
            judges=tuple(self._judges),
            memories_given=tuple(self._memories),
            precedents_given=tuple(self._precedents),
            memories_proposed=tuple(self._proposed_memories),
            precedents_proposed=tuple(self._proposed_precedents),
            notifications=tuple(self._notifications),
            guardrails=tuple(self._guardrails),
            routes=tuple(self._routes),
        )


def _rate_of_line(line: GuardrailLine) -> tuple[str, str]:
    """The rate waited for: the sentence names it before the time."""
    return line.guardrail, line.sentence.partition(" until ")[0]


def gather_artifacts(events: Iterable[Stored]) -> ReceiptArtifacts:
    gathered = _ArtifactCollector()
    for stored in events:
        gathered.take(stored)
    return gathered.left()


ALWAYS_RULE_SUFFIX: Final = ", always, by rule "
"""Stands between a person's name and a rule's, where a rule approved the call."""


RECEIPT_FORMAT: Final = 2
"""Version of the receipt's form. The first had no number, and its amounts were micro-dollars."""


class Receipt(msgspec.Struct, frozen=True):
    """The receipt of a session. Amounts are dollars, times microseconds.

    `passed` counts what each brake let through, `spent_by_purpose_usd` the cost per purpose, `anonymized` the values of
    each kind hidden from models. `in_doubt` has no outcome yet; `unknown_calls` ended with an unknown outcome.
    `unknown` counts events that this program cannot read. `folder` is the digest of the agent's folder when the session
    began, `definition` that of its contents. `hash` and `inbox_hash` are those of the last events used, so that the
    receipt can be checked against the journal.
    """

    format: int = RECEIPT_FORMAT
    session: str = ""
    agent: str = ""
    kind: SessionKind = "task"
    started_by: str = ""
    origin: Origin = "person"
    trusted: bool = True
    trigger: str = ""
    parent: str = ""
    follows: str = ""
    because: str = ""
    definition: str = ""
    folder: str = ""
    state: State = "RUNNING"
    terminal_reason: str = ""
    started_at: int = 0
    ended_at: int | None = None
    wakes: int = 0
    cost_usd: Usd = ZERO_USD
    held_usd: Usd = ZERO_USD
    spent_by_purpose_usd: Mapping[str, Usd] = {}
    anonymized: Mapping[str, int] = {}
    calls: tuple[ReceiptLine, ...] = ()
    requests: tuple[ReceiptLine, ...] = ()
    models: tuple[ModelLine, ...] = ()
    phases: tuple[PhaseLine, ...] = ()
    turns: tuple[TurnLine, ...] = ()
    passed: Mapping[str, int] = {}
    brakes: tuple[Brake, ...] = ()
    decisions: tuple[Decision, ...] = ()
    rules: tuple[str, ...] = ()
    guardrails: tuple[GuardrailLine, ...] = ()
    documents: tuple[DocumentLine, ...] = ()
    findings: tuple[FindingLine, ...] = ()
    judges: tuple[JudgesLine, ...] = ()
    memories_given: tuple[str, ...] = ()
    precedents_given: tuple[str, ...] = ()
    memories_proposed: tuple[ProposalLine, ...] = ()
    precedents_proposed: tuple[ProposalLine, ...] = ()
    notifications: tuple[NotificationLine, ...] = ()
    routes: tuple[RouteLine, ...] = ()
    heard: tuple[InboundLine, ...] = ()
    children: tuple[ChildLine, ...] = ()
    overruns: tuple[OverrunLine, ...] = ()
    in_doubt: tuple[str, ...] = ()
    unknown_calls: tuple[str, ...] = ()
    events: int = 0
    erased: int = 0
    unknown: int = 0
    hash: str = ""
    inbox_events: int = 0
    inbox_hash: str = ""


def make_receipt(events: Iterable[Stored], inbox: Iterable[Stored] = ()) -> Receipt:
    """Make the receipt from a session's stream and, if given, its inbox."""
    events = tuple(events)
    made = _add_head(Receipt(**msgspec.structs.asdict(gather_artifacts(events))), events)
    calls: dict[str, ReceiptLine] = {}
    requests: dict[str, ReceiptLine] = {}
    for stored in events:
        match stored.event:
            case CallStarted() as call:
                calls[call.call] = _make_call_line(call, stored.at)
            case CallSettled() as done:
                line = _settle_line(calls[done.call], stored, done.outcome, done.charge, done.error)
                calls[done.call] = msgspec.structs.replace(line, duration_ms=done.duration_ms)
            case RequestStarted() as asked:
                requests[asked.request] = _make_request_line(asked, stored.at)
            case RequestSettled(request=request, usage=usage) as done:
                line = _settle_line(requests[request], stored, done.outcome, done.charge, done.error)
                requests[request] = msgspec.structs.replace(line, usage=usage)
                made = _count_step(made, line)
            case _:
                made = _fold_other_event(made, stored)
    return _fold_inbox(_add_totals(made, tuple(calls.values()), tuple(requests.values())), inbox)


def _add_head(made: Receipt, events: Sequence[Stored]) -> Receipt:
    if not events:
        return made
    last, erased = events[-1], sum(stored.erased for stored in events)
    return msgspec.structs.replace(made, events=last.seq, erased=erased, hash=last.hash.hex())


def _make_call_line(event: CallStarted, at: int) -> ReceiptLine:
    return ReceiptLine(
        id=event.call,
        name=event.tool,
        purpose=event.purpose,
        started_at=at,
        held_usd=_sum_held_usd(event.legs),
        level=event.level,
        risk=event.risk or "",
        effect=event.effect,
        egress=event.egress,
        phase=event.phase,
        parallel_group=event.parallel_group,
        observed=event.observed,
        decision=event.decision,
        decided_by=event.decided_by,
    )


def _make_request_line(event: RequestStarted, at: int) -> ReceiptLine:
    return ReceiptLine(
        id=event.request,
        name=event.model,
        purpose=event.purpose,
        started_at=at,
        held_usd=_sum_held_usd(event.legs),
        observed=event.observed,
        anonymized=event.anonymized,
    )


def _settle_line(line: ReceiptLine, stored: Stored, outcome: Outcome, charge: Charge | None, error: str) -> ReceiptLine:
    cost = micros_to_usd(charge.usd if charge else 0)
    return msgspec.structs.replace(line, outcome=outcome, settled_at=stored.at, cost_usd=cost, error=error)


def _sum_held_usd(legs: tuple[Leg, ...]) -> Decimal:
    return micros_to_usd(max((leg.amount for leg in legs if leg.unit == "usd"), default=0))


def _add_totals(made: Receipt, calls: tuple[ReceiptLine, ...], requests: tuple[ReceiptLine, ...]) -> Receipt:
    lines = (*calls, *requests)
    spent: dict[str, Decimal] = {}
    hidden: Counter[str] = Counter()
    for line in lines:
        spent[line.purpose] = spent.get(line.purpose, ZERO_USD) + line.cost_usd
        hidden.update(line.anonymized)
    by_rule = (line.decided_by.partition(ALWAYS_RULE_SUFFIX)[2] for line in calls)
    return msgspec.structs.replace(
        made,
        calls=calls,
        requests=requests,
        models=sum_by_model(requests),
        cost_usd=sum(spent.values(), ZERO_USD),
        held_usd=sum((line.held_usd for line in lines), ZERO_USD),
        spent_by_purpose_usd=spent,
        anonymized=dict(sorted(hidden.items())),
        passed=_count_passed(lines),
        rules=tuple(dict.fromkeys(rule for rule in by_rule if rule)),
        in_doubt=tuple(line.id for line in lines if line.outcome is None),
        unknown_calls=tuple(line.id for line in lines if line.outcome == "unknown"),
        decisions=tuple(_note_decision_use(decision, calls) for decision in made.decisions),
    )


def brake_of_outcome(outcome: Outcome) -> BrakeName:
    match outcome:
        case "external_halt":
            return "halt"
        case "cost_cap_reached":
            return "budget"
        case _:
            return "grants"


def _count_passed(lines: Sequence[ReceiptLine]) -> dict[BrakeName, int]:
    """Count what each brake let through, without what only passed in observe mode."""
    watched = Counter(brake for line in lines if line.observed for brake in set(map(brake_of_outcome, line.observed)))
    return {brake: len(lines) - watched[brake] for brake in BRAKES} if lines else {}


def _fold_other_event(made: Receipt, stored: Stored) -> Receipt:
    event = stored.event
    match event:
        case SessionStarted():
            return _fold_session_started(made, stored.at, event)
        case SessionWoken():
            return msgspec.structs.replace(made, state="RUNNING", wakes=made.wakes + 1)
        case SessionParked():
            return msgspec.structs.replace(made, state=event.state)
        case SessionEnded():
            return msgspec.structs.replace(
                made, state=event.state, terminal_reason=event.terminal_reason, ended_at=stored.at
            )
        case SessionResumed():
            return msgspec.structs.replace(made, state="RUNNING", terminal_reason="", ended_at=None)
        case TurnStarted():
            return msgspec.structs.replace(made, turns=(*made.turns, TurnLine(event.turn, stored.at)))
        case TurnEnded():
            return _change_last_turn(made, ended_at=stored.at, why=event.why, sentence=event.sentence)
        case CostCapReached():
            brake = Brake(event.KIND, stored.at, event.refused, event.name, event.scope, event.window)
            return msgspec.structs.replace(made, brakes=(*made.brakes, brake))
        case CallRefused():
            return _fold_call_refused(made, stored.at, event)
        case RequestRefused():
            brake = Brake(event.outcome, stored.at, event.request, event.model, "", "", brake_of_outcome(event.outcome))
            return _add_brake(made, msgspec.structs.replace(brake, sentence=event.sentence))
        case DecisionAsked():
            asked = Decision(event.decision, event.about, event.name, event.subject, stored.at)
            return msgspec.structs.replace(made, decisions=(*made.decisions, asked))
        case OverrunIncurred():
            return msgspec.structs.replace(made, overruns=(*made.overruns, _make_overrun_line(event)))
        case Unknown():
            return msgspec.structs.replace(made, unknown=made.unknown + 1)
        case _:
            return made


def _make_overrun_line(event: OverrunIncurred) -> OverrunLine:
    amount = to_unit_amount(event.amount, event.unit)
    return OverrunLine(event.hold, event.scope, event.window, event.unit, amount)


def _count_step(made: Receipt, line: ReceiptLine) -> Receipt:
    if not made.turns or line.purpose != "turn" or line.outcome != "ok":
        return made
    return _change_last_turn(made, steps=made.turns[-1].steps + 1)


def _change_last_turn(made: Receipt, **facts: Any) -> Receipt:
    if not made.turns:
        return made
    return msgspec.structs.replace(made, turns=(*made.turns[:-1], msgspec.structs.replace(made.turns[-1], **facts)))


def _fold_session_started(made: Receipt, at: int, event: SessionStarted) -> Receipt:
    return msgspec.structs.replace(
        made,
        session=event.session,
        agent=event.agent,
        kind=event.kind,
        started_by=event.started_by,
        origin=event.origin,
        trusted=event.trusted,
        trigger=event.trigger,
        parent=event.parent,
        follows=event.follows,
        because=event.because,
        definition=event.definition,
        folder=event.folder,
        started_at=at,
    )


def _fold_call_refused(made: Receipt, at: int, event: CallRefused) -> Receipt:
    brake = Brake(
        code=event.outcome,
        at=at,
        refused=event.call,
        name=event.tool,
        scope="",
        window="",
        brake=brake_of_outcome(event.outcome),
        sentence=event.sentence,
        level=event.level,
        risk=event.risk or "",
        phase=event.phase,
        decision=event.decision,
        decided_by=event.decided_by,
    )
    return _add_brake(_note_answerer(made, event.decision, event.decided_by), brake)


def _add_brake(made: Receipt, brake: Brake) -> Receipt:
    """Add a refusal; a refusal by a cap is already there with its cap, and is merged with it."""
    last = made.brakes[-1] if made.brakes else None
    if last is None or last.refused != brake.refused or last.sentence or brake.brake != "budget":
        return msgspec.structs.replace(made, brakes=(*made.brakes, brake))
    told = msgspec.structs.replace(brake, scope=last.scope, window=last.window)
    return msgspec.structs.replace(made, brakes=(*made.brakes[:-1], told))


def _note_answerer(made: Receipt, decision: str, by: str) -> Receipt:
    """Note who answered a question; a refusal does not contain the answer, since a yes may have no effect."""
    if not decision or not by:
        return made
    known = (msgspec.structs.replace(asked, by=by) if asked.decision == decision else asked for asked in made.decisions)
    return msgspec.structs.replace(made, decisions=tuple(known))


def _note_decision_use(decision: Decision, calls: tuple[ReceiptLine, ...]) -> Decision:
    call = next((line for line in calls if line.decision == decision.decision), None)
    if call is None:
        return decision
    return msgspec.structs.replace(decision, used=True, by=call.decided_by, verdict=decision.verdict or "approve")


def _fold_inbox(made: Receipt, inbox: Iterable[Stored]) -> Receipt:
    answers: dict[str, tuple[int, DecisionMade]] = {}
    heard: list[InboundLine] = []
    children: list[ChildLine] = []
    last: Stored | None = None
    for stored in inbox:
        last = stored
        match stored.event:
            case DecisionMade() as answer:
                answers[answer.decision] = (stored.at, answer)
            case WakePosted() as wake:
                heard.append(InboundLine(wake.cause, wake.origin, wake.sender, stored.at, wake.trusted))
                children += [ChildLine(wake.sender, stored.at)] if wake.cause == "child" else []
            case _:
                pass
    decisions = tuple(_apply_answer(asked, answers.get(asked.decision)) for asked in made.decisions)
    made = msgspec.structs.replace(made, decisions=decisions, heard=tuple(heard), children=tuple(children))
    return made if last is None else msgspec.structs.replace(made, inbox_events=last.seq, inbox_hash=last.hash.hex())


def _apply_answer(asked: Decision, answer: tuple[int, DecisionMade] | None) -> Decision:
    if answer is None:
        return asked
    at, made = answer
    return msgspec.structs.replace(asked, verdict=made.verdict, by=made.by, decided_at=at, reason=made.reason)
