"""The actor of an operation and its rights; the description of an operation, shared by CLI, HTTP API and reference.

An operation is a function whose first parameter is an `Actor`. The annotations of its other parameters carry bounds and
descriptions, its docstring the summary, its return type the type of the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import Parameter, signature
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, SECOND
from halter.core.errors import NotDone
from halter.core.ids import StreamId, can_decide, parse_session_id
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.core.text import LAST_CHARACTER, clean
from halter.operations.agent_folders import AgentFolders
from halter.runtime.runtime import Runtime

Role = Literal["viewer", "approver", "operator", "admin"]
"""Each role includes the ones before it: read; decide and stop; steer and spend; everything."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)
SCOPES: Final = ("agent:", "trigger:", "session:", "key:")

T = TypeVar("T")


class Principal(msgspec.Struct, frozen=True):
    """A person or program. Its name is recorded with each action. It sees all agents, or only those in `agents`."""

    name: str
    role: Role = "admin"
    agents: tuple[str, ...] = ()

    def has_role(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def can_see(self, agent: str) -> bool:
        return not self.agents or agent in self.agents


@dataclass(frozen=True, slots=True)
class Actor:
    """A principal with an open store: the first argument of every operation.

    `agents` holds the agent folders that this process was given. With `short_ids`, as for a person who types, an id may
    be abbreviated to an unambiguous prefix, and an agent may be named before it has run; a program must send whole,
    known ids. `option` is appended to suggested commands: the `--store` option that the person typed.
    """

    app: Runtime
    principal: Principal
    short_ids: bool = False
    agents: AgentFolders | None = None
    option: str = ""

    def require_role(self, role: Role, action: str) -> None:
        """Require the role of the principal."""
        if not self.principal.has_role(role):
            raise NotDone(
                f"The role {role} is required to {action}; {self.principal.name} is {self.principal.role}.", "forbidden"
            )

    def require_person(self, role: Role, action: str) -> None:
        """Require a person with the role: reject an agent, and a program that an agent started."""
        if not can_decide(self.principal.name):
            raise NotDone(
                f"Only a person can {action}; this command runs inside an agent ({self.principal.name}).", "refused"
            )
        self.require_role(role, action)

    def require_all_agents(self, action: str) -> None:
        """Require a principal that sees every agent."""
        if self.principal.agents:
            raise NotDone(
                f"Access to every agent is required to {action}; {self.principal.name} sees only some.", "forbidden"
            )

    async def require_scope(self, scope: str, action: str) -> None:
        """Require a valid scope that the principal can see. The fleet requires access to every agent."""
        readable_scope(scope)
        kind, _, name = scope.partition(":")
        match kind:
            case "fleet":
                self.require_all_agents(action)
            case "session":
                if self.principal.agents:
                    await self.session(name)
            case _:
                self.require_agent(name.partition("/")[0])

    def require_agent(self, agent: str) -> None:
        if not self.principal.can_see(agent):
            raise NotDone(f"There is no agent {agent!r}.", "missing")

    async def session(self, session: str) -> SessionRow:
        readable(session, "session id")
        if self.short_ids:
            return await self._session_from(session)
        for row in await self.app.store.ask(Query("session", SessionRow, {"session": session})):
            if row.started_at and self.principal.can_see(row.agent):
                return row
        raise NotDone(f"There is no session {session!r}. See `halter sessions`.", "missing")

    async def _session_from(self, prefix: str) -> SessionRow:
        params = {"from": prefix, "to": f"{prefix}{LAST_CHARACTER}", "limit": MAX_NAMES_LISTED + 1}
        candidates = [
            (row.session, row)
            for name in self.principal.agents or ("",)
            for row in await self.app.store.ask(Query("sessions_named", SessionRow, {**params, "agent": name}))
        ]
        return self.resolve(candidates, prefix, "session", "halter sessions")

    def resolve(self, candidates: Sequence[tuple[str, T]], query: str, noun: str, listed_by: str) -> T:
        """Resolve an id or its prefix to one candidate; reject an unknown or ambiguous id.

        A whole id matches exactly, even if longer ids begin with it.
        """
        matches = [
            (name, each) for name, each in candidates if name == query or (name.startswith(query) and self.short_ids)
        ]
        exact = [(name, each) for name, each in matches if name == query]
        if len(exact or matches) == 1:
            return (exact or matches)[0][1]
        if not matches:
            verb = "begins with" if self.short_ids else "is called"
            raise NotDone(f"No {noun} {verb} {query!r}. See `{listed_by}`.", "missing")
        names = [name for name, _ in matches]
        name_list = ", ".join(names) if len(names) <= MAX_NAMES_LISTED else f"more than {MAX_NAMES_LISTED}"
        raise NotDone(f"{query!r} is ambiguous; it matches {name_list}.", "wrong")

    async def agent_of(self, scope: str) -> str | None:
        """Find the agent of a scope; None for the fleet, and for an unknown session."""
        kind, _, name = scope.partition(":")
        if kind in ("agent", "trigger", "key"):
            return name.partition("/")[0]
        rows = await self.app.store.ask(Query("session", SessionRow, {"session": name})) if kind == "session" else ()
        return rows[0].agent if rows else None

    async def sees_stream(self, stream: StreamId) -> bool:
        """Return whether the principal can read a stream. The fleet's events require access to every agent."""
        if not self.principal.agents:
            return True
        if stream.startswith("trigger:"):
            return self.principal.can_see(stream.removeprefix("trigger:").partition("/")[0])
        session = parse_session_id(stream)
        rows = await self.app.store.ask(Query("session", SessionRow, {"session": session or ""}))
        return any(self.principal.can_see(row.agent) for row in rows)


def readable(text: str, noun: str) -> str:
    """Reject a name with characters that no store can hold."""
    if clean(text) != text:
        raise NotDone(f"Invalid {noun}: {text!r} contains control characters.", "wrong")
    return text


def readable_scope(scope: str) -> str:
    if scope != "fleet" and not any(scope.startswith(kind) and scope != kind for kind in SCOPES):
        raise NotDone(
            f"Unknown scope {scope!r}. Use fleet, agent:NAME, trigger:NAME, session:ID or key:AGENT/NAME.", "wrong"
        )
    return readable(scope, "scope")


MAX_NAMES_LISTED: Final = 20


def fail_invalid(sentence: str) -> NoReturn:
    """Fail because the input is invalid."""
    raise NotDone(sentence, "wrong")


def fail_conflict(sentence: str) -> NoReturn:
    """Fail because the current state does not allow it."""
    raise NotDone(sentence, "refused")


MAX_SAFE_INTEGER: Final = 1 << 53
"""The largest moment and sequence number."""
MAX_LIMIT: Final = 1000
CLEANED: Final = "cleaned"
"""Marks a text whose unstorable characters are replaced. In other texts they are rejected."""

Name = Annotated[str, Meta(max_length=300)]
Words = Annotated[str, Meta(max_length=2000)]
Reason = Annotated[Words, Meta(description="Reason, recorded in the journal.", extra={"metavar": "TEXT"})]
Scope = Annotated[
    Name,
    Meta(
        description="fleet, agent:NAME, trigger:NAME, session:ID or key:AGENT/NAME",
        extra={"typed": "fleet, an agent name, a session id, or agent:NAME, trigger:NAME, session:ID, key:AGENT/NAME."},
    ),
]
Session = Annotated[
    Name,
    Meta(description="Session id.", extra={"typed": "Session id or prefix, from halter sessions."}),
]
Agent = Annotated[Name, Meta(description="Agent name.", extra={"metavar": "AGENT"})]
MAX_MESSAGE_CHARACTERS: Final = 100_000
Text = Annotated[
    str, Meta(min_length=1, max_length=MAX_MESSAGE_CHARACTERS, description="The message.", extra={CLEANED: True})
]
Confirmed = Annotated[bool, Meta(description="Must be true: this cannot be undone.")]
TriggerName = Annotated[Name, Meta(description="Name of the trigger within its agent.")]
Dollars = Annotated[str, Meta(max_length=40, description="New cap in dollars, such as 2.50, or none.")]
Moment = Annotated[int, Meta(ge=0, le=MAX_SAFE_INTEGER, description="Microseconds since 1970.")]
Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT, description="Maximum number, newest first.", extra={"metavar": "N"})]
Count = Annotated[int, Meta(ge=1, le=MAX_LIMIT, description="Maximum number.")]
Seconds = Annotated[int, Meta(ge=0, le=DAY // SECOND, description="Seconds over which sessions resume.")]


class Done(msgspec.Struct, frozen=True):
    """The result of an operation: its subject, and a sentence for people."""

    subject: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of the HTTP API.

    `run` takes an `Actor` and the parameters by name, and checks the actor's rights; `role` documents the role that it
    requires. An operation that `writes` changes the store and is a POST. With `lines`, the result is an asynchronous
    iterator, offered as a file of that name. `command` names the equivalent command. `takes` declares the parameters
    where the signature does not.
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
        """The type of the parameters; unknown names are rejected."""
        return self.takes or parameters_of(self.run)

    @cached_property
    def result(self) -> Any:
        """The type of the result, or of one line."""
        return_type = get_type_hints(self.run, include_extras=True)["return"]
        return get_args(return_type)[0] if self.lines else return_type

    @property
    def path_parameters(self) -> frozenset[str]:
        return frozenset(
            segment.strip("{}").partition(":")[0] for segment in self.path.split("/") if segment.startswith("{")
        )


def meta_of(hint: Any) -> Meta | None:
    """Find the description of a parameter; a parameter without one is for Python callers only."""
    for candidate in (hint, *get_args(hint)):
        annotations: tuple[Any, ...] = getattr(candidate, "__metadata__", ())
        for annotation in reversed(annotations):
            if isinstance(annotation, Meta) and annotation.description:
                return annotation
    return None


@cache
def parameters_of(run: Callable[..., Any]) -> type[msgspec.Struct]:
    hints = get_type_hints(run, include_extras=True)
    fields: list[Any] = []
    for parameter in list(signature(run).parameters.values())[1:]:
        if meta_of(hints[parameter.name]) is not None:
            default = () if parameter.default is Parameter.empty else (parameter.default,)
            fields.append((parameter.name, hints[parameter.name], *default))
    name = "".join(map(str.capitalize, run.__name__.split("_")))
    return msgspec.defstruct(f"{name}Parameters", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)
