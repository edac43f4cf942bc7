"""Tools of MCP servers.

A server is not trusted. Its tools are checked before they are offered, its answers are bounded, and every other
behaviour becomes a structured failure. One task owns each connection from its beginning to its end; a server that has
died is started again by the next call.
"""

import asyncio
import hashlib
import logging
import re
import ssl
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from msgspec.structs import replace

from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.errors import ConfigError, explain_extra
from halter.core.text import clean
from halter.core.tools import (
    DEFAULT_TOOL_TIMEOUT,
    SERVER_SEPARATOR,
    EffectStatus,
    Failed,
    Invalid,
    Output,
    Permit,
    ToolServer,
    ToolSpec,
    Unstoppable,
    Valid,
    substitute_secrets,
)
from halter.tools.function_tool import SchemaChecker, UnusableSchema, canonical_json, compile_schema, spec_from_hints
from halter.tools.mcp_contents import render_contents
from halter.tools.mcp_session import (
    MAX_TOOLS,
    NO_RELAY,
    SILENT_PEER,
    CallRelay,
    McpPeer,
    ToolListRecorder,
    follow_changes,
    follow_resource,
    list_server_tools,
    negotiate_version,
    open_mcp_session,
    send_listing,
    send_reading,
    send_tool_call,
)
from halter.tools.mcp_transport import (
    ALL_REQUESTS,
    FORGOTTEN_CODE,
    LOST_CODE,
    NOT_SENT_CODE,
    ONLY_PINGS,
    ConnectionEnding,
    LaunchSpec,
    RemoteServer,
    open_http_wire,
    open_sse_wire,
    open_stdio_wire,
    watch_connection,
)
from halter.tools.process import MAX_OUTPUT, truncate_middle

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import (
        CallToolResult,
    )

MAX_SENTENCES: Final = 20
"""For this many tools the reason is given; the others are counted."""
MAX_DESCRIPTION: Final = 20_000

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]+")
_LONGEST: Final = 64
"""Providers accept no longer names of tools."""


@dataclass(frozen=True)
class DescribedTool:
    """A tool that can be used; `entry` is what the server listed."""

    name: str
    spec: ToolSpec
    checker: SchemaChecker
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class UsableTools:
    tools: tuple[DescribedTool, ...]
    left_out: tuple[str, ...]


def describe_server_tools(server: str, entries: Sequence[Any]) -> UsableTools:
    looked = [(entry, _describe_tool(server, entry)) for entry in entries[:MAX_TOOLS]]
    names = Counter(tool.spec.name for _, tool in looked if isinstance(tool, DescribedTool))
    tools: list[DescribedTool] = []
    left_out: list[str] = []
    for entry, tool in looked:
        if isinstance(tool, str):
            left_out.append(_sentence(server, entry, tool))
        elif names[tool.spec.name] > 1:
            left_out.append(_sentence(server, entry, f"another of its tools is called {tool.spec.name}, too"))
        else:
            tools.append(tool)
    if len(left_out) > MAX_SENTENCES:
        rest = len(left_out) - MAX_SENTENCES
        left_out[MAX_SENTENCES:] = [f"And {rest} more tools of the server {server} are left out for such reasons."]
    if len(entries) > MAX_TOOLS:
        left_out.append(f"The server {server} offers more than {MAX_TOOLS} tools; the rest is left out.")
    return UsableTools(tuple(tools), tuple(left_out))


def _describe_tool(server: str, entry: Any) -> DescribedTool | str:
    match entry:
        case {"name": str(name), "inputSchema": schema}:
            pass
        case _:
            return "it has no name or no schema"
    raw = cast("dict[str, Any]", entry)
    full = f"{server}{SERVER_SEPARATOR}{re.sub('[./]', '_', name)}"
    description: Any = raw.get("description") or ""
    hints: Any = raw.get("annotations") or {}
    if _NAME.fullmatch(name) is None:
        return "its name has characters that no model can write; letters, digits, _, -, . and / are understood"
    if len(full) > _LONGEST:
        return f"its full name {full} is longer than {_LONGEST} characters; give the server a shorter name"
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        return f"its description is no text of at most {MAX_DESCRIPTION:,} characters"
    if not isinstance(hints, dict):
        return "its annotations are no object"
    checker = compile_schema(schema)
    if isinstance(checker, UnusableSchema):
        return checker.why
    text = clean(description) or name
    spec = spec_from_hints(full, text, checker.text, cast("dict[str, Any]", hints), server=server)
    try:
        return DescribedTool(name, _seal_hints(spec, cast("dict[str, Any]", hints)), checker, raw)
    except (ValueError, RecursionError):
        return "its annotations cannot be read"


