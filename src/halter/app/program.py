"""What programs say of their guards and agents, read as if it stood in the two files; and the store they work on."""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack, overload

import msgspec

from halter.app.agent import Assembled
from halter.app.agent_context import AgentContext, Models
from halter.app.opened import LEASE, App, open_app
from halter.config.agent import Agent, agent_of
from halter.config.fleet import Fleet, fleet_of, read_fleet
from halter.config.load import Document, Places
from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError
from halter.core.ids import new_worker
from halter.core.tools import Tool
from halter.dispatch.tending import tended
from halter.guard.secrets import GivenSecrets, Secrets, from_environment
from halter.journal.retry import Tell, untold
from halter.settings import Settings, read_settings
from halter.tools.tool import FunctionTool, Options
from halter.tools.tool import tool as made_tool


class ProgramOptions(TypedDict, total=False):
    """What may be said of a guard or an agent, all of it optional.

    `policy` holds keys of an agent's file (`mode`, `limits`, `policy`, `phases`, `secrets`, …), `fleet` those of the
    fleet's file, or its path. `max_cost_usd` is the cap of one session. `secrets` are values by name. `lease` says for
    how many seconds a process that died keeps its sessions. `tell` hears a sentence when the store is away, and an
    empty one when it is back: what needs it waits meanwhile. `clock` and `environ` are the system's if not given.
    """

    policy: Mapping[str, Any]
    fleet: Mapping[str, Any] | str | Path
    max_cost_usd: float | Decimal | Literal["none"]
    secrets: Mapping[str, str]
    tools: Sequence[Tool]
    settings: Settings
    person: str
    lease: float
    tell: Tell
    clock: Clock
    environ: Mapping[str, str]


class PolicyWarning(UserWarning):
    """The store's policy counts, and not what a program says of its fleet."""


class Program(ABC):
    """Something that a program gives its tools to, then opens: it works as long as it is open."""

    NOUN: ClassVar[str]

    def __init__(self, name: str, store: str | Path, options: ProgramOptions) -> None:
        self._name = name
        self._options = options
        self._environ = options.get("environ", os.environ)
        self._settings = settings_of(str(store), options, self._environ)
        self._tools: list[Tool] = list(options.get("tools", ()))
        self._stack: AsyncExitStack | None = None
        self._open: AgentContext | None = None

    @overload
    def tool(self, function: Callable[..., Any], /, **options: Unpack[Options]) -> FunctionTool: ...
    @overload
    def tool(self, /, **options: Unpack[Options]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
    def tool(
        self, function: Callable[..., Any] | None = None, /, **options: Unpack[Options]
    ) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
        """Make a tool of a typed function: `@guard.tool`, `@agent.tool(level="SAFE")`."""
        if function is None:
            return lambda function: self.tool(function, **options)
        if self._open is not None:
            raise ConfigError(f"The {self.NOUN} is open already: give it {function.__name__} before it is.")
        made = made_tool(function, **options)
        self._tools.append(made)
        return made

    async def __aenter__(self) -> Self:
        """Open the store and begin to keep leases alive."""
        async with AsyncExitStack() as stack:
            self._open = await stack.enter_async_context(self._opening())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the store."""
        stack, self._stack, self._open = self._stack, None, None
        if stack is not None:
            await stack.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _opening(self) -> AsyncGenerator[AgentContext]:
        """Open the store, be bound by its policy, begin to keep leases alive, and put the agent together."""
        options, written = self._options, self._written()
        lease = round(options.get("lease", LEASE / SECOND) * SECOND)
        app_of = open_app(self._settings, options.get("clock"), self._environ, lease=lease, written=lambda _: written)
        async with app_of as app, AsyncExitStack() as stack:
            if app.policy is not None and (told := app.policy.told()):
                warnings.warn(told, PolicyWarning, stacklevel=2)
            worker = new_worker(self._name, app.ids)
            app.trouble.tell = options.get("tell", untold)
            await stack.enter_async_context(tended(app.patient(), app.clock, worker, max(lease // 3, 1)))
            agent, models = await self._assembled(app, stack)
            yield AgentContext(app, agent, models, worker, lease + SECOND)

    @abstractmethod
    async def _assembled(self, app: App, stack: AsyncExitStack) -> tuple[Assembled, Models]:
        """Put together what the program says of its agent; `stack` lets go of it when the store is closed."""

    def _written(self) -> Fleet | None:
        """Read what the program says of its fleet, if it says anything."""
        return fleet_said(self._options, f"the {self.NOUN}'s fleet")

    def _opened(self) -> AgentContext:
        if self._open is None:
            raise ConfigError(f"The {self.NOUN} is not open: use it inside of `async with {self.NOUN}:`.")
        return self._open


def secrets_of(options: ProgramOptions, environ: Mapping[str, str]) -> Secrets:
    """Find the secrets of a program: those that it gives, or else the environment's."""
    given = options.get("secrets")
    return from_environment(environ) if given is None else GivenSecrets(given)


def fleet_said(options: ProgramOptions, where: str) -> Fleet | None:
    """Read what was said of the fleet, as keys of its file or as the file's path; None where nothing was."""
    fleet = options.get("fleet", {})
    if isinstance(fleet, str | Path):
        return read_fleet(Path(fleet))
    return fleet_of(document(fleet, where)) if fleet else None


def agent_said(
    name: str, options: ProgramOptions, where: str, limits: Mapping[str, Any], more: Mapping[str, Any]
) -> Agent:
    """Read what was said in Python as if it stood in an agent's file, so that the same is checked in the same words."""
    policy = options.get("policy", {})
    capped = {"max_cost_usd": options["max_cost_usd"]} if "max_cost_usd" in options else {}
    said = {"name": name, **policy, **more, "limits": {**policy.get("limits", {}), **limits, **capped}}
    return agent_of(document(said, where))


def document(said: Mapping[str, Any], where: str) -> Document:
    """Take what a program says for a file, so that its mistakes are told in the same way."""
    return Document(dict(said), Places(where))


def settings_of(store: str, options: ProgramOptions, environ: Mapping[str, str]) -> Settings:
    """Keep checkpoints and their key where the command line keeps them, unless settings are given."""
    if "settings" in options:
        return options["settings"]
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    settings = read_settings(environ, home, store)
    return msgspec.structs.replace(settings, person=options["person"]) if "person" in options else settings
