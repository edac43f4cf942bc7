"""A fleet on one machine: a real PostgreSQL, real `halter worker` processes, and sleeping sessions.

Sessions are created as the runtime creates them: started, claimed and parked by events. CPU time is read from /proc,
separately for the workers and PostgreSQL, so it is known even if the cores are the bottleneck.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from halter.config.trust import digest_folder
from halter.core.clock import HOUR, SECOND, SystemClock
from halter.core.events import SessionParked, SessionStarted
from halter.core.ids import SortableIds, WorkerId
from halter.core.ports import Lease
from halter.journal.open import open_store
from halter.journal.store import JournalStore
from halter.runtime.assembly.folder_code import open_trust
from halter.settings import read_settings
from halter.state import lifecycle

CLOCK = SystemClock()
IDS = SortableIds(CLOCK.now)
TOGETHER = 2_000
"""Number of concurrent writes while sleepers are created."""
PATIENCE = 120.0
TICK = os.sysconf("SC_CLK_TCK")

AGENT_FILE = """name: {name}
model: scripted
script: script.yaml
autonomy: {{enabled: true, idle_timeout: 0, token_budget_per_hour: 0}}
"""
TOOLS = """
from halter import tool

@tool(level="SAFE", effect="read")
async def look(number: int) -> str:
    "Look once."
    return f"looked {number}."
"""
FLEET_FILE = """limits: {max_cost_usd_per_day: 1000000}
agents: {limits: {max_cost_usd: 1000, max_cost_usd_per_day: 1000000}}
models: {"scripted:script": {price: {input: 1, output: 5}}}
"""
"""The model has a price, so every step holds money: of its session, of its agent, and of the fleet, which all share."""
LOOK = '- {{repeat: true, unless: "looked {0}.", calls: [{{tool: look, arguments: {{number: {0}}}}}], usage: {1}}}\n'
SLEEP = "- {{repeat: true, calls: [{{tool: yield, arguments: {{mode: sleep, sleep: 2d}}}}], usage: {0}}}\n"
USAGE = "{input_tokens: 900, output_tokens: 40}"


@dataclass(frozen=True)
class Home:
    """Folder of a fleet, and its agents by their number of steps per wake."""

    folder: Path
    agents: Mapping[int, Path]

    @property
    def environ(self) -> dict[str, str]:
        """Environment of a worker, without Halter's variables of this machine."""
        inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "LANG")}
        return inherited | {"HOME": str(self.folder), "HALTER_PERSON": "bench"}


def name_of(steps: int) -> str:
    """Make the name of the agent that takes `steps` steps per turn."""
    return f"steps{steps}"


def settled(folder: Path, steps: Sequence[int]) -> Home:
    """Write the agents' folders, and trust them."""
    home = Home(folder, {number: folder / name_of(number) for number in steps})
    (folder / "halter.yaml").write_text(FLEET_FILE)
    settings = read_settings(home.environ, folder)
    for number, agent in home.agents.items():
        agent.mkdir()
        looks = "".join(LOOK.format(look, USAGE) for look in range(1, number))
        script = looks + SLEEP.format(USAGE)
        files = {"agent.yaml": AGENT_FILE.format(name=name_of(number)), "script.yaml": script, "tools.py": TOOLS}
        for name, text in files.items():
            (agent / name).write_text(text)
        open_trust(settings).trust(agent, digest_folder(agent), "bench", 0)
    return home


def opened(url: str) -> JournalStore:
    """Open a store whose leases nobody needs to renew."""
    return open_store(url, clock=CLOCK, ids=IDS, lease=HOUR)


async def begun(store: JournalStore, agent: str, numbers: Sequence[int]) -> None:
    """Start sessions, which are due immediately."""
    definition = await store.put(b"{}")
    events = [
        SessionStarted(
            session=f"{agent}-{number}",
            agent=agent,
            kind="autonomous",
            started_by="bench",
            definition=definition,
            folder=definition,
        )
        for number in numbers
    ]
    await asyncio.gather(*(store.commit(lifecycle.start_session(event)) for event in events))


async def asleep(store: JournalStore, agent: str, wakes: Mapping[int, int]) -> None:
    """Start sessions and park each until its moment. No other worker may claim meanwhile."""
    worker, numbers = WorkerId("maker"), list(wakes)
    for first in range(0, len(numbers), TOGETHER):
        await begun(store, agent, numbers[first : first + TOGETHER])
        leases = await store.claim(worker, TOGETHER)
        await asyncio.gather(*(_sleeps(store, lease, wakes) for lease in leases))


