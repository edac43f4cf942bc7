"""A session with an MCP server: what is sent, what the server may ask, and what it announces.

A tool call, and a request for a resource or a prompt, can be sent only with a permit.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from halter.core.clock import SECOND
from halter.core.text import clean, shorten
from halter.core.tools import Failed, PermitGate
from halter.tools.mcp_transport import LOST_CODE, NOT_SENT_CODE, ServerInput, ServerOutput
from halter_agents import VERSION

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
    """Forwards requests to a server, and records its list of tools unchanged.

    The SDK rejects a whole list for one bad entry, and reads the hint "yes" as true. So it receives only the parts that
    it needs, and only of entries that it can read.
    """

    def __init__(self) -> None:
        self.inner: Any = None
        self.tools: list[Any] = []

    async def run(self, *arguments: Any, **options: Any) -> None:
        await self.inner.run(*arguments, **options)

    async def notify(self, *arguments: Any, **options: Any) -> None:
        await self.inner.notify(*arguments, **options)

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = await self.inner.send_raw_request(method, params, opts)
        tools = answer.get("tools")
        if method != "tools/list" or not isinstance(tools, list):
            return answer
        entries = cast("list[Any]", tools)
        self.tools += entries
        return {**answer, "tools": [readable for entry in entries if (readable := _read_entry(entry))]}


def _read_entry(entry: Any) -> dict[str, Any] | None:
    match entry:
        case {"name": str(name), "inputSchema": {"type": "object"} as schema}:
            properties = cast("dict[str, Any]", schema).get("properties")
            property_map = cast("dict[str, Any]", properties if isinstance(properties, dict) else {})
            readable: dict[str, Any] = {key: value for key, value in property_map.items() if isinstance(value, dict)}
            return {"name": name, "inputSchema": {"type": "object", "properties": readable}}
        case _:
            return None


_MAX_PAGES: Final = 100
_MAX_LOST_STREAMS: Final = 10
"""Maximum number of consecutive attempts to reopen a stream of changes."""


class McpPeer(Protocol):
    """The client on whose behalf a server is called: it answers the server and receives its notifications."""

    @property
    def samples(self) -> bool:
        """True if servers may use a model (sampling)."""
        ...

    async def elicit(self, server: str, params: "ElicitRequestParams") -> "ElicitResult": ...

    async def sample(self, server: str, params: "CreateMessageRequestParams") -> "CreateMessageResult":
        """Call a model for a server. Raises Failed if that is refused."""
        ...

    def announce(self, server: str, notification: "ServerNotification") -> None: ...


class SilentPeer:
    """No client: requests are not answered, and notifications concern only the connection."""

    samples = False

    async def sample(self, server: str, params: "CreateMessageRequestParams") -> "CreateMessageResult":
        raise Failed("Sampling", NO_SAMPLING)

    async def elicit(self, server: str, params: "ElicitRequestParams") -> "ElicitResult":
        from mcp_types import ElicitResult

        del server, params
        return ElicitResult(action="cancel")

    def announce(self, server: str, notification: "ServerNotification") -> None:
        """Ignore the notification."""


SILENT_PEER: Final = SilentPeer()
NO_SAMPLING: Final = "The server cannot use a model: sampling is off."
NO_ROOTS: Final = "Roots are off: the server cannot list the client's folders."


@asynccontextmanager
async def open_mcp_session(
    server: str,
    raw: ToolListRecorder,
    wire: tuple[ServerOutput, ServerInput],
    on_tools_changed: Callable[[], None],
    peer: McpPeer,
) -> "AsyncGenerator[ClientSession]":
    """Open a session over a connection; `on_tools_changed` is called when the server announces other tools."""
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
        except Failed as failure:
            return ErrorData(code=INVALID_REQUEST, message=str(failure))

    async def notice(message: Any) -> None:
        if isinstance(message, Exception):
            return
        if isinstance(message, ToolListChangedNotification):
            on_tools_changed()
        peer.announce(server, message)

    raw.inner = JSONRPCDispatcher(*wire)
    info = Implementation(name="halter", version=VERSION)
    elicitation = None if peer is SILENT_PEER else elicit
    callbacks: dict[str, Any] = {"sampling_callback": sample} if peer.samples else {}
    async with Answering(
        dispatcher=raw,
        message_handler=notice,
        client_info=info,
        elicitation_callback=elicitation,
        extensions={TASKS_EXTENSION: {}},
        result_claims=_claim_tasks(),
        **callbacks,
    ) as session:
        yield session


def _claim_tasks() -> dict[str, Any]:
    """Declare that an answer may be a task; only servers of the newer protocol receive it."""
    from mcp.client.extension import ResultClaim
    from mcp_types import Result

    class TaskHandle(Result):
        result_type: Literal["task"]

    async def resolve(_: TaskHandle, __: Any) -> "CallToolResult":
        raise AssertionError("Calls are sent by send_tool_call, which follows tasks itself.")

    return {TASKS_EXTENSION: (ResultClaim(result_type="task", model=TaskHandle, resolve=resolve),)}


async def negotiate_version(session: "ClientSession") -> None:
    """Agree on a protocol version. Most servers expect `initialize`; the newest may support only `discover`."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    try:
        await session.initialize()
    except MCPError as error:
        if error.code in {CONNECTION_CLOSED, NOT_SENT_CODE, LOST_CODE}:
            raise
        try:
            await session.discover()
        except MCPError:
            raise error from None


