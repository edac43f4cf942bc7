"""A session with an MCP server: what is sent, what the server may ask, and what it announces.

A call of a tool, a resource and a prompt can be sent only with a permit.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from halter.core.clock import SECOND
from halter.core.text import clean, shorten
from halter.core.tools import Failed, PermitGate
from halter.tools.mcp_transport import LOST_CODE, NOT_SENT_CODE, ServerInput, ServerOutput

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.shared.dispatcher import ProgressFnT
    from mcp_types import (
        CallToolResult,
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitRequestParams,
        ElicitResult,
        InputRequests,
        InputResponses,
        ServerNotification,
    )

MAX_TOOLS: Final = 500
TASKS_EXTENSION: Final = "io.modelcontextprotocol/tasks"


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


_PAGES: Final = 100
_MOST_LOST: Final = 10
"""How often in a row a stream of changes is opened again."""


class McpPeer(Protocol):
    """The client that a server is reached for, where there is one: it answers the server, and hears its news."""

    @property
    def samples(self) -> bool:
        """Whether servers may ask a model."""
        ...

    async def elicit(self, server: str, params: "ElicitRequestParams") -> "ElicitResult": ...

    async def sample(self, server: str, params: "CreateMessageRequestParams") -> "CreateMessageResult":
        """Ask a model for a server. Raises Failed where it is refused."""
        ...

    def announce(self, server: str, news: "ServerNotification") -> None: ...


class SilentPeer:
    """No client: nothing is answered, and news matter only to the connection itself."""

    samples = False

    async def sample(self, server: str, params: "CreateMessageRequestParams") -> "CreateMessageResult":
        raise Failed("Sampling", NO_SAMPLING)

    async def elicit(self, server: str, params: "ElicitRequestParams") -> "ElicitResult":
        from mcp_types import ElicitResult

        del server, params
        return ElicitResult(action="cancel")

    def announce(self, server: str, news: "ServerNotification") -> None:
        """Hear nothing."""


SILENT_PEER: Final = SilentPeer()
NO_SAMPLING: Final = "Halter lets no server ask a model: sampling is off."
NO_ROOTS: Final = "Halter shows no server the folders of its client: roots are off."


@asynccontextmanager
async def open_mcp_session(
    server: str,
    raw: ToolListRecorder,
    wire: tuple[ServerOutput, ServerInput],
    changed: Callable[[], None],
    peer: McpPeer,
) -> "AsyncGenerator[ClientSession]":
    """Open a session over a connection; `changed` is called when the server announces other tools."""
    from mcp import ClientSession
    from mcp.client.session import ClientRequestContext
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
    from mcp_types import (
        INVALID_REQUEST,
        CreateMessageRequest,
        ErrorData,
        Implementation,
        ListRootsRequest,
        ToolListChangedNotification,
    )

    class Answering(ClientSession):
        async def dispatch_input_request(self, ctx: ClientRequestContext, request: Any) -> Any:
            if isinstance(request, ListRootsRequest):
                return ErrorData(code=INVALID_REQUEST, message=NO_ROOTS)
            if isinstance(request, CreateMessageRequest) and not peer.samples:
                return ErrorData(code=INVALID_REQUEST, message=NO_SAMPLING)
            return await super().dispatch_input_request(ctx, request)

    async def elicit(context: ClientRequestContext, params: "ElicitRequestParams") -> "ElicitResult":
        del context
        return await peer.elicit(server, params)

    async def sample(
        _: ClientRequestContext, params: "CreateMessageRequestParams"
    ) -> "CreateMessageResult | ErrorData":
        try:
            return await peer.sample(server, params)
        except Failed as refused:
            return ErrorData(code=INVALID_REQUEST, message=str(refused))

    async def notice(message: Any) -> None:
        if isinstance(message, Exception):
            return
        if isinstance(message, ToolListChangedNotification):
            changed()
        peer.announce(server, message)

    raw.inner = JSONRPCDispatcher(*wire)
    info = Implementation(name="halter", version=version("halter"))
    asks = None if peer is SILENT_PEER else elicit
    more: dict[str, Any] = {"sampling_callback": sample} if peer.samples else {}
    async with Answering(
        dispatcher=raw,
        message_handler=notice,
        client_info=info,
        elicitation_callback=asks,
        extensions={TASKS_EXTENSION: {}},
        result_claims=_claim_tasks(),
        **more,
    ) as opened:
        yield opened


def _claim_tasks() -> dict[str, Any]:
    """Say that an answer may be a task, which is declared to servers of the newer protocol alone."""
    from mcp.client.extension import ResultClaim
    from mcp_types import Result

    class TaskHandle(Result):
        result_type: Literal["task"]

    async def resolve(_: TaskHandle, __: Any) -> "CallToolResult":
        raise AssertionError("Calls are sent by send_tool_call, which follows tasks itself.")

    return {TASKS_EXTENSION: (ResultClaim(result_type="task", model=TaskHandle, resolve=resolve),)}


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


async def follow_changes(
    session: "ClientSession", changed: Callable[[], None], heard: asyncio.Event, pause: Callable[[int], Awaitable[None]]
) -> None:
    """Have a server of the newer protocol say what changes: it tells only those who listen.

    `heard` is set once it listens or will not. What may have been missed before that, or in a gap, is `changed`.
    """
    from mcp.client.subscriptions import SubscriptionLost, listen
    from mcp.shared.exceptions import MCPError
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    lost = 0
    while session.protocol_version in MODERN_PROTOCOL_VERSIONS and lost < _MOST_LOST:
        try:
            async with listen(
                session, tools_list_changed=True, prompts_list_changed=True, resources_list_changed=True
            ) as news:
                if heard.is_set():
                    changed()
                heard.set()
                async for _ in news:
                    lost = 0
        except SubscriptionLost:
            """It is opened again below."""
        except MCPError:
            break
        lost += 1
        await pause(lost)
    heard.set()


async def follow_resource(session: "ClientSession", uri: str) -> None:
    """Have a server of the newer protocol say when a resource changes, until it no longer does."""
    from mcp.client.subscriptions import SubscriptionLost, listen
    from mcp.shared.exceptions import MCPError

    with suppress(MCPError, SubscriptionLost):
        async with listen(session, resource_subscriptions=[uri]) as news:
            async for _ in news:
                """The session's peer has heard it."""


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


