"""A worker whose PostgreSQL is lost, full, read-only or locked: it waits, loses nothing, and does nothing twice."""

import asyncio
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import psycopg
import pytest

from halter import Guard
from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SECOND, SystemClock
from halter.core.errors import LeaseLost
from halter.core.events import SessionStarted
from halter.core.ids import SortableIds, WorkerId
from halter.core.money import BudgetRow
from halter.core.ports import Query, Write
from halter.core.rows import HoldRow
from halter.guard.approvals import PendingDecision, answer_decision
from halter.guard.call_answer import Answer
from halter.guard.ledger import Ledger
from halter.guard.prepare import Call, SessionContext
from halter.journal.open import open_store
from halter.journal.postgres import PostgresEngine
from halter.journal.store import JournalStore
from halter.journal.store_retry import StoreProblem
from halter.journal.verify import verify_store
from halter.loop.session_runtime import SessionRuntime
from halter.redaction.secrets import GivenSecrets
from halter.runtime.agent_runtime import make_guard
from halter.runtime.runtime import Runtime
from halter.settings import read_settings
from halter.state import lifecycle
from halter.testing.postgres import Cluster, throwaway_cluster
from halter.tools.function_tool import tool
from tests.story.cables import Cable, When

if TYPE_CHECKING:
    from conftest import SmallDisk

pytestmark = pytest.mark.postgres


SEND: Any = {"level": "SAFE", "cost": "0.02", "timeout": "1h"}


class Impatient(SystemClock):
    """The machine's time, as the server has it too; but who waits for a while waits only for a moment."""

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND / 200)


