"""An agent put together: what its folder says, the policy that follows from it, and the tools that it has."""

import importlib.util
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from halter.app.opened import App
from halter.app.pacing import against_pacing
from halter.app.pins import settle_pins
from halter.app.protected import Protects, demand_unwritten, hold, of_settings, protected_for, refuses
from halter.app.shelves import Library
from halter.config.agent import read_agent
from halter.config.command_lines import loads_from_data
from halter.config.definition import definition_digest
from halter.config.mcp import MCP_FILE, read_servers
from halter.config.resolve import ResolvedAgent, against_tools, resolve_agent
from halter.config.roots import against_protected, writable
from halter.config.trust import Code, Trust, data_places, digest_of
from halter.core.errors import ConfigError
from halter.core.protected import Refuses, Writable, unrefused
from halter.core.servers import Server
from halter.core.spec import Resolved
from halter.core.text import listed
from halter.core.tools import Failed, Tool
from halter.guard import names
from halter.guard.ask import Standing
from halter.guard.secrets import Secrets, from_environment
from halter.settings import Settings
from halter.tools.tool import FunctionTool
from halter.work.verbs import verb_specs

if TYPE_CHECKING:
    from halter.tools.mcp import Offer

OWN_TOOLS: Final = "tools.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled(ResolvedAgent):
    """A resolved agent with its tools, ready to work; one that has no model can only play.

    `left_out` says which tools of its servers cannot be used, and why. `folder` is the digest of its folder as it was
    read. `refuses` tells which files it may not read.
    """

    tools: Mapping[str, Tool]
    secrets: Secrets
    quarantined: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    library: Library | None = None
    folder: str = ""
    refuses: Refuses = unrefused

    def standing(self, session: str, trigger: str = "") -> Standing:
        """Tell where a session of this agent stands at its beginning."""
        return Standing(
            session=session,
            agent=self.policy.name,
            phase=self.policy.phases[0],
            policy=self.policy,
            policy_digest=self.policy.digest(),
            trigger=trigger,
            quarantined=self.quarantined,
            secrets=frozenset(self.policy.secrets) & self.secrets.names(),
            rates=self.mind.rates,
        )


@asynccontextmanager
async def assembled(app: App, folder: Path, *, protects: Protects = protected_for) -> AsyncGenerator[Assembled]:
    """Read an agent's folder, and start the servers that it names. Its code runs only if a person trusted it.

    `protects` says what its tools must not reach.
    """
    agent = read_agent(folder)
    resolved = resolve_agent(app.fleet, agent, folder)
    policy = resolved.policy
    protected = protects(app.settings, agent, folder)
    against_protected(agent, folder, protected)
    demand_unwritten([folder, *([app.settings.fleet] if app.settings.fleet else [])], app.writable)
    code = code_of(app.settings, folder)
    demand_trusted(app.settings, folder, code)
    secrets = from_environment(app.environ)
    async with AsyncExitStack() as stack:
        roots = writable(folder, agent.spec)
        stack.enter_context(_listed(app.writable, roots))
        offer = await stack.enter_async_context(_served(app, code, policy, secrets))
        own = [each.trusted_by(_trusted_now(app, code)) for each in own_tools(policy, folder)]
        tools = unique([*built_in(policy, folder), *own, *offer.tools])
        hold(tools.values(), protected)
        against_tools(policy, agent, (*(tool.spec for tool in tools.values()), *verb_specs()))
        against_pacing(policy, resolved.pacing, agent, tools.values())
        servers = [server.name for server in read_servers(folder / MCP_FILE, app.environ)]
        waiting = await settle_pins(app, policy.name, servers, [tool.spec for tool in offer.tools])
        # Many names take a moment to compile: no request waits for it.
        names.compiled(resolved.tasks.anonymize or ())
        yield Assembled(
            **resolved.parts(),
            tools=tools,
            secrets=secrets,
            quarantined=waiting,
            left_out=offer.left_out,
            library=Library(app.patient(), folder, refuses(protected, roots)),
            refuses=refuses(protected, roots),
            folder=definition_digest(folder),
        )


@contextmanager
def _listed(loaded: list[Writable], agent: Writable) -> Generator[None]:
    """Have it known, as long as an agent is loaded, where its tools can write."""
    loaded.append(agent)
    try:
        yield
    finally:
        loaded.remove(agent)


