"""ntfy with one topic for questions and one for answers per person.

The name of a topic is a secret that pairing makes, and identifies the person: messages in the topic of answers are
theirs. A button posts its token there. Both topics are on the ntfy server, which need not reach Halter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.channels.channel import MAX_ANSWER_BYTES, TransportFailed, make_rate_limit_failure
from halter.channels.messages import BUTTON_PATTERN, ChatMessage, ChatReply
from halter.core.clock import MINUTE
from halter.core.text import clean, shorten
from halter.net.client import TOO_MANY_REQUESTS, HttpClient, HttpRequest, make_json_request
from halter.net.failures import HttpFailure

MAX_BYTES: Final = 4096
"""A longer message becomes a file, which a phone does not show."""
MAX_BUTTONS: Final = 3
REPLIES: Final = "-re"
"""Suffix of the topic of answers, after the name of the topic of questions."""
SINCE: Final = "10m"
"""How far back the first read goes: the lifetime of a pairing code."""
POLL_SECONDS: Final = 25
IDLE_SECONDS: Final = 2
"""Polling interval for the first paired person."""
CALL_SECONDS: Final = 20
_DENIED: Final = (401, 403)
_BROKEN: Final = 500
_ERROR: Final = 400


class _Event(msgspec.Struct, frozen=True):
    id: str
    event: str
    topic: str = ""
    message: str = ""


class _Sent(msgspec.Struct, frozen=True):
    id: str


class _Health(msgspec.Struct, frozen=True):
    healthy: bool = False


class _Problem(msgspec.Struct, frozen=True):
    error: str = ""


class NtfyTransport:
    name = "ntfy"

    def __init__(self, url: str, reveal_token: Callable[[], str] | None, connect: Callable[[], HttpClient]) -> None:
        self._url = url.rstrip("/")
        self._reveal_token = reveal_token
        self._connect = connect
        self._client: HttpClient | None = None
        self._last_id = ""

    def can_send(self, text: str) -> bool:
        return len(text.encode("utf-8", "replace")) <= MAX_BYTES

    async def probe(self) -> str:
        """Check the server's health, and with a token the account."""
        health = await self._get("v1/health")
        try:
            healthy = msgspec.json.decode(health, type=_Health).healthy
        except msgspec.DecodeError:
            healthy = False
        if not healthy:
            sentence = f"{self._url} does not answer like ntfy. Check `channels.ntfy.url`."
            raise TransportFailed(sentence, may_retry=True)
        if self._reveal_token is None:
            return "without a token"
        await self._get("v1/account")
        return "with its token"

    async def _get(self, path: str) -> bytes:
        return await self._fetch(HttpRequest("GET", f"{self._url}/{path}", self._headers()))

    async def _fetch(self, request: HttpRequest) -> bytes:
        try:
            answer = await self._open().fetch(request, max_bytes=MAX_ANSWER_BYTES, max_wait=CALL_SECONDS)
        except HttpFailure as failure:
            raise _make_outage(failure) from None
        if answer.status >= _ERROR:
            raise _make_failure(answer.status, answer.headers, answer.body)
        return answer.body

    async def receive(self, after: str, chats: frozenset[str]) -> Sequence[ChatReply]:
        """Read the topics of answers until a reply arrives or the poll times out."""
        if not chats:
            await asyncio.sleep(IDLE_SECONDS)
            return []
        topics = ",".join(f"{chat}{REPLIES}" for chat in sorted(chats))
        address = f"{self._url}/{topics}/json?since={self._last_id or after or SINCE}"
        replies: list[ChatReply] = []
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._read_lines(address, replies)
        except TimeoutError:
            pass
        return replies

    async def _read_lines(self, address: str, replies: list[ChatReply]) -> None:
        """Add the next reply from the stream to `replies`."""
        try:
            async with self._open().open(HttpRequest("GET", address, self._headers())) as response:
                if response.status >= _ERROR:
                    raise _make_failure(response.status, response.headers, await response.read(MAX_ANSWER_BYTES))
                async for line in response.lines(MAX_ANSWER_BYTES):
                    event = _read_event(line)
                    if event is None:
                        continue
                    self._last_id = event.id
                    replies.append(_make_reply(event))
                    return
        except HttpFailure as failure:
            raise _make_outage(failure) from None

    async def send(self, chat: str, message: ChatMessage) -> str:
        buttons = [
            {
                "action": "http",
                "label": button.label,
                "url": f"{self._url}/{chat}{REPLIES}",
                "method": "POST",
                "body": button.data,
                "clear": True,
            }
            for button in message.buttons[:MAX_BUTTONS]
        ]
        quiet = {"priority": 2} if message.silent else {}
        return await self._publish(
            {"topic": chat, "title": "Halter", "message": message.text, "actions": buttons, **quiet}
        )

    async def close_message(self, chat: str, message: str, text: str) -> None:
        """Publish the outcome in place of a message; a server before 2.16 shows it as a second message."""
        await self._publish(
            {"topic": chat, "title": "Halter", "message": clean(text), "sequence_id": message, "priority": 2}
        )

    async def respond(self, reply: ChatReply, text: str) -> None:
        shortened_text = clean(text)
        while not self.can_send(shortened_text):
            shortened_text = f"{shortened_text[: len(shortened_text) * 3 // 4]}…"
        await self._publish({"topic": reply.chat, "title": "Halter", "message": shortened_text, "priority": 2})

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _publish(self, content: Mapping[str, Any]) -> str:
        body = await self._fetch(make_json_request("POST", self._url, content, self._headers()))
        try:
            return msgspec.json.decode(body, type=_Sent).id
        except msgspec.DecodeError:
            sentence = f"{self._url} does not answer like ntfy. Check `channels.ntfy.url`."
            raise TransportFailed(sentence, may_retry=True) from None

    def _open(self) -> HttpClient:
        self._client = self._client or self._connect()
        return self._client

    def _headers(self) -> Mapping[str, str]:
        return {} if self._reveal_token is None else {"Authorization": f"Bearer {self._reveal_token()}"}


def _make_outage(failure: HttpFailure) -> TransportFailed:
    return TransportFailed(f"ntfy cannot be reached ({failure.reason}). Retrying.", may_retry=True)


def _make_failure(status: int, headers: Mapping[str, str], body: bytes) -> TransportFailed:
    try:
        text = shorten(clean(msgspec.json.decode(body, type=_Problem).error), 200)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = ""
    match status:
        case code if code == TOO_MANY_REQUESTS:
            return make_rate_limit_failure("ntfy", headers)
        case code if code in _DENIED:
            sentence = f"ntfy denies access ({code} {text}). Check `channels.ntfy.token` and the rights on topics."
            return TransportFailed(sentence, may_retry=True, retry_after=MINUTE)
        case code:
            return TransportFailed(f"ntfy refused a message: {code} {text}", may_retry=code >= _BROKEN)


def _read_event(line: bytes) -> _Event | None:
    """Parse a line of the stream; None unless it is a message in a topic of answers."""
    try:
        event = msgspec.json.decode(line, type=_Event)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return event if event.event == "message" and event.topic.endswith(REPLIES) else None


def _make_reply(event: _Event) -> ChatReply:
    chat, text = event.topic.removesuffix(REPLIES), event.message.strip()
    press = text if BUTTON_PATTERN.fullmatch(text) else ""
    return ChatReply(mark=event.id, account=chat, chat=chat, press=press, text="" if press else text)
