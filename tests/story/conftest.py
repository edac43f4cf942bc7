"""Stores that tests can write to, tamper with by plain SQL, and examine."""

import itertools
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import (
    AgentSwitched,
    CallRefused,
    CallSettled,
    CallStarted,
    DecisionAsked,
    DecisionMade,
    FindingEmitted,
    FleetPolicyAdopted,
    HaltLifted,
    HaltRequested,
    ItemSeen,
    MemoryProposed,
    NotificationQueued,
    PrecedentProposed,
    RequestRefused,
    RequestStarted,
    RuleEnded,
    RuleMade,
    SessionParked,
    SessionStarted,
    ToolPinned,
    TriggerMade,
)
from halter.core.ids import FLEET, WorkerId, inbox_stream, session_stream, trigger_stream
from halter.core.money import Account, Leg
from halter.core.ports import Committed, Draft, Lease, Query, Write
from halter.core.project import rows_of_event
from halter.core.project.holds import rows_of_hold
from halter.core.rows import (
    AgentRow,
    AuditRow,
    DecisionRow,
    FleetPolicyRow,
    HaltRow,
    OutputRow,
    PinRow,
    RateRow,
    RuleRow,
    SessionRow,
)
from halter.core.vocabulary import RowKey, State
from halter.guard.ledger import ActualResult, change_cap, compute_charged_amounts, settle_flight
from halter.journal.apply import CHAIN_START, hash_event
from halter.journal.checkpoints import Checkpointer, public_key_path, read_public_keys
from halter.journal.engine import to_psycopg_parameters
from halter.journal.open import open_engine
from halter.journal.rebuild import IntegrityReport
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.state import lifecycle
from halter.state.session import TRANSITIONS, InFlight
from halter.testing.fakes import Intent, decide_hold, intent_id
from halter.testing.world import World

FLEET_DAY = Account("fleet", "day/2999-01-01", "usd")
"""A day that no store has seen the end of: on PostgreSQL the time is the real one."""
WORKER = WorkerId("worker")
AWAY = 1_000


