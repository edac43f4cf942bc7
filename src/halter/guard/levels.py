"""What a level means: the table of levels as data, and the questions that are asked of it.

The cells that people may set (approval, rate, simulation, the level itself) are put together by the resolved policy;
here they meet the mode, and the risk of one call.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.clock import HOUR
from halter.core.spec import Mode, Resolved, Rule
from halter.core.tools import LEVELS, Level, ToolSpec
from halter.core.vocabulary import Audit, RiskLevel
from halter.guard.judge import Rate


class Row(msgspec.Struct, frozen=True):
    """One row of the table: what holds for a level where nobody said otherwise."""

    audit: Audit
    assessed: bool
    asks: frozenset[Mode]


TABLE: Final[Mapping[Level, Row]] = MappingProxyType(
    {
        "SAFE": Row("", assessed=False, asks=frozenset()),
        "MONITORED": Row("arguments", assessed=False, asks=frozenset()),
        "CONTROLLED": Row("full", assessed=False, asks=frozenset({"ASSIST"})),
        "RESTRICTED": Row("full", assessed=True, asks=frozenset({"ASSIST", "SEMI"})),
        "PRIVILEGED": Row("full", assessed=True, asks=frozenset({"ASSIST", "SEMI", "FULL"})),
    }
)


def declared(spec: ToolSpec) -> Level:
    """Tell the level that a tool has by itself: one of an MCP server that does not say it only reads is RESTRICTED."""
    if not spec.server or spec.effect == "read":
        return spec.level
    return LEVELS[max(LEVELS.index(spec.level), LEVELS.index("RESTRICTED"))]


def rule_of(policy: Resolved, spec: ToolSpec) -> Rule:
    """Tell what holds for a tool under a policy."""
    return policy.rule(spec.name, declared(spec))


def needs_approval(rule: Rule, mode: Mode, risk: RiskLevel | None) -> bool:
    """Tell whether a person has to agree. At CRITICAL risk always, whatever anybody wrote."""
    if risk == "CRITICAL" or rule.approval == "always":
        return True
    return rule.approval is None and mode in TABLE[rule.level].asks


def audited(rule: Rule) -> Audit:
    """Tell how much of a call that runs the audit shows; a refused one is always shown."""
    return TABLE[rule.level].audit


def rate_of(rule: Rule) -> Rate | None:
    """Tell how often a tool may be tried by one agent."""
    return None if rule.rate is None else Rate(rule.rate, HOUR)


def simulated(rule: Rule, *, asked: bool) -> bool:
    """Tell whether a model predicts the outcome first, given whether a person is asked."""
    return rule.simulate == "always" or (rule.simulate == "asked" and asked)


def risk_assessed(rule: Rule) -> bool:
    """Tell whether the arguments of a tool are looked at for their risk."""
    return TABLE[rule.level].assessed
