"""What starts an agent's task sessions, what they read, and where goes what they leave: as an agent's file says it.

A field is a key of the file, under the same name, and its default is the one that holds. Money is in micro-dollars and
times are microseconds here; in the file they are dollars, and seconds or `30m`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE, SECOND
from halter.core.limits import Cap, Caps
from halter.core.pacing import ActiveHours, Text
from halter.core.written import (
    Address,
    Dollars,
    Duration,
    HeaderName,
    HeaderValue,
    Name,
    OneModel,
    SecretReference,
    Spec,
    Zone,
)

TriggerType = Literal["schedule", "watch", "webhook"]
Overlap = Literal["skip", "queue"]
CatchUp = Literal["once", "never"]
ChannelType = Literal["in_app", "email", "webhook", "apprise"]


class Trigger(Spec, frozen=True):
    """What all that starts sessions has in common: its name, what the session is told, and what it may spend."""

    name: Annotated[Name, Meta(description="The trigger's name.")]
    prompt: Annotated[str, Meta(description="What the session is told.")] = ""
    playbook: (
        Annotated[Text, Meta(description="A playbook of the agent's folder that is played instead.")] | UnsetType
    ) = UNSET
    inputs: Annotated[Mapping[str, Any], Meta(description="What that playbook is given.")] = {}
    collections: Annotated[
        tuple[Name, ...], Meta(description="The collections whose documents the session may read.")
    ] = ()
    max_cost_usd: Annotated[Dollars, Meta(description="The most that one run may spend.")] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="The most that all runs may spend in an hour.")] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="The most that all runs may spend in a day.")] | UnsetType
    ) = UNSET

    def caps(self) -> tuple[Cap, ...]:
        """List the caps of all its runs together."""
        both: tuple[tuple[int | UnsetType | None, Literal["hour", "day"]], ...] = (
            (self.max_cost_usd_per_hour, "hour"),
            (self.max_cost_usd_per_day, "day"),
        )
        return tuple(Cap(usd, per) for usd, per in both if usd is not UNSET)


class Schedule(Trigger, frozen=True):
    """Starts a session at certain times. One of `cron`, `every` and `at` says when."""

    cron: Annotated[Text, Meta(description="Five fields, as in `0 9 * * 1-5`.")] | UnsetType = UNSET
    every: Annotated[Duration, Meta(description="The time between two runs, as in `15m`.")] | UnsetType = UNSET
    at: Annotated[Text, Meta(description="One moment, as in `2026-12-24 09:00`.")] | UnsetType = UNSET
    timezone: Annotated[Zone, Meta(description="Whose clock that is; the fleet's, if not given.")] | UnsetType = UNSET
    overlap: Annotated[
        Overlap, Meta(description="What becomes of a run whose time comes while the one before it works.")
    ] = "skip"
    catch_up: Annotated[
        CatchUp, Meta(description="Whether what was missed while nothing ran is made up for, once.")
    ] = "once"
    jitter: Annotated[Duration, Meta(description="By how much chance may delay a run.")] = 0
    min_interval: Annotated[Duration, Meta(description="No run starts sooner than this after another.")] = MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="When it may run.")] | UnsetType = UNSET


class Watch(Trigger, frozen=True):
    """Starts a session for each new or changed document of a folder, or of a collection."""

    path: Annotated[Text, Meta(description="A folder, seen from the agent's own.")] | UnsetType = UNSET
    pattern: Annotated[Text, Meta(description="Which files of it, as in `*.pdf`.")] = "*"
    collection: Annotated[Name, Meta(description="A collection, in place of a folder.")] | UnsetType = UNSET
    debounce: Annotated[Duration, Meta(description="A document is taken when it has not changed for so long.")] = (
        2 * SECOND
    )
    max_attempts: Annotated[
        int, Meta(ge=1, description="So often a document is tried; then it is left to a person.")
    ] = 3
    max_parallel: Annotated[int, Meta(ge=1, description="So many documents are worked on at once.")] = 4
    existing: Annotated[bool, Meta(description="Whether what lies there at the beginning counts as new.")] = True


class Webhook(Trigger, frozen=True, kw_only=True):
    """Starts a session for each delivery by HTTP."""

    HIDDEN: ClassVar[bool] = True

    token: Annotated[SecretReference, Meta(description="What a delivery must bring, as `${secret:NAME}`.")]
    max_bytes: Annotated[int, Meta(ge=1, description="The longest body that is taken.")] = 256 * 1024


AnyTrigger = Schedule | Watch | Webhook


def caps_of(caps: Caps, trigger: AnyTrigger) -> Caps:
    """Let a session inherit the caps of its trigger: of one run, and of all of them together."""
    run, own = trigger.max_cost_usd, caps.session.max_cost_usd
    if run is not UNSET and run is not None:
        own = run if own is None else min(own, run)
    return msgspec.structs.replace(caps, session=Cap(own, caps.session.per), trigger=trigger.caps())


class Collection(Spec, frozen=True):
    """Documents that an agent may read: the files of a folder."""

    path: Annotated[Text, Meta(description="The folder, seen from the agent's own.")]
    pattern: Annotated[Text, Meta(description="Which files of it, as in `**/*.md`.")] = "*"
    description: Annotated[str, Meta(description="What it holds, in a few words for the model.")] = ""


class Review(Spec, frozen=True):
    """Who looks at findings before they are delivered. It is never the author's own request."""

    judges: Annotated[
        tuple[OneModel, ...], Meta(description="The models that judge; the agent's own, asked anew, if none is named.")
    ] = ()
    instructions: Annotated[str, Meta(description="What they are to look for, beside the usual.")] = ""
    max_cost_per_message_usd: (
        Annotated[Dollars, Meta(description="Above this, one judge is asked instead of all; above it too, none.")]
        | UnsetType
    ) = UNSET


