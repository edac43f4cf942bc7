"""Real clients through a real proxy, offline: `make clients` installs them into a folder that is ignored.

They are left out of `make test`: they are large, and come from other registries.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from halter_drills.checker import StoreContents, read_store
from halter_drills.provider import ListedProvider

CLIENTS = Path(os.environ.get("HALTER_CLIENTS", Path(__file__).parents[2] / ".clients"))


class Bench:
    """Proxies in processes of their own, a provider that keeps a bill, and a home for clients."""

    def __init__(self, folder: Path, provider: ListedProvider, store: str = "") -> None:
        self.folder = folder
        self.provider = provider
        self.store = store or f"sqlite://{folder / 'store.db'}"
        self.root = ""
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HALTER_STORE": self.store,
            "HALTER_TOKENS": str(folder / "tokens.json"),
            "HALTER_PERSON": "ada",
        }

    async def halter(self, *words: str) -> str:
        subprocess_exec = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "halter", *words, env=self.environ, cwd=self.folder, stdout=asyncio.subprocess.PIPE
        )
        body, _ = await subprocess_exec.communicate()
        assert subprocess_exec.returncode == 0, body
        return body.decode()

    async def key(self, per_day: str = "2", agent: str = "desk") -> str:
        text = await self.halter("keys", "new", "--agent", agent, "--max-cost-usd-per-day", per_day, "--json")
        return json.loads(text)["key"]

    async def start_proxy(self, listen: str = "127.0.0.1:0") -> tuple[asyncio.subprocess.Process, str]:
        port = self.provider.port
        environ = {
            **self.environ,
            "ANTHROPIC_API_KEY": "sk-a",
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
            "OPENAI_API_KEY": "sk-o",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        }
        command = [sys.executable, "-m", "halter", "proxy", "--listen", listen, "--json"]
        subprocess_exec = await asyncio.create_subprocess_exec(
            *command, env=environ, cwd=self.folder, stdout=asyncio.subprocess.PIPE
        )
        assert subprocess_exec.stdout is not None
        return subprocess_exec, json.loads(await asyncio.wait_for(subprocess_exec.stdout.readline(), 60))["url"]

    @asynccontextmanager
    async def serving(self, listen: str = "127.0.0.1:0") -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
        process, self.root = await self.start_proxy(listen)
        try:
            yield process, self.root
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()

    async def run(self, command: list[str], environ: dict[str, str], seconds: float = 120) -> tuple[int, str]:
        """Run a client; return its exit code and what it printed."""
        subprocess_exec = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), **environ},
            cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            body, _ = await asyncio.wait_for(subprocess_exec.communicate(), seconds)
        except TimeoutError:
            subprocess_exec.kill()
            body, _ = await subprocess_exec.communicate()
            pytest.fail(f"{command[0]} did not end: {body.decode()[-2000:]}")
        return subprocess_exec.returncode or 0, body.decode()

    def found(self) -> StoreContents:
        return read_store(self.store)

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.found().events)

    def spent(self, agent: str = "desk") -> int:
        return sum(
            sums.spent
            for (scope, window, unit), sums in self.found().budgets.items()
            if scope == f"agent:{agent}" and unit == "usd" and window.startswith("day")
        )

    async def settled(self, seconds: float = 90) -> None:
        """Wait until nothing is held any more."""
        async with asyncio.timeout(seconds):
            while (await asyncio.to_thread(self.found)).holds:  # noqa: ASYNC110 Another process settles them.
                await asyncio.sleep(0.2)

    def halt_delay(self) -> float:
        """Seconds from the halt of the fleet until the request under way was ended, by the journal."""
        events = self.found().events
        halted = next(event.at for event in events if event.kind == "halt_requested")
        ended = next(event.at for event in events if event.kind == "request_settled" and event.at >= halted)
        return (ended - halted) / 1e6


def installed(name: str, program: str = "") -> str:
    """Find an installed client, or skip."""
    modules = CLIENTS / "node_modules"
    path = CLIENTS / name / "bin" / (program or name)
    for folder in (modules / ".bin" / name, path, *modules.glob(f"{name}-*/bin/{name}")):
        if folder.exists():
            return str(folder)
    pytest.skip(f"{name} is not installed: run make clients")


@pytest.fixture
def find_client() -> Any:
    return installed


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncGenerator[Bench]:
    async with ListedProvider().serve() as provider:
        made = Bench(tmp_path, provider)
        async with made.serving():
            yield made
