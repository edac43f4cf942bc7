"""A real server on a real socket, before a real store in which two agents have left a row of every kind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from halter.core.clock import SECOND, Clock
from halter.net.tls import make_tls_context
from halter.operations.actor import ROLES
from halter.runtime.feed import Bus
from halter.runtime.runtime import bind_policy
from halter.server.auth import Keyring, TokenFile, make_secret, make_token
from halter.server.listener import bind
from halter.server.middleware import ServerLimits
from halter.server.server import ServerExtras, serve_web
from tests.story.conftest import Scribe
from tests.story.test_desk import Office

QUICK = ServerLimits(check=SECOND // 50, stall=SECOND // 4, upload=SECOND // 4)


class GroundClock:
    """The store's time, which goes on when it is looked at, and for whoever sleeps; nobody really does for long."""

    def __init__(self, ground: Any) -> None:
        self._ground = ground

    def now(self) -> int:
        return self._ground.now()

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(min(duration / SECOND, 0.02))
        self._ground.time += duration


class House:
    """A server, the people who have a token for it, and what it told whoever runs it."""

    def __init__(self, office: Office, folder: Path, limits: ServerLimits, clock: Clock | None = None) -> None:
        self.office = office
        self.app = replace(office.app, clock=clock or GroundClock(office.ground))
        self.bus = Bus(self.app.store, self.app.clock)
        self.tokens = TokenFile(folder / "tokens.json")
        self.secrets: dict[str, str] = {}
        self.reports: list[str] = []
        for role in ROLES:
            self.let_in(role, role)
            self.let_in(f"{role}-of-mine", role, "mine")
        self.port = 0
        self.folders: dict[str, Path] = {}
        self._extras = ServerExtras(limits=limits, report=self.reports.append, pages=False, folders=self.folders)
        self._serving = self._start_serving()
        self.base = f"http://127.0.0.1:{self.port}"

    def _start_serving(self) -> "asyncio.Task[None]":
        listening = bind(port=self.port)
        self.port = listening.getsockname()[1]
        return asyncio.create_task(serve_web(self.app, listening, Keyring(self.tokens), self.bus, self._extras))

    def let_in(self, name: str, role: str, *agents: str) -> str:
        self.secrets[name] = make_secret()
        self.tokens.add(make_token(self.secrets[name], name, role, 0, agents))
        return self.secrets[name]

    def client(self, name: str = "", *, place: str = "127.0.0.1", **headers: str) -> httpx2.AsyncClient:
        """Speak as somebody, or as nobody, from an address of this machine."""
        values = {"Authorization": f"Bearer {self.secrets[name]}"} if name else {}
        wire = httpx2.AsyncHTTPTransport(local_address=place, verify=make_tls_context())
        return httpx2.AsyncClient(base_url=self.base, headers={**values, **headers}, timeout=30, transport=wire)

    async def restart(self) -> None:
        """End the server, and start it again where it was."""
        await self.end()
        self._serving = self._start_serving()

    async def end(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])


async def make_office(folder: Path) -> Office:
    office = Office(Scribe.on(str(folder / "halter.db"), folder))
    await office.furnish()
    office.app = replace(office.app, policy=await bind_policy(office.app.store, None, "ann"))
    return office


@pytest.fixture
def limits() -> ServerLimits:
    """What the server takes; a test may say otherwise."""
    return QUICK


@pytest.fixture
async def house(tmp_path: Path, limits: ServerLimits) -> AsyncIterator[House]:
    office = await make_office(tmp_path)
    made = House(office, tmp_path, limits)
    try:
        yield made
        assert not made.reports
    finally:
        await made.end()
        await office.ground.store.close()
