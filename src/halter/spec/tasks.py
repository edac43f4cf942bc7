"""The keys of what a task session may use and deliver, and the tasks of one agent as a whole."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import MINUTE
from halter.spec.channels import Notify
from halter.spec.forms import Dollars, FilePattern, Name, NonEmptyText, OneModel, Spec
from halter.spec.triggers import AnyTrigger, Schedule, Watch, Webhook


class Collection(Spec, frozen=True):
    """The documents in a folder that an agent may read."""

    path: Annotated[NonEmptyText, Meta(description="Folder, relative to the agent's folder.")]
    pattern: Annotated[FilePattern, Meta(description="Pattern of the files in the folder, as in `**/*.md`.")] = "*"
    description: Annotated[str, Meta(description="Short description of the contents for the model.")] = ""


class Review(Spec, frozen=True):
    """The review of findings before delivery. A judge is never the request that wrote the finding."""

    judges: Annotated[
        tuple[OneModel, ...], Meta(description="Models that judge; by default the agent's own model in a new request.")
    ] = ()
    instructions: Annotated[str, Meta(description="Additional instructions for the judges.")] = ""
    max_cost_per_message_usd: (
        Annotated[Dollars, Meta(description="Maximum cost of a review: above it one judge reviews, then none.")]
        | UnsetType
    ) = UNSET


class Anonymize(Spec, frozen=True):
    """The values that are hidden from remote models."""

    enabled: (
        Annotated[bool, Meta(description="Hide personal data; by default on for `phases: review`, else off.")]
        | UnsetType
    ) = UNSET
    names: Annotated[tuple[NonEmptyText, ...], Meta(description="Names to hide, in addition to recognised data.")] = ()


VerbName = Literal[
    "retrieve_chunks", "run_skill", "run_playbook", "emit_finding", "propose_memory", "propose_precedent", "notify"
]
Verbs = tuple[VerbName, ...]
VERBS: Final[Verbs] = get_args(VerbName)


class SubAgent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent in a sibling folder that the model can call as a tool."""

    name: Annotated[Name, Meta(description="Name of an agent in a sibling folder.")]
    description: Annotated[str, Meta(description="Purpose of the agent, for the calling model.")] = ""
    max_cost_usd: (
        Annotated[Dollars, Meta(description="Maximum cost of one task; half of the remaining cap is always a bound.")]
        | UnsetType
    ) = UNSET
    hand_off: Annotated[bool, Meta(description="Pass the whole conversation; the answer ends the turn.")] = False


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one agent, with zones and defaults filled in.

    `verbs` are those of its sessions; `anonymize` is None if nothing is hidden. At most `concurrency` of its task
    sessions are awake at the same time, on all machines together; None means no bound.
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
        return (*self.schedules, *self.watches, *self.webhooks)

    def trigger(self, name: str) -> AnyTrigger | None:
        return next((each for each in self.triggers() if each.name == name), None)
