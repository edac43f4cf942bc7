"""The decision about a call: a pure function of the request and of locked rows.

The checks have a fixed order:

    R5 halt -> R6 tool, arguments, rate -> provenance -> budget -> approval -> R4 hold

The budget comes before the approval, so that no person is asked about a call that the budget would refuse. A question
holds the call's maximum cost, like an intent, until the call is admitted or refused. The result is a list of drafts to
write: the intent, a refusal or a question to a person. It is empty if other holds must settle first.

`LEVEL_TABLE` has the defaults of each capability level; the resolved policy overrides its cells. The store's own policy
is read under the lock of each hold, so a process that started before the policy was tightened cannot spend more.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import product
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from halter.core.clock import HOUR, MINUTE, QUARTER
from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    FleetPolicyAdopted,
    HoldMade,
)
from halter.core.ids import FLEET, Digest, are_one_person, can_decide, session_stream
from halter.core.money import (
    BudgetRow,
    Cap,
    CapReached,
    Caps,
    Contended,
    Leg,
    format_compared_micros,
    has_past_window,
    reserve,
    roll_legs,
)
from halter.core.ports import Draft, Rows, Write
from halter.core.project.holds import POLICY_KEY, budget_key, budget_row, rows_of_hold
from halter.core.provenance import Flaw
from halter.core.rows import AuditRow, DecisionRow, FleetPolicyRow, HaltRow, HoldRow, OutputRow, RateRow, RuleRow
from halter.core.tools import Effect, Level, ToolSpec
from halter.core.vocabulary import ActionLimit, Audit, Outcome, Purpose, R, RiskLevel, RowKey
from halter.policy.evaluation import QuestionTerms, ResolvedPolicy, ToolPolicy
from halter.policy.order import find_strictest
from halter.spec.policy import Mode, ToolRule
from halter.state.lifecycle import draft_releases


def adopt_first_policy(event: FleetPolicyAdopted) -> Write:
    """Adopt the first policy of a store. If several processes try, one wins and its policy binds the others."""

    def decide(rows: Rows) -> Sequence[Draft]:
        is_first = rows.get(FleetPolicyRow, FLEET) is None
        return [Draft(event)] if is_first and can_decide(event.by) else []

    return Write(FLEET, "policy/first", decide, [POLICY_KEY])


def adopt_policy(event: FleetPolicyAdopted, key: str) -> Write:
    """Replace the policy named in `event.replaces`; write nothing if another one is in force."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(FleetPolicyRow, FLEET)
        is_current = event.replaces == ("" if row is None else row.digest)
        return [Draft(event)] if is_current and can_decide(event.by) else []

    return Write(FLEET, key, decide, [POLICY_KEY])


def lower_legs_to_policy(legs: tuple[Leg, ...], rows: Rows) -> tuple[Leg, ...]:
    """Lower the caps of the fleet's legs to the current policy of the store."""
    for leg in legs:
        if leg.scope == FLEET:
            row = rows.get(FleetPolicyRow, FLEET)
            return legs if row is None else lower_legs(legs, row)
    return legs


def lower_legs(legs: tuple[Leg, ...], row: FleetPolicyRow) -> tuple[Leg, ...]:
    return tuple([_lower_leg(leg, row) for leg in legs])


def lower_caps_to_policy(caps: Caps, row: FleetPolicyRow | None) -> Caps:
    if row is None:
        return caps
    fleet = tuple(Cap(row.lower(cap.per, cap.max_cost_usd), cap.per) for cap in caps.fleet)
    return caps if fleet == caps.fleet else msgspec.structs.replace(caps, fleet=fleet)


def _lower_leg(leg: Leg, row: FleetPolicyRow) -> Leg:
    cap = row.lower(leg.window.partition("/")[0], leg.cap) if leg.scope == FLEET else leg.cap
    return leg if cap == leg.cap else msgspec.structs.replace(leg, cap=cap)


RATE_SLICES: Final = 60
"""Number of slices of a sliding period. One more slice is read: the oldest, which is only partly inside."""


class AttemptRate(msgspec.Struct, frozen=True, gc=False):
    limit: int
    period: int

    def slice_at(self, now: int) -> int:
        return now // (self.period // RATE_SLICES)

    def slices(self, now: int) -> range:
        last_slice = self.slice_at(now)
        return range(last_slice - RATE_SLICES, last_slice + 1)


