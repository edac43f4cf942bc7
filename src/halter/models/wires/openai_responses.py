"""The Responses protocol of OpenAI.

The `usage` of the whole response is in the event that ends it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.core.messages import Prompt
from halter.core.usage import ModelName
from halter.models.wires.openai_client import make_reasoning_profile, open_provider
from halter.models.wires.usage_report import (
    COMMON_MEMBERS,
    COMPLETION_DETAILS,
    NO_TOOLS,
    PROMPT_DETAILS,
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
from halter.models.wires.wire import CacheLifetime, ModelAddress, Wire

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from halter.net.sdk_pool import SdkPool

USAGE_MEMBERS: Final[Mapping[str, MemberEffect]] = MappingProxyType(
    {
        **COMMON_MEMBERS,
        **list_paths("input_tokens output_tokens total_tokens"),
        **list_paths(PROMPT_DETAILS, "input_tokens_details"),
        **list_paths("ttl_30m_tokens", "input_tokens_details.cache_write_tokens_details"),
        **list_paths(COMPLETION_DETAILS, "output_tokens_details"),
    }
)


class _ResponseInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class _ResponseUsage(ReportedCost):
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    output_tokens_details: OutputDetails | None = None
    input_tokens_details: _ResponseInput | None = None
    server_tool_use: ServerTools | None = None
    server_tool_use_details: ServerTools | None = None


class _OutputItem(msgspec.Struct):
    type: str = ""


class _Response(msgspec.Struct):
    """A whole response. Searches are not counted in its report, but listed in its output."""

    usage: dict[str, Any] | None = None
    service_tier: str | None = None
    output: Sequence[_OutputItem] | None = None
    status: str | None = None
    model: str | None = None


class _ResponseEvent(_Response):
    """An event of the stream, or the whole response."""

    response: _Response | None = None


def _read_response(event: _ResponseEvent) -> UsageReading:
    response = event.response or event
    is_finished = response.status in {"completed", "incomplete", "failed", "cancelled"}
    # What a response reports under way is no bill yet; a refusal, which has no status, can report one.
    report = None if response.status in {"queued", "in_progress"} else response.usage
    usage = convert_report(report, _ResponseUsage)
    effects = read_price_effects(USAGE_MEMBERS, report, response.service_tier)
    if usage is None:
        return UsageReading(
            finished=is_finished, model=response.model or "", surcharge=effects.surcharge, unpriced=effects.unpriced
        )
    details = usage.input_tokens_details or _ResponseInput()
    tools = usage.server_tool_use or usage.server_tool_use_details or NO_TOOLS
    reasoning = (usage.output_tokens_details or OutputDetails()).reasoning_tokens or 0
    return UsageReading(
        usage.input_tokens or 0,
        count_all_output(usage.input_tokens, usage.output_tokens, usage.total_tokens, reasoning),
        details.cached_tokens,
        details.cache_write_tokens or 0,
        is_finished,
        searches=max(tools.searches, sum(item.type == "web_search_call" for item in response.output or ())),
        audio=details.audio_tokens or 0,
        model=response.model or "",
        cost_micros=usage.cost_micros,
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


def _build_model(address: ModelAddress, pool: "SdkPool") -> "Model[Any]":
    from pydantic_ai.models.openai import OpenAIResponsesModel

    profile = make_reasoning_profile(address.name)
    return OpenAIResponsesModel(address.name.model, provider=open_provider(address, pool), profile=profile)


def _can_mark_cache(name: ModelName, profile: Mapping[str, Any]) -> bool:
    """Return True if a model takes cache marks. Only OpenAI itself is known to."""
    return name.provider == "openai" and bool(profile.get("openai_supports_prompt_cache_breakpoints", False))


def _make_settings(prompt: Prompt, can_mark: bool, lifetime: CacheLifetime | None) -> dict[str, Any]:  # noqa: ARG001, FBT001
    """Make the settings of a request: nothing is stored, nor compared with a stored answer.

    A model that caches up to marks sets one by default at the very end, after what is true only for this request: what
    it wrote there would be paid for and never read. So it gets only the marks of the history, or none.
    """
    settings: dict[str, Any] = {"openai_store": False, "openai_prompt_cache_diagnostics": False}
    if can_mark:
        settings["openai_prompt_cache_options"] = {"mode": "explicit"}
    if lifetime is not None:
        settings["openai_cache_instructions"] = True
    return settings


OPENAI_RESPONSES: Final = Wire(
    name="responses",
    library="openai",
    build_model=_build_model,
    end_member=b"status",
    read_usage=make_report_reader(_ResponseEvent, _read_response),
    usage_members=USAGE_MEMBERS,
    models_path="/models",
    key_headers=MappingProxyType({"Authorization": "Bearer {key}"}),
    make_settings=_make_settings,
    can_mark_cache=_can_mark_cache,
    audio_wire="openai",
    has_cache_keys=True,
    returns_reasoning=True,
    has_final_status=True,
)
