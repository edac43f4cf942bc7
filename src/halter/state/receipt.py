"""The receipt of a session: a pure function of its events.

It lists what the session did, read and spent, which checks of the guard passed or refused its effects, its decisions,
and why it ended. Answers to decisions are in the session's inbox: without the inbox, a receipt shows only their effect.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from halter.core.events import (
    AnyEvent,
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
from halter.core.money import ZERO_USD, Leg, Usd, micros_to_usd, to_unit_amount
from halter.core.ports import Stored
from halter.core.usage import Usage
from halter.core.vocabulary import Origin, Outcome, SessionKind, State
from halter.state.receipt_lines import (
    CHECKS,
    Brake,
    CheckName,
    ChildLine,
    Decision,
    DocumentLine,
    FindingLine,
    GuardrailLine,
    InboundLine,
    JudgesLine,
    ModelLine,
    NotificationLine,
    OverrunLine,
    PhaseLine,
    ProposalLine,
    ReceiptLine,
    RouteLine,
    TurnLine,
)

ALWAYS_RULE_SUFFIX: Final = ", always, by rule "
"""Separates a person's name from a rule's, if a rule approved the call."""

RECEIPT_FORMAT: Final = 2
"""Version of the receipt's format. The first had no number, and its amounts were micro-dollars."""


class Receipt(msgspec.Struct, frozen=True):
    """The receipt of a session. Amounts are dollars, times microseconds.

    `passed` counts what each check passed, `spent_by_purpose_usd` is the cost per purpose, `anonymized` counts the
    values of each kind hidden from models. `in_doubt` lists effects without an outcome; `unknown_calls` ended with an
    unknown outcome. `unknown` counts events that this program cannot read. `folder` is the digest of the agent's folder
    at the start of the session, `definition` that of its contents. `hash` and `inbox_hash` are those of the last events
    used, so that the receipt can be verified against the journal.
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
    """Build the receipt from a session's stream and, if given, its inbox."""
    fold = _ReceiptFold()
    for stored_event in events:
        fold.apply(stored_event)
    for stored_event in inbox:
        fold.apply_inbox(stored_event)
    return fold.receipt()