class RequiredApproval(msgspec.Struct, frozen=True, gc=False):
    """The approval that a call needs: the digest to which it is bound, or the rule that already approves the call.

    `edited_digest` is of a person's edited arguments. `arguments_digest` and `argument_keys` are of the
    call's own. `mode` and `always` say why it is needed, as in `DecisionAsked`.
    """

    decision: str
    digest: str
    display_body: bytes
    reasons: tuple[str, ...] = ()
    rule: str = ""
    terms: QuestionTerms = QuestionTerms()
    edited_digest: str = ""
    arguments_digest: str = ""
    argument_keys: tuple[str, ...] = ()
    approvers: int = 1
    mode: str = ""
    always: bool = False


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """The part of a session's caps that is reserved for its wrap-up."""

    session: str = ""
    usd: int = 0
    tokens: int = 0


NO_RESERVE: Final = Reserve()
NOTHING_SPENT: Final = BudgetRow("", "", "usd")
"""The budget of an account that has no row yet."""


def find_spendable_budgets(
    legs: Sequence[Leg], rows: Sequence[BudgetRow | None], session_reserve: Reserve
) -> tuple[list[tuple[Leg, BudgetRow]], int | None, int | None]:
    """Find each leg's budget, and the dollars and tokens that the tightest caps leave.

    An amount is None if no cap binds it. A session's reserve is not spendable.
    """
    budgets: list[tuple[Leg, BudgetRow]] = []
    usd: int | None = None
    tokens: int | None = None
    for leg, stored_row in zip(legs, rows, strict=True):
        cap, row = leg.cap, stored_row or NOTHING_SPENT
        if row.cap_by:
            if not leg.window and leg.scope == f"session:{session_reserve.session}":
                # A configured cap is already lowered by the reserve; one that a person set is not.
                row = row.with_reserve(session_reserve.usd if leg.unit == "usd" else session_reserve.tokens)
            cap = row.cap
        budgets.append((leg, row))
        if cap is None:
            continue
        remaining = cap - row.spent
        if leg.unit == "usd":
            usd = remaining if usd is None or remaining < usd else usd
        elif tokens is None or remaining < tokens:
            tokens = remaining
    return budgets, usd, tokens


