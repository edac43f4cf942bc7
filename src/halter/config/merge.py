"""The fleet's file (`halter.yaml`), and its merge with an agent's file, which can only tighten it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from halter.config.agent_files import AgentFile
from halter.config.decode import decode_document, format_key_path, make_mistake, value_or_default
from halter.config.sections import list_channel_mistakes
from halter.config.yaml_reader import Document, KeyPath, Mistake, SourceMap, load_file
from halter.core.clock import format_duration
from halter.core.errors import ConfigError
from halter.core.money import format_exact_micros
from halter.core.spec import (
    APPROVAL_EXPIRY,
    DEFAULT_RATES,
    MODES,
    PROVENANCE_MODES,
    SIMULATE_MODES,
    FleetSpec,
    LevelRule,
    Limits,
    Policy,
    ToolRule,
    ToolsSpec,
    is_covered,
)
from halter.core.text import join_names
from halter.core.tools import LEVELS, Level, ProviderTool
from halter.core.usage import is_encrypted_or_local

FLEET_FILE: Final = "halter.yaml"


class FleetConfig(msgspec.Struct, frozen=True):
    """The fleet's file and its lines. Without a file, every key has its default.

    `raw` is the file's content as written. Where a store's policy and a file apply together, the rules of the file are
    in `extra_policies` and never mixed with those of the store: a rule for a tool in one must not hide a stricter rule
    for its level in the other. `default_limits` apply to agents that
    set none, where these are lower than the cap.
    """

    spec: FleetSpec = FleetSpec()
    source_map: SourceMap = SourceMap(FLEET_FILE)
    raw: Mapping[str, Any] = {}
    extra_policies: tuple[Policy, ...] = ()
    default_limits: Limits = Limits()


def read_fleet(path: Path, display_name: str | None = None) -> FleetConfig:
    return parse_fleet(load_file(path, display_name))


def parse_fleet(document: Document) -> FleetConfig:
    spec = decode_document(document, FleetSpec)
    for model in spec.models:
        if model.endswith("*"):
            raise document.source_map.error_at(
                ("models", model), f"`{model}` is a pattern; name each model with its price."
            )
    for path, sentence in (*_rate_mistakes(spec), *_sign_on_mistakes(spec), *list_channel_mistakes(spec.notify)):
        raise document.source_map.error_at(path, sentence)
    return FleetConfig(spec, document.source_map, document.value)


def _rate_mistakes(spec: FleetSpec) -> Iterator[Mistake]:
    """List rates that limit nothing, or whose model is ambiguous."""
    for model, rate in spec.rates.items():
        path = ("rates", model)
        if "*" in model and not model.endswith(":*"):
            yield make_mistake(path, "is not a model; name one model, or all models of a provider, as in anthropic:*.")
        if rate.requests_per_minute is UNSET and rate.tokens_per_minute is UNSET:
            yield make_mistake(path, "limits nothing; write `requests_per_minute`, `tokens_per_minute` or both.")


def _sign_on_mistakes(spec: FleetSpec) -> Iterator[Mistake]:
    sign_on = spec.sign_on
    if sign_on is UNSET:
        return
    for key, is_missing in (("proxies", not sign_on.proxies and sign_on.oidc is UNSET), ("roles", not sign_on.roles)):
        if is_missing:
            yield make_mistake(
                ("sign_on", key), "is empty, so no one could sign on; add an entry, or remove `sign_on`."
            )
    if sign_on.proxies and sign_on.secret is UNSET:
        yield make_mistake(("sign_on", "proxies"), "requires `sign_on.secret` to authenticate the proxy; set it.")
    for group, agents in sign_on.agents.items():
        if group not in sign_on.roles or not agents:
            yield make_mistake(
                ("sign_on", "agents", group),
                "must name at least one agent, and the group must have a role in `roles`; fix the entry.",
            )
    for key in () if sign_on.oidc is UNSET else ("issuer", "url"):
        if not is_encrypted_or_local(getattr(sign_on.oidc, key)):
            yield make_mistake(("sign_on", "oidc", key), "is not encrypted; use a URL with https.")
    for index, proxy in enumerate(sign_on.proxies):
        try:
            ip_network(proxy)
        except ValueError:
            yield make_mistake(
                ("sign_on", "proxies", index),
                "is not an address or a network; write one, as in 10.0.0.7 or 10.0.0.0/8.",
            )


FormatValue = Callable[[Any], str]


def format_cap(cap: int | None) -> str:
    return "none" if cap is None else format_exact_micros(cap)


def format_hourly_rate(rate: int | None) -> str:
    return "none" if rate is None else f"{rate}/hour"


def _format_number(number: int) -> str:
    return str(number) if number else "0 (none)"


def _format_duration(micros: int) -> str:
    return format_duration(micros) if micros else "0 (none)"


LIMIT_FORMATS: Final[Mapping[str, tuple[FormatValue, Any]]] = MappingProxyType(
    {
        "max_cost_usd": (format_cap, None),
        "max_cost_usd_per_hour": (format_cap, None),
        "max_cost_usd_per_day": (format_cap, None),
        "token_budget": (_format_number, 0),
        "max_steps": (str, None),
        "timeout": (_format_duration, 0),
        "max_output_tokens": (str, None),
        "max_retries": (str, None),
    }
)
"""The limits that are maxima, with the format of each and the value that means unlimited."""


def is_looser(value: Any, bound: Any, unlimited: Any) -> bool:
    """Return whether a maximum is greater than the one that bounds it."""
    return bound != unlimited and (value == unlimited or value > bound)


TWO_PEOPLE: Final = 2
UNLIMITED_RULE: Final = LevelRule(rate=None, simulate="never")
"""The default rule for a single tool whose level is not known."""


def default_level_rule(level: Level, policy: Policy) -> LevelRule:
    """Return the rule for a level for which a policy has none."""
    return LevelRule(rate=DEFAULT_RATES.get(level), simulate=policy.usual_simulate(level))


class FilePair:
    def __init__(self, fleet: FleetConfig, agent: AgentFile) -> None:
        self.fleet = fleet
        self.agent = agent

    def looser(self, path: KeyPath, agent_value: str, fleet_path: KeyPath, fleet_value: str) -> ConfigError:
        """Return the error for an agent's value that is looser than the fleet's."""
        location = self.fleet.source_map.at(fleet_path)
        default_note = "" if fleet_path in self.fleet.source_map.lines else ", the default"
        return self.agent.source_map.error_at(
            path,
            f"`{format_key_path(path)}` is {agent_value}, but {location} allows only {fleet_value} "
            f"(`{format_key_path(fleet_path)}`{default_note}). "
            "An agent can only tighten the fleet: tighten the value here, or loosen it in "
            f"{self.fleet.source_map.file}.",
        )

    def _resolve_alias(self, path: KeyPath) -> KeyPath:
        """Return the path of a limit under the name that the agent's file uses."""
        alias = next((name for name, key in Limits.ALIASES.items() if key == path[-1]), None)
        alias_path = (*path[:-1], alias) if alias else path
        return alias_path if alias_path in self.agent.source_map.lines else path

    def limits(self) -> Limits:
        """Return the lower of each limit; for a choice, the agent's."""
        fleet_limits, agent_limits = self.fleet.spec.agents.limits, self.agent.spec.limits
        lower_limits = {
            key: self._lower(key, fleet_limits, agent_limits, format_value, unlimited)
            for key, (format_value, unlimited) in LIMIT_FORMATS.items()
        }
        choices = {
            key: value_or_default(getattr(agent_limits, key), getattr(fleet_limits, key))
            for key in Limits.__struct_fields__
            if key not in LIMIT_FORMATS
        }
        return Limits(**lower_limits, **choices)

    def _lower(
        self, key: str, fleet_limits: Limits, agent_limits: Limits, format_value: FormatValue, unlimited: Any
    ) -> Any:
        fleet_value, agent_value = getattr(fleet_limits, key), getattr(agent_limits, key)
        if agent_value is UNSET:
            return value_or_default(getattr(self.fleet.default_limits, key), fleet_value)
        if fleet_value is UNSET:
            return agent_value
        if is_looser(agent_value, fleet_value, unlimited):
            path = self._resolve_alias(("limits", key))
            raise self.looser(path, format_value(agent_value), ("agents", "limits", key), format_value(fleet_value))
        return agent_value

    def mode(self) -> Any:
        fleet_mode, agent_mode = self.fleet.spec.mode, self.agent.spec.mode
        if agent_mode is UNSET:
            return fleet_mode
        if MODES.index(agent_mode) > MODES.index(fleet_mode):
            raise self.looser(("mode",), agent_mode, ("mode",), fleet_mode)
        return agent_mode

    def observe(self) -> bool:
        fleet_observe, agent_observe = self.fleet.spec.observe, self.agent.spec.observe
        if agent_observe is True and not fleet_observe:
            raise self.looser(("observe",), "true", ("observe",), "false")
        return value_or_default(agent_observe, fleet_observe)

    def expiry(self) -> int:
        fleet_expiry, agent_expiry = self.fleet.spec.policy.approval_expiry, self.agent.spec.policy.approval_expiry
        path = ("policy", "approval_expiry")
        if agent_expiry is not UNSET and fleet_expiry is not UNSET and agent_expiry > fleet_expiry:
            raise self.looser(path, format_duration(agent_expiry), path, format_duration(fleet_expiry))
        return value_or_default(value_or_default(agent_expiry, fleet_expiry), APPROVAL_EXPIRY)

    def tools(self) -> ToolsSpec:
        tools, bounds = self.agent.spec.tools, self.fleet.spec.shell
        if tools.shell is UNSET:
            return tools
        if bounds.sandbox and not tools.shell.sandbox:
            raise self.looser(("tools", "shell", "sandbox"), "false", ("shell", "sandbox"), "true")
        if tools.shell.network and not bounds.network:
            raise self.looser(("tools", "shell", "network"), "true", ("shell", "network"), "false")
        return tools

    def models(self) -> tuple[str, ...] | None:
        agent_models, fleet_models = self.agent.spec.allowed_models, self.fleet.spec.allowed_models
        return self.narrow_list("allowed_models", agent_models, fleet_models, ("allowed_models",))

    def hosts(self) -> tuple[str, ...] | None:
        http = self.agent.spec.tools.http
        agent_hosts = UNSET if http is UNSET else http.hosts
        hosts = self.narrow_list(
            "allowed_hosts", agent_hosts, self.fleet.spec.allowed_hosts, ("tools", "http", "hosts")
        )
        if http is not UNSET and not hosts:
            sentence = "`tools.http` has no hosts; list the allowed hosts, as in hosts: [api.example.com]."
            raise self.agent.source_map.error_at(("tools", "http"), sentence)
        return hosts

    def provider_tools(self) -> tuple[ProviderTool, ...]:
        """Return the tools that the provider runs. A search reads any page, so it needs all hosts to be allowed."""
        agent_tools, fleet_hosts = self.agent.spec.provider_tools, self.fleet.spec.allowed_hosts
        if "web_search" in agent_tools and fleet_hosts is not UNSET and "*" not in fleet_hosts:
            allowed_hosts = join_names(fleet_hosts) or "nothing"
            raise self.looser(("provider_tools", "web_search"), "for all hosts", ("allowed_hosts",), allowed_hosts)
        return tuple(ProviderTool(name, spec.max_uses) for name, spec in sorted(agent_tools.items()))

    def check_host(self, path: KeyPath, address: str) -> None:
        """Require that the fleet's `allowed_hosts` include the host of a URL; without a list every host is allowed."""
        host, fleet_hosts = urlsplit(address).hostname or "", self.fleet.spec.allowed_hosts
        if fleet_hosts is not UNSET and not any(is_covered(form, fleet_hosts) for form in (host, f"[{host}]")):
            raise self.looser(path, f"at `{host}`", ("allowed_hosts",), join_names(fleet_hosts) or "nothing")

    def narrow_list(
        self, key: str, agent_names: Sequence[str] | UnsetType, fleet_names: Sequence[str] | UnsetType, path: KeyPath
    ) -> tuple[str, ...] | None:
        """Return the agent's list, which the fleet's must cover; without one, the fleet's."""
        if agent_names is UNSET:
            return None if fleet_names is UNSET else tuple(fleet_names)
        for index, name in enumerate(agent_names):
            if fleet_names is not UNSET and not is_covered(name, fleet_names):
                raise self.looser((*path, index), f"`{name}`", (key,), join_names(fleet_names) or "nothing")
        return tuple(agent_names)

    def policies(self) -> tuple[Policy, ...]:
        """Check the agent's rules against each policy of the fleet; return all policies, the agent's last."""
        fleets = (self.fleet.spec.policy, *self.fleet.extra_policies)
        for fleet_policy in fleets:
            agent_policy, path = self.agent.spec.policy, ("policy",)
            self._rule(
                LevelRule(simulate=agent_policy.simulate),
                LevelRule(simulate=fleet_policy.simulate),
                UNLIMITED_RULE,
                path,
            )
            self._provenance(agent_policy, fleet_policy)
            for level, rule in agent_policy.levels.items():
                self._rule(
                    rule,
                    fleet_policy.levels.get(level, LevelRule()),
                    default_level_rule(level, fleet_policy),
                    ("policy", "levels", level),
                )
            for tool, rule in agent_policy.tools.items():
                fleet_rule = fleet_policy.tools.get(tool, ToolRule())
                self._rule(rule, fleet_rule, UNLIMITED_RULE, ("policy", "tools", tool))
                self._level(rule.level, fleet_rule.level, ("policy", "tools", tool, "level"))
        return (*fleets, self.agent.spec.policy)

    def _rule(self, agent_rule: LevelRule, fleet_rule: LevelRule, default: LevelRule, path: KeyPath) -> None:
        """Require that a rule is not looser than the fleet's; `default` applies where the fleet's rule sets nothing."""
        if agent_rule.approval == "never" and fleet_rule.approval != "never":
            allowed_approval = "always" if fleet_rule.approval == "always" else "the mode's choice"
            raise self.looser((*path, "approval"), "never", (*path, "approval"), allowed_approval)
        rate = value_or_default(fleet_rule.rate, default.rate)
        if (
            agent_rule.rate is not UNSET
            and isinstance(rate, int)
            and (agent_rule.rate is None or agent_rule.rate > rate)
        ):
            raise self.looser(
                (*path, "rate"), format_hourly_rate(agent_rule.rate), (*path, "rate"), format_hourly_rate(rate)
            )
        fleet_simulate, agent_simulate = value_or_default(fleet_rule.simulate, default.simulate), agent_rule.simulate
        if (
            fleet_simulate is not UNSET
            and agent_simulate is not UNSET
            and SIMULATE_MODES.index(agent_simulate) < SIMULATE_MODES.index(fleet_simulate)
        ):
            raise self.looser((*path, "simulate"), agent_simulate, (*path, "simulate"), fleet_simulate)
        if agent_rule.approvers == 1 and fleet_rule.approvers == TWO_PEOPLE:
            raise self.looser((*path, "approvers"), "1", (*path, "approvers"), "2")

    def _provenance(self, agent_policy: Policy, fleet_policy: Policy) -> None:
        path = ("policy", "provenance")
        if UNSET not in (agent_policy.provenance, fleet_policy.provenance):
            fleet_rank, agent_rank = (
                PROVENANCE_MODES.index(fleet_policy.provenance),
                PROVENANCE_MODES.index(agent_policy.provenance),
            )
            if agent_rank < fleet_rank:
                raise self.looser(path, str(agent_policy.provenance), path, str(fleet_policy.provenance))
        path = ("policy", "lock_after_denial")
        if agent_policy.lock_after_denial is False and fleet_policy.lock_after_denial is True:
            raise self.looser(path, "false", path, "true")
        if (agent_policy.unknown_price, fleet_policy.unknown_price) == ("dearest", "refuse"):
            path = ("policy", "unknown_price")
            raise self.looser(path, "dearest", path, "refuse")

    def _level(self, agent_level: Level | UnsetType, fleet_level: Level | UnsetType, path: KeyPath) -> None:
        if agent_level is UNSET or fleet_level is UNSET or LEVELS.index(agent_level) >= LEVELS.index(fleet_level):
            return
        raise self.looser(path, agent_level, path, f"{fleet_level} or a more dangerous one")
