"""Tools of MCP servers.

A server is not trusted. Its tools are checked before they are offered, its answers are bounded, and any other
behaviour becomes a structured failure. One task owns each connection from start to end; the next call restarts a server
that has died.
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
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from msgspec.structs import replace

from halter.core.clock import MINUTE, SECOND, Clock, read_monotonic
from halter.core.errors import require_module
from halter.core.text import clean, format_count
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
from halter.tools.mcp_contents import find_files, render_contents
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
    from mcp_types import CallToolResult

MAX_SENTENCES: Final = 20
"""Number of omitted tools whose reason is given; the others are counted."""
MAX_DESCRIPTION: Final = 20_000

_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_./-]+")
_MAX_NAME_LENGTH: Final = 64
"""Maximum length of a tool name that providers accept."""


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
    omissions: tuple[str, ...]


def parse_server_tools(server: str, entries: Sequence[Any]) -> UsableTools:
    described_tools = [(entry, _parse_tool(server, entry)) for entry in entries[:MAX_TOOLS]]
    names = Counter(tool.spec.name for _, tool in described_tools if isinstance(tool, DescribedTool))
    tools: list[DescribedTool] = []
    omissions: list[str] = []
    for entry, tool in described_tools:
        if isinstance(tool, str):
            omissions.append(_sentence(server, entry, tool))
        elif names[tool.spec.name] > 1:
            omissions.append(_sentence(server, entry, f"another of its tools is also called {tool.spec.name}"))
        else:
            tools.append(tool)
    if len(omissions) > MAX_SENTENCES:
        remaining = len(omissions) - MAX_SENTENCES
        omissions[MAX_SENTENCES:] = [f"{remaining} more tools of the server {server} are omitted."]
    if len(entries) > MAX_TOOLS:
        omissions.append(f"The server {server} offers more than {MAX_TOOLS} tools; the others are omitted.")
    return UsableTools(tuple(tools), tuple(omissions))


def _parse_tool(server: str, entry: Any) -> DescribedTool | str:
    match entry:
        case {"name": str(name), "inputSchema": schema}:
            pass
        case _:
            return "it has no name or no schema"
    raw = cast("dict[str, Any]", entry)
    full = f"{server}{SERVER_SEPARATOR}{re.sub('[./]', '_', name)}"
    description: Any = raw.get("description") or ""
    hints: Any = raw.get("annotations") or {}
    if _NAME_PATTERN.fullmatch(name) is None:
        return "its name contains characters other than letters, digits, _, -, . and /"
    if len(full) > _MAX_NAME_LENGTH:
        return f"its full name {full} has more than {_MAX_NAME_LENGTH} characters; give the server a shorter name"
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        return f"its description is not text, or has more than {MAX_DESCRIPTION:,} characters"
    if not isinstance(hints, dict):
        return "its annotations are not an object"
    checker = compile_schema(schema)
    if isinstance(checker, UnusableSchema):
        return checker.why
    text = clean(description) or name
    spec = spec_from_hints(full, text, checker.text, cast("dict[str, Any]", hints), server=server)
    try:
        return DescribedTool(name, _seal_hints(spec, cast("dict[str, Any]", hints)), checker, raw)
    except (ValueError, RecursionError):
        return "its annotations are not valid JSON"


def _seal_hints(spec: ToolSpec, hints: Mapping[str, Any]) -> ToolSpec:
    """Add all hints to the digest, since a person may judge a tool by any of them."""
    digest = hashlib.sha256(spec.digest.encode() + canonical_json(hints)).hexdigest()
    return replace(spec, digest=digest)


def _sentence(server: str, entry: Any, reason: str) -> str:
    name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else None
    sentence = f"The tool {name[:80]!r}" if isinstance(name, str) else "A tool"
    return f"{sentence} of the server {server} is omitted: {reason}."


_INHERITED_VARIABLES: Final = ("PATH", "HOME", "LANG")
"""The only variables that a server inherits from the environment; others may contain keys."""

_NO_BYTECODE: Final[Mapping[str, str]] = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Prevents bytecode next to trusted code, which would be untrusted code."""

