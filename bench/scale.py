"""Scale: the cost of a step and a wake for workers and PostgreSQL, and the capacity of one PostgreSQL.

The server is new and has its default settings: every commit is synced to disk. The workers are real `halter worker`
processes; an agent has a scripted model that answers immediately, and a tool that does nothing. So the figures cover
only the runtime's own work: a real model adds waiting time.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import fleet
from bench.claims import BATCH
from bench.fleet import CLOCK, Database, Home, Workers, asleep, begun, moment, name_of, opened, settled, until, workers
from bench.measure import Figure, Measured
from halter.core.clock import DAY, SECOND
from halter.core.events import RequestSettled, SessionParked, SessionWoken, WakePosted
from halter.dispatch.dispatcher import DEFAULT_CONCURRENCY
from halter.journal.store import JournalStore
from halter.state import lifecycle

ROUNDS = 3
LONG, SHORT = 5, 1
"""Steps per turn: four tool calls and a sleep, or only a sleep."""
CROWD = 20_000
"""Number of due sessions: more than the workers can serve during the measurement."""
WINDOW = 12
SLEEPERS = 100_000
WAKES, RATE = 1_000, 20
CLAIMERS, CLAIMED = 3, 6_000
IDLE = 12
LIVED, OFTEN = 60, 40
"""Number of sessions with a history, and their number of wakes."""

Say = Callable[[str], None]


def run(rounds: int, report: Say, *, quick: bool = False) -> Measured:
    """Measure the rows of many machines."""
    from halter.testing.postgres import PostgresMissing, throwaway_cluster

    load_before = os.getloadavg()[0]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="halter-bench-", dir=Path.cwd()) as folder,
            throwaway_cluster() as cluster,
        ):
            home = settled(Path(folder), (SHORT, LONG))
            server = _Server(cluster.url, cluster.data, home, report, quick=quick)
            figures = {**server.throughput(min(rounds, ROUNDS)), **server.sleepers(), **server.history()}
            version = server.version()
    except PostgresMissing as missing:
        report(f"Skipped PostgreSQL. {missing}")
        figures, version = {}, ""
    notes = {
        "measured": datetime.now(UTC).date().isoformat(),
        "postgresql": version,
        "load": [load_before, os.getloadavg()[0]],
        "steps_per_wake": LONG,
        "sleepers": SLEEPERS // 50 if quick else SLEEPERS,
        "wakes_per_second": RATE,
        "claimers": CLAIMERS,
        "batch": BATCH,
    }
    return [Figure(name, value, unit) for (name, unit), value in figures.items()], notes


Figures = dict[tuple[str, str], float]


class _Server:
    """One PostgreSQL with consecutive measurements, each in its own schema."""

    def __init__(self, url: str, data: Path, home: Home, say: Say, *, quick: bool) -> None:
        self._url, self._data, self._home, self._say = url, data, home, say
        self._sleepers = SLEEPERS // 50 if quick else SLEEPERS
        self._wakes = WAKES // 20 if quick else WAKES
        self._crowd = CROWD // 3 if quick else CROWD
        self._window = 4 if quick else WINDOW
        self._claimed = CLAIMED // 10 if quick else CLAIMED
        self._lived = LIVED // 6 if quick else LIVED
        self._number = 0

    def version(self) -> str:
        """Read the server's version."""
        database = Database(self._url, self._data, "public")
        text = str(database.ask("SELECT current_setting('server_version')")[0][0]).split()[0]
        database.close()
        return text

    def _fresh(self) -> Database:
        self._number += 1
        database = Database(self._url, self._data, f"scale{self._number}")
        database.checkpoint()
        return database

    def throughput(self, rounds: int) -> Figures:
        """Measure one, two and four saturated workers, and two with short turns, in interleaved rounds."""
        manners = [(1, LONG), (2, LONG), (4, LONG), (2, SHORT)]
        samples_by_manner: dict[tuple[int, int], list[dict[str, float]]] = {manner: [] for manner in manners}
        for number in range(1, rounds + 1):
            for together, steps in manners:
                self._say(f"round {number} of {rounds}: {together} workers, {steps} steps for each wake")
                samples_by_manner[together, steps].append(asyncio.run(self._served(together, steps)))
        figures: Figures = {}
        for (together, steps), samples in samples_by_manner.items():
            name = f"{together} workers, {steps} steps a wake"
            for key, unit in _THROUGHPUT.items():
                figures[f"{name}: {key}", unit] = statistics.median(sample[key] for sample in samples)
        return figures

    async def _served(self, together: int, steps: int) -> dict[str, float]:
        database, agent = self._fresh(), name_of(steps)
        store = opened(database.url)
        await asleep(store, agent, dict.fromkeys(range(self._crowd), moment(8 + self._crowd / 2000)))
        await store.close()
        database.vacuum()
        with workers(self._home, [steps], database, together) as running:
            await _warm(database, self._crowd + together * DEFAULT_CONCURRENCY)
            connections = database.connections()
            figures = await _observed(database, running, self._window)
            due_count = database.number("SELECT count(*) FROM sessions WHERE owner = '' AND due_at <= microseconds()")
        _demand(due_count > 0, "all sessions were served before the end")
        figures["connections a worker"] = connections / together
        database.drop()
        database.close()
        return figures

    def sleepers(self) -> Figures:
        """Measure many sleepers with few wakes; then claim and offer the due sessions among them."""
        database = self._fresh()
        figures = asyncio.run(self._slept(database))
        for verb, title in (("claim", "claimed, many at a time"), ("offer", "claimed by ticket, each for itself")):
            self._say(f"{CLAIMERS} processes {verb}")
            rate, offering = self._taken(database, verb)
            figures[f"sessions {title}", "a second"] = rate
            if offering:
                figures["sessions offered, which one process does at a time", "a second"] = self._claimed / offering
        database.drop()
        database.close()
        return figures

    async def _slept(self, database: Database) -> Figures:
        agent, store = name_of(LONG), opened(database.url)
        self._say(f"{self._sleepers:,} sessions are put to sleep")
        before, wall = database.counters(), time.perf_counter()
        await asleep(store, agent, dict.fromkeys(range(self._sleepers), CLOCK.now() + 2 * DAY))
        wall, after = time.perf_counter() - wall, database.counters()
        rows = database.rows()
        figures: Figures = {
            ("sessions begun and put to sleep", "a second"): self._sleepers / wall,
            ("a sleeper: kept", "bytes"): (after["kept"] - before["kept"]) / self._sleepers,
            ("a sleeper: log written", "bytes"): (after["wal"] - before["wal"]) / self._sleepers,
            ("a sleeper: rows", "rows"): sum(rows.values()) / self._sleepers,
        }
        database.vacuum()
        first = moment(40)
        dues = {self._sleepers + number: first + number * SECOND // RATE for number in range(self._wakes)}
        await asleep(store, agent, dues)
        with workers(self._home, [LONG], database, 2) as running:
            figures |= await self._idle(database, running)
            _demand(CLOCK.now() < first, "the workers were not ready before the first was due")
            self._say(f"{self._wakes} wake by the clock, {RATE} a second")
            await until(max(dues.values()))
            await _woken(database, self._wakes)
            figures |= self._late(database, agent, dues)
            self._say(f"{self._wakes} wake by a message, {RATE} a second")
            figures |= await self._told(database, store, agent)
            figures["a worker's memory, at work", "MB"] = max(fleet.resident_mb(pid) for pid in running.pids)
            figures["a connection's memory", "MB"] = database.memory_of_connections()
        await store.close()
        return figures

    async def _idle(self, database: Database, running: Workers) -> Figures:
        """Measure the CPU time of workers and server while all sessions sleep."""
        seconds = 3 if self._sleepers < SLEEPERS else IDLE
        before = running.cpu(), database.cpu()
        await asyncio.sleep(seconds)
        mine, servers = running.cpu() - before[0], database.cpu() - before[1]
        return {
            ("a worker, while all sleep: CPU", "s a minute"): mine / seconds * 60 / len(running.pids),
            ("PostgreSQL, while all sleep: CPU", "s a minute"): servers / seconds * 60,
        }

    def _late(self, database: Database, agent: str, dues: dict[int, int]) -> Figures:
        """Measure the lateness of wakes by the clock."""
        first = "SELECT split_part(stream, '-', 2)::bigint, min(at) FROM events"
        woken_rows = database.ask(
            f"{first} WHERE kind = %s AND stream LIKE %s GROUP BY 1", SessionWoken.KIND, f"session:{agent}-%"
        )
        late = [(at - dues[int(number)]) / 1000 for number, at in woken_rows if number in dues]
        _demand(len(late) == len(dues), f"{len(dues) - len(late)} were not woken")
        return _spread("a wake by the clock", late)

    async def _told(self, database: Database, store: JournalStore, agent: str) -> Figures:
        """Send messages to sleepers one by one, and measure the lateness of their wakes."""
        began = moment(1)
        for number in range(self._wakes):
            await until(began + number * SECOND // RATE)
            session = f"{agent}-{number}"
            await store.commit(lifecycle.post_message(session, f"{session}/message", b"Look.", "bench"))
        await _woken(database, 2 * self._wakes)
        late = database.ask(
            "SELECT (min(w.at) - min(p.at)) / 1000.0 FROM events p JOIN events w ON p.stream = w.stream || '/in' "
            "WHERE p.kind = %s AND w.kind = %s GROUP BY w.stream",
            WakePosted.KIND,
            SessionWoken.KIND,
        )
        _demand(len(late) == self._wakes, f"{self._wakes - len(late)} were not woken")
        return _spread("a wake by a message", [float(each) for (each,) in late])

    def _taken(self, database: Database, verb: str) -> tuple[float, float]:
        """Let several processes claim the due sessions among all sleepers.

        Return their total rate per second, and the seconds they spent on offering.
        """
        asyncio.run(self._due(database, verb))
        command = [sys.executable, "-m", "bench.claims", verb, database.url, name_of(LONG)]
        running = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CLAIMERS)
        ]
        for each in running:
            _heard(each)
        for each in running:
            if each.stdin is not None:
                each.stdin.write("go\n")
                each.stdin.flush()
        results = [json.loads(_heard(each)) for each in running]
        for each in running:
            each.communicate()
        _demand(sum(result["taken"] for result in results) >= self._claimed, "not all due sessions were claimed")
        wall = max(result["ended"] for result in results) - min(result["began"] for result in results)
        return self._claimed / wall, sum(result["offering"] for result in results)

    async def _due(self, database: Database, verb: str) -> None:
        """Start sessions without a worker: they are due immediately."""
        store, base = opened(database.url), 10_000_000 if verb == "claim" else 20_000_000
        for first in range(base, base + self._claimed, fleet.TOGETHER):
            await begun(store, name_of(LONG), range(first, min(first + fleet.TOGETHER, base + self._claimed)))
        await store.close()

    def history(self) -> Figures:
        """Wake some sessions often; then measure a wake in a new worker, which must read their history."""
        self._say(f"{self._lived} sessions wake {OFTEN} times")
        return asyncio.run(self._remembered())

    async def _remembered(self) -> Figures:
        database, agent = self._fresh(), name_of(SHORT)
        store = opened(database.url)
        await asleep(store, agent, dict.fromkeys(range(self._lived), CLOCK.now() + 2 * DAY))
        costs: list[tuple[float, float]] = []
        for times in (1, OFTEN, 1):
            with workers(self._home, [SHORT], database, 1) as running:
                await asyncio.sleep(2)
                before = running.cpu() + database.cpu()
                for _ in range(times):
                    await self._all_woken(database, store, agent)
                cpu_spent = running.cpu() + database.cpu() - before
            events = database.number("SELECT count(*) FROM events WHERE stream LIKE %s", f"session:{agent}-%")
            costs.append((cpu_spent / self._lived / times * 1000, events / self._lived))
        await store.close()
        database.drop()
        database.close()
        (short_cost, few_events), _, (long_cost, many_events) = costs
        return {
            ("a wake of one step without a history: CPU, both sides", "ms"): short_cost,
            ("a wake of one step with a long history: CPU, both sides", "ms"): long_cost,
            ("events in the short history", "events"): few_events,
            ("events in the long history", "events"): many_events,
        }

    async def _all_woken(self, database: Database, store: JournalStore, agent: str) -> None:
        """Send a message to all sessions, and wait until all sleep again."""
        slept = "SELECT count(*) FROM events WHERE kind = %s"
        before = database.number(slept, SessionParked.KIND)
        numbers = range(self._lived)
        await asyncio.gather(
            *(store.commit(lifecycle.post_message(f"{agent}-{n}", f"{n}/{before}", b"Look.", "bench")) for n in numbers)
        )
        await _counted(database, SessionParked.KIND, round(before) + self._lived)


