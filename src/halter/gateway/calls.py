"""A client's call in progress, and the tools that it may name.

A call relays messages between server and client while it runs: progress, and the server's requests for input. A client
of the older protocol gets such a request directly. A client of the newer protocol gets an answer that lists the
requests, and then repeats the same call with its responses. The call itself continues meanwhile.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    LOG_LEVEL_META_KEY,
    CallToolResult,
    CreateMessageRequest,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitRequestURLParams,
    ElicitResult,
    GetPromptRequest,
    GetPromptRequestParams,
    GetPromptResult,
    InputRequests,
    InputRequiredResult,
    InputResponses,
    LoggingLevel,
    ReadResourceRequest,
    ReadResourceRequestParams,
    ReadResourceResult,
    TextContent,
    TextResourceContents,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec.structs import replace

from halter.core.text import clean, shorten
from halter.core.tools import SERVER_SEPARATOR, EffectStatus, Failed, Invalid, Output, Permit, ToolSpec, Valid
from halter.tools.function_tool import canonical_json
from halter.tools.mcp import McpServer, McpTool, read_tool_result
from halter.tools.mcp_session import NO_ROOTS, NO_SAMPLING, CallRelay

MAX_INPUT_REQUESTS: Final = 20
"""Maximum number of requests for input, and of model requests, that one call may make."""
MAX_MESSAGE_LENGTH: Final = 2000
CANCELLED: Final = ElicitResult(action="cancel")
REPLAYED: Final = "Invalid requestState: unknown, already used, or from another call. Nothing was done."

Context = ServerRequestContext[Any, Any]


def speaks_modern(context: Context) -> bool:
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS


async def reject_sampling(_: str, __: Any) -> Any:
    raise Failed("Sampling", NO_SAMPLING)


class ClientCall:
    """A call of a client, from its first request to its outcome; `task` runs it."""

    def __init__(
        self,
        context: Context,
        server: str,
        tool_and_arguments: tuple[str, bytes],
        log_level: LoggingLevel | None = None,
        sample: Callable[[str, Any], Awaitable[Any]] = reject_sampling,
    ) -> None:
        self.context = context
        self._sample = sample
        self._sampled = 0
        self._log_level = log_level
        self.server = server
        self.description = tool_and_arguments
        self.result: Any = None
        self.waits_for = ""
        self.status: str | None = None
        """The status of the server's own task for the call; None if the server has not made one."""
        self.is_task = False
        """True if the client polls the call as a task, instead of waiting for it."""
        self.task: asyncio.Task[Any] | None = None
        self._change_event = asyncio.Event()
        self._pending_questions: dict[str, tuple[ElicitRequestParams, asyncio.Future[ElicitResult]]] = {}
        self._elicited = 0
        self._sent_questions: set[str] = set()
        self._progress = 0.0
        self._wait_micros = 0

    @property
    def relay(self) -> CallRelay:
        """The relay of the call's messages. A client of the newer protocol sends its log level with each call."""
        meta: Any = self.context.meta or {}
        log_level = meta.get(LOG_LEVEL_META_KEY) if speaks_modern(self.context) else self._log_level
        return CallRelay(
            self.report, self.answer, {LOG_LEVEL_META_KEY: log_level} if log_level else {}, self.follow_task
        )

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report progress to a client that asked for it. The reported value only grows."""
        progress += self._wait_micros
        if progress <= self._progress:
            return
        self._progress, shifted_total = progress, None if total is None else total + self._wait_micros
        await self.context.session.report_progress(progress, shifted_total, None if message is None else clean(message))

    async def report_waiting(self, message: str) -> None:
        """Report that the call still waits, because a client without progress reports may give up."""
        self._wait_micros += 1
        await self.report(0, None, message)

    async def answer(self, requests: InputRequests) -> InputResponses:
        """Get the responses that a server of the newer protocol asks for."""
        responses: dict[str, Any] = {}
        for key, request in requests.items():
            match request:
                case ElicitRequest(params=params):
                    responses[key] = await self.elicit_for_server(params)
                case CreateMessageRequest(params=params):
                    responses[key] = await self._sample(self.server, params)
                case _:
                    raise Failed("InputRequired", NO_ROOTS)
        return responses

    def count_model_request(self) -> None:
        """Count a model request of the server. Raises Failed at the limit of one call."""
        self._sampled += 1
        if self._sampled > MAX_INPUT_REQUESTS:
            raise Failed("Sampling", f"one call may make at most {MAX_INPUT_REQUESTS} model requests.")

    async def elicit_for_server(self, params: ElicitRequestParams) -> ElicitResult:
        return await self.elicit(_name_asker(self.server, params))

    async def elicit(self, params: ElicitRequestParams) -> ElicitResult:
        """Ask the person at the client. A client that cannot show the question counts as cancelled."""
        if not self.can_show(params.mode) or self._elicited >= MAX_INPUT_REQUESTS:
            return CANCELLED
        self._elicited += 1
        if not speaks_modern(self.context):
            return await self._elicit_at_once(params)
        key, future = f"halter-{len(self._pending_questions) + 1}", asyncio.get_running_loop().create_future()
        self._pending_questions[key] = (params, future)
        self._change_event.set()
        return await future

    def can_show(self, mode: str) -> bool:
        capabilities = self.context.session.client_capabilities
        capability = capabilities.elicitation if capabilities is not None else None
        if capability is None:
            return False
        # A client that declares neither mode uses the older protocol, which has only forms.
        return capability.url is not None if mode == "url" else capability.form is not None or capability.url is None

    async def _elicit_at_once(self, params: ElicitRequestParams) -> ElicitResult:
        session, request = self.context.session, self.context.request_id
        try:
            if isinstance(params, ElicitRequestFormParams):
                return await session.elicit_form(params.message, params.requested_schema, request)
            return await session.elicit_url(params.message, params.url, params.elicitation_id or "", request)
        except (MCPError, ValueError):
            return CANCELLED

    def outcome(self) -> Any:
        """Return the outcome of a call that has ended."""
        if self.task is None:
            raise AssertionError("The call has no task.")
        return self.task.result()

    def wait_for(self, decision: str) -> None:
        """Record that the call waits for a decision."""
        self.waits_for = decision
        self._change_event.set()

    def follow_task(self, status: str) -> None:
        """Record the status of the server's own task for the call."""
        self.status = status
        self._change_event.set()

    def list_input_requests(self) -> dict[str, Any]:
        """Return the open requests for input, for a client that polls the call."""
        return {
            key: ElicitRequest(params=params).model_dump(by_alias=True, mode="json", exclude_none=True)
            for key, (params, future) in self._pending_questions.items()
            if not future.done()
        }

    def apply_responses(self, responses: Mapping[str, Any]) -> None:
        """Apply the responses of a client that polls the call. Requests without a response stay open."""
        for key in responses.keys() & self._pending_questions.keys():
            self._settle(key, responses[key])

    async def next_round(
        self, park: Callable[["ClientCall"], str], begin_task: Callable[["ClientCall"], dict[str, Any]] | None
    ) -> Any:
        """Wait for the next answer: the outcome, requests for input, or a task if the client supports tasks."""
        task = self.task
        if task is None:
            raise AssertionError("The call has no task.")
        while not task.done():
            if (self.waits_for or self.status is not None) and begin_task is not None:
                self.is_task = True
                return begin_task(self)
            if unsent := [
                key
                for key, (_, future) in self._pending_questions.items()
                if key not in self._sent_questions and not future.done()
            ]:
                self._sent_questions.update(unsent)
                requests = {key: ElicitRequest(params=self._pending_questions[key][0]) for key in unsent}
                return InputRequiredResult(input_requests=dict(requests), request_state=park(self))
            self._change_event.clear()
            change_task = asyncio.ensure_future(self._change_event.wait())
            try:
                await asyncio.wait((task, change_task), return_when=asyncio.FIRST_COMPLETED)
            finally:
                change_task.cancel()
        return task.result()

    def resume(self, context: Context, responses: Mapping[str, Any]) -> None:
        """Continue after the client has repeated the call with its responses."""
        self.context = context
        for key in self._sent_questions:
            self._settle(key, responses.get(key))

    def _settle(self, key: str, response: Any) -> None:
        future = self._pending_questions[key][1]
        if not future.done():
            future.set_result(response if isinstance(response, ElicitResult) else CANCELLED)

    async def cancel(self) -> None:
        """Cancel the call, and wait until its outcome is in the journal."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,))


class ParkedCalls:
    """Calls that wait until their client repeats them. A ticket is valid once, for the same call."""

    def __init__(self) -> None:
        self._parked: dict[str, ClientCall] = {}

    def park(self, call: ClientCall) -> str:
        self._parked = {key: each for key, each in self._parked.items() if each.task and not each.task.done()}
        ticket = secrets.token_urlsafe(32)
        self._parked[ticket] = call
        return ticket

    async def claim(self, ticket: str, tool_and_arguments: tuple[str, bytes]) -> ClientCall:
        """Return the call of a ticket. A ticket with different arguments cancels its call, and raises MCPError."""
        call = self._parked.pop(ticket, None)
        if call is None:
            raise MCPError(INVALID_PARAMS, REPLAYED)
        if call.description != tool_and_arguments:
            await call.cancel()
            raise MCPError(INVALID_PARAMS, REPLAYED)
        return call


def _name_asker(server: str, params: ElicitRequestParams) -> ElicitRequestParams:
    """Put the server's name before its question, so that no server can pose as Halter."""
    text = f"The server {server} asks: {shorten(clean(params.message), MAX_MESSAGE_LENGTH)}"
    return params.model_copy(update={"message": text})