class Server:
    """A store on a server, looked at with plain SQL, and the workers on it."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.home = home
        self.done: Counter[str] = Counter()
        self.sent = "sent"
        self.in_tool: Callable[[], object] = lambda: None

    def kinds(self) -> Counter[str]:
        text, _, schema = self.url.partition("?schema=")
        with psycopg.connect(text) as server:
            return Counter(kind for (kind,) in server.execute(f"SELECT kind FROM {schema}.events".encode()).fetchall())

    def worker(self, url: str, **options: Any) -> Guard:
        """A program with a tool that must not act twice."""
        options = {"lease": 3600, "environ": {"HOME": str(self.home)}, "person": "ada", **options}
        guard = Guard(url, agent="desk", clock=Impatient(), **options)

        guard.tool(self.send, **SEND)
        return guard

    async def send(self, text: str) -> str:
        """Send something."""
        self.done[f"send {text}"] += 1
        self.in_tool()
        return self.sent

    async def demand_order(self, spent: int) -> None:
        """Nothing is wrong with the journal, nothing is held, and so much was spent."""
        clock = SystemClock()
        store = open_store(self.url, clock=clock, ids=SortableIds(clock.now))
        assert (await verify_store(store)).findings == ()
        assert await store.ask(Query("holds", HoldRow)) == []
        budgets = await store.ask(Query("budgets", BudgetRow))
        assert {row.spent for row in budgets if row.unit == "usd" and row.scope.startswith("session:")} <= {spent, 0}
        assert sum(row.spent for row in budgets if row.unit == "usd" and row.scope == "fleet") == spent
        await store.close()


@pytest.fixture
def server(postgres_schema_url: str, tmp_path: Path) -> Server:
    return Server(postgres_schema_url, tmp_path)


@pytest.fixture
def cable(postgres_schema_url: str) -> Iterator[Cable]:
    with Cable(postgres_schema_url).laid() as cable:
        yield cable


PHASES: list[tuple[str, When]] = [
    (kind, when)
    for kind in ("session_started", "call_started", "call_settled", "session_ended")
    for when in ("before", "after")
]


@pytest.mark.parametrize(("kind", "when"), PHASES, ids=[f"{when} {kind}" for kind, when in PHASES])
async def test_a_connection_that_is_lost_around_a_commit_costs_nothing_but_time(
    server: Server, cable: Cable, kind: str, when: When
) -> None:
    numbers: list[int] = []
    cable.on_cut = lambda: numbers.append(server.kinds()[kind])
    guard = server.worker(cable.url)
    async with guard:
        if kind == "call_settled":
            server.in_tool = lambda: cable.arm(kind.encode(), when)
        else:
            cable.arm(kind.encode(), when)
        async with guard.session("send it") as session:
            answer = await session.call("send", text="hello")
    assert numbers == [1 if when == "after" else 0]
    assert (answer.outcome, answer.text) == ("ok", "sent")
    assert server.done == {"send hello": 1}
    kinds = server.kinds()
    assert {kinds[each] for each, _ in PHASES} == {1}
    await server.demand_order(20_000)


async def test_a_connection_that_is_lost_while_a_tool_runs_costs_nothing_but_time(server: Server, cable: Cable) -> None:
    server.in_tool = cable.cut
    guard = server.worker(cable.url)
    async with guard, guard.session("send it") as session:
        assert (await session.call("send", text="hello")).outcome == "ok"
    assert server.done == {"send hello": 1}
    await server.demand_order(20_000)


async def test_who_is_cut_off_for_too_long_loses_its_session_and_what_it_began_is_put_before_a_person(
    server: Server, cable: Cable
) -> None:
    began = asyncio.Event()
    server.in_tool = lambda: (cable.unplug(), began.set())
    cut_off, guard = server.worker(cable.url, lease=1), server.worker(server.url, lease=1)
    async with cut_off, guard:
        first = asyncio.create_task(sends(cut_off))
        await began.wait()
        second = asyncio.create_task(sends(guard, "again"))
        (pending_decision,) = await waiting(guard)
        assert (pending_decision.about, pending_decision.name) == ("unknown_call", "send")
        server.in_tool = cable.plug
        await person(server, answer_decision(pending_decision, "approve", "ada", "yes"))
        assert (await second).outcome == "ok"
        with pytest.raises(LeaseLost, match=r"desk.* has lost the lease of session s.* Nothing was written"):
            await first
    assert server.done == {"send hello": 1, "send again": 1}
    kinds = server.kinds()
    assert (kinds["call_started"], kinds["call_settled"], kinds["session_ended"]) == (2, 2, 1)
    await server.demand_order(40_000)


async def sends(guard: Guard, text: str = "hello") -> Answer:
    async with guard.session("send it", id="s") as session:
        return await session.call("send", text=text)


async def waiting(guard: Guard) -> Sequence[PendingDecision]:
    """Wait until a person is asked something."""
    while not (pending_decisions := (await guard.report()).needs_you):
        pass
    return pending_decisions


async def person(server: Server, write: Write) -> None:
    """Write what a person writes, from elsewhere."""
    clock = SystemClock()
    store = open_store(server.url, clock=clock, ids=SortableIds(clock.now))
    await store.commit(write)
    await store.close()


@pytest.fixture(scope="module")
def own_cluster(postgres_binaries: None) -> Iterator[Cluster]:
    """A server whose settings a test may change, which those of all tests must not be."""
    with throwaway_cluster() as cluster:
        yield cluster


def execute_sql(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as keeper:
        for statement in statements:
            keeper.execute(statement.encode())


async def test_a_server_that_is_read_only_for_a_while_is_waited_for_and_reported(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    texts: list[str] = []

    def tell(sentence: str) -> None:
        texts.append(sentence)
        execute_sql(own_cluster.url, "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")

    url = f"{own_cluster.url}?schema=demoted"
    server = Server(url, tmp_path)
    demoted = ("ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    server.in_tool = lambda: execute_sql(own_cluster.url, *demoted)
    assert (await sends_one(server, tell)).outcome == "ok"
    assert "is read-only" in texts[0]
    assert "use the address of the primary server, or make the database writable" in texts[0]
    assert texts[-1] == ""
    assert server.done == {"send hello": 1}
    await server.demand_order(20_000)


async def sends_one(server: Server, tell: Callable[[str], None]) -> Answer:
    guard = server.worker(server.url, tell=tell)
    async with guard, guard.session("send it") as session:
        return await session.call("send", text="hello")


async def test_a_server_whose_disk_is_full_is_waited_for_and_reported(
    empty_schema_url: str, tmp_path: Path, small_disk: "SmallDisk"
) -> None:
    small_disk.change("size=4m")
    shutil.chown(small_disk.folder, "postgres", "postgres")
    small_disk.folder.chmod(0o700)
    output, _, schema = empty_schema_url.partition("?schema=")
    execute_sql(output, f"CREATE TABLESPACE {schema} LOCATION '{small_disk.folder}'")
    url = f"{empty_schema_url}&options={quote(f'-cdefault_tablespace={schema}')}"
    server = Server(empty_schema_url, tmp_path)
    texts: list[str] = []

    def tell(sentence: str) -> None:
        texts.append(sentence)
        small_disk.change("size=64m")

    server.sent = os.urandom(1_000_000).hex()
    server.in_tool = lambda: (small_disk.folder / "filler").write_bytes(b"x" * full(small_disk.folder))
    guard = server.worker(url, tell=tell)
    async with guard, guard.session("send it") as session:
        answer = await session.call("send", text="hello")
    assert (answer.outcome, answer.text) == ("ok", server.sent)
    assert re.search(r"^The disk of PostgreSQL at .* is full. Nothing was written. Free some space", texts[0])
    assert texts[-1] == ""
    assert server.done == {"send hello": 1}
    await server.demand_order(20_000)
    execute_sql(output, f"DROP SCHEMA {schema} CASCADE", f"DROP TABLESPACE {schema}")


async def test_a_server_that_goes_down_for_want_of_room_for_its_log_is_waited_for_until_somebody_starts_it(
    tmp_path: Path, small_disk: "SmallDisk"
) -> None:
    small_disk.change("size=128m")
    (small_disk.folder / "cluster").mkdir()
    cluster = Cluster(small_disk.folder / "cluster", {})
    cluster.start()
    server = Server(f"{cluster.url}?schema=down", tmp_path)
    texts: list[str] = []

    def fill() -> None:
        (small_disk.folder / "filler").write_bytes(b"x" * full(small_disk.folder))
        with suppress(psycopg.OperationalError), psycopg.connect(cluster.url, autocommit=True) as keeper:
            while True:
                keeper.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")

    def tell(sentence: str) -> None:
        if not texts:
            (small_disk.folder / "filler").unlink()
            cluster.stop_hard()
            cluster.start()
        texts.append(sentence)

    server.in_tool = fill
    try:
        assert (await sends_one(server, tell)).outcome == "ok"
        assert re.search(r"PostgreSQL at .* Retrying\.", texts[0])
        assert texts[-1] == ""
        assert server.done == {"send hello": 1}
        await server.demand_order(20_000)
    finally:
        cluster.stop_hard()


def full(folder: Path) -> int:
    """Tell how much room a disk has left."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


