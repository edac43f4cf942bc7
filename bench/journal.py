"""The journal: durable commits and events per second, compared with raw drivers with one commit per event.

A step is two commits: an intent with a hold in three scopes, then its settlement with the true cost. Halter also links
each event into its chain, decides inside the transaction and checks the lease; the raw rows do none of this.
"""

import asyncio
import json
import resource
import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.measure import Contender, Measured, Sample, compare, timed
from halter.core.clock import SystemClock
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import SortableIds, WorkerId
from halter.core.money import Cap, Caps, Spender, make_legs
from halter.core.ports import Lease, Store
from halter.guard.ledger import ActualResult, Ledger
from halter.journal.engine import Engine
from halter.journal.sqlite import SqliteEngine
from halter.journal.sqlite_connection import open_connection
from halter.journal.store import JournalStore
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold

CLOCK = SystemClock()
IDS = SortableIds(CLOCK.now)
NO_CAP = Caps(session=Cap(10**12), agent=(Cap(10**12, "day"),), fleet=(Cap(10**12, "day"),))
ARGUMENTS = json.dumps({"query": "status of order 4711", "limit": 10}).encode()
RESULT = json.dumps({"status": "shipped", "carrier": "post", "eta": "2026-11-17"}).encode()
SIZES = {1: 400, 50: 20, 1000: 4}
"""Concurrent sessions, and how many steps each takes."""


class Counting:
    """An engine that counts its transactions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.commits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def commit(self) -> None:
        self.commits += 1
        self._engine.commit()


async def work(store: Store, sessions: int, steps: int) -> int:
    """Let concurrent sessions take `steps` steps each; return the number of events."""
    ledger = Ledger(store, CLOCK)
    worker = WorkerId(IDS.make())
    names = [IDS.make() for _ in range(sessions)]
    await asyncio.gather(*(store.commit(lifecycle.start_session(started(name))) for name in names))
    leases: list[Lease] = []
    while len(leases) < sessions:
        leases += await store.claim(worker, sessions)
    await asyncio.gather(*(one(ledger, lease, steps) for lease in leases))
    return sessions * steps * 2


def started(session: str) -> SessionStarted:
    return SessionStarted(session=session, agent="bench", kind="task", started_by="bench")


async def one(ledger: Ledger, lease: Lease, steps: int) -> None:
    spender = Spender(lease.session, "bench")
    for step in range(steps):
        legs = make_legs(NO_CAP, spender, CLOCK.now(), usd=1000)
        intent = CallStarted(call=f"{lease.session}.{step}", tool="look_up", legs=legs)
        answer = await hold(ledger, lease, intent, ARGUMENTS)
        if not isinstance(answer, HoldTaken):
            raise TypeError(answer)
        await ledger.settle(lease, answer.flight, ActualResult("ok", usd=400, body=RESULT))


RAW = (
    "SELECT spent, held, cap FROM budgets WHERE scope = ? AND unit = 'usd'",
    "UPDATE budgets SET held = held + ?, spent = spent + ? WHERE scope = ? AND unit = 'usd'",
    "INSERT INTO holds (hold, session, at, purpose, name, legs) VALUES (?, ?, ?, ?, ?, ?)",
    "DELETE FROM holds WHERE hold = ?",
    "UPDATE streams SET head = head + 1, at = ? WHERE stream = ?",
    """INSERT INTO events (stream, seq, kind, version, at, generation, key, facts, body, salt, digest, hash)
    VALUES (?, ?, ?, 1, ?, 1, ?, ?, ?, ?, ?, ?)""",
    """INSERT INTO budgets (scope, "window", unit, cap, cap_at, cap_by, spent, held, overrun)
    VALUES (?, '', 'usd', 1000000000000, 0, '', 0, 0, 0)""",
    "INSERT INTO streams (stream, head, hash, at) VALUES (?, 0, ?, 0)",
)


def raw(execute: Callable[..., Any], begin: str, steps: int) -> int:
    """Run the same statements directly: one session, one commit per intent and settlement."""
    select, update, insert_hold, delete_hold, update_head, insert_event, budget, stream = RAW
    name = IDS.make()
    scopes = (f"session:{name}", f"agent:{name}", f"fleet:{name}")
    for scope in scopes:
        execute(budget, (scope,))
    execute(stream, (scopes[0], bytes(32)))
    facts = json.dumps(
        {"call": name, "tool": "look_up", "legs": [[s, "", "usd", 10**12, 1000] for s in scopes]}
    ).encode()
    for number in range(steps * 2):
        intent = number % 2 == 0
        now = CLOCK.now()
        execute(begin)
        for scope in scopes:
            execute(select, (scope,)).fetchone()
            execute(update, (1000 if intent else -1000, 0 if intent else 400, scope))
        if intent:
            execute(insert_hold, (f"{name}.{number}", name, now, "turn", "look_up", facts))
        else:
            execute(delete_hold, (f"{name}.{number - 1}",))
        execute(update_head, (now, scopes[0]))
        kind, body = ("call_started", ARGUMENTS) if intent else ("call_settled", RESULT)
        salt = secrets.token_bytes(16)
        execute(
            insert_event,
            (scopes[0], number + 1, kind, now, f"{name}/{number}", facts, body, salt, bytes(32), bytes(32)),
        )
        execute("COMMIT")
    return steps * 2


def raw_sqlite(folder: Path) -> Sample:
    """Run the raw statements on the stdlib's sqlite3, with the same file settings."""
    path = str(folder / f"{IDS.make()}.db")
    SqliteEngine(path, now=CLOCK.now, new_id=IDS.make).close()
    connection = open_connection(path)
    sample = timed(lambda: raw(connection.execute, "BEGIN IMMEDIATE", SIZES[1]))
    connection.close()
    return sample