class Ground:
    """A store with its checkpoints beside it, and a clock that goes on a little whenever it is looked at."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder / "checkpoints"
        self.folder.mkdir()
        self.key_path = folder / "key"
        self.time = 1_767_225_600 * SECOND
        self._numbers = itertools.count()
        self.engine = open_engine(url, clock=self, ids=self)
        self.store_id = str(next(row["value"] for row in self.engine.ask("meta", {}) if row["name"] == "store"))
        self.checkpointer = Checkpointer(self.folder, self.key_path, self.store_id, self.now)
        self.store = JournalStore(self.engine, inline=True, observers=[self.checkpointer])

    def now(self) -> int:
        self.time += 1
        return self.time

    async def sleep(self, duration: int) -> None:
        self.time += duration

    def make(self) -> str:
        return f"id{next(self._numbers)}"

    async def verify(self) -> IntegrityReport:
        return await verify_store(self.store, self.folder, read_public_keys(public_key_path(self.key_path)))

    def sql(self, statement: str, **params: Any) -> list[tuple[Any, ...]]:
        """Tamper with the store behind its back."""
        if not self.url.startswith("postgresql:"):
            with closing(sqlite3.connect(self.url)) as file, file:
                return file.execute(statement, params).fetchall()
        url, _, schema = self.url.partition("?schema=")
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(f"SET search_path TO {schema}".encode())
            cursor = server.execute(to_psycopg_parameters(statement).encode(), params)
            return cursor.fetchall() if cursor.description else []


class Scribe:
    """Writes what sessions usually write, through the same decisions as the runtime."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.leases: dict[str, Lease] = {}
        self.flights: dict[str, InFlight] = {}
        self._keys = (f"key{number}" for number in itertools.count())

    @classmethod
    def on(cls, url: str, folder: Path) -> "Scribe":
        return cls(Ground(url, folder))

    async def commit(self, write: Write) -> Committed:
        return await self.ground.store.commit(write)

    async def start(self, session: str, *, agent: str = "watcher", definition: str = "") -> None:
        event = SessionStarted(session=session, agent=agent, kind="task", started_by="ann", definition=definition)
        await self.commit(lifecycle.start_session(event, f"the task of {session}".encode()))
        await self.claim()

    async def start_child(self, session: str, parent: str, amount: int) -> None:
        carved = (Leg(session_stream(parent), "", "usd", 100_000, amount),)
        event = SessionStarted(
            session=session, agent="helper", kind="task", started_by=parent, parent=parent, carved=carved
        )
        await self.commit(lifecycle.start_child(event, self.leases[parent], b"a part of it"))
        await self.claim()

    async def claim(self) -> None:
        for lease in await self.ground.store.claim(WORKER, 100):
            self.leases[lease.session] = lease

    def legs(self, session: str, amount: int, cap: int = 50_000) -> tuple[Leg, ...]:
        return (
            Leg(session_stream(session), "", "usd", cap, amount),
            Leg("agent:watcher", FLEET_DAY.window, "usd", 5 * cap, amount),
            Leg(FLEET_DAY.scope, FLEET_DAY.window, "usd", 10 * cap, amount),
        )

    async def hold(self, session: str, name: str, amount: int, *, cap: int = 50_000, call: bool = True) -> bool:
        legs = self.legs(session, amount, cap)
        intent: Intent = (
            CallStarted(call=name, tool="look", legs=legs)
            if call
            else RequestStarted(request=name, model="test:model", purpose="turn", legs=legs)
        )
        write = Write(
            session_stream(session),
            f"{name}/held",
            lambda rows: decide_hold(intent, rows, f"arguments of {name}".encode()),
            rows_of_hold(intent_id(intent), legs),
            self.leases[session],
        )
        done = await self.commit(write)
        held = any(event.kind == intent.KIND for event in done.events)
        if held:
            self.flights[name] = InFlight(
                name, "look", "turn", legs, done.events[0].at, is_call=call, seq=done.events[0].seq
            )
        return held

    async def settle(self, session: str, name: str, usd: int) -> None:
        flight = self.flights.pop(name)
        actual_result = ActualResult("ok", usd=usd, body=f"result of {name}".encode())
        write = Write(
            session_stream(session),
            f"{name}/settled",
            lambda rows: settle_flight(
                flight, actual_result, *compute_charged_amounts(flight, actual_result), None, rows
            ),
            rows_of_hold(flight.id, flight.legs),
            self.leases[session],
        )
        await self.commit(write)

    async def say(self, session: str, text: str) -> None:
        await self.commit(lifecycle.post_message(session, next(self._keys), text.encode(), "ann"))

    async def park(self, session: str, *, rest: int = MINUTE, inbox_seen: int = 0, trouble: str = "") -> None:
        wake_at = await self.ground.store.now() + rest
        event = SessionParked(state="SLEEPING", wake_at=wake_at, inbox_seen=inbox_seen, trouble=trouble)
        await self.commit(lifecycle.park_session(self.leases[session], next(self._keys), event))

    async def wake(self, session: str, inbox_seen: int = 0) -> None:
        await self.commit(lifecycle.wake_session(self.leases[session], next(self._keys), "timer", inbox_seen))

    async def cap(self, cap: int | None, account: Account = FLEET_DAY) -> None:
        await self.commit(change_cap(account, cap, "ann", next(self._keys), "because"))

    async def end(self, session: str, state: State = "COMPLETED", parent: str = "") -> None:
        (row,) = await self.ground.store.ask(Query("session", SessionRow, {"session": session}))
        if "RUNNING" in TRANSITIONS[row.state] and state not in TRANSITIONS[row.state]:
            await self.wake(session, row.inbox_head)
        await self.commit(lifecycle.end_session(self.leases[session], state, "completed", parent))

    async def tasked(self, session: str) -> None:
        """Let a trigger and a session leave a row of every kind."""
        lease, stream = self.leases[session], session_stream(session)
        text = "desk/inbox"
        for stream_id, event, owner in (
            (trigger_stream(text), TriggerMade(trigger=text, agent="desk", type="watch", by="x", digest="d"), None),
            (trigger_stream(text), ItemSeen(trigger=text, item="a", name="a.md"), None),
            (stream, CallStarted(call=f"{session}-write", tool="write_file", writes=("d1",)), lease),
            (stream, CallSettled(call=f"{session}-write", outcome="ok"), lease),
            (stream, FindingEmitted(finding="f", agent="desk", severity="low", support="unquoted"), lease),
            (stream, MemoryProposed(memory="m", agent="desk"), lease),
            (stream, PrecedentProposed(precedent="p", agent="desk", kind="k"), lease),
            (stream, NotificationQueued(notification="n", channel="in_app", agent="desk"), lease),
        ):
            rows = [*rows_of_event(event), (OutputRow, "watcher", "d1")]
            drafts = [Draft(event, b"what was said")]
            await self.commit(Write(stream_id, next(self._keys), lambda _, drafts=drafts: drafts, rows, owner))

    async def guarded(self, session: str) -> None:
        """Let the guard write whatever it can write: a decision, an audited and rated call, a refusal, a halt."""
        lease, call, text = self.leases[session], f"{session}-guarded", f"{session}-decision"
        stream = session_stream(session)
        rows: list[RowKey] = [(DecisionRow, text), (AuditRow, call), (AuditRow, f"{call}-2")]
        rows.append((RateRow, "watcher", "look", 7))
        ask = DecisionAsked(decision=text, about="approval", subject=call, name="look", digest="d", expires_at=9)
        made = DecisionMade(decision=text, verdict="approve", by="ann", digest="d")
        start = CallStarted(call=call, tool="look", decision=text, decided_by="ann", rated=7, audit="full")
        end = CallSettled(call=call, outcome="ok", audited=True, duration_ms=5)
        no = CallRefused(call=f"{call}-2", tool="look", outcome="tool_not_granted", sentence="Not in this phase.")
        neither = RequestRefused(
            request=f"{call}-3/0", model="test:model", purpose="turn", outcome="disabled", sentence="Not this model."
        )
        for event in (ask, start, end, no, neither):
            drafts = [Draft(event, b"what was said")]
            await self.commit(Write(stream, next(self._keys), lambda _, drafts=drafts: drafts, rows, lease))
            if event is ask:
                await self.commit(Write(inbox_stream(session), next(self._keys), lambda _: [Draft(made)], rows))
        row_keys: list[RowKey] = [(RuleRow, "r"), (PinRow, "watcher", "web__get"), (AgentRow, "watcher")]
        row_keys += [(HaltRow, "fleet"), (FleetPolicyRow, "fleet")]
        rule: dict[str, Any] = {
            "rule": "r",
            "tool": "look",
            "scope": "fleet",
            "owner": "",
            "matcher": "{}",
            "keys": ("path",),
        }
        for event in (
            HaltRequested(scope="fleet", by="ann"),
            HaltLifted(scope="fleet", by="ann", ramp=5),
            RuleMade(**rule, by="ann", expires_at=9),
            RuleEnded(rule="r", by="ann"),
            ToolPinned(agent="watcher", tool="web__get", digest="d", by="ann"),
            AgentSwitched(agent="watcher", on=True, by="ann"),
            FleetPolicyAdopted(policy="{}", digest="d", by="ann"),
        ):
            drafts = [Draft(event)]
            await self.commit(Write(FLEET, next(self._keys), lambda _, drafts=drafts: drafts, row_keys))

    async def whole_session(self, session: str, calls: int = 3) -> None:
        """Live through a session of 2 + 2 × `calls` events, with two in its inbox."""
        await self.start(session)
        for number in range(calls):
            await self.hold(session, f"{session}-{number}", 1_000)
            await self.settle(session, f"{session}-{number}", 700)
        await self.say(session, f"how is {session}?")
        await self.say(session, f"and {session} now?")
        await self.end(session)


