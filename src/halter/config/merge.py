"""The fleet's file (`halter.yaml`), and its merge with an agent's file, which can only tighten it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from halter.config.agent_files import AgentFile
from halter.config.decode import decode_document, format_key_path, make_mistake, value_or_default
from halter.config.sections import list_channel_mistakes
from halter.config.yaml_reader import Document, KeyPath, Mistake, SourceMap, load_file
from halter.core.errors import ConfigError
from halter.core.text import join_names
from halter.core.tools import ProviderTool
from halter.policy.defaults import APPROVAL_EXPIRY, default_levels
from halter.policy.difference import Difference
from halter.policy.meet import tighten, tighten_key
from halter.policy.order import is_covered
from halter.spec.agent import ToolsSpec
from halter.spec.fleet import FleetSpec, ShellBounds
from halter.spec.limits import Limits
from halter.spec.policy import Mode, Policy

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
    for path, sentence in (*_rate_mistakes(spec), *list_channel_mistakes(spec.notify)):
        raise document.source_map.error_at(path, sentence)
    return FleetConfig(spec, document.source_map, document.value)


def _rate_mistakes(spec: FleetSpec) -> Iterator[Mistake]:
    """List rates whose model is ambiguous."""
    for model in spec.rates:
        if "*" in model and not model.endswith(":*"):
            path = ("rates", model)
            yield make_mistake(path, "is not a model; name one model, or all models of a provider, as in anthropic:*.")


T = TypeVar("T", bound=msgspec.Struct)


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

    def _require_tighter(self, differences: Iterable[Difference], fleet_path: KeyPath, path: KeyPath) -> None:
        """Raise the error for the first key in which the agent is looser. Both paths lead to what was compared."""
        for difference in differences:
            if difference.how == "looser":
                steps, agent_value, fleet_value = difference.explain()
                key = difference.path[len(path) :]
                raise self.looser(self._resolve_alias(steps), agent_value, (*fleet_path, *key), fleet_value)

    def _tighten(self, fleet: T, agent: T, fleet_path: KeyPath, path: KeyPath, defaults: T | None = None) -> T:
        """Return what holds of a mapping in both files, of which the agent's may only be stricter."""
        met = tighten(fleet, agent, defaults=defaults, path=path)
        self._require_tighter(met.differences, fleet_path, path)
        return met.value

    def _tighten_key(self, key: str, agent: Any, path: KeyPath) -> Any:
        """Return what holds of a key of the fleet, of which the agent's value may only be stricter."""
        value, differences = tighten_key(FleetSpec, key, getattr(self.fleet.spec, key), agent, path)
        self._require_tighter(differences, (key,), path)
        return value

    def limits(self) -> Limits:
        """Return the lower of each limit; for a choice, the agent's."""
        agent_limits, lower_defaults = self.agent.spec.limits, self.fleet.default_limits
        limits = self._tighten(self.fleet.spec.agents.limits, agent_limits, ("agents", "limits"), ("limits",))
        unset_keys = [key for key in Limits.__struct_fields__ if getattr(agent_limits, key) is UNSET]
        defaults = {key: limit for key in unset_keys if (limit := getattr(lower_defaults, key)) is not UNSET}
        return msgspec.structs.replace(limits, **defaults)

    def mode(self) -> Mode:
        return self._tighten_key("mode", self.agent.spec.mode, ("mode",))

    def observe(self) -> bool:
        return self._tighten_key("observe", self.agent.spec.observe, ("observe",))

    def tools(self) -> ToolsSpec:
        tools, path = self.agent.spec.tools, ("tools", "shell")
        if tools.shell is not UNSET:
            bounds = ShellBounds(sandbox=tools.shell.sandbox, network=tools.shell.network)
            self._tighten(self.fleet.spec.shell, bounds, ("shell",), path)
        return tools

    def models(self) -> tuple[str, ...] | None:
        return self.narrow_list("allowed_models", self.agent.spec.allowed_models, ("allowed_models",))

    def hosts(self) -> tuple[str, ...] | None:
        http = self.agent.spec.tools.http
        hosts = self.narrow_list("allowed_hosts", UNSET if http is UNSET else http.hosts, ("tools", "http", "hosts"))
        if http is not UNSET and not hosts:
            sentence = "`tools.http` has no hosts; list the allowed hosts, as in hosts: [api.example.com]."
            raise self.agent.source_map.error_at(("tools", "http"), sentence)
        return hosts

    def secrets(self) -> tuple[str, ...]:
        return self.narrow_list("allowed_secrets", self.agent.spec.secrets, ("secrets",)) or ()

    def narrow_list(self, key: str, agent_names: Sequence[str] | UnsetType, path: KeyPath) -> tuple[str, ...] | None:
        """Return the agent's list, which the fleet's must cover; without one, the fleet's."""
        names = self._tighten_key(key, agent_names, path)
        return None if names is UNSET else tuple(names)

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

    def policies(self) -> tuple[Policy, ...]:
        """Check the agent's rules against each policy of the fleet; return all policies, the agent's last."""
        for fleet_policy in self.fleet.extra_policies:
            self._tighten_policy(fleet_policy)
        return (self.fleet.spec.policy, *self.fleet.extra_policies, self.agent.spec.policy)

    @cached_property
    def policy(self) -> Policy:
        """What holds of the keys of both policies, apart from their rules for levels and tools."""
        return self._tighten_policy(self.fleet.spec.policy)

    def expiry(self) -> int:
        return value_or_default(self.policy.approval_expiry, APPROVAL_EXPIRY)

    def list_disabled(self) -> tuple[str, ...]:
        return tuple(sorted(self.policy.disabled))

    def _tighten_policy(self, fleet_policy: Policy) -> Policy:
        defaults = default_levels(fleet_policy)
        return self._tighten(fleet_policy, self.agent.spec.policy, ("policy",), ("policy",), defaults)
