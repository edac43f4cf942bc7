"""What applies where no policy sets a key."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import UNSET, structs

from halter.core.clock import HOUR
from halter.core.money import DOLLAR
from halter.core.tools import LEVELS, Level
from halter.spec.fleet import FleetSpec
from halter.spec.limits import AgentBounds, FleetLimits, Limits
from halter.spec.models import BrainSpec
from halter.spec.policy import LevelRule, Policy

SESSION_CAP: Final = 1 * DOLLAR
AGENT_DAY_CAP: Final = 5 * DOLLAR
FLEET_DAY_CAP: Final = 20 * DOLLAR
MAX_STEPS: Final = 50
TIMEOUT: Final = 1 * HOUR
MIN_OUTPUT_TOKENS: Final = 256
RESERVE_TOKENS: Final = 512
RESERVE_COST_FRACTION: Final = 0.1
APPROVAL_EXPIRY: Final = 24 * HOUR

DEFAULT_RATES: Final[Mapping[Level, int]] = MappingProxyType({"PRIVILEGED": 20})
"""Attempts per hour if no rate is set; the other levels have no default."""
SIMULATED_LEVELS: Final[tuple[Level, ...]] = ("RESTRICTED", "PRIVILEGED")
"""The levels to which `policy.simulate` applies; without that key, no call is predicted."""

DEFAULT_LIMITS: Final = Limits(
    max_cost_usd=SESSION_CAP,
    max_cost_usd_per_day=AGENT_DAY_CAP,
    max_steps=MAX_STEPS,
    timeout=TIMEOUT,
    max_output_tokens=BrainSpec().max_output_tokens,
    max_retries=BrainSpec().max_retries,
)
"""The limits of an agent if no file sets any."""

DEFAULT_FLEET: Final = FleetSpec(
    limits=FleetLimits(max_cost_usd_per_day=FLEET_DAY_CAP, max_cost_usd_per_month=None),
    agents=AgentBounds(limits=DEFAULT_LIMITS),
    policy=Policy(approval_expiry=APPROVAL_EXPIRY),
    retention=None,
)
"""A fleet whose file sets nothing."""


def default_level_rule(level: Level, policy: Policy) -> LevelRule:
    """Return the rule for a level for which a policy has none."""
    simulate = policy.simulate if policy.simulate is not UNSET and level in SIMULATED_LEVELS else "never"
    return LevelRule(rate=DEFAULT_RATES.get(level), simulate=simulate, approvers=1)


def default_levels(policy: Policy) -> Policy:
    """Return a policy with the rules for all levels that apply where the given one has none."""
    return Policy(levels={level: default_level_rule(level, policy) for level in LEVELS})


def default_fleet(stored: FleetSpec) -> FleetSpec:
    """Return what applies where a fleet sets nothing, beside the keys that it does set."""
    policy = structs.replace(DEFAULT_FLEET.policy, levels=default_levels(stored.policy).levels)
    return structs.replace(DEFAULT_FLEET, policy=policy)