HaltKeys = tuple[tuple[type[HaltRow], str], ...]
"""The rows of the scopes whose halt stops a session's effects."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything about one call that is known before any row is locked.

    `legs` are held for the call. `accounts` are charged if the call costs something without a hold. `flaws` are the
    findings of the provenance check. `untrusted_reason` is why it refuses the call, or postpones it if `is_staged`.
    `question_hold` is what the question about the call holds.
    """

    call: str
    tool: str
    arguments: bytes
    session: str
    agent: str
    now: int
    flaw: tuple[Outcome, str] | None = None
    halts: HaltKeys = ()
    purpose: Purpose = "turn"
    phase: str = ""
    level: Level = "CONTROLLED"
    effect: Effect = "write"
    idempotent: bool = False
    egress: bool = False
    risk: RiskLevel | None = None
    audit: Audit = ""
    rate: AttemptRate | None = None
    action_limits: tuple[ActionLimit, ...] = ()
    approval: RequiredApproval | None = None
    legs: tuple[Leg, ...] = ()
    accounts: tuple[Leg, ...] = ()
    reserve: Reserve = NO_RESERVE
    parallel_group: str = ""
    observe: bool = False
    blob: Digest | None = None
    writes: tuple[str, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    untrusted_reason: str = ""
    is_staged: bool = False
    question_hold: HoldRow | None = None

    @property
    def is_pure_read(self) -> bool:
        """Return whether the call changes nothing, costs nothing, and needs neither an approval nor a rate."""
        return self.effect == "read" and not self.legs and self.rate is None and self.approval is None

    def draft(self, event: AnyEvent) -> Draft:
        return Draft(event, None if self.blob else self.arguments, self.blob)

    def at(self, now: int) -> "CallRequest":
        """Return the request at a later time, with the rate slices and windows of that time."""
        if now // QUARTER == self.now // QUARTER:
            return self if self.rate is None else msgspec.structs.replace(self, now=now)
        return msgspec.structs.replace(
            self, now=now, legs=roll_legs(self.legs, now), accounts=roll_legs(self.accounts, now)
        )


def list_halt_rows(scopes: Iterable[str]) -> HaltKeys:
    """List the halt rows of some scopes."""
    return tuple([(HaltRow, scope) for scope in scopes])


def list_call_rows(request: CallRequest) -> list[RowKey]:
    """List every row that the decision reads or changes."""
    keys: list[RowKey] = [*request.halts, (AuditRow, request.call)]
    if request.rate is not None:
        keys += product([RateRow], [request.agent], [request.tool], request.rate.slices(request.now))
    for stream, limit in request.action_limits:
        keys += product([RateRow], [stream], [""], range(limit))
    if request.approval is not None:
        keys.append((DecisionRow, request.approval.decision))
        if request.approval.rule:
            keys.append((RuleRow, request.approval.rule))
        if request.legs:
            keys.append((HoldRow, request.approval.decision))
    if request.question_hold is not None:
        keys.append((DecisionRow, request.question_hold.hold))
        keys += rows_of_hold(request.question_hold.hold, request.question_hold.decode_legs())
    if request.writes:
        keys += product([OutputRow], [request.agent], request.writes)
    if request.legs:
        keys += rows_of_hold(request.call, request.legs)
    return keys


def judge_call(request: CallRequest, rows: Rows) -> Sequence[Draft]:
    """Decide about a call: return the drafts of its intent, its refusal or its question.

    The result is empty if the call must wait for other holds or for a pending decision. In observe mode, refusals that
    can be waived are recorded with the intent.
    """
    halts = rows.find(request.halts)
    if any(halts) and (halt := explain_halt(halts, request.session, rows.now)):
        return [_make_call_refusal(request, "external_halt", halt)]
    waived_refusals: tuple[Outcome, ...] = ()
    if request.flaw is not None or request.rate is not None or request.action_limits or request.untrusted_reason:
        for refusal in _find_refusals(request, rows):
            if not request.observe or refusal[0] in {"unknown_tool", "invalid_arguments"}:
                return [_make_call_refusal(request, *refusal)]
            waived_refusals = (*waived_refusals, refusal[0])
    held_legs: tuple[Leg, ...] = ()
    if request.legs:
        if has_past_window(request.legs, rows.now):
            return []
        legs = lower_legs_to_policy(request.legs, rows)
        verdict = reserve(find_spendable_budgets(legs, rows.find([*map(budget_key, legs)]), request.reserve)[0])
        if isinstance(verdict, CapReached) and request.observe:
            waived_refusals = (*waived_refusals, "cost_cap_reached")
            legs = remove_caps(request.legs)
            verdict = reserve([*zip(legs, map(partial(budget_row, rows), legs), strict=True)])
        if isinstance(verdict, CapReached):
            return _refuse_at_cap(request, verdict)
        held_legs = () if isinstance(verdict, Contended) else verdict.legs
    approval = ("", "")
    if request.approval is not None:
        answer = _check_approval(request, request.approval, rows)
        if answer is None or isinstance(answer, Draft):
            return [] if answer is None else _hold_for_question(request, answer, held_legs)
        if request.legs and request.question_hold is None and rows.get(HoldRow, request.approval.decision) is not None:
            return []
        approval = answer
    if request.legs and not held_legs:
        return []
    return [
        Draft(
            _make_call_intent(request, approval, held_legs, waived_refusals, find_action_slots(request, rows)),
            None if request.blob else request.arguments,
            request.blob,
        )
    ]


def _hold_for_question(request: CallRequest, draft: Draft, held_legs: tuple[Leg, ...]) -> Sequence[Draft]:
    """Hold the maximum cost of a call with its question; ask nothing while other holds use the budget."""
    if not request.legs or not isinstance(draft.event, DecisionAsked):
        return [draft]
    if not held_legs:
        return []
    hold = HoldMade(hold=draft.event.decision, name=request.tool, purpose=request.purpose, legs=held_legs)
    return [draft, Draft(hold)]


def judge_asked_call(request: CallRequest, rows: Rows) -> Sequence[Draft]:
    """Decide about a call whose question holds money: as if that was released, which the same commit then does.

    While the question is pending, nothing is written and the hold stays.
    """
    hold = request.question_hold and rows.get(HoldRow, request.question_hold.hold)
    if hold is None:
        return judge_call(request, rows)
    rest = _RowsWithoutHold(rows, hold)
    drafts = judge_call(request, rest) or _refuse_if_cap_was_lowered(request, hold, rest)
    return [*draft_releases([hold]), *drafts] if drafts else []


class _RowsWithoutHold:
    """The rows as they are after a hold is released."""

    def __init__(self, rows: Rows, hold: HoldRow) -> None:
        self._rows = rows
        self._freed: dict[RowKey, int] = {budget_key(leg): leg.amount for leg in hold.decode_legs()}

    @property
    def now(self) -> int:
        return self._rows.now

    def get(self, kind: type[R], /, *key: Any) -> R | None:
        row = self._rows.get(kind, *key)
        freed_amount = self._freed.get((kind, *key))
        return cast("R", row.with_amounts(held=-freed_amount)) if isinstance(row, BudgetRow) and freed_amount else row

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        return [self.get(*key) for key in keys]


def _refuse_if_cap_was_lowered(request: CallRequest, hold: HoldRow, rows: Rows) -> Sequence[Draft]:
    """Refuse an answered call that no longer fits where its question held money; else it waits.

    Questions that hold more together than a lowered cap allows would wait for each other.
    """
    decision = rows.get(DecisionRow, hold.hold)
    if decision is None or not decision.verdict or not request.legs or has_past_window(request.legs, rows.now):
        return []
    legs = lower_legs_to_policy(request.legs, rows)
    verdict = reserve(find_spendable_budgets(legs, rows.find([*map(budget_key, legs)]), request.reserve)[0])
    held_accounts = {budget_key(leg) for leg in hold.decode_legs()}
    if not isinstance(verdict, Contended) or budget_key(verdict.leg) not in held_accounts:
        return []
    budget, cap = verdict.budget, verdict.budget.binding(verdict.leg.cap) or 0
    remaining = max(0, cap - budget.spent - budget.held)
    where = f"{verdict.leg.scope} {verdict.leg.window}".strip()
    cost_text, remaining_text = format_compared_micros(verdict.leg.amount, remaining)
    sentence = (
        f"It may cost {cost_text}. Since a person was asked, the cap of {where} was lowered: "
        f"{remaining_text} is left beside what other calls hold."
    )
    return [_make_call_refusal(request, "cost_cap_reached", sentence)]


def explain_halt(halts: Iterable[HaltRow | None], session: str, now: int) -> str:
    """Check R5: describe the halt of a scope, or the ramp of a resumed one; empty if neither applies."""
    for row in filter(None, halts):
        if row.halted:
            return f"{row.scope} was halted by {row.by}{': ' + row.reason if row.reason else ''}."
        if now < row.at + compute_ramp_delay(session, row.ramp):
            text = f"{row.scope} was resumed by {row.by}"
            return f"{text}; its sessions resume one after another, this one shortly."
    return ""


def compute_ramp_delay(session: str, ramp: int) -> int:
    """Compute a session's delay within the ramp after a halt: spread evenly, and constant for a session."""
    if ramp <= 0:
        return 0
    return int.from_bytes(sha256(session.encode()).digest()[:8]) % ramp


def _find_refusals(request: CallRequest, rows: Rows) -> Iterable[tuple[Outcome, str]]:
    """Check R6 and provenance: yield the refusals of a call, in the order of the checks."""
    if request.flaw is not None:
        yield request.flaw
    if request.rate is not None:
        slices = request.rate.slices(request.now)
        attempts = sum(
            row.attempts for number in slices if (row := rows.get(RateRow, request.agent, request.tool, number))
        )
        if attempts >= request.rate.limit:
            hours = request.rate.period / HOUR
            yield (
                "rate_limited",
                f"{request.tool} was tried {attempts} times in {hours:g} h, and the limit is {request.rate.limit}.",
            )
    for stream, limit in request.action_limits:
        if find_free_slot(rows, stream, limit) is None:
            yield ("rate_limited", describe_too_many_actions(request.session, stream, limit))
    if request.untrusted_reason:
        yield ("untrusted", request.untrusted_reason)


def find_free_slot(rows: Rows, stream: str, limit: int) -> int | None:
    """Return a slot that no call has taken in the last minute; None if the limit is reached.

    A time far in the future comes from a clock that was set back, and does not count.
    """
    for slot in range(limit):
        row = rows.get(RateRow, stream, "", slot)
        if row is None or abs(rows.now - row.attempts) >= MINUTE:
            return slot
    return None


def find_action_slots(request: CallRequest, rows: Rows) -> tuple[tuple[str, int], ...]:
    """Return the slots that a call takes of the limits of actions per minute."""
    slots = ((stream, find_free_slot(rows, stream, limit)) for stream, limit in request.action_limits)
    return tuple((stream, slot) for stream, slot in slots if slot is not None)


def describe_too_many_actions(session: str, stream: str, limit: int) -> str:
    if stream == session_stream(session):
        return f"You may make {limit} calls per minute that change something. Wait with `yield`, then continue."
    return (
        f"{stream.removeprefix('session:')} and the agents that it asks may make {limit} calls per minute that change "
        "something. Answer without this call."
    )


def _check_approval(request: CallRequest, approval: RequiredApproval, rows: Rows) -> tuple[str, str] | Draft | None:
    """Check the approval of a call.

    Returns the decision and the person that approve it, a question or refusal to write, or None to wait.
    """
    if request.observe:
        return ("", "")
    row = rows.get(DecisionRow, approval.decision)
    rule = rows.get(RuleRow, approval.rule) if approval.rule else None
    if rule is not None and rule.live(rows.now) and can_decide(rule.by) and not (row and row.verdict):
        return ("", f"{rule.by}, always, by rule {rule.rule}")
    if row is None or not row.asked_at:
        return Draft(_make_question(request, approval, rows.now), approval.display_body)
    if row.used_at is not None:
        sentence = f"Approval {row.decision} was already used; an approval is valid for one call."
        return _make_call_refusal(request, "approval_denied", sentence)
    if not row.verdict:
        return _make_expiry(request, row.decision) if rows.now >= row.expires_at else None
    if row.decided_at is None or max(row.decided_at, rows.now) >= row.expires_at:
        return _make_expiry(request, row.decision)
    if not can_decide(row.by):
        sentence = f"{row.by or 'The caller'} is not a person: only a person can decide this."
        return _make_call_refusal(request, "approval_denied", sentence, row.decision, row.by)
    if row.verdict == "deny":
        return _make_call_refusal(request, "approval_denied", f"{row.by} denied this call.", row.decision, row.by)
    if approval.digest != row.digest or row.decided_digest != (
        digest_edit(row.digest, approval.edited_digest)
        if row.verdict == "edit" or approval.edited_digest
        else row.digest
    ):
        sentence = "Approval no longer valid: the arguments or the policy changed."
        return _make_call_refusal(request, "approval_denied", sentence, row.decision, row.by)
    if approval.approvers > 1 and not (row.verdict == "approve" and are_two_people(row.first_by, row.by)):
        sentence = f"This call needs two approvers; only {row.by} approved it."
        return _make_call_refusal(request, "approval_denied", sentence, row.decision, row.by)
    return (row.decision, row.people)


def are_two_people(first: str, second: str) -> bool:
    return can_decide(first) and can_decide(second) and not are_one_person(first, second)


def digest_edit(question_digest: str, arguments_digest: str) -> str:
    """Make the digest that binds edited arguments to their question."""
    return sha256(f"halter edit 1 {question_digest} {arguments_digest}".encode()).hexdigest()


def _refuse_at_cap(request: CallRequest, verdict: CapReached) -> Sequence[Draft]:
    event = CostCapReached.refusing(request.call, request.tool, verdict)
    return [Draft(event), _make_call_refusal(request, "cost_cap_reached", describe_cap_reached(verdict))]


def describe_cap_reached(verdict: CapReached) -> str:
    where = f"{verdict.leg.scope} {verdict.leg.window}".strip()
    remaining = max(0, verdict.cap - verdict.budget.spent)
    if verdict.leg.unit == "tokens":
        return f"It may use {verdict.leg.amount:,} tokens, and {remaining:,} are left of the token budget of {where}."
    cost_text, remaining_text = format_compared_micros(verdict.leg.amount, remaining)
    return f"It may cost {cost_text}, and {remaining_text} is left of the cap of {where}."


def _make_question(request: CallRequest, approval: RequiredApproval, now: int) -> DecisionAsked:
    return DecisionAsked(
        decision=approval.decision,
        about="approval",
        subject=request.call,
        name=request.tool,
        digest=approval.digest,
        **approval.terms.times_at(now),
        level=request.level,
        risk=request.risk,
        reasons=approval.reasons,
        same=approval.arguments_digest,
        keys=approval.argument_keys,
        flaws=request.flaws,
        approvers=approval.approvers,
        mode=approval.mode,
        always=approval.always,
    )


def _make_expiry(request: CallRequest, decision: str) -> Draft:
    sentence = "The decision expired without an answer; the call was not made."
    return _make_call_refusal(request, "approval_expired", sentence, decision)


def _make_call_refusal(
    request: CallRequest, outcome: Outcome, sentence: str, decision: str = "", by: str = ""
) -> Draft:
    event = CallRefused(
        call=request.call,
        tool=request.tool,
        outcome=outcome,
        sentence=sentence,
        level=request.level,
        risk=request.risk,
        decision=decision,
        decided_by=by,
        phase=request.phase,
        flaws=request.flaws,
        staged=request.is_staged and outcome == "untrusted",
    )
    return request.draft(event)


def _make_call_intent(
    request: CallRequest,
    approval: tuple[str, str],
    held_legs: tuple[Leg, ...],
    waived_refusals: tuple[Outcome, ...],
    action_slots: tuple[tuple[str, int], ...],
) -> AnyEvent:
    intent = CallStarted(
        call=request.call,
        tool=request.tool,
        purpose=request.purpose,
        legs=held_legs,
        level=request.level,
        effect=request.effect,
        idempotent=request.idempotent,
        egress=request.egress,
        risk=request.risk,
        rated=request.rate.slice_at(request.now) if request.rate else 0,
        audit=request.audit,
        parallel_group=request.parallel_group,
        phase=request.phase,
        writes=request.writes,
    )
    if action_slots:
        intent = msgspec.structs.replace(intent, action_slots=action_slots)
    if request.approval is None and not waived_refusals and not request.flaws:
        return intent
    # Set separately: a Python call with more than fifteen keywords is four times as slow.
    digest, (decision, decided_by) = request.approval.digest if request.approval else "", approval
    return msgspec.structs.replace(
        intent, digest=digest, decision=decision, decided_by=decided_by, observed=waived_refusals, flaws=request.flaws
    )


def remove_caps(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """Remove configured caps, for observe mode. A cap that a person set is in its row and stays."""
    return tuple(msgspec.structs.replace(leg, cap=None) for leg in legs)


class LevelDefaults(msgspec.Struct, frozen=True):
    """The defaults of a capability level, which a policy may override."""

    audit: Audit
    assessed: bool
    asks: frozenset[Mode]


LEVEL_TABLE: Final[Mapping[Level, LevelDefaults]] = MappingProxyType(
    {
        "SAFE": LevelDefaults("", assessed=False, asks=frozenset()),
        "MONITORED": LevelDefaults("arguments", assessed=False, asks=frozenset()),
        "CONTROLLED": LevelDefaults("full", assessed=False, asks=frozenset({"ASSIST"})),
        "RESTRICTED": LevelDefaults("full", assessed=True, asks=frozenset({"ASSIST", "SEMI"})),
        "PRIVILEGED": LevelDefaults("full", assessed=True, asks=frozenset({"ASSIST", "SEMI", "FULL"})),
    }
)


def find_declared_level(spec: ToolSpec) -> Level:
    """Return a tool's own level; an MCP tool that is not declared read-only is at least RESTRICTED."""
    if not spec.server or spec.effect == "read":
        return spec.level
    return find_strictest(ToolRule, "level", (spec.level, "RESTRICTED"))


def find_tool_policy(policy: ResolvedPolicy, spec: ToolSpec) -> ToolPolicy:
    return policy.rule(spec.name, find_declared_level(spec))


def needs_approval(rule: ToolPolicy, mode: Mode, risk: RiskLevel | None) -> bool:
    """Return whether a call needs an approval. A call of CRITICAL risk always does, whatever the policy says."""
    return risk == "CRITICAL" or rule.approval == "always" or rule.approvers > 1 or level_asks(rule, mode)


def level_asks(rule: ToolPolicy, mode: Mode) -> bool:
    """Return whether the level of a tool makes the guard ask in a mode. A rule outranks it."""
    return rule.approval is None and mode in LEVEL_TABLE[rule.level].asks


def audit_of_policy(rule: ToolPolicy) -> Audit:
    """Return how much of an admitted call the audit shows. A refused call is always shown."""
    return LEVEL_TABLE[rule.level].audit


def find_attempt_rate(rule: ToolPolicy) -> AttemptRate | None:
    return None if rule.rate is None else AttemptRate(rule.rate, HOUR)


def needs_simulation(rule: ToolPolicy, *, is_approval_needed: bool) -> bool:
    return rule.simulate == "always" or (rule.simulate == "asked" and is_approval_needed)


def needs_risk_assessment(rule: ToolPolicy) -> bool:
    return LEVEL_TABLE[rule.level].assessed
