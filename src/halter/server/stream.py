"""The feed over SSE and WebSocket: from now on, or from a known position.

The first item (`here`) has the position of all streams; a client resumes with it and what it has seen since. A stream
that it does not name is sent from its beginning. What a slow client missed is a `gap`, with its places in the journal.
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
from halter.core.ids import StreamId, inbox_stream, is_channel, session_of, session_stream
from halter.core.rows import SessionRow
from halter.loop.session_runtime import cancel_and_wait
from halter.operations.desk import Actor
from halter.runtime.feed import FeedGap, StreamSlice, read_stream_heads, serialize_feed_item
from halter.server.middleware import STREAM_PATH
from halter.server.responses import ERRORS, OUTSIDE_FEED, Feed, FeedMessage, Name, find_site, make_request_desk

SOCKET_PATH: Final = "/api/ws"
SUBSCRIBE_TIMEOUT: Final = 10 * SECOND
LONGEST_CURSOR: Final = 100_000
LONGEST_NUMBER: Final = 15
LONGEST_REASON: Final = 120
WS_INVALID_DATA: Final = 1007
WS_INTERNAL_ERROR: Final = 1011
_PAIR: Final = re.compile(r"(.+)=(\d{1,15})", re.ASCII)
FEED_GONE_NOTICE: Final = (
    "It cannot be told what happened since: the server was started anew. It stands in the journal."
)


class FeedSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client wants to receive; `after` is how far it has seen each stream."""

    session: Annotated[str, msgspec.Meta(max_length=200)] = ""
    agent: Annotated[str, msgspec.Meta(max_length=200)] = ""
    kinds: Annotated[tuple[str, ...], msgspec.Meta(max_length=200)] = ()
    after: Mapping[str, Annotated[int, msgspec.Meta(ge=0, le=10**15)]] | None = None


class StreamPosition(msgspec.Struct, frozen=True):
    """The position of the streams, and the last number in the feed that the client need not receive."""

    position: Mapping[str, int]
    number: int


StreamItem = StreamPosition | FeedMessage | FeedGap


async def listen_to_feed(
    actor: Actor, feed: Feed, listening: FeedSubscription, number: int | None = None
) -> AsyncGenerator[StreamItem]:
    """Yields what is wanted: first what came since, then what comes. With a number, from there in the feed on."""
    await feed.ready.wait()
    start = feed.next
    fits = _make_filter(actor, listening)
    here: Mapping[str, int] = {}
    if number is None:
        here = await _position(actor, feed, listening)
        yield StreamPosition(here, start - 1)
        async with aclosing(_read_since(feed, here, listening.after)) as backlog:
            async for message in backlog:
                if fits(message):
                    yield message
    async with aclosing(feed.follow(start if number is None else number, fits)) as news:
        async for item in news:
            if not isinstance(item, FeedMessage) or not item.seq or item.seq > here.get(item.stream, 0):
                yield item


def _make_filter(actor: Actor, listening: FeedSubscription) -> Any:
    """Who knows the place where a person is asked may answer as that person, so only admins hear of it."""
    kinds = frozenset(listening.kinds)

    def matches(message: FeedMessage) -> bool:
        wanted = ((listening.session, message.session), (listening.agent, message.agent))
        named = not kinds or message.name in kinds or message.kind in kinds
        sees = actor.principal.can_see(message.agent) and (
            not is_channel(message.stream) or actor.principal.has_role("admin")
        )
        return named and sees and all(want in ("", found) for want, found in wanted)

    return matches


async def _position(actor: Actor, feed: Feed, listening: FeedSubscription) -> Mapping[str, int]:
    """Returns the length of the streams that the client wants and may see."""
    found = await read_stream_heads(feed.store)
    if listening.session:
        own = {session_stream(listening.session), inbox_stream(listening.session)}
        return {stream: head for stream, head in found if stream in own}
    if not actor.principal.agents and not listening.agent:
        return dict(found)
    rows = await feed.store.ask(ports.Query("all_sessions", SessionRow))
    agents = {row.session: row.agent for row in rows}
    return {stream: head for stream, head in found if _is_theirs(actor, listening, _agent_of(stream, agents))}


def _is_theirs(actor: Actor, listening: FeedSubscription, agent: str) -> bool:
    return actor.principal.can_see(agent) and listening.agent in ("", agent)


def _agent_of(stream: StreamId, agents: Mapping[str, str]) -> str:
    if stream.startswith("trigger:"):
        return stream.removeprefix("trigger:").partition("/")[0]
    return agents.get(session_of(stream) or "", "")


async def _read_since(
    feed: Feed, here: Mapping[str, int], after: Mapping[str, int] | None
) -> AsyncGenerator[FeedMessage]:
    if after is None:
        return
    lost = {
        StreamId(name): StreamSlice(after.get(name, 0), head)
        for name, head in here.items()
        if head > after.get(name, 0)
    }
    async with aclosing(feed.bus.read_missed(FeedGap(lost=lost))) as events:
        async for news in events:
            yield await feed.encode(news)


def encode_stream_item(item: StreamItem) -> str:
    match item:
        case FeedMessage():
            return item.text
        case StreamPosition():
            return msgspec.json.encode({"name": "here", "position": item.position}).decode()
        case FeedGap():
            return msgspec.json.encode(serialize_feed_item(item)).decode()


