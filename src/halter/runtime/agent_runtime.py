"""An agent that is open in this process: its definition, its tools, its models, its guard."""

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from halter.config.definition import AgentDefinition, redact_definition
from halter.config.run_limits import (
    NO_RUN_SETTINGS,
    RunSettings,
    narrow_policy,
    narrow_settings,
    parse_model,
    parse_session_limits,
    require_tighter,
)
from halter.core.clock import HOUR, SECOND, read_monotonic
from halter.core.errors import ConfigError
from halter.core.ids import Digest, SessionId, WorkerId
from halter.core.messages import Model
from halter.core.ports import Store
from halter.core.tools import Tool
from halter.core.vocabulary import SessionKind
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.loop.turn import ASK_USER, FINAL_ANSWER, YIELD
from halter.models.price_tables import make_prices
from halter.models.wire import WireModel, explain_missing_tools
from halter.policy.evaluation import ResolvedPolicy
from halter.provenance.check import ProvenanceCheck
from halter.redaction.redact import Redactor, select_secrets
from halter.redaction.secrets import Secrets
from halter.redaction.stream_redactor import StreamRedactor
from halter.runtime.assembly.agent_models import AgentModels
from halter.runtime.document_index import Library, read_result_files
from halter.runtime.runtime import DEFAULT_LEASE_DURATION, Runtime
from halter.spec.models import REFLEX, SCRIPTED, BrainSpec, ModelPurpose
from halter.system.folders import FileRefusal, allow_all
from halter.tasks.task_tools import READ_OUTPUT
from halter.tools.answer_form import AnswerForm

NO_SECRETS: Final[frozenset[str]] = frozenset()
LEASE_WAIT_TIMEOUT: Final = DEFAULT_LEASE_DURATION + 5 * SECOND
"""Longest wait for the lease of a session whose owner may have died."""
RESERVED_TOOL_NAMES: Final = (ASK_USER, FINAL_ANSWER, YIELD, READ_OUTPUT)
DEFINITION_TTL: Final = HOUR
"""Time for which a stored definition is reused. The store keeps unreferenced blobs for at least a day."""


class _SharedParts:
    """What all sessions of an open agent share; each part is made again when its inputs change."""

    guard: GuardRuntime | None = None
    guard_parts: tuple[object, ...] = ()
    guard_values: tuple[object, ...] = ()
    environ: tuple[object, Mapping[str, str]] = (None, {})
    definition: tuple[AgentDefinition, Digest, int] | None = None
    bound: "tuple[AgentRuntime, AgentRuntime] | None" = None
    checked: tuple[object, ...] = ()

    def __init__(self) -> None:
        self.plans: dict[tuple[SessionKind, bool], object] = {}
        """Session plans by kind and by whether the session is unattended; see `session_builder.SessionPlan`."""


