"""`halter worker` as an operator types it: real processes, on one PostgreSQL."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from psycopg import sql

from halter.cli.unattended.worker import worker
from halter.config.trust import TrustFile, digest_folder
from halter.core.clock import SystemClock
from halter.core.ids import SortableIds
from halter.dispatch.dispatcher import DEFAULT_CONCURRENCY
from halter.journal.open import open_engine
from halter_drills.chaos import SKEWED
from tests.story.cables import Cable
from tests.story.test_cli_talk import Person
from tests.story.test_cli_up import Up

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]

SLEEPS = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: %s, reason: all quiet}}]\n"
RUNS = "autonomy: {enabled: true, idle_timeout: 0, token_budget_per_hour: 0}\n"
TOOLS = """
import asyncio

from halter import tool


@tool(level="SAFE", effect="read")
async def dig(seconds: float) -> str:
    '''Dig for a while.'''
    await asyncio.sleep(seconds)
    return "dug"


@tool(level="SAFE", effect="read")
async def depth() -> dict[str, int]:
    '''Tell how deep it is.'''
    return {"meters": 3}
"""


class Worker(Up):
    """A worker, and what it shows."""

    command: ClassVar[tuple[str, ...]] = ("worker",)

    def pid(self) -> int:
        return self.program.pid

    def drains(self) -> int:
        """End it as an operator would."""
        return self.ends(signal.SIGTERM)[0]

    def complains(self) -> str:
        """Wait for it to end without a signal, and return its standard error."""
        _, body = self.program.communicate(timeout=60)
        assert b"Traceback" not in body, body.decode()
        return body.decode()


class Operator(Person):
    """Somebody with a PostgreSQL store, which all their workers share."""

    def __init__(self, home: Path, url: str) -> None:
        super().__init__(home)
        self.url = url
        self.environ["HALTER_STORE"] = url

    def agent_of(self, name: str, text: str, replies: str, output: str = "") -> Path:
        """Write an agent's folder, and trust it. The same agent may be in several places."""
        folder = self.home / (output or name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent.yaml").write_text(f"name: {name}\nmodel: scripted\nscript: replies.yaml\n{text}")
        (folder / "replies.yaml").write_text(replies)
        (folder / "tools.py").write_text(TOOLS)
        TrustFile(self.home / "config" / "halter" / "trust.json").trust(folder, digest_folder(folder), "ada", 0)
        return folder

    def works(self, *words: object, how: tuple[str, ...] = ()) -> Worker:
        return Worker(self, *(str(word) for word in (*words, *how)))

    def run_python(self, *words: str) -> tuple[int, str, str]:
        """Start Python with these arguments, and wait for its end."""
        process = subprocess.run(
            [sys.executable, *words], check=False, env=self.environ, cwd=self.home, capture_output=True, timeout=60
        )
        return process.returncode, process.stdout.decode(), process.stderr.decode()

    def sql(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """Query the store without any code of Halter."""
        with closing(psycopg.connect(self.url.partition("?")[0], autocommit=True)) as server:
            server.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(self.url.rpartition("=")[2])))
            cursor = server.execute(statement.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def until(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until something holds in the store."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, [
                *self.sql("SELECT * FROM sessions"),
                *self.sql("SELECT * FROM workers"),
            ]
            time.sleep(0.05)

    def events(self, kind: str) -> list[tuple[str, int, dict[str, Any]]]:
        """List all events of a kind: stream, generation and facts."""
        rows = self.sql("SELECT stream, generation, facts FROM events WHERE kind = %s ORDER BY position", kind)
        return [(stream, generation, json.loads(facts)) for stream, generation, facts in rows]

    def find_owner(self, session: str) -> int:
        """Return the pid of the worker that has a session."""
        query = "SELECT w.about FROM sessions s JOIN workers w ON s.owner = w.worker WHERE s.session = %s"
        results = self.sql(query, session)
        return json.loads(results[0][0])["pid"] if results else 0

    def list_free_sessions(self) -> list[str]:
        """List the sessions that any worker may take immediately: their owner has released them."""
        query = "SELECT s.session FROM sessions s JOIN workers w ON s.owner = w.worker WHERE w.alive_until = 0"
        return [session for (session,) in self.sql(query)]

    def wait_for_workers(self, *workers: Worker) -> None:
        """Wait until the store knows all of them."""
        pids = {worker.pid() for worker in workers}
        self.until(
            lambda: pids <= {json.loads(row[0] or "{}").get("pid") for row in self.sql("SELECT about FROM workers")}
        )


@pytest.fixture
def ada(tmp_path: Path, postgres_schema_url: str) -> Iterator[Operator]:
    open_engine(postgres_schema_url, clock=SystemClock(), ids=SortableIds(SystemClock().now)).close()
    yield Operator(tmp_path, postgres_schema_url)
    while Up.begun:
        # Whatever failed, no program outlives its test.
        with Up.begun.pop().program as program:
            program.kill()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_a_session_sleeps_and_wakes_on_any_worker_with_capacity(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS, SLEEPS % "1s" * 50)
    first, second = ada.works(desk), ada.works(desk)
    ada.wait_for_workers(first, second)
    ada.until(lambda: len(ada.events("turn_ended")) >= 4)
    assert first.drains() == 0
    before = len(ada.events("turn_ended"))
    ada.until(lambda: len(ada.events("turn_ended")) >= before + 2)
    assert second.drains() == 0
    ((session,),) = ada.sql("SELECT session FROM sessions")
    assert session == "desk-1"
    # Each turn was somebody's alone, and whoever ended left no session behind.
    generations = [generation for _, generation, _ in ada.events("turn_ended")]
    assert generations == sorted({*generations})
    assert ada.sql("SELECT owner FROM sessions") == [("",)]
    assert ada.types("verify")[0] == 0


DIGS = (
    "- calls: [{tool: dig, arguments: {seconds: %s}}]\n- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h}}]\n"
)


def test_the_first_signal_lets_a_turn_end(ada: Operator) -> None:
    worker = ada.works(ada.agent_of("desk", RUNS, DIGS % 3))
    ada.until(lambda: bool(ada.events("call_started")))
    assert worker.drains() == 0
    (settled, *_) = ada.events("call_settled")
    assert settled[2]["outcome"] == "ok"
    assert ada.sql("SELECT state, owner FROM sessions") == [("SLEEPING", "")]


def test_sessions_of_a_drained_worker_resume_elsewhere_immediately(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS, SLEEPS % "1s" * 50)
    first = ada.works(desk)
    ada.until(lambda: bool(ada.events("turn_ended")))
    second = ada.works(desk)
    ada.wait_for_workers(second)
    assert first.drains() == 0
    before = len(ada.events("turn_ended"))
    # Nobody waits for a lease to run out.
    ada.until(lambda: len(ada.events("turn_ended")) > before, seconds=10)
    assert second.drains() == 0


def test_what_takes_longer_than_a_drain_may_is_stopped(ada: Operator) -> None:
    worker = ada.works(ada.agent_of("desk", RUNS, DIGS % 3000), "--drain", "1s")
    ada.until(lambda: bool(ada.events("call_started")))
    assert worker.drains() == 0
    assert ada.list_free_sessions() == ["desk-1"]


def test_a_second_signal_ends_a_worker_at_once(ada: Operator) -> None:
    worker = ada.works(ada.agent_of("desk", RUNS, DIGS % 3000), "--drain", "1h")
    ada.until(lambda: bool(ada.events("call_started")))
    worker.program.send_signal(signal.SIGTERM)
    ada.until(lambda: json.loads(ada.sql("SELECT about FROM workers")[0][0]).get("closing", False))
    code, text = worker.ends(signal.SIGTERM)
    assert (code, text) == (130, "")
    assert ada.list_free_sessions() == ["desk-1"]


def test_a_file_can_have_no_workers(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS, SLEEPS % "1h")
    code, text, output = ada.types("worker", str(desk), "--store", str(ada.home / "halter.db"))
    assert (code, text) == (3, "")
    file = ada.home / "halter.db"
    assert f"Workers need a PostgreSQL store; {file} is not one. Set HALTER_STORE=postgresql://" in output
    assert "run the agents of this machine with `halter up`" in output
    assert not file.exists()


def test_a_worker_that_is_started_while_postgresql_is_away_begins_when_it_is_there(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS, SLEEPS % "1h")
    with Cable(ada.url).laid() as cable:
        cable.unplug()
        worker = ada.works(desk, "--store", cable.url)
        assert worker.program.stderr is not None
        assert b"Cannot reach" in worker.program.stderr.readline()
        cable.plug()
        ada.until(lambda: ada.sql("SELECT * FROM sessions WHERE state = 'SLEEPING'") != [])
        assert worker.drains() == 0


def test_a_folder_without_agents_is_a_sentence(ada: Operator) -> None:
    code, text, output = ada.types("worker")
    assert (code, text) == (2, "")
    assert output == "No agent.yaml found here, in a folder here or in ./agents. Pass the agent folders.\n"


def test_the_agents_of_a_folder_are_found(ada: Operator) -> None:
    ada.agent_of("desk", RUNS, SLEEPS % "1h", "agents/desk")
    ada.agent_of("shop", RUNS, SLEEPS % "1h")
    worker = ada.works()
    worker.until("2 agents here.")
    ada.until(lambda: len(ada.events("session_parked")) == 2)
    assert worker.drains() == 0


def test_a_broken_folder_is_reported_and_the_others_run(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS, SLEEPS % "1h")
    (ada.home / "broken").mkdir()
    (ada.home / "broken" / "agent.yaml").write_text("name: broken\nmodle: x\n")
    worker = ada.works("broken", "nowhere", desk)
    worker.until("sleeps")
    code, text = worker.ends(signal.SIGTERM)
    assert code == 0
    assert "broken/agent.yaml line 2: `modle` is not a key" in text
    assert "nowhere" in text
    alone = ada.works("broken", "nowhere")
    assert "No agent can run. Fix one of the problems above, and start again." in alone.complains()
    assert alone.program.returncode == 3


def test_a_worker_without_an_agent_leaves_its_sessions_to_those_that_have_it(ada: Operator) -> None:
    desk, shop = (ada.agent_of(name, RUNS, SLEEPS % "1s" * 50) for name in ("desk", "shop"))
    worker, one = ada.works(desk, shop), ada.works(shop)
    ada.wait_for_workers(worker, one)
    ada.until(lambda: {stream for stream, _, _ in ada.events("turn_ended")} == {"session:desk-1", "session:shop-1"})
    assert worker.drains() == 0
    before = len(ada.events("turn_ended"))
    ada.until(lambda: len(ada.events("turn_ended")) >= before + 3)
    assert one.drains() == 0
    later = ada.events("turn_ended")[before:]
    assert {stream for stream, _, _ in later} == {"session:shop-1"}
    assert not any("desk-1" in line for line in one.seen)


def test_an_older_version_of_an_agent_waits_and_continues_when_the_newer_one_is_gone(ada: Operator) -> None:
    old = ada.agent_of("desk", RUNS, SLEEPS % "1s" * 100, "old")
    new = ada.agent_of("desk", RUNS, SLEEPS % "1s" * 100, "new")
    (new / "tools.py").write_text(TOOLS + "\n# Better now.\n")
    TrustFile(ada.home / "config" / "halter" / "trust.json").trust(new, digest_folder(new), "ada", 0)
    older = ada.works(old)
    older.until("turn 1 ends")
    newer = ada.works(new)
    older.until("Another worker has a newer version of this agent's files")
    newer.until("turn ")
    newer.until("turn ")
    assert newer.drains() == 0
    older.until("No other worker has a newer version of this agent's files now")
    older.until("turn ")
    assert older.drains() == 0


def test_a_wrong_clock_is_reported_and_nothing_runs(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS, SLEEPS % "1h")
    command = [*SKEWED, "worker", str(desk)]
    code, _, text = ada.run_python(*command)
    assert code == 3
    assert re.search(r"This machine's clock is (2h|1h59m) ahead of the database's; the maximum is 2 s\.", text)
    assert ada.events("turn_started") == []


SENSOR = """
hot_state: {fields: {hole: {type: object, ttl: 60}}}
sensors:
  - {name: hole, type: poll, interval: 1, source: {tool: depth}, updates: [{field: hole}]}
"""


def test_a_session_with_sensors_moves_when_its_worker_is_killed(ada: Operator) -> None:
    desk = ada.agent_of("desk", RUNS + SENSOR, SLEEPS % "1h" * 9)
    workers = [ada.works(desk), ada.works(desk)]
    ada.wait_for_workers(*workers)
    ada.until(lambda: bool(ada.events("session_parked")))
    pid = ada.find_owner("desk-1")
    (victim,) = [worker for worker in workers if worker.pid() == pid]
    (heir,) = [worker for worker in workers if worker.pid() != pid]
    victim.program.kill()
    ada.until(lambda: ada.find_owner("desk-1") == heir.pid())
    assert ada.sql("SELECT state, generation FROM sessions") == [("SLEEPING", 2)]
    assert heir.drains() == 0


def test_a_schedule_fires_once_with_two_workers(ada: Operator) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=15)).isoformat(timespec="seconds")
    ticks = "".join(f"  - {{name: tick-{number}, at: '{soon}', prompt: Tick.}}\n" for number in range(3))
    text = f"autonomy: {{enabled: false}}\nschedules:\n{ticks}"
    desk = ada.agent_of("desk", text, "- {text: Tock., repeat: true}\n")
    workers = [ada.works(desk), ada.works(desk)]
    ada.until(lambda: len(ada.events("session_ended")) >= 3)
    assert [worker.drains() for worker in workers] == [0, 0]
    assert sorted(facts["session"] for _, _, facts in ada.events("run_started")) == [
        f"desk.tick-{number}-1" for number in range(3)
    ]
    assert len(ada.events("session_ended")) == 3


