"""Autonomous agents: the cost of many sleeping sessions, of waking them, and of a poll.

The sleepers are real sessions in a SQLite file, each started, claimed and parked by events. A new process runs the
dispatcher on an empty store and on the full one; the difference is the cost of the sleepers.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from bench.guard import CALLS, CLOCK, IDS, in_memory, open_desk
from bench.measure import Figure, Measured, timed
from halter.config.trust import digest_folder
from halter.core.clock import DAY, HOUR, SECOND
from halter.core.events import SessionParked, SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Lease
from halter.core.rows import SessionRow
from halter.dispatch.dispatcher import EmbeddedDispatcher, RunningSessions
from halter.dispatch.heartbeat import renew_leases
from halter.guard.ledger import Ledger
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.runtime.assembly.folder_code import open_trust
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.settings import read_settings
from halter.state import lifecycle
from halter.testing.world import SeedLoop

AGENT = "watch"
SLEEPERS = 100_000
TOGETHER = 5_000
"""Number of concurrent writes while the sleepers are created."""
DUE = 1_000
CLAIMS = 500
IDLE_SECONDS = 20
PATIENCE = 1_800
WATCH = """
name: watch
model: scripted
script: script.yaml
autonomy: {enabled: true, idle_timeout: 0}
sensors:
  - {name: ticker, type: poll, interval: 5, source: {tool: price}}
"""
SCRIPT = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1d}}]\n" * 5
TOOLS = """
from halter import tool

@tool(level="SAFE", effect="read")
async def price() -> str:
    "Tell the price."
    return "100"