def _seal_hints(spec: ToolSpec, hints: Mapping[str, Any]) -> ToolSpec:
    """Include all hints in the digest: a person may judge a tool by any of them."""
    digest = hashlib.sha256(spec.digest.encode() + canonical_json(hints)).hexdigest()
    return replace(spec, digest=digest)


def _sentence(server: str, entry: Any, why: str) -> str:
    name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else None
    sentence = f"The tool {name[:80]!r}" if isinstance(name, str) else "A tool"
    return f"{sentence} of the server {server} is left out: {why}."


_INHERITED: Final = ("PATH", "HOME", "LANG")
"""All that a server inherits from the environment: the rest of it holds keys."""

_NO_BYTECODE: Final[Mapping[str, str]] = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Bytecode beside trusted code would be untrusted code."""

T = TypeVar("T")

_GRACE: Final = 5.0
_LISTEN_PATIENCE: Final = 2.0
"""Seconds in which a server should say that it will tell of changes; after that its tools are listed anyway."""


def _reject_secrets(name: str) -> str:
    raise KeyError(name)


def _ignore_progress(_: str) -> None:
    """Report no progress."""


def _allow_start() -> None:
    """Let every program start."""


@dataclass(frozen=True)
class McpTerms:
    """The terms for servers; times are in microseconds.

    A server is restarted at most `restarts` times `within` a time. `grace` is how long a program has to end by itself.
    `reveal` gives the secrets that the configuration refers to. `starts` is called each time before a program is
    started, and raises Failed if it may not be. `tell` receives a sentence each time that a server has kept its agent
    waiting for another `tells_every`.
    """

    clock: Clock
    environment: Mapping[str, str]
    reveal: Callable[[str], str] = _reject_secrets
    starts: Callable[[], None] = _allow_start
    report: Callable[[str], None] = _ignore_progress
    tells_every: int = 5 * SECOND
    timeout: int = DEFAULT_TOOL_TIMEOUT
    grace: int = 2 * SECOND
    restarts: int = 3
    within: int = MINUTE
    max_output: int = MAX_OUTPUT
    max_message: int = 4 * MAX_OUTPUT
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class McpOffer:
    """The usable tools, and a sentence for each tool or server that is left out."""

    tools: tuple["McpTool", ...] = ()
    left_out: tuple[str, ...] = ()


@asynccontextmanager
async def open_mcp_tools(servers: Sequence[ToolServer], terms: McpTerms) -> AsyncGenerator[McpOffer]:
    """Connect to all servers at once and offer their tools; at the end every server is stopped."""
    connected = [McpServer(server, terms) for server in servers]
    try:
        offers = await asyncio.gather(*(_offer_tools(server) for server in connected))
        tools = tuple(tool for offer in offers for tool in offer.tools)
        yield McpOffer(tools, tuple(sentence for offer in offers for sentence in offer.left_out))
    finally:
        await asyncio.gather(*(server.close() for server in connected))


async def _offer_tools(server: "McpServer") -> McpOffer:
    try:
        return await server.open()
    except Failed as failure:
        return McpOffer(left_out=(f"The server {server.name} is left out. {failure}",))


def read_tool_result(result: "CallToolResult", max_output: int = MAX_OUTPUT) -> Output:
    """What a server said, as text. Raises Failed where it says that the tool failed."""
    text = truncate_middle(render_contents(result.content, result.structured_content), max_output)
    if result.is_error:
        raise Failed("ToolError", text or "the tool failed and does not say why.", text)
    return Output(text)


class McpTool:
    """One tool of one server. It implements the port `Tool`."""

    def __init__(self, server: "McpServer", known: DescribedTool, timeout: int) -> None:
        self._server = server
        self._name = known.name
        self._checker: SchemaChecker = known.checker
        self.entry = known.entry
        # How long we wait is our own affair, so that it is no part of what a person agreed to.
        self.spec = replace(known.spec, timeout=timeout)

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return self._checker.validate(self.spec.name, arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        result = await self.relay(arguments, permit, NO_RELAY)
        return read_tool_result(result, self._server.max_output)

    async def relay(self, arguments: Valid, permit: Permit, relay: CallRelay) -> "CallToolResult":
        """Make the call, and return what the server said as it came."""
        plain = self._reveal_secrets(arguments, permit)
        async with asyncio.timeout(self.spec.timeout / SECOND):
            return await self._server.call(self.spec, self._name, plain, permit, relay)

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        permit.use()
        return "unknown"

    def _reveal_secrets(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        try:
            plain = substitute_secrets(dict(arguments.values), permit.reveal)
            written = canonical_json(plain)
        except KeyError as missing:
            raise Failed("UnknownSecret", f"{missing.args[0]} is no secret that this call may use.") from None
        except ValueError:
            raise Failed("InvalidSecret", "a secret holds characters that cannot be sent.") from None
        match self._checker.validate(self.spec.name, written):
            case Valid(values):
                return values
            case Invalid(sentence):
                raise Failed("InvalidSecret", sentence)


@dataclass
class _LiveConnection:
    ready: "asyncio.Future[None]"
    ending: ConnectionEnding = field(default_factory=ConnectionEnding)
    raw: ToolListRecorder = field(default_factory=ToolListRecorder)
    task: "asyncio.Task[None] | None" = None
    session: "ClientSession | None" = None
    offer: McpOffer = field(default_factory=McpOffer)
    stale: bool = False
    following: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    """Streams of single resources' changes, which servers of the newer protocol have."""

    def outdate(self) -> None:
        self.stale = True

    def offers_tool(self, spec: ToolSpec) -> bool:
        return any((tool.spec.name, tool.spec.digest) == (spec.name, spec.digest) for tool in self.offer.tools)


