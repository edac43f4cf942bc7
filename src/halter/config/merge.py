"""The fleet's file (`halter.yaml`), and how an agent's file is merged with it. An agent can only tighten."""

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
from halter.core.money import format_micros
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
    """The fleet's file and its lines. Without a file, everything is at its default.

    `said` is the file's content as written. Where a store's policy and a file apply together, the rules of the file are
    `beside` those of the store and never mixed with them: a rule for a tool in one must not hide a stricter rule for
    its level in the other. `silent` are limits for agents that set none, where these are lower than the cap.
    """

    spec: FleetSpec = FleetSpec()
    source_map: SourceMap = SourceMap(FLEET_FILE)
    raw: Mapping[str, Any] = {}
    extra_policies: tuple[Policy, ...] = ()
    silent: Limits = Limits()


def read_fleet(path: Path, shown: str | None = None) -> FleetConfig:
    return parse_fleet(load_file(path, shown))


def parse_fleet(document: Document) -> FleetConfig:
    spec = decode_document(document, FleetSpec)
    for model in spec.models:
        if model.endswith("*"):
            raise document.source_map.error_at(
                ("models", model), f"`{model}` is not one model; name each with its price."
            )
    for path, sentence in (*_rate_mistakes(spec), *_sign_on_mistakes(spec), *list_channel_mistakes(spec.notify)):
        raise document.source_map.error_at(path, sentence)
    return FleetConfig(spec, document.source_map, document.value)


def _rate_mistakes(spec: FleetSpec) -> Iterator[Mistake]:
    """Find rates that limit nothing, or whose model is ambiguous."""
    for model, rate in spec.rates.items():
        path = ("rates", model)
        if "*" in model and not model.endswith(":*"):
            yield make_mistake(path, "is not one model; name one, or all of a provider, as in anthropic:*.")
        if rate.requests_per_minute is UNSET and rate.tokens_per_minute is UNSET:
            yield make_mistake(path, "limits nothing; write `requests_per_minute`, `tokens_per_minute` or both.")


def _sign_on_mistakes(spec: FleetSpec) -> Iterator[Mistake]:
    said = spec.sign_on
    if said is UNSET:
        return
    for key, lacks in (("proxies", not said.proxies and said.oidc is UNSET), ("roles", not said.roles)):
        if lacks:
            yield make_mistake(
                ("sign_on", key), "is empty, so that nobody could sign on; write one, or remove `sign_on`."
            )
    if said.proxies and said.secret is UNSET:
        yield make_mistake(("sign_on", "proxies"), "prove nothing by themselves; write `secret`, too.")
    for group, agents in said.agents.items():
        if group not in said.roles or not agents:
            yield make_mistake(("sign_on", "agents", group), "names no agent, or a group without a role in `roles`.")
    for key in () if said.oidc is UNSET else ("issuer", "url"):
        if not is_encrypted_or_local(getattr(said.oidc, key)):
            yield make_mistake(("sign_on", "oidc", key), "is not encrypted; write an address with https.")
    for index, proxy in enumerate(said.proxies):
        try:
            ip_network(proxy)
        except ValueError:
            yield make_mistake(
                ("sign_on", "proxies", index), "is no address and no network; write 10.0.0.7 or 10.0.0.0/8."
            )


FormatValue = Callable[[Any], str]


def format_cap(cap: int | None) -> str:
    return "none" if cap is None else format_micros(cap)


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
"""The limits that are maxima: how each is shown, and the value that means unlimited."""


TWO_PEOPLE: Final = 2
UNLIMITED_RULE: Final = LevelRule(rate=None, simulate="never")
"""The default for a single tool, as far as it is known without the tool's level."""


def default_level_rule(level: Level, policy: Policy) -> LevelRule:
    """What holds for a level where a policy has no rule for it."""
    return LevelRule(rate=DEFAULT_RATES.get(level), simulate=policy.usual_simulate(level))


