"""The proxy over a real store and real sockets, in front of a provider on this machine that keeps a bill."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import SystemClock
from halter.core.events import AnyEvent
from halter.core.ids import session_stream
from halter.core.money import BudgetRow
from halter.core.ports import Query
from halter.core.rows import HoldRow, SessionRow
from halter.present.events import summarize_event
from halter.proxy.keys import KeyFile, KeyLimits, KeyRing, make_key_secret, make_virtual_key
from halter.proxy.proxy import Proxy, find_upstreams, open_proxy
from halter.runtime.runtime import Runtime, open_runtime
from halter.server.listener import bind, format_address, serve_asgi
from halter.settings import Settings, find_keys_file
from halter_drills.provider import ListedProvider


@dataclass
class Place:
    """A proxy that serves, its store, and its provider."""

    provider: ListedProvider
    settings: Settings
    keys: KeyFile
    stack: AsyncExitStack
    app: Runtime = field(init=False)
    proxy: Proxy = field(init=False)
    root: str = ""

    async def open(self, environ: Mapping[str, str] | None = None, **options: Any) -> None:
        root = f"http://127.0.0.1:{self.provider.port}"
        environ = {
            **(environ or {}),
            "ANTHROPIC_API_KEY": "sk-upstream-a",
            "OPENAI_API_KEY": "sk-upstream-o",
        }
        self.app = await self.stack.enter_async_context(open_runtime(self.settings, environ=environ))
        upstreams = {
            name: type(each)(
                each.provider,
                root if name == "anthropic" else f"{root}/v1",
                each.key,
                None,
                each.bills_errors,
                each.anthropic,
            )
            for name, each in find_upstreams(self.app, "anthropic", "openai").items()
        }
        self.proxy = await self.stack.enter_async_context(
            open_proxy(self.app, KeyRing(self.keys), upstreams, **options)
        )
        listening = bind(port=0)
        self.root = format_address(listening)
        serving = asyncio.ensure_future(serve_asgi(self.proxy, listening))

        async def stop() -> None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

        self.stack.push_async_callback(stop)

    @property
    def base(self) -> str:
        return f"{self.root}/v1"

    def key(self, agent: str = "desk", **limits: Any) -> str:
        secret = make_key_secret()
        amounts: dict[str, Any] = {
            name: Decimal(str(value)) if name.startswith("max_cost") else value for name, value in limits.items()
        }
        now = SystemClock().now()
        self.keys.add(make_virtual_key(secret, f"{agent}-{now}", agent, now, "ada", KeyLimits(**amounts)))
        return secret

    async def spent(self, agent: str = "desk") -> int:
        rows = await self.app.store.ask(Query("all_budgets", BudgetRow))
        return sum(
            row.spent for row in rows if row.scope == f"agent:{agent}" and row.unit == "usd" and "day" in row.window
        )

    async def holds(self) -> Sequence[HoldRow]:
        return await self.app.store.ask(Query("all_holds", HoldRow))

    async def settled(self) -> None:
        """Wait until nothing is held any more."""
        async with asyncio.timeout(10):
            while await self.holds():  # noqa: ASYNC110 Another process may hold it.
                await asyncio.sleep(0.01)

    async def sessions(self) -> Sequence[SessionRow]:
        return await self.app.store.ask(Query("all_sessions", SessionRow))

    async def events(self, kind: type[AnyEvent] | None = None) -> list[Any]:
        results = [
            stored.event
            for row in await self.sessions()
            for stored in await self.app.store.read(session_stream(row.session), 0, 10_000)
        ]
        return [event for event in results if kind is None or isinstance(event, kind)]

    async def sentences(self) -> str:
        """What `halter show` says of all sessions."""
        sentences = [
            summarize_event(stored).text
            for row in await self.sessions()
            for stored in await self.app.store.read(session_stream(row.session), 0, 10_000)
        ]
        return "\n".join(sentences)


def settings_in(folder: Path) -> Settings:
    return Settings(
        store=str(folder / "store.db"),
        checkpoints=folder / "checkpoints",
        signing_key=folder / "keys" / "signing.key",
        person="ada",
        tokens=folder / "tokens.json",
    )


@pytest.fixture
async def provider() -> AsyncIterator[ListedProvider]:
    async with ListedProvider().serve() as listed_provider:
        yield listed_provider


@pytest.fixture
async def unopened(provider: ListedProvider, tmp_path: Path) -> AsyncIterator[Place]:
    """The same before anything serves: other processes do."""
    settings = settings_in(tmp_path)
    async with AsyncExitStack() as stack:
        yield Place(provider, settings, KeyFile(find_keys_file(tmp_path / "tokens.json")), stack)


@pytest.fixture
async def place(unopened: Place) -> Place:
    await unopened.open()
    return unopened
