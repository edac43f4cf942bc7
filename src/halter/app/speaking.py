"""An agent that is ready to speak: put together, with its models, in the hands of one worker of this process."""

import random
from typing import Final

import msgspec

from halter.app.agent import Assembled
from halter.app.defined import Defined
from halter.app.doors import Doors
from halter.app.opened import LEASE, App
from halter.app.thinking import Models
from halter.brain.turn import ASK_USER, FINAL_ANSWER, YIELD
from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.ids import WorkerId
from halter.core.messages import Model
from halter.core.mind import REFLEX, SCRIPTED, ModelPurpose
from halter.core.ports import Store
from halter.guard.gatehouse import Gatehouse
from halter.work.verbs import READ_OUTPUT

PATIENCE: Final = LEASE + 5 * SECOND
"""How long a session is waited for whose owner may have died."""

VERBS: Final = (ASK_USER, FINAL_ANSWER, YIELD, READ_OUTPUT)


class Speaking(msgspec.Struct, frozen=True):
    """An agent with its models, in the hands of one worker of this process."""

    app: App
    agent: Assembled
    models: Models
    worker: WorkerId
    patience: int = PATIENCE
    chance: random.Random = random.SystemRandom()
    doors: Doors = msgspec.field(default_factory=Doors)
    defined: Defined = msgspec.field(default_factory=Defined)

    @property
    def store(self) -> Store:
        """The store, waited for while it is away."""
        return self.app.patient()

    def demand_model(self) -> None:
        """Say what is missing for the agent to think, before anything is begun. Raises ConfigError."""
        mind = self.agent.mind
        if not mind.model:
            raise ConfigError(
                f"{self.agent.policy.name} has no model, so it cannot think: write `model: provider:model` into its "
                "agent.yaml, as in model: anthropic:claude-sonnet-4-5."
            )
        for name in (mind.model, *mind.fallback_models, *mind.model_for.values()):
            self.models.named(name)
        for name in VERBS:
            if name in self.agent.tools:
                raise ConfigError(f"Halter itself gives every agent a tool {name}: give your own another name.")

    def model_for(self, purpose: ModelPurpose) -> Model:
        """Find the model that is named for a purpose, or else the one that thinks."""
        mind = self.agent.mind
        return self.models.named(mind.model_for.get(purpose) or mind.model)

    def gatehouse(self) -> Gatehouse:
        """Return the doors of the agent's sessions. Rules and scripts foresee nothing, unless they are told to."""
        mind = self.agent.mind
        own = "" if mind.model.partition(":")[0] in (REFLEX, SCRIPTED) else mind.model
        foresees = mind.model_for.get("simulation") or own
        model = self.models.named(foresees) if foresees else None
        return self.doors.of(self.app, self.agent.policy, self.agent.secrets, model)