class McpServer:
    def __init__(self, server: ToolServer, terms: McpTerms, peer: McpPeer = SILENT_PEER) -> None:
        _require_installed(server.name)
        self.name = server.name
        self.max_output = terms.max_output
        self._server = server
        self._terms = terms
        self._peer = peer
        self._one_at_a_time = asyncio.Lock()
        self._live: _LiveConnection | None = None
        self._restarts: deque[int] = deque()
        self._is_closed = False
        self._followed_resources: set[str] = set()

    async def open(self) -> McpOffer:
        return (await self._connect()).offer

    async def close(self) -> None:
        self._is_closed = True
        if self._live is not None:
            await self._end(self._live)

    async def offer(self) -> McpOffer:
        """What the server offers by now: it is asked again after it announced other tools."""
        live = await self._connect()
        await self._fresh(live, _demand(live.session))
        return live.offer

    async def list(self, request: Any, wanted: Any) -> Any:
        """Ask what there is besides tools. Raises Failed if the server does not say it."""
        live = await self._connect()
        return await self._translate_errors(send_listing(_demand(live.session), request, wanted))

    async def follow_resource(self, uri: str) -> None:
        """Have the server say when a resource changes, also after it was started again."""
        self._followed_resources.add(uri)
        await self._subscribe(await self._connect(), uri)

    async def unfollow_resource(self, uri: str) -> None:
        from mcp_types import EmptyResult, UnsubscribeRequest, UnsubscribeRequestParams

        self._followed_resources.discard(uri)
        live = await self._connect()
        stream = live.following.pop(uri, None)
        if stream is not None:
            stream.cancel()
        elif not _speaks_modern(_demand(live.session)):
            request = UnsubscribeRequest(params=UnsubscribeRequestParams(uri=uri))
            await self._translate_errors(send_listing(_demand(live.session), request, EmptyResult))

    async def _subscribe(self, live: _LiveConnection, uri: str) -> None:
        from mcp_types import EmptyResult, SubscribeRequest, SubscribeRequestParams

        opened = _demand(live.session)
        if _speaks_modern(opened):
            if uri not in live.following:
                live.following[uri] = asyncio.create_task(follow_resource(opened, uri), name=f"mcp {self.name} {uri}")
            return
        await self._translate_errors(
            send_listing(opened, SubscribeRequest(params=SubscribeRequestParams(uri=uri)), EmptyResult)
        )

    async def read(self, request: Any, wanted: Any, permit: Permit, relay: CallRelay) -> Any:
        """Read a resource or a prompt. Raises Failed if the server does not give it."""
        ask = send_reading.open(permit)
        live = await self._connect()
        return await self._translate_errors(ask(_demand(live.session), request, wanted, relay))

    async def _translate_errors(self, answer: Awaitable[Any]) -> Any:
        from mcp.shared.exceptions import MCPError

        try:
            return await answer
        except MCPError as error:
            raise Failed("McpError", f"the server {self.name} says: {error.message}") from error
        except (ValueError, RuntimeError) as error:
            why = f"the answer of the server {self.name} cannot be read ({type(error).__name__})."
            raise Failed("AnswerLost", why) from error

    async def capabilities(self) -> Any:
        return _demand((await self._connect()).session).server_capabilities

    async def call(
        self, spec: ToolSpec, name: str, arguments: Mapping[str, Any], permit: Permit, relay: CallRelay = NO_RELAY
    ) -> "CallToolResult":
        """Call a tool. Raises Failed, or Unstoppable if the outcome is unknown."""
        from mcp.shared.exceptions import MCPError

        ask = send_tool_call.open(permit)
        live = await self._connect()
        opened = await self._require_agreed_tool(live, spec)
        try:
            return await ask(opened, name, arguments, permit.id, relay, self._terms.clock.sleep)
        except asyncio.CancelledError:
            if spec.effect == "read":
                raise
            raise self._unknown("it was cancelled, and may have done it before") from None
        except MCPError as error:
            raise self._failure(live, spec, error.code, error.message) from error
        except (ValueError, RuntimeError) as error:
            raise self._failure(live, spec, LOST_CODE, f"its answer cannot be read ({type(error).__name__})") from error

    def _failure(self, live: _LiveConnection, spec: ToolSpec, code: int, message: str) -> Failed | Unstoppable:
        """Tell a server's own failure from an answer that got lost."""
        from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

        remote = self._server.transport != "stdio"
        closed = code == CONNECTION_CLOSED and (remote or live.ending.ended.is_set())
        if closed or code == FORGOTTEN_CODE:
            live.ending.ended.set()
        if not (closed or code == LOST_CODE or (code == PARSE_ERROR and remote)):
            kind = "NotReached" if code in {NOT_SENT_CODE, FORGOTTEN_CODE} else "McpError"
            return Failed(kind, f"the server {self.name} says: {message}" if kind == "McpError" else message)
        why = live.ending.why or message
        if spec.effect == "write":
            return self._unknown(why)
        return Failed("AnswerLost", f"the server {self.name} did not answer: {why}", live.ending.describe())

    def _unknown(self, why: str) -> Unstoppable:
        return Unstoppable(f"It is unknown whether the server {self.name} did it, since there was no answer: {why}.")

    async def _require_agreed_tool(self, live: _LiveConnection, spec: ToolSpec) -> "ClientSession":
        """Check that the server still offers the agreed tool: it may have changed its tools."""
        opened = _demand(live.session)
        await self._fresh(live, opened)
        if not live.offers_tool(spec):
            raise Failed("ToolChanged", f"the server {self.name} does not offer {spec.name} as it was agreed to.")
        return opened

    async def _fresh(self, live: _LiveConnection, opened: "ClientSession") -> None:
        from mcp.shared.exceptions import MCPError

        async with self._one_at_a_time:
            if live.stale:
                try:
                    await self._list(live, opened)
                except (MCPError, ValueError, RuntimeError) as error:
                    raise Failed("ToolsUnknown", f"the server {self.name} does not list its tools: {error}") from error

    async def _connect(self) -> _LiveConnection:
        """Return the live connection, or make one within the restart limit."""
        async with self._one_at_a_time:
            if self._live is None or self._live.ending.ended.is_set():
                await self._replace()
            live = _demand(self._live)
        if live.ready.done():
            return live
        task = _demand(live.task)
        await self._await_start(live, task)
        if live.ready.done():
            return live
        late = not task.done()
        await self._end(live)
        why = self._explain_late() if late else live.ending.why
        raise Failed("NotConnected", f"the server {self.name} cannot be used: {why}", live.ending.describe())

    async def _await_start(self, live: _LiveConnection, task: "asyncio.Task[None]") -> None:
        """Wait until a server is ready, ended or late, and tell that it is still waited for."""
        waited, limit = 0, self._server.start_timeout
        while waited < limit and not (task.done() or live.ready.done()):
            if waited:
                self._terms.report(f"Starting the MCP server {self.name}: {waited / SECOND:g} s …")
            pause = min(self._terms.tells_every, limit - waited)
            await asyncio.wait((task, live.ready), timeout=pause / SECOND, return_when=asyncio.FIRST_COMPLETED)
            waited += pause

    def _explain_late(self) -> str:
        """Name what was started, without its arguments, which may hold a key."""
        server = self._server
        what = f" of starting the program {server.command}" if server.transport == "stdio" else ""
        return (
            f"it did not answer within {server.start_timeout / SECOND:g} s{what}. If it needs longer, write a larger "
            f"`startup_timeout_sec` for `mcpServers.{self.name}` into .mcp.json"
        )

    async def _replace(self) -> None:
        if self._is_closed:
            raise Failed("NotConnected", f"the server {self.name} was closed.")
        if self._live is not None:
            await self._end(self._live)
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
        live = self._live = _LiveConnection(asyncio.get_running_loop().create_future())
        live.task = asyncio.create_task(self._own(live), name=f"mcp {self.name}")
        live.task.add_done_callback(partial(_note_end, live.ending))

    async def _end(self, live: _LiveConnection) -> None:
        """End a connection: gracefully if it was up, at once if it takes too long or never was."""
        live.ending.ended.set()
        task = _demand(live.task)
        if live.ready.done():
            await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _GRACE)
        task.cancel()
        await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _GRACE)

    async def _own(self, live: _LiveConnection) -> None:
        """Hold the connection until it is over: a task group must be left in the task that entered it."""
        if self._server.transport == "stdio":
            await asyncio.to_thread(self._terms.starts)
        answered = ONLY_PINGS if self._peer is SILENT_PEER else ALL_REQUESTS
        async with (
            watch_connection(self._wire(live.ending), live.ending, answered) as wire,
            open_mcp_session(self.name, live.raw, wire, live.outdate, self._peer) as opened,
        ):
            live.session = opened
            await negotiate_version(opened)
            async with self._watch_changes(live, opened):
                await self._list(live, opened)
                for uri in sorted(self._followed_resources):
                    with suppress(Failed):
                        await self._subscribe(live, uri)
                live.ready.set_result(None)
                await live.ending.ended.wait()

    @asynccontextmanager
    async def _watch_changes(self, live: _LiveConnection, opened: "ClientSession") -> AsyncGenerator[None]:
        """Hear of changes before the tools are listed, so that none is missed in between."""
        heard, clock = asyncio.Event(), self._terms.clock
        news = follow_changes(opened, live.outdate, heard, lambda tries: clock.sleep(tries * SECOND))
        following = asyncio.create_task(news, name=f"mcp {self.name} news")
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(heard.wait(), _LISTEN_PATIENCE)
            yield
        finally:
            tasks = (following, *live.following.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _wire(self, ending: ConnectionEnding) -> AbstractAsyncContextManager[tuple[Any, Any]]:
        server, terms = self._server, self._terms
        try:
            env = cast("dict[str, str]", substitute_secrets(dict(server.env), terms.reveal))
            headers = cast("dict[str, str]", substitute_secrets(dict(server.headers), terms.reveal))
        except KeyError as missing:
            raise Failed("UnknownSecret", f"{missing.args[0]} is no secret that the server may use.") from None
        if server.transport == "stdio":
            inherited = {name: terms.environment[name] for name in _INHERITED if name in terms.environment}
            argv = (server.command, *server.args)
            launch = LaunchSpec(
                argv, server.cwd, {**_NO_BYTECODE, **inherited, **env}, terms.max_message, terms.grace / SECOND
            )
            return open_stdio_wire(launch, ending)
        remote = RemoteServer(server.url, headers, terms.max_message, tls=terms.tls)
        return open_http_wire(remote) if server.transport == "http" else open_sse_wire(remote)

    async def _list(self, live: _LiveConnection, opened: "ClientSession") -> None:
        """List the usable tools. A change meanwhile is fetched later."""
        live.stale = False
        try:
            known = describe_server_tools(self.name, await list_server_tools(opened, live.raw))
        except BaseException:
            live.stale = True
            raise
        tools = tuple(McpTool(self, each, self._terms.timeout) for each in known.tools)
        live.offer = McpOffer(tools, known.left_out)


def _note_end(ending: ConnectionEnding, task: "asyncio.Task[None]") -> None:
    ending.ended.set()
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if not ending.why:
        ending.why = "it ended" if error is None else str(error) or type(error).__name__


def _require_installed(server: str) -> None:
    try:
        import_module("mcp")
    except ImportError:
        raise ConfigError(explain_extra("mcp", f"The MCP server {server}")) from None
    # It would log messages with the secrets that were put into them; what it has to tell comes as an error, too.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def _speaks_modern(session: "ClientSession") -> bool:
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    return session.protocol_version in MODERN_PROTOCOL_VERSIONS


def _demand(value: T | None) -> T:
    if value is None:
        raise AssertionError("A connection was used before it was made.")
    return value
