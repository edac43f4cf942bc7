"""The chat completions of OpenAI, which most servers offer.

`usage` is in any chunk, and final with or after the chunk that has a `finish_reason`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.models.wires.openai_client import open_provider, uses_new_limit
from halter.models.wires.usage_report import (
    COMMON_MEMBERS,
    COMPLETION_DETAILS,
    NO_TOOLS,
    PROMPT_DETAILS,
    TRAFFIC,
    MemberEffect,
    OutputDetails,
    ReportedCost,
    ServerTools,
    UsageReading,
    convert_report,
    count_all_output,
    list_paths,
    make_report_reader,
    read_price_effects,
)
from halter.models.wires.wire import ModelAddress, Wire

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from halter.net.sdk_pool import SdkPool

_FURTHER: Final = """
    queue_time prompt_time completion_time total_time total_latency time_to_first_token latency_checkpoint start_time
    end_time is_last_response acceptance_rate stop_reason completion_tokens_per_sec total_tokens_per_sec
    completion_tokens_after_first_per_sec completion_tokens_after_first_per_sec_first_ten
    completion_tokens_after_first_per_sec_graph num_search_queries search_context_size
"""
"""What servers of OpenAI's protocol report beside the counts: times, and searches that their costs include."""


USAGE_MEMBERS: Final[Mapping[str, MemberEffect]] = MappingProxyType(
    {
        **COMMON_MEMBERS,
        **list_paths("prompt_tokens completion_tokens total_tokens reasoning_tokens citation_tokens"),
        **list_paths("cached_tokens"),
        **list_paths("prompt_cache_hit_tokens prompt_cache_miss_tokens"),
        **list_paths("cache_read_input_tokens cache_creation_input_tokens"),
        **list_paths(PROMPT_DETAILS, "prompt_tokens_details"),
        **list_paths("cache_creation_tokens", "prompt_tokens_details"),
        **list_paths(COMPLETION_DETAILS, "completion_tokens_details"),
        **list_paths(_FURTHER),
        "extra_properties.google.traffic_type": TRAFFIC,
    }
)


class _ChatInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class _ChatUsage(ReportedCost):
    """OpenAI's report, with the fields in which other servers of its protocol put the same counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _ChatInput | None = None
    completion_tokens_details: OutputDetails | None = None
    reasoning_tokens: int | None = None
    citation_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    server_tool_use: ServerTools | None = None
    server_tool_use_details: ServerTools | None = None


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    usage: dict[str, Any] | None = None
    choices: Sequence[_ChatChoice] | None = None
    service_tier: str | None = None
    model: str | None = None


def _read_chat(chunk: _Chat) -> UsageReading:
    is_finished = any(choice.finish_reason for choice in chunk.choices or ())
    usage = convert_report(chunk.usage, _ChatUsage)
    effects = read_price_effects(USAGE_MEMBERS, chunk.usage, chunk.service_tier)
    if usage is None:
        return UsageReading(
            finished=is_finished, model=chunk.model or "", surcharge=effects.surcharge, unpriced=effects.unpriced
        )
    input_details, output_details = (
        usage.prompt_tokens_details or _ChatInput(),
        usage.completion_tokens_details or OutputDetails(),
    )
    read = _first(
        input_details.cached_tokens, usage.prompt_cache_hit_tokens, usage.cache_read_input_tokens, usage.cached_tokens
    )
    write = input_details.cache_write_tokens or usage.cache_creation_input_tokens or 0
    reasoning = output_details.reasoning_tokens or usage.reasoning_tokens or 0
    tools = usage.server_tool_use or usage.server_tool_use_details or NO_TOOLS
    return UsageReading(
        usage.prompt_tokens or 0,
        _chat_output(usage, reasoning),
        read,
        write,
        is_finished,
        searches=tools.searches,
        audio=input_details.audio_tokens or 0,
        model=chunk.model or "",
        cost_micros=usage.cost_micros,
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


def _chat_output(usage: _ChatUsage, reasoning: int) -> int | None:
    output = count_all_output(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, reasoning)
    return None if output is None else output + (usage.citation_tokens or 0)


def _first(*counts: int | None) -> int | None:
    """Pick the first positive count, or else the first that was reported."""
    return next((count for count in counts if count), next((count for count in counts if count is not None), None))


def _build_model(address: ModelAddress, pool: "SdkPool") -> "Model[Any]":
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile

    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=uses_new_limit(address.name))
    return OpenAIChatModel(address.name.model, provider=open_provider(address, pool), profile=profile)


OPENAI_CHAT: Final = Wire(
    name="openai",
    library="openai",
    build_model=_build_model,
    end_member=b"finish_reason",
    read_usage=make_report_reader(_Chat, _read_chat),
    usage_members=USAGE_MEMBERS,
    models_path="/models",
    key_headers=MappingProxyType({"Authorization": "Bearer {key}"}),
    audio="wav_and_mp3",
    marks_whole_answers=False,
)
