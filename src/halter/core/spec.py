"""What `halter.yaml` and `agent.yaml` say, as frozen values, and what both come to for one agent.

A field is a key of the file, under the same name. UNSET means that nobody wrote the key: whoever resolves the two files
then takes the other file's word, or the default. The words of people (`30m`, dollars, `none`, `20/hour`) are read into
whole numbers; their forms stand in `written`, and the limits in `bounds`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.bounds import AgentBounds, FleetLimits, Guardrails, Limits, ModelRate, OnCap
from halter.core.clock import HOUR
from halter.core.ids import Digest
from halter.core.limits import Caps
from halter.core.mind import ModelPurpose, ToolCalls, WireFormat
from halter.core.pacing import Autonomy, HotState, Sensor
from halter.core.tasks import Anonymize, Collection, Notify, Review, Schedule, Verbs, Watch, Webhook
from halter.core.tools import LEVELS, Level
from halter.core.usage import Price
from halter.core.written import (
    Duration,
    Host,
    Lasting,
    ModelPattern,
    Name,
    OneModel,
    Rate,
    SecretName,
    SecretReference,
    Spec,
    Url,
    Zone,
)

Mode = Literal["ASSIST", "SEMI", "FULL"]
"""How much an agent may do without asking, the most careful first."""
MODES: Final[tuple[Mode, ...]] = ("ASSIST", "SEMI", "FULL")

Approval = Literal["always", "never"]
Simulate = Literal["never", "asked", "always"]
SIMULATES: Final[tuple[Simulate, ...]] = ("never", "asked", "always")

RATES: Final[Mapping[Level, int]] = MappingProxyType({"PRIVILEGED": 20})
"""Attempts per hour where nobody set a rate; the other levels have none."""
SIMULATED: Final[Mapping[Level, Simulate]] = MappingProxyType({"RESTRICTED": "asked", "PRIVILEGED": "asked"})
"""When a model predicts the outcome where nobody said so; the other levels never."""
APPROVAL_EXPIRY: Final = 24 * HOUR


class LevelRule(Spec, frozen=True):
    """What differs from the usual for all tools of a level."""

    approval: Annotated[Approval, Meta(description="Whether a person is asked, whatever the mode.")] | UnsetType = UNSET
    rate: Annotated[Rate, Meta(description="How often each tool may be tried in a sliding hour.")] | UnsetType = UNSET
    simulate: Annotated[Simulate, Meta(description="When a model predicts the outcome first.")] | UnsetType = UNSET


class ToolRule(LevelRule, frozen=True):
    """What differs from the usual for one tool."""

    level: Annotated[Level, Meta(description="How dangerous the tool is taken to be.")] | UnsetType = UNSET


class Policy(Spec, frozen=True):
    """What needs a person, how often something may be tried, and what may not be used at all."""

    levels: Annotated[Mapping[Level, LevelRule], Meta(description="Rules for all tools of a level.")] = {}
    tools: Annotated[Mapping[str, ToolRule], Meta(description="Rules for single tools, by name.")] = {}
    disabled: Annotated[tuple[str, ...], Meta(description="Tools that nobody may use.")] = ()
    approval_expiry: Annotated[Duration, Meta(description="How long an approval may be waited for.")] | UnsetType = (
        UNSET
    )


class ModelSpec(Spec, frozen=True):
    """What is said of one model."""

    price: Annotated[Price | Literal["free"], Meta(description="Dollars per million tokens, or `free`.")]


class ProviderSpec(Spec, frozen=True):
    """Where the models of a provider are reached, and with which key."""

    HIDDEN: ClassVar[bool] = True

    wire: Annotated[WireFormat, Meta(description="The protocol that the endpoint speaks.")] | UnsetType = UNSET
    base_url: (
        Annotated[Url, Meta(description="The address of the endpoint; a known provider's own, if not given.")]
        | UnsetType
    ) = UNSET
    api_key: (
        Annotated[SecretReference, Meta(description="The key, as `${secret:NAME}` and never in plain text.")]
        | UnsetType
    ) = UNSET
    bills_errors: (
        Annotated[bool, Meta(description="Whether it may charge for an answer with an error status (4xx or 5xx).")]
        | UnsetType
    ) = UNSET


class ShellBounds(Spec, frozen=True):
    """What the shell of any agent may do."""

    sandbox: Annotated[bool, Meta(description="`false` allows agents to run commands without a sandbox.")] = True
    network: Annotated[bool, Meta(description="Whether commands may reach the network.")] = False


class FleetSpec(Spec, frozen=True):
    """`halter.yaml`: what holds for all agents on one store. An agent can only tighten it."""

    zone: Annotated[Zone, Meta(description="The time zone in which days and months of caps begin.")] = "UTC"
    mode: Annotated[Mode, Meta(description="How much agents may do without asking.")] = "SEMI"
    observe: Annotated[bool, Meta(description="Record what would have been refused, and let it pass.")] = False
    limits: Annotated[FleetLimits, Meta(description="The caps of the whole fleet.")] = FleetLimits()
    agents: Annotated[AgentBounds, Meta(description="The most that any agent may have.")] = AgentBounds()
    policy: Annotated[Policy, Meta(description="Rules for levels and tools.")] = Policy()
    allowed_models: (
        Annotated[tuple[ModelPattern, ...], Meta(description="The models that may be asked; all, if not given.")]
        | UnsetType
    ) = UNSET
    allowed_hosts: (
        Annotated[tuple[Host, ...], Meta(description="The hosts that may be reached; all public ones, if not given.")]
        | UnsetType
    ) = UNSET
    allowed_secrets: (
        Annotated[tuple[SecretName, ...], Meta(description="The secrets that agents may name; all, if not given.")]
        | UnsetType
    ) = UNSET
    models: Annotated[Mapping[ModelPattern, ModelSpec], Meta(description="Prices, by `provider:model`.")] = {}
    providers: Annotated[Mapping[Name, ProviderSpec], Meta(description="Where models are reached, by provider.")] = {}
    rates: Annotated[
        Mapping[ModelPattern, ModelRate],
        Meta(description="How fast models may be asked, by `provider:model`, or `provider:*` for all of a provider."),
    ] = {}
    shell: Annotated[ShellBounds, Meta(description="What the shell of any agent may do.")] = ShellBounds()
    retention: (
        Annotated[Lasting, Meta(description="After how long the words of ended sessions are erased, or `none`.")]
        | UnsetType
    ) = UNSET
    notify: Annotated[Notify, Meta(description="Whom all agents tell what, beside their own channels.")] = Notify()


class FilesSpec(Spec, frozen=True):
    """The built-in tools that read and write files below a folder."""

    root: Annotated[str, Meta(min_length=1, description="The folder, seen from the agent's own.")]


class HttpSpec(Spec, frozen=True):
    """The built-in tools that fetch from the web."""

    hosts: (
        Annotated[tuple[Host, ...], Meta(description="The hosts that may be reached; the fleet's, if not given.")]
        | UnsetType
    ) = UNSET


class ShellSpec(Spec, frozen=True):
    """The built-in tool that runs commands."""

    root: Annotated[str, Meta(min_length=1, description="The folder that commands run in, seen from the agent's own.")]
    sandbox: Annotated[bool, Meta(description="`false` runs commands without a sandbox; the fleet must allow it.")] = (
        True
    )
    network: Annotated[bool, Meta(description="Whether commands may reach the network.")] = False


class ToolsSpec(Spec, frozen=True):
    """Which tools an agent has."""

    files: FilesSpec | UnsetType = UNSET
    http: HttpSpec | UnsetType = UNSET
    shell: ShellSpec | UnsetType = UNSET
    own: (
        Annotated[tuple[str, ...], Meta(description="Which tools of `tools.py` to use; all, if not given.")] | UnsetType
    ) = UNSET


Grants = tuple[str, ...] | Literal["all"]
Walk = Annotated[Mapping[Name, Grants], Meta(min_length=1)] | Literal["work", "review"]
"""Phases as they are written out, or the name of a walk that is known: `work` is one phase with all tools."""
Rules = tuple[Mapping[str, Any], ...]


class AgentSpec(Spec, frozen=True):
    """`agent.yaml`: one agent, what it may do and how it thinks."""

    name: Annotated[Name, Meta(description="The agent's name.")]
    mode: Annotated[Mode, Meta(description="How much the agent may do without asking.")] | UnsetType = UNSET
    observe: Annotated[bool, Meta(description="Record what would have been refused, and let it pass.")] | UnsetType = (
        UNSET
    )
    model: Annotated[OneModel, Meta(description="The model that thinks for it.")] | UnsetType = UNSET
    fallback_models: Annotated[
        tuple[OneModel, ...], Meta(description="Models to turn to, in order, when one does not answer.")
    ] = ()
    model_for: Annotated[Mapping[ModelPurpose, OneModel], Meta(description="Other models for single purposes.")] = {}
    providers: Annotated[Mapping[Name, ProviderSpec], Meta(description="Where models are reached, by provider.")] = {}
    instructions: Annotated[str, Meta(description="What the model is told first; `AGENTS.md` follows.")] = ""
    tool_calls: Annotated[ToolCalls, Meta(description="How the model asks for calls.")] = "native"
    temperature: (
        Annotated[float, Meta(ge=0, le=2, description="How freely the model chooses its words.")] | UnsetType
    ) = UNSET
    script: (
        Annotated[str, Meta(min_length=1, description="The file with the replies of the model `scripted`.")] | UnsetType
    ) = UNSET
    reflex: (
        Annotated[Rules | str, Meta(description="The rules of the model `reflex`, or the file that holds them.")]
        | UnsetType
    ) = UNSET
    limits: Annotated[Limits, Meta(description="Caps and other limits.")] = Limits()
    guardrails: Annotated[Guardrails, Meta(description="Another place for four of the limits.")] = Guardrails()
    policy: Annotated[Policy, Meta(description="Stricter rules for levels and tools.")] = Policy()
    tools: Annotated[ToolsSpec, Meta(description="Which tools the agent has.")] = ToolsSpec()
    phases: (
        Annotated[Walk, Meta(description="The walk of a task session, with the tools of each phase.")] | UnsetType
    ) = UNSET
    allowed_models: (
        Annotated[
            tuple[ModelPattern, ...], Meta(description="The models that may be asked; the fleet's, if not given.")
        ]
        | UnsetType
    ) = UNSET
    secrets: Annotated[tuple[SecretName, ...], Meta(description="The secrets that calls may name.")] = ()
    autonomy: Annotated[Autonomy, Meta(description="How the agent runs by itself.")] = Autonomy()
    hot_state: Annotated[HotState, Meta(description="The facts that the model sees every turn.")] = HotState()
    sensors: Annotated[tuple[Sensor, ...], Meta(description="What keeps those facts fresh.")] = ()
    schedules: Annotated[tuple[Schedule, ...], Meta(description="What starts sessions at certain times.")] = ()
    watches: Annotated[tuple[Watch, ...], Meta(description="What starts sessions for new documents.")] = ()
    webhooks: Annotated[tuple[Webhook, ...], Meta(description="What starts sessions by HTTP.")] = ()
    collections: Annotated[Mapping[Name, Collection], Meta(description="Documents that may be read, by name.")] = {}
    verbs: Annotated[
        Verbs, Meta(description="What its sessions can do beside its tools; more follow from `phases` and documents.")
    ] = ()
    review: Annotated[Review, Meta(description="Who looks at findings before they are delivered.")] = Review()
    notify: Annotated[Notify, Meta(description="Whom the agent tells what.")] = Notify()
    anonymize: (
        Annotated[Anonymize | bool, Meta(description="What is hidden from models that run elsewhere.")] | UnsetType
    ) = UNSET
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="How many of its task sessions may be awake at once, on all machines; any number, "
                "if not given.",
            ),
        ]
        | UnsetType
    ) = UNSET
    idle_halt_minutes: Annotated[
        float, Meta(ge=0, le=100_000, description="So long a session may do nothing before it is paused; 0 for never.")
    ] = 5


class Phase(msgspec.Struct, frozen=True):
    """A part of a session's walk, and the tools that are granted there; None grants all that the agent has."""

    name: str
    grants: tuple[str, ...] | None

    def grants_tool(self, tool: str) -> bool:
        """Tell whether a tool may be used in this phase."""
        return self.grants is None or tool in self.grants


