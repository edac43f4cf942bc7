"""What depends on the protocol of a provider, and on nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from halter.core.messages import Prompt
from halter.core.tools import ProviderToolName
from halter.core.usage import ModelName
from halter.models.wires.usage_report import MemberEffect, UsageReading
from halter.spec.models import ThinkingEffort, WireFormat

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from halter.net.sdk_pool import SdkPool

CacheLifetime = Literal["5m", "1h"]
"""How long a provider keeps what is cached after its last use. OpenAI's models have a lifetime of their own."""


@dataclass(frozen=True)
class ModelAddress:
    """A model at its provider. Behind a cloud, the URL includes the version of the protocol."""

    name: ModelName
    url: str
    key: str
    is_in_cloud: bool


BuildModel = Callable[[ModelAddress, "SdkPool"], "Model[Any]"]
"""Imports the provider's library, which takes seconds, and makes its model over a pool of connections."""

MakeSettings = Callable[[Prompt, bool, CacheLifetime | None], dict[str, Any]]
"""Makes the settings of a request that only this protocol has. The flag is whether the model takes cache marks; with a
lifetime, they are set."""

ChooseThinking = Callable[[ThinkingEffort | None, Prompt], ThinkingEffort | None]


def make_no_settings(prompt: Prompt, can_mark: bool, lifetime: CacheLifetime | None) -> dict[str, Any]:  # noqa: ARG001, FBT001
    return {}


def cannot_mark_cache(name: ModelName, profile: Mapping[str, Any]) -> bool:  # noqa: ARG001
    return False


def choose_stated_effort(effort: ThinkingEffort | None, prompt: Prompt) -> ThinkingEffort | None:  # noqa: ARG001
    return effort


@dataclass(frozen=True)
class Wire:
    """A protocol of providers.

    `library` is the SDK that it needs. `end_member` is the JSON member that marks an answer as finished, `read_usage`
    reads one event or a whole answer, and `usage_members` says what every member of a usage report does to the price,
    in the SDKs of the makers and of OpenRouter. A count that is part of another one costs nothing more.

    At `models_path` a provider lists its models; `key_headers` are those with the key. `provider_tools` are the tools
    that a provider can run with a limit. `audio` is what is taken of it, and `audio_wire` a protocol that takes more.
    """

    name: WireFormat
    library: str
    build_model: BuildModel
    end_member: bytes
    read_usage: Callable[[bytes], UsageReading]
    usage_members: Mapping[str, MemberEffect]
    models_path: str
    key_headers: Mapping[str, str]
    make_settings: MakeSettings = make_no_settings
    can_mark_cache: Callable[[ModelName, Mapping[str, Any]], bool] = cannot_mark_cache
    choose_thinking: ChooseThinking = choose_stated_effort
    provider_tools: tuple[ProviderToolName, ...] = ()
    audio: Literal["none", "wav_and_mp3", "any"] = "none"
    audio_wire: WireFormat | None = None
    long_cache_provider: str = ""
    """The provider that is known to cache for an hour."""
    has_cache_keys: bool = False
    returns_reasoning: bool = False
    """True if a model is sent its own encrypted reasoning."""
    combines_schema_and_tools: bool = True
    """False if a request has either a schema for its answer or tools."""
    marks_whole_answers: bool = True
    """False if a server may leave out the end of an answer without a stream, which cannot be truncated."""
    has_final_status: bool = False
    """True if the status of the whole answer says whether it is complete."""
