"""The keys of caps and limits, and the kinds of order that many policy keys have.

UNSET means that the key is absent: the other file, or the default, then applies. `order` in the metadata of a policy
key says which of two values is the stricter; `halter.policy.order` has the kinds.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from halter.spec.forms import (
    Dollars,
    Duration,
    Spec,
    UnusableKey,
    Window,
)
from halter.spec.models import ContextStrategy

# The kinds of order that many keys have.
LOWER: Final[dict[str, Any]] = {"order": "lower"}
LOWER_ABOVE_ZERO: Final[dict[str, Any]] = {"order": "lower", "unlimited": 0}
COVERED: Final[dict[str, Any]] = {"order": "covered"}
NO_LIMIT: Final[dict[str, Any]] = {"order": "free"}
DECLARED: Final[dict[str, Any]] = {"order": "declared"}
LOCAL: Final[dict[str, Any]] = {"order": "local"}
OnCap = Literal["wrap_up", "stop", "ask", "wait"]
Recoveries = Annotated[
    int,
    Meta(
        ge=0, le=100, description="Maximum number of continuations of a truncated answer; 0 disables.", extra=NO_LIMIT
    ),
]
Repeats = Annotated[
    int, Meta(ge=1, le=1000, description="Maximum number of consecutive identical steps.", extra=NO_LIMIT)
]
ReserveTokens = Annotated[
    int,
    Meta(ge=0, description="Tokens before the end of the budget at which the model is warned.", extra=NO_LIMIT),
]
ReserveCost = Annotated[
    float, Meta(ge=0, le=1, description="Fraction of the cap reserved for the wrap-up.", extra=NO_LIMIT)
]


class Limits(Spec, frozen=True):
    """The caps and limits of a session and an agent."""

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"cost_limit": "max_cost_usd"})

    max_cost_usd: Annotated[Dollars, Meta(description="Maximum cost of one session.", extra=LOWER)] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="Maximum cost of the agent in an hour.", extra=LOWER)] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="Maximum cost of the agent in a day.", extra=LOWER)] | UnsetType
    ) = UNSET
    on_cap: (
        Annotated[
            OnCap,
            Meta(
                description="Behaviour of a session at its cap; with `wait`, a program's run sleeps until a window "
                "opens.",
                extra=NO_LIMIT,
            ),
        ]
        | UnsetType
    ) = UNSET
    token_budget: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Maximum tokens of one session, without those read from a cache; 0 disables.",
                extra=LOWER_ABOVE_ZERO,
            ),
        ]
        | UnsetType
    ) = UNSET
    max_steps: Annotated[int, Meta(ge=1, description="Maximum number of steps in a turn.", extra=LOWER)] | UnsetType = (
        UNSET
    )
    timeout: (
        Annotated[Duration, Meta(description="Time limit of one turn; 0 disables.", extra=LOWER_ABOVE_ZERO)] | UnsetType
    ) = UNSET
    min_output_tokens: (
        Annotated[
            int,
            Meta(
                ge=1, description="Minimum answer length, in tokens, for which a request is still made.", extra=NO_LIMIT
            ),
        ]
        | UnsetType
    ) = UNSET
    max_output_tokens: (
        Annotated[int, Meta(ge=1, le=1_000_000, description="Maximum answer length, in tokens.", extra=LOWER)]
        | UnsetType
    ) = UNSET
    max_retries: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=100,
                description="Maximum number of retries of a request after a temporary failure.",
                extra=LOWER,
            ),
        ]
        | UnsetType
    ) = UNSET
    outage_backoff: (
        Annotated[
            Duration,
            Meta(
                description="Maximum pause between two attempts of an unattended agent while no model answers; "
                "0 ends the turn instead.",
                extra=NO_LIMIT,
            ),
        ]
        | UnsetType
    ) = UNSET
    context_window: (
        Annotated[
            Window,
            Meta(description="Maximum tokens of a request; 0 for the model's own context window.", extra=NO_LIMIT),
        ]
        | UnsetType
    ) = UNSET
    context_strategy: (
        Annotated[
            ContextStrategy,
            Meta(description="How a history that exceeds the context window is cut.", extra=NO_LIMIT),
        ]
        | UnsetType
    ) = UNSET
    streaming: (
        Annotated[bool, Meta(description="Stream answers; by default only in a chat.", extra=NO_LIMIT)] | UnsetType
    ) = UNSET
    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class Guardrails(Spec, frozen=True):
    """An alias of four of the `limits`."""

    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class FleetLimits(Spec, frozen=True):
    """The caps of all agents together."""

    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="Maximum cost of all agents in a day.", extra=LOWER)] | UnsetType
    ) = UNSET
    max_cost_usd_per_month: (
        Annotated[Dollars, Meta(description="Maximum cost of all agents in a month.", extra=LOWER)] | UnsetType
    ) = UNSET


class ModelRate(Spec, frozen=True):
    """The rate limit of a model, for all agents on all machines together."""

    requests_per_minute: (
        Annotated[int, Meta(ge=1, description="Maximum number of requests per minute.", extra=LOWER)] | UnsetType
    ) = UNSET
    tokens_per_minute: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Maximum tokens of the requests per minute, without those read from a cache.",
                extra=LOWER,
            ),
        ]
        | UnsetType
    ) = UNSET

    def require_fit(self) -> None:
        if self.requests_per_minute is UNSET and self.tokens_per_minute is UNSET:
            raise UnusableKey("limits nothing; write `requests_per_minute`, `tokens_per_minute` or both.")


class AgentBounds(Spec, frozen=True):
    """The bounds for the limits of each agent."""

    limits: Limits = Limits()
