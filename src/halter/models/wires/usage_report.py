"""What a report of usage can say, and what its members do to the price.

Some servers of OpenAI's protocol count reasoning within `completion_tokens`, others in addition to them: then it is in
`total_tokens`, or it exceeds `completion_tokens`. In the end reasoning counts as output, once.

The members of a report that a wire lists do what is said of them. One that is not listed, or that has a value without
a price, and that is neither zero nor empty, could cost anything: the request settles at its hold, or at more.
"""

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from math import ceil
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import msgspec

from halter.core.money import DOLLAR
from halter.core.text import shorten

T = TypeVar("T")


class UsageReading(msgspec.Struct, frozen=True):
    """The counts in one event or a whole answer, and whether the answer is finished.

    Without `output_tokens` a report cannot be final. `cache_read_tokens` is None if a report omits it. `model` is the
    model that answered, and `cost_micros` what the provider says that it charged. `surcharge` is in percent of the
    price of all tokens, and `unpriced` names a member without a known price.
    """

    input_tokens: int = 0
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int = 0
    finished: bool = False
    cache_write_1h: int = 0
    searches: int = 0
    audio: int = 0
    audio_cached: int = 0
    model: str = ""
    cost_micros: int = 0
    surcharge: int = 0
    unpriced: str = ""


UNPRICED: Final = -1
"""The effect of a value that costs more than what is listed, or an unknown amount."""
COUNTED: Final = 0
MemberEffect = int | Mapping[str, int]
"""What a member does to the price: nothing but what is counted, or a surcharge in percent for each of its values."""

TIERS: Final[Mapping[str, int]] = MappingProxyType[str, int](
    {
        **dict.fromkeys(("auto", "batch", "default", "flex", "scale", "standard", "unspecified"), COUNTED),
        **dict.fromkeys(("fast", "priority"), UNPRICED),
    }
)
TRAFFIC: Final[Mapping[str, int]] = MappingProxyType(
    dict.fromkeys(("traffic_type_unspecified", "on_demand", "on_demand_flex", "on_demand_offpeak"), COUNTED)
    | {"provisioned_throughput": COUNTED, "on_demand_priority": UNPRICED}
)
PROMPT_DETAILS: Final = "cached_tokens cache_write_tokens audio_tokens text_tokens image_tokens video_tokens"
COMPLETION_DETAILS: Final = (
    "reasoning_tokens text_tokens accepted_prediction_tokens rejected_prediction_tokens thinking_tokens"
)


def list_paths(names: str, parent: str = "") -> dict[str, int]:
    return {f"{parent}.{name}" if parent else name: COUNTED for name in names.split()}


_PLACES: Final = {"global": COUNTED, "not_available": COUNTED, "us": 10}
_SPEEDS: Final = {"standard": COUNTED, "fast": UNPRICED}
COMMON_MEMBERS: Final = {
    **list_paths("cost cost_details estimated_cost cost_in_usd_ticks is_byok"),
    **list_paths("web_search_requests tool_calls_requested tool_calls_executed", "server_tool_use"),
    **list_paths("web_search_requests tool_calls_requested tool_calls_executed", "server_tool_use_details"),
    "service_tier": TIERS,
    "speed": _SPEEDS,
    "inference_geo": _PLACES,
}


class PriceEffects(msgspec.Struct, frozen=True):
    surcharge: int = 0
    unpriced: str = ""


def read_price_effects(
    members: Mapping[str, MemberEffect], report: Mapping[str, Any] | None, tier: str | None = None
) -> PriceEffects:
    """Read what a report and the tier beside it do to the price besides the counts. The dearest of all applies."""
    effects = list(_list_effects(members, [report, {"service_tier": tier}], ""))
    unpriced = next((name for name, effect in effects if effect == UNPRICED), "")
    return PriceEffects(max(0, 0, *(effect for _, effect in effects)), shorten(unpriced, 80))


def _list_effects(members: Mapping[str, MemberEffect], node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the effect of each member that is neither zero nor empty."""
    if members.get(path) == COUNTED:
        return
    if isinstance(node, dict):
        for name, value in cast("dict[str, Any]", node).items():
            yield from _list_effects(members, value, f"{path}.{name}" if path else name)
    elif isinstance(node, list):
        for value in cast("list[Any]", node):
            yield from _list_effects(members, value, path)
    elif node:
        effect = members.get(path)
        if isinstance(effect, Mapping):
            yield f"{path}: {node}", effect.get(str(node).lower(), UNPRICED)
        else:
            yield path, UNPRICED


def convert_report(report: Mapping[str, Any] | None, shape: type[T]) -> T | None:
    return None if report is None else msgspec.convert(report, shape)


_MAX_REPORTED_USD: Final = 1_000_000
_TICKS_PER_USD: Final = 10**10


class _CostDetails(msgspec.Struct):
    upstream_inference_cost: float | None = None


class _CostSums(msgspec.Struct):
    total_cost: float | None = None


class ReportedCost(msgspec.Struct):
    """What a gateway charged, in dollars; with a key of one's own at the maker, the maker's cost comes on top."""

    cost: float | _CostSums | None = None
    estimated_cost: float | None = None
    cost_in_usd_ticks: int | None = None
    is_byok: bool | None = None
    cost_details: _CostDetails | None = None

    @property
    def cost_micros(self) -> int:
        upstream = self.cost_details.upstream_inference_cost if self.is_byok and self.cost_details else None
        cost = self.cost.total_cost if isinstance(self.cost, _CostSums) else self.cost
        ticks_usd = (self.cost_in_usd_ticks or 0) / _TICKS_PER_USD
        usd = max((cost or 0) + (upstream or 0), self.estimated_cost or 0, ticks_usd)
        return ceil(Decimal(str(usd)) * DOLLAR) if 0 < usd < _MAX_REPORTED_USD else 0


class ServerTools(msgspec.Struct):
    web_search_requests: int | None = None

    @property
    def searches(self) -> int:
        return self.web_search_requests or 0


NO_TOOLS: Final = ServerTools()


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


def count_all_output(prompt: int | None, completion: int | None, total: int | None, reasoning: int) -> int | None:
    """Count all output, including what a server reports in addition to the completion."""
    if completion is None and total is None:
        return None
    unexplained_tokens = (total or 0) - (prompt or 0) - (completion or 0)
    return (completion or 0) + max(unexplained_tokens, reasoning if reasoning > (completion or 0) else 0, 0)


def make_report_reader(shape: Any, reading: Callable[[Any], UsageReading]) -> Callable[[bytes], UsageReading]:
    decode = msgspec.json.Decoder(shape).decode
    return lambda body: reading(decode(body))
