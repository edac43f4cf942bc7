"""What an agent looks with while nobody watches, against the tools that it has and its policy."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import UNSET

from halter.config.agent import Agent
from halter.config.load import KeyPath
from halter.config.shape import dotted
from halter.core.pacing import Pacing
from halter.core.spec import Resolved
from halter.core.text import nearest
from halter.core.tools import Invalid, Tool, ToolSpec
from halter.guard.levels import needs_approval, rule_of


def against_pacing(policy: Resolved, pacing: Pacing, agent: Agent, tools: Iterable[Tool]) -> None:
    """Check the tools that fields are refreshed with and that sensors poll, once the agent's tools are known.

    Raises a ConfigError for a tool that does not exist, for one that does more than look, for one that a person would
    have to be asked about again and again, and for parameters that it would refuse.
    """
    known = {tool.spec.name: tool for tool in tools}
    for path, name, given, params in _looks(pacing):
        if name not in known:
            hint = nearest(name, sorted(known), "the tools")
            raise agent.places.wrong(path, f"`{dotted(path)}` is `{name}`, but there is no such tool; {hint}")
        if why := _unfit(policy, known[name].spec):
            raise agent.places.wrong(path, f"`{dotted(path)}` is `{name}`, {why}.")
        if why := _refused(known[name], params):
            raise agent.places.wrong(given, f"`{dotted(given)}` is nothing that `{name}` takes: {why}")


def _looks(pacing: Pacing) -> Iterator[tuple[KeyPath, str, KeyPath, Mapping[str, Any]]]:
    """List the tools that are used without the model's asking, with what they are given, and the way to both."""
    for name, field in pacing.fields.items():
        if field.refresh_tool is not UNSET:
            path = ("hot_state", "fields", name)
            yield (*path, "refresh_tool"), field.refresh_tool, (*path, "refresh_params"), field.refresh_params
    for index, sensor in enumerate(pacing.sensors):
        if sensor.source.tool is not UNSET:
            path = ("sensors", index, "source")
            yield (*path, "tool"), sensor.source.tool, (*path, "params"), sensor.source.params


def _unfit(policy: Resolved, spec: ToolSpec) -> str:
    """Tell why a tool cannot be used without anybody's asking for it, if so."""
    if spec.effect != "read":
        return "which may change something; name a tool that only looks, with the effect `read`"
    if spec.name in policy.disabled:
        return "which is disabled; name another tool, or take it off `policy.disabled`"
    rule = rule_of(policy, spec)
    if needs_approval(rule, policy.mode, None):
        asked = f"which needs a person's approval each time ({rule.level} in mode {policy.mode})"
        return f"{asked}; name another tool, or let the fleet write `approval: never` for it under `policy.tools`"
    return ""


def _refused(tool: Tool, params: Mapping[str, Any]) -> str:
    """Tell what a tool has against its parameters, if anything."""
    try:
        written = json.dumps(params).encode()
    except (TypeError, ValueError):
        return "it holds something that JSON cannot say."
    checked = tool.validate(written)
    return checked.sentence if isinstance(checked, Invalid) else ""
