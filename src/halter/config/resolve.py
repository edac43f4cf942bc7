"""What the fleet's and the agent's file come to together. An agent can only tighten what the fleet says.

Where only one file sets a cap, its word counts; where neither does, the default: so an agent may set a cap that is
higher than the default, but never one that is higher than the fleet's. The mode, and what needs a person, are the
fleet's also where the fleet's file is silent: its silence means SEMI, and the usual table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import UNSET, UnsetType

from halter.config.agent import Agent
from halter.config.fleet import Fleet
from halter.config.load import KeyPath
from halter.config.shape import dotted, nearest
from halter.core.durations import shown_duration
from halter.core.errors import ConfigError
from halter.core.limits import Cap, Caps
from halter.core.money import DOLLAR, shown
from halter.core.spec import (
    APPROVAL_EXPIRY,
    MODES,
    RATES,
    SIMULATED,
    SIMULATES,
    FleetSpec,
    LevelRule,
    Limits,
    Phase,
    Policy,
    Resolved,
    ToolRule,
    ToolsSpec,
    covered,
)
from halter.core.text import listed
from halter.core.tools import LEVELS, Level, ToolSpec
from halter.core.usage import FREE, Price

T = TypeVar("T")

SESSION_CAP: Final = 1 * DOLLAR
AGENT_DAY_CAP: Final = 5 * DOLLAR
FLEET_DAY_CAP: Final = 20 * DOLLAR
MAX_STEPS: Final = 50
TIMEOUT: Final = 3_600_000_000
MIN_OUTPUT_TOKENS: Final = 256
RESERVE_TOKENS: Final = 512
RESERVE_COST_FRACTION: Final = 0.1

Show = Callable[[Any], str]


def resolve(fleet: Fleet, agent: Agent) -> Resolved:
    """Put both files together, or say in a ConfigError what the agent would loosen."""
    both = _Both(fleet, agent)
    ours, theirs = fleet.spec, agent.spec
    limits = both.limits()
    return Resolved(
        name=theirs.name,
        mode=both.mode(),
        observe=both.observe(),
        caps=_caps(limits, ours),
        on_cap=_either(limits.on_cap, "wrap_up"),
        max_steps=_either(limits.max_steps, MAX_STEPS),
        timeout=_either(limits.timeout, TIMEOUT),
        min_output_tokens=_either(limits.min_output_tokens, MIN_OUTPUT_TOKENS),
        reserve_tokens=_either(limits.reserve_tokens, RESERVE_TOKENS),
        reserve_cost_fraction=_either(limits.reserve_cost_fraction, RESERVE_COST_FRACTION),
        policies=both.policies(),
        disabled=tuple(sorted({*ours.policy.disabled, *theirs.policy.disabled})),
        approval_expiry=both.expiry(),
        tools=both.tools(),
        phases=_phases(theirs.phases),
        allowed_models=both.within("allowed_models", theirs.allowed_models, ours.allowed_models, ("allowed_models",)),
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
            ("rate", asked.rate in (UNSET, holds.rate), _hourly),
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
    named += [(("tools", "own", index), name) for index, name in enumerate(_either(spec.tools.own, ()))]
    for phase in _phases(spec.phases):
        named += [(("phases", phase.name, index), name) for index, name in enumerate(phase.grants or ())]
    return named


def _either(word: T | UnsetType, otherwise: T) -> T:
    return otherwise if word is UNSET else word


def _caps(limits: Limits, fleet: FleetSpec) -> Caps:
    hourly, monthly = limits.max_cost_usd_per_hour, fleet.limits.max_cost_usd_per_month
    return Caps(
        session=Cap(_either(limits.max_cost_usd, SESSION_CAP)),
        agent=(
            Cap(_either(limits.max_cost_usd_per_day, AGENT_DAY_CAP), "day"),
            *(() if hourly is UNSET else (Cap(hourly, "hour"),)),
        ),
        fleet=(
            Cap(_either(fleet.limits.max_cost_usd_per_day, FLEET_DAY_CAP), "day"),
            *(() if monthly is UNSET else (Cap(monthly, "month"),)),
        ),
        token_budget=_either(limits.token_budget, 0) or None,
        zone=fleet.zone,
    )


def _phases(phases: "Mapping[str, tuple[str, ...] | str] | UnsetType") -> tuple[Phase, ...]:
    if phases is UNSET:
        return (Phase("work", None),)
    return tuple(Phase(name, None if isinstance(grants, str) else grants) for name, grants in phases.items())


def _price(price: "Price | str") -> Price:
    return FREE if isinstance(price, str) else price


def _money(cap: int | None) -> str:
    return "none" if cap is None else shown(cap)


def _hourly(rate: int | None) -> str:
    return "none" if rate is None else f"{rate}/hour"


def _counted(number: int) -> str:
    return str(number) if number else "0 (none)"


def _lasting(micros: int) -> str:
    return shown_duration(micros) if micros else "0 (none)"


class _Both:
    """Compares the two files, and knows where in them things stand."""

    def __init__(self, fleet: Fleet, agent: Agent) -> None:
        self._fleet = fleet
        self._agent = agent

    def _looser(self, path: KeyPath, written: str, bound: KeyPath, allowed: str) -> ConfigError:
        """Say that an agent asks for more than the fleet gives, and what either side may write."""
        where = self._fleet.places.at(bound)
        said = "" if bound in self._fleet.places.lines else ", which is the default"
        return self._agent.places.wrong(
            path,
            f"`{dotted(path)}` is {written}, but {where} allows only {allowed} (`{dotted(bound)}`{said}). "
            f"An agent can only tighten the fleet: tighten it here, or loosen it in {self._fleet.places.file}.",
        )

    def _spelled(self, path: KeyPath) -> KeyPath:
        """Find the name under which the agent's file has a limit."""
        other = next((name for name, own in Limits.ALSO.items() if own == path[-1]), None)
        spelled = (*path[:-1], other) if other else path
        return spelled if spelled in self._agent.places.lines else path

    def limits(self) -> Limits:
        """Put the limits together: of each the lower; of a choice, the agent's."""
        ours, theirs = self._fleet.spec.agents.limits, self._agent.spec.limits
        most: dict[str, tuple[Show, Any]] = {
            "max_cost_usd": (_money, None),
            "max_cost_usd_per_hour": (_money, None),
            "max_cost_usd_per_day": (_money, None),
            "token_budget": (_counted, 0),
            "max_steps": (_counted, None),
            "timeout": (_lasting, 0),
        }
        lower = {key: self._lower(key, ours, theirs, show, endless) for key, (show, endless) in most.items()}
        chosen = ("on_cap", "min_output_tokens", "reserve_tokens", "reserve_cost_fraction")
        return Limits(**lower, **{key: _either(getattr(theirs, key), getattr(ours, key)) for key in chosen})

    def _lower(self, key: str, ours: Limits, theirs: Limits, show: Show, endless: Any) -> Any:
        bound, asked = getattr(ours, key), getattr(theirs, key)
        if bound is UNSET or asked is UNSET:
            return _either(asked, bound)
        if bound != endless and (asked == endless or asked > bound):
            path = self._spelled(("limits", key))
            raise self._looser(path, show(asked), ("agents", "limits", key), show(bound))
        return asked

    def mode(self) -> Any:
        """Take the stricter mode."""
        bound, asked = self._fleet.spec.mode, self._agent.spec.mode
        if asked is UNSET:
            return bound
        if MODES.index(asked) > MODES.index(bound):
            raise self._looser(("mode",), asked, ("mode",), bound)
        return asked

    def observe(self) -> bool:
        """Let pass only where the fleet does."""
        bound, asked = self._fleet.spec.observe, self._agent.spec.observe
        if asked is True and not bound:
            raise self._looser(("observe",), "true", ("observe",), "false")
        return _either(asked, bound)

    def expiry(self) -> int:
        """Take the shorter time to decide."""
        bound, asked = self._fleet.spec.policy.approval_expiry, self._agent.spec.policy.approval_expiry
        path = ("policy", "approval_expiry")
        if asked is not UNSET and bound is not UNSET and asked > bound:
            raise self._looser(path, shown_duration(asked), path, shown_duration(bound))
        return _either(_either(asked, bound), APPROVAL_EXPIRY)

    def tools(self) -> ToolsSpec:
        """Check that the agent's shell is no freer than the fleet's."""
        tools, bounds = self._agent.spec.tools, self._fleet.spec.shell
        if tools.shell is UNSET:
            return tools
        if bounds.sandbox and not tools.shell.sandbox:
            raise self._looser(("tools", "shell", "sandbox"), "false", ("shell", "sandbox"), "true")
        if tools.shell.network and not bounds.network:
            raise self._looser(("tools", "shell", "network"), "true", ("shell", "network"), "false")
        return tools

    def hosts(self) -> tuple[str, ...] | None:
        """Take the hosts of the agent's own list, all of which the fleet must allow."""
        http = self._agent.spec.tools.http
        asked = UNSET if http is UNSET else http.hosts
        hosts = self.within("allowed_hosts", asked, self._fleet.spec.allowed_hosts, ("tools", "http", "hosts"))
        if http is not UNSET and not hosts:
            sentence = "`tools.http` has no hosts; name those that may be reached, as in hosts: [api.example.com]."
            raise self._agent.places.wrong(("tools", "http"), sentence)
        return hosts

    def within(
        self, key: str, asked: Sequence[str] | UnsetType, bound: Sequence[str] | UnsetType, path: KeyPath
    ) -> tuple[str, ...] | None:
        """Take the agent's list, of which the fleet must allow everything; without one, the fleet's."""
        if asked is UNSET:
            return None if bound is UNSET else tuple(bound)
        for index, name in enumerate(asked):
            if bound is not UNSET and not covered(name, bound):
                raise self._looser((*path, index), f"`{name}`", (key,), listed(bound) or "nothing")
        return tuple(asked)

    def policies(self) -> tuple[Policy, Policy]:
        """Check each rule of the agent against the fleet's rule in the same place."""
        ours, theirs = self._fleet.spec.policy, self._agent.spec.policy
        for level, rule in theirs.levels.items():
            usual = LevelRule(rate=RATES.get(level), simulate=SIMULATED.get(level, "never"))
            self._rule(rule, ours.levels.get(level, LevelRule()), usual, ("policy", "levels", level))
        for tool, rule in theirs.tools.items():
            bound = ours.tools.get(tool, ToolRule())
            self._rule(rule, bound, LevelRule(rate=None, simulate="never"), ("policy", "tools", tool))
            self._level(rule.level, bound.level, ("policy", "tools", tool, "level"))
        return ours, theirs

    def _rule(self, asked: LevelRule, bound: LevelRule, usual: LevelRule, path: KeyPath) -> None:
        """Compare two rules; `usual` is what holds where the fleet's says nothing, as far as that is known here."""
        if asked.approval == "never" and bound.approval != "never":
            allowed = "always" if bound.approval == "always" else "what the mode says"
            raise self._looser((*path, "approval"), "never", (*path, "approval"), allowed)
        rate = _either(bound.rate, usual.rate)
        if asked.rate is not UNSET and isinstance(rate, int) and (asked.rate is None or asked.rate > rate):
            raise self._looser((*path, "rate"), _hourly(asked.rate), (*path, "rate"), _hourly(rate))
        ours, theirs = _either(bound.simulate, usual.simulate), asked.simulate
        if ours is not UNSET and theirs is not UNSET and SIMULATES.index(theirs) < SIMULATES.index(ours):
            raise self._looser((*path, "simulate"), theirs, (*path, "simulate"), ours)

    def _level(self, asked: Level | UnsetType, bound: Level | UnsetType, path: KeyPath) -> None:
        if asked is UNSET or bound is UNSET or LEVELS.index(asked) >= LEVELS.index(bound):
            return
        raise self._looser(path, asked, path, f"{bound} or a more dangerous one")
