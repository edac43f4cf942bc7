"""The limits that files set, as they are written there. What they come to is worked out by whoever reads both files."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from halter.core.mind import ContextStrategy
from halter.core.written import Dollars, Duration, Spec, Window

OnCap = Literal["wrap_up", "stop", "ask"]

Recoveries = Annotated[
    int, Meta(ge=0, le=100, description="How often an answer that was cut off is gone on with; 0 for never.")
]
Repeats = Annotated[
    int, Meta(ge=1, le=1000, description="So many steps in a row may make the same calls with the same results.")
]
ReserveTokens = Annotated[int, Meta(ge=0, description="So many tokens before the budget's end, a warning is given.")]
ReserveCost = Annotated[float, Meta(ge=0, le=1, description="The part of the cap that is kept for wrapping up.")]


class Limits(Spec, frozen=True):
    """What a session and an agent may use at most."""

    ALSO: ClassVar[Mapping[str, str]] = MappingProxyType({"cost_limit": "max_cost_usd"})

    max_cost_usd: Annotated[Dollars, Meta(description="The most that one session may cost.")] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="The most that the agent may cost in an hour.")] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="The most that the agent may cost in a day.")] | UnsetType
    ) = UNSET
    on_cap: Annotated[OnCap, Meta(description="What a session does at its cap.")] | UnsetType = UNSET
    token_budget: (
        Annotated[
            int, Meta(ge=0, description="The most tokens of one session, cached ones not counted; 0 for no budget.")
        ]
        | UnsetType
    ) = UNSET
    max_steps: Annotated[int, Meta(ge=1, description="The most steps of one turn.")] | UnsetType = UNSET
    timeout: Annotated[Duration, Meta(description="How long one turn may take; 0 for no timeout.")] | UnsetType = UNSET
    min_output_tokens: (
        Annotated[int, Meta(ge=1, description="The shortest answer that a request is still made for.")] | UnsetType
    ) = UNSET
    max_output_tokens: (
        Annotated[int, Meta(ge=1, le=1_000_000, description="The longest answer that is asked for, in tokens.")]
        | UnsetType
    ) = UNSET
    max_retries: (
        Annotated[int, Meta(ge=0, le=100, description="How often a request is repeated that failed for a while only.")]
        | UnsetType
    ) = UNSET
    context_window: (
        Annotated[Window, Meta(description="How many tokens a request may have; 0 for as many as the model takes.")]
        | UnsetType
    ) = UNSET
    context_strategy: (
        Annotated[ContextStrategy, Meta(description="What is left out when the history outgrows the window.")]
        | UnsetType
    ) = UNSET
    streaming: (
        Annotated[bool, Meta(description="Whether answers come word by word; in a chat they do, if not given.")]
        | UnsetType
    ) = UNSET
    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class Guardrails(Spec, frozen=True):
    """Another place for those of the limits that keep a turn in its lane."""

    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class FleetLimits(Spec, frozen=True):
    """What all agents together may use at most."""

    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="The most that all agents may cost in a day.")] | UnsetType
    ) = UNSET
    max_cost_usd_per_month: (
        Annotated[Dollars, Meta(description="The most that all agents may cost in a month.")] | UnsetType
    ) = UNSET


class ModelRate(Spec, frozen=True):
    """How fast a model may be asked, by all agents on all machines together."""

    requests_per_minute: (
        Annotated[int, Meta(ge=1, description="The most requests that are made in a minute.")] | UnsetType
    ) = UNSET
    tokens_per_minute: (
        Annotated[int, Meta(ge=1, description="The most tokens of a minute's requests, cached ones not counted.")]
        | UnsetType
    ) = UNSET


class AgentBounds(Spec, frozen=True):
    """What each agent may use at most."""

    limits: Limits = Limits()