def read_cursor(text: str) -> Mapping[str, int]:
    """Parses a position in a URL: STREAM=SEQ, separated by commas. Raises NotDone."""
    pairs = [_PAIR.fullmatch(part) for part in text.split(",")]
    if len(text) > LONGEST_CURSOR or not all(pairs):
        raise NotDone(f"{text[:80]!r} is no place to go on from: write it like session:desk-1=12.", "wrong")
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def write_cursor(position: Mapping[str, int]) -> str:
    return ",".join(f"{stream}={seq}" for stream, seq in sorted(position.items()))


class StreamStart(msgspec.Struct, frozen=True):
    """Where a stream starts: a number in the feed, or positions in the streams."""

    listening: FeedSubscription
    number: int | None = None
    anew: bool = False


def resolve_stream_start(listening: FeedSubscription, after: str, feed: str) -> StreamStart:
    """Decides where to resume. A number in a feed of an earlier server is unknown."""
    name, dot, number = after.rpartition(".")
    if not after:
        return StreamStart(listening)
    if dot and "=" not in after and number.isdecimal():
        known = name == feed and len(number) <= LONGEST_NUMBER
        return StreamStart(listening, int(number) + 1) if known else StreamStart(listening, anew=True)
    return StreamStart(msgspec.structs.replace(listening, after=read_cursor(after)))


async def require_visible(actor: Actor, listening: FeedSubscription) -> None:
    if listening.session:
        await actor.session(listening.session)
    if listening.agent:
        actor.require_agent(listening.agent)


async def _parse_start(
    request: Request,
    desk: Annotated[Actor, Depends(make_request_desk)],
    session: Name = "",
    agent: Name = "",
    kind: Annotated[list[Name] | None, Query(max_length=100)] = None,
    after: Annotated[str, Query(max_length=LONGEST_CURSOR)] = "",
    last_event_id: Annotated[str, Header(max_length=LONGEST_CURSOR)] = "",
) -> StreamStart:
    listening = FeedSubscription(session, agent, tuple(kind or ()))
    await require_visible(desk, listening)
    return resolve_stream_start(listening, last_event_id or after, find_site(request).feed.name)


async def _stream(
    request: Request,
    desk: Annotated[Actor, Depends(make_request_desk)],
    start: Annotated[StreamStart, Depends(_parse_start)],
) -> AsyncGenerator[ServerSentEvent]:
    """Give the news as server-sent events; one that was cut off goes on by `Last-Event-ID`."""
    feed, seen = find_site(request).feed, dict(start.listening.after or {})
    if start.anew:
        yield ServerSentEvent(
            raw_data=msgspec.json.encode({"name": "gap", "sentence": FEED_GONE_NOTICE}).decode(), event="gap"
        )
    async with aclosing(listen_to_feed(desk, feed, start.listening, start.number)) as items:
        async for item in items:
            yield ServerSentEvent(raw_data=encode_stream_item(item), event=_name(item), id=_id(feed, start, seen, item))


def _name(item: StreamItem) -> str:
    match item:
        case FeedMessage():
            return item.name
        case StreamPosition():
            return "here"
        case FeedGap():
            return "gap"


def _id(feed: Feed, start: StreamStart, seen: dict[str, int], item: StreamItem) -> str | None:
    """Returns an SSE id: of one session its stream positions, which survive a restart; else a number in the feed."""
    if start.listening.session:
        if isinstance(item, FeedMessage) and item.seq:
            seen[item.stream] = item.seq
        if isinstance(item, StreamPosition) and start.listening.after is None:
            seen.update(item.position)
        return write_cursor(seen) or None
    live = (
        item.number
        if isinstance(item, FeedMessage) or (isinstance(item, StreamPosition) and start.listening.after is None)
        else None
    )
    return None if live is None or live == OUTSIDE_FEED else f"{feed.name}.{live}"


async def _socket(socket: WebSocket) -> None:
    """Sends the feed over a WebSocket, after the client's subscription: `{}` for all, from now on."""
    await socket.accept()
    actor, feed = make_request_desk(socket), find_site(socket).feed
    try:
        async with asyncio.timeout(SUBSCRIBE_TIMEOUT / SECOND):
            listening = msgspec.json.decode(await socket.receive_text(), type=FeedSubscription)
        await require_visible(actor, listening)
        await _send_until_gone(socket, listen_to_feed(actor, feed, listening))
    except TimeoutError:
        await _close(socket, WS_INVALID_DATA, "Say first what you want to hear: {} is all, from now on.")
    except (msgspec.MsgspecError, NotDone, KeyError, UnicodeError) as error:
        await _close(socket, WS_INVALID_DATA, str(error))
    except StoreError as error:
        await _close(socket, WS_INTERNAL_ERROR, str(error))
    except WebSocketDisconnect:
        return


async def _send_until_gone(socket: WebSocket, items: AsyncGenerator[StreamItem]) -> None:
    """Sends items until the client has gone."""

    async def send() -> None:
        async with aclosing(items):
            async for item in items:
                await socket.send_text(encode_stream_item(item))

    telling, leaving = asyncio.ensure_future(send()), asyncio.ensure_future(_wait_until_gone(socket))
    try:
        await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            telling.result()
    finally:
        with suppress(WebSocketDisconnect, TimeoutError, OSError):
            await cancel_and_wait(telling, leaving)


async def _wait_until_gone(socket: WebSocket) -> None:
    """Waits until the client has gone; its messages are ignored."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    with suppress(RuntimeError, WebSocketDisconnect):
        await socket.close(code, reason[:LONGEST_REASON].encode("ascii", "replace").decode())


def add_streams(api: FastAPI) -> None:
    api.get(STREAM_PATH, response_class=EventSourceResponse, summary="Hear the news as they come", responses=ERRORS)(
        _stream
    )
    api.websocket(SOCKET_PATH)(_socket)
