"""The keys of an agent that runs unattended: limits, hours, gate and hot state."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import DAY, MINUTE, SECOND
from halter.spec.forms import DayTime, Duration, Name, NonEmptyText, OneModel, PathInto, Spec, Zone
from halter.spec.sensors import SensorSpec

FieldType = Literal["any", "object", "array", "string", "number", "integer", "boolean"]
ALWAYS_WAKING_NAMES: Final = ("message", "decision")
"""Names that always wake a session, and may still be listed."""


class Gate(Spec, frozen=True):
    """The cheap check before a full turn. All given conditions must hold; they are tested in this order."""

    on: Annotated[
        Literal["change", "always"],
        Meta(description="`change`: skip a turn if nothing has changed since the last; `always`: do not check."),
    ] = "change"
    expression: Annotated[str, Meta(description="A CEL expression over `hot`, `before`, `changed` and `skips`.")] = ""
    model: (
        Annotated[OneModel, Meta(description="A small model that judges whether the change is worth a turn.")]
        | UnsetType
    ) = UNSET
    prompt: Annotated[str, Meta(description="Instructions for that model.")] = ""
    max_skips: Annotated[int, Meta(ge=0, description="Take a turn after this many consecutive skips; 0 disables.")] = 0


class ActiveHours(Spec, frozen=True):
    """The hours in which an agent may be awake. An end before the start is on the next day."""

    start: Annotated[DayTime, Meta(description="Start of the hours, as in `08:00`.")]
    end: Annotated[DayTime, Meta(description="End of the hours, as in `23:00`.")]
    timezone: Annotated[Zone, Meta(description="Time zone of the times; by default the fleet's.")] | UnsetType = UNSET


class Autonomy(Spec, frozen=True):
    """The settings for unattended runs, and the limits that the agent cannot change."""

    enabled: Annotated[bool, Meta(description="Run the agent unattended.")] = False
    prompt: Annotated[str, Meta(description="First message of each turn; a standard text by default.")] = ""
    min_sleep: Annotated[Duration, Meta(description="Minimum sleep.")] = SECOND
    max_sleep: Annotated[Duration, Meta(description="Maximum sleep.")] = DAY
    max_consecutive_turns: Annotated[
        int, Meta(ge=1, description="Maximum number of turns without a sleep; then the agent must sleep.")
    ] = 50
    token_budget_per_hour: Annotated[
        int, Meta(ge=0, description="Maximum tokens per hour, without those read from a cache; 0 disables.")
    ] = 100_000
    max_actions_per_minute: Annotated[
        int, Meta(ge=0, description="Maximum calls with side effects in any minute; 0 disables.")
    ] = 10
    idle_timeout: Annotated[
        Duration, Meta(description="End the session after this long without activity; 0 disables.")
    ] = 10 * MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="Hours in which the agent may be awake.")] | UnsetType = UNSET
    gate: Annotated[Gate, Meta(description="Cheap check before a full turn.")] | UnsetType = UNSET
    precheck_model: Annotated[OneModel, Meta(description="Alias of `gate.model`.")] | UnsetType = UNSET


class HotField(Spec, frozen=True):
    """One fact that the model sees every turn."""

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"refresh_params": "refresh_arguments"})

    type: Annotated[FieldType, Meta(description="JSON type of the value.")] = "any"
    ttl: Annotated[Duration, Meta(description="Age after which the value is marked stale.")] | UnsetType = UNSET
    refresh_tool: (
        Annotated[
            NonEmptyText,
            Meta(description="Read-only tool whose result becomes the value, also when the agent calls it."),
        ]
        | UnsetType
    ) = UNSET
    refresh_arguments: Annotated[Mapping[str, Any], Meta(description="Arguments of `refresh_tool`.")] = {}
    path: Annotated[PathInto, Meta(description="Path of the value in the result, as in `account.cash`.")] = ""
    auto_refresh: Annotated[bool, Meta(description="Refresh a stale value before each turn.")] = False
    max_items: (
        Annotated[int, Meta(ge=1, description="Maximum number of items of an array; older ones are dropped.")]
        | UnsetType
    ) = UNSET
    description: Annotated[str, Meta(description="Short description for the model.")] = ""


class HotStateSpec(Spec, frozen=True):
    """The typed, ageing facts that the model sees every turn."""

    fields: Annotated[Mapping[Name, HotField], Meta(description="Facts, by name.")] = {}


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """The pacing of one agent, with its gate and time zone filled in."""

    autonomy: Autonomy = Autonomy()
    fields: Mapping[str, HotField] = {}
    """Every field, including those that only a sensor names."""
    sensors: tuple[SensorSpec, ...] = ()

    def names(self) -> Iterator[str]:
        yield from self.fields
        for sensor in self.sensors:
            yield sensor.name
            yield from (signal.name for signal in sensor.signals)
        yield from ALWAYS_WAKING_NAMES

    def models(self) -> Iterator[str]:
        gate = self.autonomy.gate
        if gate is not UNSET and gate.model is not UNSET:
            yield gate.model
        for sensor in self.sensors:
            yield from (signal.model for signal in sensor.signals if signal.model is not UNSET)
