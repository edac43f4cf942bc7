"""A Slack on this machine: the Web API, Socket Mode with envelopes that must be confirmed, and people."""

import asyncio
import itertools
import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from tests.channels.fake_telegram import FakeMessage, Refused

BOT, APP = "xoxb-" + "fake", "xapp-" + "fake"


class FakeSocket:
    """One end of a socket in memory, for a world without sockets."""

    def __init__(self, slack: "FakeSlack") -> None:
        self._slack = slack
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()
        slack.sockets.append(self)
        self.put({"type": "hello"})
        for each in [*slack.unconfirmed.values()]:
            self.put(each)

    def put(self, envelope: Mapping[str, Any] | None) -> None:
        self._inbox.put_nowait(None if envelope is None else json.dumps(envelope))

    async def recv(self) -> str:
        got = await self._inbox.get()
        if got is None:
            raise EOFError
        return got

    async def send(self, message: str) -> None:
        self._slack.confirm(message)

    async def close(self) -> None:
        if self in self._slack.sockets:
            self._slack.sockets.remove(self)


class FakeSlack:
    token, app_token = BOT, APP

    def __init__(self) -> None:
        self.messages: list[FakeMessage] = []
        self.toasts: list[str] = []
        self.refuse_next: list[Refused] = []
        self.sockets: list[FakeSocket] = []
        self.unconfirmed: dict[str, Mapping[str, Any]] = {}
        self.opened = 0
        self.url = "ws://slack.test/socket"
        self._ids = itertools.count(1)

    async def open_socket(self, url: str) -> FakeSocket:
        assert url == self.url
        return FakeSocket(self)

    def confirm(self, message: str) -> None:
        self.unconfirmed.pop(json.loads(message)["envelope_id"])

    def refresh(self) -> None:
        """Ask every socket to be opened anew, as Slack does every few hours."""
        for each in self.sockets:
            each.put({"type": "disconnect", "reason": "refresh_requested"})

    def cut(self) -> None:
        for each in self.sockets:
            each.put(None)

    def _deliver(self, kind: str, payload: Mapping[str, Any]) -> None:
        envelope = {"envelope_id": f"e{next(self._ids)}", "type": kind, "payload": payload}
        self.unconfirmed[envelope["envelope_id"]] = self._last = envelope
        for each in self.sockets[:1]:
            each.put(envelope)

    def send_again(self) -> None:
        """Deliver the newest envelope a second time, as after a confirmation that was lost."""
        self._deliver(self._last["type"], self._last["payload"])

    def write(self, account: str, text: str, place: str = "", reply_to: str = "", **more: Any) -> None:
        """Deliver a text as Slack does: three characters as entities, and an address as a link."""
        text = re.sub(r"https?://[^\s\"]+", r"<\g<0>>", escape(text, quote=False))
        ts = f"17000000{next(self._ids):02}.000100"
        event = {"type": "message", "channel": place or account, "user": account, "text": text, "ts": ts, **more}
        event |= {"thread_ts": reply_to} if reply_to else {}
        self._deliver("events_api", {"type": "event_callback", "event": event})

    def press(self, account: str, message: FakeMessage, label: str, place: str = "") -> str:
        self.press_data(account, message, message.buttons[label], place)
        return message.buttons[label]

    def press_data(self, account: str, message: FakeMessage, data: str, text: str = "") -> None:
        payload = {
            "type": "block_actions",
            "user": {"id": account, "username": "somebody"},
            "channel": {"id": text or message.place},
            "container": {"type": "message", "message_ts": message.id},
            "actions": [{"value": data, "action_ts": f"17000000{next(self._ids):02}.000200"}],
        }
        self._deliver("interactive", payload)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._serve_socket(receive, send)
            return
        body = b""
        while True:
            result = await receive()
            body += result.get("body", b"")
            if not result.get("more_body"):
                break
        method, headers = scope["path"].strip("/"), dict(scope["headers"])
        status, more = 200, []
        try:
            answer = {"ok": True, **self._call(method, headers[b"authorization"].decode(), json.loads(body))}
        except Refused as no:
            answer = {"ok": False, "error": no.description}
            if no.code == 429:
                status, more = 429, [(b"retry-after", str(no.parameters["retry_after"]).encode())]
        await send({"type": "http.response.start", "status": status, "headers": more})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _serve_socket(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        socket = FakeSocket(self)

        async def forward() -> None:
            while True:
                await send({"type": "websocket.send", "text": await socket.recv()})

        forwarding = asyncio.ensure_future(forward())
        while (got := await receive())["type"] != "websocket.disconnect":
            self.confirm(got["text"])
        forwarding.cancel()
        await socket.close()

    def _call(self, method: str, key: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if key != f"Bearer {self.app_token if method == 'apps.connections.open' else self.token}":
            raise Refused(200, "invalid_auth")
        if self.refuse_next and method != "apps.connections.open":
            raise self.refuse_next.pop(0)
        if method == "apps.connections.open":
            self.opened += 1
            return {"url": self.url}
        if method == "auth.test":
            return {"user": "halter", "user_id": "U0BOT", "team": "T"}
        text, buttons = self._read_blocks(fields)
        match method:
            case "chat.postMessage":
                fake_message = FakeMessage(f"16000000{next(self._ids):02}.000300", fields["channel"], text, buttons)
                self.messages.append(fake_message)
                return {"ts": fake_message.id, "channel": fake_message.place}
            case "chat.update":
                for each in self.messages:
                    if (each.id, each.place) == (fields["ts"], fields["channel"]):
                        each.text, each.buttons, each.edits = text, buttons, each.edits + 1
                        return {"ts": each.id}
                raise Refused(200, "message_not_found")
            case "chat.postEphemeral":
                self.toasts.append(text)
                return {}
            case _:
                raise Refused(200, "unknown_method")

    def _read_blocks(self, fields: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        assert not fields["unfurl_links"]
        assert not fields["unfurl_media"]
        section, *actions = fields["blocks"]
        assert section["text"]["type"] == "plain_text"
        text = section["text"]["text"]
        if not text or len(text.encode("utf-16-le")) // 2 > 3000:
            raise Refused(200, "invalid_blocks")
        elements = [each for block in actions for each in block["elements"]]
        if any(len(each["value"]) > 2000 or len(each["text"]["text"]) > 75 for each in elements):
            raise Refused(200, "invalid_blocks")
        for entity, output in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
            text = text.replace(entity, output)
        return text, {each["text"]["text"]: each["value"] for each in elements}