class FilePair:
    def __init__(self, fleet: FleetConfig, agent: AgentFile) -> None:
        self.fleet = fleet
        self.agent = agent

    def looser(self, path: KeyPath, written: str, bound: KeyPath, allowed: str) -> ConfigError:
        """The error for an agent that asks for more than the fleet allows."""
        where = self.fleet.source_map.at(bound)
        said = "" if bound in self.fleet.source_map.lines else ", which is the default"
        return self.agent.source_map.error_at(
            path,
            f"`{format_key_path(path)}` is {written}, but {where} allows only {allowed} "
            f"(`{format_key_path(bound)}`{said}). "
            f"An agent can only tighten the fleet: tighten it here, or loosen it in {self.fleet.source_map.file}.",
        )

    def _resolve_alias(self, path: KeyPath) -> KeyPath:
        """Find the alias under which the agent's file has a limit."""
        other = next((name for name, own in Limits.ALSO.items() if own == path[-1]), None)
        spelled = (*path[:-1], other) if other else path
        return spelled if spelled in self.agent.source_map.lines else path

    def limits(self) -> Limits:
        """The lower of each limit; of a choice, the agent's."""
        ours, theirs = self.fleet.spec.agents.limits, self.agent.spec.limits
        lower = {key: self._lower(key, ours, theirs, show, endless) for key, (show, endless) in LIMIT_FORMATS.items()}
        chosen = {
            key: value_or_default(getattr(theirs, key), getattr(ours, key))
            for key in Limits.__struct_fields__
            if key not in LIMIT_FORMATS
        }
        return Limits(**lower, **chosen)

    def _lower(self, key: str, ours: Limits, theirs: Limits, show: FormatValue, endless: Any) -> Any:
        bound, asked = getattr(ours, key), getattr(theirs, key)
        if asked is UNSET:
            return value_or_default(getattr(self.fleet.silent, key), bound)
        if bound is UNSET:
            return asked
        if bound != endless and (asked == endless or asked > bound):
            path = self._resolve_alias(("limits", key))
            raise self.looser(path, show(asked), ("agents", "limits", key), show(bound))
        return asked

    def mode(self) -> Any:
        bound, asked = self.fleet.spec.mode, self.agent.spec.mode
        if asked is UNSET:
            return bound
        if MODES.index(asked) > MODES.index(bound):
            raise self.looser(("mode",), asked, ("mode",), bound)
        return asked

    def observe(self) -> bool:
        bound, asked = self.fleet.spec.observe, self.agent.spec.observe
        if asked is True and not bound:
            raise self.looser(("observe",), "true", ("observe",), "false")
        return value_or_default(asked, bound)

    def expiry(self) -> int:
        bound, asked = self.fleet.spec.policy.approval_expiry, self.agent.spec.policy.approval_expiry
        path = ("policy", "approval_expiry")
        if asked is not UNSET and bound is not UNSET and asked > bound:
            raise self.looser(path, format_duration(asked), path, format_duration(bound))
        return value_or_default(value_or_default(asked, bound), APPROVAL_EXPIRY)

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
        asked, bound = self.agent.spec.allowed_models, self.fleet.spec.allowed_models
        return self.narrow_list("allowed_models", asked, bound, ("allowed_models",))

    def hosts(self) -> tuple[str, ...] | None:
        http = self.agent.spec.tools.http
        asked = UNSET if http is UNSET else http.hosts
        hosts = self.narrow_list("allowed_hosts", asked, self.fleet.spec.allowed_hosts, ("tools", "http", "hosts"))
        if http is not UNSET and not hosts:
            sentence = "`tools.http` has no hosts; name those that may be reached, as in hosts: [api.example.com]."
            raise self.agent.source_map.error_at(("tools", "http"), sentence)
        return hosts

    def provider_tools(self) -> tuple[ProviderTool, ...]:
        """The tools that a provider runs. A search reads any page, so it needs all hosts where the fleet lists some."""
        asked, bound = self.agent.spec.provider_tools, self.fleet.spec.allowed_hosts
        if "web_search" in asked and bound is not UNSET and "*" not in bound:
            listed = join_names(bound) or "nothing"
            raise self.looser(("provider_tools", "web_search"), "for all hosts", ("allowed_hosts",), listed)
        return tuple(ProviderTool(name, spec.max_uses) for name, spec in sorted(asked.items()))

    def check_host(self, path: KeyPath, address: str) -> None:
        """Check the host of a URL against the fleet's `allowed_hosts`; without a list every host is allowed."""
        host, bound = urlsplit(address).hostname or "", self.fleet.spec.allowed_hosts
        if bound is not UNSET and not any(is_covered(word, bound) for word in (host, f"[{host}]")):
            raise self.looser(path, f"at `{host}`", ("allowed_hosts",), join_names(bound) or "nothing")

    def narrow_list(
        self, key: str, asked: Sequence[str] | UnsetType, bound: Sequence[str] | UnsetType, path: KeyPath
    ) -> tuple[str, ...] | None:
        """The agent's list, all of which the fleet must allow; without one, the fleet's."""
        if asked is UNSET:
            return None if bound is UNSET else tuple(bound)
        for index, name in enumerate(asked):
            if bound is not UNSET and not is_covered(name, bound):
                raise self.looser((*path, index), f"`{name}`", (key,), join_names(bound) or "nothing")
        return tuple(asked)

    def policies(self) -> tuple[Policy, ...]:
        """Check the agent's rules against every policy of the fleet; the agent's policy comes last."""
        fleets = (self.fleet.spec.policy, *self.fleet.extra_policies)
        for ours in fleets:
            theirs, path = self.agent.spec.policy, ("policy",)
            self._rule(LevelRule(simulate=theirs.simulate), LevelRule(simulate=ours.simulate), UNLIMITED_RULE, path)
            self._provenance(theirs, ours)
            for level, rule in theirs.levels.items():
                self._rule(
                    rule,
                    ours.levels.get(level, LevelRule()),
                    default_level_rule(level, ours),
                    ("policy", "levels", level),
                )
            for tool, rule in theirs.tools.items():
                bound = ours.tools.get(tool, ToolRule())
                self._rule(rule, bound, UNLIMITED_RULE, ("policy", "tools", tool))
                self._level(rule.level, bound.level, ("policy", "tools", tool, "level"))
        return (*fleets, self.agent.spec.policy)

    def _rule(self, asked: LevelRule, bound: LevelRule, usual: LevelRule, path: KeyPath) -> None:
        """Compare two rules; `usual` is the default where the fleet's rule is silent."""
        if asked.approval == "never" and bound.approval != "never":
            allowed = "always" if bound.approval == "always" else "what the mode says"
            raise self.looser((*path, "approval"), "never", (*path, "approval"), allowed)
        rate = value_or_default(bound.rate, usual.rate)
        if asked.rate is not UNSET and isinstance(rate, int) and (asked.rate is None or asked.rate > rate):
            raise self.looser(
                (*path, "rate"), format_hourly_rate(asked.rate), (*path, "rate"), format_hourly_rate(rate)
            )
        ours, theirs = value_or_default(bound.simulate, usual.simulate), asked.simulate
        if ours is not UNSET and theirs is not UNSET and SIMULATE_MODES.index(theirs) < SIMULATE_MODES.index(ours):
            raise self.looser((*path, "simulate"), theirs, (*path, "simulate"), ours)
        if asked.approvers == 1 and bound.approvers == TWO_PEOPLE:
            raise self.looser((*path, "approvers"), "1", (*path, "approvers"), "2")

    def _provenance(self, asked: Policy, bound: Policy) -> None:
        path = ("policy", "provenance")
        if UNSET not in (asked.provenance, bound.provenance):
            ours, theirs = PROVENANCE_MODES.index(bound.provenance), PROVENANCE_MODES.index(asked.provenance)
            if theirs < ours:
                raise self.looser(path, str(asked.provenance), path, str(bound.provenance))
        path = ("policy", "lock_after_denial")
        if asked.lock_after_denial is False and bound.lock_after_denial is True:
            raise self.looser(path, "false", path, "true")

    def _level(self, asked: Level | UnsetType, bound: Level | UnsetType, path: KeyPath) -> None:
        if asked is UNSET or bound is UNSET or LEVELS.index(asked) >= LEVELS.index(bound):
            return
        raise self.looser(path, asked, path, f"{bound} or a more dangerous one")
