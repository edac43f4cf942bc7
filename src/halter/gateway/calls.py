"""One call of a client while it is under way, and the tools that it may name.

What passes between server and client while a call runs (progress, and input that the server asks for) is relayed here,
in the words of either protocol: a client of the elder one is asked at once, a client of the newer one by an answer that
says what is needed, after which it makes the same call again. The call itself goes on meanwhile.
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

MOST_ASKED: Final = 20
"""How much input one call may ask its client for."""
LONGEST_MESSAGE: Final = 2000
CANCELLED: Final = ElicitResult(action="cancel")
REPLAYED: Final = "This requestState is unknown here, was used before, or belongs to another call: nothing was done."

Context = ServerRequestContext[Any, Any]


def speaks_modern(context: Context) -> bool:
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS


async def reject_sampling(_: str, __: Any) -> Any:
    raise Failed("Sampling", NO_SAMPLING)


class ClientCall:
    """A call of a client, from its first request to its outcome; `task` runs it, and `about` is what was asked."""

    def __init__(
        self,
        context: Context,
        server: str,
        about: tuple[str, bytes],
        log_level: LoggingLevel | None = None,
        sample: Callable[[str, Any], Awaitable[Any]] = reject_sampling,
    ) -> None:
        self.context = context
        self._sample = sample
        self._sampled = 0
        self._log_level = log_level
        self.server = server
        self.description = about
        self.result: Any = None
        self.waits_for = ""
        self.status: str | None = None
        """What the server says of the task that it has made of the call, if it has."""
        self.is_task = False
        """Whether the client asks how the call stands, instead of waiting for it."""
        self.task: asyncio.Task[Any] | None = None
        self._news = asyncio.Event()
        self._pending_questions: dict[str, tuple[ElicitRequestParams, asyncio.Future[ElicitResult]]] = {}
        self._elicited = 0
        self._sent_questions: set[str] = set()
        self._progress = 0.0
        self._wait_micros = 0

    @property
    def relay(self) -> CallRelay:
        """What passes while the call runs. A client of the newer protocol says with it what it wants of logs."""
        own: Any = self.context.meta or {}
        asked = own.get(LOG_LEVEL_META_KEY) if speaks_modern(self.context) else self._log_level
        return CallRelay(self.report, self.answer, {LOG_LEVEL_META_KEY: asked} if asked else {}, self.follow_task)

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell the client how far the call is, if it wants to know. What it is told only grows."""
        progress += self._wait_micros
        if progress <= self._progress:
            return
        self._progress, whole = progress, None if total is None else total + self._wait_micros
        await self.context.session.report_progress(progress, whole, None if message is None else clean(message))

    async def report_waiting(self, message: str) -> None:
        """Tell the client that the call still waits: a client gives up where it hears nothing for long."""
        self._wait_micros += 1
        await self.report(0, None, message)

    async def answer(self, requests: InputRequests) -> InputResponses:
        """Get from the client what a server of the newer protocol asks for."""
        found: dict[str, Any] = {}
        for key, request in requests.items():
            match request:
                case ElicitRequest(params=params):
                    found[key] = await self.elicit_for_server(params)
                case CreateMessageRequest(params=params):
                    found[key] = await self._sample(self.server, params)
                case _:
                    raise Failed("InputRequired", NO_ROOTS)
        return found

    def count_asked(self) -> None:
        """Bound what one call may have a model asked. Raises Failed."""
        self._sampled += 1
        if self._sampled > MOST_ASKED:
            raise Failed("Sampling", f"a call may have a model asked {MOST_ASKED} times.")

    async def elicit_for_server(self, params: ElicitRequestParams) -> ElicitResult:
        return await self.elicit(_name_asker(self.server, params))

    async def elicit(self, params: ElicitRequestParams) -> ElicitResult:
        """Put a question to the person at the client; one that cannot show it has none."""
        if not self.can_show(params.mode) or self._elicited >= MOST_ASKED:
            return CANCELLED
        self._elicited += 1
        if not speaks_modern(self.context):
            return await self._elicit_at_once(params)
        key, answered = f"halter-{len(self._pending_questions) + 1}", asyncio.get_running_loop().create_future()
        self._pending_questions[key] = (params, answered)
        self._news.set()
        return await answered

    def can_show(self, mode: str) -> bool:
        declared = self.context.session.client_capabilities
        known = declared.elicitation if declared is not None else None
        if known is None:
            return False
        # A client that declares neither mode is of the time when there were only forms.
        return known.url is not None if mode == "url" else known.form is not None or known.url is None

    async def _elicit_at_once(self, params: ElicitRequestParams) -> ElicitResult:
        session, request = self.context.session, self.context.request_id
        try:
            if isinstance(params, ElicitRequestFormParams):
                return await session.elicit_form(params.message, params.requested_schema, request)
            return await session.elicit_url(params.message, params.url, params.elicitation_id or "", request)
        except (MCPError, ValueError):
            return CANCELLED

    def outcome(self) -> Any:
        """The outcome of a call that is over."""
        if self.task is None:
            raise AssertionError("A call is answered that was never made.")
        return self.task.result()

    def wait_for(self, decision: str) -> None:
        """Note that a person has to decide about the call first."""
        self.waits_for = decision
        self._news.set()

    def follow_task(self, status: str) -> None:
        """Note that the server has made a task of the call, and how it stands."""
        self.status = status
        self._news.set()

    def list_asked(self) -> dict[str, Any]:
        """What the client has to say first, for one that asks how the call stands."""
        return {
            key: ElicitRequest(params=params).model_dump(by_alias=True, mode="json", exclude_none=True)
            for key, (params, answered) in self._pending_questions.items()
            if not answered.done()
        }

    def answer_asked(self, responses: Mapping[str, Any]) -> None:
        """Take the answers of a client that has a task; what it does not answer stays open."""
        for key in responses.keys() & self._pending_questions.keys():
            self._settle(key, responses[key])

    async def next_round(
        self, park: Callable[["ClientCall"], str], begin_task: Callable[["ClientCall"], dict[str, Any]] | None
    ) -> Any:
        """What to answer now: the outcome, what the client has to say first, or a task if the client knows tasks."""
        task = self.task
        if task is None:
            raise AssertionError("A call is answered that was never made.")
        while not task.done():
            if (self.waits_for or self.status is not None) and begin_task is not None:
                self.is_task = True
                return begin_task(self)
            if unsent := [
                key
                for key, (_, said) in self._pending_questions.items()
                if key not in self._sent_questions and not said.done()
            ]:
                self._sent_questions.update(unsent)
                requests = {key: ElicitRequest(params=self._pending_questions[key][0]) for key in unsent}
                return InputRequiredResult(input_requests=dict(requests), request_state=park(self))
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait((task, news), return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
        return task.result()

    def resume(self, context: Context, responses: Mapping[str, Any]) -> None:
        """The client has made the same call again, with what it was asked for."""
        self.context = context
        for key in self._sent_questions:
            self._settle(key, responses.get(key))

    def _settle(self, key: str, said: Any) -> None:
        answered = self._pending_questions[key][1]
        if not answered.done():
            answered.set_result(said if isinstance(said, ElicitResult) else CANCELLED)

    async def cancel(self) -> None:
        """Stop the call; what it may have done by then is in the journal when this returns."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,))


class ParkedCalls:
    """Calls that wait for their client to come back. A ticket is good for one return, of the same call."""

    def __init__(self) -> None:
        self._parked: dict[str, ClientCall] = {}

    def park(self, call: ClientCall) -> str:
        self._parked = {key: each for key, each in self._parked.items() if each.task and not each.task.done()}
        ticket = secrets.token_urlsafe(32)
        self._parked[ticket] = call
        return ticket

    async def claim(self, ticket: str, about: tuple[str, bytes]) -> ClientCall:
        """The call of a ticket. A ticket that comes with another call ends the one that it was for."""
        call = self._parked.pop(ticket, None)
        if call is None:
            raise MCPError(INVALID_PARAMS, REPLAYED)
        if call.description != about:
            await call.cancel()
            raise MCPError(INVALID_PARAMS, REPLAYED)
        return call


def _name_asker(server: str, params: ElicitRequestParams) -> ElicitRequestParams:
    """Say who asks: no server speaks as Halter."""
    text = f"The server {server} asks: {shorten(clean(params.message), LONGEST_MESSAGE)}"
    return params.model_copy(update={"message": text})


class GatedTool:
    """One tool of a server. What the server said is kept for the client, as it came."""

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
        return read_tool_result(result)

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        return await self._inner.check(arguments, permit)


class ReadingSpec(msgspec.Struct, frozen=True):
    """A request that only reads: its name as a tool, and its one or two arguments."""

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
    """Reads a server's resources or prompts: a call like any other for the guard, and no tool for the client."""

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
            wanted: Any = ReadResourceResult
        else:
            request = GetPromptRequest(params=GetPromptRequestParams(**values))
            wanted = GetPromptResult
        call.result = result = await self._server.read(request, wanted, permit, call.relay)
        return Output(_read_text(result))

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        del arguments
        permit.use()
        return "unknown"


def _read_text(result: ReadResourceResult | GetPromptResult) -> str:
    if isinstance(result, GetPromptResult):
        said = [each.content for each in result.messages]
        return "\n".join(part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in said)
    return "\n".join(
        part.text if isinstance(part, TextResourceContents) else f"[data, {part.mime_type}]" for part in result.contents
    )


def make_url_question(message: str, url: str, name: str) -> ElicitRequestParams:
    return ElicitRequestURLParams(message=message, url=url, elicitation_id=name)


def make_form_question(message: str) -> ElicitRequestParams:
    approve = {"type": "boolean", "title": "Let this call be made", "default": False}
    schema: Any = {"type": "object", "properties": {"approve": approve}, "required": ["approve"]}
    return ElicitRequestFormParams(message=message, requested_schema=schema)