async def follow_changes(
    session: "ClientSession",
    on_changed: Callable[[], None],
    listening: asyncio.Event,
    pause: Callable[[int], Awaitable[None]],
) -> None:
    """Listen for changes on a server of the newer protocol, which notifies only listeners.

    `listening` is set once the stream is open or has failed. `on_change` is called for what may have been missed
    before that or in a gap.
    """
    from mcp.client.subscriptions import SubscriptionLost, listen
    from mcp.shared.exceptions import MCPError
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    lost_count = 0
    while session.protocol_version in MODERN_PROTOCOL_VERSIONS and lost_count < _MAX_LOST_STREAMS:
        try:
            async with listen(
                session, tools_list_changed=True, prompts_list_changed=True, resources_list_changed=True
            ) as changes:
                if listening.is_set():
                    on_changed()
                listening.set()
                async for _ in changes:
                    lost_count = 0
        except SubscriptionLost:
            """The loop opens the stream again."""
        except MCPError:
            break
        lost_count += 1
        await pause(lost_count)
    listening.set()


async def follow_resource(session: "ClientSession", uri: str) -> None:
    """Listen for changes of a resource on a server of the newer protocol, until the stream ends."""
    from mcp.client.subscriptions import SubscriptionLost, listen
    from mcp.shared.exceptions import MCPError

    with suppress(MCPError, SubscriptionLost):
        async with listen(session, resource_subscriptions=[uri]) as changes:
            async for _ in changes:
                """The session has already passed it to its peer."""


async def list_server_tools(session: "ClientSession", raw: ToolListRecorder) -> Sequence[Any]:
    from mcp_types import PaginatedRequestParams

    raw.tools.clear()
    if session.server_capabilities is None or session.server_capabilities.tools is None:
        return ()
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        cursor = page.next_cursor
        if not cursor or len(raw.tools) > MAX_TOOLS:
            break
    return tuple(raw.tools)


async def _reject_input(_: "InputRequests") -> "InputResponses":
    raise Failed("InputRequired", "the server requested input, which is not supported.")


def _follow_nothing(_: str) -> None:
    """Ignore the status of a task."""


