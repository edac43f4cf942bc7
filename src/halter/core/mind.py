"""How an agent thinks: its models, what they are told, and how much of it they see. What it may do stands in `spec`."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from halter.core.rates import Rate

WireFormat = Literal["openai", "anthropic", "google"]
"""The protocol that an endpoint speaks. `openai` is also what most other servers speak."""

ContextStrategy = Literal["sliding_window", "compact", "summarize"]
"""What is left out when a history outgrows the window: the older part, marked or not, or told in short."""

ToolCalls = Literal["native", "text"]
"""How calls are asked for: as the provider's protocol has it, or as text, for models that know no other way."""

ModelPurpose = Literal["summary", "simulation", "judge", "skill"]
"""What another model than the agent's own may be named for: only what something really asks a model for."""

SCRIPTED: Final = "scripted"
REFLEX: Final = "reflex"
"""The two providers that need no network; as names of models they may stand alone."""


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is reached. `api_key` names a secret, as `${secret:NAME}`; a local server may need none.

    `bills_errors` says that an answer with an error status may be charged for.
    """

    wire: WireFormat = "openai"
    base_url: str
    api_key: str = ""
    bills_errors: bool = False


class Mind(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the loop has to know of an agent, beside what the guard knows.

    Models are written `provider:model`. `context_window` is in tokens, 0 for the model's own; `streaming` is None where
    nobody said so: then a chat streams and nothing else does. `script` and `reflex` are what their files hold, already
    read: a list of replies, and a list of rules. `rates` say how fast models may be asked, by all agents of the fleet.
    """

    model: str = ""
    fallback_models: tuple[str, ...] = ()
    model_for: Mapping[ModelPurpose, str] = {}
    providers: Mapping[str, Provider] = {}
    instructions: str = ""
    tool_calls: ToolCalls = "native"
    temperature: float | None = None
    max_output_tokens: int = 4096
    max_retries: int = 3
    context_window: int = 0
    context_strategy: ContextStrategy = "compact"
    streaming: bool | None = None
    max_tokens_recoveries: int = 2
    max_repeated_tool_steps: int = 3
    script: tuple[Any, ...] = ()
    reflex: tuple[Any, ...] = ()
    rates: Mapping[str, Rate] = {}

    def canonical(self) -> bytes:
        """Write it down in the one way that equal minds have in common."""
        return msgspec.json.encode(self, order="sorted")
