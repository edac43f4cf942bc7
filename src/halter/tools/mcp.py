"""Tools of MCP servers.

A server is not trusted. Its tools are checked before they are offered, its answers are bounded, and every other
behaviour becomes a structured failure. One task owns each connection from its beginning to its end; a server that has
died is started again by the next call.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import re
import ssl
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
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
    PermitGate,
    ToolServer,
    ToolSpec,
    Unstoppable,
    Valid,
    substitute_secrets,
)
from halter.tools.function_tool import SchemaChecker, UnusableSchema, canonical_json, compile_schema, spec_from_hints
from halter.tools.mcp_transport import (
    FORGOTTEN_CODE,
    LOST_CODE,
    NOT_SENT_CODE,
    ConnectionEnding,
    LaunchSpec,
    RemoteServer,
    ServerInput,
    ServerOutput,
    open_http_wire,
    open_sse_wire,
    open_stdio_wire,
    watch_connection,
)
from halter.tools.process import MAX_OUTPUT, bytes_to_text, truncate_middle

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import CallToolResult, InputRequiredResult

MAX_TOOLS: Final = 500
MAX_SENTENCES: Final = 20
"""For this many tools the reason is given; the others are counted."""
MAX_DESCRIPTION: Final = 20_000

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]+")
_LONGEST: Final = 64
"""Providers accept no longer names of tools."""


class ToolListRecorder:
    """Carries requests to a server, and keeps its list of tools as it came.

    The SDK refuses a whole list for one bad entry, and takes a hint that says "yes" for one that says true. So it sees
    only the parts that it needs, and only of entries that it can read.
    """

    def __init__(self) -> None:
        self.inner: Any = None
        self.tools: list[Any] = []

    async def run(self, *arguments: Any, **more: Any) -> None:
        await self.inner.run(*arguments, **more)

    async def notify(self, *arguments: Any, **more: Any) -> None:
        await self.inner.notify(*arguments, **more)

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = await self.inner.send_raw_request(method, params, opts)
        tools = answer.get("tools")
        if method != "tools/list" or not isinstance(tools, list):
            return answer
        entries = cast("list[Any]", tools)
        self.tools += entries
        return {**answer, "tools": [part for entry in entries if (part := _read_entry(entry))]}


def _read_entry(entry: Any) -> dict[str, Any] | None:
    match entry:
        case {"name": str(name), "inputSchema": {"type": "object"} as schema}:
            properties = cast("dict[str, Any]", schema).get("properties")
            kept = cast("dict[str, Any]", properties if isinstance(properties, dict) else {})
            readable: dict[str, Any] = {key: value for key, value in kept.items() if isinstance(value, dict)}
            return {"name": name, "inputSchema": {"type": "object", "properties": readable}}
        case _:
            return None


@dataclass(frozen=True)
class DescribedTool:
    name: str
    spec: ToolSpec
    checker: SchemaChecker


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
    said = cast("dict[str, Any]", entry)
    full = f"{server}{SERVER_SEPARATOR}{re.sub('[./]', '_', name)}"
    description: Any = said.get("description") or ""
    hints: Any = said.get("annotations") or {}
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
        return DescribedTool(name, _seal_hints(spec, cast("dict[str, Any]", hints)), checker)
    except (ValueError, RecursionError):
        return "its annotations cannot be read"


def _seal_hints(spec: ToolSpec, hints: Mapping[str, Any]) -> ToolSpec:
    """Include all hints in the digest: a person may judge a tool by any of them."""
    digest = hashlib.sha256(spec.digest.encode() + canonical_json(hints)).hexdigest()
    return replace(spec, digest=digest)


def _sentence(server: str, entry: Any, why: str) -> str:
    name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else None
    told = f"The tool {name[:80]!r}" if isinstance(name, str) else "A tool"
    return f"{told} of the server {server} is left out: {why}."


def render_contents(contents: Sequence[Any], structured: Any) -> str:
    """Join all parts of an answer into one text, each thing once.

    Most servers say the same as text and as structured content. What the other form says in full is left out.
    """
    from mcp_types import TextContent

    parts = [_part(content) for content in contents]
    said = [content.text for content in contents if isinstance(content, TextContent)]
    if structured is None or _says_all(said, structured):
        return "\n".join(parts)
    told = {value for value in _walk_scalars(structured) if isinstance(value, str)}
    kept = [part for part, content in zip(parts, contents, strict=True) if getattr(content, "text", None) not in told]
    return "\n".join([*kept, json.dumps(structured, ensure_ascii=False)])


def _part(content: Any) -> str:
    """Images and audio are only named: text models cannot use them and would pay for them."""
    from mcp_types import AudioContent, EmbeddedResource, ImageContent, ResourceLink, TextContent

    match content:
        case TextContent():
            return content.text
        case ImageContent():
            return f"[an image, {_one_line(content.mime_type)}, {_size(content.data)}, which text cannot show]"
        case AudioContent():
            return f"[a sound, {_one_line(content.mime_type)}, {_size(content.data)}, which text cannot show]"
        case ResourceLink():
            described = f": {content.description}" if content.description else ""
            return f"[a resource, {_one_line(content.uri)}]{described}"
        case EmbeddedResource():
            return f"[a resource, {_one_line(content.resource.uri)}]\n{_resource(content.resource)}"
        case _:
            return "[a part of a kind that is not understood]"


def _resource(resource: Any) -> str:
    from mcp_types import TextResourceContents

    if isinstance(resource, TextResourceContents):
        return resource.text
    try:
        return bytes_to_text(base64.b64decode(resource.blob), MAX_OUTPUT)
    except (binascii.Error, ValueError):
        return "[data that is not base64]"


def _says_all(said: Sequence[str], structured: Any) -> bool:
    """Whether texts contain all of a value: as its JSON, or each of its words and numbers.

    Servers wrap a value that is no object, often as `result`; of a list, each item may be a text of its own.
    """
    wrapped: Any = structured
    if isinstance(structured, dict) and len(cast("dict[str, Any]", structured)) == 1:
        (wrapped,) = cast("dict[str, Any]", structured).values()
    read = [_read_json(text) for text in said]
    if structured in read or wrapped in read or wrapped in (read, list(said)):
        return True
    whole = "\n".join(said)
    words = set(_WORDS.findall(whole))
    return bool(whole) and all(_is_said(value, whole, words) for value in _walk_scalars(structured))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _walk_scalars(value: Any) -> Iterator[Any]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += cast("dict[str, Any]", each).values()
        elif isinstance(each, list):
            left += cast("list[Any]", each)
        else:
            yield each


_WORDS: Final = re.compile(r"[\w.+-]*\w")


def _is_said(value: Any, whole: str, words: AbstractSet[str]) -> bool:
    """A word or number must stand alone: a 12 does not say 1."""
    if value is None:
        return True
    if isinstance(value, str) and _WORDS.fullmatch(value) is None:
        return value in whole
    return (value if isinstance(value, str) else json.dumps(value)) in words


def _size(data: str) -> str:
    return f"about {len(data) * 3 // 4:,} bytes"


def _one_line(text: object) -> str:
    return clean(" ".join(str(text).split()))[:200]


_PAGES: Final = 100


@asynccontextmanager
async def open_mcp_session(
    raw: ToolListRecorder, heard: ServerOutput, said: ServerInput, changed: Callable[[], None]
) -> "AsyncGenerator[ClientSession]":
    """Open a session over a connection; `changed` is called when the server announces other tools."""
    from mcp import ClientSession
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
    from mcp_types import Implementation, ToolListChangedNotification

    async def notice(message: Any) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed()

    raw.inner = JSONRPCDispatcher(heard, said)
    info = Implementation(name="halter", version=version("halter"))
    async with ClientSession(dispatcher=raw, message_handler=notice, client_info=info) as opened:
        yield opened


async def negotiate_version(session: "ClientSession") -> None:
    """Agree on a version. Most servers expect this handshake; the newest may know only the other."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    try:
        await session.initialize()
    except MCPError as refused:
        if refused.code in {CONNECTION_CLOSED, NOT_SENT_CODE, LOST_CODE}:
            raise
        try:
            await session.discover()
        except MCPError:
            raise refused from None


