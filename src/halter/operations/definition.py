"""The definition with which an agent's newest session was started: model, tools, caps, sensors, triggers."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from halter.core.ids import Digest
from halter.core.money import Caps
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.core.tools import ProviderTool
from halter.operations.actor import Actor, Agent


class _Mind(msgspec.Struct, frozen=True):
    model: str | None = None
    fallback_models: Sequence[str] = ()
    instructions: str = ""
    provider_tools: Sequence[ProviderTool] = ()


class _Autonomy(msgspec.Struct, frozen=True):
    enabled: bool = False


class _Named(msgspec.Struct, frozen=True):
    name: str = ""
    type: str = ""


class _Pacing(msgspec.Struct, frozen=True):
    autonomy: _Autonomy = _Autonomy()
    sensors: Sequence[_Named] = ()


class _Policy(msgspec.Struct, frozen=True):
    caps: Caps = Caps()
    mode: str = ""
    on_cap: str = ""
    max_steps: int = 0
    timeout: int = 0
    tools: Mapping[str, Any] = {}
    disabled: Sequence[str] = ()
    allowed_hosts: Sequence[str] | None = None


class _Tasks(msgspec.Struct, frozen=True):
    verbs: Sequence[str] = ()


class _Definition(msgspec.Struct, frozen=True):
    mind: _Mind = _Mind()
    pacing: _Pacing = _Pacing()
    policy: _Policy = _Policy()
    tasks: _Tasks = _Tasks()


class RecordedDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of an agent at the time `at`: its model, what it may use, and its caps."""

    agent: str
    at: int
    model: str
    fallback_models: Sequence[str]
    instructions: str
    mode: str
    runs_by_itself: bool
    tools: Sequence[str]
    provider_tools: Sequence[ProviderTool]
    verbs: Sequence[str]
    disabled: Sequence[str]
    sensors: Sequence[str]
    allowed_hosts: Sequence[str] | None
    caps: Caps
    on_cap: str
    max_steps: int
    timeout: int


async def read_definition(actor: Actor, agent: Agent) -> RecordedDefinition | None:
    """Read the definition of an agent's newest session; None if there is none, or it was erased."""
    actor.require_agent(agent)
    for row in await actor.app.store.ask(Query("sessions_of_agent", SessionRow, {"agent": agent, "limit": 1})):
        try:
            definition = msgspec.json.decode(await actor.app.store.get(Digest(row.definition)), type=_Definition)
        except (KeyError, ValueError, msgspec.MsgspecError):
            return None
        return _make_definition(row, definition)
    return None


def _make_definition(row: SessionRow, definition: _Definition) -> RecordedDefinition:
    return RecordedDefinition(
        agent=row.agent,
        at=row.started_at,
        model=definition.mind.model or "",
        fallback_models=definition.mind.fallback_models,
        instructions=definition.mind.instructions,
        mode=definition.policy.mode,
        runs_by_itself=definition.pacing.autonomy.enabled,
        tools=sorted(definition.policy.tools),
        provider_tools=definition.mind.provider_tools,
        verbs=definition.tasks.verbs,
        disabled=definition.policy.disabled,
        sensors=[sensor.name for sensor in definition.pacing.sensors],
        allowed_hosts=definition.policy.allowed_hosts,
        caps=definition.policy.caps,
        on_cap=definition.policy.on_cap,
        max_steps=definition.policy.max_steps,
        timeout=definition.policy.timeout,
    )
