"""The keys of models and providers, the providers that are known, and what the loop needs of a model."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE
from halter.core.rates import RateLimit
from halter.core.tools import ProviderTool
from halter.spec.forms import (
    SecretReference,
    Spec,
    Url,
)

WireFormat = Literal["openai", "anthropic", "google", "responses"]
"""The protocol of an endpoint. Most other servers speak `openai` as well, few of them its successor `responses`."""
ContextStrategy = Literal["sliding_window", "compact", "summarize"]
"""The way to cut a history that exceeds the window: drop the older part, replace it by a marker, or summarize it."""
ThinkingEffort = Literal["off", "low", "medium", "high"]
"""The amount of thinking before a model answers."""
ToolCalls = Literal["native", "text"]
"""The form of a model's calls: by the provider's protocol, or as text for models without tool calls."""
ModelPurpose = Literal["summary", "simulation", "judge", "skill"]
"""The purposes that can have a model other than the agent's own."""
SCRIPTED: Final = "scripted"
REFLEX: Final = "reflex"
"""The two providers that need no network; as model names they need no provider."""


CloudName = Literal["google", "aws"]
CLOUD_HOSTS: Final[Mapping[CloudName, tuple[str, ...]]] = MappingProxyType(
    {"google": (".googleapis.com",), "aws": (".amazonaws.com", ".api.aws")}
)
"""The hosts to which a cloud's credentials may be sent, unless the fleet names another address."""


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint and how to authenticate there. `api_key` names a secret; a local server may need none.

    `credentials` uses the credentials of that cloud, as its own tools find them. With `bills_errors`, a response with
    an error status may be charged. Without `prompt_cache`, no request asks for a cache; without `vision`, its models
    get a sentence for each picture.
    """

    wire: WireFormat = "openai"
    base_url: str
    api_key: str = ""
    credentials: CloudName | None = None
    bills_errors: bool = False
    prompt_cache: bool = True
    vision: bool = True


class KnownProvider(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults of a provider: its address, and the variables that hold its key or another address.

    A `local` server needs no key. Without a `base_url`, the file or the variable must give one.
    """

    base_url: str = ""
    wire: WireFormat = "openai"
    keys: tuple[str, ...] = ()
    url_from: str = ""
    local: bool = False


_GOOGLE: Final = KnownProvider(
    base_url="https://generativelanguage.googleapis.com", wire="google", keys=("GEMINI_API_KEY", "GOOGLE_API_KEY")
)
UNKNOWN_PROVIDER: Final = KnownProvider()
KNOWN_PROVIDERS: Final[Mapping[str, KnownProvider]] = MappingProxyType(
    {
        "openai": KnownProvider(
            base_url="https://api.openai.com/v1", keys=("OPENAI_API_KEY",), url_from="OPENAI_BASE_URL"
        ),
        "anthropic": KnownProvider(
            base_url="https://api.anthropic.com",
            wire="anthropic",
            keys=("ANTHROPIC_API_KEY",),
            url_from="ANTHROPIC_BASE_URL",
        ),
        "google": _GOOGLE,
        "gemini": _GOOGLE,
        "openrouter": KnownProvider(base_url="https://openrouter.ai/api/v1", keys=("OPENROUTER_API_KEY",)),
        "groq": KnownProvider(base_url="https://api.groq.com/openai/v1", keys=("GROQ_API_KEY",)),
        "mistral": KnownProvider(base_url="https://api.mistral.ai/v1", keys=("MISTRAL_API_KEY",)),
        "deepseek": KnownProvider(base_url="https://api.deepseek.com/v1", keys=("DEEPSEEK_API_KEY",)),
        "together": KnownProvider(base_url="https://api.together.xyz/v1", keys=("TOGETHER_API_KEY",)),
        "ollama": KnownProvider(base_url="http://localhost:11434/v1", url_from="OLLAMA_BASE_URL", local=True),
        "llamacpp": KnownProvider(base_url="http://localhost:8080/v1", url_from="LLAMACPP_BASE_URL", local=True),
        "vllm": KnownProvider(base_url="http://localhost:8000/v1", url_from="VLLM_BASE_URL", local=True),
        "lmstudio": KnownProvider(base_url="http://localhost:1234/v1", url_from="LMSTUDIO_BASE_URL", local=True),
        "llamafarm": KnownProvider(url_from="LLAMAFARM_BASE_URL", local=True),
    }
)


