"""Telegram by long poll: the Bot API over one HTTP client, without an address that others must reach.

The token is part of every address, so errors of the HTTP library are not passed on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from halter.channels.channel import MAX_ANSWER_BYTES, TransportFailed
from halter.channels.messages import ChatMessage, ChatReply
from halter.core.clock import MINUTE, SECOND
from halter.core.text import clean, shorten
from halter.net.client import HttpClient, make_json_request
from halter.net.failures import HttpFailure

MAX_TEXT: Final = 4096
"""In UTF-16 units, as Telegram counts them."""
MAX_TOAST: Final = 200
POLL_SECONDS: Final = 50
CALL_SECONDS: Final = 20
CONFLICT_WAIT: Final = 10 * SECOND
"""Telegram keeps the poll of an ended process for about half a minute."""
UNCHANGED: Final = "message is not modified"
_CONFLICT: Final = 409
_TOO_MANY: Final = 429
_BROKEN: Final = 500
_UNAUTHORIZED: Final = (401, 404)
"""A wrong token is answered as unauthorized, a malformed one as not found."""


class _Account(msgspec.Struct, frozen=True):
    id: int
    is_bot: bool = False


class _Chat(msgspec.Struct, frozen=True):
    id: int


class _Message(msgspec.Struct, frozen=True):
    message_id: int
    chat: _Chat
    sender: _Account | None = msgspec.field(name="from", default=None)
    text: str = ""
    reply_to_message: "_Message | None" = None
    forward_origin: Mapping[str, Any] | None = None


class _Press(msgspec.Struct, frozen=True):
    id: str
    sender: _Account = msgspec.field(name="from")
    message: _Message | None = None
    data: str = ""


class _Update(msgspec.Struct, frozen=True):
    update_id: int
    message: _Message | None = None
    callback_query: _Press | None = None


class _Hints(msgspec.Struct, frozen=True):
    retry_after: float = 0


class _Answer(msgspec.Struct, frozen=True):
    ok: bool = False
    result: msgspec.Raw = msgspec.Raw(b"null")
    error_code: int = 0
    description: str = ""
    parameters: _Hints = _Hints()


class _Sent(msgspec.Struct, frozen=True):
    message_id: int


class _Bot(msgspec.Struct, frozen=True):
    username: str = ""


class _Webhook(msgspec.Struct, frozen=True):
    url: str = ""


class _UpdateId(msgspec.Struct, frozen=True):
    update_id: int


T = TypeVar("T")


def count_units(text: str) -> int:
    """Return the length of a text as Telegram counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


