"""The feed over SSE and WebSocket: from now on, or from a known position.

The first item (`here`) has the position of all streams; a client resumes with it and the items it has seen since. A
stream that it does not name is sent from its beginning. A slow client gets a `gap` with the missed positions in the
journal.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Annotated, Any, Final

import msgspec
from fastapi import Depends, FastAPI, Header, Query, Request, WebSocket, WebSocketDisconnect
from fastapi.sse import EventSourceResponse, ServerSentEvent

from halter.core import ports
from halter.core.clock import SECOND
from halter.core.errors import NotDone, StoreError
from halter.core.ids import StreamId, inbox_stream, is_channel, parse_session_id, session_stream
from halter.core.rows import SessionRow
from halter.loop.concurrency import cancel_and_wait
from halter.operations.actor import Actor
from halter.runtime.feed import FeedGap, StreamSlice, read_stream_heads, serialize_feed_item
from halter.server.middleware import STREAM_PATH
from halter.server.responses import ERRORS, OUTSIDE_FEED, Feed, FeedMessage, Name, find_site, make_request_desk

SOCKET_PATH: Final = "/api/ws"
SUBSCRIBE_TIMEOUT: Final = 10 * SECOND
MAX_CURSOR_LENGTH: Final = 100_000
MAX_NUMBER_LENGTH: Final = 15
MAX_REASON_LENGTH: Final = 120
WS_INVALID_DATA: Final = 1007
WS_INTERNAL_ERROR: Final = 1011
_PAIR: Final = re.compile(r"(.+)=(\d{1,15})", re.ASCII)
FEED_GONE_NOTICE: Final = (
    "The events since then cannot be streamed, because the server was restarted. Read them from the journal."
)


class FeedSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The subscription of a client; `after` is the position that it has seen in each stream."""

    session: Annotated[str, msgspec.Meta(max_length=200)] = ""
    agent: Annotated[str, msgspec.Meta(max_length=200)] = ""
    kinds: Annotated[tuple[str, ...], msgspec.Meta(max_length=200)] = ()
    after: Mapping[str, Annotated[int, msgspec.Meta(ge=0, le=10**15)]] | None = None


class StreamPosition(msgspec.Struct, frozen=True):
    """The position of the streams, and the last number in the feed before the first item to send."""

    position: Mapping[str, int]
    number: int


StreamItem = StreamPosition | FeedMessage | FeedGap


async def listen_to_feed(
    actor: Actor, feed: Feed, subscription: FeedSubscription, number: int | None = None
) -> AsyncGenerator[StreamItem]:
    """Yield the position, the events since `after`, then live items; with a number, only the feed from there."""
    await feed.ready.wait()
    start = feed.next
    matches = _make_filter(actor, subscription)
    position: Mapping[str, int] = {}
    if number is None:
        position = await _position(actor, feed, subscription)
        yield StreamPosition(position, start - 1)
        async with aclosing(_read_since(feed, position, subscription.after)) as backlog:
            async for message in backlog:
                if matches(message):
                    yield message
    async with aclosing(feed.follow(start if number is None else number, matches)) as live_items:
        async for item in live_items:
            if not isinstance(item, FeedMessage) or not item.seq or item.seq > position.get(item.stream, 0):
                yield item


def _make_filter(actor: Actor, subscription: FeedSubscription) -> Any:
    """Make the filter of a subscription. Only admins get channel events: a chat's address lets its holder answer."""
    kinds = frozenset(subscription.kinds)

    def matches(message: FeedMessage) -> bool:
        pairs = ((subscription.session, message.session), (subscription.agent, message.agent))
        fits_kind = not kinds or message.name in kinds or message.kind in kinds
        can_see = actor.principal.can_see(message.agent) and (
            not is_channel(message.stream) or actor.principal.has_role("admin")
        )
        return fits_kind and can_see and all(expected in ("", actual) for expected, actual in pairs)

    return matches


