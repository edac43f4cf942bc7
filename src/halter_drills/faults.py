"""The faults that drills inject: stores that fail, processes that die at a commit, rows changed past Halter."""

import os
import random
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, cast, get_args

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ids import Digest, StreamId
from halter.core.ports import Committed, Lease, Rows, Store, Stored, Write
from halter.core.vocabulary import R, Row, RowKey
from halter.journal.apply import Changes
from halter.journal.engine import Engine
from halter.testing.fakes import Crashed, Relay
from halter_drills.children import Child, ChildFailed, Pipe
from halter_drills.drill import PlainConnection, StoreKind

Fault = Literal["", "away", "lost", "crash before", "crash after"]


class Faults(msgspec.Struct, frozen=True):
    """How often each misfortune befalls a commit, and how long the way to the store takes at most."""

    away: float = 0.0
    lost: float = 0.0
    crash: float = 0.0
    slow: int = SECOND // 100


class FaultyStore(Relay):
    """Puts faults, drawn by chance, between one process and a store. The store itself stays whole, as a disk does."""

    def __init__(self, store: Store, chance: random.Random, clock: Clock, faults: Faults) -> None:
        super().__init__(store)
        self._chance = chance
        self._clock = clock
        self._faults = faults
        self._dead = False

    async def way(self) -> None:
        await self._clock.sleep(self._chance.randrange(self._faults.slow))
        if self._dead:
            self._die()

    async def commit(self, write: Write) -> Committed:
        """Commit, unless a fault comes first; after some faults it is committed and nobody hears of it."""
        await self.way()
        fault = self._drawn()
        if fault == "crash before":
            self._die()
        if fault == "away":
            raise StoreUnavailable("The store was away for a moment, as the drill wanted it; try again.")
        committed = await self._store.commit(write)
        if fault == "crash after":
            self._die()
        await self.way()
        if fault == "lost":
            raise StoreUnavailable("The store's answer was lost, as the drill wanted it; try again.")
        return committed

    async def close(self) -> None:
        """Leave the store open: it belongs to the other processes too."""

    def _drawn(self) -> Fault:
        draw = self._chance.random()
        half = self._faults.crash / 2
        shares: tuple[tuple[Fault, float], ...] = (
            ("crash before", half),
            ("crash after", half),
            ("lost", self._faults.lost),
            ("away", self._faults.away),
        )
        for fault, share in shares:
            if draw < share:
                return fault
            draw -= share
        return ""

    def _die(self) -> NoReturn:
        self._dead = True
        raise Crashed


# Engines that differ from the real one in one thing, for drills that end or break a process inside a commit.

KEPT_BACK: Final = 8
"""How many commits a store that writes behind keeps to itself."""

Moment = Callable[[int], None]
"""Hears the number of a commit, right before it or right after it."""


class _Passing:
    """Passes on to a real engine whatever a subclass does not do in a way of its own."""

    def __init__(self, real: Engine) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Watched(_Passing):
    """Counts commits of every kind, and says when one is about to happen and when it has happened."""

    def __init__(self, real: Engine, before: Moment, after: Moment) -> None:
        super().__init__(real)
        self._before = before
        self._after = after
        self._count = 0

    def commit(self) -> None:
        self._during(self.real.commit)

    def claim(self, *asked: Any) -> Sequence[Lease]:
        return self._during(lambda: self.real.claim(*asked))

    def put(self, digest: Digest, data: bytes) -> None:
        self._during(lambda: self.real.put(digest, data))

    def _during(self, act: Callable[[], Any]) -> Any:
        self._count += 1
        self._before(self._count)
        answer = act()
        self._after(self._count)
        return answer


class _WriteBehind(_Passing):
    """Answers first and writes later: what any cache in front of a database does that must not stand here."""

    def __init__(self, real: Engine) -> None:
        super().__init__(real)
        self._kept: list[Changes] = []
        self._rows: dict[RowKey, Row | None] = {}

    def load(self, keys: Sequence[RowKey]) -> Mapping[RowKey, Row | None]:
        loaded = self.real.load(keys)
        return {key: self._rows.get(key, row) for key, row in loaded.items()}

    def committed(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, ...]]:
        kept = [event for changes in self._kept for event in changes.events]
        here = {key: tuple(event for event in kept if event.key == key) for key in keys}
        return {**self.real.committed(keys), **{key: events for key, events in here.items() if events}}

    def save(self, changes: Changes) -> None:
        self._kept.append(changes)
        self._rows |= {row.key(): row for row in (*changes.inserts, *changes.updates)}
        self._rows |= dict.fromkeys(changes.deletes)

    def commit(self) -> None:
        self.real.rollback()
        if len(self._kept) >= KEPT_BACK:
            self._write()

    def claim(self, *asked: Any) -> Sequence[Lease]:
        self._write()
        return self.real.claim(*asked)

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        self._write()
        return self.real.read(stream, after, limit)

    def _write(self) -> None:
        for changes in self._kept:
            self.real.begin()
            self.real.load([])
            self.real.save(changes)
            self.real.commit()
        self._kept.clear()
        self._rows.clear()


def watched(real: Engine, before: Moment, after: Moment) -> Engine:
    return cast("Engine", _Watched(real, before, after))


def writing_behind(real: Engine) -> Engine:
    return cast("Engine", _WriteBehind(real))


