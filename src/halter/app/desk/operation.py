"""What can be seen and done in a store, described once for the command line, the HTTP API and the reference.

An operation is a function of a desk. Its signature says what it takes: each parameter is annotated with a type that
carries its bounds and its description. Its docstring says what it does, its return type what it answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec
from msgspec import Meta

from halter.app.desk.desk import Role
from halter.core.clock import DAY, SECOND

LATEST: Final = 1 << 53
"""No moment and no sequence number is larger."""
MOST: Final = 1000
CLEANED: Final = "cleaned"
"""Marks a text in which characters that no store keeps are replaced; in all others they are refused."""

Name = Annotated[str, Meta(max_length=300)]
Words = Annotated[str, Meta(max_length=2000)]
Reason = Annotated[Words, Meta(description="Why; it stands in the journal.", extra={"metavar": "TEXT"})]
Scope = Annotated[Name, Meta(description="fleet, agent:NAME, trigger:NAME or session:ID")]
Session = Annotated[Name, Meta(description="A session's id.")]
Agent = Annotated[Name, Meta(description="An agent's name.")]
Dollars = Annotated[str, Meta(max_length=40, description="The new cap in dollars, as in 2.50, or none.")]
Moment = Annotated[int, Meta(ge=0, le=LATEST, description="Microseconds since 1970.")]
Limit = Annotated[int, Meta(ge=1, le=MOST, description="How many of the newest.", extra={"metavar": "N"})]
Count = Annotated[int, Meta(ge=1, le=MOST, description="How many at most.")]
Seconds = Annotated[int, Meta(ge=0, le=DAY // SECOND, description="Over how many seconds it comes back.")]


class Done(msgspec.Struct, frozen=True):
    """What was done, in a sentence."""

    subject: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that can be seen or done.

    `run` takes a desk and the parameters by name. It checks who asks; `role` says before it which role it demands. Only
    what `writes` changes the store, and is a POST. What answers in `lines` is an asynchronous iterator, offered as
    a file of that name. A `command` of the command line does the same. Parameters in `hidden` are for callers in Python
    alone; `takes` names them where a signature does not.
    """

    name: str
    path: str
    run: Callable[..., Any]
    role: Role = "viewer"
    writes: bool = False
    lines: str = ""
    command: str = ""
    hidden: tuple[str, ...] = ()
    takes: type[msgspec.Struct] | None = None

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return (self.run.__doc__ or "").partition("\n")[0].rstrip(".")

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """All that it takes by name. An unknown name is refused."""
        return self.takes or parameters_of(self.run, self.hidden)

    @cached_property
    def result(self) -> Any:
        """The type of what it answers, or of one line of it."""
        told = get_type_hints(self.run, include_extras=True)["return"]
        return get_args(told)[0] if self.lines else told

    @property
    def in_path(self) -> frozenset[str]:
        """The parameters that stand in its path."""
        return frozenset(part.strip("{}").partition(":")[0] for part in self.path.split("/") if part.startswith("{"))


def parameters_of(run: Callable[..., Any], hidden: tuple[str, ...] = ()) -> type[msgspec.Struct]:
    """Make a struct of what a function takes beside its desk."""
    hints = get_type_hints(run, include_extras=True)
    fields: list[Any] = []
    for parameter in list(signature(run).parameters.values())[1:]:
        if parameter.name not in hidden:
            default = () if parameter.default is Parameter.empty else (parameter.default,)
            fields.append((parameter.name, hints[parameter.name], *default))
    name = "".join(map(str.capitalize, run.__name__.split("_")))
    return msgspec.defstruct(f"{name}Parameters", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)
