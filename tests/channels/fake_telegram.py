"""A Telegram on this machine: the Bot API as an ASGI application, and people with phones.

It keeps to what the real one does: one poller for each token, offsets that confirm, limits on texts and buttons,
presses that must be answered, and refusals in its own words.
"""

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = "123456:" + "fake-telegram-token"
BOT = {"id": 99, "is_bot": True}


@dataclass
class FakeMessage:
    id: str
    place: str
    text: str
    buttons: dict[str, str] = field(default_factory=dict[str, str])
    edits: int = 0


class Refused(Exception):
    def __init__(self, code: int, description: str, **parameters: Any) -> None:
        super().__init__(description)
        self.code, self.description, self.parameters = code, description, parameters


class FakeTelegram:
    token = TOKEN

    def __init__(self) -> None:
        self.messages: list[FakeMessage] = []
        self.toasts: list[str] = []
        self.polls = 0
        self.refuse_next: list[Refused] = []
        self.blocked: set[str] = set()
        self.webhook = False
        self.previews: list[bool] = []
        self.silent: list[bool] = []
        self._updates: list[dict[str, Any]] = []
        self._ids = itertools.count(1000)
        self._message_ids = itertools.count(1)
        self._handles: set[str] = set()
        self._arrived = asyncio.Event()
        self._poller: asyncio.Event | None = None

    @property
    def unread(self) -> int:
        return len(self._updates)

    def write(self, account: str, text: str, place: str = "", reply_to: str = "", **more: Any) -> None:
        """A person sends a text, perhaps in reply to a message."""
        message: dict[str, Any] = {
            "message_id": next(self._message_ids),
            "from": {"id": int(account), "is_bot": False, "first_name": "A", "username": "somebody"},
            "chat": {"id": int(place or account), "type": "private"},
            "date": 1,
            "text": text,
            **more,
        }
        if reply_to:
            message["reply_to_message"] = {"message_id": int(reply_to), "chat": message["chat"], "from": BOT}
        self.arrive({"message": message})

    def press(self, account: str, message: FakeMessage, label: str, place: str = "") -> str:
        """A person presses a button; what it carries is returned, to be sent again."""
        data = message.buttons[label]
        self.press_data(account, message, data, place)
        return data

    def press_data(self, account: str, message: FakeMessage, data: str, output: str = "") -> None:
        handle = str(next(self._ids))
        self._handles.add(handle)
        chat = {"id": int(output or message.place), "type": "private"}
        values = {"message_id": int(message.id), "chat": chat, "from": BOT, "text": message.text}
        self.arrive({"callback_query": {"id": handle, "from": {"id": int(account)}, "message": values, "data": data}})

    def send_again(self) -> None:
        """Deliver the newest update a second time, as after an answer that was lost."""
        self._arrived.set()
        self._updates.append(self._last)

    def arrive(self, update: Mapping[str, Any]) -> None:
        self._last = {"update_id": next(self._ids), **update}
        self._updates.append(self._last)
        self._arrived.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        _, bot, method = scope["path"].split("/")
        try:
            self._admit(bot, method)
            result = await getattr(self, f"_{method}")(json.loads(body))
            status, answer = 200, {"ok": True, "result": result}
        except Refused as no:
            status, answer = no.code, {"ok": False, "error_code": no.code, "description": no.description}
            answer |= {"parameters": no.parameters} if no.parameters else {}
        data = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def _admit(self, bot: str, method: str) -> None:
        if bot != f"bot{self.token}":
            raise Refused(401, "Unauthorized")
        if self.refuse_next and method != "getUpdates":
            raise self.refuse_next.pop(0)

    async def _getMe(self, _: Mapping[str, Any]) -> Any:  # noqa: N802 As the Bot API names it.
        return {**BOT, "first_name": "Halter", "username": "halter_bot"}

    async def _getWebhookInfo(self, _: Mapping[str, Any]) -> Any:  # noqa: N802 As the Bot API names it.
        return {"url": "https://other.test" if self.webhook else "", "pending_update_count": 0}

    async def _getUpdates(self, fields: Mapping[str, Any]) -> Any:  # noqa: N802 As the Bot API names it.
        self.polls += 1
        if self.webhook:
            raise Refused(409, "Conflict: can't use getUpdates method while webhook is active")
        if self._poller is not None:
            self._poller.set()
        self._poller = terminated = asyncio.Event()
        self._updates = [each for each in self._updates if each["update_id"] >= fields["offset"]]
        if not self._updates:
            self._arrived.clear()
            waits = [asyncio.ensure_future(each.wait()) for each in (self._arrived, terminated)]
            await asyncio.wait(waits, timeout=fields["timeout"], return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
        if terminated.is_set():
            raise Refused(409, "Conflict: terminated by other getUpdates request; make sure that only one runs")
        self._poller = None
        return self._updates[:100]

    def poll_from_elsewhere(self) -> None:
        """Another program polls with the same token: the one that waits is terminated."""
        if self._poller is not None:
            self._poller.set()

    async def _sendMessage(self, fields: Mapping[str, Any]) -> Any:  # noqa: N802 As the Bot API names it.
        if str(fields["chat_id"]) in self.blocked:
            raise Refused(403, "Forbidden: bot was blocked by the user")
        self._check_text(fields["text"])
        self.previews.append(not fields["link_preview_options"]["is_disabled"])
        self.silent.append(fields["disable_notification"])
        buttons: dict[str, str] = {}
        for row in fields.get("reply_markup", {}).get("inline_keyboard", ()):
            for each in row:
                if not 1 <= len(each["callback_data"].encode()) <= 64:
                    raise Refused(400, "Bad Request: BUTTON_DATA_INVALID")
                buttons[each["text"]] = each["callback_data"]
        fake_message = FakeMessage(str(next(self._message_ids)), str(fields["chat_id"]), fields["text"], buttons)
        self.messages.append(fake_message)
        return {
            "message_id": int(fake_message.id),
            "chat": {"id": fields["chat_id"]},
            "date": 1,
            "text": fake_message.text,
        }

    def _check_text(self, text: str) -> None:
        if not text or len(text.encode("utf-16-le")) // 2 > 4096:
            raise Refused(400, "Bad Request: message is too long")

    async def _editMessageText(self, fields: Mapping[str, Any]) -> Any:  # noqa: N802 As the Bot API names it.
        self._check_text(fields["text"])
        for each in self.messages:
            if (each.id, each.place) == (str(fields["message_id"]), str(fields["chat_id"])):
                if each.text == fields["text"]:
                    raise Refused(400, "Bad Request: message is not modified")
                each.text, each.buttons, each.edits = fields["text"], {}, each.edits + 1
                return True
        raise Refused(400, "Bad Request: message to edit not found")

    async def _answerCallbackQuery(self, fields: Mapping[str, Any]) -> Any:  # noqa: N802 As the Bot API names it.
        if fields["callback_query_id"] not in self._handles:
            raise Refused(400, "Bad Request: query is too old and response timeout expired or query ID is invalid")
        self._handles.discard(fields["callback_query_id"])
        if len(fields["text"]) > 200:
            raise Refused(400, "Bad Request: MESSAGE_TOO_LONG")
        self.toasts.append(fields["text"])
        return True