class _ReceiptFold:
    """The state of a receipt's fold: facts and lines by field of the receipt."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._lines: defaultdict[str, list[Any]] = defaultdict(list)
        self._calls: dict[str, ReceiptLine] = {}
        self._requests: dict[str, ReceiptLine] = {}
        self._documents: dict[tuple[str, str, str], DocumentLine] = {}
        self._findings: dict[str, FindingLine] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._last: Stored | None = None
        self._last_inbox: Stored | None = None

    def apply(self, stored_event: Stored) -> None:
        self._last, event, at = stored_event, stored_event.event, stored_event.at
        self._counts["erased"] += stored_event.erased
        match event:
            case CallStarted():
                held_usd, risk = _sum_held_usd(event.legs), event.risk or ""
                self._calls[event.call] = _make_line(
                    ReceiptLine, event, id=event.call, name=event.tool, started_at=at, held_usd=held_usd, risk=risk
                )
            case RequestStarted():
                held_usd = _sum_held_usd(event.legs)
                self._requests[event.request] = _make_line(
                    ReceiptLine, event, id=event.request, name=event.model, started_at=at, held_usd=held_usd
                )
            case CallSettled():
                line = _settle_line(
                    self._calls[event.call], stored_event, event.outcome, event.cost_micros, event.error
                )
                self._calls[event.call] = replace(line, duration_ms=event.duration_ms)
                if (child := event.sub_session) is not None:
                    self._lines["children"].append(ChildLine(child.session, at, micros_to_usd(child.usd)))
            case RequestSettled():
                cost_micros = event.charge.usd if event.charge else 0
                line = _settle_line(
                    self._requests[event.request], stored_event, event.outcome, cost_micros, event.error
                )
                self._requests[event.request] = replace(line, usage=event.usage)
                if line.purpose == "turn" and line.outcome == "ok" and self._lines["turns"]:
                    self._change_last("turns", steps=self._lines["turns"][-1].steps + 1)
            case TurnStarted():
                self._lines["turns"].append(TurnLine(event.turn, at))
            case TurnEnded():
                self._change_last("turns", ended_at=at, why=event.why, sentence=event.sentence)
            case CostCapReached():
                self._lines["brakes"].append(_make_line(Brake, event, code=event.KIND, at=at))
            case CallRefused():
                self._note_answerer(event.decision, event.decided_by)
                if not event.staged:
                    self._add_brake(event, event.call, event.tool, at, risk=event.risk or "")
            case RequestRefused():
                self._add_brake(event, event.request, event.model, at)
            case DecisionAsked():
                self._lines["decisions"].append(_make_line(Decision, event, asked_at=at))
            case OverrunIncurred():
                amount = to_unit_amount(event.amount, event.unit)
                self._lines["overruns"].append(_make_line(OverrunLine, event, amount=amount))
            case Unknown():
                self._counts["unknown"] += 1
            case _:
                self._apply_lifecycle(event, at)

    def _apply_lifecycle(self, event: AnyEvent, at: int) -> None:
        match event:
            case SessionStarted():
                # `format` is the session's format here, and not the receipt's.
                shared_names = set(event.__struct_fields__).intersection(Receipt.__struct_fields__) - {"format"}
                self._facts |= {name: getattr(event, name) for name in shared_names} | {"started_at": at}
            case SessionWoken():
                self._facts["state"] = "RUNNING"
                self._counts["wakes"] += not event.recovered
            case SessionParked():
                self._facts["state"] = event.state
            case SessionEnded():
                self._facts |= {"state": event.state, "terminal_reason": event.terminal_reason, "ended_at": at}
                self._change_last("phases", left_at=at)
            case SessionResumed():
                self._facts |= {"state": "RUNNING", "terminal_reason": "", "ended_at": None}
                self._change_last("phases", left_at=None)
            case PhaseEntered():
                self._change_last("phases", left_at=at)
                self._lines["phases"].append(PhaseLine(event.phase, event.number, at))
            case _:
                self._apply_artifact(event, at)

    def _apply_artifact(self, event: AnyEvent, at: int) -> None:
        match event:
            case DocumentRead():
                key = (event.document, event.name, event.collection)
                document = self._documents.get(key)
                line = DocumentLine(*key, at) if document is None else replace(document, times=document.times + 1)
                self._documents[key] = line
            case FindingEmitted():
                self._findings[event.finding] = _make_line(FindingLine, event, emitted_at=at)
            case FindingReviewed() if event.finding in self._findings:
                self._findings[event.finding] = replace(
                    self._findings[event.finding], review=event.verdict, judges=event.judges, reviewed_at=at
                )
            case JudgesChosen():
                most_usd, cap = micros_to_usd(event.usd), None if event.cap is None else micros_to_usd(event.cap)
                self._lines["judges"].append(_make_line(JudgesLine, event, most_usd=most_usd, cap_usd=cap, at=at))
            case ContextGiven():
                self._lines["memories_given"] += event.memories
                self._lines["precedents_given"] += event.precedents
            case MemoryProposed():
                self._lines["memories_proposed"].append(ProposalLine(event.memory, at))
            case PrecedentProposed():
                self._lines["precedents_proposed"].append(ProposalLine(event.precedent, at, event.kind))
            case NotificationQueued():
                self._lines["notifications"].append(_make_line(NotificationLine, event, queued_at=at))
            case GuardrailTriggered():
                self._add_guardrail(_make_line(GuardrailLine, event, at=at))
            case MessageRouted():
                self._lines["routes"].append(_make_line(RouteLine, event, at=at))
            case _:
                pass

    def apply_inbox(self, stored_event: Stored) -> None:
        self._last_inbox, event, at = stored_event, stored_event.event, stored_event.at
        match event:
            case DecisionMade():
                facts = {"verdict": event.verdict, "by": event.people, "decided_at": at, "reason": event.reason}
                self._answers[event.decision] = facts
            case WakePosted():
                self._lines["heard"].append(_make_line(InboundLine, event, at=at))
                if event.cause == "child":
                    self._lines["children"].append(ChildLine(event.sender, at))
            case _:
                pass

    def _change_last(self, name: str, **facts: Any) -> None:
        lines = self._lines[name]
        if lines:
            lines[-1] = replace(lines[-1], **facts)

    def _add_guardrail(self, line: GuardrailLine) -> None:
        """Add a line. Repeated waits for the same rate, which may occur every minute for hours, are merged."""
        lines: list[GuardrailLine] = self._lines["guardrails"]
        if lines and line.guardrail == "model_rate" and _rate_of_line(lines[-1]) == _rate_of_line(line):
            lines[-1] = replace(line, at=lines[-1].at, times=lines[-1].times + 1)
        else:
            lines.append(line)

    def _add_brake(
        self, event: CallRefused | RequestRefused, effect_id: str, name: str, at: int, **fields: Any
    ) -> None:
        """Add a refusal. A refusal by a cap is merged with the line of its `CostCapReached`."""
        refusals: list[Brake] = self._lines["brakes"]
        check_name = brake_of_outcome(event.outcome)
        fields |= {"code": event.outcome, "at": at, "refused": effect_id, "name": name, "brake": check_name}
        line = _make_line(Brake, event, scope="", window="", **fields)
        if refusals and refusals[-1].refused == effect_id and not refusals[-1].sentence and check_name == "budget":
            refusals[-1] = replace(line, scope=refusals[-1].scope, window=refusals[-1].window)
        else:
            refusals.append(line)

    def _note_answerer(self, decision: str, by: str) -> None:
        """Record who answered a decision. A refusal does not contain the answer: an approval may have no effect."""
        if decision and by:
            decisions: list[Decision] = self._lines["decisions"]
            decisions[:] = [replace(each, by=by) if each.decision == decision else each for each in decisions]

    def _decide(self, decision: Decision) -> Decision:
        """Add the call that used the answer, and the answer from the inbox."""
        call = next((line for line in self._calls.values() if line.decision == decision.decision), None)
        if call is not None:
            decision = replace(decision, used=True, by=call.decided_by, verdict=decision.verdict or "approve")
        return replace(decision, **self._answers.get(decision.decision, {}))

    def receipt(self) -> Receipt:
        calls, requests = tuple(self._calls.values()), tuple(self._requests.values())
        lines, cost_by_purpose, hidden_counts = (*calls, *requests), dict[str, Decimal](), Counter[str]()
        for line in lines:
            cost_by_purpose[line.purpose] = cost_by_purpose.get(line.purpose, ZERO_USD) + line.cost_usd
            hidden_counts.update(line.anonymized)
        by_rule = (line.decided_by.partition(ALWAYS_RULE_SUFFIX)[2] for line in calls)
        facts: dict[str, Any] = {name: tuple(items) for name, items in self._lines.items()}
        facts |= self._facts | self._counts
        for name in ("memories_given", "precedents_given"):
            facts[name] = tuple(dict.fromkeys(self._lines[name]))
        facts["decisions"] = tuple(map(self._decide, self._lines["decisions"]))
        if self._last is not None:
            facts |= {"events": self._last.seq, "hash": self._last.hash.hex()}
        if self._last_inbox is not None:
            facts |= {"inbox_events": self._last_inbox.seq, "inbox_hash": self._last_inbox.hash.hex()}
        return Receipt(
            **facts,
            calls=calls,
            requests=requests,
            documents=tuple(self._documents.values()),
            findings=tuple(self._findings.values()),
            models=_sum_by_model(requests),
            cost_usd=sum(cost_by_purpose.values(), ZERO_USD),
            held_usd=sum((line.held_usd for line in lines), ZERO_USD),
            spent_by_purpose_usd=cost_by_purpose,
            anonymized=dict(sorted(hidden_counts.items())),
            passed=_count_passed(lines),
            rules=tuple(dict.fromkeys(rule for rule in by_rule if rule)),
            in_doubt=tuple(line.id for line in lines if line.outcome is None),
            unknown_calls=tuple(line.id for line in lines if line.outcome == "unknown"),
        )


S = TypeVar("S", bound=msgspec.Struct)


def _make_line(kind: type[S], event: msgspec.Struct, **fields: Any) -> S:
    """Make a line from the event's fields with the same names, and from `fields`."""
    shared_fields = {name: getattr(event, name) for name in event.__struct_fields__ if name in kind.__struct_fields__}
    return kind(**(shared_fields | fields))