@dataclass(frozen=True)
class CallRelay:
    """The exchange between a server and its client during a call: progress, and the input that it requests."""

    progress: "ProgressFnT | None" = None
    answer: "Callable[[InputRequests], Awaitable[InputResponses]]" = _reject_input
    meta: Mapping[str, Any] | None = None
    """Metadata of the client's request that is forwarded to the server."""
    follow_task: Callable[[str], None] = _follow_nothing
    """Receives each status message of the task that the server made of the call."""


NO_RELAY: Final = CallRelay()
_MAX_INPUT_ROUNDS: Final = 10
"""Maximum number of times that a server may request input before it answers."""


@PermitGate
async def send_tool_call(
    session: "ClientSession",
    name: str,
    arguments: Mapping[str, Any],
    key: str,
    relay: CallRelay,
    pause: Callable[[int], Awaitable[None]],
) -> "CallToolResult":
    """Send a call, and repeat it with each input that the server requests; follow a task to its end.

    The answer is not checked against the server's schema.
    """
    from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult, InputRequiredResult
    from pydantic import TypeAdapter

    result_adapter: TypeAdapter[Any] = TypeAdapter(CallToolResult | InputRequiredResult)
    raw_adapter: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
    input_fields: dict[str, Any] = {}
    for _ in range(_MAX_INPUT_ROUNDS):
        meta: Any = {**(relay.meta or {}), "idempotencyKey": key}
        params = CallToolRequestParams(name=name, arguments=dict(arguments), _meta=meta, **input_fields)
        raw: dict[str, Any] = await session.send_request(
            CallToolRequest(params=params), raw_adapter, progress_callback=relay.progress
        )
        if raw.get("resultType") == "task":
            return await _finish_task(session, raw, relay, pause)
        result: Any = result_adapter.validate_python(raw, by_name=False)
        if not isinstance(result, InputRequiredResult):
            return result
        responses = await relay.answer(result.input_requests or {})
        input_fields = {"input_responses": responses, "request_state": result.request_state}
    raise Failed("InputRequired", f"the server requested input {_MAX_INPUT_ROUNDS} times without an answer.")


_MIN_POLL_INTERVAL: Final = SECOND // 10
_MAX_POLL_INTERVAL: Final = 60 * SECOND
_CANCEL_TIMEOUT: Final = 0.5
"""Seconds to send a server the cancellation of its task."""
_MAX_STATUS_LENGTH: Final = 500


async def _finish_task(
    session: "ClientSession", handle: Mapping[str, Any], relay: CallRelay, pause: Callable[[int], Awaitable[None]]
) -> "CallToolResult":
    """Follow a server's task to its end, and cancel the task on the server if that fails.

    The server has already started: any failure from here on counts as lost after sending, whatever its code.
    """
    from mcp.shared.exceptions import MCPError
    from mcp_types import CallToolResult

    task = handle.get("taskId")
    if not isinstance(task, str) or not task:
        raise MCPError(LOST_CODE, "it returned a task without an id")
    try:
        task_state = await _follow_task(session, task, handle, relay, pause)
    except (MCPError, Failed, ValueError) as error:
        await _cancel_task(session, task)
        raise MCPError(LOST_CODE, f"the result of its task was lost: {error}") from error
    except asyncio.CancelledError:
        await _cancel_task(session, task)
        raise
    match task_state:
        case {"status": "completed", "result": result}:
            return CallToolResult.model_validate(result, by_name=False)
        case {"status": "failed", "error": {"message": str(message)}}:
            raise Failed("McpError", f"the server returned an error: {clean(message)}")
        case _:
            raise MCPError(LOST_CODE, "its task ended without an outcome")