class Forger:
    """Does to a store what a person with its password could do, more or less carefully."""

    HEADER = ("stream", "seq", "kind", "version", "at", "generation", "key", "blob")
    CONTENT = ("facts", "body", "salt", "digest", "hash")

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.sql = ground.sql

    def events_of(self, stream: str) -> list[dict[str, Any]]:
        columns = self.HEADER + self.CONTENT
        query = f"SELECT {', '.join(columns)} FROM events WHERE stream = :stream ORDER BY seq"
        return [dict(zip(columns, row, strict=True)) for row in self.sql(query, stream=stream)]

    def hash_of(self, event: dict[str, Any], previous: bytes) -> bytes:
        header: Any = tuple(event[name] for name in self.HEADER)
        return hash_event(previous, header, event["facts"], event["digest"])

    def rechain(self, stream: str, events: Sequence[dict[str, Any]]) -> None:
        """Put events in place of a stream, and work out all hashes anew."""
        self.sql("DELETE FROM events WHERE stream = :stream", stream=stream)
        previous = CHAIN_START
        for number, event in enumerate(events, 1):
            row = {**event, "seq": number}
            previous = row["hash"] = self.hash_of(row, previous)
            columns, text = ", ".join(row), ", ".join(f":{name}" for name in row)
            self.sql(f"INSERT INTO events ({columns}) VALUES ({text})", **row)
        params = {"stream": stream, "head": len(events), "hash": previous, "at": events[-1]["at"]}
        self.sql("UPDATE streams SET head = :head, hash = :hash, at = :at WHERE stream = :stream", **params)

    def renumber(self, stream: str, after: int, by: int) -> None:
        """Shift numbers in two moves, because no two events may share one in between."""
        params = {"stream": stream, "after": after, "away": AWAY, "by": by}
        self.sql("UPDATE events SET seq = seq + :away WHERE stream = :stream AND seq > :after", **params)
        self.sql("UPDATE events SET seq = seq - :away + :by WHERE stream = :stream AND seq > :away", **params)

    def swap(self, stream: str, one: int, two: int) -> None:
        for old, new in ((one, AWAY), (two, one), (AWAY, two)):
            self.sql("UPDATE events SET seq = :new WHERE stream = :s AND seq = :old", s=stream, old=old, new=new)

    def copy(self, stream: str, seq: int, to: str, number: int) -> None:
        columns = ", ".join((*self.HEADER[2:], *self.CONTENT))
        self.sql(
            f"INSERT INTO events (stream, seq, {columns}) SELECT :to, :number, {columns} FROM events "
            "WHERE stream = :stream AND seq = :seq",
            stream=stream,
            seq=seq,
            to=to,
            number=number,
        )

    def loosen(self) -> None:
        """Make the table of events forget its constraints."""
        self.sql("CREATE TABLE loose AS SELECT * FROM events")
        self.sql("DROP TABLE events")
        self.sql("ALTER TABLE loose RENAME TO events")


