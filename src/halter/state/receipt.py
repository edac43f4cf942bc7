"""The receipt of a session: a pure function of its events.

It says what the session did, heard and spent, which brakes it passed and which stopped it, who decided what, and why
it ended. Anyone who has the events can make it again. Who answered a question stands in the session's inbox: without
that, a receipt tells of an answer only what the session made of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec

from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    OverrunIncurred,
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
from halter.core.money import NOTHING, Charge, Leg, Usd, in_unit, usd
from halter.core.ports import Stored
from halter.core.vocabulary import Origin, Outcome, SessionKind, State
from halter.state.receipt_lines import (
    BRAKES,
    Brake,
    BrakeName,
    ChildLine,
    Decision,
    Heard,
    Line,
    ModelLine,
    OverrunLine,
    TurnLine,
    by_model,
)
from halter.state.receipt_tasks import (
    DocumentLine,
    FindingLine,
    GuardrailLine,
    JudgesLine,
    NotificationLine,
    PhaseLine,
    ProposalLine,
    RouteLine,
    left,
)

BY_RULE: Final = ", always, by rule "
"""What stands between a person's name and a rule's, where a call was agreed to by a rule."""


FORMAT: Final = 2
"""Which form a receipt has. The first had no number, and its amounts were micro-dollars."""


class Receipt(msgspec.Struct, frozen=True):
    """What a session leaves in a person's hand. Amounts are dollars, times microseconds.

    `passed` counts what each brake let through, `spent_by_purpose_usd` says what each purpose cost, `anonymized` counts
    the values of each kind that requests did not send. `in_doubt` has no outcome yet; `unknown_calls` have one, which
    is that nobody knows it.
    `unknown` counts events that this program cannot read. `folder` is the digest of the agent's folder as it was when
    the session began, `definition` that of what it said. `hash` and `inbox_hash` are those of the last events that the
    receipt was made from: whoever has the journal can check it against them. `format` is the number of this form.
    """

    format: int = FORMAT
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
    cost_usd: Usd = NOTHING
    held_usd: Usd = NOTHING
    spent_by_purpose_usd: Mapping[str, Usd] = {}
    anonymized: Mapping[str, int] = {}
    calls: tuple[Line, ...] = ()
    requests: tuple[Line, ...] = ()
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
    heard: tuple[Heard, ...] = ()
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


def receipt(events: Iterable[Stored], inbox: Iterable[Stored] = ()) -> Receipt:
    """Make the receipt of a session from its own stream, and from its inbox where that is at hand."""
    events = tuple(events)
    made = _head(Receipt(**msgspec.structs.asdict(left(events))), events)
    calls: dict[str, Line] = {}
    requests: dict[str, Line] = {}
    for stored in events:
        match stored.event:
            case CallStarted() as call:
                calls[call.call] = _call(call, stored.at)
            case CallSettled() as done:
                line = _settled(calls[done.call], stored, done.outcome, done.charge, done.error)
                calls[done.call] = msgspec.structs.replace(line, duration_ms=done.duration_ms)
            case RequestStarted() as asked:
                requests[asked.request] = _request(asked, stored.at)
            case RequestSettled(request=request, usage=usage) as done:
                line = _settled(requests[request], stored, done.outcome, done.charge, done.error)
                requests[request] = msgspec.structs.replace(line, usage=usage)
                made = _stepped(made, line)
            case _:
                made = _other(made, stored)
    return _answered(_summed(made, tuple(calls.values()), tuple(requests.values())), inbox)


def _head(made: Receipt, events: Sequence[Stored]) -> Receipt:
    """Say which events it is made from."""
    if not events:
        return made
    last, erased = events[-1], sum(stored.erased for stored in events)
    return msgspec.structs.replace(made, events=last.seq, erased=erased, hash=last.hash.hex())


def _call(event: CallStarted, at: int) -> Line:
    return Line(
        id=event.call,
        name=event.tool,
        purpose=event.purpose,
        started_at=at,
        held_usd=_held(event.legs),
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


def _request(event: RequestStarted, at: int) -> Line:
    return Line(
        id=event.request,
        name=event.model,
        purpose=event.purpose,
        started_at=at,
        held_usd=_held(event.legs),
        observed=event.observed,
        anonymized=event.anonymized,
    )


def _settled(line: Line, stored: Stored, outcome: Outcome, charge: Charge | None, error: str) -> Line:
    cost = usd(charge.usd if charge else 0)
    return msgspec.structs.replace(line, outcome=outcome, settled_at=stored.at, cost_usd=cost, error=error)


def _held(legs: tuple[Leg, ...]) -> Decimal:
    return usd(max((leg.amount for leg in legs if leg.unit == "usd"), default=0))


def _summed(made: Receipt, calls: tuple[Line, ...], requests: tuple[Line, ...]) -> Receipt:
    """Add up what follows from all calls and requests together."""
    lines = (*calls, *requests)
    spent: dict[str, Decimal] = {}
    hidden: Counter[str] = Counter()
    for line in lines:
        spent[line.purpose] = spent.get(line.purpose, NOTHING) + line.cost_usd
        hidden.update(line.anonymized)
    by_rule = (line.decided_by.partition(BY_RULE)[2] for line in calls)
    return msgspec.structs.replace(
        made,
        calls=calls,
        requests=requests,
        models=by_model(requests),
        cost_usd=sum(spent.values(), NOTHING),
        held_usd=sum((line.held_usd for line in lines), NOTHING),
        spent_by_purpose_usd=spent,
        anonymized=dict(sorted(hidden.items())),
        passed=_passed(lines),
        rules=tuple(dict.fromkeys(rule for rule in by_rule if rule)),
        in_doubt=tuple(line.id for line in lines if line.outcome is None),
        unknown_calls=tuple(line.id for line in lines if line.outcome == "unknown"),
        decisions=tuple(_used(decision, calls) for decision in made.decisions),
    )


def brake_of(outcome: Outcome) -> BrakeName:
    """Tell which brake a refusal is one of."""
    match outcome:
        case "external_halt":
            return "halt"
        case "cost_cap_reached":
            return "budget"
        case _:
            return "grants"


def _passed(lines: Sequence[Line]) -> dict[BrakeName, int]:
    """Count what each brake let through by itself, not only because it was told to watch."""
    watched = Counter(brake for line in lines if line.observed for brake in set(map(brake_of, line.observed)))
    return {brake: len(lines) - watched[brake] for brake in BRAKES} if lines else {}


def _other(made: Receipt, stored: Stored) -> Receipt:
    event = stored.event
    match event:
        case SessionStarted():
            return _started(made, stored.at, event)
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
            return _last_turn(made, ended_at=stored.at, why=event.why, sentence=event.sentence)
        case CostCapReached():
            brake = Brake(event.KIND, stored.at, event.refused, event.name, event.scope, event.window)
            return msgspec.structs.replace(made, brakes=(*made.brakes, brake))
        case CallRefused():
            return _call_refused(made, stored.at, event)
        case RequestRefused():
            brake = Brake(event.outcome, stored.at, event.request, event.model, "", "", brake_of(event.outcome))
            return _braked(made, msgspec.structs.replace(brake, sentence=event.sentence))
        case DecisionAsked():
            asked = Decision(event.decision, event.about, event.name, event.subject, stored.at)
            return msgspec.structs.replace(made, decisions=(*made.decisions, asked))
        case OverrunIncurred():
            return msgspec.structs.replace(made, overruns=(*made.overruns, _overrun(event)))
        case Unknown():
            return msgspec.structs.replace(made, unknown=made.unknown + 1)
        case _:
            return made


def _overrun(event: OverrunIncurred) -> OverrunLine:
    amount = in_unit(event.amount, event.unit)
    return OverrunLine(event.hold, event.scope, event.window, event.unit, amount)


def _stepped(made: Receipt, line: Line) -> Receipt:
    """Count an answer as a step of the turn that asked for it."""
    if not made.turns or line.purpose != "turn" or line.outcome != "ok":
        return made
    return _last_turn(made, steps=made.turns[-1].steps + 1)


def _last_turn(made: Receipt, **facts: Any) -> Receipt:
    """Note something of the turn that is open."""
    if not made.turns:
        return made
    return msgspec.structs.replace(made, turns=(*made.turns[:-1], msgspec.structs.replace(made.turns[-1], **facts)))


def _started(made: Receipt, at: int, event: SessionStarted) -> Receipt:
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


def _call_refused(made: Receipt, at: int, event: CallRefused) -> Receipt:
    brake = Brake(
        code=event.outcome,
        at=at,
        refused=event.call,
        name=event.tool,
        scope="",
        window="",
        brake=brake_of(event.outcome),
        sentence=event.sentence,
        level=event.level,
        risk=event.risk or "",
        phase=event.phase,
        decision=event.decision,
        decided_by=event.decided_by,
    )
    return _braked(_learned(made, event.decision, event.decided_by), brake)


def _braked(made: Receipt, brake: Brake) -> Receipt:
    """Add a refusal; one by a cap stands there already, with the cap that it met, and is told in full."""
    last = made.brakes[-1] if made.brakes else None
    if last is None or last.refused != brake.refused or last.sentence or brake.brake != "budget":
        return msgspec.structs.replace(made, brakes=(*made.brakes, brake))
    told = msgspec.structs.replace(brake, scope=last.scope, window=last.window)
    return msgspec.structs.replace(made, brakes=(*made.brakes[:-1], told))


def _learned(made: Receipt, decision: str, by: str) -> Receipt:
    """Note who answered a question; a refusal does not say what the answer was, since a yes may come to nothing."""
    if not decision or not by:
        return made
    known = (msgspec.structs.replace(asked, by=by) if asked.decision == decision else asked for asked in made.decisions)
    return msgspec.structs.replace(made, decisions=tuple(known))


def _used(decision: Decision, calls: tuple[Line, ...]) -> Decision:
    """Note which call used an answer up, and by whom it was given."""
    call = next((line for line in calls if line.decision == decision.decision), None)
    if call is None:
        return decision
    return msgspec.structs.replace(decision, used=True, by=call.decided_by, verdict=decision.verdict or "approve")


def _answered(made: Receipt, inbox: Iterable[Stored]) -> Receipt:
    """Take in what the session was told: answers to its questions, and everything else that woke it."""
    answers: dict[str, tuple[int, DecisionMade]] = {}
    heard: list[Heard] = []
    children: list[ChildLine] = []
    last: Stored | None = None
    for stored in inbox:
        last = stored
        match stored.event:
            case DecisionMade() as answer:
                answers[answer.decision] = (stored.at, answer)
            case WakePosted() as wake:
                heard.append(Heard(wake.cause, wake.origin, wake.sender, stored.at, wake.trusted))
                children += [ChildLine(wake.sender, stored.at)] if wake.cause == "child" else []
            case _:
                pass
    decisions = tuple(_with_answer(asked, answers.get(asked.decision)) for asked in made.decisions)
    made = msgspec.structs.replace(made, decisions=decisions, heard=tuple(heard), children=tuple(children))
    return made if last is None else msgspec.structs.replace(made, inbox_events=last.seq, inbox_hash=last.hash.hex())


def _with_answer(asked: Decision, answer: tuple[int, DecisionMade] | None) -> Decision:
    if answer is None:
        return asked
    at, made = answer
    return msgspec.structs.replace(asked, verdict=made.verdict, by=made.by, decided_at=at, reason=made.reason)