def _settle_line(
    line: ReceiptLine, stored_event: Stored, outcome: Outcome, cost_micros: int, error: str
) -> ReceiptLine:
    cost = micros_to_usd(cost_micros)
    return replace(line, outcome=outcome, settled_at=stored_event.at, cost_usd=cost, error=error)


def _sum_held_usd(legs: tuple[Leg, ...]) -> Decimal:
    return micros_to_usd(max((leg.amount for leg in legs if leg.unit == "usd"), default=0))


_SUMMED: Final = tuple({*ModelLine.__struct_fields__} & {*Usage.__struct_fields__})
"""The counts of a usage that are summed for each model."""


def _sum_by_model(requests: Iterable[ReceiptLine]) -> tuple[ModelLine, ...]:
    """Sum requests by model, in order of first use. Costs were computed per request."""
    models: dict[str, Counter[Any]] = {}
    held_by_model: defaultdict[str, Decimal] = defaultdict(lambda: ZERO_USD)
    cost_by_model: defaultdict[str, Decimal] = defaultdict(lambda: ZERO_USD)
    for line in requests:
        counter = models.setdefault(line.name, Counter())
        counter.update(requests=1, failed=int(line.outcome not in {"ok", None}))
        counter.update({name: getattr(line.usage, name) for name in _SUMMED} if line.usage else {})
        held_by_model[line.name] += line.held_usd
        cost_by_model[line.name] += line.cost_usd
    sums: dict[str, dict[str, Any]] = {name: dict(counter) for name, counter in models.items()}
    return tuple(
        ModelLine(name, held_usd=held_by_model[name], cost_usd=cost_by_model[name], **sums[name]) for name in sums
    )


def _rate_of_line(line: GuardrailLine) -> tuple[str, str]:
    """Return the guardrail and the rate of a line; the sentence names the rate before the time."""
    return line.guardrail, line.sentence.partition(" until ")[0]


def brake_of_outcome(outcome: Outcome) -> CheckName:
    match outcome:
        case "external_halt":
            return "halt"
        case "cost_cap_reached":
            return "budget"
        case _:
            return "grants"


def _count_passed(lines: Sequence[ReceiptLine]) -> dict[str, int]:
    """Count the effects that each check passed, without those that passed only in observe mode."""
    observed_only = Counter(
        check_name for line in lines if line.observed for check_name in set(map(brake_of_outcome, line.observed))
    )
    return {check_name: len(lines) - observed_only[check_name] for check_name in CHECKS} if lines else {}
