"""The keys of `agent.yaml`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE, SECOND
from halter.core.tools import (
    ProviderToolName,
)
from halter.spec.autonomy import Autonomy, HotStateSpec
from halter.spec.channels import Notify
from halter.spec.forms import (
    Dollars,
    Duration,
    Host,
    ModelPattern,
    Name,
    OneModel,
    SecretName,
    Spec,
    Url,
)
from halter.spec.limits import Guardrails, Limits
from halter.spec.models import (
    ModelPurpose,
    ProviderSpec,
    ProviderToolSpec,
    ThinkingEffort,
    ToolCalls,
)
from halter.spec.policy import Mode, Policy
from halter.spec.sensors import AnySensor
from halter.spec.tasks import Anonymize, Collection, Review, SubAgent, Verbs
from halter.spec.triggers import Schedule, Watch, Webhook


class FilesSpec(Spec, frozen=True):
    """The built-in tools that read and write files in a folder."""

    root: Annotated[str, Meta(min_length=1, description="Folder, relative to the agent's folder.")]


class HttpSpec(Spec, frozen=True):
    """The built-in tools that fetch from the web."""

    hosts: (
        Annotated[tuple[Host, ...], Meta(description="Hosts that may be reached; by default the fleet's.")] | UnsetType
    ) = UNSET


class ShellSpec(Spec, frozen=True):
    """The built-in tool that runs commands."""

    root: Annotated[str, Meta(min_length=1, description="Working folder of commands, relative to the agent's folder.")]
    sandbox: Annotated[bool, Meta(description="`false` runs commands without a sandbox, if the fleet allows it.")] = (
        True
    )
    network: Annotated[bool, Meta(description="Allow commands to use the network.")] = False


class ToolsSpec(Spec, frozen=True):
    """The tools of an agent."""

    files: FilesSpec | UnsetType = UNSET
    http: HttpSpec | UnsetType = UNSET
    shell: ShellSpec | UnsetType = UNSET
    own: Annotated[tuple[str, ...], Meta(description="Tools of `tools.py` to use; by default all.")] | UnsetType = UNSET


Grants = tuple[str, ...] | Literal["all"]
PhasePlan = Annotated[Mapping[Name, Grants], Meta(min_length=1)] | Literal["work", "review"]
"""Phases with their grants, or the name of a built-in plan: `work` is one phase with all tools."""
Rules = tuple[Mapping[str, Any], ...]


class GatewaySpec(Spec, frozen=True):
    """The settings for calls through `halter gateway`."""

    wait: Annotated[Duration, Meta(description="Time that a call waits for a person's decision.")] = 50 * SECOND
    timeout: Annotated[Duration, Meta(description="Time limit for a call of a server's tool.")] = 10 * MINUTE
    dashboard: (
        Annotated[
            Url, Meta(description="URL of the dashboard; clients that can open URLs are sent to the decision's page.")
        ]
        | UnsetType
    ) = UNSET
    trust_client_elicitation: Annotated[
        bool, Meta(description="Accept a form that the client reports as accepted as a person's decision.")
    ] = False
    sampling: Annotated[bool, Meta(description="Allow a server to use the agent's model during a call (sampling).")] = (
        False
    )
    prices: Annotated[
        Mapping[str, Dollars], Meta(description="Cost of each call of a tool, by the tool's full name.")
    ] = {}


class AgentSpec(Spec, frozen=True):
    """`agent.yaml`: one agent with its policy, models and triggers."""

    name: Annotated[Name, Meta(description="Name of the agent.")]
    mode: Annotated[Mode, Meta(description="How much the agent does without approval.")] | UnsetType = UNSET
    observe: Annotated[bool, Meta(description="Record refusals instead of enforcing them.")] | UnsetType = UNSET
    model: Annotated[OneModel, Meta(description="Model of the agent.")] | UnsetType = UNSET
    fallback_models: Annotated[
        tuple[OneModel, ...], Meta(description="Models to use, in order, if the model does not answer.")
    ] = ()
    model_for: Annotated[Mapping[ModelPurpose, OneModel], Meta(description="Other models for single purposes.")] = {}
    providers: Annotated[Mapping[Name, ProviderSpec], Meta(description="Endpoints of models, by provider.")] = {}
    instructions: Annotated[str, Meta(description="System prompt; `AGENTS.md` and `CLAUDE.md` follow.")] = ""
    tool_calls: Annotated[ToolCalls, Meta(description="How the model requests calls.")] = "native"
    thinking: (
        Annotated[
            ThinkingEffort,
            Meta(description="How much the model thinks before it answers; by default the model's own setting."),
        ]
        | UnsetType
    ) = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2, description="Sampling temperature.")] | UnsetType = UNSET
    provider_tools: Annotated[
        Mapping[ProviderToolName, ProviderToolSpec],
        Meta(description="Tools that the provider runs; the guard does not see their calls."),
    ] = {}
    script: (
        Annotated[str, Meta(min_length=1, description="File with the replies of the model `scripted`.")] | UnsetType
    ) = UNSET
    reflex: (
        Annotated[Rules | str, Meta(description="Rules of the model `reflex`, or the file that contains them.")]
        | UnsetType
    ) = UNSET
    limits: Annotated[Limits, Meta(description="Caps and other limits.")] = Limits()
    guardrails: Annotated[
        Guardrails, Meta(description="Former name of four of the `limits`.", extra={"deprecated": True})
    ] = Guardrails()
    policy: Annotated[Policy, Meta(description="Stricter rules for levels and tools.")] = Policy()
    tools: Annotated[ToolsSpec, Meta(description="Tools of the agent.")] = ToolsSpec()
    phases: (
        Annotated[PhasePlan, Meta(description="Phases of a task session, with the tools of each phase.")] | UnsetType
    ) = UNSET
    allowed_models: (
        Annotated[tuple[ModelPattern, ...], Meta(description="Models that may be used; by default the fleet's.")]
        | UnsetType
    ) = UNSET
    secrets: Annotated[tuple[SecretName, ...], Meta(description="Secrets that calls may name.")] = ()
    autonomy: Annotated[Autonomy, Meta(description="How the agent runs unattended.")] = Autonomy()
    hot_state: Annotated[HotStateSpec, Meta(description="Facts that the model sees every turn.")] = HotStateSpec()
    sensors: Annotated[tuple[AnySensor, ...], Meta(description="Sensors that update the hot state.")] = ()
    heartbeat: (
        Annotated[
            Duration,
            Meta(description="Interval of a session that checks for work in the active hours; short for a schedule."),
        ]
        | UnsetType
    ) = UNSET
    schedules: Annotated[tuple[Schedule, ...], Meta(description="Schedules that start sessions by time.")] = ()
    watches: Annotated[tuple[Watch, ...], Meta(description="Watches that start sessions for new documents.")] = ()
    webhooks: Annotated[tuple[Webhook, ...], Meta(description="Webhooks that start sessions by HTTP.")] = ()
    collections: Annotated[
        Mapping[Name, Collection], Meta(description="Document collections that may be read, by name.")
    ] = {}
    agents: Annotated[tuple[SubAgent, ...], Meta(description="Agents in sibling folders that the model can call.")] = ()
    verbs: Annotated[Verbs, Meta(description="Built-in tools of its sessions; `phases` and documents add more.")] = ()
    review: Annotated[Review, Meta(description="Review of findings before delivery.")] = Review()
    notify: Annotated[Notify, Meta(description="Notifications of the agent.")] = Notify()
    anonymize: (
        Annotated[Anonymize | bool, Meta(description="Values that are hidden from remote models.")] | UnsetType
    ) = UNSET
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Maximum number of its task sessions awake at the same time, on all machines; "
                "by default unbounded.",
            ),
        ]
        | UnsetType
    ) = UNSET
    gateway: Annotated[GatewaySpec, Meta(description="Settings for calls through `halter gateway`.")] = GatewaySpec()
    idle_halt_minutes: Annotated[
        float,
        Meta(ge=0, le=100_000, description="Minutes without activity after which a session is paused; 0 disables."),
    ] = 5


class Phase(msgspec.Struct, frozen=True):
    """A phase of a session and the tools granted in it; None grants all tools of the agent."""

    name: str
    grants: tuple[str, ...] | None

    def grants_tool(self, tool: str) -> bool:
        return self.grants is None or tool in self.grants
