"""The keys of what starts sessions: schedules, watches and webhooks."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE, SECOND, format_duration
from halter.core.money import Cap, Caps
from halter.spec.autonomy import ActiveHours
from halter.spec.forms import (
    Dollars,
    Duration,
    FilePattern,
    Name,
    NonEmptyText,
    SecretReference,
    Spec,
    UnusableKey,
    Zone,
    within,
)

TriggerType = Literal["schedule", "watch", "webhook"]
Overlap = Literal["skip", "queue"]
CatchUp = Literal["once", "never"]


_SPENDABLE: Final = within(
    0, None, "is {value}, so nothing could run; write a number of dollars, or `none` for no separate cap."
)


class Trigger(Spec, frozen=True):
    """The keys that all triggers share: the name, the task of the session, and the caps."""

    CHOICES: ClassVar[Mapping[tuple[str, ...], str]] = MappingProxyType(
        {("prompt", "playbook"): "starts sessions without a task; write a `prompt` or a `playbook`."}
    )

    name: Annotated[Name, Meta(description="Name of the trigger.")]
    prompt: Annotated[str, Meta(description="Task of the session.")] = ""
    playbook: (
        Annotated[NonEmptyText, Meta(description="Playbook in the agent's folder to run instead of a prompt.")]
        | UnsetType
    ) = UNSET
    inputs: Annotated[Mapping[str, Any], Meta(description="Inputs of that playbook.")] = {}
    collections: Annotated[tuple[Name, ...], Meta(description="Collections whose documents the session may read.")] = ()
    max_cost_usd: Annotated[Dollars, Meta(description="Maximum cost of one run.", extra=_SPENDABLE)] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="Maximum cost of all runs in an hour.", extra=_SPENDABLE)] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="Maximum cost of all runs in a day.", extra=_SPENDABLE)] | UnsetType
    ) = UNSET

    def require_fit(self) -> None:
        if self.inputs and self.playbook is UNSET:
            raise UnusableKey("applies to a `playbook`, which is missing; write it.", "inputs")

    def caps(self) -> tuple[Cap, ...]:
        window_caps: tuple[tuple[int | UnsetType | None, Literal["hour", "day"]], ...] = (
            (self.max_cost_usd_per_hour, "hour"),
            (self.max_cost_usd_per_day, "day"),
        )
        return tuple(Cap(usd, per) for usd, per in window_caps if usd is not UNSET)


class Schedule(Trigger, frozen=True):
    """Starts sessions by time, given by exactly one of `cron`, `every` and `at`."""

    CHOICES: ClassVar[Mapping[tuple[str, ...], str]] = MappingProxyType(
        {**Trigger.CHOICES, ("cron", "every", "at"): "has no time; write `cron`, `every` or `at`."}
    )

    cron: (
        Annotated[NonEmptyText, Meta(description="Cron expression with five fields, as in `0 9 * * 1-5`.")] | UnsetType
    ) = UNSET
    every: Annotated[Duration, Meta(description="Time between two runs, as in `15m`.")] | UnsetType = UNSET
    at: Annotated[NonEmptyText, Meta(description="Time of a single run, as in `2026-12-24 09:00`.")] | UnsetType = UNSET
    timezone: Annotated[Zone, Meta(description="Time zone of the times; by default the fleet's.")] | UnsetType = UNSET
    overlap: Annotated[
        Overlap, Meta(description="Handling of a run that is due while the previous one is still running.")
    ] = "skip"
    catch_up: Annotated[
        CatchUp, Meta(description="`once`: run once for missed times after downtime; `never`: skip them.")
    ] = "once"
    jitter: Annotated[Duration, Meta(description="Maximum random delay of a run.")] = 0
    min_interval: Annotated[
        Duration,
        Meta(
            description="Minimum time between the starts of two runs.",
            extra=within(MINUTE - 1, None, "is {value}, but the minimum is 1m; write that or more."),
        ),
    ] = MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="Hours in which runs may start.")] | UnsetType = UNSET

    def require_fit(self) -> None:
        super().require_fit()
        if self.every is UNSET:
            return
        if self.every < self.min_interval:
            sentence = f"is {format_duration(self.every) if self.every else '0'}, which is shorter than its"
            least = format_duration(self.min_interval)
            raise UnusableKey(f"{sentence} `min_interval`, {least}; write that or more.", "every")
        if self.jitter >= self.every:
            sentence = f"is {format_duration(self.jitter)}, as long as its `every` or longer"
            raise UnusableKey(f"{sentence}, so runs would overlap; write less.", "jitter")


class Watch(Trigger, frozen=True):
    """Starts a session for each new or changed document of a folder or a collection."""

    CHOICES: ClassVar[Mapping[tuple[str, ...], str]] = MappingProxyType(
        {**Trigger.CHOICES, ("path", "collection"): "has nothing to watch; write a `path` or a `collection`."}
    )

    path: Annotated[NonEmptyText, Meta(description="Folder, relative to the agent's folder.")] | UnsetType = UNSET
    pattern: Annotated[FilePattern, Meta(description="Pattern of the files in the folder, as in `*.pdf`.")] = "*"
    collection: Annotated[Name, Meta(description="Collection to watch instead of a folder.")] | UnsetType = UNSET
    debounce: Annotated[Duration, Meta(description="Time that a document must be unchanged before it is read.")] = (
        2 * SECOND
    )
    max_attempts: Annotated[int, Meta(ge=1, description="Attempts per document before it is quarantined.")] = 3
    max_parallel: Annotated[int, Meta(ge=1, description="Maximum number of documents processed concurrently.")] = 4
    existing: Annotated[bool, Meta(description="Treat documents that exist at the first start as new.")] = True

    def require_fit(self) -> None:
        super().require_fit()
        if self.collection is not UNSET and self.pattern != "*":
            sentence = "applies to a `path`, but this watches a collection"
            raise UnusableKey(f"{sentence}; write it there, under `collections`, or remove it.", "pattern")


SchemeName = Literal["bearer", "github", "gitlab", "linear", "sentry", "shopify", "slack", "standard", "stripe"]
TIMED_SCHEMES: Final[frozenset[SchemeName]] = frozenset(("linear", "slack", "standard", "stripe"))
"""The schemes whose senders sign the time of a delivery."""


class Webhook(Trigger, frozen=True, kw_only=True):
    """Starts a session for each delivery by HTTP."""

    HIDDEN: ClassVar[bool] = True

    scheme: Annotated[
        SchemeName,
        Meta(description="Sender whose signature is checked; `bearer` for a token, `standard` for Standard Webhooks."),
    ] = "bearer"
    token: Annotated[
        SecretReference,
        Meta(description="Token that a delivery presents, or secret that signs it, as `${secret:NAME}`."),
    ]
    previous_token: (
        Annotated[SecretReference, Meta(description="Former token or secret, accepted as well while it is replaced.")]
        | UnsetType
    ) = UNSET
    tolerance: (
        Annotated[
            Duration,
            Meta(
                description="Maximum difference between a signed time and this machine's clock; `5m` by default.",
                extra=within(0, None, "is {value}, so every delivery would be refused; write a duration."),
            ),
        ]
        | UnsetType
    ) = UNSET
    max_bytes: Annotated[int, Meta(ge=1, description="Maximum size of a request body, in bytes.")] = 256 * 1024

    def require_fit(self) -> None:
        super().require_fit()
        if self.tolerance is not UNSET and self.scheme not in TIMED_SCHEMES:
            schemes = ", ".join(f"`{name}`" for name in sorted(TIMED_SCHEMES))
            sentence = f"does not apply to the scheme `{self.scheme}`, which signs no time"
            raise UnusableKey(f"{sentence}; only {schemes} do. Remove it.", "tolerance")


HEARTBEAT: Final = "heartbeat"
HEARTBEAT_PROMPT: Final = (
    "This is your heartbeat. Look at what you are responsible for, and do what needs to be done now. "
    "If there is nothing to do, say so in one sentence and stop."
)


def make_heartbeat(interval: int, hours: ActiveHours | UnsetType) -> Schedule:
    """Make the schedule that `heartbeat: 30m` abbreviates."""
    return Schedule(name=HEARTBEAT, prompt=HEARTBEAT_PROMPT, every=interval, active_hours=hours)


AnyTrigger = Schedule | Watch | Webhook


def inherit_trigger_caps(caps: Caps, trigger: AnyTrigger) -> Caps:
    """Add the caps of a trigger to those of its session: for one run, and for all runs together."""
    run_cap, session_cap = trigger.max_cost_usd, caps.session.max_cost_usd
    if run_cap is not UNSET and run_cap is not None:
        session_cap = run_cap if session_cap is None else min(session_cap, run_cap)
    return msgspec.structs.replace(caps, session=Cap(session_cap, caps.session.per), trigger=trigger.caps())


def trigger_id(agent: str, name: str) -> str:
    return f"{agent}/{name}"
