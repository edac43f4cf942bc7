"""The judge's input about a call: what is known before any row is locked, and which rows the decision needs."""

from itertools import product

import msgspec

from halter.core.clock import QUARTER
from halter.core.ids import Digest
from halter.core.money import Leg, roll_legs
from halter.core.project.holds import rows_of_hold
from halter.core.provenance import Flaw
from halter.core.rows import AuditRow, DecisionRow, HoldRow, OutputRow, RateRow, RuleRow
from halter.core.tools import Effect, Level
from halter.core.vocabulary import ActionLimit, Audit, Outcome, Purpose, RiskLevel, RowKey
from halter.guard.budget import NO_RESERVE, Reserve
from halter.guard.halts import HaltKeys
from halter.policy.evaluation import QuestionTerms
from halter.policy.levels import AttemptRate


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

    def at(self, now: int) -> "CallRequest":
        """Return the request at a later time, with the rate slices and windows of that time."""
        if now // QUARTER == self.now // QUARTER:
            return self if self.rate is None else msgspec.structs.replace(self, now=now)
        return msgspec.structs.replace(
            self, now=now, legs=roll_legs(self.legs, now), accounts=roll_legs(self.accounts, now)
        )


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