T = TypeVar("T")

_END_TIMEOUT: Final = 5.0
_LISTEN_TIMEOUT: Final = 2.0
"""Seconds to wait for a server to confirm a subscription; after that its tools are listed anyway."""


def _reject_secrets(name: str) -> str:
    raise KeyError(name)


def _ignore_progress(_: str) -> None:
    """Ignore progress."""


def _allow_start() -> None:
    """Allow every program to start."""


@dataclass(frozen=True)
class McpTerms:
    """The settings for all servers; times are in microseconds.

    A server is restarted at most `max_restarts` times per `restart_window`. `grace` is the time that a program has to
    exit after its input is closed. `reveal` returns the secrets that the configuration refers to. `before_start` is
    called before each start of a program and raises Failed if the program may not start. `report` receives a sentence
    after every `report_interval` of waiting for a server to start.
    """

    clock: Clock
    environment: Mapping[str, str]
    reveal: Callable[[str], str] = _reject_secrets
    before_start: Callable[[], None] = _allow_start
    report: Callable[[str], None] = _ignore_progress
    report_interval: int = 5 * SECOND
    timeout: int = DEFAULT_TOOL_TIMEOUT
    grace: int = 2 * SECOND
    max_restarts: int = 3
    restart_window: int = MINUTE
    max_output: int = MAX_OUTPUT
    max_message: int = 4 * MAX_OUTPUT
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class McpOffer:
    """The usable tools, and a sentence for each omitted tool or server."""

    tools: tuple["McpTool", ...] = ()
    omissions: tuple[str, ...] = ()


@asynccontextmanager
async def open_mcp_tools(servers: Sequence[ToolServer], terms: McpTerms) -> AsyncGenerator[McpOffer]:
    """Connect to all servers in parallel and offer their tools; stop every server on exit."""
    notes = tuple(note for server in servers for note in server.problems)
    clients = [McpServer(server, terms) for server in servers if not server.omission]
    try:
        offers = await asyncio.gather(*(_offer_tools(server) for server in clients))
        tools = tuple(tool for offer in offers for tool in offer.tools)
        yield McpOffer(tools, (*notes, *(sentence for offer in offers for sentence in offer.omissions)))
    finally:
        await asyncio.gather(*(server.close() for server in clients))


async def _offer_tools(server: "McpServer") -> McpOffer:
    try:
        return await server.open()
    except Failed as failure:
        return McpOffer(omissions=(f"The server {server.name} is omitted. {failure}",))


def read_tool_result(result: "CallToolResult", max_output: int = MAX_OUTPUT) -> Output:
    """Return a server's result as text. Raises Failed if the result is an error."""
    text = truncate_middle(render_contents(result.content, result.structured_content), max_output)
    if result.is_error:
        raise Failed("ToolError", text or "the tool failed without a message.", text)
    return Output(text, files=find_files(result.content))


