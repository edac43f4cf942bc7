"""The approval check: whether a person, or a standing rule of theirs, has approved exactly this call."""

from hashlib import sha256

from halter.core.ids import are_one_person, can_decide
from halter.core.ports import Rows
from halter.core.rows import DecisionRow, RuleRow
from halter.guard.call_request import CallRequest, RequiredApproval
from halter.guard.verdict import NOT_NEEDED, WAIT, Ask, Deny, GivenApproval, Wait


def check_approval(request: CallRequest, approval: RequiredApproval, rows: Rows) -> GivenApproval | Ask | Deny | Wait:
    """Check the approval that a call needs. A call that no person was asked about yet gets a question."""
    if request.observe:
        return NOT_NEEDED
    row = rows.get(DecisionRow, approval.decision)
    rule = rows.get(RuleRow, approval.rule) if approval.rule else None
    if rule is not None and rule.live(rows.now) and can_decide(rule.by) and not (row and row.verdict):
        return GivenApproval(decided_by=f"{rule.by}, always, by rule {rule.rule}")
    if row is None or not row.asked_at:
        return Ask(approval)
    if row.used_at is not None:
        return Deny("approval_denied", f"Approval {row.decision} was already used; an approval is valid for one call.")
    if not row.verdict and rows.now < row.expires_at:
        return WAIT
    if not row.verdict or row.decided_at is None or max(row.decided_at, rows.now) >= row.expires_at:
        return Deny("approval_expired", "The decision expired without an answer; the call was not made.", row.decision)
    refusal = _find_invalid_answer(approval, row)
    if refusal:
        return Deny("approval_denied", refusal, row.decision, row.by)
    return GivenApproval(row.decision, row.people)


def _find_invalid_answer(approval: RequiredApproval, row: DecisionRow) -> str:
    """Find why an answer does not approve the call; empty if it does."""
    if not can_decide(row.by):
        return f"{row.by or 'The caller'} is not a person: only a person can decide this."
    if row.verdict == "deny":
        return f"{row.by} denied this call."
    decided_digest = row.digest
    if row.verdict == "edit" or approval.edited_digest:
        decided_digest = digest_edit(row.digest, approval.edited_digest)
    if approval.digest != row.digest or row.decided_digest != decided_digest:
        return "Approval no longer valid: the arguments or the policy changed."
    if approval.approvers > 1 and not (row.verdict == "approve" and are_two_people(row.first_by, row.by)):
        return f"This call needs two approvers; only {row.by} approved it."
    return ""


def are_two_people(first: str, second: str) -> bool:
    return can_decide(first) and can_decide(second) and not are_one_person(first, second)


def digest_edit(question_digest: str, arguments_digest: str) -> str:
    """Make the digest that binds edited arguments to their question."""
    return sha256(f"halter edit 1 {question_digest} {arguments_digest}".encode()).hexdigest()
