"""An agent that runs in this process: its models, its guard, and its definition in the store."""

import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, cast

import msgspec

from halter.config.definition import redact_definition
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
from halter.core.usage import ModelName
from halter.core.vocabulary import SessionKind
from halter.guard.guard import GuardRuntime
from halter.loop.turn import ASK_USER, FINAL_ANSWER, YIELD
from halter.models.price_tables import make_prices
from halter.policy.evaluation import ResolvedPolicy
from halter.provenance.check import ProvenanceCheck
from halter.redaction.redact import Redactor, StreamRedactor, select_secrets
from halter.redaction.secrets import Secrets
from halter.runtime.assembly.assembled_agent import AssembledAgent
from halter.runtime.document_index import read_result_files
from halter.runtime.runtime import DEFAULT_LEASE_DURATION, Runtime
from halter.spec.models import REFLEX, SCRIPTED, BrainSpec, ModelPurpose
from halter.tasks.task_tools import READ_OUTPUT
from halter.tools.answer_form import AnswerForm

LEASE_WAIT_TIMEOUT: Final = DEFAULT_LEASE_DURATION + 5 * SECOND
"""Longest wait for the lease of a session whose owner may have died."""
RESERVED_TOOL_NAMES: Final = (ASK_USER, FINAL_ANSWER, YIELD, READ_OUTPUT)
DEFINITION_TTL: Final = HOUR
"""Time for which a stored definition is reused. The store keeps unreferenced blobs for at least a day."""


class Models:
    """The models of one agent, each made once."""

    def __init__(
        self, app: Runtime, agent: AssembledAgent, by_name: dict[str, Model], given: Model | None = None
    ) -> None:
        self._app = app
        self._agent = agent
        self._by_name = by_name
        self._given = given

    def get(self, name: str) -> Model:
        """Return a model, made on first use. Raises ConfigError if its configuration or library is missing."""
        if self._given is not None and name == str(self._given.name):
            return self._given
        if name not in self._by_name:
            self._by_name[name] = self._model(name)
        return self._by_name[name]

    def _model(self, name: str) -> Model:
        agent = self._agent
        provider = ModelName.parse(name).provider
        if provider == SCRIPTED:
            from halter.models.scripted import make_scripted_model

            return make_scripted_model(
                list(agent.model_settings.script), agent.locate_script, self._app.clock, ModelName.parse(name)
            )
        if provider == REFLEX:
            from halter.models.reflex import make_reflex_model

            return make_reflex_model(list(agent.model_settings.reflex), agent.locate_reflex, ModelName.parse(name))
        from halter.models.providers import make_model
        from halter.models.wire import ModelHabits

        settings = agent.model_settings
        habits = ModelHabits(settings.temperature, settings.thinking, settings.native_output)
        return make_model(name, settings.providers, self._key, habits)

    def _key(self, name: str) -> str | None:
        secrets = self._agent.secrets
        return secrets.value(name) if name in secrets.names() else self._app.environ.get(name)

    def with_model(self, model: Model) -> "Models":
        """Return these models with one more, which its owner closes."""
        return Models(self._app, self._agent, self._by_name, model)

    async def close(self) -> None:
        for model in self._by_name.values():
            close = getattr(model, "aclose", None)
            if close is not None:
                await close()


@asynccontextmanager
async def models_of(
    app: Runtime, agent: AssembledAgent, overrides: Mapping[str, Model] | None = None
) -> AsyncGenerator[Models]:
    """Open an agent's models and close them after the block. Models in `overrides` replace those of the same name."""
    models = Models(app, agent, dict(overrides or {}))
    try:
        yield models
    finally:
        await models.close()


class _GuardInputs(NamedTuple):
    """The inputs of a guard. `environ` holds only the variables that may contain a secret."""

    app: Runtime
    policy: ResolvedPolicy
    secrets: Secrets
    simulates: Model | None
    hidden: Mapping[str, str]
    environ: Mapping[str, str]

    def matches(self, other: "_GuardInputs") -> bool:
        """Return true if a guard made from one also serves the other."""
        app, policy, secrets, simulates, *values = other
        same = self.app is app and self.policy is policy and self.secrets is secrets and self.simulates is simulates
        return same and [self.hidden, self.environ] == values


class _Caches:
    """Objects that all sessions of an agent share; they are rebuilt when their inputs change."""

    guard: tuple[_GuardInputs, GuardRuntime] | None = None
    environ: tuple[object, Mapping[str, str]] = (None, {})
    definition: tuple[AssembledAgent, Digest, int] | None = None
    bound: "tuple[AgentContext, AgentContext] | None" = None
    thinks: tuple[AssembledAgent, Models] | None = None

    def __init__(self) -> None:
        self.plans: dict[tuple[SessionKind, bool], object] = {}
        """Session plans by kind and by whether the session is unattended; see `session_builder.SessionPlan`."""