async def test_rows_that_stay_locked_are_waited_for_and_reported(server: Server) -> None:
    text, _, schema = server.url.partition("?schema=")
    texts: list[str] = []
    with psycopg.connect(text) as keeper:

        def tell(sentence: str) -> None:
            texts.append(sentence)
            keeper.rollback()

        server.in_tool = lambda: keeper.execute(f"SELECT * FROM {schema}.budgets FOR UPDATE".encode())
        assert (await make_call(server, tell)).outcome == "ok"
    assert "Another process has locked rows" in texts[0]
    assert "look in pg_stat_activity" in texts[0]
    assert texts[-1] == ""
    assert server.done == {"send hello": 1}
    await server.demand_order(20_000)


async def make_call(server: Server, tell: Callable[[str], None]) -> Answer:
    """Make one call in a process that does not wait for locks as long as others do."""
    clock = Impatient()
    ids = SortableIds(clock.now)
    store = JournalStore(PostgresEngine(server.url, new_id=ids.make, lock_timeout="500ms"))
    settings = read_settings({}, server.home, server.url)
    app = Runtime(settings, clock, ids, store, cast("Any", None), Ledger(store, clock), {}, StoreProblem(tell))
    await store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
    )
    (lease,) = await store.claim(WorkerId("worker"), 1)
    policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk", "agent.yaml")))
    session_context = SessionContext("s", "desk", policy.phases[0], policy, str(policy.digest()))
    doors = make_guard(app, policy, GivenSecrets({}))
    running = SessionRuntime(app.patient(), clock, doors, lease, session_context, {"send": tool(server.send, **SEND)})
    answer = await running.call(Call("s.1", "send", b'{"text":"hello"}'))
    await running.end("COMPLETED", "completed")
    await store.close()
    return answer