"""

Say = Callable[[str], None]


def opened(path: str) -> JournalStore:
    return JournalStore(SqliteEngine(path, now=CLOCK.now, new_id=IDS.make, lease=HOUR))


async def made(path: str, sleepers: int) -> float:
    """Start sessions and park them for a day; return the rate per second."""
    store, worker, started_at = opened(path), WorkerId("maker"), time.perf_counter()
    for first in range(0, sleepers, TOGETHER):
        numbers = range(first, min(sleepers, first + TOGETHER))
        events = [
            SessionStarted(session=f"{AGENT}-{number}", agent=AGENT, kind="autonomous", started_by="bench")
            for number in numbers
        ]
        await asyncio.gather(*(store.commit(lifecycle.start_session(event)) for event in events))
        leases = await store.claim(worker, TOGETHER)
        await asyncio.gather(*(sleeps(store, lease, CLOCK.now() + 2 * DAY) for lease in leases))
    await store.close()
    return sleepers / (time.perf_counter() - started_at)


async def sleeps(store: JournalStore, lease: Lease, wake_at: int) -> None:
    event = SessionParked(state="SLEEPING", wake_at=wake_at)
    await store.commit(lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/parked", event))


async def wakes(store: JournalStore, lease: Lease, wake_at: int) -> None:
    await store.commit(lifecycle.wake_session(lease, f"{lease.session}/{lease.generation}/woken", "timer", 0))
    await sleeps(store, lease, wake_at)


class Dispatched:
    """Handler of sessions that only wake and park again, and record their lateness."""

    def __init__(self, store: JournalStore) -> None:
        self.store = store
        self.due_at = 0
        self.late: list[float] = []
        self.all_woken = asyncio.Event()

    async def attend(self, lease: Lease, _: SessionRow) -> None:
        self.late.append((CLOCK.now() - self.due_at) / 1000)
        await wakes(self.store, lease, CLOCK.now() + 2 * DAY)
        if len(self.late) == DUE:
            self.all_woken.set()


async def dispatched(path: str, sleepers: int) -> dict[str, float]:
    """Run a dispatcher on a store of sleepers: memory, CPU while idle, and a crowd that is due at the same time."""
    store, worker = opened(path), WorkerId("up")
    dispatcher_stub = Dispatched(store)
    async with renew_leases(store, CLOCK, worker):
        dispatcher_task = asyncio.create_task(
            EmbeddedDispatcher(
                RunningSessions(store, CLOCK, worker, dispatcher_stub.attend), lambda: {AGENT: None}
            ).run()
        )
        await asyncio.sleep(2)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        figures = {"rss_kb": rss_kb(), "idle_cpu_seconds_per_minute": 60 * cpu / wall}
        if sleepers:
            await crowd(store, dispatcher_stub)
            late = sorted(dispatcher_stub.late)
            figures |= {"late_p50_ms": late[DUE // 2], "late_p99_ms": late[DUE * 99 // 100]}
        dispatcher_task.cancel()
        await asyncio.gather(dispatcher_task, return_exceptions=True)
    if sleepers:
        figures["claims_per_second"] = await claims(store)
    await store.close()
    return figures


async def crowd(store: JournalStore, dispatcher_stub: Dispatched) -> None:
    """Make a thousand sleepers due at the same moment, and wait until all are woken."""
    leases = await taken(store, DUE)
    dispatcher_stub.due_at = CLOCK.now() + 20 * SECOND
    await asyncio.gather(*(wakes(store, lease, dispatcher_stub.due_at) for lease in leases))
    if CLOCK.now() > dispatcher_stub.due_at:
        raise RuntimeError("The crowd was not parked before it was due: the machine is too slow.")
    await dispatcher_stub.all_woken.wait()


async def taken(store: JournalStore, number: int) -> list[Lease]:
    """Claim the first `number` sessions, due or not."""
    maker = WorkerId("crowd")
    return [lease for index in range(number) for lease in await store.claim(maker, 1, SessionId(f"{AGENT}-{index}"))]


async def claims(store: JournalStore) -> float:
    """Claim due sessions one by one while all others sleep; return the rate per second."""
    worker, due_at = WorkerId("claimer"), CLOCK.now()
    await asyncio.gather(*(wakes(store, lease, due_at) for lease in await taken(store, CLAIMS)))
    started_at = time.perf_counter()
    for _ in range(CLAIMS):
        if len(await store.claim(worker, 1, agents={AGENT: None})) != 1:
            raise RuntimeError("A due session was not claimed.")
    return CLAIMS / (time.perf_counter() - started_at)


def rss_kb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


async def looked() -> float:
    """Measure polls through the guard, in memory; return the CPU microseconds of each."""
    async with open_desk(in_memory()) as desk:
        for number in range(20):
            await desk.look(f"warm.{number}")
        cpu = time.process_time()
        for number in range(CALLS):
            await desk.look(f"s.{number}")
        return (time.process_time() - cpu) / CALLS * 1e6


def resident_day(folder: Path, hours: int) -> float:
    """Run an agent with a poll every 5 s in virtual time; return the CPU seconds of a whole day."""
    home = Path(tempfile.mkdtemp(dir=folder))
    agent = home / AGENT
    agent.mkdir()
    for name, text in (("agent.yaml", WATCH), ("script.yaml", SCRIPT), ("tools.py", TOOLS)):
        (agent / name).write_text(text)
    settings = read_settings({"HALTER_TRUST": str(home / "trust.json"), "USER": "bench"}, home, "memory:")
    open_trust(settings).trust(agent, digest_folder(agent), "bench", 0)
    loop = SeedLoop(None)
    store = JournalStore(MemoryEngine(now=loop.now, new_id=IDS.make), inline=True)
    runtime = Runtime(
        settings, loop, IDS, store, cast("Any", None), Ledger(store, loop), {}, policy=use_local_policy(settings)
    )

    async def lives() -> int:
        running = asyncio.create_task(Supervisor(runtime, lambda _, __: None, rng=random.Random(1)).run([agent]))
        await loop.sleep(hours * HOUR)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return hours

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return timed(lambda: runner.run(lives())).cpu * 24 / hours


def in_a_fresh_process(path: Path, sleepers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.autonomy", str(path), str(sleepers)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def run(rounds: int, report: Say, *, quick: bool = False) -> Measured:
    """Measure the rows of autonomy."""
    sleepers = SLEEPERS // 10 if quick else SLEEPERS
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="halter-bench-", dir=Path.cwd()) as folder:
        report("an empty store")
        empty = in_a_fresh_process(Path(folder) / "empty.db", 0)
        report(f"{sleepers:,} sessions are put to sleep")
        rate = asyncio.run(made(str(Path(folder) / "full.db"), sleepers))
        report(f"{sleepers:,} sessions sleep")
        full = in_a_fresh_process(Path(folder) / "full.db", sleepers)
        report("a resident agent")
        day = statistics.median(resident_day(Path(folder), 1 if quick else 24) for _ in range(rounds))
        report("polls")
        poll = statistics.median(asyncio.run(looked()) for _ in range(rounds))
    rows = [
        Figure("memory of a sleeping agent", 1024 * (full["rss_kb"] - empty["rss_kb"]) / sleepers, "bytes"),
        Figure("CPU while all sleep", full["idle_cpu_seconds_per_minute"], "s a minute"),
        Figure("CPU with nobody asleep", empty["idle_cpu_seconds_per_minute"], "s a minute"),
        Figure(f"lateness, {DUE:,} due at once, p50", full["late_p50_ms"], "ms"),
        Figure(f"lateness, {DUE:,} due at once, p99", full["late_p99_ms"], "ms"),
        Figure("claims, one by one", full["claims_per_second"], "a second"),
        Figure("sessions begun and put to sleep", rate, "a second"),
        Figure("a resident agent with a poll every 5 s, CPU", day, "s a day"),
        Figure("a poll through the guard, in memory, CPU", poll, "µs"),
    ]
    measured_on = datetime.now(UTC).date().isoformat()
    return rows, {"sleepers": sleepers, "measured": measured_on, "load": [load_before, os.getloadavg()[0]]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(dispatched(sys.argv[1], int(sys.argv[2])))))
