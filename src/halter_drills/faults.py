"""The faults that drills inject: stores that fail, processes that die at a commit, rows changed by plain SQL."""

import os
import random
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, cast, get_args

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ids import Digest, StreamId
from halter.core.ports import Committed, Lease, Rows, Store, Stored, Write
from halter.core.vocabulary import R, Row, RowKey
from halter.journal.apply import WorkingSet
from halter.journal.engine import Engine
from halter.testing.fakes import Crashed, StoreProxy
from halter_drills.children import Pipe
from halter_drills.drill import PlainConnection, StoreKind

Fault = Literal["", "away", "lost", "crash before", "crash after"]


class Faults(msgspec.Struct, frozen=True):
    """The probability of each fault per commit, and the longest delay to the store."""

    away: float = 0.0
    lost: float = 0.0
    crash: float = 0.0
    slow: int = SECOND // 100


class FaultyStore(StoreProxy):
    """Injects random faults between one process and a store. The store itself stays intact."""

    def __init__(self, store: Store, rng: random.Random, clock: Clock, faults: Faults) -> None:
        super().__init__(store)
        self._rng = rng
        self._clock = clock
        self._faults = faults
        self._dead = False

    async def before_call(self) -> None:
        await self._clock.sleep(self._rng.randrange(self._faults.slow))
        if self._dead:
            self._die()

    async def commit(self, write: Write) -> Committed:
        """Commit, unless a fault comes first. With some faults the commit succeeds and its answer is lost."""
        await self.before_call()
        fault = self._draw_fault()
        if fault == "crash before":
            self._die()
        if fault == "away":
            raise StoreUnavailable("The store is unavailable (fault injected by the drill).")
        committed = await self._store.commit(write)
        if fault == "crash after":
            self._die()
        await self.before_call()
        if fault == "lost":
            raise StoreUnavailable("The store's answer was lost (fault injected by the drill).")
        return committed

    async def close(self) -> None:
        """Leave the store open: other processes share it."""

    def _draw_fault(self) -> Fault:
        draw, faults = self._rng.random(), self._faults
        half = faults.crash / 2
        shares: dict[Fault, float] = {"crash before": half, "crash after": half, "lost": faults.lost}
        shares["away"] = faults.away
        for fault, share in shares.items():
            if draw < share:
                return fault
            draw -= share
        return ""

    def _die(self) -> NoReturn:
        self._dead = True
        raise Crashed


# Engines that differ from the real one in one respect.

DELAYED_COMMITS: Final = 8
"""Number of commits that a write-behind engine delays."""

OnCommit = Callable[[int], None]
"""Called with the number of a commit, right before it or right after it."""