async def _position(actor: Actor, feed: Feed, subscription: FeedSubscription) -> Mapping[str, int]:
    """Read the heads of the streams that the client subscribes to and may see."""
    heads = await read_stream_heads(feed.store)
    if subscription.session:
        own_streams = {session_stream(subscription.session), inbox_stream(subscription.session)}
        return {stream: head for stream, head in heads if stream in own_streams}
    if not actor.principal.agents and not subscription.agent:
        return dict(heads)
    rows = await feed.store.ask(ports.Query("all_sessions", SessionRow))
    agents = {row.session: row.agent for row in rows}
    return {stream: head for stream, head in heads if _is_theirs(actor, subscription, _agent_of(stream, agents))}


def _is_theirs(actor: Actor, subscription: FeedSubscription, agent: str) -> bool:
    return actor.principal.can_see(agent) and subscription.agent in ("", agent)


def _agent_of(stream: StreamId, agents: Mapping[str, str]) -> str:
    if stream.startswith("trigger:"):
        return stream.removeprefix("trigger:").partition("/")[0]
    return agents.get(parse_session_id(stream) or "", "")


async def _read_since(
    feed: Feed, position: Mapping[str, int], after: Mapping[str, int] | None
) -> AsyncGenerator[FeedMessage]:
    if after is None:
        return
    missed_slices = {
        StreamId(name): StreamSlice(after.get(name, 0), head)
        for name, head in position.items()
        if head > after.get(name, 0)
    }
    async with aclosing(feed.bus.read_missed(FeedGap(lost=missed_slices))) as events:
        async for event in events:
            yield await feed.encode(event)


def encode_stream_item(item: StreamItem) -> str:
    match item:
        case FeedMessage():
            return item.text
        case StreamPosition():
            return msgspec.json.encode({"name": "here", "position": item.position}).decode()
        case FeedGap():
            return msgspec.json.encode(serialize_feed_item(item)).decode()


def read_cursor(text: str) -> Mapping[str, int]:
    """Parse a position in a URL: STREAM=SEQ, separated by commas. Raises NotDone."""
    pairs = [_PAIR.fullmatch(part) for part in text.split(",")]
    if len(text) > MAX_CURSOR_LENGTH or not all(pairs):
        raise NotDone(f"Invalid position {text[:80]!r}. Use the form session:desk-1=12.", "wrong")
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def write_cursor(position: Mapping[str, int]) -> str:
    return ",".join(f"{stream}={seq}" for stream, seq in sorted(position.items()))


class StreamStart(msgspec.Struct, frozen=True):
    """The start of a stream: a number in the feed, or positions in the streams."""

    listening: FeedSubscription
    number: int | None = None
    anew: bool = False


def resolve_stream_start(subscription: FeedSubscription, after: str, feed: str) -> StreamStart:
    """Decide where to resume. Numbers of the feed of an earlier server are unknown."""
    name, dot, number = after.rpartition(".")
    if not after:
        return StreamStart(subscription)
    if dot and "=" not in after and number.isdecimal():
        is_current = name == feed and len(number) <= MAX_NUMBER_LENGTH
        return StreamStart(subscription, int(number) + 1) if is_current else StreamStart(subscription, anew=True)
    return StreamStart(msgspec.structs.replace(subscription, after=read_cursor(after)))


async def require_visible(actor: Actor, subscription: FeedSubscription) -> None:
    if subscription.session:
        await actor.session(subscription.session)
    if subscription.agent:
        actor.require_agent(subscription.agent)


async def _parse_start(
    request: Request,
    actor: Annotated[Actor, Depends(make_request_desk)],
    session: Name = "",
    agent: Name = "",
    kind: Annotated[list[Name] | None, Query(max_length=100)] = None,
    after: Annotated[str, Query(max_length=MAX_CURSOR_LENGTH)] = "",
    last_event_id: Annotated[str, Header(max_length=MAX_CURSOR_LENGTH)] = "",
) -> StreamStart:
    subscription = FeedSubscription(session, agent, tuple(kind or ()))
    await require_visible(actor, subscription)
    return resolve_stream_start(subscription, last_event_id or after, find_site(request).feed.name)