async def _follow_task(
    session: "ClientSession",
    task: str,
    handle: Mapping[str, Any],
    relay: CallRelay,
    pause: Callable[[int], Awaitable[None]],
) -> Mapping[str, Any]:
    """Poll a task until it has ended, and answer each of its requests for input once."""
    from mcp_types import InputRequests
    from pydantic import TypeAdapter

    requests_adapter: TypeAdapter[InputRequests] = TypeAdapter(InputRequests)
    answered_keys: set[str] = set()
    while (status := handle.get("status")) in ("working", "input_required"):
        relay.follow_task(_read_status(handle))
        requests = requests_adapter.validate_python(handle.get("inputRequests") or {}, by_name=False)
        if new_requests := {
            key: entry for key, entry in requests.items() if status != "working" and key not in answered_keys
        }:
            answered_keys |= new_requests.keys()
            if len(answered_keys) > _MAX_INPUT_ROUNDS:
                raise Failed("InputRequired", f"the server requested input more than {_MAX_INPUT_ROUNDS} times.")
            responses = await relay.answer(new_requests)
            encoded_responses = {
                key: entry.model_dump(by_alias=True, mode="json", exclude_none=True) for key, entry in responses.items()
            }
            await _send_task_request(session, "tasks/update", task, inputResponses=encoded_responses)
        await pause(_read_interval(handle))
        handle = await _send_task_request(session, "tasks/get", task)
        if handle.get("taskId") != task:
            raise ValueError("the answer is about another task")
    return handle


def _read_status(handle: Mapping[str, Any]) -> str:
    message = handle.get("statusMessage")
    return shorten(clean(message), _MAX_STATUS_LENGTH) if isinstance(message, str) else ""


def _read_interval(handle: Mapping[str, Any]) -> int:
    milliseconds = handle.get("pollIntervalMs")
    interval = milliseconds * (SECOND // 1000) if isinstance(milliseconds, int) else SECOND
    return max(_MIN_POLL_INTERVAL, min(interval, _MAX_POLL_INTERVAL))


async def _send_task_request(session: "ClientSession", method: str, task: str, **params: Any) -> dict[str, Any]:
    from mcp_types import Request
    from pydantic import TypeAdapter

    class TaskRequest(Request[dict[str, Any], str]):
        name_param = "taskId"

    request = TaskRequest(method=method, params={"taskId": task, **params})
    adapter: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
    return await session.send_request(request, adapter)


async def _cancel_task(session: "ClientSession", task: str) -> None:
    """Send a server the cancellation of its task. It may ignore it, so the outcome stays unknown."""
    from mcp.shared.exceptions import MCPError

    with suppress(MCPError, ValueError, TimeoutError):
        async with asyncio.timeout(_CANCEL_TIMEOUT):
            await _send_task_request(session, "tasks/cancel", task)


_LIST_METHODS: Final = frozenset(
    {
        *("resources/list", "resources/templates/list", "prompts/list", "completion/complete"),
        *("resources/subscribe", "resources/unsubscribe", "logging/setLevel"),
    }
)
"""Methods that need no permit: lists, completions, subscriptions and the log level."""


async def send_listing(session: "ClientSession", request: Any, result_type: Any) -> Any:
    if request.method not in _LIST_METHODS:
        raise TypeError(f"{request.method} needs a permit.")
    return await session.send_request(request, result_type)


@PermitGate
async def send_reading(session: "ClientSession", request: Any, result_type: Any, relay: CallRelay) -> Any:
    """Request a resource or a prompt, and repeat the request with each input that the server requests."""
    from mcp_types import InputRequiredResult
    from pydantic import TypeAdapter

    adapter = cast("Any", TypeAdapter)(result_type | InputRequiredResult)
    for _ in range(_MAX_INPUT_ROUNDS):
        result = await session.send_request(request, adapter, progress_callback=relay.progress)
        if not isinstance(result, InputRequiredResult):
            return result
        input_fields = {
            "input_responses": await relay.answer(result.input_requests or {}),
            "request_state": result.request_state,
        }
        request = request.model_copy(update={"params": request.params.model_copy(update=input_fields)})
    raise Failed("InputRequired", f"the server requested input {_MAX_INPUT_ROUNDS} times without an answer.")
