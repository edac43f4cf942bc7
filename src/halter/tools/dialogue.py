"""What is said to an MCP server, once messages travel: a greeting, a question for its tools, and calls."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from halter.core.tools import Locked
from halter.tools.offers import MAX_TOOLS, Raw
from halter.tools.remote import LOST, NOT_SENT
from halter.tools.wires import Heard, Said

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import CallToolResult, InputRequiredResult

_PAGES: Final = 100


@asynccontextmanager
async def session(raw: Raw, heard: Heard, said: Said, changed: Callable[[], None]) -> "AsyncGenerator[ClientSession]":
    """Open a session over a connection; `changed` is called when the server says that it has other tools now."""
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


async def greet(session: "ClientSession") -> None:
    """Agree on a version. Most servers expect this handshake; the newest ones may know only the other."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    try:
        await session.initialize()
    except MCPError as refused:
        if refused.code in {CONNECTION_CLOSED, NOT_SENT, LOST}:
            raise
        try:
            await session.discover()
        except MCPError:
            raise refused from None


async def listed(session: "ClientSession", raw: Raw) -> Sequence[Any]:
    """Ask for all tools, page by page, and return them as they came."""
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


@Locked
async def asked(
    session: "ClientSession", name: str, arguments: Mapping[str, Any], key: str
) -> "CallToolResult | InputRequiredResult":
    """Send a call. What it answers is not compared with a schema of the server's: it is only read."""
    from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult, InputRequiredResult
    from pydantic import TypeAdapter

    wanted: TypeAdapter[Any] = TypeAdapter(CallToolResult | InputRequiredResult)
    params = CallToolRequestParams(name=name, arguments=dict(arguments), _meta={"idempotencyKey": key})
    return await session.send_request(CallToolRequest(params=params), wanted)