_RESPONSES_HOSTS: Final = (".api.openai.com", ".openai.azure.com")
_CHAT_ONLY: Final = re.compile(r".*-(?:audio|search-preview)(?:-|$)")
"""Models of OpenAI that only Chat Completions has."""


def choose_wire(provider: str, url: str, model: str = "") -> WireFormat:
    """Choose the protocol of an endpoint whose protocol is not configured.

    OpenAI's current models take tools while they reason only over `responses`, which few compatible servers speak. So
    it is chosen for OpenAI's and Azure's own addresses, and for a provider called `azure` at any address.
    """
    known_wire = KNOWN_PROVIDERS.get(provider, UNKNOWN_PROVIDER).wire
    if known_wire != "openai" or _CHAT_ONLY.match(model):
        return known_wire
    is_own = f".{urlsplit(url).hostname or ''}".endswith(_RESPONSES_HOSTS)
    return "responses" if is_own or provider == "azure" else known_wire


class BrainSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an agent's definition that the loop needs; the rest is in `ResolvedPolicy`.

    Models are written `provider:model`. `context_window` is in tokens, 0 for the model's own. With `streaming` None,
    only a chat streams. `script` and `reflex` are the contents of their files: a list of replies, and a list of rules.
    `rates` bound the requests of all agents of the fleet to a model. `native_output` names the tool whose arguments
    are the model's answer, for providers that can enforce them.
    """

    model: str = ""
    fallback_models: tuple[str, ...] = ()
    model_for: Mapping[ModelPurpose, str] = {}
    providers: Mapping[str, Provider] = {}
    instructions: str = ""
    tool_calls: ToolCalls = "native"
    temperature: float | None = None
    thinking: ThinkingEffort | None = None
    native_output: str = ""
    provider_tools: tuple[ProviderTool, ...] = ()
    max_output_tokens: int = 4096
    max_retries: int = 3
    outage_backoff: int = 15 * MINUTE
    context_window: int = 0
    context_strategy: ContextStrategy = "compact"
    streaming: bool | None = None
    max_tokens_recoveries: int = 2
    max_repeated_tool_steps: int = 3
    script: tuple[Any, ...] = ()
    reflex: tuple[Any, ...] = ()
    rates: Mapping[str, RateLimit] = {}

    def canonical(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")


class ProviderToolSpec(Spec, frozen=True):
    """A tool that the provider runs. Its maximum cost is held before each request."""

    max_uses: Annotated[int, Meta(ge=1, le=20, description="Maximum uses in one request.")]


class ProviderSpec(Spec, frozen=True):
    """The endpoint and the credentials of a provider."""

    HIDDEN: ClassVar[bool] = True

    wire: Annotated[WireFormat, Meta(description="Protocol of the endpoint.")] | UnsetType = UNSET
    base_url: Annotated[Url, Meta(description="URL of the endpoint; required for an unknown provider.")] | UnsetType = (
        UNSET
    )
    api_key: (
        Annotated[SecretReference, Meta(description="API key, as `${secret:NAME}`; plain text is rejected.")]
        | UnsetType
    ) = UNSET
    credentials: (
        Annotated[
            CloudName,
            Meta(description="Cloud whose own credentials are used instead of a key, as its tools find them."),
        ]
        | UnsetType
    ) = UNSET
    bills_errors: (
        Annotated[bool, Meta(description="The provider may charge for a response with an error status (4xx or 5xx).")]
        | UnsetType
    ) = UNSET
    prompt_cache: (
        Annotated[
            bool,
            Meta(
                description="`false` disables the prompt cache of Anthropic's models and of OpenAI's from gpt-5.6 on; "
                "others cache automatically."
            ),
        ]
        | UnsetType
    ) = UNSET
    vision: (
        Annotated[bool, Meta(description="`false` if its models see no pictures: they get a sentence for each.")]
        | UnsetType
    ) = UNSET