def trust_of(settings: Settings) -> Trust:
    """Open the list of what people trusted."""
    if settings.trust is None:
        raise ConfigError("You have no home folder, and HALTER_TRUST is not set: set it, or HOME.")
    return Trust(settings.trust)


def code_of(settings: Settings, folder: Path) -> Code:
    """Find the code of a folder, without what Halter itself writes there."""
    return Code(folder, [thing.path for thing in of_settings(settings) if thing.secret])


def demand_trusted(settings: Settings, folder: Path, code: Code | None = None) -> None:
    """Refuse code that nobody has looked at, or that changed since."""
    if not (folder / OWN_TOOLS).exists() and not (folder / MCP_FILE).exists():
        return
    contents, trust = (code or code_of(settings, folder)).contents(), trust_of(settings)
    if not trust.is_trusted(folder, digest_of(contents)):
        since = trust.changed(folder, contents)
        raise ConfigError(
            f"{folder} holds code that would run as you, and nobody has trusted it as it is now"
            f"{f' ({since})' if since else ''}. Look through it, then run: halter trust {folder}"
        )


def demand_loadable(servers: Iterable[Server], folder: Path, app: App) -> None:
    """Refuse a command line that could load what an agent wrote: from a root of its tools, or from other data."""
    places = [*data_places(folder), *(root for agent in app.writable for root in agent.roots)]
    for server in servers:
        word = loads_from_data(server, places, app.environ) if server.transport == "stdio" else ""
        if word:
            raise ConfigError(
                f"{folder / MCP_FILE}: the server {server.name} could load code from `{word}`, where data lies that "
                "an agent may have written. Give its code and its data folders of their own."
            )


def built_in(policy: Resolved, folder: Path) -> Iterator[Tool]:
    """Make the tools that every agent may have, as far as this one's file asks for them."""
    wanted = policy.tools
    if wanted.files is not UNSET:
        from halter.tools.files import files

        yield from files(folder / wanted.files.root)
    if wanted.http is not UNSET:
        from halter.tools.http import http

        yield from http(policy.allowed_hosts or ())
    if wanted.shell is not UNSET:
        from halter.tools.shell import shell

        yield shell(folder / wanted.shell.root, sandbox=wanted.shell.sandbox, network=wanted.shell.network)


def own_tools(policy: Resolved, folder: Path) -> Sequence[FunctionTool]:
    """Load the tools that an agent brings along in a file of its own."""
    file = folder / OWN_TOOLS
    if not file.exists():
        return []
    found = {each.spec.name: each for each in vars(_loaded(file)).values() if isinstance(each, FunctionTool)}
    wanted = policy.tools.own
    if wanted is UNSET:
        return list(found.values())
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(f"{file} has no tool {listed(missing)}, which `tools.own` names; it has {listed(found)}.")
    return [found[name] for name in wanted]


def _loaded(file: Path) -> ModuleType:
    """Run a file of tools. No bytecode is written beside it: that would be code that nobody trusted."""
    spec = importlib.util.spec_from_file_location(f"halter_tools_of_{file.parent.name}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"{file} cannot be used: {error}") from error
    except Exception as error:
        raise ConfigError(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = written
    return module


def unique(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    """Index tools by name; two of one name would be one too many."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.spec.name in found:
            raise ConfigError(f"There are two tools called {tool.spec.name}: give one of them another name.")
        found[tool.spec.name] = tool
    return found


def _trusted_now(app: App, code: Code) -> Callable[[], None]:
    """Make what is asked each time before code of a folder is started: it raises where that is not trusted then."""

    def starts() -> None:
        try:
            demand_trusted(app.settings, code.folder, code)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    return starts


@asynccontextmanager
async def _served(app: App, code: Code, policy: Resolved, secrets: Secrets) -> AsyncGenerator["Offer"]:
    """Start the servers of an agent, if it has any. Each time that one is started, its code must be trusted."""
    from halter.tools.mcp import Offer, Terms, mcp_tools

    folder = code.folder
    servers = read_servers(folder / MCP_FILE, app.environ)
    if not servers:
        yield Offer((), ())
        return
    demand_loadable(servers, folder, app)
    trusted = _trusted_now(app, code)

    def starts() -> None:
        trusted()
        try:
            demand_loadable(servers, folder, app)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    def reveal(name: str) -> str:
        if name not in policy.secrets:
            raise KeyError(name)
        return secrets.value(name)

    async with mcp_tools(servers, Terms(app.clock, app.environ, reveal=reveal, starts=starts)) as offer:
        yield offer