class Delegating:
    """Delegates to a real engine, or to its view."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Watched(Delegating):
    """Counts commits of every kind, with a callback before and after each."""

    def __init__(self, real: Engine, before: OnCommit, after: OnCommit) -> None:
        super().__init__(real)
        self._before = before
        self._after = after
        self._count = 0

    def commit(self) -> None:
        self._run_between(self.real.commit)

    def claim(self, *arguments: Any) -> Sequence[Lease]:
        return self._run_between(lambda: self.real.claim(*arguments))

    def put(self, digest: Digest, data: bytes) -> None:
        self._run_between(lambda: self.real.put(digest, data))

    def _run_between(self, act: Callable[[], Any]) -> Any:
        self._count += 1
        self._before(self._count)
        result = act()
        self._after(self._count)
        return result


class _WriteBehind(Delegating):
    """Answers first and writes later, as a write-behind cache does."""

    answer_questions = None

    def __init__(self, real: Engine) -> None:
        super().__init__(real)
        self._unwritten: list[WorkingSet] = []
        self._rows: dict[RowKey, Row | None] = {}

    def begin(self, keys: Sequence[RowKey] = (), writes: Sequence[str] = (), *, wait: bool = True) -> WorkingSet:
        rows = self.real.begin(keys, writes, wait=wait)
        rows.loaded |= {key: self._rows[key] for key in keys if key in self._rows}
        unwritten_events = [event for changes in self._unwritten for event in changes.events]
        events_by_key = {key: tuple(event for event in unwritten_events if event.key == key) for key in writes}
        rows.earlier_by_key |= {key: events for key, events in events_by_key.items() if events}
        return rows

    def save(self, changes: WorkingSet) -> None:
        self._unwritten.append(changes)
        self._rows |= changes.inserts | changes.updates
        self._rows |= dict.fromkeys(changes.deletes)

    def commit(self) -> None:
        self.real.rollback()
        if len(self._unwritten) >= DELAYED_COMMITS:
            self._write()

    def claim(self, *arguments: Any) -> Sequence[Lease]:
        self._write()
        return self.real.claim(*arguments)

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        self._write()
        return self.real.read(stream, after, limit)

    def _write(self) -> None:
        for changes in self._unwritten:
            self.real.begin()
            self.real.save(changes)
            self.real.commit()
        self._unwritten.clear()
        self._rows.clear()


def watch_engine(real: Engine, before: OnCommit, after: OnCommit) -> Engine:
    return cast("Engine", _Watched(real, before, after))


def writing_behind(real: Engine) -> Engine:
    return cast("Engine", _WriteBehind(real))


class AlteredRows:
    """The locked rows, altered before a decision sees them."""

    def __init__(self, rows: Rows, alter: Callable[[Row | None], Row | None]) -> None:
        self._rows = rows
        self._alter = alter

    @property
    def now(self) -> int:
        return self._rows.now

    def get(self, kind: type[R], *key: Any) -> R | None:
        return cast("R | None", self._alter(self._rows.get(kind, *key)))

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        return [self.get(*key) for key in keys]


# An attacker who has the database password and knows the tables.

TABLES: Final = (
    *("events", "streams", "sessions", "budgets", "holds", "spends", "audit", "blobs", "workers", "snapshots"),
)
"""All tables but `meta`, which identifies the store."""
COLUMNS: Final = "stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash"
SELECT: Final = f"SELECT {COLUMNS} FROM events"  # noqa: S608  columns are constants
INSERT: Final = f"INSERT INTO events ({COLUMNS}) VALUES ({', '.join('?' * 13)})"  # noqa: S608  columns are constants
CHANGE: Final = "UPDATE events SET {column} = ? WHERE stream = ? AND seq = ?"
SAVE: Final = "CREATE TABLE saved_{table} AS SELECT * FROM {table}"
EMPTY: Final = "DELETE FROM {table}"
REFILL: Final = "INSERT INTO {table} {numbered} SELECT * FROM saved_{table}"


class EventEntry(NamedTuple):
    """One row of the table of events."""

    stream: str
    seq: int
    kind: str
    version: int
    at: int
    generation: int
    key: str
    blob: str | None
    facts: bytes
    body: bytes | None
    salt: bytes | None
    digest: bytes
    hash: bytes


class Hand:
    """Changes a store with plain SQL, and restores it."""

    def __init__(self, database: PlainConnection, kind: StoreKind) -> None:
        self._database = database
        self._kind = kind

    def do(self, statement: str, *values: Any) -> Any:
        return self._database.execute(statement.replace("?", "%s") if self._kind == "postgresql" else statement, values)

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.do(statement, *values).fetchall()

    def entries(self, stream: str) -> list[EventEntry]:
        return [EventEntry(*row) for row in self.rows(f"{SELECT} WHERE stream = ? ORDER BY seq", stream)]

    def add(self, entry: EventEntry) -> None:
        self.do(INSERT, *entry)

    def change(self, entry: EventEntry, **columns: Any) -> None:
        for column, value in columns.items():
            self.do(CHANGE.format(column=column), value, entry.stream, entry.seq)

    def remove(self, entry: EventEntry) -> None:
        self.do("DELETE FROM events WHERE stream = ? AND seq = ?", entry.stream, entry.seq)

    def renumber(self, stream: str, after: int, by: int) -> None:
        """Shift the numbers of all later events, through negative ones: numbers are unique."""
        self.do("UPDATE events SET seq = -(seq + ?) WHERE stream = ? AND seq > ?", by, stream, after)
        self.do("UPDATE events SET seq = -seq WHERE stream = ? AND seq < 0", stream)

    def set_head(self, stream: str) -> None:
        last = self.entries(stream)[-1]
        self.do("UPDATE streams SET head = ?, hash = ?, at = ? WHERE stream = ?", last.seq, last.hash, last.at, stream)

    @contextmanager
    def hold_transaction(self) -> Generator[None]:
        self.do("BEGIN")
        yield
        self.do("COMMIT")

    def save(self) -> None:
        for table in TABLES:
            self.do(SAVE.format(table=table))

    def restore(self) -> None:
        with self.hold_transaction():
            for table in TABLES:
                override = "OVERRIDING SYSTEM VALUE" if (self._kind, table) == ("postgresql", "events") else ""
                self.do(EMPTY.format(table=table))
                self.do(REFILL.format(table=table, numbered=override))


# Deaths at a commit, and lanes: stores on which one process after another is killed.

DeathTiming = Literal["before", "after", "inside"]
COMMITS_PER_INSIDE_DEATH: Final = 3
MAX_DEATH_DELAY_SECONDS: Final = 0.002
"""Seconds after a commit begins within which a kill inside it comes."""

NO_LEASE: Final = 0
"""The successor does not wait for a lease to expire: the drill knows that the owner is dead."""


class Death(msgspec.Struct, frozen=True):
    """The commit at which a process dies, and whether before, inside or after it."""

    commit: int
    how: DeathTiming
    delay: float = 0.0

    def __str__(self) -> str:
        return f"Killed {self.how} commit {self.commit}"


def deaths(commits: int, seed: int) -> list[Death]:
    """List a death before and after every commit, and inside every third, in seeded order."""
    rng = random.Random(seed)
    all_deaths = [
        Death(commit, how, rng.uniform(0, MAX_DEATH_DELAY_SECONDS))
        for commit in range(1, commits + 1)
        for how in get_args(DeathTiming)
        if how != "inside" or (commit + seed) % COMMITS_PER_INSIDE_DEATH == 0
    ]
    rng.shuffle(all_deaths)
    return all_deaths


def dying(real: Engine, death: Death, pipe: Pipe) -> Engine:
    """Make an engine at whose commit the process kills itself. Inside a commit, the drill kills it on None."""

    def at(moment: DeathTiming, number: int) -> None:
        if number == death.commit and death.how == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        elif number == death.commit and death.how == "inside" and moment == "before":
            pipe.send(None)

    return watch_engine(real, partial(at, "before"), partial(at, "after"))


class Lane(Protocol):
    """One store on which one process after another is killed."""

    def kill(self, death: Death) -> list[str]: ...


def run_deaths(lanes: Sequence[Lane], deaths: Sequence[Death], report: Callable[[int, str], None]) -> list[list[str]]:
    """Distribute the deaths over the lanes: the next free lane takes the next death."""
    free_lanes: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free_lanes.put(lane)

    def run_death(death: Death) -> list[str]:
        lane = free_lanes.get()
        try:
            return lane.kill(death)
        finally:
            free_lanes.put(lane)

    wrong: list[list[str]] = []
    with ThreadPoolExecutor(len(lanes)) as threads:
        try:
            for death, violations in zip(deaths, threads.map(run_death, deaths), strict=True):
                wrong.append(violations)
                report(len(wrong), str(death))
        finally:
            threads.shutdown(cancel_futures=True)
    return wrong