class GatedTool:
    """One tool of a server. The server's result is kept unchanged for the client."""

    def __init__(self, inner: McpTool, calls: Mapping[str, ClientCall], cost: int) -> None:
        self._inner = inner
        self._calls = calls
        self.spec = replace(inner.spec, cost=cost)
        self.entry = inner.entry

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return self._inner.validate(arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        call = self._calls[permit.id]
        result: CallToolResult = await self._inner.relay(arguments, permit, call.relay)
        call.result = result
        # The client gets the files. The journal only names them.
        output = read_tool_result(result)
        names = [f"[{file.name}, {file.media_type}, {len(file.data):,} bytes]" for file in output.files]
        return Output("\n".join([output.text, *names])) if names else output

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        return await self._inner.check(arguments, permit)


class ReadingSpec(msgspec.Struct, frozen=True):
    """A kind of read request, described as a tool."""

    suffix: str
    description: str
    schema: bytes


RESOURCE: Final = ReadingSpec(
    "resources_read",
    "Read a resource of the server.",
    b'{"type":"object","properties":{"uri":{"type":"string"}},"required":["uri"]}',
)
PROMPT: Final = ReadingSpec(
    "prompts_get",
    "Get a prompt of the server.",
    b'{"type":"object","properties":{"name":{"type":"string"},"arguments":{"type":"object"}},"required":["name"]}',
)


class ReadingTool:
    """A tool that reads a server's resources or prompts. The guard sees it; the client does not."""

    entry: Mapping[str, Any] = {}

    def __init__(self, server: McpServer, kind: ReadingSpec, calls: Mapping[str, ClientCall], timeout: int) -> None:
        self._server = server
        self._calls = calls
        self._kind = kind
        self.spec = ToolSpec(
            name=f"{server.name}{SERVER_SEPARATOR}{kind.suffix}",
            description=kind.description,
            schema=kind.schema,
            level="CONTROLLED",
            effect="read",
            egress=True,
            server=server.name,
            timeout=timeout,
        )

    def validate(self, arguments: bytes) -> Valid | Invalid:
        values: Mapping[str, Any] = msgspec.json.decode(arguments)
        return Valid(values, canonical_json(values))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        call, values = self._calls[permit.id], arguments.values
        if self._kind is RESOURCE:
            request: Any = ReadResourceRequest(params=ReadResourceRequestParams(uri=values["uri"]))
            result_type: Any = ReadResourceResult
        else:
            request = GetPromptRequest(params=GetPromptRequestParams(**values))
            result_type = GetPromptResult
        call.result = result = await self._server.read(request, result_type, permit, call.relay)
        return Output(_read_text(result))

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        del arguments
        permit.use()
        return "unknown"


def _read_text(result: ReadResourceResult | GetPromptResult) -> str:
    if isinstance(result, GetPromptResult):
        contents = [each.content for each in result.messages]
        return "\n".join(
            content.text if isinstance(content, TextContent) else f"[{content.type}]" for content in contents
        )
    return "\n".join(
        content.text if isinstance(content, TextResourceContents) else f"[data, {content.mime_type}]"
        for content in result.contents
    )


def make_url_question(message: str, url: str, name: str) -> ElicitRequestParams:
    return ElicitRequestURLParams(message=message, url=url, elicitation_id=name)


def make_form_question(message: str) -> ElicitRequestParams:
    approve = {"type": "boolean", "title": "Allow this call", "default": False}
    schema: Any = {"type": "object", "properties": {"approve": approve}, "required": ["approve"]}
    return ElicitRequestFormParams(message=message, requested_schema=schema)