_THROUGHPUT = {
    "steps": "a second",
    "wakes": "a second",
    "CPU of the workers": "ms a step",
    "CPU of PostgreSQL": "ms a step",
    "log written": "bytes a step",
    "kept": "bytes a step",
    "kept as events": "bytes a step",
    "transactions": "a second",
    "syncs": "a second",
    "cores used": "cores",
    "connections a worker": "connections",
}


async def _warm(database: Database, rests: int) -> None:
    """Wait until every slot was used once: before that, all sessions are at the same step."""
    await _counted(database, SessionParked.KIND, rests)


async def _woken(database: Database, wakes: int) -> None:
    """Wait until all planned wakes have happened and their turns have ended."""
    await _counted(database, SessionWoken.KIND, wakes)
    await asyncio.sleep(3)


async def _counted(database: Database, kind: str, number: int) -> None:
    deadline = time.monotonic() + fleet.PATIENCE
    while database.number("SELECT count(*) FROM events WHERE kind = %s", kind) < number:
        _demand(time.monotonic() < deadline, f"too little was done in {fleet.PATIENCE:.0f} seconds")
        await asyncio.sleep(0.2)


async def _observed(database: Database, running: Workers, seconds: float) -> dict[str, float]:
    """Measure events and their cost during a window of time."""
    before, from_, wall = database.counters(), CLOCK.now(), time.perf_counter()
    cpu = running.cpu(), database.cpu()
    await asyncio.sleep(seconds)
    mine, servers = running.cpu() - cpu[0], database.cpu() - cpu[1]
    wall, to, after = time.perf_counter() - wall, CLOCK.now(), database.counters()
    count_query = "SELECT count(*) FROM events WHERE kind = %s AND at >= %s AND at < %s"
    steps = database.number(count_query, RequestSettled.KIND, from_, to)
    wakes = database.number(count_query, SessionParked.KIND, from_, to)
    _demand(steps > 0, "no step was made")
    growth = {name: after[name] - before[name] for name in before}
    return {
        "steps": steps / wall,
        "wakes": wakes / wall,
        "CPU of the workers": mine / steps * 1000,
        "CPU of PostgreSQL": servers / steps * 1000,
        "log written": growth["wal"] / steps,
        "kept": growth["kept"] / steps,
        "kept as events": growth["events_kept"] / steps,
        "transactions": growth["commits"] / wall,
        "syncs": growth["syncs"] / wall,
        "cores used": (mine + servers) / wall,
    }


def _spread(name: str, late: Sequence[float]) -> Figures:
    ordered_values = sorted(late)
    return {
        (f"{name}, p50", "ms"): ordered_values[len(ordered_values) // 2],
        (f"{name}, p99", "ms"): ordered_values[len(ordered_values) * 99 // 100],
    }


def _demand(true: bool, otherwise: str) -> None:  # noqa: FBT001
    if not true:
        raise RuntimeError(f"Measurement failed: {otherwise}. The machine may be too slow or too busy.")


def _heard(process: "subprocess.Popen[str]") -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    _demand(bool(line), "a claiming process has exited")
    return line
