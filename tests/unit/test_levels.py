"""The table of levels, cell by cell."""

from itertools import product
from typing import Any

import pytest

from halter.core.clock import DAY, HOUR
from halter.core.money import Caps
from halter.core.tools import LEVELS, Level, ToolSpec
from halter.core.vocabulary import RiskLevel
from halter.policy import levels
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.levels import (
    AttemptRate,
    audit_of_policy,
    find_attempt_rate,
    find_declared_level,
    find_tool_policy,
    needs_risk_assessment,
    needs_simulation,
)
from halter.spec.agent import ToolsSpec
from halter.spec.policy import MODES, SIMULATE_MODES, Approval, LevelRule, Mode, Policy, Simulate, ToolRule

RISKS: tuple[RiskLevel | None, ...] = (None, "LOW", "MEDIUM", "HIGH", "CRITICAL")
ASKS: dict[Level, str] = {
    "SAFE": "---",
    "MONITORED": "---",
    "CONTROLLED": "y--",
    "RESTRICTED": "yy-",
    "PRIVILEGED": "yyy",
}


def policy(mode: Mode = "SEMI", fleet: Policy | None = None, agent: Policy | None = None) -> ResolvedPolicy:
    return ResolvedPolicy(
        name="ann",
        mode=mode,
        observe=False,
        caps=Caps(),
        on_cap="wrap_up",
        max_steps=50,
        timeout=0,
        min_output_tokens=256,
        reserve_tokens=512,
        reserve_cost_fraction=0.1,
        policies=(fleet or Policy(), agent or Policy()),
        disabled=(),
        approval_expiry=DAY,
        tools=ToolsSpec(),
        phases=(),
        allowed_models=None,
        allowed_hosts=None,
        secrets=(),
        prices={},
    )


def spec(level: Level = "CONTROLLED", **more: Any) -> ToolSpec:
    return ToolSpec(name="act", description="Acts.", schema=b"{}", level=level, **more)


def overrides(level: Level, approval: Approval | None) -> list[Policy]:
    if approval is None:
        return [Policy()]
    return [
        Policy(levels={level: LevelRule(approval=approval)}),
        Policy(tools={"act": ToolRule(approval=approval)}),
    ]


def needs_approval(policy: ResolvedPolicy, spec: ToolSpec, risk: RiskLevel | None) -> bool:
    return levels.needs_approval(find_tool_policy(policy, spec), policy.mode, risk)


CELLS = list(product(LEVELS, MODES, (None, "always", "never"), RISKS))


@pytest.mark.parametrize(("level", "mode", "approval", "risk"), CELLS)
def test_who_is_asked_follows_level_mode_override_and_risk(
    level: Level, mode: Mode, approval: Approval | None, risk: RiskLevel | None
) -> None:
    usual = ASKS[level][MODES.index(mode)] == "y"
    expected = risk == "CRITICAL" or {None: usual, "always": True, "never": False}[approval]
    for fleet in overrides(level, approval):
        assert needs_approval(policy(mode, fleet), spec(level), risk) is expected


@pytest.mark.parametrize("level", LEVELS)
def test_an_agent_cannot_switch_the_question_off_for_itself(level: Level) -> None:
    for agent in overrides(level, "never"):
        for mode in MODES:
            assert needs_approval(policy(mode, agent=agent), spec(level), "LOW") is (
                ASKS[level][MODES.index(mode)] == "y"
            )


def test_the_tool_s_own_rule_is_nearer_than_its_level_s() -> None:
    fleet = Policy(levels={"SAFE": LevelRule(approval="always")}, tools={"act": ToolRule(approval="never")})
    assert not needs_approval(policy("ASSIST", fleet), spec("SAFE"), "HIGH")


@pytest.mark.parametrize(
    ("level", "audit", "rate", "assessed"),
    [
        ("SAFE", "", None, False),
        ("MONITORED", "arguments", None, False),
        ("CONTROLLED", "full", None, False),
        ("RESTRICTED", "full", None, True),
        ("PRIVILEGED", "full", AttemptRate(20, HOUR), True),
    ],
)
def test_the_other_cells_of_the_table(level: Level, audit: str, rate: AttemptRate | None, *, assessed: bool) -> None:
    rule = find_tool_policy(policy(), spec(level))
    assert audit_of_policy(rule) == audit
    assert find_attempt_rate(rule) == rate
    assert needs_risk_assessment(rule) is assessed


@pytest.mark.parametrize(("level", "simulate"), list(product(LEVELS, (None, *SIMULATE_MODES))))
def test_simulation_happens_only_where_it_is_written(level: Level, simulate: Simulate | None) -> None:
    fleet = Policy() if simulate is None else Policy(tools={"act": ToolRule(simulate=simulate)})
    meant = simulate or "never"
    rule = find_tool_policy(policy(fleet=fleet), spec(level))
    assert needs_simulation(rule, is_approval_needed=True) is (meant != "never")
    assert needs_simulation(rule, is_approval_needed=False) is (meant == "always")


@pytest.mark.parametrize(("level", "simulate"), list(product(LEVELS, SIMULATE_MODES)))
def test_one_key_switches_simulation_on_for_the_dangerous_levels(level: Level, simulate: Simulate) -> None:
    meant = simulate if level in {"RESTRICTED", "PRIVILEGED"} else "never"
    for where in (policy(fleet=Policy(simulate=simulate)), policy(agent=Policy(simulate=simulate))):
        assert find_tool_policy(where, spec(level)).simulate == meant


@pytest.mark.parametrize("level", LEVELS)
def test_a_rate_can_be_set_for_a_tool_or_a_level(level: Level) -> None:
    assert find_attempt_rate(
        find_tool_policy(policy(fleet=Policy(tools={"act": ToolRule(rate=3)})), spec(level))
    ) == AttemptRate(3, HOUR)
    assert find_attempt_rate(
        find_tool_policy(policy(fleet=Policy(levels={level: LevelRule(rate=4)})), spec(level))
    ) == AttemptRate(4, HOUR)


@pytest.mark.parametrize(("written", "own"), list(product(LEVELS, LEVELS)))
def test_the_fleet_can_say_of_what_level_a_tool_is(written: Level, own: Level) -> None:
    placed = policy("SEMI", Policy(tools={"act": ToolRule(level=written)}))
    assert needs_approval(placed, spec(own), None) is (ASKS[written][1] == "y")
    assert needs_risk_assessment(find_tool_policy(placed, spec(own))) is (written in {"RESTRICTED", "PRIVILEGED"})


def test_a_tool_that_says_nothing_is_controlled() -> None:
    assert find_declared_level(ToolSpec(name="act", description="", schema=b"{}")) == "CONTROLLED"


@pytest.mark.parametrize(
    ("level", "effect", "is_level"),
    [
        ("CONTROLLED", "write", "RESTRICTED"),
        ("PRIVILEGED", "write", "PRIVILEGED"),
        ("CONTROLLED", "read", "CONTROLLED"),
    ],
)
def test_a_tool_of_a_server_that_does_not_say_it_only_reads_is_restricted(
    level: Level, effect: Any, is_level: Level
) -> None:
    assert find_declared_level(spec(level, effect=effect, server="far")) == is_level
