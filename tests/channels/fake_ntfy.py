"""An ntfy on this machine: topics with a cache, streams of JSON lines, and people with phones."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from tests.channels.fake_telegram import FakeMessage, Refused

TOKEN = "tk_" + "fakentfytoken"


class FakeNtfy:
    token = TOKEN

    def __init__(self) -> None:
        self.messages: list[FakeMessage] = []
        self.refuse_next: list[Refused] = []
        self.streams = 0
        self._cache: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._listening: set[asyncio.Event] = set()

    def write(self, account: str, text: str, **_: Any) -> None:
        """A person publishes a text to their topic of answers."""
        self._keep(f"{account}-re", text)

    def press(self, account: str, message: FakeMessage, label: str) -> str:
        """A person presses a button: their phone posts what it carries."""
        data = message.buttons[label]
        self._keep(f"{account}-re", data)
        return data

    def press_data(self, account: str, message: FakeMessage, data: str) -> None:
        del message
        self._keep(f"{account}-re", data)

    def send_again(self) -> None:
        """A phone posts the newest answer again."""
        self._keep(self._cache[-1]["topic"], self._cache[-1]["message"])

    def _keep(self, topic: str, message: str) -> dict[str, Any]:
        values = {"id": f"m{next(self._ids):04}", "time": 1, "event": "message", "topic": topic, "message": message}
        self._cache.append(values)
        for event in self._listening:
            event.set()
        return values

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        try:
            self._admit(headers)
            if scope["path"] in ("/v1/health", "/v1/account"):
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b'{"healthy":true}'})
                return
            if scope["method"] == "GET":
                await self._stream(scope, receive, send)
                return
            body = b""
            while True:
                result = await receive()
                body += result.get("body", b"")
                if not result.get("more_body"):
                    break
            status, answer = 200, self._publish(json.loads(body))
        except Refused as no:
            status, answer = no.code, {"code": no.code * 100 + 1, "http": no.code, "error": no.description}
            wait = str(no.parameters.get("retry_after", "")).encode()
        more = [(b"retry-after", wait)] if status == 429 else []
        data = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": status, "headers": more})
        await send({"type": "http.response.body", "body": data})

    def _admit(self, headers: Mapping[bytes, bytes]) -> None:
        if headers.get(b"authorization") != f"Bearer {self.token}".encode():
            raise Refused(403, "forbidden")

    def _publish(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.refuse_next:
            raise self.refuse_next.pop(0)
        if len(fields["message"].encode()) > 4096:
            raise Refused(400, "it would become an attachment")
        actions = fields.get("actions", ())
        if len(actions) > 3:
            raise Refused(400, "invalid request: actions invalid")
        for each in actions:
            assert each["url"].endswith(f"/{fields['topic']}-re")
        buttons = {each["label"]: each["body"] for each in actions}
        for each in self.messages:
            if each.id == fields.get("sequence_id"):
                each.text, each.buttons, each.edits = fields["message"], buttons, each.edits + 1
                return {"id": each.id, "event": "message"}
        fake_message = FakeMessage(f"n{next(self._ids):04}", fields["topic"], fields["message"], buttons)
        self.messages.append(fake_message)
        return {"id": fake_message.id, "event": "message", "topic": fake_message.place}

    async def _stream(self, scope: Any, receive: Any, send: Any) -> None:
        """Stream what the cache has after an id, and what comes; the caller hangs up."""
        self.streams += 1
        topics = scope["path"].split("/")[1].split(",")
        since = parse_qs(scope["query_string"].decode())["since"][0]
        results = [each["id"] for each in self._cache]
        at = results.index(since) + 1 if since in results else 0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self._line(send, {"id": "o", "time": 1, "event": "open", "topic": ",".join(topics)})
        event = asyncio.Event()
        self._listening.add(event)
        task = asyncio.ensure_future(self._hung_up(receive, event))
        try:
            while not task.done():
                for each in self._cache[at:]:
                    if each["topic"] in topics:
                        await self._line(send, each)
                at = len(self._cache)
                with suppress(TimeoutError):
                    async with asyncio.timeout(45):
                        await event.wait()
                event.clear()
                await self._line(send, {"id": "k", "time": 1, "event": "keepalive", "topic": topics[0]})
        finally:
            task.cancel()
            self._listening.discard(event)

    async def _hung_up(self, receive: Any, event: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        event.set()

    async def _line(self, send: Any, event: Mapping[str, Any]) -> None:
        await send({"type": "http.response.body", "body": json.dumps(event).encode() + b"\n", "more_body": True})
