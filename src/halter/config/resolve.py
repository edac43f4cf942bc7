"""What the fleet's and the agent's file come to together. An agent can only tighten what the fleet says.

Where only one file sets a cap, its word counts; where neither does, the default: so an agent may set a cap that is
higher than the default, but never one that is higher than the fleet's. The mode, and what needs a person, are the
fleet's also where the fleet's file is silent: its silence means SEMI, and the usual table.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import UNSET, UnsetType

from halter.config.agent import Agent
from halter.config.both import Both, either, hourly
from halter.config.fleet import Fleet
from halter.config.load import KeyPath
from halter.config.shape import dotted
from halter.core.bounds import Limits
from halter.core.limits import Cap, Caps
from halter.core.money import DOLLAR
from halter.core.spec import FleetSpec, Phase, Resolved, Walk
from halter.core.tasks import VERBS
from halter.core.text import nearest
from halter.core.tools import ToolSpec
from halter.core.usage import FREE, Price

SESSION_CAP: Final = 1 * DOLLAR
AGENT_DAY_CAP: Final = 5 * DOLLAR
FLEET_DAY_CAP: Final = 20 * DOLLAR
MAX_STEPS: Final = 50
TIMEOUT: Final = 3_600_000_000
MIN_OUTPUT_TOKENS: Final = 256
RESERVE_TOKENS: Final = 512
RESERVE_COST_FRACTION: Final = 0.1

WORK: Final = (Phase("work", None),)
REVIEW: Final = (
    Phase("intake", ("retrieve_chunks",)),
    Phase("analysis", ("retrieve_chunks", "run_skill", "run_playbook", "propose_precedent")),
    Phase("drafting", ("run_skill", "emit_finding", "propose_memory", "propose_precedent")),
    Phase("ethics_review", ("emit_finding",)),
    Phase("delivery", ("notify",)),
)
"""The walk that is written `phases: review`."""


def resolve(fleet: Fleet, agent: Agent) -> Resolved:
    """Put both files together, or say in a ConfigError what the agent would loosen."""
    both = Both(fleet, agent)
    ours, theirs = fleet.spec, agent.spec
    limits = both.limits()
    return Resolved(
        name=theirs.name,
        mode=both.mode(),
        observe=both.observe(),
        caps=_caps(limits, ours),
        on_cap=either(limits.on_cap, "wrap_up"),
        max_steps=either(limits.max_steps, MAX_STEPS),
        timeout=either(limits.timeout, TIMEOUT),
        min_output_tokens=either(limits.min_output_tokens, MIN_OUTPUT_TOKENS),
        reserve_tokens=either(limits.reserve_tokens, RESERVE_TOKENS),
        reserve_cost_fraction=either(limits.reserve_cost_fraction, RESERVE_COST_FRACTION),
        policies=both.policies(),
        disabled=tuple(sorted({*ours.policy.disabled, *theirs.policy.disabled})),
        approval_expiry=both.expiry(),
        tools=both.tools(),
        phases=walk(theirs.phases),
        allowed_models=both.models(),
        allowed_hosts=both.hosts(),
        secrets=both.within("allowed_secrets", theirs.secrets, ours.allowed_secrets, ("secrets",)) or (),
        prices={model: _price(spec.price) for model, spec in ours.models.items()},
    )


def against_tools(resolved: Resolved, agent: Agent, tools: Iterable[ToolSpec]) -> None:
    """Check what an agent's file says of tools against the tools that there are, once they are known.

    Raises a ConfigError for a name that no tool has, and for a rule that would loosen what holds for the tool.
    """
    known = {tool.name: tool for tool in tools}
    for path, name in _named_tools(agent):
        if name not in known:
            raise agent.places.wrong(path, f"there is no tool `{name}`; {nearest(name, sorted(known), 'the tools')}")
    for name, asked in agent.spec.policy.tools.items():
        holds = resolved.rule(name, known[name].level)
        for key, kept, show in (
            ("level", asked.level in (UNSET, holds.level), str),
            ("rate", asked.rate in (UNSET, holds.rate), hourly),
            ("simulate", asked.simulate in (UNSET, holds.simulate), str),
        ):
            if not kept:
                path = ("policy", "tools", name, key)
                words = f"{show(getattr(asked, key))}, but {show(getattr(holds, key))} holds for this tool"
                raise agent.places.wrong(path, f"`{dotted(path)}` is {words}; an agent can only tighten it.")


def unknown_to_all(fleet: Fleet, tools: Iterable[str]) -> tuple[str, ...]:
    """Say which rules of the fleet are for tools that no agent has: perhaps a slip of the pen that protects nothing."""
    known = sorted({*tools})
    policy = fleet.spec.policy
    named: list[tuple[KeyPath, str]] = [(("policy", "tools", name), name) for name in policy.tools]
    named += [(("policy", "disabled", index), name) for index, name in enumerate(policy.disabled)]
    return tuple(
        f"{fleet.places.at(path)}: no agent has a tool `{name}`; {nearest(name, known, 'the tools')}"
        for path, name in named
        if name not in known
    )


def _named_tools(agent: Agent) -> list[tuple[KeyPath, str]]:
    spec = agent.spec
    named: list[tuple[KeyPath, str]] = [(("policy", "tools", name), name) for name in spec.policy.tools]
    named += [(("policy", "disabled", index), name) for index, name in enumerate(spec.policy.disabled)]
    named += [(("tools", "own", index), name) for index, name in enumerate(either(spec.tools.own, ()))]
    if not isinstance(spec.phases, str):
        for phase in walk(spec.phases):
            named += [(("phases", phase.name, index), name) for index, name in enumerate(phase.grants or ())]
    return [(path, name) for path, name in named if path[0] != "phases" or name not in VERBS]


def _caps(limits: Limits, fleet: FleetSpec) -> Caps:
    hourly, monthly = limits.max_cost_usd_per_hour, fleet.limits.max_cost_usd_per_month
    return Caps(
        session=Cap(either(limits.max_cost_usd, SESSION_CAP)),
        agent=(
            Cap(either(limits.max_cost_usd_per_day, AGENT_DAY_CAP), "day"),
            *(() if hourly is UNSET else (Cap(hourly, "hour"),)),
        ),
        fleet=(
            Cap(either(fleet.limits.max_cost_usd_per_day, FLEET_DAY_CAP), "day"),
            *(() if monthly is UNSET else (Cap(monthly, "month"),)),
        ),
        token_budget=either(limits.token_budget, 0) or None,
        zone=fleet.zone,
    )


def walk(phases: "Walk | UnsetType") -> tuple[Phase, ...]:
    """Tell the phases that an agent's file asks for."""
    if phases == "review":
        return REVIEW
    if phases is UNSET or isinstance(phases, str):
        return WORK
    return tuple(Phase(name, None if isinstance(grants, str) else grants) for name, grants in phases.items())


def _price(price: "Price | str") -> Price:
    return FREE if isinstance(price, str) else price