async def _sleeps(store: JournalStore, lease: Lease, wakes: Mapping[int, int]) -> None:
    wake_at = wakes[int(lease.session.rpartition("-")[2])]
    event = SessionParked(state="SLEEPING", wake_at=wake_at)
    await store.commit(lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/parked", event))


class Database:
    """A connection that reads the content of a schema and the counters of the server."""

    def __init__(self, url: str, data: Path, schema: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._data = data
        self.url = f"{url}?schema={schema}"
        self._schema = schema
        self._connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(schema)))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def drop(self) -> None:
        """Drop the schema, so that the next measurement starts with an equal server.

        Statements of killed workers may still run, so their connections are terminated first.
        """
        others = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        self.ask(f"SELECT pg_terminate_backend(pid, 10000) {others}")
        self._connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self._schema)))
        self.checkpoint()

    def ask(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a query in plain SQL."""
        return self._connection.execute(question.encode(), values).fetchall()

    def number(self, question: str, *values: object) -> float:
        """Run a query for one number."""
        return float(self.ask(question, *values)[0][0] or 0)

    def checkpoint(self) -> None:
        """Write a checkpoint, so that its cost is not part of the next measurement."""
        self._connection.execute("CHECKPOINT")

    def vacuum(self) -> None:
        """Vacuum now, so that an automatic vacuum is not part of the next measurement."""
        self._connection.execute("VACUUM ANALYZE")
        self.checkpoint()

    def counters(self) -> dict[str, float]:
        """Read the server's counters of writes and commits."""
        self.ask("SELECT pg_stat_force_next_flush()")
        [(wal, syncs)] = self.ask("SELECT wal_bytes, wal_sync FROM pg_stat_wal")
        commits = self.number("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        return {"wal": float(wal), "syncs": float(syncs), "commits": commits, **self.sizes()}

    def sizes(self) -> dict[str, float]:
        """Read the size of the schema and of its events in bytes, with indexes."""
        tables = "FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace(%s)"
        rows = self.ask(f"SELECT pg_total_relation_size(oid), relname {tables}", self._schema)
        sizes = {name: float(size) for size, name in rows}
        return {"kept": sum(sizes.values()), "events_kept": sizes.get("events", 0.0)}

    def rows(self) -> dict[str, int]:
        """Count the rows of every table that is not empty."""
        names = self._connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [self._schema])
        counts = {str(name): self._rows(str(name)) for (name,) in names}
        return {name: count for name, count in sorted(counts.items()) if count}

    def _rows(self, table: str) -> int:
        row = self._connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))).fetchone()
        return 0 if row is None else row[0]

    def connections(self) -> int:
        """Count all other connections."""
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return int(self.number(others))

    def cpu(self) -> float:
        """Read the CPU seconds of all server processes, including ended ones."""
        server = self._server()
        return sum(cpu_of(pid) for pid in (server, *children(server))) + cpu_of(server, gone=True)

    def memory_of_connections(self) -> float:
        """Measure the private memory per connection, in megabytes."""
        rows = self._connection.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'")
        sizes = [private_mb(pid) for (pid,) in rows]
        return sum(sizes) / len(sizes)

    def _server(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])


def cpu_of(pid: int, *, gone: bool = False) -> float:
    """Read the CPU seconds of a process, or of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    first = 13 if gone else 11
    return (int(fields[first]) + int(fields[first + 1])) / TICK


def children(pid: int) -> list[int]:
    """List the child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def private_mb(pid: int) -> float:
    """Read the private memory of a process, in megabytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) / 1024


def resident_mb(pid: int) -> float:
    """Read the resident memory of a process, in megabytes."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return 0.0 if match is None else int(match[1]) / 1024


class Workers:
    """A pool of worker processes."""

    def __init__(self, running: Sequence["subprocess.Popen[bytes]"], log: Path) -> None:
        self._running = running
        self._log = log

    @property
    def pids(self) -> list[int]:
        """Ids of the processes. Raises if a worker has exited, because the measurement is invalid then."""
        if any(worker.poll() is not None for worker in self._running):
            raise RuntimeError(f"A worker exited: {self._log.read_text()[-500:]}")
        return [worker.pid for worker in self._running]

    def cpu(self) -> float:
        """Read the CPU seconds of all workers."""
        return sum(cpu_of(pid) for pid in self.pids)


@contextmanager
def workers(home: Home, steps: Sequence[int], database: Database, number: int) -> Generator[Workers]:
    """Start `number` workers, wait until all are registered, and kill them afterwards."""
    command = [sys.executable, "-m", "halter", "worker", *(str(home.agents[each]) for each in steps)]
    log = home.folder / "workers.log"
    with log.open("ab") as output:
        running = [
            subprocess.Popen(
                [*command, "--json", "--store", database.url],
                cwd=home.folder,
                env=home.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
            for _ in range(number)
        ]
    try:
        pool = Workers(running, log)
        _wait_for(pool, database, number)
        yield pool
    finally:
        for worker in running:
            worker.send_signal(signal.SIGKILL)
        for worker in running:
            worker.wait()


def _wait_for(pool: Workers, database: Database, number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    alive = "SELECT count(*) FROM workers WHERE about <> '' AND alive_until >= microseconds()"
    while pool.pids and time.monotonic() < deadline:
        if database.number("SELECT count(*) FROM pg_tables WHERE tablename = 'tickets'") and (
            database.number(alive) >= number
        ):
            return
        time.sleep(0.2)
    raise RuntimeError(f"The workers did not start in time: {pool.pids}")


def moment(seconds: float) -> int:
    """Compute the time `seconds` from now."""
    return CLOCK.now() + round(seconds * SECOND)


async def until(at: int) -> None:
    """Wait until a time."""
    await asyncio.sleep(max(0, at - CLOCK.now()) / SECOND)
