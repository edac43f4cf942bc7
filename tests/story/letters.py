"""Servers that letters are sent to, with good manners and bad ones."""

import asyncio
import ssl
from collections.abc import Callable
from email import message_from_bytes
from email.message import Message
from email.policy import default
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from halter.core.notifications import OutgoingNotification

LETTER = OutgoingNotification(
    id="n1", subject="Three contracts lapse", text="Look at them.\n", agent="night-watch", session="s1", about="finding"
)
PASSWORD = "mAdeUpPassw0rdThatOpensNothing"


class Postbox:
    """A mail server. Each letter is answered with the next of its answers; after the last, all are taken.

    An empty answer breaks the connection off instead, when the letter has been taken already.
    """

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.answers: list[str] = []
        self.refused: dict[str, str] = {}
        self.logins: list[bytes] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def open(self, port: int = 0, *, tls: ssl.SSLContext | None = None, **more: Any) -> None:
        loop = asyncio.get_running_loop()
        made: Callable[[], SMTP] = lambda: SMTP(self, hostname="mail.test", **more)  # noqa: E731
        self._server = await loop.create_server(made, "127.0.0.1", port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def authenticate(self, server: SMTP, session: Session, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        self.logins.append(data.password)
        return AuthResult(success=data.password == PASSWORD.encode(), handled=False)

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refused:
            return self.refused[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        answer = self.answers.pop(0) if self.answers else "250 OK"
        if not answer or answer.startswith("250"):
            self.got.append(message_from_bytes(envelope.content, policy=default))
        if not answer:
            assert server.transport is not None
            server.transport.abort()
        return answer or "250 OK"


class Posted:
    """What one request to a server held."""

    def __init__(self, line: str, headers: dict[str, str], body: bytes) -> None:
        self.line = line
        self.headers = headers
        self.body = body


class Listener:
    """A web server that notes what it is sent, and answers with the next of its answers, the last again and again."""

    def __init__(self) -> None:
        self.got: list[Posted] = []
        self.answers = [b"HTTP/1.1 204 No Content\r\n\r\n"]
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.strip().splitlines()
        headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.got.append(Posted(line, headers, body))
        writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        await writer.drain()
        writer.close()
