"""Tools of MCP servers.

A server is a stranger. What it says of its tools is checked before anybody is offered them, what it answers is bounded,
and whatever it does instead of answering becomes a structured failure. One task owns each connection from its beginning
to its end; a server that has died is started again by the next call.
"""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from msgspec.structs import replace

from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.errors import ConfigError, needs
from halter.core.servers import Server
from halter.core.tools import (
    TIMEOUT,
    Failed,
    Happened,
    Invalid,
    Output,
    Permit,
    ToolSpec,
    Unstoppable,
    Valid,
    with_secrets,
)
from halter.tools.arguments import canonical_json
from halter.tools.contents import text_of
from halter.tools.dialogue import asked, greet, listed, session
from halter.tools.offers import Described, Raw, described
from halter.tools.remote import FORGOTTEN, LOST, NOT_SENT, Remote, http_wire, sse_wire
from halter.tools.result import MAX_OUTPUT, bounded
from halter.tools.schemas import Checker
from halter.tools.wires import Ending, Launch, stdio_wire, watched

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import CallToolResult, InputRequiredResult

_INHERITED: Final = ("PATH", "HOME", "LANG")
"""All that a server's program gets from the environment: the rest of it holds keys."""

_NO_BYTECODE: Final[Mapping[str, str]] = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Bytecode beside trusted code would be code that nobody trusted."""

T = TypeVar("T")

_GRACE: Final = 5.0


def _no_secrets(name: str) -> str:
    raise KeyError(name)


def _agreed() -> None:
    """Let every program start."""


@dataclass(frozen=True)
class Terms:
    """On which terms servers are used; times are in microseconds.

    A server is started again at most `restarts` times `within` a time. `grace` is how long a program has to end by
    itself. `reveal` gives the secrets that the configuration refers to. `starts` is asked each time before a program is
    started, and raises Failed if it may not be.
    """

    clock: Clock
    environment: Mapping[str, str]
    reveal: Callable[[str], str] = _no_secrets
    starts: Callable[[], None] = _agreed
    timeout: int = TIMEOUT
    start_timeout: int = MINUTE
    grace: int = 2 * SECOND
    restarts: int = 3
    within: int = MINUTE
    max_output: int = MAX_OUTPUT
    max_message: int = 4 * MAX_OUTPUT
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class Offer:
    """The tools that can be used, and a sentence for each tool or server that is left out."""

    tools: tuple["McpTool", ...] = ()
    left_out: tuple[str, ...] = ()


@asynccontextmanager
async def mcp_tools(servers: Sequence[Server], terms: Terms) -> AsyncGenerator[Offer]:
    """Connect to all servers at once and offer their tools; at the end nothing of any server is left."""
    if servers:
        _demand_installed(servers[0].name)
    connected = [McpServer(server, terms) for server in servers]
    try:
        offers = await asyncio.gather(*(_offered(server) for server in connected))
        tools = tuple(tool for offer in offers for tool in offer.tools)
        yield Offer(tools, tuple(sentence for offer in offers for sentence in offer.left_out))
    finally:
        await asyncio.gather(*(server.close() for server in connected))


async def _offered(server: "McpServer") -> Offer:
    try:
        return await server.open()
    except Failed as failure:
        return Offer(left_out=(f"The server {server.name} is left out. {failure}",))


class McpTool:
    """One tool of one server. It fulfils the port `Tool`."""

    def __init__(self, server: "McpServer", known: Described, timeout: int) -> None:
        self._server = server
        self._name = known.name
        self._checker: Checker = known.checker
        # How long we wait is our own affair, so that it is no part of what a person agreed to.
        self._spec = replace(known.spec, timeout=timeout)

    @property
    def spec(self) -> ToolSpec:
        """What is known of it."""
        return self._spec

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check arguments as a model wrote them."""
        return self._checker.validate(self._spec.name, arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Call the tool on its server, and wait for the answer no longer than agreed."""
        plain = self._revealed(arguments, permit)
        async with asyncio.timeout(self._spec.timeout / SECOND):
            return await self._server.call(self._spec, self._name, plain, permit)

    async def check(self, arguments: Valid, permit: Permit) -> Happened:
        """No server can be asked what became of a call."""
        permit.use()
        return "unknown"

    def _revealed(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        try:
            plain = with_secrets(dict(arguments.values), permit.reveal)
            written = canonical_json(plain)
        except KeyError as missing:
            raise Failed("UnknownSecret", f"{missing.args[0]} is no secret that this call may use.") from None
        except ValueError:
            raise Failed("InvalidSecret", "a secret holds characters that cannot be sent.") from None
        match self._checker.validate(self._spec.name, written):
            case Valid(values):
                return values
            case Invalid(sentence):
                raise Failed("InvalidSecret", sentence)


@dataclass
class _Live:
    """One connection, from its beginning to its end."""

    ready: "asyncio.Future[None]"
    ending: Ending = field(default_factory=Ending)
    raw: Raw = field(default_factory=Raw)
    task: "asyncio.Task[None] | None" = None
    session: "ClientSession | None" = None
    offer: Offer = field(default_factory=Offer)
    stale: bool = False

    def outdate(self) -> None:
        self.stale = True

    def has(self, spec: ToolSpec) -> bool:
        return any((tool.spec.name, tool.spec.digest) == (spec.name, spec.digest) for tool in self.offer.tools)


class McpServer:
    """One server, and the connection to it."""

    def __init__(self, server: Server, terms: Terms) -> None:
        self.name = server.name
        self._server = server
        self._terms = terms
        self._one_at_a_time = asyncio.Lock()
        self._live: _Live | None = None
        self._restarts: deque[int] = deque()
        self._closed = False

    async def open(self) -> Offer:
        """Connect, and offer the server's tools. Raises Failed."""
        _demand_installed(self.name)
        return (await self._connected()).offer

    async def close(self) -> None:
        """End the connection, and the server's program with everything that it started."""
        self._closed = True
        if self._live is not None:
            await self._end(self._live)

    async def call(self, spec: ToolSpec, name: str, arguments: Mapping[str, Any], permit: Permit) -> Output:
        """Call a tool. Raises Failed, or Unstoppable if nobody can know whether something was done."""
        from mcp.shared.exceptions import MCPError

        ask = asked.open(permit)
        live = await self._connected()
        opened = await self._agreed(live, spec)
        try:
            result = await ask(opened, name, arguments, permit.id)
        except asyncio.CancelledError:
            if spec.effect == "read":
                raise
            raise self._unknown("it was told to stop, and may have done it before") from None
        except MCPError as error:
            raise self._failure(live, spec, error.code, error.message) from error
        except (ValueError, RuntimeError) as error:
            raise self._failure(live, spec, LOST, f"its answer cannot be read ({type(error).__name__})") from error
        return _output(result, self._terms.max_output)

    def _failure(self, live: _Live, spec: ToolSpec, code: int, message: str) -> Failed | Unstoppable:
        """Tell a server's own failure from an answer that got lost."""
        from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

        remote = self._server.transport != "stdio"
        closed = code == CONNECTION_CLOSED and (remote or live.ending.over.is_set())
        if closed or code == FORGOTTEN:
            live.ending.over.set()
        if not (closed or code == LOST or (code == PARSE_ERROR and remote)):
            kind = "NotReached" if code in {NOT_SENT, FORGOTTEN} else "McpError"
            return Failed(kind, f"the server {self.name} says: {message}" if kind == "McpError" else message)
        why = live.ending.why or message
        if spec.effect == "write":
            return self._unknown(why)
        return Failed("AnswerLost", f"the server {self.name} did not answer: {why}", live.ending.told())

    def _unknown(self, why: str) -> Unstoppable:
        return Unstoppable(f"Nobody knows whether the server {self.name} did it, since there was no answer: {why}.")

    async def _agreed(self, live: _Live, spec: ToolSpec) -> "ClientSession":
        """Make sure that the server still offers what was agreed to: it may have changed its tools meanwhile."""
        from mcp.shared.exceptions import MCPError

        opened = _demand(live.session)
        async with self._one_at_a_time:
            if live.stale:
                try:
                    await self._list(live, opened)
                except (MCPError, ValueError, RuntimeError) as error:
                    raise Failed("ToolsUnknown", f"the server {self.name} does not list its tools: {error}") from error
        if not live.has(spec):
            raise Failed("ToolChanged", f"the server {self.name} does not offer {spec.name} as it was agreed to.")
        return opened

    async def _connected(self) -> _Live:
        """Return a connection that is up; make one if there is none, at most so often."""
        async with self._one_at_a_time:
            if self._live is None or self._live.ending.over.is_set():
                await self._replace()
            live = _demand(self._live)
        if live.ready.done():
            return live
        task, seconds = _demand(live.task), self._terms.start_timeout / SECOND
        await asyncio.wait((task, live.ready), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if live.ready.done():
            return live
        late = not task.done()
        await self._end(live)
        why = f"it did not answer within {seconds:g} s" if late else live.ending.why
        raise Failed("NotConnected", f"the server {self.name} cannot be used: {why}", live.ending.told())

    async def _replace(self) -> None:
        if self._closed:
            raise Failed("NotConnected", f"the server {self.name} was closed.")
        if self._live is not None:
            await self._end(self._live)
            self._count_restart()
        live = self._live = _Live(asyncio.get_running_loop().create_future())
        live.task = asyncio.create_task(self._own(live), name=f"mcp {self.name}")
        live.task.add_done_callback(partial(_note_end, live.ending))

    def _count_restart(self) -> None:
        now = self._terms.clock.now()
        while self._restarts and self._restarts[0] <= now - self._terms.within:
            self._restarts.popleft()
        if len(self._restarts) >= self._terms.restarts:
            wait = (self._restarts[0] + self._terms.within - now) // SECOND + 1 if self._restarts else 0
            raise Failed(
                "NotConnected",
                f"the server {self.name} keeps ending and was started again {len(self._restarts)} times; "
                f"it is left alone for {wait} s.",
            )
        self._restarts.append(now)

    async def _end(self, live: _Live) -> None:
        """End a connection: at its own pace if it was up, and at once if it takes too long or never was."""
        live.ending.over.set()
        task = _demand(live.task)
        if live.ready.done():
            await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _GRACE)
        task.cancel()
        await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _GRACE)

    async def _own(self, live: _Live) -> None:
        """Hold the connection until it is over: what is entered in this task is also left in it."""
        if self._server.transport == "stdio":
            await asyncio.to_thread(self._terms.starts)
        async with (
            watched(self._wire(live.ending), live.ending) as (heard, said),
            session(live.raw, heard, said, live.outdate) as opened,
        ):
            live.session = opened
            await greet(opened)
            await self._list(live, opened)
            live.ready.set_result(None)
            await live.ending.over.wait()

    def _wire(self, ending: Ending) -> AbstractAsyncContextManager[tuple[Any, Any]]:
        server, terms = self._server, self._terms
        try:
            env = cast("dict[str, str]", with_secrets(dict(server.env), terms.reveal))
            headers = cast("dict[str, str]", with_secrets(dict(server.headers), terms.reveal))
        except KeyError as missing:
            raise Failed("UnknownSecret", f"{missing.args[0]} is no secret that the server may use.") from None
        if server.transport == "stdio":
            inherited = {name: terms.environment[name] for name in _INHERITED if name in terms.environment}
            argv = (server.command, *server.args)
            launch = Launch(
                argv, server.cwd, {**_NO_BYTECODE, **inherited, **env}, terms.max_message, terms.grace / SECOND
            )
            return stdio_wire(launch, ending)
        remote = Remote(server.url, headers, terms.max_message, tls=terms.tls)
        return http_wire(remote) if server.transport == "http" else sse_wire(remote)

    async def _list(self, live: _Live, opened: "ClientSession") -> None:
        """Ask for all tools and keep those that can be used. What changes meanwhile is asked for again later."""
        live.stale = False
        try:
            known = described(self.name, await listed(opened, live.raw))
        except BaseException:
            live.stale = True
            raise
        tools = tuple(McpTool(self, each, self._terms.timeout) for each in known.tools)
        live.offer = Offer(tools, known.left_out)


def _output(result: "CallToolResult | InputRequiredResult", max_output: int) -> Output:
    from mcp_types import InputRequiredResult

    if isinstance(result, InputRequiredResult):
        raise Failed("InputRequired", "the server asks for something that nobody is here to answer.")
    text = bounded(text_of(result.content, result.structured_content), max_output)
    if result.is_error:
        raise Failed("ToolError", text or "the tool failed and does not say why.", text)
    return Output(text)


def _note_end(ending: Ending, task: "asyncio.Task[None]") -> None:
    """Keep why a connection ended, for whoever asks next."""
    ending.over.set()
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if not ending.why:
        ending.why = "it ended" if error is None else str(error) or type(error).__name__


def _demand_installed(server: str) -> None:
    try:
        import_module("mcp")
    except ImportError:
        raise ConfigError(needs("mcp", f"The MCP server {server}")) from None
    # It would log messages with the secrets that were put into them; what it has to tell comes as an error, too.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def _demand(value: T | None) -> T:
    if value is None:
        raise AssertionError("A connection was used before it was made.")
    return value
