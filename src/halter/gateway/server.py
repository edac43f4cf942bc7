"""The MCP server for clients: both protocols, over pipes or HTTP, with the tools of all servers behind it."""

import asyncio
import base64
import binascii
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, cast

import anyio
import msgspec
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.session import ServerSession
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CompleteRequestParams,
    EmptyResult,
    GetPromptRequestParams,
    InputRequiredResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    SetLevelRequestParams,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    UnsubscribeRequestParams,
)

from halter.core.clock import MINUTE, read_monotonic
from halter.core.errors import HalterError
from halter.core.ids import make_worker_id
from halter.core.money import Cap
from halter.core.text import clean, to_one_line
from halter.core.tools import SERVER_SEPARATOR, Failed
from halter.dispatch.heartbeat import renew_leases
from halter.external.host import SessionHost
from halter.external.open_sessions import OpenSessions
from halter.gateway.calls import PROMPT, RESOURCE, ClientCall, Context, GatedTool, ReadingSpec, speaks_modern
from halter.gateway.sessions import GatedSession, GatewayTerms, PendingCall, open_session, recover_sessions
from halter.gateway.tasks import TaskRequestParams, UpdateTaskRequestParams, knows_tasks, require_tasks
from halter.gateway.upstreams import Announcement, GatewayAgent, ListKind, LogNews, ResourceNews, Upstreams
from halter.guard.call_answer import Answer
from halter.loop.concurrency import cancel_and_wait
from halter.runtime.agent_runtime import make_guard
from halter.runtime.runtime import Runtime, follow_prices
from halter.tools.function_tool import canonical_json
from halter.tools.mcp import McpTerms
from halter.tools.mcp_session import TASKS_EXTENSION
from halter_agents import VERSION

OWN: Final = "halter"
DECISIONS: Final = f"{OWN}{SERVER_SEPARATOR}decisions"
WAIT: Final = f"{OWN}{SERVER_SEPARATOR}wait"
REFUSED_CODE: Final = -41001
PENDING_CODE: Final = -41002
SWEEP_INTERVAL: Final = MINUTE
IDLE_LIMIT: Final = 30 * MINUTE
MAX_SESSIONS: Final = 200
MAX_PENDING_ANNOUNCEMENTS: Final = 1000
"""Maximum number of announcements of servers that are not yet sent to clients."""
MAX_STREAMS: Final = 100
INSTRUCTIONS: Final = (
    "Every call passes a guard, which may ask a person first. A call whose result is a pending decision was not made: "
    f"continue with something else, or wait with {WAIT}. After approval, repeat the same call with the same arguments. "
    "No tool can approve a call."
)
_READ_ONLY: Final = {"readOnlyHint": True, "idempotentHint": True, "openWorldHint": False}
OWN_TOOLS: Final[tuple[Mapping[str, Any], ...]] = (
    {
        "name": DECISIONS,
        "description": "List the calls of this session that wait for a person's decision. Read-only.",
        "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
        "annotations": _READ_ONLY,
    },
    {
        "name": WAIT,
        "description": "Wait up to a minute for a person's decision about one call, and return its state.",
        "inputSchema": {
            "type": "object",
            "properties": {"decision": {"type": "string", "description": "The id of the decision."}},
            "required": ["decision"],
            "additionalProperties": False,
        },
        "annotations": _READ_ONLY,
    },
)
_CHANGE_EVENTS: Final[Mapping[ListKind, Any]] = {
    "tools": ToolsListChanged(),
    "prompts": PromptsListChanged(),
    "resources": ResourcesListChanged(),
}
ClientKey = tuple[str, str]
ReportListener = Callable[[str], None]


class ClientIdentity(msgspec.Struct, frozen=True):
    """The identity of a client: its key, and the session id of its transport; both are empty on pipes."""

    key: str = ""
    label: str = ""
    started_by: str = ""
    caps: tuple[Cap, ...] = ()

    @property
    def client_key(self) -> ClientKey:
        return (self.key, self.label)


