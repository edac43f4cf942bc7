"""Slack by Socket Mode: your own app opens a WebSocket to Slack, so Slack need not reach Halter.

Each envelope is confirmed when it is read: after three seconds without that, Slack sends it again.
"""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from halter.channels.channel import MAX_ANSWER_BYTES, TransportFailed, make_rate_limit_failure
from halter.channels.messages import ChatMessage, ChatReply
from halter.core.clock import MINUTE, SECOND
from halter.core.text import clean, shorten
from halter.net.client import TOO_MANY_REQUESTS, HttpClient, make_json_request
from halter.net.failures import HttpFailure

MAX_TEXT: Final = 3000
"""Maximum number of characters of one block of text."""
MAX_BUTTON: Final = 75
POLL_SECONDS: Final = 25
CALL_SECONDS: Final = 20
MAX_REMEMBERED_IDS: Final = 1000
_WRONG_KEY: Final = ("invalid_auth", "not_authed", "account_inactive", "token_revoked", "not_allowed_token_type")
_LATER: Final = ("ratelimited", "internal_error", "fatal_error", "service_unavailable", "request_timeout")
_LINK: Final = re.compile(r"<(?:[a-z]+:[^<>|]*\|([^<>]+)|([a-z]+:[^<>|]+))>")
"""A link as Slack delivers it: the address, and the typed text if that differs."""
_GONE: Final = ("message_not_found", "cant_update_message")


class Socket(Protocol):
    async def recv(self) -> str | bytes: ...

    async def send(self, message: str) -> None: ...

    async def close(self) -> None: ...


OpenSocket = Callable[[str], Awaitable[Socket]]


async def open_websocket(url: str) -> Socket:
    from websockets.asyncio.client import connect

    return await connect(url, open_timeout=CALL_SECONDS, proxy=None)


class _Named(msgspec.Struct, frozen=True):
    id: str = ""


class _Action(msgspec.Struct, frozen=True):
    value: str = ""
    action_ts: str = ""


class _Message(msgspec.Struct, frozen=True):
    type: str = ""
    subtype: str = ""
    channel: str = ""
    user: str = ""
    bot_id: str = ""
    text: str = ""
    ts: str = ""
    thread_ts: str = ""


class _Payload(msgspec.Struct, frozen=True):
    type: str = ""
    event: _Message = _Message()
    user: _Named = _Named()
    channel: _Named = _Named()
    actions: tuple[_Action, ...] = ()
    container: Mapping[str, Any] = {}


class _Envelope(msgspec.Struct, frozen=True):
    type: str = ""
    envelope_id: str = ""
    payload: _Payload = _Payload()


class _Bare(msgspec.Struct, frozen=True):
    type: str = ""
    envelope_id: str = ""


class _Answer(msgspec.Struct, frozen=True):
    ok: bool = False
    error: str = ""
    url: str = ""
    ts: str = ""
    user: str = ""


