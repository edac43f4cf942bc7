"""The tools that files name, checked once the tools of an agent are known."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from halter.config.agent_files import AgentFile
from halter.config.decode import format_key_path, value_or_default
from halter.config.definition import AgentDefinition
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_phases
from halter.config.yaml_reader import KeyPath
from halter.core.errors import ConfigError
from halter.core.text import suggest_nearest
from halter.core.tools import TOOLS_BY_FAMILY, ToolSpec
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.meet import tighten
from halter.spec.tasks import VERBS


def check_named_tools(resolved: ResolvedPolicy, agent: AgentFile, tools: Iterable[ToolSpec]) -> None:
    """Check the tool rules of an agent's file once its tools are known.

    Raises a ConfigError for an unknown tool, and for a rule that is looser than the rule that applies to the tool.
    """
    tools_by_name = {tool.name: tool for tool in tools}
    for path, name in list_named_tools(agent):
        if name not in tools_by_name:
            raise agent.source_map.error_at(
                path, f"there is no tool `{name}`; {suggest_nearest(name, sorted(tools_by_name), 'the tools')}"
            )
    for name, rule in agent.spec.policy.tools.items():
        effective = resolved.rule(name, tools_by_name[name].level).as_rule()
        path = ("policy", "tools", name)
        for difference in tighten(effective, rule, path=path).differences:
            if difference.how == "looser":
                raise agent.source_map.error_at(
                    difference.path,
                    f"`{format_key_path(difference.path)}` is {difference.second_text}, but {difference.first_text} "
                    "applies to this tool; an agent can only tighten it.",
                )


def check_reflex_tools(agent: "AgentDefinition", tools: Iterable[str]) -> None:
    """Raise ConfigError, with its line, for a rule of a reflex that calls a tool which the agent does not have."""
    tool_names = sorted({*tools, *VERBS})
    for index, rule in enumerate(agent.model_settings.reflex):
        for path, name in _list_called_tools(rule):
            if name not in tool_names:
                location = agent.locate_reflex((index, *path))
                raise ConfigError(
                    f"{location}: there is no tool `{name}`; {suggest_nearest(name, tool_names, 'the tools')}"
                )


def _list_called_tools(rule: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield the tools that a rule calls; its form is checked when the model is made."""
    if not isinstance(rule, dict):
        return
    fields = cast("dict[str, Any]", rule)
    calls = fields.get("calls")
    numbered_calls = enumerate(cast("list[Any]", calls)) if isinstance(calls, list) else ()
    paths: list[tuple[KeyPath, Any]] = [(("call", "tool"), fields.get("call"))]
    paths += [(("calls", number, "tool"), call) for number, call in numbered_calls]
    for path, call in paths:
        name = cast("dict[str, Any]", call).get("tool") if isinstance(call, dict) else None
        if isinstance(name, str):
            yield path, name


_OTHER_PROGRAMS_TOOL: Final = re.compile(r"mcp__|MCP:")


def list_unknown_tool_rules(fleet: FleetConfig, list_known_tools: Callable[[], Iterable[str]]) -> tuple[str, ...]:
    """List warnings about fleet rules for tools that no agent has: a rule with a typo protects nothing.

    They are no errors: a rule may be for the tool of an agent elsewhere. Programs whose calls Halter only judges have
    tools of their own. Knowing all tools is slow, so they are listed only if there are rules.
    """
    policy = fleet.spec.policy
    tool_paths: list[tuple[KeyPath, str]] = [(("policy", "tools", name), name) for name in policy.tools]
    tool_paths += [(("policy", "disabled", index), name) for index, name in enumerate(policy.disabled)]
    others = frozenset[str]().union(*TOOLS_BY_FAMILY.values())
    tool_paths = [each for each in tool_paths if each[1] not in others and not _OTHER_PROGRAMS_TOOL.match(each[1])]
    tool_names = sorted({*list_known_tools()}) if tool_paths else []
    return tuple(
        f"{fleet.source_map.at(path)}: no agent here has a tool `{name}`; "
        f"{suggest_nearest(name, tool_names, 'the tools')}"
        for path, name in tool_paths
        if name not in tool_names
    )


def list_named_tools(agent: AgentFile) -> list[tuple[KeyPath, str]]:
    spec = agent.spec
    tool_paths: list[tuple[KeyPath, str]] = [(("policy", "tools", name), name) for name in spec.policy.tools]
    tool_paths += [(("policy", "disabled", index), name) for index, name in enumerate(spec.policy.disabled)]
    tool_paths += [(("tools", "own", index), name) for index, name in enumerate(value_or_default(spec.tools.own, ()))]
    if not isinstance(spec.phases, str):
        for phase in resolve_phases(spec.phases):
            tool_paths += [(("phases", phase.name, index), name) for index, name in enumerate(phase.grants or ())]
    return [(path, name) for path, name in tool_paths if path[0] != "phases" or name not in VERBS]
