"""The keys of an agent that runs unattended: limits, hours, gate and hot state."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import DAY, MINUTE, SECOND, format_duration
from halter.spec.forms import DayTime, Duration, Name, NonEmptyText, OneModel, PathInto, Spec, UnusableKey, Zone, within
from halter.spec.sensors import AnySensor, ModelSignal

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

    def require_fit(self) -> None:
        if self.start == self.end:
            sentence = f"starts and ends at {self.start}; change one of them"
            raise UnusableKey(f"{sentence}, or remove the key to allow all hours.")


class Autonomy(Spec, frozen=True):
    """The settings for unattended runs, and the limits that the agent cannot change."""

    enabled: Annotated[bool, Meta(description="Run the agent unattended.")] = False
    prompt: Annotated[str, Meta(description="First message of each turn; a standard text by default.")] = ""
    min_sleep: Annotated[
        Duration,
        Meta(
            description="Minimum sleep.",
            extra=within(0, None, "is {value}, so the agent might never pause; write a duration, as in 1s."),
        ),
    ] = SECOND
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

    def require_fit(self) -> None:
        if self.min_sleep > self.max_sleep:
            sentence = f"({format_duration(self.min_sleep)}) is longer than `autonomy.max_sleep`"
            raise UnusableKey(f"{sentence} ({format_duration(self.max_sleep)}); change one of them.", "min_sleep")
        if self.gate is UNSET:
            return
        model = self.gate.model
        if self.precheck_model is not UNSET and model not in (UNSET, self.precheck_model):
            sentence = f"is `{self.precheck_model}`, but `autonomy.gate.model` is `{model}`"
            raise UnusableKey(f"{sentence}; both set the same model, so keep one of them.", "precheck_model")
        if self.gate.prompt and model is UNSET and self.precheck_model is UNSET:
            raise UnusableKey("needs a `model`, which is missing; write it, or remove the prompt.", "gate", "prompt")


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

    def require_fit(self) -> None:
        if self.max_items is not UNSET and self.type != "array":
            sentence = f"applies to arrays, but the field's type is {self.type}; write `type: array`, or remove it."
            raise UnusableKey(sentence, "max_items")
        for key in ("auto_refresh", "refresh_arguments", "path"):
            if self.refresh_tool is UNSET and getattr(self, key):
                raise UnusableKey(f"needs a `refresh_tool`, which is missing; write it, or remove `{key}`.", key)


class HotStateSpec(Spec, frozen=True):
    """The typed, ageing facts that the model sees every turn."""

    fields: Annotated[Mapping[Name, HotField], Meta(description="Facts, by name.")] = {}


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """The pacing of one agent, with its gate and time zone filled in."""

    autonomy: Autonomy = Autonomy()
    fields: Mapping[str, HotField] = {}
    """Every field, including those that only a sensor names."""
    sensors: tuple[AnySensor, ...] = ()

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
            yield from (signal.model for signal in sensor.signals if isinstance(signal, ModelSignal))
