"""The events of decisions: what people are asked, their answers, and the rules that answer for them."""

from halter.core.provenance import Flaw
from halter.core.tools import Level
from halter.core.vocabulary import DecisionKind, Event, RiskLevel, RowEvent, RuleScope, Verdict


class DecisionAsked(Event, frozen=True, kw_only=True):
    """A decision is pending; the body is the text shown to people.

    `digest` binds the answer to the tool, the arguments, the session and the policy. A rule
    that approves exactly this call must match `same` and `keys`. `agent` is set only if no session asks. `mode` is set
    if the level of the call asks in it, `always` if the tool's rule asks about every call. `shown_at` is set if people
    see it only then, after their quiet hours.
    """

    KIND = "decision_asked"

    decision: str
    about: DecisionKind
    subject: str
    name: str
    digest: str
    expires_at: int
    level: Level | None = None
    risk: RiskLevel | None = None
    reasons: tuple[str, ...] = ()
    same: str = ""
    keys: tuple[str, ...] = ()
    agent: str = ""
    flaws: tuple[Flaw, ...] = ()
    approvers: int = 1
    mode: str = ""
    always: bool = False
    shown_at: int = 0


class ApprovalGiven(RowEvent, frozen=True, kw_only=True):
    """The first of two required approvers approved. The decision is pending until the second one does."""

    KIND = "approval_given"
    IMMEDIATE = True

    decision: str
    by: str
    digest: str
    reason: str = ""


class DecisionMade(RowEvent, frozen=True, kw_only=True):
    """A person decided; the body of an edit is the new arguments.

    `first_by` is the first approver, if two were required.
    """

    KIND = "decision_made"
    IMMEDIATE = True

    decision: str
    verdict: Verdict
    by: str
    digest: str
    reason: str = ""
    first_by: str = ""

    @property
    def people(self) -> str:
        return f"{self.first_by} and {self.by}" if self.first_by else self.by


class DecisionWithdrawn(RowEvent, frozen=True, kw_only=True):
    """A decision was withdrawn: its subject is gone, or its session ended or continued without the answer."""

    KIND = "decision_withdrawn"

    decision: str
    why: str


class RuleMade(RowEvent, frozen=True, kw_only=True):
    """A person created a rule: matching calls of a tool are approved in its scope until the rule expires.

    `matcher` is JSON for the guard; `keys` are all arguments that a matching call may have.
    """

    KIND = "rule_made"
    IMMEDIATE = True

    rule: str
    tool: str
    scope: RuleScope
    owner: str
    matcher: str
    keys: tuple[str, ...]
    by: str
    expires_at: int


class RuleEnded(RowEvent, frozen=True, kw_only=True):
    """A person ended a rule."""

    KIND = "rule_ended"
    IMMEDIATE = True

    rule: str
    by: str
    reason: str = ""


class ToolPinned(RowEvent, frozen=True, kw_only=True):
    """A tool of a server was pinned to its current digest. If the tool changes, a person must approve it again."""

    KIND = "tool_pinned"

    agent: str
    tool: str
    digest: str
    by: str