HOOK = """
autonomy: {enabled: false}
secrets: [HOOK]
webhooks: [{name: deploys, prompt: A deploy has finished., token: "${secret:HOOK}"}]
"""


def deliver(port: int, name: str) -> dict[str, Any]:
    headers = {"Authorization": "Bearer open-sesame", "Halter-Delivery": name, "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/hooks/desk/deploys", b"{}", headers)
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 It is ours.
        return json.load(answer)


def test_a_delivery_that_comes_to_two_workers_starts_one_session(ada: Operator) -> None:
    ada.environ["HALTER_SECRET_HOOK"] = "open-sesame"
    desk = ada.agent_of("desk", HOOK, "- {text: Good., repeat: true}\n")
    ports = [find_free_port(), find_free_port()]
    workers = [ada.works(desk, "--listen", f"127.0.0.1:{port}") for port in ports]
    ada.wait_for_workers(*workers)
    ada.until(lambda: all(is_listening(port) for port in ports))
    answers = [deliver(port, "deploy-7") for port in (*ports, *ports)]
    assert [answer["repeated"] for answer in answers] == [False, True, True, True]
    assert len({answer["session"] for answer in answers}) == 1
    ada.until(lambda: len(ada.events("session_ended")) == 1)
    assert [worker.drains() for worker in workers] == [0, 0]
    assert len(ada.events("session_started")) == 1