class NewsStream:
    """The source of one client's streams of changes: no client receives those of another client's servers."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.serve = ListenHandler(self.bus, max_subscriptions=MAX_STREAMS)


class GatewayServer(Server[Any]):
    """An MCP server that announces changes of its lists to clients of both protocols."""

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        all_changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().create_initialization_options(
            notification_options or all_changes, experimental_capabilities, extensions
        )


class Gateway:
    """The gateway for all clients. `identify` returns a request's client, `connect` makes a new session's servers."""

    def __init__(
        self,
        terms: GatewayTerms,
        connect: Callable[[GatewayAgent], Upstreams],
        identify: Callable[[Context], ClientIdentity],
        report: ReportListener,
    ) -> None:
        self.terms = terms
        self._connect = connect
        self._identify = identify
        self._report = report
        self.sessions = OpenSessions[ClientKey, GatedSession]()
        self._elders: dict[ClientKey, ServerSession] = {}
        self._streams: dict[ClientKey, NewsStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = self._build()

    def _build(self) -> GatewayServer:
        server = GatewayServer(
            OWN,
            version=VERSION,
            instructions=INSTRUCTIONS,
            on_list_tools=cast("Any", self._list_tools),
            on_call_tool=cast("Any", self._call),
            on_list_resources=cast("Any", self._list_resources),
            on_list_resource_templates=cast("Any", self._list_templates),
            on_read_resource=cast("Any", self._read_resource),
            on_list_prompts=cast("Any", self._list_prompts),
            on_get_prompt=cast("Any", self._get_prompt),
            on_completion=cast("Any", self._complete),
            on_subscribe_resource=cast("Any", self._subscribe),
            on_unsubscribe_resource=cast("Any", self._unsubscribe),
            on_subscriptions_listen=cast("Any", self._listen),
        )
        server.add_request_handler("logging/setLevel", SetLevelRequestParams, cast("Any", self._set_log_level))
        for method, params, handler in (
            ("tasks/get", TaskRequestParams, self._get_task),
            ("tasks/update", UpdateTaskRequestParams, self._update_task),
            ("tasks/cancel", TaskRequestParams, self._cancel_task),
        ):
            server.add_request_handler(method, params, cast("Any", handler))
        server.extensions[TASKS_EXTENSION] = {}
        server.middleware.append(cast("Any", self._restore_schemas))
        return server

    async def get_session(self, context: Context) -> GatedSession:
        """Return the session of a request's client; the first request that needs one starts it."""
        identity = self._identify(context)
        if not speaks_modern(context):
            self._elders[identity.client_key] = context.session
        keys = self.sessions.keys()
        if identity.client_key not in keys and len(keys) >= MAX_SESSIONS:
            raise MCPError(INTERNAL_ERROR, "Halter: too many clients are connected. Try again later.")
        session = await self.sessions.get(identity.client_key, lambda: self._open(identity, context))
        session.used_at = read_monotonic(self.terms.app.clock)
        await _translate_errors(session.upstreams.refresh())
        return session

    async def _open(self, identity: ClientIdentity, context: Context) -> GatedSession:
        terms = msgspec.structs.replace(self.terms, owner=self.terms.owner.narrow(identity.caps))
        upstreams = self._connect(terms.owner)
        upstreams.on_announcement = lambda kind: self._publish(identity.client_key, kind)
        info = context.session.client_params
        client = to_one_line(info.client_info.name)[:80] if info is not None else "A client"
        by = identity.started_by or self.terms.app.settings.person
        return await _translate_errors(open_session(terms, upstreams, by, f"{client} through the gateway"))

    def _publish(self, client_key: ClientKey, announcement: Announcement) -> None:
        """Send an announcement of a server to the client. Above the limit of unsent ones it is dropped."""
        if len(self._tasks) >= MAX_PENDING_ANNOUNCEMENTS:
            return
        task = asyncio.create_task(self._send_announcement(client_key, announcement), name="gateway announcement")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_announcement(self, client_key: ClientKey, announcement: Announcement) -> None:
        """Send an announcement in the client's protocol: to its open streams, or as a message of its session."""
        legacy_session = self._elders.get(client_key)
        if isinstance(announcement, LogNews):
            await self._send_log(client_key, legacy_session, announcement)
            return
        await self._stream(client_key).bus.publish(
            _CHANGE_EVENTS[announcement] if isinstance(announcement, str) else ResourceUpdated(announcement.uri)
        )
        if legacy_session is None:
            return
        match announcement:
            case "tools":
                await legacy_session.send_tool_list_changed()
            case "prompts":
                await legacy_session.send_prompt_list_changed()
            case "resources":
                await legacy_session.send_resource_list_changed()
            case ResourceNews(uri=uri):
                await legacy_session.send_resource_updated(uri)

    async def _send_log(
        self, client_key: ClientKey, legacy_session: ServerSession | None, announcement: LogNews
    ) -> None:
        """Forward a log line under its server's name; to a newer client with the newest call at that server."""
        session = self.sessions.find(client_key)
        if session is None:
            return
        calls = [call for call in session.upstreams.calls.values() if call.server == announcement.server]
        target: Any = legacy_session if legacy_session is not None else calls[-1].context.session if calls else None
        if target is None:
            return
        data = mask(announcement.data, self.terms.guard.redact)
        logger = clean(f"{announcement.server}/{announcement.logger}" if announcement.logger else announcement.server)[
            :200
        ]
        with warnings.catch_warnings():
            # Clients of both protocols still read logs, although the library deprecates them.
            warnings.simplefilter("ignore", MCPDeprecationWarning)
            sending = target.send_log_message(announcement.level, data, logger)
        await sending

    def _stream(self, client_key: ClientKey) -> "NewsStream":
        return self._streams.setdefault(client_key, NewsStream())

    async def _listen(self, context: Context, params: SubscriptionsListenRequestParams) -> Any:
        """Serve a newer client's stream of changes, including those of the resources that it names."""
        session, followed_uris = await self.get_session(context), list[str]()
        try:
            for uri in params.notifications.resource_subscriptions or ():
                with suppress(Failed):
                    await session.upstreams.follow_resource(uri)
                    followed_uris.append(uri)
            return await self._stream(self._identify(context).client_key).serve(context, params)
        finally:
            with anyio.CancelScope(shield=True), suppress(Failed):
                for uri in followed_uris:
                    await session.upstreams.unfollow_resource(uri)

    async def _subscribe(self, context: Context, params: SubscribeRequestParams) -> EmptyResult:
        session = await self.get_session(context)
        await _translate_errors(session.upstreams.follow_resource(str(params.uri)))
        return EmptyResult()

    async def _unsubscribe(self, context: Context, params: UnsubscribeRequestParams) -> EmptyResult:
        session = await self.get_session(context)
        await _translate_errors(session.upstreams.unfollow_resource(str(params.uri)))
        return EmptyResult()

    async def _set_log_level(self, context: Context, params: SetLevelRequestParams) -> EmptyResult:
        session = await self.get_session(context)
        await session.upstreams.set_log_level(params.level)
        return EmptyResult()

    async def _restore_schemas(self, context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        """Restore the schemas as the servers sent them, because the library reorders their keys."""
        result = await call_next(context)
        if context.method != "tools/list" or not isinstance(result, dict):
            return result
        tools = (await self.get_session(context)).upstreams.tools
        for entry in cast("dict[str, Any]", result).get("tools", ()):
            tool = tools.get(entry["name"])
            for key in ("inputSchema", "outputSchema"):
                if tool is not None and isinstance(tool, GatedTool) and key in tool.entry:
                    entry[key] = tool.entry[key]
        return cast("dict[str, Any]", result)

    async def _list_tools(self, context: Context, _: PaginatedRequestParams | None) -> dict[str, Any]:
        session = await self.get_session(context)
        return _fresh({"tools": [*session.upstreams.list_tools(), *map(dict, OWN_TOOLS)]})

    async def _list_resources(self, context: Context, _: PaginatedRequestParams | None) -> dict[str, Any]:
        session = await self.get_session(context)
        return _fresh({"resources": await session.upstreams.list_resources()})

    async def _list_templates(self, context: Context, _: PaginatedRequestParams | None) -> dict[str, Any]:
        session = await self.get_session(context)
        return _fresh({"resourceTemplates": await session.upstreams.list_templates()})

    async def _list_prompts(self, context: Context, _: PaginatedRequestParams | None) -> dict[str, Any]:
        session = await self.get_session(context)
        return _fresh({"prompts": await session.upstreams.list_prompts()})

    async def _complete(self, context: Context, params: CompleteRequestParams) -> Any:
        session = await self.get_session(context)
        try:
            return await session.upstreams.complete(params)
        except Failed as failure:
            raise MCPError(INVALID_PARAMS, f"Halter: {failure}") from failure

    async def _call(self, context: Context, params: CallToolRequestParams) -> Any:
        session, values = await self.get_session(context), params.arguments or {}
        if params.name == DECISIONS:
            questions = await _translate_errors(session.list_questions())
            return _render_data({"decisions": list(questions)})
        if params.name == WAIT:
            client_call = ClientCall(context, OWN, (WAIT, b""))
            answer = session.wait_for_question(client_call, str(values.get("decision", "")))
            return _render_text(await _translate_errors(answer), failed=False)
        try:
            arguments = canonical_json(values)
        except (ValueError, RecursionError):
            return _render_text("Halter: the arguments cannot be encoded as JSON.")
        tool = session.upstreams.tools.get(params.name)
        server = "" if tool is None else tool.spec.server
        call = await self._make_call(session, context, params, params.name, arguments, server)
        return self._render_call(session, call) if isinstance(call, tuple) else call

    async def _get_task(self, context: Context, params: TaskRequestParams) -> dict[str, Any]:
        session = await self._get_task_session(context)
        return session.tasks.get(params.task_id, lambda call: self._render_call(session, (call, call.outcome())))

    async def _update_task(self, context: Context, params: UpdateTaskRequestParams) -> dict[str, Any]:
        (await self._get_task_session(context)).tasks.update(params.task_id, params.input_responses)
        return {"resultType": "complete"}

    async def _cancel_task(self, context: Context, params: TaskRequestParams) -> dict[str, Any]:
        await (await self._get_task_session(context)).tasks.cancel(params.task_id)
        return {"resultType": "complete"}

    async def _get_task_session(self, context: Context) -> GatedSession:
        require_tasks(context)
        return await self.get_session(context)

    async def _read_resource(self, context: Context, params: ReadResourceRequestParams) -> Any:
        session, uri = await self.get_session(context), str(params.uri)
        server = await session.upstreams.find_resource(uri)
        if not server:
            raise MCPError(INVALID_PARAMS, f"Halter: there is no resource {clean(uri)[:200]!r}.")
        return await self._read(session, context, params, server, RESOURCE, {"uri": uri})

    async def _get_prompt(self, context: Context, params: GetPromptRequestParams) -> Any:
        session = await self.get_session(context)
        server, _, name = params.name.partition(SERVER_SEPARATOR)
        arguments = {"name": name, **({"arguments": params.arguments} if params.arguments else {})}
        return await self._read(session, context, params, server, PROMPT, arguments)

    async def _read(
        self, session: GatedSession, context: Context, params: Any, server: str, kind: ReadingSpec, arguments: Any
    ) -> Any:
        """Read a resource or a prompt through the guard. A refusal is an error of the protocol."""
        tool = f"{server}{SERVER_SEPARATOR}{kind.suffix}"
        call = await self._make_call(session, context, params, tool, canonical_json(arguments), server)
        if not isinstance(call, tuple):
            return call
        client_call, outcome = call
        if isinstance(outcome, PendingCall):
            raise MCPError(PENDING_CODE, _explain_pending(outcome), {"decision": outcome.decision})
        if outcome.outcome != "ok" or client_call.result is None:
            raise MCPError(REFUSED_CODE, f"Halter: {outcome.text}", {"outcome": outcome.outcome})
        return _fresh(self._mask_result(client_call.result))

    async def _make_call(
        self, session: GatedSession, context: Context, params: Any, tool: str, arguments: bytes, server: str
    ) -> tuple[ClientCall, Answer | PendingCall] | InputRequiredResult | dict[str, Any]:
        """Start or continue a call, and return when it has an outcome or needs input from the client.

        Only the call of a tool can become a task.
        """
        tool_and_arguments = (tool, arguments)
        if params.request_state is not None:
            call = await session.parked.claim(params.request_state, tool_and_arguments)
            call.resume(context, params.input_responses or {})
        else:
            upstreams = session.upstreams
            call = ClientCall(context, server, tool_and_arguments, upstreams.log_level, upstreams.sample)
            session.begin(call, tool, arguments)
        try:
            begin_task = session.tasks.add if context.method == "tools/call" and knows_tasks(context) else None
            outcome = await _translate_errors(call.next_round(session.parked.park, begin_task))
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await call.cancel()
            raise
        return (call, outcome) if isinstance(outcome, Answer | PendingCall) else outcome

    def _render_call(
        self, session: GatedSession, call_and_outcome: tuple[ClientCall, Answer | PendingCall]
    ) -> dict[str, Any]:
        call, outcome = call_and_outcome
        tool = session.upstreams.tools.get(call.description[0])
        has_output_schema = isinstance(tool, GatedTool) and "outputSchema" in tool.entry
        if isinstance(outcome, PendingCall):
            pending_data = {"decision": outcome.decision, "expires_at": outcome.expires_at, "how": "halter inbox"}
            # A client checks structured content against the tool's schema, also of a failure.
            structured_content = {} if has_output_schema else {"structuredContent": pending_data}
            return {
                **_render_text(_explain_pending(outcome)),
                **structured_content,
                "_meta": {"halter/decision": pending_data},
            }
        if call.result is not None and outcome.outcome in ("ok", "error"):
            return self._mask_result(call.result)
        meta = {"halter/outcome": outcome.outcome, "halter/call": outcome.call}
        return {**_render_text(f"Halter: {outcome.text}", failed=outcome.outcome != "ok"), "_meta": meta}

    def _mask_result(self, result: Any) -> dict[str, Any]:
        """Render a server's result for the client, without the protocol's metadata about a single hop."""
        fields = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        meta = {key: value for key, value in fields.pop("_meta", {}).items() if not key.startswith(_RESERVED_META)}
        client_fields = {**fields, "_meta": meta} if meta else fields
        return {**mask(client_fields, self.terms.guard.redact), "resultType": "complete"}

    async def run_upkeep(self) -> None:
        """End idle sessions, and those that killed gateways left, until cancelled."""
        while True:
            try:
                await recover_sessions(self.terms)
                await self.end_idle(read_monotonic(self.terms.app.clock) - IDLE_LIMIT)
            except HalterError as error:
                self._report(f"Cannot check sessions: {error}")
            await self.terms.app.clock.sleep(SWEEP_INTERVAL)

    async def end_idle(self, used_before: int) -> None:
        """End idle sessions of clients with keys. A session on pipes ends with its pipes instead."""
        for client_key, session in self.sessions.items():
            if client_key[0] and not session.upstreams.calls and session.used_at < used_before:
                self.sessions.remove(client_key)
                self._elders.pop(client_key, None)
                self._streams.pop(client_key, None)
                await session.close()

    async def close(self) -> None:
        for task in [*self._tasks]:
            await cancel_and_wait(task)
        await self.sessions.stop_opening()
        for session in self.sessions.values():
            await session.close()


@asynccontextmanager
async def open_gateway(
    app: Runtime,
    owner: GatewayAgent,
    mcp_terms: McpTerms,
    identify: Callable[[Context], ClientIdentity] = lambda _: ClientIdentity(),
    report: ReportListener = lambda _: None,
) -> AsyncGenerator[Gateway]:
    """Open a gateway on a store. Its leases are renewed in the block; its sessions end or park when the block ends."""
    worker = make_worker_id("gateway", app.ids)
    guard = make_guard(app, owner.agent.policy, owner.agent.secrets)
    async with (
        aclosing(owner.agent.models),
        renew_leases(app.patient(), app.clock, worker, liveness=app.liveness),
        follow_prices(app),
    ):
        terms = GatewayTerms(SessionHost(app, worker), owner, guard)
        gateway = Gateway(terms, lambda narrowed: Upstreams(app, narrowed, mcp_terms, report), identify, report)
        upkeep_task = asyncio.create_task(gateway.run_upkeep(), name="gateway upkeep")
        try:
            yield gateway
        finally:
            await cancel_and_wait(upkeep_task)
            await gateway.close()


async def _translate_errors(work: Awaitable[Any]) -> Any:
    """Translate Halter's errors into errors of the protocol."""
    try:
        return await work
    except (HalterError, Failed) as error:
        raise MCPError(REFUSED_CODE, f"Halter: {error}") from error


def _fresh(result: dict[str, Any]) -> dict[str, Any]:
    """Forbid clients to cache a result, because policy, pins and halts may change. Older clients ignore this."""
    return {**result, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}


def _explain_pending(pending: PendingCall) -> str:
    return (
        f"Halter: pending decision {pending.decision}. The call was not made: a person has to approve it, in `halter "
        "inbox` or on the dashboard. Repeat the same call with the same arguments after approval."
    )


def _render_text(text: str, *, failed: bool = True) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": failed, "resultType": "complete"}


def _render_data(data: Mapping[str, Any]) -> dict[str, Any]:
    text = msgspec.json.encode(data).decode()
    return {**_render_text(text, failed=False), "structuredContent": dict(data)}


_RESERVED_META: Final = "io.modelcontextprotocol/"
_BINARY_TYPES: Final = ("image", "audio")


def mask(value: Any, redact: Callable[[str], str]) -> Any:
    """Mask secrets in every text of a result. The bytes of pictures and sounds are not changed."""
    match value:
        case str():
            return redact(value)
        case list():
            return [mask(member, redact) for member in cast("list[Any]", value)]
        case Mapping():
            raw = cast("Mapping[str, Any]", value)
            is_picture = raw.get("type") in _BINARY_TYPES
            return {
                redact(key): member
                if is_picture and key == "data"
                else _mask_blob(member, redact)
                if key == "blob" and isinstance(member, str)
                else mask(member, redact)
                for key, member in raw.items()
            }
        case _:
            return value


def _mask_blob(data: str, redact: Callable[[str], str]) -> str:
    """Mask secrets in a resource that is sent as bytes, if the bytes are text."""
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return data
    masked_text = redact(text)
    return data if masked_text == text else base64.b64encode(masked_text.encode()).decode()
