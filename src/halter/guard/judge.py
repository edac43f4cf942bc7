"""The one decision about a call, as a pure function of the request and of locked rows.

The order is fixed: R5 halt, R6 the tool, its arguments and rate, provenance, a look at the money (no person is woken
for what the budget would refuse), approval, R4 the hold. The result is what gets written: the intent, the refusal, the
question to a person, or nothing where other holds must settle first.

The defaults of each capability level are a table here; the resolved policy overrides its cells. The store's own policy
is read under the lock of each hold, so a process that started before it was tightened spends nothing beyond it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import product
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.clock import HOUR, QUARTER
from halter.core.events import AnyEvent, CallRefused, CallStarted, CostCapReached, DecisionAsked, FleetPolicyAdopted
from halter.core.ids import FLEET, Digest, are_one_person, may_decide
from halter.core.money import (
    BudgetRow,
    Cap,
    CapReached,
    Caps,
    Contended,
    Leg,
    format_micros,
    has_past_window,
    reserve,
    roll_legs,
)
from halter.core.ports import Draft, Rows, Write
from halter.core.project import POLICY_KEY, budget_key, budget_row, rows_of_hold
from halter.core.provenance import Flaw
from halter.core.rows import AuditRow, DecisionRow, FleetPolicyRow, HaltRow, OutputRow, RateRow, RuleRow
from halter.core.spec import Mode, ResolvedPolicy, ToolPolicy
from halter.core.tools import LEVELS, Effect, Level, ToolSpec
from halter.core.vocabulary import Audit, Outcome, Purpose, RiskLevel, RowKey


def adopt_first_policy(event: FleetPolicyAdopted) -> Write:
    """Adopt the first policy of a store. Of several processes one wins, and the others are bound by it."""

    def decide(rows: Rows) -> Sequence[Draft]:
        first = rows.get(FleetPolicyRow, FLEET) is None
        return [Draft(event)] if first and may_decide(event.by) else []

    return Write(FLEET, "policy/first", decide, [POLICY_KEY])


def adopt_policy(event: FleetPolicyAdopted, key: str) -> Write:
    """Replace the policy named in `event.replaces`; if another one is in force by now, write nothing."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(FleetPolicyRow, FLEET)
        as_seen = event.replaces == ("" if row is None else row.digest)
        return [Draft(event)] if as_seen and may_decide(event.by) else []

    return Write(FLEET, key, decide, [POLICY_KEY])


def lower_legs_to_policy(legs: tuple[Leg, ...], rows: Rows) -> tuple[Leg, ...]:
    """Bind what is held for the fleet to the current policy of the store."""
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
"""A sliding period is counted in this many slices, plus one for the oldest, which is only partly inside."""

APPROVAL_EXPIRES: Final = 24 * HOUR


class AttemptRate(msgspec.Struct, frozen=True, gc=False):
    limit: int
    period: int

    def slice_at(self, now: int) -> int:
        return now // (self.period // RATE_SLICES)

    def slices(self, now: int) -> range:
        last = self.slice_at(now)
        return range(last - RATE_SLICES, last + 1)


class RequiredApproval(msgspec.Struct, frozen=True, gc=False):
    """A person must agree: what their answer is bound to, or the rule by which they already have.

    `edited` names the arguments a person put in place of the model's; `same` and `keys` describe the model's.
    """

    decision: str
    digest: str
    shown: bytes
    reasons: tuple[str, ...] = ()
    rule: str = ""
    expires_in: int = APPROVAL_EXPIRES
    edited: str = ""
    same: str = ""
    keys: tuple[str, ...] = ()
    approvers: int = 1


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """What a session keeps back of its own caps for its last words."""

    session: str = ""
    usd: int = 0
    tokens: int = 0


NO_RESERVE: Final = Reserve()
NOTHING_SPENT: Final = BudgetRow("", "", "usd")
"""What stands against the cap of any account that has no row yet."""


