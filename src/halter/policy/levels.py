"""What a tool's level demands of a call, and how often it may be tried.

`LEVEL_TABLE` has the defaults of each capability level; the resolved policy overrides its cells.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.clock import HOUR
from halter.core.tools import Level, ToolSpec
from halter.core.vocabulary import Audit, RiskLevel
from halter.policy.evaluation import ResolvedPolicy, ToolPolicy
from halter.policy.order import find_strictest
from halter.spec.policy import Mode, ToolRule

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