class AgentContext(msgspec.Struct, frozen=True, dict=True):
    """An agent with its models, running under one worker id of this process.

    `brake_type` makes the provenance check of a session; a drill replaces it with a broken one. `answer_form` is the
    form of the agent's answer when another agent calls it. `run` is what a new session starts with.
    """

    app: Runtime
    agent: AssembledAgent
    models: Models
    worker: WorkerId
    hold_timeout: int = LEASE_WAIT_TIMEOUT
    rng: random.Random = random.SystemRandom()
    caches: _Caches = msgspec.field(default_factory=_Caches)
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

    def require_model(self) -> None:
        """Raise ConfigError if the agent has no usable model, before anything starts."""
        if self.caches.thinks == (self.agent, self.models):
            return
        settings = self.agent.model_settings
        if not settings.model:
            raise ConfigError(
                f"{self.agent.policy.name} has no model. Set `model: provider:model` in its agent.yaml, as in "
                "model: anthropic:claude-sonnet-5-5."
            )
        for name in (settings.model, *settings.fallback_models, *settings.model_for.values()):
            self.models.get(name)
        if settings.provider_tools:
            self._require_provider_tools(settings)
        for name in RESERVED_TOOL_NAMES:
            if name in self.agent.tools:
                raise ConfigError(f"The tool name {name} is reserved for a built-in tool. Rename your tool.")
        self.caches.thinks = (self.agent, self.models)

    def _require_provider_tools(self, settings: BrainSpec) -> None:
        from halter.models.wire import WireModel, explain_missing_tools

        for model in map(self.models.get, (settings.model, *settings.fallback_models)):
            is_wire = isinstance(model, WireModel)
            if is_wire and (explanation := explain_missing_tools(model.name, model.wire, settings.provider_tools)):
                raise ConfigError(explanation)

    def model_for(self, purpose: ModelPurpose) -> Model:
        """Return the model that is configured for a purpose, or else the agent's main model."""
        settings = self.agent.model_settings
        return self.models.get(settings.model_for.get(purpose) or settings.model)

    def guard(self) -> GuardRuntime:
        """Return the guard that all sessions of the agent share, so that one query for halts serves them all.

        Reflex and scripted models do not predict effects, unless a model for `simulation` is configured.
        """
        if self.bound is not None:
            return self.bound
        app, agent, settings = self.app, self.agent, self.agent.model_settings
        own_model = "" if settings.model.partition(":")[0] in (REFLEX, SCRIPTED) else settings.model
        simulation_model = settings.model_for.get("simulation") or own_model
        model = self.models.get(simulation_model) if simulation_model else None
        # The raw bytes behind `os.environ`, which decodes at each access: comparing them all is faster than one access.
        raw_environ: Mapping[Any, Any] = getattr(app.environ, "_data", app.environ)
        if raw_environ != self.caches.environ[0]:
            self.caches.environ = (dict(raw_environ), select_secrets(app.environ))
        inputs = _GuardInputs(app, agent.policy, agent.secrets, model, _values(agent.secrets), self.caches.environ[1])
        if self.caches.guard is None or not self.caches.guard[0].matches(inputs):
            self.caches.guard = (inputs, make_guard(app, agent.policy, agent.secrets, model))
        return self.caches.guard[1]

    def bind(self) -> "AgentContext":
        """Return the context for one run. It reads secrets and environment once, now."""
        guard, entry = self.guard(), self.caches.bound
        if entry is None or entry[0] is not self or entry[1].bound is not guard:
            entry = self.caches.bound = (self, msgspec.structs.replace(self, bound=guard))
        return entry[1]

    async def definition(self) -> Digest:
        """Store the agent's definition without secrets and return its digest; all sessions share it."""
        entry, now = self.caches.definition, read_monotonic(self.app.clock)
        if entry is not None and entry[0] is self.agent and 0 <= now - entry[2] < DEFINITION_TTL:
            return entry[1]
        encoded = msgspec.json.encode(redact_definition(self.agent), order="sorted")
        digest = await self.store.put(_redact_secrets(encoded, self.guard().redact))
        self.caches.definition = (self.agent, digest, now)
        return digest


def use_model(context: AgentContext, model: str | Model) -> AgentContext:
    """Return a context in which the agent runs with another model, and without its fallbacks."""
    name = parse_model(model, "the run") if isinstance(model, str) else str(model.name)
    policy = context.agent.policy
    if not policy.allows_model(name):
        raise ConfigError(
            f"`allowed_models` of {policy.name} does not have {name}. Name another model, or add it to "
            "`allowed_models`."
        )
    settings = msgspec.structs.replace(context.agent.model_settings, model=name, fallback_models=())
    agent = msgspec.structs.replace(context.agent, model_settings=settings)
    models = context.models if isinstance(model, str) else context.models.with_model(model)
    return msgspec.structs.replace(context, agent=agent, models=models)


def choose_run_settings(
    context: AgentContext, model: str | Model | None, limits: Mapping[str, Any] | None
) -> AgentContext:
    """Return the context of a run with its own model and limits. Raises ConfigError for what the agent forbids."""
    if model is None and not limits:
        return context
    run_limits = parse_session_limits(limits or {}, "the run")
    require_tighter(context.agent.policy, context.agent.model_settings, run_limits)
    if model is not None:
        context = use_model(context, model)
    name = "" if model is None else context.agent.model_settings.model
    return msgspec.structs.replace(context, run=RunSettings(name, run_limits))


def apply_run_settings(context: AgentContext, run: RunSettings) -> AgentContext:
    """Return the context in which a session runs that has started with its own model or limits."""
    if run == NO_RUN_SETTINGS:
        return context
    if run.model and run.model != context.agent.model_settings.model:
        context = use_model(context, run.model)
    agent = msgspec.structs.replace(
        context.agent,
        policy=narrow_policy(context.agent.policy, run.limits),
        model_settings=narrow_settings(context.agent.model_settings, run.limits),
    )
    return msgspec.structs.replace(context, agent=agent, run=NO_RUN_SETTINGS)


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
