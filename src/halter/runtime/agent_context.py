"""An agent at work in this process: its models, its guard, and its definition in the store."""

import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, cast

import msgspec

from halter.config.resolve import redact_definition
from halter.core.agent_spec import REFLEX, SCRIPTED, BrainSpec, ModelPurpose
from halter.core.clock import HOUR, SECOND
from halter.core.errors import ConfigError
from halter.core.ids import Digest, WorkerId
from halter.core.messages import Model
from halter.core.ports import Store
from halter.core.spec import ResolvedPolicy
from halter.core.usage import ModelName
from halter.core.vocabulary import SessionKind
from halter.guard.brake import SessionBrake
from halter.guard.guard import GuardRuntime
from halter.loop.decide import ASK_USER, FINAL_ANSWER, YIELD
from halter.models.providers import Prices
from halter.redaction.redact import Redactor, StreamRedactor, select_secrets
from halter.redaction.secrets import Secrets
from halter.runtime.assemble import AssembledAgent
from halter.runtime.runtime import DEFAULT_LEASE_DURATION, Runtime
from halter.tasks.task_tools import READ_OUTPUT
from halter.tools.answer_form import AnswerForm

PATIENCE: Final = DEFAULT_LEASE_DURATION + 5 * SECOND
"""How long to wait for the lease of a session whose owner may have died."""
VERBS: Final = (ASK_USER, FINAL_ANSWER, YIELD, READ_OUTPUT)
GOOD_FOR: Final = HOUR
"""How long a stored definition is reused. The store keeps unreferenced blobs for at least a day."""


class Models:
    """The models of one agent, each made once."""

    def __init__(self, app: Runtime, agent: AssembledAgent, given: Mapping[str, Model]) -> None:
        self._app = app
        self._agent = agent
        self._by_name: dict[str, Model] = dict(given)

    def get(self, name: str) -> Model:
        """Returns a model, made on first use. Raises ConfigError if something is missing."""
        if name not in self._by_name:
            self._by_name[name] = self._model(name)
        return self._by_name[name]

    def _model(self, name: str) -> Model:
        agent = self._agent
        provider = ModelName.parse(name).provider
        if provider == SCRIPTED:
            from halter.models.scripted import make_scripted_model

            return make_scripted_model(
                list(agent.model_settings.script), agent.script_at, self._app.clock, ModelName.parse(name)
            )
        if provider == REFLEX:
            from halter.models.reflex import make_reflex_model

            return make_reflex_model(list(agent.model_settings.reflex), agent.reflex_at, ModelName.parse(name))
        from halter.models.providers import make_model
        from halter.models.wire import ModelHabits

        mind = agent.model_settings
        habits = ModelHabits(mind.temperature, mind.thinking, mind.native_output)
        return make_model(name, mind.providers, self._key, habits)

    def _key(self, name: str) -> str | None:
        secrets = self._agent.secrets
        return secrets.value(name) if name in secrets.names() else self._app.environ.get(name)

    async def close(self) -> None:
        for model in self._by_name.values():
            close = getattr(model, "aclose", None)
            if close is not None:
                await close()


@asynccontextmanager
async def models_of(
    app: Runtime, agent: AssembledAgent, given: Mapping[str, Model] | None = None
) -> AsyncGenerator[Models]:
    """Opens an agent's models; those that are `given`, by name, are used as they are."""
    models = Models(app, agent, given or {})
    try:
        yield models
    finally:
        await models.close()


class _GuardInputs(NamedTuple):
    """What a guard was made of; of the environment, what may hold a secret."""

    app: Runtime
    policy: ResolvedPolicy
    secrets: Secrets
    simulates: Model | None
    hidden: Mapping[str, str]
    environ: Mapping[str, str]

    def matches(self, other: "_GuardInputs") -> bool:
        """Whether a guard made of one serves the other."""
        app, policy, secrets, simulates, *values = other
        same = self.app is app and self.policy is policy and self.secrets is secrets and self.simulates is simulates
        return same and [self.hidden, self.environ] == values


class _Caches:
    """What is made once for all sessions of an agent, and again when its inputs change."""

    guard: tuple[_GuardInputs, GuardRuntime] | None = None
    environ: tuple[object, Mapping[str, str]] = (None, {})
    definition: tuple[AssembledAgent, Digest, int] | None = None
    bound: "tuple[AgentContext, AgentContext] | None" = None
    thinks: tuple[AssembledAgent, Models] | None = None

    def __init__(self) -> None:
        self.plans: dict[tuple[SessionKind, bool], object] = {}
        """How sessions of a kind are built, attended by a person or not; see `session_builder`."""


