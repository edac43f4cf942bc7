"""The client of OpenAI's SDK, which both of its protocols use."""

import re
from typing import TYPE_CHECKING, Any, Final

from halter.core.usage import ModelName
from halter.models.wires.wire import ModelAddress

if TYPE_CHECKING:
    from pydantic_ai.profiles import ModelProfile
    from pydantic_ai.providers import Provider

    from halter.net.sdk_pool import SdkPool

OWN_MODELS: Final = ("gpt-", "o1", "o3", "o4", "chatgpt-")


def open_provider(address: ModelAddress, pool: "SdkPool") -> "Provider[Any]":
    """Open the provider of a model. Nothing of the environment is sent: neither an organization nor a header."""
    from openai import AsyncOpenAI
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    client = AsyncOpenAI(
        api_key=address.key, admin_api_key="", base_url=address.url, max_retries=0, timeout=None, http_client=pool
    )
    client.organization = client.project = None
    client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if address.name.provider == "openai":
        return OpenAIProvider(openai_client=client)
    return OpenAICompatibleProvider(address.name.provider, openai_client=client)


_NEWER_MODELS: Final = re.compile(r"gpt-(?:[6-9]|[1-9]\d)(?!\d)(?!.*-chat)")
"""Models of OpenAI that all reason and cache up to marks, also if the library does not know them yet."""


def make_reasoning_profile(name: ModelName) -> "ModelProfile | None":
    """Describe how a model of OpenAI reasons, also one behind a gateway or newer than the library; None for others.

    A newer one is sent only the efforts that nearly all of its kind accept.
    """
    from pydantic_ai.profiles import merge_profile
    from pydantic_ai.profiles.openai import OpenAIModelProfile, openai_model_profile

    model = name.model.rpartition("/")[2]
    if not model.startswith(OWN_MODELS) or model.startswith("gpt-oss"):
        return None
    profile = openai_model_profile(model)
    if profile.get("supports_thinking") or _NEWER_MODELS.match(model) is None:
        return profile
    newer = OpenAIModelProfile(
        supports_thinking=True,
        thinking_enabled_by_default=True,
        thinking_always_enabled=True,
        openai_supports_reasoning=True,
        openai_supports_encrypted_reasoning_content=True,
        openai_supports_prompt_cache_breakpoints=True,
        openai_reasoning_efforts=frozenset(("low", "medium", "high")),
    )
    return merge_profile(profile, newer)


def uses_new_limit(name: ModelName) -> bool:
    """Return True if a model's output limit is called `max_completion_tokens`: a server may ignore an unknown name."""
    model = name.model.rpartition("/")[2]
    return name.provider == "openai" or (model.startswith(OWN_MODELS) and not model.startswith("gpt-oss"))