async def _reject_input(_: "InputRequests") -> "InputResponses":
    raise Failed("InputRequired", "the server asks for input, which is not supported.")


def _follow_nothing(_: str) -> None:
    """Hear of no task."""


@dataclass(frozen=True)
class CallRelay:
    """What passes between a server and its client while a call runs: progress, and the input that it asks for."""

    progress: "ProgressFnT | None" = None
    answer: "Callable[[InputRequests], Awaitable[InputResponses]]" = _reject_input
    meta: Mapping[str, Any] | None = None
    """What the client says about its request that concerns the server, too."""
    follow_task: Callable[[str], None] = _follow_nothing
    """Hears that the server has made a task of the call, and each time how it says that it stands."""


NO_RELAY: Final = CallRelay()
_MOST_ROUNDS: Final = 10
"""How often a server may ask for input before it answers."""


@PermitGate
async def send_tool_call(
    session: "ClientSession",
    name: str,
    arguments: Mapping[str, Any],
    key: str,
    relay: CallRelay,
    pause: Callable[[int], Awaitable[None]],
) -> "CallToolResult":
    """Send a call, again with each input that the server asks for; a task that it becomes is followed to its end.

    The answer is not checked against the server's schema: it is only read.
    """
    from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult, InputRequiredResult
    from pydantic import TypeAdapter

    wanted: TypeAdapter[Any] = TypeAdapter(CallToolResult | InputRequiredResult)
    answered: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
    said: dict[str, Any] = {}
    for _ in range(_MOST_ROUNDS):
        meta: Any = {**(relay.meta or {}), "idempotencyKey": key}
        params = CallToolRequestParams(name=name, arguments=dict(arguments), _meta=meta, **said)
        raw: dict[str, Any] = await session.send_request(
            CallToolRequest(params=params), answered, progress_callback=relay.progress
        )
        if raw.get("resultType") == "task":
            return await _finish_task(session, raw, relay, pause)
        result: Any = wanted.validate_python(raw, by_name=False)
        if not isinstance(result, InputRequiredResult):
            return result
        responses = await relay.answer(result.input_requests or {})
        said = {"input_responses": responses, "request_state": result.request_state}
    raise Failed("InputRequired", f"the server asked for input {_MOST_ROUNDS} times, and gave no answer.")


_SHORTEST_POLL: Final = SECOND // 10
_LONGEST_POLL: Final = 60 * SECOND
_CANCEL_PATIENCE: Final = 0.5
"""Seconds for a server to hear that a task of its is given up."""
_LONGEST_STATUS: Final = 500


