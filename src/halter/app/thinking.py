"""What an agent thinks with: its models by their names, and how much they take."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from halter.app.agent import Assembled
from halter.app.opened import App
from halter.brain.decide import Rules
from halter.brain.window import Thinking
from halter.core.messages import Model
from halter.core.mind import REFLEX, SCRIPTED
from halter.core.spec import Phase
from halter.core.tools import Tool
from halter.core.usage import ModelName
from halter.core.vocabulary import SessionKind

AUTONOMOUS_WINDOW = 60_000
"""What an autonomous session sends at most: it does so again and again, and nobody watches."""


class Models:
    """The models of one agent, each made once."""

    def __init__(self, app: App, agent: Assembled, given: Mapping[str, Model]) -> None:
        self._app = app
        self._agent = agent
        self._made: dict[str, Model] = dict(given)

    def named(self, name: str) -> Model:
        """Make a model, or return it if it has been made before. Raises a ConfigError that says what is missing."""
        if name not in self._made:
            self._made[name] = self._model(name)
        return self._made[name]

    def _model(self, name: str) -> Model:
        agent = self._agent
        provider = ModelName.parse(name).provider
        if provider == SCRIPTED:
            from halter.models.scripted import scripted_from

            return scripted_from(list(agent.mind.script), agent.script_at, self._app.clock, ModelName.parse(name))
        if provider == REFLEX:
            from halter.models.reflex import reflex_from

            return reflex_from(list(agent.mind.reflex), agent.reflex_at, ModelName.parse(name))
        from halter.models.providers import model_from

        return model_from(name, agent.mind.providers, self._key, temperature=agent.mind.temperature)

    def _key(self, name: str) -> str | None:
        secrets = self._agent.secrets
        return secrets.value(name) if name in secrets.names() else self._app.environ.get(name)

    async def close(self) -> None:
        """Let go of their connections."""
        for model in self._made.values():
            close = getattr(model, "aclose", None)
            if close is not None:
                await close()


@asynccontextmanager
async def models_of(app: App, agent: Assembled, given: Mapping[str, Model] | None = None) -> AsyncGenerator[Models]:
    """Have an agent's models at hand; those that are given are used as they are, by their names."""
    models = Models(app, agent, given or {})
    try:
        yield models
    finally:
        await models.close()


def thinking(
    agent: Assembled, models: Models, kind: SessionKind, tools: Mapping[str, Tool], phase: Phase, *, output: bool
) -> Thinking:
    """Put together what a session's loop thinks with."""
    mind, policy = agent.mind, agent.policy
    own = tuple(models.named(name) for name in (mind.model, *mind.fallback_models))
    summary = mind.model_for.get("summary")
    offered = tuple(
        tool.spec
        for name, tool in tools.items()
        if name not in policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
    )
    return Thinking(
        mind=mind,
        rules=_rules(agent, kind, len(own), output=output),
        models=own,
        offered=offered,
        window=_window(agent, own, kind),
        summarizer=models.named(summary) if summary else None,
    )


def _rules(agent: Assembled, kind: SessionKind, models: int, *, output: bool) -> Rules:
    mind, policy = agent.mind, agent.policy
    return Rules(
        kind=kind,
        timeout=policy.timeout,
        max_steps=policy.max_steps,
        max_retries=mind.max_retries,
        models=models,
        max_tokens_recoveries=mind.max_tokens_recoveries,
        max_repeated_tool_steps=mind.max_repeated_tool_steps,
        on_cap=policy.on_cap,
        expects_output=output,
        **_pace(agent) if kind == "autonomous" else {},
    )


def _pace(agent: Assembled) -> Mapping[str, int]:
    autonomy = agent.pacing.autonomy
    return {key: getattr(autonomy, key) for key in ("min_sleep", "max_sleep", "max_actions_per_minute")}


def _window(agent: Assembled, models: tuple[Model, ...], kind: SessionKind) -> int:
    """Tell what is sent at most: as the agent's file says, or what all of its models take."""
    from halter.models.providers import window_of

    if agent.mind.context_window:
        return agent.mind.context_window
    least = min(window_of(model.name, model.base_url) for model in models)
    return min(least, AUTONOMOUS_WINDOW) if kind == "autonomous" else least