class AlteredRows:
    """The locked rows as a decision sees them that must not see them as they are."""

    def __init__(self, rows: Rows, alter: Callable[[Row | None], Row | None]) -> None:
        self._rows = rows
        self._alter = alter

    @property
    def now(self) -> int:
        return self._rows.now

    def get(self, kind: type[R], *key: Any) -> R | None:
        return cast("R | None", self._alter(self._rows.get(kind, *key)))


# The hand of somebody who has the password of the database, knows its tables, and goes past all of Halter.

TABLES: Final = (
    *("events", "streams", "sessions", "budgets", "holds", "spends", "audit", "blobs", "workers", "snapshots"),
)
"""All tables but the one that says which store it is."""

SELECT: Final = (
    "SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash FROM events"
)
INSERT: Final = (
    "INSERT INTO events (stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
CHANGE: Final = "UPDATE events SET {column} = ? WHERE stream = ? AND seq = ?"
SAVE: Final = "CREATE TABLE saved_{table} AS SELECT * FROM {table}"
EMPTY: Final = "DELETE FROM {table}"
REFILL: Final = "INSERT INTO {table} {numbered} SELECT * FROM saved_{table}"


class EventEntry(NamedTuple):
    """One event, column by column."""

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
    """Changes a store with plain SQL, and puts everything back as it was."""

    def __init__(self, database: PlainConnection, kind: StoreKind) -> None:
        self._database = database
        self._kind = kind

    def do(self, statement: str, *values: Any) -> None:
        self._execute(statement, values)

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._execute(statement, values).fetchall()

    def _execute(self, statement: str, values: Sequence[Any]) -> Any:
        return self._database.execute(statement.replace("?", "%s") if self._kind == "postgresql" else statement, values)

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
        """Shift the numbers of all events that follow; through negative ones, since no number may stand twice."""
        self.do("UPDATE events SET seq = -(seq + ?) WHERE stream = ? AND seq > ?", by, stream, after)
        self.do("UPDATE events SET seq = -seq WHERE stream = ? AND seq < 0", stream)

    def set_head(self, stream: str) -> None:
        last = self.entries(stream)[-1]
        self.do("UPDATE streams SET head = ?, hash = ?, at = ? WHERE stream = ?", last.seq, last.hash, last.at, stream)

    @contextmanager
    def at_once(self) -> Generator[None]:
        self.do("BEGIN")
        yield
        self.do("COMMIT")

    def save(self) -> None:
        for table in TABLES:
            self.do(SAVE.format(table=table))

    def restore(self) -> None:
        with self.at_once():
            for table in TABLES:
                numbered = "OVERRIDING SYSTEM VALUE" if (self._kind, table) == ("postgresql", "events") else ""
                self.do(EMPTY.format(table=table))
                self.do(REFILL.format(table=table, numbered=numbered))


# Deaths, and the lanes on which they are died: stores of their own, on which one process after the other is killed.

How = Literal["before", "after", "inside"]
INSIDE_EVERY: Final = 3
LONGEST_DELAY: Final = 0.002
"""Seconds after the beginning of a commit within which a kill inside of it comes."""

NO_LEASE: Final = 0
"""The successor need not wait for a lease to run out, since the drill knows that the owner is dead."""


class Death(msgspec.Struct, frozen=True):
    """At which commit of its life a process dies, and where in it."""

    commit: int
    how: How
    delay: float = 0.0

    def __str__(self) -> str:
        return f"Killed {self.how} commit {self.commit}"


def deaths(commits: int, seed: int) -> list[Death]:
    """List a death before and after every commit, and inside every third, in an order that the seed chooses."""
    chance = random.Random(seed)
    all_of_them = [
        Death(commit, how, chance.uniform(0, LONGEST_DELAY))
        for commit in range(1, commits + 1)
        for how in get_args(How)
        if how != "inside" or (commit + seed) % INSIDE_EVERY == 0
    ]
    chance.shuffle(all_of_them)
    return all_of_them


def dying(real: Engine, death: Death, pipe: Pipe) -> Engine:
    """Let a process die by its own hand at its commit; where it dies inside of one, it says so and is killed."""

    def before(number: int) -> None:
        if number == death.commit and death.how == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        elif number == death.commit and death.how == "inside":
            pipe.send(None)

    def after(number: int) -> None:
        if number == death.commit and death.how == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(real, before, after)


class Lane(Protocol):
    """One store, on which one process after the other is killed."""

    def kill(self, death: Death) -> list[str]: ...


def killed(lanes: Sequence[Lane], chosen: Sequence[Death], tell: Callable[[int, str], None]) -> list[list[str]]:
    """Share the deaths among the lanes: whichever is free takes the next."""
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def one(death: Death) -> list[str]:
        lane = free.get()
        try:
            return lane.kill(death)
        finally:
            free.put(lane)

    wrong: list[list[str]] = []
    with ThreadPoolExecutor(len(lanes)) as threads:
        try:
            for death, found in zip(chosen, threads.map(one, chosen), strict=True):
                wrong.append(found)
                tell(len(wrong), str(death))
        finally:
            threads.shutdown(cancel_futures=True)
    return wrong


def heard(child: Child) -> Any:
    try:
        return child.hear()
    except EOFError as silence:
        raise ChildFailed("A process of the drill ended without saying why.") from silence


def buried(child: Child) -> None:
    """See that a child was killed, and did not end in any other way."""
    if child.wait() != -signal.SIGKILL:
        raise ChildFailed("A process of the drill ended before it could be killed.")
