"""Large stores: CPU time of each command, route and page over a store with few and with many ended sessions.

The store has copies of one real session: the measured commands only read. Their cost must not grow with the number of
ended sessions, so the two columns should be nearly equal.
"""

import asyncio
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx2
import msgspec

from bench.measure import Measured
from halter import Guard, tool
from halter.core.clock import DAY, HOUR, SystemClock
from halter.core.ids import FLEET
from halter.core.money import BudgetRow
from halter.core.rows import DecisionRow, FindingRow, HaltRow, NotificationRow
from halter.core.vocabulary import Row

FEW, MANY = 200, 20_000
AGENTS = ("clerk", "shop", "night-watch", "reader")
COPIED = ("events", "streams", "sessions", "budgets", "spends", "audit")
SPREAD = 60 * DAY
COMMANDS = (
    "sessions",
    "sessions --json",
    "show SESSION",
    "receipt SESSION",
    "report",
    "budget",
    "budget --json",
    "inbox",
    "findings",
    "proposals",
    "rules",
    "schedules",
    "audit",
    "audit --tool order",
    "halt agent:shop",
    "resume agent:shop",
    "off shop",
    "doctor",
    "export SESSION --output FILE",
)
ROUTES = (
    "/api/home",
    "/api/fleet",
    "/api/workers",
    "/api/sessions",
    "/api/sessions/SESSION",
    "/api/sessions/SESSION/events",
    "/api/sessions/SESSION/receipt",
    "/api/decisions",
    "/api/halts",
    "/api/budgets",
    "/api/spending?since=SINCE&until=NOW",
    "/api/triggers",
    "/api/findings",
    "/api/proposals",
    "/api/rules",
    "/api/audit",
    "/api/report",
)
PAGES = ("/", "/fleet", "/agent/shop", "/sessions", "/session/SESSION", "/budgets", "/audit", "/triggers", "/findings")


@dataclass
class Line:
    """Cost and answer size of one command, route or page, over few and over many sessions."""

    name: str
    kind: str
    few_ms: float
    many_ms: float
    few_bytes: int
    many_bytes: int


@tool(level="CONTROLLED", cost="0.0001")
async def order(item: str) -> str:
    """Order something."""
    return f"{item} is ordered."


def run(rounds: int, report: Callable[[str], None], *, quick: bool = False) -> Measured:
    """Measure everything over both stores."""
    many = MANY // 10 if quick else MANY
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(count) for count in (FEW, many)]
        for home, count in zip(homes, (FEW, many), strict=True):
            report(f"a past of {count:,} sessions")
            fill(home, count)
        lines = [_compared(name, "command", homes, rounds, _command) for name in COMMANDS]
        with _served(homes[0]) as few_server, _served(homes[1]) as many_server:
            servers = dict(zip(homes, (few_server, many_server), strict=True))

            def get(home: Path, path: str) -> tuple[float, int]:
                return _got(servers[home], home, path)

            for kind, paths in (("route", ROUTES), ("page", PAGES)):
                lines += [_compared(path, kind, homes, rounds, get) for path in paths]
    return lines, {"few": FEW, "many": many}


def _compared(
    name: str, kind: str, homes: list[Path], rounds: int, take_sample: Callable[[Path, str], tuple[float, int]]
) -> Line:
    samples = [[take_sample(home, name) for _ in range(rounds + 1)][1:] for home in homes]
    (few_ms, many_ms), (few, many) = ([median(one[part] for one in each) for each in samples] for part in (0, 1))
    return Line(name, kind, few_ms, many_ms, int(few), int(many))


def fill(home: Path, count: int) -> None:
    """Make a store with `count` ended sessions of four agents, spread over two months."""
    home.mkdir()
    store = home / "halter.db"
    asyncio.run(_one_session(store))
    with sqlite3.connect(store) as connection:
        (session, began_at) = connection.execute("SELECT session, started_at FROM sessions").fetchone()
        now = SystemClock().now()
        for table in COPIED:
            _multiply(connection, table, str(session), int(began_at), now, count)
        _leave(connection, now)
    (home / "session").write_text(session)


async def _one_session(store: Path) -> None:
    guard_context = Guard(agent=AGENTS[0], tools=[order], store=str(store), environ=environ_of(store.parent))
    async with guard_context as guard, guard.session("restock") as session:
        for item in ("paper", "ink", "pens"):
            await session.call(order, item=item)


