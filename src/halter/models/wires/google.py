"""The protocol of Google's models.

`usageMetadata` is in any chunk, and final with or after the chunk that has a `finishReason`. Reasoning is counted next
to the candidates. Google searches without a limit, so its searches cannot be held.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.models.wires.usage_report import (
    COUNTED,
    TIERS,
    TRAFFIC,
    MemberEffect,
    UsageReading,
    convert_report,
    list_paths,
    make_report_reader,
    read_price_effects,
)
from halter.models.wires.wire import ModelAddress, Wire
from halter.net.tls import make_tls_context

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from halter.net.sdk_pool import SdkPool

_MODALITIES: Final = {"text": COUNTED, "image": COUNTED, "video": COUNTED, "audio": COUNTED, "document": COUNTED}

USAGE_MEMBERS: Final[Mapping[str, MemberEffect]] = MappingProxyType(
    {
        **list_paths("promptTokenCount candidatesTokenCount responseTokenCount totalTokenCount"),
        **list_paths("thoughtsTokenCount toolUsePromptTokenCount cachedContentTokenCount"),
        "promptTokensDetails.modality": _MODALITIES,
        "cacheTokensDetails.modality": _MODALITIES,
        "toolUsePromptTokensDetails.modality": _MODALITIES,
        "candidatesTokensDetails.modality": {"text": COUNTED},
        "responseTokensDetails.modality": {"text": COUNTED},
        **{
            f"{side}TokensDetails.tokenCount": COUNTED
            for side in ("prompt", "cache", "toolUsePrompt", "candidates", "response")
        },
        "serviceTier": TIERS,
        "trafficType": TRAFFIC,
    }
)
"""The output of a picture or of sound has no listed price."""


class _ModalityTokens(msgspec.Struct, rename="camel"):
    modality: str | None = None
    token_count: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None
    cached_content_token_count: int | None = None
    total_token_count: int | None = None
    prompt_tokens_details: Sequence[_ModalityTokens] | None = None
    cache_tokens_details: Sequence[_ModalityTokens] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    finish_reason: str | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Generated(msgspec.Struct, rename="camel"):
    usage_metadata: dict[str, Any] | None = None
    candidates: Sequence[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None
    model_version: str | None = None


def _read_generated(chunk: _Generated) -> UsageReading:
    is_blocked = bool(chunk.prompt_feedback and chunk.prompt_feedback.block_reason)
    is_finished = is_blocked or any(candidate.finish_reason for candidate in chunk.candidates or ())
    usage = convert_report(chunk.usage_metadata, _Metadata)
    if chunk.usage_metadata is None or usage is None:
        return UsageReading(finished=is_finished, model=chunk.model_version or "")
    input_tokens = (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0)
    output_tokens = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    is_counted = usage.candidates_token_count is not None or usage.total_token_count is not None
    output = max(output_tokens, (usage.total_token_count or 0) - input_tokens) if is_counted else None
    sound, cached_sound = _count_sound(usage.prompt_tokens_details), _count_sound(usage.cache_tokens_details)
    effects = read_price_effects(USAGE_MEMBERS, chunk.usage_metadata)
    return UsageReading(
        input_tokens,
        output,
        usage.cached_content_token_count,
        0,
        is_finished,
        audio=max(0, sound - cached_sound),
        audio_cached=cached_sound,
        model=chunk.model_version or "",
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


def _count_sound(details: Sequence[_ModalityTokens] | None) -> int:
    return sum(each.token_count or 0 for each in details or () if each.modality == "AUDIO")


def _build_model(address: ModelAddress, pool: "SdkPool") -> "Model[Any]":
    from google.genai.client import Client
    from google.genai.types import HttpOptions, HttpRetryOptions
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    class OneRequest(GoogleModel):
        """Sends one request. By default the SDK follows continuation tokens."""

        async def _build_content_and_config(self, *args: Any, **kwargs: Any) -> Any:
            build: Any = super()._build_content_and_config  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            contents, config = await build(*args, **kwargs)
            config["automatic_continuation"] = False
            return contents, config

    # The address of a cloud includes the version.
    version = "" if address.is_in_cloud else None
    tls = make_tls_context(uses_environment=True)
    options = HttpOptions(
        base_url=address.url,
        api_version=version,
        httpx_async_client=pool,
        # For other clients that the library creates and that are never used.
        client_args={"verify": tls},
        async_client_args={"verify": tls, "ssl": tls},
        retry_options=HttpRetryOptions(attempts=1),
    )
    client = Client(vertexai=False, api_key=address.key, http_options=options)
    return OneRequest(address.name.model, provider=GoogleProvider(client=client))


GOOGLE: Final = Wire(
    name="google",
    library="google.genai",
    build_model=_build_model,
    end_member=b"finishReason",
    read_usage=make_report_reader(_Generated, _read_generated),
    usage_members=USAGE_MEMBERS,
    models_path="/v1beta/models",
    key_headers=MappingProxyType({"x-goog-api-key": "{key}"}),
    provider_tools=("code_execution",),
    audio="any",
    combines_schema_and_tools=False,
)