async def _finish_task(
    session: "ClientSession", handle: Mapping[str, Any], relay: CallRelay, pause: Callable[[int], Awaitable[None]]
) -> "CallToolResult":
    """Follow a server's task to its end, and cancel there what is given up.

    The server has begun by now: what is lost on the way is lost after it was sent, whatever code the loss has.
    """
    from mcp.shared.exceptions import MCPError
    from mcp_types import CallToolResult

    task = handle.get("taskId")
    if not isinstance(task, str) or not task:
        raise MCPError(LOST_CODE, "it made a task of the call that has no name")
    try:
        ended = await _follow_task(session, task, handle, relay, pause)
    except (MCPError, Failed, ValueError) as lost:
        await _cancel_task(session, task)
        raise MCPError(LOST_CODE, f"its task was not followed to its end: {lost}") from lost
    except asyncio.CancelledError:
        await _cancel_task(session, task)
        raise
    match ended:
        case {"status": "completed", "result": result}:
            return CallToolResult.model_validate(result, by_name=False)
        case {"status": "failed", "error": {"message": str(why)}}:
            raise Failed("McpError", f"the server says: {clean(why)}")
        case _:
            raise MCPError(LOST_CODE, "its task ended without an outcome")


async def _follow_task(
    session: "ClientSession",
    task: str,
    handle: Mapping[str, Any],
    relay: CallRelay,
    pause: Callable[[int], Awaitable[None]],
) -> Mapping[str, Any]:
    """Ask how a task stands until it has ended, and answer what it asks for, each question once."""
    from mcp_types import InputRequests
    from pydantic import TypeAdapter

    asked: TypeAdapter[InputRequests] = TypeAdapter(InputRequests)
    known: set[str] = set()
    while (status := handle.get("status")) in ("working", "input_required"):
        relay.follow_task(_read_status(handle))
        requests = asked.validate_python(handle.get("inputRequests") or {}, by_name=False)
        if fresh := {key: each for key, each in requests.items() if status != "working" and key not in known}:
            known |= fresh.keys()
            if len(known) > _MOST_ROUNDS:
                raise Failed("InputRequired", f"the server asked for input more than {_MOST_ROUNDS} times.")
            responses = await relay.answer(fresh)
            said = {
                key: each.model_dump(by_alias=True, mode="json", exclude_none=True) for key, each in responses.items()
            }
            await _send_task_request(session, "tasks/update", task, inputResponses=said)
        await pause(_read_interval(handle))
        handle = await _send_task_request(session, "tasks/get", task)
        if handle.get("taskId") != task:
            raise ValueError("it tells of another task")
    return handle


def _read_status(handle: Mapping[str, Any]) -> str:
    message = handle.get("statusMessage")
    return shorten(clean(message), _LONGEST_STATUS) if isinstance(message, str) else ""


def _read_interval(handle: Mapping[str, Any]) -> int:
    wanted = handle.get("pollIntervalMs")
    interval = wanted * (SECOND // 1000) if isinstance(wanted, int) else SECOND
    return max(_SHORTEST_POLL, min(interval, _LONGEST_POLL))


async def _send_task_request(session: "ClientSession", method: str, task: str, **more: Any) -> dict[str, Any]:
    from mcp_types import Request
    from pydantic import TypeAdapter

    class TaskRequest(Request[dict[str, Any], str]):
        name_param = "taskId"

    request = TaskRequest(method=method, params={"taskId": task, **more})
    answered: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
    return await session.send_request(request, answered)


async def _cancel_task(session: "ClientSession", task: str) -> None:
    """Tell a server that its task is given up. It need not obey, so what it did is unknown."""
    from mcp.shared.exceptions import MCPError

    with suppress(MCPError, ValueError, TimeoutError):
        async with asyncio.timeout(_CANCEL_PATIENCE):
            await _send_task_request(session, "tasks/cancel", task)


_LISTS: Final = frozenset(
    {
        *("resources/list", "resources/templates/list", "prompts/list", "completion/complete"),
        *("resources/subscribe", "resources/unsubscribe", "logging/setLevel"),
    }
)
"""What may be asked without a permit: what there is, how a word goes on, and to be told of news."""


async def send_listing(session: "ClientSession", request: Any, wanted: Any) -> Any:
    if request.method not in _LISTS:
        raise TypeError(f"{request.method} needs a permit.")
    return await session.send_request(request, wanted)


@PermitGate
async def send_reading(session: "ClientSession", request: Any, wanted: Any, relay: CallRelay) -> Any:
    """Ask for a resource or a prompt, again with each input that the server asks for."""
    from mcp_types import InputRequiredResult
    from pydantic import TypeAdapter

    either = cast("Any", TypeAdapter)(wanted | InputRequiredResult)
    for _ in range(_MOST_ROUNDS):
        result = await session.send_request(request, either, progress_callback=relay.progress)
        if not isinstance(result, InputRequiredResult):
            return result
        said = {
            "input_responses": await relay.answer(result.input_requests or {}),
            "request_state": result.request_state,
        }
        request = request.model_copy(update={"params": request.params.model_copy(update=said)})
    raise Failed("InputRequired", f"the server asked for input {_MOST_ROUNDS} times, and gave no answer.")
