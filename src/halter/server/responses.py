"""Shared by the API's routes: the caller's desk, encoding, error responses, and the feed.

The feed reads and encodes each event once for all listeners and keeps the newest ones. A listener is a position in it,
so a slow listener costs nothing and does not slow the others; one that fell behind gets a gap and continues with the
newest events.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, StringConstraints
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError, NotDone, NotDoneWhy, StoreError, StoreUnavailable
from halter.core.ids import Ids, StreamId, parse_session_id
from halter.core.ports import Query
from halter.core.public_json import encode_public_json, to_public_builtins
from halter.core.rows import SessionRow
from halter.core.text import clean
from halter.journal.store import JournalStore
from halter.operations.actor import Actor
from halter.operations.agent_folders import AgentFolders
from halter.runtime.feed import (
    Bus,
    FeedEvent,
    FeedGap,
    FeedItem,
    LiveUpdate,
    StreamSlice,
    read_stream_heads,
    serialize_feed_item,
)
from halter.runtime.runtime import Runtime
from halter.server.middleware import INTERNAL_ERROR, WHO_KEY

HIDDEN_ROUTE: Final[Mapping[str, Any]] = {"response_model": None, "include_in_schema": False}
"""Options of a route that the API's description does not list."""
MAX_FEED_ITEMS: Final = 5000
MAX_FEED_BYTES: Final = 32 * 1024 * 1024
MAX_TRAIL: Final = 20_000
"""Number of dropped items whose position in the journal is still known."""
PAGE: Final = 100
FEED_RETRY_DELAY: Final = SECOND
MAX_CACHED_AGENTS: Final = 10_000
OUTSIDE_FEED: Final = -1
"""The number of an item that was read again from the journal and has no position in the feed."""


class FeedMessage(msgspec.Struct, frozen=True):
    """An encoded item; `seq` is 0 for live updates; `number` is its position in the feed."""

    number: int
    name: str
    kind: str
    stream: str
    seq: int
    session: str
    agent: str
    text: str


FeedFilter = Callable[[FeedMessage], bool]


class Feed:
    """The feed of one process."""

    def __init__(
        self, store: JournalStore, clock: Clock, ids: Ids, bus: Bus, limit: int = MAX_FEED_ITEMS, trail: int = MAX_TRAIL
    ) -> None:
        self.name = ids.make()
        self.bus = bus
        self.store = store.patient(clock)
        self.ready = asyncio.Event()
        self._clock = clock
        self._positions: dict[StreamId, int] = {}
        self._limit = limit
        self._row: deque[FeedMessage] = deque()
        self._bytes = 0
        self._trail: deque[FeedMessage] = deque(maxlen=trail)
        self._next = 1
        self._has_more = asyncio.Event()
        self._agents: dict[str, str] = {}

    @property
    def next(self) -> int:
        return self._next

    async def run(self) -> None:
        """Read until cancelled. While the store is unavailable nothing arrives; afterwards nothing is missing."""
        while True:
            try:
                if not self.ready.is_set():
                    self._positions = dict(await read_stream_heads(self.store))
                    self.ready.set()
                async with aclosing(self.bus.listen(self._positions)) as items:
                    async for item in items:
                        await self._add_item(item)
            except StoreError:
                await self._clock.sleep(FEED_RETRY_DELAY)

    async def _add_item(self, item: FeedItem) -> None:
        """Add an item; on a gap, read the missed events again from the journal."""
        if not isinstance(item, FeedGap):
            self._add(await self.encode(item))
            return
        async for event in self.bus.read_missed(item):
            self._add(await self.encode(event))

    async def encode(self, item: FeedEvent | LiveUpdate) -> FeedMessage:
        """Encode an item together with its agent."""
        match item:
            case FeedEvent(name, stored):
                kind, stream, seq = stored.kind, stored.stream, stored.seq
                session = parse_session_id(stored.stream) or ""
            case LiveUpdate(name, session):
                kind, stream, seq = name, "", 0
        text = msgspec.json.encode(serialize_feed_item(item)).decode()
        return FeedMessage(OUTSIDE_FEED, name, kind, stream, seq, session, await self._agent(stream, session), text)

    async def _agent(self, stream: str, session: str) -> str:
        """Return the agent of a stream. An inbox may exist before its session starts."""
        if stream.startswith("trigger:"):
            return stream.removeprefix("trigger:").partition("/")[0]
        if not session or session in self._agents:
            return self._agents.get(session, "")
        rows = await self.store.ask(Query("session", SessionRow, {"session": session}))
        if not rows or not rows[0].started_at:
            return ""
        if len(self._agents) >= MAX_CACHED_AGENTS:
            self._agents.clear()
        self._agents[session] = rows[0].agent
        return self._agents[session]

    def _add(self, message: FeedMessage) -> None:
        message = msgspec.structs.replace(message, number=self._next)
        self._next += 1
        self._row.append(message)
        if message.seq:
            self._positions[StreamId(message.stream)] = message.seq
        self._bytes += len(message.text)
        while len(self._row) > self._limit or self._bytes > MAX_FEED_BYTES:
            dropped_message = self._row.popleft()
            self._bytes -= len(dropped_message.text)
            self._trail.append(msgspec.structs.replace(dropped_message, text=""))
        self._has_more.set()
        self._has_more = asyncio.Event()

    async def follow(self, number: int, matches: FeedFilter) -> AsyncGenerator[FeedMessage | FeedGap]:
        """Yield the matching items from a number on, and gaps."""
        while True:
            first_number = self._row[0].number if self._row else self._next
            if number < first_number:
                yield self._gap(number, matches)
                number = first_number
            # The feed may have dropped items while a slow consumer took one.
            for message in self._read_some(number, first_number):
                if self._row and message.number < self._row[0].number:
                    break
                number = message.number + 1
                if matches(message):
                    yield message
            else:
                if number >= self._next:
                    await self._has_more.wait()

    def _read_some(self, number: int, first_number: int) -> list[FeedMessage]:
        return list(islice(self._row, number - first_number, number - first_number + PAGE))

    def _gap(self, number: int, matches: FeedFilter) -> FeedGap:
        """Return the gap of the dropped items whose positions are still known."""
        dropped_messages = [message for message in self._trail if message.number >= number and matches(message)]
        events = [message for message in dropped_messages if message.seq]
        return FeedGap(len(events), len(dropped_messages) - len(events), slice_streams(events))


