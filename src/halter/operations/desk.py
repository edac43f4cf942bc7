"""Who sits before a face, and what they may see and do there.

What can be seen and done in a store, described once for the command line, the HTTP API and the reference.

An operation is a function of a desk. Its signature says what it takes: each parameter is annotated with a type that
carries its bounds and its description. Its docstring says what it does, its return type what it answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, SECOND
from halter.core.errors import NotDone
from halter.core.ids import StreamId, may_decide, session_of
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.core.text import LAST_CHARACTER, clean
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.agents import AgentFolders

Role = Literal["viewer", "approver", "operator", "admin"]
"""Each may do what those before it may: look; decide and stop; steer and spend; all of it."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)
SCOPES: Final = ("agent:", "trigger:", "session:")

T = TypeVar("T")


class Who(msgspec.Struct, frozen=True):
    """Somebody by name, who is written down with all that they do. They see all agents, or only those named here."""

    name: str
    role: Role = "admin"
    agents: tuple[str, ...] = ()

    def may(self, role: Role) -> bool:
        """Tell whether somebody has a role, or a higher one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, agent: str) -> bool:
        """Tell whether an agent exists for them."""
        return not self.agents or agent in self.agents


@dataclass(frozen=True, slots=True)
class Desk:
    """A person or program at an opened store.

    `agents` are those that can be given something to do from here. A person who types may abbreviate ids to a beginning
    that is unambiguous (`short_ids`); a program must send whole ones.
    """

    app: Runtime
    who: Who
    short_ids: bool = False
    agents: "AgentFolders | None" = None

    def demand_role(self, role: Role, what: str) -> None:
        """Refuse what somebody has no role for."""
        if not self.who.may(role):
            raise NotDone(f"To {what} takes the role {role}, and {self.who.name} is {self.who.role}.", "forbidden")

    def demand(self, role: Role, what: str) -> None:
        """Refuse what somebody has no role for, and what an agent may not do, nor a program that it started."""
        if not may_decide(self.who.name):
            raise NotDone(f"Only a person may {what}, and this was started by an agent ({self.who.name}).", "refused")
        self.demand_role(role, what)

    def demand_all(self, what: str) -> None:
        """Refuse what concerns all agents to somebody who sees only some."""
        if self.who.agents:
            raise NotDone(f"To {what} concerns every agent, and {self.who.name} sees only some.", "forbidden")

    async def demand_scope(self, scope: str, what: str) -> None:
        """Refuse a scope that is none, is not theirs, or is the whole fleet to somebody who sees only a part of it."""
        readable_scope(scope)
        kind, _, name = scope.partition(":")
        match kind:
            case "fleet":
                self.demand_all(what)
            case "session":
                if self.who.agents:
                    await self.session(name)
            case _:
                self.demand_agent(name.partition("/")[0])

    def demand_agent(self, agent: str) -> None:
        """Refuse an agent that is not there for them."""
        if not self.who.sees(agent):
            raise NotDone(f"There is no agent {agent!r}.", "missing")

    async def session(self, session: str) -> SessionRow:
        """Find a session of theirs."""
        readable(session, "a session's id")
        if self.short_ids:
            return await self._session_from(session)
        for row in await self.app.store.ask(Query("session", SessionRow, {"session": session})):
            if row.started_at and self.who.sees(row.agent):
                return row
        raise NotDone(f"There is no session {session!r}: look at `halter sessions`.", "missing")

    async def _session_from(self, beginning: str) -> SessionRow:
        params = {"from": beginning, "to": f"{beginning}{LAST_CHARACTER}", "limit": MOST_NAMES + 1}
        found = [
            (row.session, row)
            for name in self.who.agents or ("",)
            for row in await self.app.store.ask(Query("sessions_named", SessionRow, {**params, "agent": name}))
        ]
        return self.meant(found, beginning, "session", "halter sessions")

    def meant(self, found: Sequence[tuple[str, T]], wanted: str, what: str, listed_by: str) -> T:
        """Find the one thing that an id names; say so if there is none, or if its beginning fits more than one.

        A whole id never names another that begins so: the one that was shown may be gone by now.
        """
        some = [(name, each) for name, each in found if name == wanted or (name.startswith(wanted) and self.short_ids)]
        exact = [(name, each) for name, each in some if name == wanted]
        if len(exact or some) == 1:
            return (exact or some)[0][1]
        if not some:
            verb = "begins with" if self.short_ids else "is called"
            raise NotDone(f"No {what} {verb} {wanted!r}: look at `{listed_by}`.", "missing")
        names = [name for name, _ in some]
        shown = ", ".join(names) if len(names) <= MOST_NAMES else f"more than {MOST_NAMES} of them"
        raise NotDone(f"{wanted!r} could be any of {shown}.", "wrong")

    async def agent_of(self, scope: str) -> str | None:
        """Find the agent that a scope is of; None for the whole fleet, and for a session that nobody knows."""
        kind, _, name = scope.partition(":")
        if kind in ("agent", "trigger"):
            return name.partition("/")[0]
        rows = await self.app.store.ask(Query("session", SessionRow, {"session": name})) if kind == "session" else ()
        return rows[0].agent if rows else None

    async def sees_stream(self, stream: StreamId) -> bool:
        """Tell whether a stream is theirs to read. What is said of the whole fleet is for those who see all of it."""
        if not self.who.agents:
            return True
        if stream.startswith("trigger:"):
            return self.who.sees(stream.removeprefix("trigger:").partition("/")[0])
        session = session_of(stream)
        rows = await self.app.store.ask(Query("session", SessionRow, {"session": session or ""}))
        return any(self.who.sees(row.agent) for row in rows)


def readable(text: str, what: str) -> str:
    """Refuse a name that nothing in a store can have, because no store could keep it."""
    if clean(text) != text:
        raise NotDone(f"{text!r} cannot be {what}: it holds characters that are no text.", "wrong")
    return text


def readable_scope(scope: str) -> str:
    """Refuse what is no scope."""
    if scope != "fleet" and not any(scope.startswith(kind) and scope != kind for kind in SCOPES):
        raise NotDone(f"{scope!r} is no scope: write fleet, agent:NAME, trigger:NAME or session:ID.", "wrong")
    return readable(scope, "a scope")


MOST_NAMES: Final = 20


def wrong(sentence: str) -> NoReturn:
    """Say that something cannot be read as it was written."""
    raise NotDone(sentence, "wrong")


def refused(sentence: str) -> NoReturn:
    """Say that something cannot be done as things stand."""
    raise NotDone(sentence, "refused")


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
