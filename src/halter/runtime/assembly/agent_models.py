"""The models of one agent, each made once."""

from collections.abc import Mapping

from halter.config.definition import AgentDefinition
from halter.core.messages import Model
from halter.core.usage import ModelName
from halter.models.providers import make_model
from halter.models.reflex import make_reflex_model
from halter.models.scripted import make_scripted_model
from halter.models.wire import ModelHabits
from halter.redaction.secrets import Secrets
from halter.runtime.runtime import Runtime
from halter.spec.models import REFLEX, SCRIPTED


class AgentModels:
    """The models of one agent, each made once. `given` models replace the configured ones of the same name."""

    def __init__(
        self,
        app: Runtime,
        definition: AgentDefinition,
        secrets: Secrets,
        given: Mapping[str, Model] | None = None,
        run_model: Model | None = None,
    ) -> None:
        self._app = app
        self._definition = definition
        self._secrets = secrets
        self._by_name = dict(given or {})
        self._run_model = run_model

    def get(self, name: str) -> Model:
        """Return a model, made on first use. Raises ConfigError if its configuration or library is missing."""
        if self._run_model is not None and name == str(self._run_model.name):
            return self._run_model
        if name not in self._by_name:
            self._by_name[name] = self._make(name)
        return self._by_name[name]

    def _make(self, name: str) -> Model:
        definition, settings, model_name = self._definition, self._definition.model_settings, ModelName.parse(name)
        if model_name.provider == SCRIPTED:
            return make_scripted_model(list(settings.script), definition.locate_script, self._app.clock, model_name)
        if model_name.provider == REFLEX:
            return make_reflex_model(list(settings.reflex), definition.locate_reflex, model_name)
        habits = ModelHabits(settings.temperature, settings.thinking, settings.native_output)
        return make_model(name, settings.providers, self._read_key, habits)

    def _read_key(self, name: str) -> str | None:
        return self._secrets.value(name) if name in self._secrets.names() else self._app.environ.get(name)

    def with_model(self, model: Model) -> "AgentModels":
        """Return these models with one more, which its owner closes."""
        models = AgentModels(self._app, self._definition, self._secrets, run_model=model)
        models._by_name = self._by_name
        return models

    async def aclose(self) -> None:
        for model in self._by_name.values():
            close = getattr(model, "aclose", None)
            if close is not None:
                await close()