def slice_streams(events: Iterable[FeedMessage]) -> Mapping[StreamId, StreamSlice]:
    """Return the range of the events in the journal, by stream."""
    slices: dict[StreamId, StreamSlice] = {}
    for message in events:
        stream = StreamId(message.stream)
        previous = slices.get(stream)
        after = message.seq - 1 if previous is None else min(previous.after, message.seq - 1)
        slices[stream] = StreamSlice(after, message.seq if previous is None else max(previous.through, message.seq))
    return slices


JSON: Final = "application/json"
RETRY_AFTER_SECONDS: Final = "2"
"""Retry-After while the store is unavailable."""

STATUS: Final[Mapping[NotDoneWhy, int]] = {"wrong": 422, "missing": 404, "refused": 409, "forbidden": 403}


def _storable(text: str) -> str:
    if clean(text) != text:
        raise ValueError("it contains invalid characters")
    return text


Name = Annotated[str, StringConstraints(max_length=300), AfterValidator(_storable)]


@dataclass(frozen=True, slots=True)
class Site:
    """The state that the routes share."""

    app: Runtime
    feed: Feed
    agents: AgentFolders = field(default_factory=AgentFolders)


def find_site(connection: HTTPConnection) -> Site:
    return connection.app.state.site


def make_request_desk(connection: HTTPConnection) -> Actor:
    """Make the actor of the caller, whom the middleware has identified."""
    site = find_site(connection)
    return Actor(site.app, connection.scope[WHO_KEY], agents=site.agents)


class Error(msgspec.Struct, frozen=True):
    error: str


_MEANINGS: Final[Mapping[int, str]] = {
    400: "Malformed request",
    401: "Unknown token",
    403: "Insufficient role, or a request from another origin",
    404: "Not found, or not visible to this token",
    405: "Method not allowed",
    408: "The body took too long to arrive",
    409: "Not possible in the current state",
    413: "Body too large",
    421: "Unknown host name",
    422: "Invalid parameters",
    429: "Too many requests in one minute",
    500: "Internal error",
    503: "Store unavailable",
}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, words in _MEANINGS.items()
}


def encode_answer(value: object) -> bytes:
    """Encode a response; amounts are dollars, times are integers of microseconds."""
    try:
        return encode_public_json(value)
    except UnicodeEncodeError:
        # A text contains a lone surrogate, which JSON cannot encode.
        return encode_public_json(_clean_texts(to_public_builtins(value)))


def _clean_texts(value: Any) -> Any:
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(str(key)): _clean_texts(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [_clean_texts(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def add_errors(api: FastAPI) -> None:
    """Add handlers that turn every error into a sentence with a status."""
    handlers: Sequence[tuple[Any, Callable[[Any], Response]]] = (
        (NotDone, lambda error: _error_response(STATUS[error.why], str(error))),
        (StoreUnavailable, lambda error: _error_response(503, str(error), {"Retry-After": RETRY_AFTER_SECONDS})),
        (StoreError, lambda error: _error_response(503, str(error))),
        (ConfigError, lambda error: _error_response(409, str(error))),
        (RequestValidationError, lambda error: _error_response(422, _explain_unread(error))),
        (HTTPException, lambda error: _error_response(error.status_code, _explain_http_error(error), error.headers)),
        (Exception, lambda _: _error_response(500, INTERNAL_ERROR)),
    )
    for kind, make in handlers:
        api.add_exception_handler(kind, _handler(make))


def _handler(make: Callable[[Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_: Request, error: Exception) -> Response:
        return make(error)

    return handle


def _error_response(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_answer(Error(clean(sentence))), status, headers, JSON)


def _explain_unread(error: RequestValidationError) -> str:
    problems: list[str] = []
    for problem in error.errors():
        location = ".".join(str(part) for part in problem["loc"])
        problems.append(f"{location}: {problem['msg']}")
    return "; ".join(problems[:10]) or "Invalid request."


def _explain_http_error(error: HTTPException) -> str:
    match error.status_code:
        case 404:
            return "Not found."
        case 405:
            return "Method not allowed."
        case _:
            return error.detail