class AgentRuntime(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """An agent that is open in this process: its definition, its tools, its secrets and its models, over one store.

    Without a model it can only run playbooks. `unavailable_tools` says which tools of its servers cannot be used, and
    why. `folder_digest` is the digest of its folder when it was read. `is_refused` decides which files it must not
    read.

    `brake_type` makes the provenance check of a session; a drill replaces it with a broken one. `answer_form` is the
    form of the agent's answer when another agent calls it. `run` is what a new session starts with.
    """

    app: Runtime
    definition: AgentDefinition
    models: AgentModels
    tools: Mapping[str, Tool]
    secrets: Secrets
    worker: WorkerId = WorkerId("")
    quarantined: frozenset[str] = frozenset()
    unavailable_tools: tuple[str, ...] = ()
    library: Library | None = None
    folder_digest: str = ""
    is_refused: FileRefusal = allow_all
    hold_timeout: int = LEASE_WAIT_TIMEOUT
    rng: random.Random = random.SystemRandom()
    shared: _SharedParts = msgspec.field(default_factory=_SharedParts)
    bound: GuardRuntime | None = None
    brake_type: type[ProvenanceCheck] = ProvenanceCheck
    answer_form: AnswerForm | None = None
    run: RunSettings = NO_RUN_SETTINGS
    sleeps_at_cap: bool = True
    """A session sleeps while the window of a cap is used up. In a program it does so only with `on_cap: wait`."""
    nested_sessions: set[SessionId] = msgspec.field(default_factory=set[SessionId])
    """Sub-sessions that calls of this process run; a dispatcher with the same worker id leaves them alone."""

    @cached_property
    def store(self) -> Store:
        """The store, with retries while it is unavailable."""
        return self.app.patient()

    @property
    def policy(self) -> ResolvedPolicy:
        return self.definition.policy

    @property
    def name(self) -> str:
        return self.definition.policy.name

    def with_policy(self, policy: ResolvedPolicy) -> "AgentRuntime":
        """Return the agent under another policy."""
        return replace(self, definition=replace(self.definition, policy=policy))

    def with_settings(self, settings: BrainSpec) -> "AgentRuntime":
        """Return the agent with other settings of its model."""
        return replace(self, definition=replace(self.definition, model_settings=settings))

    def with_models(self, given: Mapping[str, Model]) -> "AgentRuntime":
        """Return the agent with models of its present settings; given ones replace those of the same name."""
        return replace(self, models=AgentModels(self.app, self.definition, self.secrets, given))

    def run_beside(self, caller: "AgentRuntime") -> "AgentRuntime":
        """Return the agent, run by the worker and on the terms of the agent that calls it."""
        return replace(
            self,
            worker=caller.worker,
            hold_timeout=caller.hold_timeout,
            rng=caller.rng,
            brake_type=caller.brake_type,
            sleeps_at_cap=caller.sleeps_at_cap,
            nested_sessions=caller.nested_sessions,
        )

    def make_context(self, session: str, trigger: str = "") -> SessionContext:
        """Make the guard's context of a session that has no more than the agent's own policy."""
        return SessionContext(
            session=session,
            agent=self.name,
            phase=self.policy.phases[0],
            policy=self.policy,
            policy_digest=self.policy.digest(),
            trigger=trigger,
            quarantined_tools=self.quarantined,
            secrets=self.find_granted_secrets(),
            rate_limits=self.definition.model_settings.rates,
        )

    def find_granted_secrets(self) -> frozenset[str]:
        """Return the names of the secrets that the policy grants and that are set."""
        granted = self.policy.secrets
        return frozenset(granted) & self.secrets.names() if granted else NO_SECRETS

    def require_model(self) -> None:
        """Raise ConfigError if the agent has no usable model, before anything starts."""
        checked = (self.definition, self.tools, self.models)
        if _are_same(self.shared.checked, checked):
            return
        settings = self.definition.model_settings
        if not settings.model:
            raise ConfigError(
                f"{self.name} has no model. Set `model: provider:model` in its agent.yaml, as in "
                "model: anthropic:claude-sonnet-5-5."
            )
        for name in (settings.model, *settings.fallback_models, *settings.model_for.values()):
            self.models.get(name)
        if settings.provider_tools:
            self._require_provider_tools(settings)
        for name in RESERVED_TOOL_NAMES:
            if name in self.tools:
                raise ConfigError(f"The tool name {name} is reserved for a built-in tool. Rename your tool.")
        self.shared.checked = checked

    def _require_provider_tools(self, settings: BrainSpec) -> None:
        for model in map(self.models.get, (settings.model, *settings.fallback_models)):
            is_wire = isinstance(model, WireModel)
            if is_wire and (explanation := explain_missing_tools(model.name, model.wire, settings.provider_tools)):
                raise ConfigError(explanation)

    def model_for(self, purpose: ModelPurpose) -> Model:
        """Return the model that is configured for a purpose, or else the agent's main model."""
        settings = self.definition.model_settings
        return self.models.get(settings.model_for.get(purpose) or settings.model)

    def guard(self) -> GuardRuntime:
        """Return the guard that all sessions of the agent share, so that one query for halts serves them all.

        Reflex and scripted models do not predict effects, unless a model for `simulation` is configured.
        """
        if self.bound is not None:
            return self.bound
        app, shared, settings = self.app, self.shared, self.definition.model_settings
        own_model = "" if settings.model.partition(":")[0] in (REFLEX, SCRIPTED) else settings.model
        simulation_model = settings.model_for.get("simulation") or own_model
        model = self.models.get(simulation_model) if simulation_model else None
        # The raw bytes behind `os.environ`, which decodes at each access: comparing them all is faster than one access.
        raw_environ: Mapping[Any, Any] = getattr(app.environ, "_data", app.environ)
        if raw_environ != shared.environ[0]:
            shared.environ = (dict(raw_environ), select_secrets(app.environ))
        parts = (app, self.policy, self.secrets, model)
        values = (_values(self.secrets), shared.environ[1])
        if shared.guard is None or not _are_same(shared.guard_parts, parts) or shared.guard_values != values:
            shared.guard = make_guard(app, self.policy, self.secrets, model)
            shared.guard_parts, shared.guard_values = parts, values
        return shared.guard

    def bind(self) -> "AgentRuntime":
        """Return the agent for one run. It reads secrets and environment once, now."""
        guard, entry = self.guard(), self.shared.bound
        if entry is None or entry[0] is not self or entry[1].bound is not guard:
            entry = self.shared.bound = (self, replace(self, bound=guard))
        return entry[1]

    async def store_definition(self) -> Digest:
        """Store the agent's definition without secrets and return its digest; all sessions share it."""
        entry, now = self.shared.definition, read_monotonic(self.app.clock)
        if entry is not None and entry[0] is self.definition and 0 <= now - entry[2] < DEFINITION_TTL:
            return entry[1]
        encoded = msgspec.json.encode(redact_definition(self.definition), order="sorted")
        digest = await self.store.put(_redact_secrets(encoded, self.guard().redact))
        self.shared.definition = (self.definition, digest, now)
        return digest


def make_agent_runtime(
    app: Runtime,
    definition: AgentDefinition,
    tools: Mapping[str, Tool],
    secrets: Secrets,
    models: Mapping[str, Model] | None = None,
) -> AgentRuntime:
    """Make an agent of its parts, without a check. `models` replace the configured ones of the same name."""
    agent_models = AgentModels(app, definition, secrets, models)
    return AgentRuntime(app=app, definition=definition, models=agent_models, tools=tools, secrets=secrets)


def _are_same(parts: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether both hold the same objects; equal ones do not count, since comparing them is slow."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def use_model(agent: AgentRuntime, model: str | Model) -> AgentRuntime:
    """Return the agent with another model, and without its fallbacks."""
    name = parse_model(model, "the run") if isinstance(model, str) else str(model.name)
    if not agent.policy.allows_model(name):
        raise ConfigError(
            f"`allowed_models` of {agent.name} does not have {name}. Name another model, or add it to `allowed_models`."
        )
    settings = replace(agent.definition.model_settings, model=name, fallback_models=())
    models = agent.models if isinstance(model, str) else agent.models.with_model(model)
    return replace(agent.with_settings(settings), models=models)


def choose_run_settings(
    agent: AgentRuntime, model: str | Model | None, limits: Mapping[str, Any] | None
) -> AgentRuntime:
    """Return the agent for a run with its own model and limits. Raises ConfigError for what the agent forbids."""
    if model is None and not limits:
        return agent
    run_limits = parse_session_limits(limits or {}, "the run")
    require_tighter(agent.policy, agent.definition.model_settings, run_limits)
    if model is not None:
        agent = use_model(agent, model)
    name = "" if model is None else agent.definition.model_settings.model
    return replace(agent, run=RunSettings(name, run_limits))


def apply_run_settings(agent: AgentRuntime, run: RunSettings) -> AgentRuntime:
    """Return the agent as a session runs it that has started with its own model or limits."""
    if run == NO_RUN_SETTINGS:
        return agent
    if run.model and run.model != agent.definition.model_settings.model:
        agent = use_model(agent, run.model)
    definition = agent.definition
    definition = replace(
        definition,
        policy=narrow_policy(definition.policy, run.limits),
        model_settings=narrow_settings(definition.model_settings, run.limits),
    )
    return replace(agent, definition=definition, run=NO_RUN_SETTINGS)


def make_guard(app: Runtime, policy: ResolvedPolicy, secrets: Secrets, simulates: Model | None = None) -> GuardRuntime:
    """Make a guard. While the store is unavailable, no effect runs, because it could not be recorded."""
    redactor = Redactor(_values(secrets), app.environ)
    guard = GuardRuntime(
        app.patient(),
        app.clock,
        redact=redactor.redact,
        secrets=secrets,
        prices=make_prices(policy, app.prices.tables),
        simulates=simulates,
        stream_mask=partial(StreamRedactor, redactor),
        read_files=read_result_files,
    )
    guard.join_process(app.liveness, app.departures, app.prompts)
    return guard


def _values(secrets: Secrets) -> Mapping[str, str]:
    return {name: secrets.value(name) for name in secrets.names()}


async def store_policy(store: Store, policy: ResolvedPolicy, redact: Callable[[str], str]) -> Digest:
    """Store a policy as the definition of a session that has no model of its own; secrets are redacted."""
    return await store.put(_redact_secrets(policy.canonical(), redact))


def _redact_secrets(encoded: bytes, redact: Callable[[str], str]) -> bytes:
    return msgspec.json.encode(_redact_texts(msgspec.json.decode(encoded), redact), order="sorted")


def _redact_texts(value: Any, redact: Callable[[str], str]) -> Any:
    """Redact every text in a JSON value."""
    match value:
        case str():
            return redact(value)
        case list():
            return [_redact_texts(each, redact) for each in cast("list[Any]", value)]
        case Mapping():
            return {redact(key): _redact_texts(each, redact) for key, each in cast("Mapping[str, Any]", value).items()}
        case _:
            return value