KINDS = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def _ground(request: pytest.FixtureRequest, folder: Path) -> Iterator[Ground]:
    match request.param:
        case "memory":
            url = "memory:"
        case "sqlite":
            url = str(folder / "store.db")
        case _:
            url = request.getfixturevalue("postgres_schema_url")
    ground = Ground(url, folder)
    yield ground
    ground.engine.close()


@pytest.fixture(params=KINDS)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    yield from _ground(request, tmp_path)


@pytest.fixture(params=KINDS[1:])
def reachable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    """A ground whose tables can be reached behind its back."""
    yield from _ground(request, tmp_path)


@pytest.fixture(params=KINDS[1:2])
def sqlite_ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    yield from _ground(request, tmp_path)


@pytest.fixture
def scribe(ground: Ground) -> Scribe:
    return Scribe(ground)


@pytest.fixture(scope="session")
def make_scribe() -> type[Scribe]:
    """For tests that need a new store for each case that is drawn."""
    return Scribe


async def lived_through(ground: Ground) -> Scribe:
    """Two sessions that ended and one that works, all of it checkpointed."""
    scribe = Scribe(ground)
    await scribe.whole_session("one")
    await scribe.whole_session("two", calls=4)
    await scribe.cap(900_000)
    await scribe.start("three")
    await scribe.hold("three", "three-0", 500)
    ground.checkpointer.flush()
    return scribe


@pytest.fixture
async def history(reachable: Ground) -> Scribe:
    """A store with some history, to be tampered with."""
    return await lived_through(reachable)


@pytest.fixture
async def sqlite_history(sqlite_ground: Ground) -> Scribe:
    """One that can be tampered with in ways that only SQLite allows."""
    return await lived_through(sqlite_ground)


@pytest.fixture
def forger(history: Scribe) -> Forger:
    return Forger(history.ground)


@pytest.fixture
def sqlite_forger(sqlite_history: Scribe) -> Forger:
    return Forger(sqlite_history.ground)


@pytest.fixture(params=["memory", "sqlite"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Run a story in a world on either store, and see that its tables can be made again from its events."""

    def living(story: Callable[[World], Awaitable[None]]) -> None:
        with World(7, path=None if request.param == "memory" else tmp_path / "halter.db") as world:
            world.run(checked(story, world))

    async def checked(story: Callable[[World], Awaitable[None]], world: World) -> None:
        await story(world)
        assert (await verify_store(world.journal)).ok

    return living
