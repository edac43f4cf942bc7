"""The one decision about a call, as a pure function of what is asked and of locked rows.

The order is fixed: R5 halt, R6 the tool and its arguments and rate, a look at the money (nobody is woken for what
the budget would refuse), approval, R4 the hold. What it returns is what is written: the intent, the refusal, the
question to a person, or nothing where other holds must settle first.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec

from halter.core.clock import HOUR
from halter.core.events import AnyEvent, CallRefused, CallStarted, CostCapReached, DecisionAsked
from halter.core.ids import Digest, may_decide
from halter.core.limits import outdated, rolled
from halter.core.money import Account, BudgetRow, CapReached, Leg, MustWait, Reserved, reserve, shown
from halter.core.ports import Draft, Rows
from halter.core.project import budget_row, rows_of_hold
from halter.core.row import RowKey
from halter.core.rows import AuditRow, DecisionRow, HaltRow, RateRow, RuleRow
from halter.core.task_rows import OutputRow
from halter.core.tools import Effect, Level
from halter.core.vocabulary import Audit, Outcome, Purpose, RiskLevel
from halter.core.windows import QUARTER
from halter.guard.policies import legs_within

SLICES: Final = 60
"""A sliding period is counted in so many slices, and one more for the oldest, which is only partly in it."""

APPROVAL_EXPIRES: Final = 24 * HOUR


class Rate(msgspec.Struct, frozen=True):
    """At most so many attempts in any period of that length."""

    limit: int
    period: int

    def slice_at(self, now: int) -> int:
        """Number the slice of time that a moment falls into."""
        return now // (self.period // SLICES)

    def slices(self, now: int) -> range:
        """List the slices that the period before a moment touches."""
        last = self.slice_at(now)
        return range(last - SLICES, last + 1)


class Approval(msgspec.Struct, frozen=True):
    """That a person must agree, and what their answer is bound to; or the rule by which they already have.

    `edited` names the arguments that a person put in place of the model's; `same` and `keys` those of the model's.
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


class Kept(msgspec.Struct, frozen=True):
    """What a session keeps back of its own caps for its last words."""

    session: str = ""
    usd: int = 0
    tokens: int = 0


NOTHING_KEPT: Final = Kept()