def find_spendable_budgets(
    legs: Sequence[Leg], rows: Sequence[BudgetRow | None], kept: Reserve
) -> tuple[list[tuple[Leg, BudgetRow]], int | None, int | None]:
    """Each leg with what stands against its cap, and the dollars and the tokens that the tightest of the caps leaves.

    What the session keeps back for its last words is not spendable. None is where no cap binds.
    """
    budgets: list[tuple[Leg, BudgetRow]] = []
    usd: int | None = None
    tokens: int | None = None
    for leg, known in zip(legs, rows, strict=True):
        cap, row = leg.cap, known or NOTHING_SPENT
        if row.cap_by:
            if not leg.window and leg.scope == f"session:{kept.session}":
                # A configured cap is lowered where it is configured.
                row = row.with_reserve(kept.usd if leg.unit == "usd" else kept.tokens)
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
"""The rows that halt a session's effects."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything about one call that is known before any row is locked.

    `legs` are held for it; `accounts` are charged if it costs something although nothing was held. `flaws` are what the
    injection brake found; `untrusted` says why it refuses the call because of them, or has it `staged`.
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
    approval: RequiredApproval | None = None
    legs: tuple[Leg, ...] = ()
    accounts: tuple[Leg, ...] = ()
    kept: Reserve = NO_RESERVE
    parallel_group: str = ""
    observe: bool = False
    blob: Digest | None = None
    writes: tuple[str, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    untrusted: str = ""
    staged: bool = False

    @property
    def is_pure_read(self) -> bool:
        """Whether it changes nothing, costs nothing, and needs neither a person nor a rate."""
        return self.effect == "read" and not self.legs and self.rate is None and self.approval is None

    def draft(self, event: AnyEvent) -> Draft:
        return Draft(event, None if self.blob else self.arguments, self.blob)

    def at(self, now: int) -> "CallRequest":
        """The same request at a later time: rates and windows have moved on."""
        if now // QUARTER == self.now // QUARTER:
            return self if self.rate is None else msgspec.structs.replace(self, now=now)
        return msgspec.structs.replace(
            self, now=now, legs=roll_legs(self.legs, now), accounts=roll_legs(self.accounts, now)
        )


def list_halt_rows(scopes: Iterable[str]) -> HaltKeys:
    """The rows that halt what belongs to these scopes."""
    return tuple([(HaltRow, scope) for scope in scopes])


def list_call_rows(request: CallRequest) -> list[RowKey]:
    """Every row that the decision reads or changes."""
    keys: list[RowKey] = [*request.halts, (AuditRow, request.call)]
    if request.rate is not None:
        keys += product([RateRow], [request.agent], [request.tool], request.rate.slices(request.now))
    if request.approval is not None:
        keys.append((DecisionRow, request.approval.decision))
        if request.approval.rule:
            keys.append((RuleRow, request.approval.rule))
    if request.writes:
        keys += product([OutputRow], [request.agent], request.writes)
    if request.legs:
        keys += rows_of_hold(request.call, request.legs)
    return keys


def judge_call(request: CallRequest, rows: Rows) -> Sequence[Draft]:
    halts = rows.find(request.halts)
    if any(halts) and (halt := explain_halt(halts, request.session, rows.now)):
        return [_make_call_refusal(request, "external_halt", halt)]
    waived: tuple[Outcome, ...] = ()
    if request.flaw is not None or request.rate is not None or request.untrusted:
        for refusal in _find_refusals(request, rows):
            if not request.observe or refusal[0] in {"unknown_tool", "invalid_arguments"}:
                return [_make_call_refusal(request, *refusal)]
            waived = (*waived, refusal[0])
    held: tuple[Leg, ...] = ()
    if request.legs:
        if has_past_window(request.legs, rows.now):
            return []
        legs = lower_legs_to_policy(request.legs, rows)
        verdict = reserve(find_spendable_budgets(legs, rows.find([*map(budget_key, legs)]), request.kept)[0])
        if isinstance(verdict, CapReached) and request.observe:
            waived = (*waived, "cost_cap_reached")
            legs = remove_caps(request.legs)
            verdict = reserve([*zip(legs, map(partial(budget_row, rows), legs), strict=True)])
        if isinstance(verdict, CapReached):
            return _refuse_at_cap(request, verdict)
        held = () if isinstance(verdict, Contended) else verdict.legs
    agreed = ("", "")
    if request.approval is not None:
        answer = _check_approval(request, request.approval, rows)
        if answer is None or isinstance(answer, Draft):
            return [] if answer is None else [answer]
        agreed = answer
    if request.legs and not held:
        return []
    return [
        Draft(
            _make_call_intent(request, agreed, held, waived), None if request.blob else request.arguments, request.blob
        )
    ]


def explain_halt(halts: Iterable[HaltRow | None], session: str, now: int) -> str:
    """R5: who halted one of the scopes, or that a resumed one is not let go yet."""
    for row in filter(None, halts):
        if row.halted:
            return f"{row.scope} was halted by {row.by}{': ' + row.reason if row.reason else ''}."
        if now < row.at + compute_ramp_delay(session, row.ramp):
            resumed = f"{row.scope} was resumed by {row.by}"
            return f"{resumed} and is being let go step by step; this session's turn comes soon."
    return ""


def compute_ramp_delay(session: str, ramp: int) -> int:
    """Spread sessions evenly over the ramp after a halt; each always has the same place."""
    if ramp <= 0:
        return 0
    return int.from_bytes(sha256(session.encode()).digest()[:8]) % ramp


def _find_refusals(request: CallRequest, rows: Rows) -> Iterable[tuple[Outcome, str]]:
    """R6: the reasons against the call, the first one first."""
    if request.flaw is not None:
        yield request.flaw
    if request.rate is not None:
        pieces = request.rate.slices(request.now)
        attempts = sum(
            row.attempts for number in pieces if (row := rows.get(RateRow, request.agent, request.tool, number))
        )
        if attempts >= request.rate.limit:
            hours = request.rate.period / HOUR
            yield (
                "rate_limited",
                f"{request.tool} was tried {attempts} times in {hours:g} h, and the limit is {request.rate.limit}.",
            )
    if request.untrusted:
        yield ("untrusted", request.untrusted)


def _check_approval(request: CallRequest, need: RequiredApproval, rows: Rows) -> tuple[str, str] | Draft | None:
    """The decision and person that approve the call; or the question, the refusal, or None to wait."""
    if request.observe:
        return ("", "")
    row = rows.get(DecisionRow, need.decision)
    rule = rows.get(RuleRow, need.rule) if need.rule else None
    if rule is not None and rule.live(rows.now) and may_decide(rule.by) and not (row and row.verdict):
        return ("", f"{rule.by}, always, by rule {rule.rule}")
    if row is None or not row.asked_at:
        return Draft(_make_question(request, need, rows.now), need.shown)
    if row.used_at is not None:
        sentence = f"The approval {row.decision} was used before; it is good for one call."
        return _make_call_refusal(request, "approval_denied", sentence)
    if not row.verdict:
        return _make_expiry(request, row.decision) if rows.now >= row.expires_at else None
    if row.decided_at is None or max(row.decided_at, rows.now) >= row.expires_at:
        return _make_expiry(request, row.decision)
    if not may_decide(row.by):
        sentence = f"{row.by or 'The caller'} is not a person: only a person can decide this."
        return _make_call_refusal(request, "approval_denied", sentence, row.decision, row.by)
    if row.verdict == "deny":
        return _make_call_refusal(request, "approval_denied", f"{row.by} said no.", row.decision, row.by)
    if need.digest != row.digest or row.decided_digest != (
        digest_edit(row.digest, need.edited) if row.verdict == "edit" or need.edited else row.digest
    ):
        sentence = "What was approved is not what is asked now: the arguments or the policy have changed."
        return _make_call_refusal(request, "approval_denied", sentence, row.decision, row.by)
    if need.approvers > 1 and not (row.verdict == "approve" and are_two_people(row.first_by, row.by)):
        sentence = f"Two people must agree to this, and only {row.by} did."
        return _make_call_refusal(request, "approval_denied", sentence, row.decision, row.by)
    return (row.decision, row.people)


def are_two_people(first: str, second: str) -> bool:
    return may_decide(first) and may_decide(second) and not are_one_person(first, second)


def digest_edit(question: str, edited: str) -> str:
    """Bind edited arguments to the question that they answer."""
    return sha256(f"halter edit 1 {question} {edited}".encode()).hexdigest()


def _refuse_at_cap(request: CallRequest, verdict: CapReached) -> Sequence[Draft]:
    event = CostCapReached.refusing(request.call, request.tool, verdict)
    return [Draft(event), _make_call_refusal(request, "cost_cap_reached", describe_cap_reached(verdict))]


def describe_cap_reached(verdict: CapReached) -> str:
    where = f"{verdict.leg.scope} {verdict.leg.window}".strip()
    remaining = max(0, verdict.cap - verdict.budget.spent)
    if verdict.leg.unit == "tokens":
        return f"It may use {verdict.leg.amount:,} tokens, and {remaining:,} are left of the token budget of {where}."
    cost = format_micros(verdict.leg.amount)
    return f"It may cost {cost}, and {format_micros(remaining)} is left of the cap of {where}."


def _make_question(request: CallRequest, need: RequiredApproval, now: int) -> DecisionAsked:
    return DecisionAsked(
        decision=need.decision,
        about="approval",
        subject=request.call,
        name=request.tool,
        digest=need.digest,
        expires_at=now + need.expires_in,
        level=request.level,
        risk=request.risk,
        reasons=need.reasons,
        same=need.same,
        keys=need.keys,
        flaws=request.flaws,
        approvers=need.approvers,
    )


def _make_expiry(request: CallRequest, decision: str) -> Draft:
    sentence = "The question expired without an answer, so it was not done."
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
        staged=request.staged and outcome == "untrusted",
    )
    return request.draft(event)


def _make_call_intent(
    request: CallRequest, answer: tuple[str, str], held: tuple[Leg, ...], waived: tuple[Outcome, ...]
) -> AnyEvent:
    started = CallStarted(
        call=request.call,
        tool=request.tool,
        purpose=request.purpose,
        legs=held,
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
    if request.approval is None and not waived and not request.flaws:
        return started
    # Apart from the rest: Python makes a call of more than fifteen keywords four times as slow.
    digest, (decision, decided_by) = request.approval.digest if request.approval else "", answer
    return msgspec.structs.replace(
        started, digest=digest, decision=decision, decided_by=decided_by, observed=waived, flaws=request.flaws
    )


def remove_caps(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """Remove configured caps in observe mode; a cap that a person set stays."""
    return tuple(msgspec.structs.replace(leg, cap=None) for leg in legs)


class LevelDefaults(msgspec.Struct, frozen=True):
    """What holds for a level unless a policy overrides it."""

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
    """A tool's own level; an MCP tool not declared read-only is RESTRICTED."""
    if not spec.server or spec.effect == "read":
        return spec.level
    return LEVELS[max(LEVELS.index(spec.level), LEVELS.index("RESTRICTED"))]


def find_tool_policy(policy: ResolvedPolicy, spec: ToolSpec) -> ToolPolicy:
    return policy.rule(spec.name, find_declared_level(spec))


def needs_approval(rule: ToolPolicy, mode: Mode, risk: RiskLevel | None) -> bool:
    """Whether a person must agree. At CRITICAL risk always, regardless of any policy."""
    if risk == "CRITICAL" or rule.approval == "always" or rule.approvers > 1:
        return True
    return rule.approval is None and mode in LEVEL_TABLE[rule.level].asks


def audit_of_policy(rule: ToolPolicy) -> Audit:
    """How much of an allowed call the audit shows; a refused one is always shown."""
    return LEVEL_TABLE[rule.level].audit


def find_attempt_rate(rule: ToolPolicy) -> AttemptRate | None:
    return None if rule.rate is None else AttemptRate(rule.rate, HOUR)


def needs_simulation(rule: ToolPolicy, *, asked: bool) -> bool:
    return rule.simulate == "always" or (rule.simulate == "asked" and asked)


def needs_risk_assessment(rule: ToolPolicy) -> bool:
    return LEVEL_TABLE[rule.level].assessed
