"""The checks of what an agent uses unattended: tools that refresh fields, sensors, channels, the steps of playbooks."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from halter.config.agent_files import AgentFile
from halter.config.decode import format_key_path
from halter.config.yaml_reader import KeyPath
from halter.core.errors import require_module
from halter.core.text import join_names, suggest_nearest
from halter.core.tools import Invalid, Tool, ToolSpec
from halter.notify import require_libraries
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.levels import find_tool_policy, needs_approval
from halter.spec.autonomy import Pacing
from halter.spec.playbook import Playbook, Step
from halter.spec.sensors import FilesSensor, StreamSensor, ToolSource
from halter.spec.tasks import Tasks


def check_extras(pacing: Pacing, tasks: Tasks) -> None:
    """Raise ConfigError, which names the extra, for a sensor or a channel whose library is not installed."""
    for sensor in pacing.sensors:
        subject = f"The sensor {sensor.name}"
        if isinstance(sensor, FilesSensor):
            require_module("watchfiles", "autonomy", subject)
        elif isinstance(sensor, StreamSensor) and sensor.source.protocol == "websocket":
            require_module("websockets", "autonomy", subject)
    require_libraries(tasks.notify.channels)


def check_pacing_tools(policy: ResolvedPolicy, pacing: Pacing, agent: AgentFile, tools: Iterable[Tool]) -> None:
    """Check the tools that refresh fields and that sensors poll against the agent's tools.

    Raises ConfigError for a tool that does not exist, that does more than read or that needs an approval for each call,
    and for arguments that the tool rejects.
    """
    tools_by_name = {tool.spec.name: tool for tool in tools}
    for path, name, arguments_path, arguments in _list_unattended_tools(pacing):
        if name not in tools_by_name:
            hint = suggest_nearest(name, sorted(tools_by_name), "the tools")
            raise agent.source_map.error_at(
                path, f"`{format_key_path(path)}` is `{name}`, but there is no such tool; {hint}"
            )
        if objection := _explain_unfit(policy, tools_by_name[name].spec):
            raise agent.source_map.error_at(path, f"`{format_key_path(path)}` is `{name}`, {objection}.")
        if objection := _explain_refusal(tools_by_name[name], arguments):
            raise agent.source_map.error_at(
                arguments_path, f"`{format_key_path(arguments_path)}` does not fit `{name}`: {objection}"
            )


def _list_unattended_tools(pacing: Pacing) -> Iterator[tuple[KeyPath, str, KeyPath, Mapping[str, Any]]]:
    """List the tools that run without a call of the model, with their arguments, and the key paths of both."""
    for name, field in pacing.fields.items():
        if field.refresh_tool is not UNSET:
            path = ("hot_state", "fields", name)
            yield (*path, "refresh_tool"), field.refresh_tool, (*path, "refresh_arguments"), field.refresh_arguments
    for index, sensor in enumerate(pacing.sensors):
        if isinstance(sensor.source, ToolSource):
            path = ("sensors", index, "source")
            yield (*path, "tool"), sensor.source.tool, (*path, "arguments"), sensor.source.arguments


def _explain_unfit(policy: ResolvedPolicy, spec: ToolSpec) -> str:
    """Describe why a tool cannot run unattended, without a call of the model; "" if it can."""
    if spec.effect != "read":
        return "which may change something; use a tool whose effect is `read`"
    if spec.name in policy.disabled:
        return "which is disabled; use another tool, or remove it from `policy.disabled`"
    rule = find_tool_policy(policy, spec)
    if needs_approval(rule, policy.mode, None):
        reason = f"which needs an approval for each call ({rule.level} in mode {policy.mode})"
        return f"{reason}; use another tool, or set `approval: never` for it in the fleet's `policy.tools`"
    return ""


def _explain_refusal(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Describe why a tool rejects its arguments; "" if it accepts them."""
    try:
        encoded = json.dumps(arguments).encode()
    except (TypeError, ValueError):
        return "it contains a value that JSON cannot represent."
    validation = tool.validate(encoded)
    return validation.sentence if isinstance(validation, Invalid) else ""


def list_playbook_flaws(
    playbook: Playbook, agent: str, tools: Mapping[str, Tool], verbs: Iterable[str]
) -> Iterator[str]:
    """List, with their lines, the steps that cannot work: for an unknown tool, or with arguments that do not fit."""
    names = {*tools, *verbs}
    for step in playbook.steps:
        if step.call not in names:
            known = join_names(sorted(names)) or "none"
            sentence = f"calls `{step.call}`, which {agent} does not have; its tools are {known}."
            yield f"{playbook.file} line {step.line} {sentence}"
        elif step.call in tools and (objection := _explain_step_refusal(tools[step.call], step)):
            yield f"{playbook.file} line {step.line}: `{step.call}` cannot take these arguments. {objection}"


def _explain_step_refusal(tool: Tool, step: Step) -> str:
    """Describe why a tool rejects the arguments of a step; "" if it may accept them: references have no value yet."""
    names = msgspec.json.decode(step.arguments, type=dict[str, Any])
    if not step.has_references:
        return _explain_refusal(tool, names)
    schema = msgspec.json.decode(tool.spec.schema or b"{}", type=dict[str, Any])
    known, required = schema.get("properties", {}), schema.get("required", ())
    missing = [name for name in required if name not in names]
    extra = [name for name in names if name not in known] if schema.get("additionalProperties") is False else []
    if extra:
        return f"{join_names(extra)} {'is not one' if len(extra) == 1 else 'are not'} of its arguments."
    return f"{join_names(missing)} {'is' if len(missing) == 1 else 'are'} missing." if missing else ""