def budget_for(rows: Rows, kept: Kept, leg: Account) -> BudgetRow:
    """Tell what stands against a cap, for somebody who keeps something back."""
    row = budget_row(rows, leg)
    if leg.window or leg.scope != f"session:{kept.session}":
        return row
    return row.lessened(kept.usd if leg.unit == "usd" else kept.tokens)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one call that can be known before any row is locked.

    `legs` are what is held for it; `accounts` say where a cost counts that it turns out to have all the same.
    """

    call: str
    tool: str
    arguments: bytes
    session: str
    agent: str
    now: int
    flaw: tuple[Outcome, str] | None = None
    scopes: tuple[str, ...] = ()
    purpose: Purpose = "turn"
    phase: str = ""
    level: Level = "CONTROLLED"
    effect: Effect = "write"
    idempotent: bool = False
    egress: bool = False
    risk: RiskLevel | None = None
    audit: Audit = ""
    rate: Rate | None = None
    approval: Approval | None = None
    legs: tuple[Leg, ...] = ()
    accounts: tuple[Leg, ...] = ()
    kept: Kept = NOTHING_KEPT
    parallel_group: str = ""
    observe: bool = False
    blob: Digest | None = None
    writes: tuple[str, ...] = ()

    @property
    def only_looks(self) -> bool:
        """Tell whether it changes nothing, costs nothing, and needs neither a person nor a place in a rate."""
        return self.effect == "read" and not self.legs and self.rate is None and self.approval is None

    def draft(self, event: AnyEvent) -> Draft:
        """Write an event about the call, with its arguments as its body; large ones were put away before."""
        return Draft(event, None if self.blob else self.arguments, self.blob)

    def at(self, now: int) -> "Asked":
        """Ask the same at a later moment: rates and windows have moved on."""
        if now // QUARTER == self.now // QUARTER:
            return msgspec.structs.replace(self, now=now)
        return msgspec.structs.replace(self, now=now, legs=rolled(self.legs, now), accounts=rolled(self.accounts, now))


def rows_of(asked: Asked) -> list[RowKey]:
    """Name every row that the decision looks at or changes."""
    keys: list[RowKey] = [(HaltRow, (scope,)) for scope in asked.scopes]
    keys.append((AuditRow, (asked.call,)))
    if asked.rate is not None:
        keys += [(RateRow, (asked.agent, asked.tool, number)) for number in asked.rate.slices(asked.now)]
    if asked.approval is not None:
        keys.append((DecisionRow, (asked.approval.decision,)))
        if asked.approval.rule:
            keys.append((RuleRow, (asked.approval.rule,)))
    keys += [(OutputRow, (asked.agent, digest)) for digest in asked.writes]
    return keys + list(rows_of_hold(asked.call, asked.legs))


def judge(asked: Asked, rows: Rows) -> Sequence[Draft]:
    """Decide about a call."""
    halt = halted(asked.scopes, asked.session, rows)
    if halt is not None:
        return [_refusal(asked, "external_halt", halt)]
    waived: list[Outcome] = []
    for refusal in _refusals(asked, rows):
        if not asked.observe or refusal[0] in {"unknown_tool", "invalid_arguments"}:
            return [_refusal(asked, *refusal)]
        waived.append(refusal[0])
    if outdated(asked.legs, rows.now):
        return []
    verdict = reserve(legs_within(asked.legs, rows), partial(budget_for, rows, asked.kept))
    if isinstance(verdict, CapReached) and asked.observe:
        waived.append("cost_cap_reached")
        verdict = reserve(uncapped(asked.legs), lambda leg: budget_row(rows, leg))
    if isinstance(verdict, CapReached):
        return _cap_reached(asked, verdict)
    answer = _approved(asked, rows)
    if isinstance(answer, Draft):
        return [answer]
    if answer is None or isinstance(verdict, MustWait):
        return []
    return [asked.draft(_intent(asked, answer, verdict, waived))]


def halted(scopes: Iterable[str], session: str, rows: Rows) -> str | None:
    """R5: say who halted one of the scopes, if anybody did, or when a resumed one is let go."""
    for scope in scopes:
        row = rows.get(HaltRow, scope)
        if row is None:
            continue
        if row.halted:
            return f"{scope} was halted by {row.by}{': ' + row.reason if row.reason else ''}."
        if rows.now < row.at + turn_in_ramp(session, row.ramp):
            return f"{scope} was resumed by {row.by} and is being let go step by step; this session's turn comes soon."
    return None


def turn_in_ramp(session: str, ramp: int) -> int:
    """Spread sessions evenly over the time in which a halt is lifted; each has its own, always the same place."""
    if ramp <= 0:
        return 0
    return int.from_bytes(sha256(session.encode()).digest()[:8]) % ramp


def _refusals(asked: Asked, rows: Rows) -> Iterable[tuple[Outcome, str]]:
    """R6: yield what stands against the call, the first reason first."""
    if asked.flaw is not None:
        yield asked.flaw
    if asked.rate is not None:
        pieces = asked.rate.slices(asked.now)
        attempts = sum(row.attempts for number in pieces if (row := rows.get(RateRow, asked.agent, asked.tool, number)))
        if attempts >= asked.rate.limit:
            hours = asked.rate.period / HOUR
            yield (
                "rate_limited",
                f"{asked.tool} was tried {attempts} times in {hours:g} h, and the limit is {asked.rate.limit}.",
            )


def _approved(asked: Asked, rows: Rows) -> tuple[str, str] | Draft | None:
    """Tell by which decision and whom the call is approved; or the question, the refusal, or None to wait."""
    need = asked.approval
    if need is None or asked.observe:
        return ("", "")
    row = rows.get(DecisionRow, need.decision)
    rule = rows.get(RuleRow, need.rule) if need.rule else None
    if rule is not None and rule.live(rows.now) and may_decide(rule.by) and not (row and row.verdict):
        return ("", f"{rule.by}, always, by rule {rule.rule}")
    if row is None or not row.asked_at:
        return Draft(_question(asked, need, rows.now), need.shown)
    if row.used_at is not None:
        return _refusal(
            asked, "approval_denied", f"The approval {row.decision} was used before; it is good for one call."
        )
    if not row.verdict:
        return _expired(asked, row.decision) if rows.now >= row.expires_at else None
    if row.decided_at is None or max(row.decided_at, rows.now) >= row.expires_at:
        return _expired(asked, row.decision)
    if not may_decide(row.by):
        sentence = f"{row.by or 'Nobody'} is no person: what agents say decides nothing."
        return _refusal(asked, "approval_denied", sentence, row.decision, row.by)
    if row.verdict == "deny":
        return _refusal(asked, "approval_denied", f"{row.by} said no.", row.decision, row.by)
    if need.digest != row.digest or row.decided_digest != _agreed(row, need.edited):
        sentence = "What was approved is not what is asked now: the arguments or the policy have changed."
        return _refusal(asked, "approval_denied", sentence, row.decision, row.by)
    return (row.decision, row.by)


def _agreed(row: DecisionRow, edited: str) -> str:
    """Name what a person must have agreed to: what was asked, or the arguments that they wrote in its place."""
    return edit_digest(row.digest, edited) if row.verdict == "edit" or edited else row.digest


def edit_digest(asked: str, edited: str) -> str:
    """Bind other arguments to the question that they answer."""
    return sha256(f"halter edit 1 {asked} {edited}".encode()).hexdigest()


def _cap_reached(asked: Asked, verdict: CapReached) -> Sequence[Draft]:
    event = CostCapReached.refusing(asked.call, asked.tool, verdict)
    return [Draft(event), _refusal(asked, "cost_cap_reached", cap_sentence(verdict))]


def cap_sentence(verdict: CapReached) -> str:
    """Say which cap something would pass, and how much of it is left."""
    where = f"{verdict.leg.scope} {verdict.leg.window}".strip()
    left = max(0, verdict.cap - verdict.budget.spent)
    if verdict.leg.unit == "tokens":
        return f"It may use {verdict.leg.amount:,} tokens, and {left:,} are left of the token budget of {where}."
    return f"It may cost {shown(verdict.leg.amount)}, and {shown(left)} is left of the cap of {where}."


def _question(asked: Asked, need: Approval, now: int) -> DecisionAsked:
    return DecisionAsked(
        decision=need.decision,
        about="approval",
        subject=asked.call,
        name=asked.tool,
        digest=need.digest,
        expires_at=now + need.expires_in,
        level=asked.level,
        risk=asked.risk,
        reasons=need.reasons,
        same=need.same,
        keys=need.keys,
    )


def _expired(asked: Asked, decision: str) -> Draft:
    return _refusal(asked, "approval_expired", "Nobody answered in time, so it was not done.", decision)


def _refusal(asked: Asked, outcome: Outcome, sentence: str, decision: str = "", by: str = "") -> Draft:
    event = CallRefused(
        call=asked.call,
        tool=asked.tool,
        outcome=outcome,
        sentence=sentence,
        level=asked.level,
        risk=asked.risk,
        decision=decision,
        decided_by=by,
        phase=asked.phase,
    )
    return asked.draft(event)


def _intent(asked: Asked, answer: tuple[str, str], verdict: Reserved, waived: Sequence[Outcome]) -> AnyEvent:
    decision, decided_by = answer
    return CallStarted(
        call=asked.call,
        tool=asked.tool,
        purpose=asked.purpose,
        legs=verdict.legs,
        level=asked.level,
        effect=asked.effect,
        idempotent=asked.idempotent,
        egress=asked.egress,
        risk=asked.risk,
        digest=asked.approval.digest if asked.approval else "",
        decision=decision,
        decided_by=decided_by,
        rated=asked.rate.slice_at(asked.now) if asked.rate else 0,
        audit=asked.audit,
        parallel_group=asked.parallel_group,
        phase=asked.phase,
        observed=tuple(waived),
        writes=asked.writes,
    )


def uncapped(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """Lift the caps of the configuration, for those that are only observed; a person's word stands."""
    return tuple(msgspec.structs.replace(leg, cap=None) for leg in legs)