class SlackTransport:
    name = "slack"

    def __init__(
        self,
        reveal_token: Callable[[], str],
        reveal_app_token: Callable[[], str],
        url: str,
        connect: Callable[[], HttpClient],
        open_socket: OpenSocket = open_websocket,
    ) -> None:
        self._reveal_token = reveal_token
        self._reveal_app_token = reveal_app_token
        self._url = url.rstrip("/")
        self._connect = connect
        self._open_socket = open_socket
        self._client: HttpClient | None = None
        self._socket: Socket | None = None
        self._recent_ids: deque[str] = deque(maxlen=MAX_REMEMBERED_IDS)

    def can_send(self, text: str) -> bool:
        return len(escape_entities(text).encode("utf-16-le", "surrogatepass")) // 2 <= MAX_TEXT

    async def probe(self) -> str:
        account = await self._call("auth.test", {}, self._reveal_token())
        await self._call("apps.connections.open", {}, self._reveal_app_token())
        return f"as {clean(account.user) or 'its bot'}"

    async def receive(self, after: str, chats: frozenset[str]) -> Sequence[ChatReply]:
        """Return the next reply, if one arrives in time. After Slack closes the socket, the next call reopens it."""
        del after, chats
        from websockets.exceptions import WebSocketException

        try:
            socket = self._socket = self._socket or await self._open()
            async with asyncio.timeout(POLL_SECONDS):
                return await self._read(socket)
        except TimeoutError:
            return []
        except (OSError, WebSocketException, EOFError) as error:
            await self._hang_up()
            sentence = f"Slack closed the connection ({type(error).__name__}). Reconnecting."
            raise TransportFailed(sentence, may_retry=True, retry_after=SECOND) from None

    async def _open(self) -> Socket:
        connection = await self._call("apps.connections.open", {}, self._reveal_app_token())
        return await self._open_socket(connection.url)

    async def _read(self, socket: Socket) -> Sequence[ChatReply]:
        raw = await socket.recv()
        try:
            header = msgspec.json.decode(raw, type=_Bare)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return []
        if header.type == "disconnect":
            await self._hang_up()
            return []
        if header.envelope_id:
            await socket.send(msgspec.json.encode({"envelope_id": header.envelope_id}).decode())
        reply = _read_envelope(raw)
        if reply is None or reply.handle in self._recent_ids:
            return []
        self._recent_ids.append(reply.handle)
        return [reply]

    async def send(self, chat: str, message: ChatMessage) -> str:
        blocks: list[Mapping[str, Any]] = [_make_section(message.text)]
        buttons = [
            {
                "type": "button",
                "text": {"type": "plain_text", "text": shorten(button.label, MAX_BUTTON - 1)},
                "value": button.data,
                "action_id": button.data.partition(":")[0],
            }
            for button in message.buttons
        ]
        blocks += [{"type": "actions", "elements": buttons}] if buttons else []
        return (await self._write("chat.postMessage", {"channel": chat}, blocks)).ts

    async def close_message(self, chat: str, message: str, text: str) -> None:
        try:
            await self._write("chat.update", {"channel": chat, "ts": message}, [_make_section(clean(text))])
        except TransportFailed as failed:
            if not any(code in str(failed) for code in _GONE):
                raise

    async def respond(self, reply: ChatReply, text: str) -> None:
        """Answer a press visibly to that person only, and a text in its chat."""
        shortened_text = clean(text)
        while not self.can_send(shortened_text):
            shortened_text = f"{shortened_text[: len(shortened_text) * 3 // 4]}…"
        chat, blocks = {"channel": reply.chat}, [_make_section(shortened_text)]
        if reply.press:
            await self._write("chat.postEphemeral", {**chat, "user": reply.account}, blocks)
        else:
            await self._write("chat.postMessage", chat, blocks)

    async def close(self) -> None:
        await self._hang_up()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _hang_up(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _write(self, method: str, target: Mapping[str, str], blocks: Sequence[Mapping[str, Any]]) -> _Answer:
        """Send plain text: none of it is markup or a mention, and no link is fetched."""
        content = {"text": "Halter", "blocks": blocks, "unfurl_links": False, "unfurl_media": False}
        return await self._call(method, {**target, **content}, self._reveal_token())

    async def _call(self, method: str, params: Mapping[str, Any], token: str) -> _Answer:
        self._client = self._client or self._connect()
        headers = {"Authorization": f"Bearer {token}"}
        try:
            request = make_json_request("POST", f"{self._url}/{method}", params, headers)
            response = await self._client.fetch(request, max_bytes=MAX_ANSWER_BYTES, max_wait=CALL_SECONDS)
            if response.status == TOO_MANY_REQUESTS:
                raise make_rate_limit_failure("Slack", response.headers)
            answer = msgspec.json.decode(response.body, type=_Answer)
        except HttpFailure as failure:
            sentence = f"Slack cannot be reached ({failure.reason}). Retrying."
            raise TransportFailed(sentence, may_retry=True) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            sentence = f"{self._url} does not answer like Slack. Check `channels.slack.url`."
            raise TransportFailed(sentence, may_retry=True) from None
        if not answer.ok:
            raise _make_failure(method, answer.error)
        return answer


def _make_section(text: str) -> Mapping[str, Any]:
    return {"type": "section", "text": {"type": "plain_text", "text": escape_entities(text), "emoji": False}}


def escape_entities(text: str) -> str:
    """Escape the characters of Slack's entities: otherwise a text with `&lt;` would be shown as `<`."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def read_typed(text: str) -> str:
    """Restore the typed text: Slack delivers addresses as links, and three characters as entities."""
    typed_text = _LINK.sub(lambda link: link[1] or link[2], text)
    return typed_text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def _make_failure(method: str, error: str) -> TransportFailed:
    text = shorten(clean(error), 100)
    if error in _WRONG_KEY:
        sentence = f"Slack rejects a token ({text}). Check the secrets of `channels.slack.token` and `app_token`."
        return TransportFailed(sentence, may_retry=True, retry_after=MINUTE)
    return TransportFailed(f"Slack refused {method}: {text}", may_retry=error in _LATER)


def _read_envelope(raw: str | bytes) -> ChatReply | None:
    """Parse an envelope; None for everything that is not a reply of a person."""
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    payload, message = envelope.payload, envelope.payload.event
    if envelope.type == "interactive" and payload.type == "block_actions" and payload.actions:
        action = payload.actions[0]
        return ChatReply(
            mark=action.action_ts,
            account=payload.user.id,
            chat=payload.channel.id,
            message=str(payload.container.get("message_ts", "")),
            press=action.value,
            handle=f"{payload.user.id}/{action.action_ts}",
        )
    if (
        envelope.type != "events_api"
        or message.type != "message"
        or message.subtype
        or message.bot_id
        or not message.user
    ):
        return None
    return ChatReply(
        mark=message.ts,
        account=message.user,
        chat=message.channel,
        message=message.thread_ts if message.thread_ts != message.ts else "",
        text=read_typed(message.text),
        handle=f"{message.user}/{message.ts}",
    )
