"""The Messages protocol of Anthropic.

`message_start` reports all input and hardly any output; final is the `message_delta` with a `stop_reason`. Reasoning is
counted within the output. A compaction of the context is not included in the sums of a report: it is added.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.core.messages import Prompt, ToolResult
from halter.core.usage import ModelName
from halter.models.wires.usage_report import (
    COMMON_MEMBERS,
    COUNTED,
    NO_TOOLS,
    MemberEffect,
    ReportedCost,
    ServerTools,
    UsageReading,
    convert_report,
    list_paths,
    make_report_reader,
    read_price_effects,
)
from halter.models.wires.wire import CacheLifetime, ModelAddress, Wire
from halter.spec.models import ThinkingEffort

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from halter.net.sdk_pool import SdkPool

_CACHE_WRITES: Final = "ephemeral_5m_input_tokens ephemeral_1h_input_tokens"
USAGE_MEMBERS: Final[Mapping[str, MemberEffect]] = MappingProxyType(
    {
        **COMMON_MEMBERS,
        **list_paths("input_tokens output_tokens cache_read_input_tokens cache_creation_input_tokens"),
        **list_paths(_CACHE_WRITES, "cache_creation"),
        **list_paths("thinking_tokens", "output_tokens_details"),
        **list_paths("web_fetch_requests tool_search_requests code_execution_requests", "server_tool_use"),
        **list_paths("input_tokens output_tokens model", "iterations"),
        **list_paths("cache_read_input_tokens cache_creation_input_tokens", "iterations"),
        **list_paths(_CACHE_WRITES, "iterations.cache_creation"),
        "iterations.type": {"message": COUNTED, "compaction": COUNTED},
    }
)


class _CacheWrites(msgspec.Struct):
    ephemeral_1h_input_tokens: int | None = None


class _Iteration(ReportedCost):
    type: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: _CacheWrites | None = None

    @property
    def long_cache_tokens(self) -> int:
        return self.cache_creation.ephemeral_1h_input_tokens or 0 if self.cache_creation else 0


class _MessageUsage(_Iteration):
    server_tool_use: ServerTools | None = None
    iterations: Sequence[_Iteration] | None = None


class _Message(msgspec.Struct):
    usage: dict[str, Any] | None = None
    model: str | None = None


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None


class _MessageEvent(msgspec.Struct):
    """An event of Anthropic's stream, or its whole answer. Each has the report in another place."""

    usage: dict[str, Any] | None = None
    stop_reason: str | None = None
    message: _Message | str | None = None
    delta: _MessageDelta | None = None
    model: str | None = None


def _read_message(event: _MessageEvent) -> UsageReading:
    is_finished = bool(event.stop_reason or (event.delta and event.delta.stop_reason))
    report = event.usage or (event.message.usage if isinstance(event.message, _Message) else None)
    model = event.model or (event.message.model if isinstance(event.message, _Message) else None) or ""
    usage = convert_report(report, _MessageUsage)
    if report is None or usage is None:
        return UsageReading(finished=is_finished, model=model)
    parts: list[_Iteration] = [usage, *(each for each in usage.iterations or () if each.type == "compaction")]
    read = sum(part.cache_read_input_tokens or 0 for part in parts)
    write = sum(part.cache_creation_input_tokens or 0 for part in parts)
    output_counts = [part.output_tokens for part in parts if part.output_tokens is not None]
    effects = read_price_effects(USAGE_MEMBERS, report)
    return UsageReading(
        sum(part.input_tokens or 0 for part in parts) + read + write,
        sum(output_counts) if output_counts else None,
        None if usage.cache_read_input_tokens is None and not read else read,
        write,
        is_finished,
        sum(part.long_cache_tokens for part in parts),
        (usage.server_tool_use or NO_TOOLS).searches,
        model=model,
        cost_micros=usage.cost_micros,
        surcharge=effects.surcharge,
        unpriced=effects.unpriced,
    )


def _build_model(address: ModelAddress, pool: "SdkPool") -> "Model[Any]":
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(api_key=address.key, base_url=address.url, max_retries=0, timeout=None, http_client=pool)
    client._custom_headers = {}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return AnthropicModel(address.name.model, provider=AnthropicProvider(anthropic_client=client))


_THINKING_BUDGETS: Final[Mapping[ThinkingEffort, int]] = {"off": 0, "low": 2048, "medium": 10_000, "high": 16_384}
"""Maximum thinking tokens of Anthropic's older models, which are part of the output."""


def choose_thinking(effort: ThinkingEffort | None, prompt: Prompt) -> ThinkingEffort | None:
    """Choose the thinking effort of a model of Anthropic for this request.

    None directly after tool results: the model would have to be sent its earlier thoughts, which are not kept. None
    either if the thinking budget does not fit into the output limit.
    """
    has_tool_results = any(isinstance(part, ToolResult) for message in prompt.messages[-1:] for part in message.parts)
    fits_limit = effort is not None and prompt.max_output_tokens > _THINKING_BUDGETS[effort]
    return effort if fits_limit and not has_tool_results else None


def _can_mark_cache(name: ModelName, profile: Mapping[str, Any]) -> bool:  # noqa: ARG001
    return True


def _make_settings(prompt: Prompt, can_mark: bool, lifetime: CacheLifetime | None) -> dict[str, Any]:  # noqa: ARG001, FBT001
    """Make the settings of a request. Anthropic caches only up to marks, and for the lifetime of each.

    Tools and system text are constant in a session, so their ends are marks. All have one lifetime: a mark of minutes
    before one of an hour is rejected.
    """
    settings: dict[str, Any] = {}
    if lifetime:
        settings |= {"anthropic_cache_tool_definitions": lifetime, "anthropic_cache_instructions": lifetime}
    if prompt.provider_tools:
        # Otherwise its newer models search from code that runs at the provider, even if that is not declared.
        settings["anthropic_web_tools_allowed_callers"] = ["direct"]
    return settings


ANTHROPIC: Final = Wire(
    name="anthropic",
    library="anthropic",
    build_model=_build_model,
    end_member=b"stop_reason",
    read_usage=make_report_reader(_MessageEvent, _read_message),
    usage_members=USAGE_MEMBERS,
    models_path="/v1/models",
    key_headers=MappingProxyType({"x-api-key": "{key}", "anthropic-version": "2023-06-01"}),
    make_settings=_make_settings,
    can_mark_cache=_can_mark_cache,
    choose_thinking=choose_thinking,
    provider_tools=("web_search", "code_execution"),
    long_cache_provider="anthropic",
)