def _multiply(connection: sqlite3.Connection, table: str, session: str, began_at: int, now: int, count: int) -> None:
    """Copy the rows of the session with other names and times."""
    cursor = connection.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in cursor.description]
    rows = [row for row in cursor if any(isinstance(value, str) and session in value for value in row)]
    times = {name for name in names if name == "at" or name.endswith("_at")}
    placeholders = ", ".join("?" for _ in names)
    columns = ", ".join(f'"{name}"' for name in names)

    def copies() -> Iterator[list[object]]:
        for number in range(count):
            agent, shift = AGENTS[number % len(AGENTS)], now - SPREAD * (number + 1) // count - began_at
            for row in rows:
                yield [
                    _changed(name, value, f"{session[:-6]}{number:06}", session, agent, shift * (name in times))
                    for name, value in zip(names, row, strict=True)
                ]

    connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({placeholders})", copies())


def _changed(name: str, value: object, new: str, old: str, agent: str, shift: int) -> object:
    if name == "position":
        return None
    if name == "agent":
        return agent
    if isinstance(value, str):
        return value.replace(old, new)
    return value + shift if shift and isinstance(value, int) and value else value


def _leave(connection: sqlite3.Connection, now: int) -> None:
    """Add a finding, a notification and a decision for every session, and a halt for some."""
    rows: list[Row] = []
    for session, agent, began in connection.execute("SELECT session, agent, started_at FROM sessions").fetchall():
        rows += (
            FindingRow(
                f"f-{session}", session, agent, "low", "supported", "", "", began, 0, "passed", 1, "kept", "ann", began
            ),
            NotificationRow(f"n-{session}", "in_app", agent, f"ended:{session}:0", FLEET, began, 1, 1, began),
            DecisionRow(
                decision=f"d-{session}",
                about="approval",
                session=session,
                agent=agent,
                subject=session,
                name="order",
                level="CONTROLLED",
                risk="LOW",
                asked_at=began,
                expires_at=began + DAY,
                verdict="" if session.endswith("7") else "approve",
                by="ann",
                decided_at=began,
                used_at=began,
                keys="[]",
            ),
        )
        if session.endswith("3"):
            rows.append(HaltRow(f"session:{session}", 1, began, "ann", "", 0, 1))
    # Budgets of past windows: one per hour and agent.
    for number in range(SPREAD // HOUR):
        window = time.strftime("hour/%Y-%m-%dT%H", time.gmtime((now - number * HOUR) / 1e6))
        rows += [BudgetRow(f"agent:{agent}", window, "tokens", 100_000, spent=500) for agent in AGENTS]
    for row in rows:
        values = msgspec.structs.astuple(row)
        placeholders = ", ".join("?" for _ in values)
        # The rows of the session that was really run exist already.
        connection.execute(f"INSERT OR IGNORE INTO {row.TABLE} VALUES ({placeholders})", values)


def environ_of(home: Path) -> dict[str, str]:
    return {"HALTER_STORE": str(home / "halter.db"), "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}


def _command(home: Path, words: str) -> tuple[float, int]:
    session = (home / "session").read_text()
    arguments = [
        session if word == "SESSION" else str(home / "out") if word == "FILE" else word for word in words.split()
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-m", "halter", *arguments],
        env={**os.environ, **environ_of(home)},
        capture_output=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime), len(process.stdout)


@contextmanager
def _served(home: Path) -> Iterator[tuple[str, str, int]]:
    """Serve a store; yield its address, a token and the process."""
    environ = {**os.environ, **environ_of(home)}
    halter = [sys.executable, "-m", "halter"]
    process = subprocess.run(
        [*halter, "tokens", "add", "bench", "--role", "admin", "--json"], env=environ, capture_output=True, check=True
    )
    token = json.loads(process.stdout)["token"]
    with subprocess.Popen(
        [*halter, "serve", "--listen", "127.0.0.1:0"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            yield _address(server), token, server.pid
        finally:
            server.send_signal(signal.SIGINT)


def _address(server: "subprocess.Popen[str]") -> str:
    for line in server.stdout or ():
        if match := re.search(r"http://[\d.]+:\d+", line):
            return match[0]
    raise RuntimeError("The server exited before it printed its address.")


def _cpu_ms(pid: int) -> float:
    """Read the CPU time of all threads of a process, in milliseconds."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


def _got(server: tuple[str, str, int], home: Path, path: str) -> tuple[float, int]:
    now = SystemClock().now()
    filled_path = (
        path.replace("SESSION", (home / "session").read_text())
        .replace("NOW", str(now))
        .replace("SINCE", str(now - DAY))
    )
    before = _cpu_ms(server[2])
    answer = httpx2.get(server[0] + filled_path, headers={"Authorization": f"Bearer {server[1]}"}, timeout=120)
    return _cpu_ms(server[2]) - before, len(answer.raise_for_status().content)
