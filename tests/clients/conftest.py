"""Real clients through a real proxy, offline: `make clients` installs them into a folder that is ignored.

They are left out of `make test`: they are large, and come from other registries.
"""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from halter_drills.provider import ListedProvider

CLIENTS = Path(os.environ.get("HALTER_CLIENTS", Path(__file__).parents[2] / ".clients"))


class Bench:
    """A proxy in a process of its own, a provider that keeps a bill, and a home for one client."""

    def __init__(self, folder: Path, provider: ListedProvider) -> None:
        self.folder = folder
        self.provider = provider
        self.root = ""
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HALTER_STORE": str(folder / "store.db"),
            "HALTER_TOKENS": str(folder / "tokens.json"),
            "HALTER_PERSON": "ada",
        }

    async def halter(self, *words: str) -> str:
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "halter", *words, env=self.environ, cwd=self.folder, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await made.communicate()
        assert made.returncode == 0, said
        return said.decode()

    async def key(self, per_day: str = "2", agent: str = "desk") -> str:
        said = await self.halter("keys", "new", "--agent", agent, "--max-cost-usd-per-day", per_day, "--json")
        return json.loads(said)["key"]

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        port = self.provider.port
        environ = {
            **self.environ,
            "ANTHROPIC_API_KEY": "sk-a",
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
            "OPENAI_API_KEY": "sk-o",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        }
        command = [sys.executable, "-m", "halter", "proxy", "--listen", "127.0.0.1:0", "--json"]
        made = await asyncio.create_subprocess_exec(
            *command, env=environ, cwd=self.folder, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert made.stdout is not None
            self.root = json.loads(await asyncio.wait_for(made.stdout.readline(), 60))["url"]
            yield
        finally:
            made.send_signal(signal.SIGTERM)
            await made.wait()

    async def run(self, command: list[str], environ: dict[str, str], seconds: float = 120) -> tuple[int, str]:
        """Run a client; return its exit code and what it printed."""
        made = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), **environ},
            cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(made.communicate(), seconds)
        except TimeoutError:
            made.kill()
            said, _ = await made.communicate()
            pytest.fail(f"{command[0]} did not end: {said.decode()[-2000:]}")
        return made.returncode or 0, said.decode()

    def count(self, kind: str) -> int:
        with sqlite3.connect(self.folder / "store.db") as store:
            (found,) = store.execute("SELECT COUNT(*) FROM events WHERE kind = ?", (kind,)).fetchone()
        store.close()
        return found

    def spent(self, agent: str = "desk") -> int:
        with sqlite3.connect(self.folder / "store.db") as store:
            sums = """SELECT COALESCE(SUM(spent), 0) FROM budgets
                WHERE scope = ? AND unit = 'usd' AND "window" LIKE 'day%'"""
            (found,) = store.execute(sums, (f"agent:{agent}",)).fetchone()
        store.close()
        return found


def installed(name: str, program: str = "") -> str:
    """Find an installed client, or skip."""
    modules = CLIENTS / "node_modules"
    own = CLIENTS / name / "bin" / (program or name)
    for found in (modules / ".bin" / name, own, *modules.glob(f"{name}-*/bin/{name}")):
        if found.exists():
            return str(found)
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