class McpTool:
    """A tool of an MCP server. Implements the port `Tool`."""

    def __init__(self, server: "McpServer", described: DescribedTool, timeout: int) -> None:
        self._server = server
        self._name = described.name
        self._checker: SchemaChecker = described.checker
        self.entry = described.entry
        # The timeout is not part of what a person approved, so it is not part of the digest.
        self.spec = replace(described.spec, timeout=timeout)

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return self._checker.validate(self.spec.name, arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        result = await self.relay(arguments, permit, NO_RELAY)
        return read_tool_result(result, self._server.max_output)

    async def relay(self, arguments: Valid, permit: Permit, relay: CallRelay) -> "CallToolResult":
        """Call the tool and return the server's result unchanged."""
        revealed_arguments = self._reveal_secrets(arguments, permit)
        async with asyncio.timeout(self.spec.timeout / SECOND):
            return await self._server.call(self.spec, self._name, revealed_arguments, permit, relay)

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        permit.use()
        return "unknown"

    def _reveal_secrets(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        try:
            revealed_arguments = substitute_secrets(dict(arguments.values), permit.reveal)
            encoded_arguments = canonical_json(revealed_arguments)
        except KeyError as error:
            raise Failed("UnknownSecret", f"This call may not use the secret {error.args[0]}.") from None
        except ValueError:
            raise Failed("InvalidSecret", "a secret contains characters that cannot be sent.") from None
        match self._checker.validate(self.spec.name, encoded_arguments):
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
    """Tasks that follow the changes of single resources, on servers of the newer protocol."""

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
        """Return the current offer; list the tools again if the server announced a change."""
        live = await self._connect()
        await self._fresh(live, _require_open(live.session))
        return live.offer

    async def list(self, request: Any, result_type: Any) -> Any:
        """Send a request that lists resources or prompts. Raises Failed on an error of the server."""
        live = await self._connect()
        return await self._translate_errors(send_listing(_require_open(live.session), request, result_type))

    async def follow_resource(self, uri: str) -> None:
        """Subscribe to changes of a resource, also after a restart of the server."""
        self._followed_resources.add(uri)
        await self._subscribe(await self._connect(), uri)

    async def unfollow_resource(self, uri: str) -> None:
        from mcp_types import EmptyResult, UnsubscribeRequest, UnsubscribeRequestParams

        self._followed_resources.discard(uri)
        live = await self._connect()
        stream = live.following.pop(uri, None)
        if stream is not None:
            stream.cancel()
        elif not _speaks_modern(_require_open(live.session)):
            request = UnsubscribeRequest(params=UnsubscribeRequestParams(uri=uri))
            await self._translate_errors(send_listing(_require_open(live.session), request, EmptyResult))

    async def _subscribe(self, live: _LiveConnection, uri: str) -> None:
        from mcp_types import EmptyResult, SubscribeRequest, SubscribeRequestParams

        session = _require_open(live.session)
        if _speaks_modern(session):
            if uri not in live.following:
                live.following[uri] = asyncio.create_task(follow_resource(session, uri), name=f"mcp {self.name} {uri}")
            return
        await self._translate_errors(
            send_listing(session, SubscribeRequest(params=SubscribeRequestParams(uri=uri)), EmptyResult)
        )

    async def read(self, request: Any, result_type: Any, permit: Permit, relay: CallRelay) -> Any:
        """Read a resource or a prompt. Raises Failed on an error of the server."""
        send = send_reading.open(permit)
        live = await self._connect()
        return await self._translate_errors(send(_require_open(live.session), request, result_type, relay))

    async def _translate_errors(self, answer: Awaitable[Any]) -> Any:
        from mcp.shared.exceptions import MCPError

        try:
            return await answer
        except MCPError as error:
            raise Failed("McpError", f"the server {self.name} returned an error: {error.message}") from error
        except (ValueError, RuntimeError) as error:
            message = f"the answer of the server {self.name} is invalid ({type(error).__name__})."
            raise Failed("AnswerLost", message) from error

    async def capabilities(self) -> Any:
        return _require_open((await self._connect()).session).server_capabilities

    async def call(
        self, spec: ToolSpec, name: str, arguments: Mapping[str, Any], permit: Permit, relay: CallRelay = NO_RELAY
    ) -> "CallToolResult":
        """Call a tool. Raises Failed, or Unstoppable if the outcome is unknown."""
        from mcp.shared.exceptions import MCPError

        send = send_tool_call.open(permit)
        live = await self._connect()
        session = await self._require_agreed_tool(live, spec)
        try:
            return await send(session, name, arguments, permit.id, relay, self._terms.clock.sleep)
        except asyncio.CancelledError:
            if spec.effect == "read":
                raise
            raise self._unknown("the call was cancelled after it was sent") from None
        except MCPError as error:
            raise self._failure(live, spec, error.code, error.message) from error
        except (ValueError, RuntimeError) as error:
            raise self._failure(live, spec, LOST_CODE, f"its answer is invalid ({type(error).__name__})") from error

    def _failure(self, live: _LiveConnection, spec: ToolSpec, code: int, message: str) -> Failed | Unstoppable:
        """Distinguish a failure of the server from a lost answer."""
        from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

        remote = self._server.transport != "stdio"
        is_closed = code == CONNECTION_CLOSED and (remote or live.ending.ended.is_set())
        if is_closed or code == FORGOTTEN_CODE:
            live.ending.ended.set()
        if not (is_closed or code == LOST_CODE or (code == PARSE_ERROR and remote)):
            kind = "NotReached" if code in {NOT_SENT_CODE, FORGOTTEN_CODE} else "McpError"
            return Failed(
                kind, f"the server {self.name} returned an error: {message}" if kind == "McpError" else message
            )
        reason = live.ending.why or message
        if spec.effect == "write":
            return self._unknown(reason)
        return Failed("AnswerLost", f"no usable answer from the server {self.name}: {reason}", live.ending.describe())

    def _unknown(self, reason: str) -> Unstoppable:
        return Unstoppable(
            f"No usable answer from the server {self.name}: {reason.rstrip('.')}. "
            "It is unknown whether the call took effect."
        )

    async def _require_agreed_tool(self, live: _LiveConnection, spec: ToolSpec) -> "ClientSession":
        """Require that the server still offers the tool with the agreed digest."""
        session = _require_open(live.session)
        await self._fresh(live, session)
        if not live.offers_tool(spec):
            raise Failed("ToolChanged", f"the server {self.name} does not offer {spec.name} in the approved version.")
        return session

    async def _fresh(self, live: _LiveConnection, session: "ClientSession") -> None:
        from mcp.shared.exceptions import MCPError

        async with self._one_at_a_time:
            if live.stale:
                try:
                    await self._list(live, session)
                except (MCPError, ValueError, RuntimeError) as error:
                    raise Failed("ToolsUnknown", f"cannot list the tools of the server {self.name}: {error}") from error

    async def _connect(self) -> _LiveConnection:
        """Return the live connection, or open one within the restart limit."""
        async with self._one_at_a_time:
            if self._live is None or self._live.ending.ended.is_set():
                await self._replace()
            live = _require_open(self._live)
        if live.ready.done():
            return live
        task = _require_open(live.task)
        await self._await_start(live, task)
        if live.ready.done():
            return live
        is_late = not task.done()
        await self._end(live)
        reason = self._explain_late() if is_late else live.ending.why
        raise Failed("NotConnected", f"the server {self.name} cannot be used: {reason}", live.ending.describe())

    async def _await_start(self, live: _LiveConnection, task: "asyncio.Task[None]") -> None:
        """Wait until a server is ready, ended or late; report while waiting."""
        elapsed_time, limit = 0, self._server.start_timeout
        while elapsed_time < limit and not (task.done() or live.ready.done()):
            if elapsed_time:
                self._terms.report(f"Starting the MCP server {self.name}: {elapsed_time / SECOND:g} s …")
            pause = min(self._terms.report_interval, limit - elapsed_time)
            await asyncio.wait((task, live.ready), timeout=pause / SECOND, return_when=asyncio.FIRST_COMPLETED)
            elapsed_time += pause

    def _explain_late(self) -> str:
        """Describe a late start, without the arguments of the program, which may contain a key."""
        server = self._server
        activity = f" of starting the program {server.command}" if server.transport == "stdio" else ""
        return (
            f"it did not answer within {server.start_timeout / SECOND:g} s{activity}. If it needs longer, increase "
            f"`startup_timeout_sec` of `mcpServers.{self.name}` in .mcp.json"
        )

    async def _replace(self) -> None:
        if self._is_closed:
            raise Failed("NotConnected", f"the server {self.name} was closed.")
        if self._live is not None:
            await self._end(self._live)
            now = read_monotonic(self._terms.clock)
            while self._restarts and self._restarts[0] <= now - self._terms.restart_window:
                self._restarts.popleft()
            if len(self._restarts) >= self._terms.max_restarts:
                wait = (self._restarts[0] + self._terms.restart_window - now) // SECOND + 1 if self._restarts else 0
                times = format_count(len(self._restarts), "time")
                raise Failed(
                    "NotConnected",
                    f"the server {self.name} keeps exiting and was restarted {times}; "
                    f"the next restart is allowed in {wait} s.",
                )
            self._restarts.append(now)
        live = self._live = _LiveConnection(asyncio.get_running_loop().create_future())
        live.task = asyncio.create_task(self._own(live), name=f"mcp {self.name}")
        live.task.add_done_callback(partial(_note_end, live.ending))

    async def _end(self, live: _LiveConnection) -> None:
        """End a connection gracefully if it was ready; cancel it if it was not, or if that takes too long."""
        live.ending.ended.set()
        task = _require_open(live.task)
        if live.ready.done():
            await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _END_TIMEOUT)
        task.cancel()
        await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _END_TIMEOUT)

    async def _own(self, live: _LiveConnection) -> None:
        """Own the connection until it ends: a task group must be exited in the task that entered it."""
        if self._server.transport == "stdio":
            await asyncio.to_thread(self._terms.before_start)
        answered_methods = ONLY_PINGS if self._peer is SILENT_PEER else ALL_REQUESTS
        async with (
            watch_connection(self._wire(live.ending), live.ending, answered_methods) as wire,
            open_mcp_session(self.name, live.raw, wire, live.outdate, self._peer) as session,
        ):
            live.session = session
            await negotiate_version(session)
            async with self._watch_changes(live, session):
                await self._list(live, session)
                for uri in sorted(self._followed_resources):
                    with suppress(Failed):
                        await self._subscribe(live, uri)
                live.ready.set_result(None)
                await live.ending.ended.wait()

    @asynccontextmanager
    async def _watch_changes(self, live: _LiveConnection, session: "ClientSession") -> AsyncGenerator[None]:
        """Follow changes before the tools are listed, so that no change is missed in between."""
        listening, clock = asyncio.Event(), self._terms.clock
        changes = follow_changes(session, live.outdate, listening, lambda tries: clock.sleep(tries * SECOND))
        follower = asyncio.create_task(changes, name=f"mcp {self.name} news")
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(listening.wait(), _LISTEN_TIMEOUT)
            yield
        finally:
            tasks = (follower, *live.following.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _wire(self, ending: ConnectionEnding) -> AbstractAsyncContextManager[tuple[Any, Any]]:
        server, terms = self._server, self._terms
        try:
            env = cast("dict[str, str]", substitute_secrets(dict(server.env), terms.reveal))
            headers = cast("dict[str, str]", substitute_secrets(dict(server.headers), terms.reveal))
        except KeyError as error:
            raise Failed("UnknownSecret", f"The server may not use the secret {error.args[0]}.") from None
        if server.transport == "stdio":
            inherited_env = {
                name: terms.environment[name] for name in _INHERITED_VARIABLES if name in terms.environment
            }
            argv = (server.command, *server.args)
            launch = LaunchSpec(
                argv, server.cwd, {**_NO_BYTECODE, **inherited_env, **env}, terms.max_message, terms.grace / SECOND
            )
            return open_stdio_wire(launch, ending)
        remote = RemoteServer(server.url, headers, terms.max_message, tls=terms.tls)
        return open_http_wire(remote) if server.transport == "http" else open_sse_wire(remote)

    async def _list(self, live: _LiveConnection, session: "ClientSession") -> None:
        """List the usable tools. A change in the meantime marks them as stale again."""
        live.stale = False
        try:
            usable = parse_server_tools(self.name, await list_server_tools(session, live.raw))
        except BaseException:
            live.stale = True
            raise
        timeout = self._server.call_timeout or self._terms.timeout
        tools = tuple(McpTool(self, described, timeout) for described in usable.tools)
        live.offer = McpOffer(tools, usable.omissions)


def _note_end(ending: ConnectionEnding, task: "asyncio.Task[None]") -> None:
    ending.ended.set()
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if not ending.why:
        ending.why = "it ended" if error is None else str(error) or type(error).__name__


def _require_installed(server: str) -> None:
    require_module("mcp", "mcp", f"The MCP server {server}")
    # The library would log messages that contain secrets; its errors are also raised.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def _speaks_modern(session: "ClientSession") -> bool:
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    return session.protocol_version in MODERN_PROTOCOL_VERSIONS


def _require_open(value: T | None) -> T:
    if value is None:
        raise AssertionError("A connection was used before it was opened.")
    return value