def raw_psycopg(url: str) -> Sample:
    """Run the raw statements on psycopg, prepared, on the same tables."""
    import psycopg

    with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:

        def execute(sql: str, values: tuple[Any, ...] = ()) -> Any:
            return connection.execute(sql.replace("?", "%s"), values)

        return timed(lambda: raw(execute, "BEGIN", SIZES[1]))


def halter(open_engine: Callable[[], Engine], sessions: int) -> Sample:
    """Run the steps of that many concurrent sessions through the store."""
    engine = Counting(open_engine())

    async def main() -> int:
        store = JournalStore(engine)
        try:
            return await work(store, sessions, SIZES[sessions])
        finally:
            await store.close()

    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_oublock
    sample = timed(lambda: asyncio.run(main()))
    bytes_written = (resource.getrusage(resource.RUSAGE_SELF).ru_oublock - blocks) * 512
    sample.extra = {
        "commits_per_event": engine.commits / sample.done,
        "kB_written_per_step": bytes_written / sample.done * 2 / 1000,
    }
    return sample


def sqlite_engine(folder: Path) -> Engine:
    return SqliteEngine(str(folder / f"{IDS.make()}.db"), now=CLOCK.now, new_id=IDS.make)


def disk_of_sqlite(folder: Path, sessions: int) -> dict[str, float]:
    """Count SQLite's writes and syncs with the recorder of the power-cut drill, which is too slow for timing."""
    from halter_drills.disk import Recorder, Synced, Wrote

    path = folder / f"{IDS.make()}.db"
    SqliteEngine(str(path), now=CLOCK.now, new_id=IDS.make).close()
    with Recorder(path) as recorder:
        sample = halter(
            lambda: SqliteEngine(
                str(path),
                now=CLOCK.now,
                new_id=IDS.make,
                connect=lambda _: open_connection(recorder.uri, uri=True),
            ),
            sessions,
        )
        operations = recorder.log().operations
    size = path.stat().st_size
    return {
        "bytes_written_per_event": sum(len(op.data) for op in operations if isinstance(op, Wrote)) / sample.done,
        "syncs_per_event": sum(isinstance(op, Synced) for op in operations) / sample.done,
        "bytes_kept_per_event": size / sample.done,
    }


def disk_of_postgres(url: str, sessions: int, open_engine: Callable[[], Engine]) -> dict[str, float]:
    """Read the size of PostgreSQL's write-ahead log for the same work."""
    import psycopg

    def counters() -> tuple[int, int]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SELECT pg_stat_force_next_flush()")
            [(size, syncs)] = connection.execute("SELECT wal_bytes, wal_sync FROM pg_stat_wal").fetchall()
            return int(size), int(syncs)

    before = counters()
    sample = halter(open_engine, sessions)
    after = counters()
    return {
        "bytes_written_per_event": (after[0] - before[0]) / sample.done,
        "syncs_per_event": (after[1] - before[1]) / sample.done,
    }


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    """Measure the journal rows."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halter-bench-", dir=Path.cwd())))
        contenders = [Contender("raw sqlite3, one commit each", "sqlite", "event", lambda: raw_sqlite(folder))]
        contenders += [
            Contender(
                f"Halter on SQLite, {sessions} sessions",
                "sqlite",
                "event",
                lambda sessions=sessions: halter(lambda: sqlite_engine(folder), sessions),
            )
            for sessions in SIZES
        ]
        notes: dict[str, Any] = {
            f"disk of SQLite, {sessions} sessions": disk_of_sqlite(folder, sessions) for sessions in SIZES
        }
        postgres = _postgres(stack, report)
        if postgres is not None:
            url, open_engine = postgres
            schema_url = _with_tables(url, open_engine)
            contenders.append(
                Contender("raw psycopg, one commit each", "postgresql", "event", lambda: raw_psycopg(schema_url))
            )
            contenders += [
                Contender(
                    f"Halter on PostgreSQL, {sessions} sessions",
                    "postgresql",
                    "event",
                    lambda sessions=sessions: halter(open_engine, sessions),
                )
                for sessions in SIZES
            ]
            for sessions in SIZES:
                notes[f"disk of PostgreSQL, {sessions} sessions"] = disk_of_postgres(url, sessions, open_engine)
        return compare(contenders, rounds, report), notes


def _postgres(stack: ExitStack, report: Callable[[str], None]) -> tuple[str, Callable[[], Engine]] | None:
    from halter.journal.postgres import PostgresEngine
    from halter.testing.postgres import PostgresMissing, throwaway_cluster

    try:
        url = str(stack.enter_context(throwaway_cluster()).url)
    except PostgresMissing as missing:
        report(f"Skipped PostgreSQL. {missing}")
        return None
    return url, lambda: PostgresEngine(url, new_id=IDS.make)


def _with_tables(url: str, open_engine: Callable[[], Engine]) -> str:
    open_engine().close()
    return f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3Dhalter"
