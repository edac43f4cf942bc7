"""A process that is blocked while it has to stop is ended from outside, and nothing of it is left running."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from halter.core.clock import SystemClock
from halter.core.ids import SortableIds
from halter.guard.halts import halt
from halter.journal.open import open_store
from tests.processes import Halter, gone

AGENT = "name: desk\n"
TOOLS = '''
"""Tools that block what they run in."""
import os, re, sqlite3, subprocess, time
from pathlib import Path
from halter import tool

def began(fifo):
    child = subprocess.Popen(["/bin/sleep", "600"])
    Path(fifo).write_text(f"{os.getpid()} {child.pid}")

@tool(level="SAFE")
async def compute(fifo: str) -> str:
    """Keep the event loop to itself."""
    began(fifo)
    return str(re.match(r"(a+)+$", "a" * 60 + "b"))

@tool(level="SAFE", timeout=0.2)
async def wait(fifo: str) -> str:
    """Keep the event loop waiting."""
    began(fifo)
    time.sleep(600)
    return ""

@tool(level="SAFE")
async def lock(fifo: str) -> str:
    """Keep the event loop to itself while a transaction is open, as a thread of the store may have one."""
    own = sqlite3.connect(os.environ["HALTER_STORE"], isolation_level=None)
    own.execute("BEGIN IMMEDIATE")
    began(fifo)
    return str(re.match(r"(a+)+$", "a" * 60 + "b"))

@tool(level="SAFE")
def work(fifo: str) -> str:
    """Be stuck in a copy of the process."""
    began(fifo)
    time.sleep(600)
    return ""
'''


class Place:
    """An agent with such tools, and a store."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self._folder = folder
        self._fifo = folder / "fifo"
        os.mkfifo(self._fifo)
        (folder / "agent.yaml").write_text(AGENT)
        (folder / "tools.py").write_text(TOOLS)

    def environ(self) -> Mapping[str, str]:
        home = str(self._folder / "home")
        return {**os.environ, "HALTER_STORE": self.url, "HOME": home, "HALTER_PERSON": "ada", "XDG_STATE_HOME": home}

    async def starts(self, tool: str) -> tuple[Halter, list[int]]:
        """Play one call until it is stuck; return its process, and what the call runs in and has started."""
        (self._folder / "play.yaml").write_text(f"- call: {tool}\n  with: {{fifo: {self._fifo}}}\n")
        await read_to_its_end(self._halter("trust", str(self._folder)))
        process = self._halter("play", str(self._folder / "play.yaml"))
        family = [int(pid) for pid in (await asyncio.to_thread(self._fifo.read_text)).split()]
        return process, family

    def _halter(self, *words: str) -> Halter:
        return Halter(words, env=self.environ(), cwd=self._folder)

    async def halts(self) -> None:
        clock = SystemClock()
        store = open_store(self.url, clock=clock, ids=SortableIds(clock.now))
        await store.commit(halt("agent:desk", "ada", "k"))
        await store.close()


async def read_to_its_end(process: Halter) -> bytes:
    with process:
        return (await asyncio.to_thread(process.communicate))[1]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    url = str(tmp_path / "halter.db") if request.param == "sqlite" else request.getfixturevalue("postgres_schema_url")
    return Place(tmp_path, url)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def wait_for_wakes(*pids: int, times: int = 3) -> None:
    """Wait until processes have woken up some more times: they told of their children, and were heard."""
    for pid in pids:
        before = count_wakes(pid)
        async with asyncio.timeout(60):
            while count_wakes(pid) < before + times:  # noqa: ASYNC110  nobody else tells
                await asyncio.sleep(0.01)


def count_wakes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


async def test_a_blocked_process_is_ended_when_its_session_is_halted(place: Place) -> None:
    process, family = await place.starts("compute")
    sentinel = [pid for pid in children(process.pid) if pid not in family]
    await place.halts()
    body = await read_to_its_end(process)
    assert process.returncode == -9
    assert b"was blocked for" in body
    assert b"while agent:desk is halted. It was killed. Continue with: halter play" in body
    assert b"The last call to start was compute." in body
    await gone(*family, *sentinel)


async def test_a_blocked_process_is_ended_when_a_call_is_out_of_time(tmp_path: Path) -> None:
    process, family = await Place(tmp_path, str(tmp_path / "halter.db")).starts("wait")
    body = await read_to_its_end(process)
    assert process.returncode == -9
    assert b"while a call was out of time. It was killed." in body
    await gone(*family)


async def test_a_blocked_process_is_ended_when_it_keeps_others_from_writing_a_halt(tmp_path: Path) -> None:
    place = Place(tmp_path, str(tmp_path / "halter.db"))
    process, family = await place.starts("lock")
    body = await read_to_its_end(process)
    assert process.returncode == -9
    assert b"while it kept the store locked. It was killed." in body
    await place.halts()
    await gone(*family)


async def test_whatever_a_killed_process_had_started_is_ended(tmp_path: Path) -> None:
    process, family = await Place(tmp_path, str(tmp_path / "halter.db")).starts("work")
    assert process.pid not in family
    everything = [*family, *children(process.pid)]
    await wait_for_wakes(process.pid, *children(process.pid))
    process.kill()
    await read_to_its_end(process)
    await gone(*everything)