class TelegramTransport:
    name = "telegram"

    def __init__(self, reveal_token: Callable[[], str], url: str, connect: Callable[[], HttpClient]) -> None:
        self._reveal_token = reveal_token
        self._url = url.rstrip("/")
        self._connect = connect
        self._client: HttpClient | None = None
        self._offset = 0

    def can_send(self, text: str) -> bool:
        return count_units(text) <= MAX_TEXT

    async def probe(self) -> str:
        bot = await self._call("getMe", {}, _Bot)
        hook = await self._call("getWebhookInfo", {}, _Webhook)
        if hook.url:
            sentence = f"A webhook is set for @{bot.username}, so replies cannot be polled. Remove it (deleteWebhook)."
            raise TransportFailed(sentence, may_retry=False)
        return f"as @{bot.username}"

    async def receive(self, after: str, chats: frozenset[str]) -> Sequence[ChatReply]:
        """Return the replies of one long poll. Polling from an offset confirms the updates before it."""
        del chats
        self._offset = max(self._offset, int(after or -1) + 1)
        params = {"offset": self._offset, "timeout": POLL_SECONDS, "allowed_updates": ["message", "callback_query"]}
        updates = await self._call("getUpdates", params, list[msgspec.Raw], POLL_SECONDS + CALL_SECONDS)
        replies: list[ChatReply] = []
        for raw in updates:
            update_id = msgspec.json.decode(raw, type=_UpdateId).update_id
            if update_id >= self._offset and (reply := _read_update(raw)) is not None:
                replies.append(reply)
            self._offset = max(self._offset, update_id + 1)
        return replies

    async def send(self, chat: str, message: ChatMessage) -> str:
        """Send plain text: nothing in it is markup, and no link in it is fetched by Telegram."""
        keyboard = [[{"text": button.label, "callback_data": button.data} for button in message.buttons]]
        start, end = (count_units(message.text[:index]) for index in message.verbatim_span)
        params = {
            "chat_id": int(chat),
            "text": message.text,
            "entities": [{"type": "pre", "offset": start, "length": end - start}] if end > start else [],
            "link_preview_options": {"is_disabled": True},
            "disable_notification": message.silent,
            **({"reply_markup": {"inline_keyboard": keyboard}} if message.buttons else {}),
        }
        return str((await self._call("sendMessage", params, _Sent)).message_id)

    async def close_message(self, chat: str, message: str, text: str) -> None:
        params = {"chat_id": int(chat), "message_id": int(message), "text": clean(text)}
        try:
            await self._call("editMessageText", {**params, "link_preview_options": {"is_disabled": True}}, msgspec.Raw)
        except TransportFailed as failed:
            if UNCHANGED not in str(failed):
                raise

    async def respond(self, reply: ChatReply, text: str) -> None:
        """Answer a press in a pop-up, a text with a message."""
        shortened_text = clean(text)
        if reply.handle:
            toast = {
                "callback_query_id": reply.handle,
                "text": shorten(shortened_text, MAX_TOAST - 1),
                "show_alert": True,
            }
            await self._call("answerCallbackQuery", toast, msgspec.Raw)
            if len(shortened_text) < MAX_TOAST:
                return
        while not self.can_send(shortened_text):
            shortened_text = f"{shortened_text[: len(shortened_text) * 3 // 4]}…"
        await self.send(reply.chat, ChatMessage(shortened_text))

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _call(self, method: str, params: Mapping[str, Any], kind: type[T], seconds: int = CALL_SECONDS) -> T:
        """Call a method and decode its result."""
        self._client = self._client or self._connect()
        address = f"{self._url}/bot{self._reveal_token()}/{method}"
        try:
            request = make_json_request("POST", address, params)
            response = await self._client.fetch(request, max_bytes=MAX_ANSWER_BYTES, max_wait=seconds)
            answer = msgspec.json.decode(response.body, type=_Answer)
            if answer.ok:
                return msgspec.json.decode(answer.result, type=kind)
        except HttpFailure as failure:
            sentence = f"Telegram cannot be reached ({failure.reason}). Retrying."
            raise TransportFailed(sentence, may_retry=True) from None
        except msgspec.DecodeError:
            sentence = f"{self._url} does not answer like the Bot API. Check `channels.telegram.url`."
            raise TransportFailed(sentence, may_retry=True) from None
        raise _make_failure(method, answer)


def _make_failure(method: str, answer: _Answer) -> TransportFailed:
    text = shorten(clean(answer.description), 200)
    match answer.error_code:
        case code if code == _CONFLICT:
            sentence = (
                "Another program polls this Telegram bot, or a webhook is set for it. Stop it, or use a separate bot. "
                f"Retrying. ({text})"
            )
            return TransportFailed(sentence, may_retry=True, retry_after=CONFLICT_WAIT)
        case code if code == _TOO_MANY:
            wait = int(answer.parameters.retry_after * SECOND)
            return TransportFailed("Telegram rate limit reached.", may_retry=True, retry_after=max(SECOND, wait))
        case code if code in _UNAUTHORIZED:
            sentence = f"Telegram rejects the bot's token ({code}). Check the secret of `channels.telegram.token`."
            return TransportFailed(sentence, may_retry=True, retry_after=MINUTE)
        case code:
            return TransportFailed(f"Telegram refused {method}: {code} {text}", may_retry=code >= _BROKEN)


def _read_update(raw: msgspec.Raw) -> ChatReply | None:
    """Parse an update; None for kinds that are not replies."""
    try:
        update = msgspec.json.decode(raw, type=_Update)
    except msgspec.DecodeError:
        return None
    mark, press, message = str(update.update_id), update.callback_query, update.message
    if press is not None and press.message is not None:
        return ChatReply(
            mark=mark,
            account=str(press.sender.id),
            chat=str(press.message.chat.id),
            message=str(press.message.message_id),
            press=press.data,
            handle=press.id,
        )
    if message is None or message.sender is None or message.sender.is_bot:
        return None
    original = message.reply_to_message
    return ChatReply(
        mark=mark,
        account=str(message.sender.id),
        chat=str(message.chat.id),
        message="" if original is None else str(original.message_id),
        text=message.text,
        forwarded=message.forward_origin is not None,
    )