def is_listening(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


HOLE = "- {finds: dug, text: Done., repeat: true}\n- {calls: [{tool: dig, arguments: {seconds: 2}}], repeat: true}\n"


def find_peak_calls(ada: Operator) -> int:
    """Return the highest number of calls that ran at the same time."""
    rows = ada.sql("SELECT kind FROM events WHERE kind IN ('call_started', 'call_settled') ORDER BY position")
    peak = running = 0
    for (kind,) in rows:
        running += 1 if kind == "call_started" else -1
        peak = max(peak, running)
    return peak


def test_a_worker_runs_no_more_sessions_at_once_than_its_limit(ada: Operator) -> None:
    names = ("desk", "shop", "mill")
    folders = [ada.agent_of(name, RUNS, DIGS % 1) for name in names]
    worker = ada.works(*folders, "--concurrency", "1")
    ada.until(lambda: len(ada.events("session_parked")) == len(names))
    assert worker.drains() == 0
    assert find_peak_calls(ada) == 1


def test_no_more_tasks_of_an_agent_are_awake_on_all_workers_than_its_file_says(ada: Operator) -> None:
    (ada.home / "box").mkdir()
    for number in range(8):
        (ada.home / "box" / f"{number}.txt").write_text(f"Letter {number}.")
    watch = f"watches: [{{name: box, path: {ada.home}/box, prompt: A letter., debounce: 0s, max_parallel: 8}}]\n"
    desk = ada.agent_of("desk", f"autonomy: {{enabled: false}}\nconcurrency: 2\n{watch}", HOLE)
    workers = [ada.works(desk), ada.works(desk)]
    ada.until(lambda: len(ada.events("session_ended")) == 8)
    assert [worker.drains() for worker in workers] == [0, 0]
    assert find_peak_calls(ada) == 2


def test_a_worker_runs_as_many_sessions_at_once_as_a_dispatcher_does_by_default() -> None:
    assert signature(worker).parameters["concurrency"].default == DEFAULT_CONCURRENCY