class Channel(Spec, frozen=True):
    """One way to tell somebody something."""

    HIDDEN: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="The channel's name.")]
    type: Annotated[ChannelType, Meta(description="How it is sent.")]
    to: Annotated[tuple[Text, ...], Meta(description="Whom an e-mail goes to.")] = ()
    sender: Annotated[Text, Meta(description="Whom an e-mail comes from.")] | UnsetType = UNSET
    host: Annotated[Text, Meta(description="The mail server.")] | UnsetType = UNSET
    port: (
        Annotated[int, Meta(ge=1, le=65535, description="Its port; 465 or 587 or 25, by its security.")] | UnsetType
    ) = UNSET
    security: Annotated[
        Literal["tls", "starttls", "none"], Meta(description="How the connection to the mail server is kept private.")
    ] = "starttls"
    username: Annotated[Text, Meta(description="Who logs in there.")] | UnsetType = UNSET
    password: Annotated[SecretReference, Meta(description="The password, as `${secret:NAME}`.")] | UnsetType = UNSET
    url: Annotated[Address, Meta(description="The address of a webhook.")] | UnsetType = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of a webhook; a key is written `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    service: (
        Annotated[SecretReference, Meta(description="The apprise address of a service, as `${secret:NAME}`.")]
        | UnsetType
    ) = UNSET


class Notify(Spec, frozen=True):
    """Whom an agent tells what."""

    channels: Annotated[tuple[Channel, ...], Meta(description="The ways to tell; in the app, if none is named.")] = ()
    on: Annotated[
        tuple[Literal["halted", "failed", "waiting", "quarantined"], ...],
        Meta(description="What the runtime itself tells of, beside what the agent sends."),
    ] = ("halted", "failed", "waiting", "quarantined")


class Anonymize(Spec, frozen=True):
    """What is hidden from models that run elsewhere."""

    enabled: Annotated[bool, Meta(description="Whether it is; on for `phases: review`, off elsewhere.")] | UnsetType = (
        UNSET
    )
    names: Annotated[tuple[Text, ...], Meta(description="Names that are hidden, beside what is recognised.")] = ()


VerbName = Literal[
    "retrieve_chunks",
    "run_skill",
    "run_playbook",
    "emit_finding",
    "propose_memory",
    "propose_precedent",
    "notify",
]
Verbs = tuple[VerbName, ...]
VERBS: Final[Verbs] = get_args(VerbName)
"""What a task session can do beside its agent's tools."""


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, for one agent, with zones and defaults filled in.

    `verbs` are those that its sessions have; `anonymize` is None where nothing is hidden. At most so many of its task
    sessions as `concurrency` says are awake at once, on all machines together; None is any number.
    """

    schedules: tuple[Schedule, ...] = ()
    watches: tuple[Watch, ...] = ()
    webhooks: tuple[Webhook, ...] = ()
    collections: Mapping[str, Collection] = {}
    review: Review = Review()
    notify: Notify = Notify()
    anonymize: tuple[str, ...] | None = None
    verbs: Verbs = ()
    idle_halt: int = 5 * MINUTE
    concurrency: int | None = None

    def triggers(self) -> tuple[AnyTrigger, ...]:
        """List all that starts sessions."""
        return (*self.schedules, *self.watches, *self.webhooks)

    def trigger(self, name: str) -> AnyTrigger | None:
        """Find a trigger by its name."""
        return next((each for each in self.triggers() if each.name == name), None)


class Skill(msgspec.Struct, frozen=True):
    """What a SKILL.md says."""

    name: str
    description: str
    instructions: str


def trigger_id(agent: str, name: str) -> str:
    """Name a trigger in the whole fleet."""
    return f"{agent}/{name}"