async def list_server_tools(session: "ClientSession", raw: ToolListRecorder) -> Sequence[Any]:
    from mcp_types import PaginatedRequestParams

    raw.tools.clear()
    if session.server_capabilities is None or session.server_capabilities.tools is None:
        return ()
    cursor: str | None = None
    for _ in range(_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        cursor = page.next_cursor
        if not cursor or len(raw.tools) > MAX_TOOLS:
            break
    return tuple(raw.tools)


@PermitGate
async def send_tool_call(
    session: "ClientSession", name: str, arguments: Mapping[str, Any], key: str
) -> "CallToolResult | InputRequiredResult":
    """Send a call. The answer is not checked against the server's schema: it is only read."""
    from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult, InputRequiredResult
    from pydantic import TypeAdapter

    wanted: TypeAdapter[Any] = TypeAdapter(CallToolResult | InputRequiredResult)
    params = CallToolRequestParams(name=name, arguments=dict(arguments), _meta={"idempotencyKey": key})
    return await session.send_request(CallToolRequest(params=params), wanted)


_INHERITED: Final = ("PATH", "HOME", "LANG")
"""All that a server inherits from the environment: the rest of it holds keys."""

_NO_BYTECODE: Final[Mapping[str, str]] = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Bytecode beside trusted code would be untrusted code."""

T = TypeVar("T")

_GRACE: Final = 5.0


def _no_secrets(name: str) -> str:
    raise KeyError(name)


def _tell_nothing(_: str) -> None:
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
    reveal: Callable[[str], str] = _no_secrets
    starts: Callable[[], None] = _allow_start
    tell: Callable[[str], None] = _tell_nothing
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
    if servers:
        _demand_installed(servers[0].name)
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


class McpTool:
    """One tool of one server. It implements the port `Tool`."""

    def __init__(self, server: "McpServer", known: DescribedTool, timeout: int) -> None:
        self._server = server
        self._name = known.name
        self._checker: SchemaChecker = known.checker
        # How long we wait is our own affair, so that it is no part of what a person agreed to.
        self.spec = replace(known.spec, timeout=timeout)

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return self._checker.validate(self.spec.name, arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        plain = self._revealed(arguments, permit)
        async with asyncio.timeout(self.spec.timeout / SECOND):
            return await self._server.call(self.spec, self._name, plain, permit)

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        permit.use()
        return "unknown"

    def _revealed(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
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

    def outdate(self) -> None:
        self.stale = True

    def has(self, spec: ToolSpec) -> bool:
        return any((tool.spec.name, tool.spec.digest) == (spec.name, spec.digest) for tool in self.offer.tools)


class McpServer:
    def __init__(self, server: ToolServer, terms: McpTerms) -> None:
        self.name = server.name
        self._server = server
        self._terms = terms
        self._one_at_a_time = asyncio.Lock()
        self._live: _LiveConnection | None = None
        self._restarts: deque[int] = deque()
        self._closed = False

    async def open(self) -> McpOffer:
        _demand_installed(self.name)
        return (await self._connected()).offer

    async def close(self) -> None:
        self._closed = True
        if self._live is not None:
            await self._end(self._live)

    async def call(self, spec: ToolSpec, name: str, arguments: Mapping[str, Any], permit: Permit) -> Output:
        """Call a tool. Raises Failed, or Unstoppable if the outcome is unknown."""
        from mcp.shared.exceptions import MCPError

        ask = send_tool_call.open(permit)
        live = await self._connected()
        opened = await self._agreed(live, spec)
        try:
            result = await ask(opened, name, arguments, permit.id)
        except asyncio.CancelledError:
            if spec.effect == "read":
                raise
            raise self._unknown("it was cancelled, and may have done it before") from None
        except MCPError as error:
            raise self._failure(live, spec, error.code, error.message) from error
        except (ValueError, RuntimeError) as error:
            raise self._failure(live, spec, LOST_CODE, f"its answer cannot be read ({type(error).__name__})") from error
        from mcp_types import InputRequiredResult

        if isinstance(result, InputRequiredResult):
            raise Failed("InputRequired", "the server asks for input, which is not supported.")
        text = truncate_middle(render_contents(result.content, result.structured_content), self._terms.max_output)
        if result.is_error:
            raise Failed("ToolError", text or "the tool failed and does not say why.", text)
        return Output(text)

    def _failure(self, live: _LiveConnection, spec: ToolSpec, code: int, message: str) -> Failed | Unstoppable:
        """Tell a server's own failure from an answer that got lost."""
        from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

        remote = self._server.transport != "stdio"
        closed = code == CONNECTION_CLOSED and (remote or live.ending.over.is_set())
        if closed or code == FORGOTTEN_CODE:
            live.ending.over.set()
        if not (closed or code == LOST_CODE or (code == PARSE_ERROR and remote)):
            kind = "NotReached" if code in {NOT_SENT_CODE, FORGOTTEN_CODE} else "McpError"
            return Failed(kind, f"the server {self.name} says: {message}" if kind == "McpError" else message)
        why = live.ending.why or message
        if spec.effect == "write":
            return self._unknown(why)
        return Failed("AnswerLost", f"the server {self.name} did not answer: {why}", live.ending.told())

    def _unknown(self, why: str) -> Unstoppable:
        return Unstoppable(f"It is unknown whether the server {self.name} did it, since there was no answer: {why}.")

    async def _agreed(self, live: _LiveConnection, spec: ToolSpec) -> "ClientSession":
        """Check that the server still offers the agreed tool: it may have changed its tools."""
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

    async def _connected(self) -> _LiveConnection:
        """Return the live connection, or make one within the restart limit."""
        async with self._one_at_a_time:
            if self._live is None or self._live.ending.over.is_set():
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
        raise Failed("NotConnected", f"the server {self.name} cannot be used: {why}", live.ending.told())

    async def _await_start(self, live: _LiveConnection, task: "asyncio.Task[None]") -> None:
        """Wait until a server is ready, ended or late, and tell that it is still waited for."""
        waited, limit = 0, self._server.start_timeout
        while waited < limit and not (task.done() or live.ready.done()):
            if waited:
                self._terms.tell(f"Starting the MCP server {self.name}: {waited / SECOND:g} s …")
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
        if self._closed:
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
        live.ending.over.set()
        task = _demand(live.task)
        if live.ready.done():
            await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _GRACE)
        task.cancel()
        await asyncio.wait((task,), timeout=self._terms.grace / SECOND + _GRACE)

    async def _own(self, live: _LiveConnection) -> None:
        """Hold the connection until it is over: a task group must be left in the task that entered it."""
        if self._server.transport == "stdio":
            await asyncio.to_thread(self._terms.starts)
        async with (
            watch_connection(self._wire(live.ending), live.ending) as (heard, said),
            open_mcp_session(live.raw, heard, said, live.outdate) as opened,
        ):
            live.session = opened
            await negotiate_version(opened)
            await self._list(live, opened)
            live.ready.set_result(None)
            await live.ending.over.wait()

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
        raise ConfigError(explain_extra("mcp", f"The MCP server {server}")) from None
    # It would log messages with the secrets that were put into them; what it has to tell comes as an error, too.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)


def _demand(value: T | None) -> T:
    if value is None:
        raise AssertionError("A connection was used before it was made.")
    return value
