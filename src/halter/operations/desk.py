"""Who uses Halter and what they may do; the description of an operation, shared by CLI, HTTP API and reference.

An operation is a function of a desk. The annotations of its parameters carry bounds and descriptions, its docstring
says what it does, its return type what it answers.
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
"""Each includes the ones before it: look; decide and stop; steer and spend; everything."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)
SCOPES: Final = ("agent:", "trigger:", "session:")

T = TypeVar("T")


class Principal(msgspec.Struct, frozen=True):
    """A person or program; the name is recorded with everything they do. They see all agents, or only those named."""

    name: str
    role: Role = "admin"
    agents: tuple[str, ...] = ()

    def has_role(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def can_see(self, agent: str) -> bool:
        return not self.agents or agent in self.agents


@dataclass(frozen=True, slots=True)
class Actor:
    """A person or program at an open store.

    `agents` are those whose folders are at hand. A person who types may abbreviate ids to an unambiguous beginning
    (`short_ids`) and name agents that have not run yet; a program must send whole, known ones. `option` completes the
    commands that they are told to type, where they named a store.
    """

    app: Runtime
    principal: Principal
    short_ids: bool = False
    agents: "AgentFolders | None" = None
    option: str = ""

    def require_role(self, role: Role, what: str) -> None:
        """Refuse a caller without the role."""
        if not self.principal.has_role(role):
            raise NotDone(
                f"To {what} takes the role {role}, and {self.principal.name} is {self.principal.role}.", "forbidden"
            )

    def demand(self, role: Role, what: str) -> None:
        """Refuse a caller without the role, an agent, and a program that an agent started."""
        if not may_decide(self.principal.name):
            raise NotDone(
                f"Only a person may {what}, and this was started by an agent ({self.principal.name}).", "refused"
            )
        self.require_role(role, what)

    def require_all_agents(self, what: str) -> None:
        """Refuse a caller who sees only some agents."""
        if self.principal.agents:
            raise NotDone(f"To {what} concerns every agent, and {self.principal.name} sees only some.", "forbidden")

    async def require_scope(self, scope: str, what: str) -> None:
        """Refuse a scope that is invalid or not theirs, and the whole fleet to a caller who sees only a part."""
        readable_scope(scope)
        kind, _, name = scope.partition(":")
        match kind:
            case "fleet":
                self.require_all_agents(what)
            case "session":
                if self.principal.agents:
                    await self.session(name)
            case _:
                self.require_agent(name.partition("/")[0])

    def require_agent(self, agent: str) -> None:
        if not self.principal.can_see(agent):
            raise NotDone(f"There is no agent {agent!r}.", "missing")

    async def session(self, session: str) -> SessionRow:
        readable(session, "a session's id")
        if self.short_ids:
            return await self._session_from(session)
        for row in await self.app.store.ask(Query("session", SessionRow, {"session": session})):
            if row.started_at and self.principal.can_see(row.agent):
                return row
        raise NotDone(f"There is no session {session!r}: look at `halter sessions`.", "missing")

    async def _session_from(self, beginning: str) -> SessionRow:
        params = {"from": beginning, "to": f"{beginning}{LAST_CHARACTER}", "limit": MOST_NAMES + 1}
        found = [
            (row.session, row)
            for name in self.principal.agents or ("",)
            for row in await self.app.store.ask(Query("sessions_named", SessionRow, {**params, "agent": name}))
        ]
        return self.resolve(found, beginning, "session", "halter sessions")

    def resolve(self, found: Sequence[tuple[str, T]], query: str, what: str, listed_by: str) -> T:
        """Find the one thing that an id names; refuse an id that is unknown or ambiguous.

        A whole id never names another that begins so: the one that was shown may be gone by now.
        """
        some = [(name, each) for name, each in found if name == query or (name.startswith(query) and self.short_ids)]
        exact = [(name, each) for name, each in some if name == query]
        if len(exact or some) == 1:
            return (exact or some)[0][1]
        if not some:
            verb = "begins with" if self.short_ids else "is called"
            raise NotDone(f"No {what} {verb} {query!r}: look at `{listed_by}`.", "missing")
        names = [name for name, _ in some]
        shown = ", ".join(names) if len(names) <= MOST_NAMES else f"more than {MOST_NAMES} of them"
        raise NotDone(f"{query!r} could be any of {shown}.", "wrong")

    async def agent_of(self, scope: str) -> str | None:
        """Find the agent of a scope; None for the fleet, and for an unknown session."""
        kind, _, name = scope.partition(":")
        if kind in ("agent", "trigger"):
            return name.partition("/")[0]
        rows = await self.app.store.ask(Query("session", SessionRow, {"session": name})) if kind == "session" else ()
        return rows[0].agent if rows else None

    async def sees_stream(self, stream: StreamId) -> bool:
        """Return whether they may read a stream. Events of the fleet are for those who see all agents."""
        if not self.principal.agents:
            return True
        if stream.startswith("trigger:"):
            return self.principal.can_see(stream.removeprefix("trigger:").partition("/")[0])
        session = session_of(stream)
        rows = await self.app.store.ask(Query("session", SessionRow, {"session": session or ""}))
        return any(self.principal.can_see(row.agent) for row in rows)


def readable(text: str, what: str) -> str:
    """Refuse a name that no store can hold."""
    if clean(text) != text:
        raise NotDone(f"{text!r} cannot be {what}: it holds characters that are no text.", "wrong")
    return text


def readable_scope(scope: str) -> str:
    if scope != "fleet" and not any(scope.startswith(kind) and scope != kind for kind in SCOPES):
        raise NotDone(f"{scope!r} is no scope: write fleet, agent:NAME, trigger:NAME or session:ID.", "wrong")
    return readable(scope, "a scope")


MOST_NAMES: Final = 20


def fail_invalid(sentence: str) -> NoReturn:
    """Refuse input that cannot be parsed."""
    raise NotDone(sentence, "wrong")


def fail_conflict(sentence: str) -> NoReturn:
    """Refuse what cannot be done as things stand."""
    raise NotDone(sentence, "refused")


LATEST: Final = 1 << 53
"""The largest moment and sequence number."""
MOST: Final = 1000
CLEANED: Final = "cleaned"
"""Marks a text whose unstorable characters are replaced; elsewhere they are refused."""

Name = Annotated[str, Meta(max_length=300)]
Words = Annotated[str, Meta(max_length=2000)]
Reason = Annotated[Words, Meta(description="Why; recorded in the journal.", extra={"metavar": "TEXT"})]
Scope = Annotated[
    Name,
    Meta(
        description="fleet, agent:NAME, trigger:NAME or session:ID",
        extra={"typed": "fleet, an agent's name, a session's id, or agent:NAME, trigger:NAME, session:ID."},
    ),
]
Session = Annotated[
    Name,
    Meta(description="A session's id.", extra={"typed": "A session's id, or its beginning, from halter sessions."}),
]
Agent = Annotated[Name, Meta(description="An agent's name.", extra={"metavar": "AGENT"})]
Dollars = Annotated[str, Meta(max_length=40, description="The new cap in dollars, as in 2.50, or none.")]
Moment = Annotated[int, Meta(ge=0, le=LATEST, description="Microseconds since 1970.")]
Limit = Annotated[int, Meta(ge=1, le=MOST, description="How many of the newest.", extra={"metavar": "N"})]
Count = Annotated[int, Meta(ge=1, le=MOST, description="How many at most.")]
Seconds = Annotated[int, Meta(ge=0, le=DAY // SECOND, description="Over how many seconds sessions come back.")]


class Done(msgspec.Struct, frozen=True):
    """What was done, in a sentence."""

    subject: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that can be seen or done.

    `run` takes a desk and the parameters by name, and checks the caller; `role` documents the role that it demands.
    What `writes` changes the store, and is a POST. An answer in `lines` is an asynchronous iterator, offered as a file
    of that name. `command` names the equivalent command. `takes` names the parameters where the signature does not.
    """

    name: str
    path: str
    run: Callable[..., Any]
    role: Role = "viewer"
    writes: bool = False
    lines: str = ""
    command: str = ""
    takes: type[msgspec.Struct] | None = None

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").partition("\n")[0].rstrip(".")

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """Its parameters; unknown names are refused."""
        return self.takes or parameters_of(self.run)

    @cached_property
    def result(self) -> Any:
        """The type of its answer, or of one line of it."""
        told = get_type_hints(self.run, include_extras=True)["return"]
        return get_args(told)[0] if self.lines else told

    @property
    def path_parameters(self) -> frozenset[str]:
        return frozenset(part.strip("{}").partition(":")[0] for part in self.path.split("/") if part.startswith("{"))


def meta_of(hint: Any) -> Meta | None:
    """Find the description of a parameter; one without is for callers in Python alone."""
    for each in (hint, *get_args(hint)):
        marks: tuple[Any, ...] = getattr(each, "__metadata__", ())
        for mark in reversed(marks):
            if isinstance(mark, Meta) and mark.description:
                return mark
    return None


def parameters_of(run: Callable[..., Any]) -> type[msgspec.Struct]:
    hints = get_type_hints(run, include_extras=True)
    fields: list[Any] = []
    for parameter in list(signature(run).parameters.values())[1:]:
        if meta_of(hints[parameter.name]) is not None:
            default = () if parameter.default is Parameter.empty else (parameter.default,)
            fields.append((parameter.name, hints[parameter.name], *default))
    name = "".join(map(str.capitalize, run.__name__.split("_")))
    return msgspec.defstruct(f"{name}Parameters", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)