class AgentContext(msgspec.Struct, frozen=True, dict=True):
    """An agent with its models, at work under one worker id of this process.

    `brakes` makes the injection brake of a session; a drill breaks it on purpose. `form` is what an agent's answer must
    fit where another one asks it.
    """

    app: Runtime
    agent: AssembledAgent
    models: Models
    worker: WorkerId
    hold_timeout: int = PATIENCE
    rng: random.Random = random.SystemRandom()
    caches: _Caches = msgspec.field(default_factory=_Caches)
    bound: GuardRuntime | None = None
    brakes: type[SessionBrake] = SessionBrake
    form: AnswerForm | None = None

    @cached_property
    def store(self) -> Store:
        """The store, with retries while it is unavailable."""
        return self.app.patient()

    def require_model(self) -> None:
        """Raises ConfigError, before anything starts, if the agent cannot think."""
        if self.caches.thinks == (self.agent, self.models):
            return
        mind = self.agent.model_settings
        if not mind.model:
            raise ConfigError(
                f"{self.agent.policy.name} has no model, so it cannot think: write `model: provider:model` into its "
                "agent.yaml, as in model: anthropic:claude-sonnet-4-5."
            )
        for name in (mind.model, *mind.fallback_models, *mind.model_for.values()):
            self.models.get(name)
        if mind.provider_tools:
            self._require_provider_tools(mind)
        for name in VERBS:
            if name in self.agent.tools:
                raise ConfigError(f"Halter itself gives every agent a tool {name}: give your own another name.")
        self.caches.thinks = (self.agent, self.models)

    def _require_provider_tools(self, mind: BrainSpec) -> None:
        from halter.models.wire import WireModel, explain_missing_tools

        for model in map(self.models.get, (mind.model, *mind.fallback_models)):
            reached = isinstance(model, WireModel)
            if reached and (why := explain_missing_tools(model.name, model.wire, mind.provider_tools)):
                raise ConfigError(why)

    def model_for(self, purpose: ModelPurpose) -> Model:
        """Returns the model configured for a purpose, or else the agent's own."""
        mind = self.agent.model_settings
        return self.models.get(mind.model_for.get(purpose) or mind.model)

    def guard(self) -> GuardRuntime:
        """Returns the guard that all sessions of the agent share, so that one check for halts serves them.

        Effects are not predicted for rules and scripts, unless a model for `simulation` is configured.
        """
        if self.bound is not None:
            return self.bound
        app, agent, mind = self.app, self.agent, self.agent.model_settings
        own = "" if mind.model.partition(":")[0] in (REFLEX, SCRIPTED) else mind.model
        foresees = mind.model_for.get("simulation") or own
        model = self.models.get(foresees) if foresees else None
        # What `os.environ` decodes at each look: to compare all of it takes less time than to read one name.
        plain: Mapping[Any, Any] = getattr(app.environ, "_data", app.environ)
        if plain != self.caches.environ[0]:
            self.caches.environ = (dict(plain), select_secrets(app.environ))
        given = _GuardInputs(app, agent.policy, agent.secrets, model, _values(agent.secrets), self.caches.environ[1])
        if self.caches.guard is None or not self.caches.guard[0].matches(given):
            self.caches.guard = (given, make_guard(app, agent.policy, agent.secrets, model))
        return self.caches.guard[1]

    def bind(self) -> "AgentContext":
        """Returns the context for one run, whose secrets and environment are looked at once, now."""
        guard, last = self.guard(), self.caches.bound
        if last is None or last[0] is not self or last[1].bound is not guard:
            last = self.caches.bound = (self, msgspec.structs.replace(self, bound=guard))
        return last[1]

    async def definition(self) -> Digest:
        """Stores the agent's definition without secrets, once for all its sessions."""
        kept, now = self.caches.definition, self.app.clock.now()
        if kept is not None and kept[0] is self.agent and 0 <= now - kept[2] < GOOD_FOR:
            return kept[1]
        written = msgspec.json.encode(redact_definition(self.agent), order="sorted")
        digest = await self.store.put(_redact_secrets(written, self.guard().redact))
        self.caches.definition = (self.agent, digest, now)
        return digest


def make_guard(app: Runtime, policy: ResolvedPolicy, secrets: Secrets, simulates: Model | None = None) -> GuardRuntime:
    """Makes a guard. While the store is unavailable, nothing runs that could not be recorded."""
    redactor = Redactor(_values(secrets), app.environ)
    guard = GuardRuntime(
        app.patient(),
        app.clock,
        redact=redactor.redact,
        secrets=secrets,
        prices=Prices(policy.prices),
        simulates=simulates,
        stream_mask=partial(StreamRedactor, redactor),
    )
    guard.show_in(app.liveness)
    return guard


def _values(secrets: Secrets) -> Mapping[str, str]:
    return {name: secrets.value(name) for name in secrets.names()}


async def store_policy(store: Store, policy: ResolvedPolicy, redact: Callable[[str], str]) -> Digest:
    """Stores the definition of a session without a model of its own, secrets redacted."""
    return await store.put(_redact_secrets(policy.canonical(), redact))


def _redact_secrets(written: bytes, redact: Callable[[str], str]) -> bytes:
    return msgspec.json.encode(_redact_texts(msgspec.json.decode(written), redact), order="sorted")


def _redact_texts(value: Any, redact: Callable[[str], str]) -> Any:
    """Redacts every text in a JSON value."""
    match value:
        case str():
            return redact(value)
        case list():
            return [_redact_texts(each, redact) for each in cast("list[Any]", value)]
        case Mapping():
            return {redact(key): _redact_texts(each, redact) for key, each in cast("Mapping[str, Any]", value).items()}
        case _:
            return value