class Rule(msgspec.Struct, frozen=True):
    """What holds for one tool. Without an approval of its own, the mode and the level decide."""

    level: Level
    approval: Approval | None
    rate: int | None
    simulate: Simulate


class Resolved(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that the guard has to know to judge what an agent does.

    No field has a default, so that the digest covers all of them. `policies` are the fleet's, of which there are two
    where a store's policy and a file hold together, and last the agent's: a rule
    for a tool in one must not hide a stricter one for its level in the other, so they are put together per tool, and
    kept in the `__dict__`, which is no part of the policy.
    """

    name: str
    mode: Mode
    observe: bool
    caps: Caps
    on_cap: OnCap
    max_steps: int
    timeout: int
    min_output_tokens: int
    reserve_tokens: int
    reserve_cost_fraction: float
    policies: tuple[Policy, ...]
    disabled: tuple[str, ...]
    approval_expiry: int
    tools: ToolsSpec
    phases: tuple[Phase, ...]
    allowed_models: tuple[str, ...] | None
    allowed_hosts: tuple[str, ...] | None
    secrets: tuple[str, ...]
    prices: Mapping[str, Price]

    def canonical(self) -> bytes:
        """Write it down in the one way that equal policies have in common."""
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> Digest:
        """Name this policy: a decision made under another one does not count."""
        return Digest(hashlib.sha256(self.canonical()).hexdigest())

    def rule(self, tool: str, declared: Level) -> Rule:
        """Put together what both files say of a tool that declares itself to be of some level.

        An agent that takes a tool for more dangerous must not fall under laxer rules by it: so what the fleet says of
        the level that the tool has without the agent's word counts as well.
        """
        known: dict[tuple[str, Level], Rule] = vars(self).setdefault("rules", {})
        found = known.get((tool, declared))
        if found is None:
            found = known[tool, declared] = self._rule(tool, declared)
        return found

    def _rule(self, tool: str, declared: Level) -> Rule:
        *fleets, agent = self.policies
        return _strictest([self._below(fleet, agent, tool, declared) for fleet in fleets])

    def _below(self, fleet: Policy, agent: Policy, tool: str, declared: Level) -> Rule:
        base = _placed(fleet, tool, declared)
        level = LEVELS[max(LEVELS.index(base), LEVELS.index(_placed(agent, tool, base)))]
        both: tuple[Level, Level] = (base, level)
        ours: list[tuple[Level, tuple[LevelRule, ...]]] = [(each, _cells(fleet, tool, each)) for each in both]
        theirs = _cells(agent, tool, level)
        rates = [_first(cells, "rate", RATES.get(each)) for each, cells in ours]
        simulates = [_first(cells, "simulate", SIMULATED.get(each, "never")) for each, cells in ours]
        return Rule(
            level=level,
            approval=_approval([_first(cells, "approval") for _, cells in ours], _first(theirs, "approval")),
            rate=min((rate for rate in (*rates, *_said(theirs, "rate")) if rate is not None), default=None),
            simulate=max((*simulates, *_said(theirs, "simulate")), key=SIMULATES.index),
        )

    def allows_model(self, model: str) -> bool:
        """Tell whether a `provider:model` may be asked."""
        return self.allowed_models is None or covered(model, self.allowed_models)


def _strictest(rules: Sequence[Rule]) -> Rule:
    """Take of each key the strictest word."""
    return Rule(
        level=LEVELS[max(LEVELS.index(rule.level) for rule in rules)],
        approval=_approval([rule.approval for rule in rules], None),
        rate=min((rule.rate for rule in rules if rule.rate is not None), default=None),
        simulate=SIMULATES[max(SIMULATES.index(rule.simulate) for rule in rules)],
    )


def _placed(policy: Policy, tool: str, otherwise: Level) -> Level:
    """Tell the level that a file gives a tool."""
    rule = policy.tools.get(tool)
    return otherwise if rule is None or rule.level is UNSET else rule.level


def _cells(policy: Policy, tool: str, level: Level) -> tuple[LevelRule, ...]:
    """List the rules of one file that speak of a tool, the nearest first."""
    return tuple(rule for rule in (policy.tools.get(tool), policy.levels.get(level)) if rule is not None)


def _said(rules: Iterable[LevelRule], key: str) -> tuple[Any, ...]:
    """List what rules say under a key."""
    return tuple(word for rule in rules if (word := getattr(rule, key)) is not UNSET)


def _first(rules: Iterable[LevelRule], key: str, otherwise: Any = None) -> Any:
    """Tell what the nearest rule that says something says under a key."""
    return next(iter(_said(rules, key)), otherwise)


def _approval(ours: Sequence[Approval | None], theirs: Approval | None) -> Approval | None:
    """Ask always if anyone says so, never only if the fleet says so throughout."""
    if "always" in (*ours, theirs):
        return "always"
    return "never" if all(word == "never" for word in ours) else None


def covered(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name, or all that a pattern stands for, is among some patterns."""
    return any(_covers(pattern, name) for pattern in patterns)


def _covers(pattern: str, name: str) -> bool:
    """A `*` stands for any beginning or any end, and a pattern is covered as if its own `*` were a letter."""
    if pattern.startswith("*"):
        return name.endswith(pattern[1:]) and (len(name) > len(pattern) - 1)
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