async def _stream(
    request: Request,
    actor: Annotated[Actor, Depends(make_request_desk)],
    start: Annotated[StreamStart, Depends(_parse_start)],
) -> AsyncGenerator[ServerSentEvent]:
    """Stream events as server-sent events; a client resumes with `Last-Event-ID`."""
    feed, positions = find_site(request).feed, dict(start.listening.after or {})
    if start.anew:
        yield ServerSentEvent(
            raw_data=msgspec.json.encode({"name": "gap", "sentence": FEED_GONE_NOTICE}).decode(), event="gap"
        )
    async with aclosing(listen_to_feed(actor, feed, start.listening, start.number)) as items:
        async for item in items:
            yield ServerSentEvent(
                raw_data=encode_stream_item(item), event=_name(item), id=_id(feed, start, positions, item)
            )


def _name(item: StreamItem) -> str:
    match item:
        case FeedMessage():
            return item.name
        case StreamPosition():
            return "here"
        case FeedGap():
            return "gap"


def _id(feed: Feed, start: StreamStart, positions: dict[str, int], item: StreamItem) -> str | None:
    """Return the SSE id: for one session its stream positions, which survive a restart, else a number in the feed."""
    if start.listening.session:
        if isinstance(item, FeedMessage) and item.seq:
            positions[item.stream] = item.seq
        if isinstance(item, StreamPosition) and start.listening.after is None:
            positions.update(item.position)
        return write_cursor(positions) or None
    feed_number = (
        item.number
        if isinstance(item, FeedMessage) or (isinstance(item, StreamPosition) and start.listening.after is None)
        else None
    )
    return None if feed_number is None or feed_number == OUTSIDE_FEED else f"{feed.name}.{feed_number}"


async def _socket(socket: WebSocket) -> None:
    """Send the feed over a WebSocket, after the client's subscription: `{}` for all, from now on."""
    await socket.accept()
    actor, feed = make_request_desk(socket), find_site(socket).feed
    try:
        async with asyncio.timeout(SUBSCRIBE_TIMEOUT / SECOND):
            subscription = msgspec.json.decode(await socket.receive_text(), type=FeedSubscription)
        await require_visible(actor, subscription)
        await _send_until_gone(socket, listen_to_feed(actor, feed, subscription))
    except TimeoutError:
        await _close(socket, WS_INVALID_DATA, "Send a subscription first: {} subscribes to everything from now on.")
    except (msgspec.MsgspecError, NotDone, KeyError, UnicodeError) as error:
        await _close(socket, WS_INVALID_DATA, str(error))
    except StoreError as error:
        await _close(socket, WS_INTERNAL_ERROR, str(error))
    except WebSocketDisconnect:
        return


async def _send_until_gone(socket: WebSocket, items: AsyncGenerator[StreamItem]) -> None:
    """Send items until the client disconnects."""

    async def send() -> None:
        async with aclosing(items):
            async for item in items:
                await socket.send_text(encode_stream_item(item))

    send_task, disconnect_task = asyncio.ensure_future(send()), asyncio.ensure_future(_wait_until_gone(socket))
    try:
        await asyncio.wait({send_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if send_task.done():
            send_task.result()
    finally:
        with suppress(WebSocketDisconnect, TimeoutError, OSError):
            await cancel_and_wait(send_task, disconnect_task)


async def _wait_until_gone(socket: WebSocket) -> None:
    """Wait until the client disconnects; its messages are ignored."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    with suppress(RuntimeError, WebSocketDisconnect):
        await socket.close(code, reason[:MAX_REASON_LENGTH].encode("ascii", "replace").decode())


def add_streams(api: FastAPI) -> None:
    api.get(STREAM_PATH, response_class=EventSourceResponse, summary="Stream events as they happen", responses=ERRORS)(
        _stream
    )
    api.websocket(SOCKET_PATH)(_socket)
