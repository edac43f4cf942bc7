"""`halter doctor` on those who run agents: who is there, what they leave lying, and what they ask of PostgreSQL."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Ticket
from halter.dispatch.ticket_queue import ProcrastinateQueue, prepare_queue_tables
from halter.dispatch.workers import WorkerInfo
from halter.operations.doctor.workers import (
    UnclaimedSessions,
    check_agent_files,
    check_connections,
    check_due_sessions,
    check_presence,
    check_queue,
    check_versions,
)
from halter.operations.fleet import WorkerView
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.state import lifecycle
from tests.story.test_doctor import Doctor

NOW = 1_000 * HOUR
ONE = WorkerView(
    worker="w", kind="worker", host="north", pid=11, version="0.7.0", since=NOW, health="alive", alive=True,
    heard_at=NOW, agents={"watch": "1"}, waiting=(), concurrency=10, awake=0, residents=0, closing=False, problem="",
)  # fmt: skip
GONE = replace(ONE, health="lapsed", alive=False, heard_at=NOW - 3 * MINUTE)
LATE = UnclaimedSessions("watch", 2, NOW - 5 * MINUTE)
RAN = WorkerInfo(kind="worker", host="north", pid=11, version="0.7.0", agents={"watch": "1"}, concurrency=10)


def test_who_runs_agents_is_counted_by_machine() -> None:
    check = check_presence([ONE, ONE, replace(ONE, host="south")], NOW)
    assert (check.verdict, check.finding) == ("ok", "3 processes run agents here: 2 on north, 1 on south.")
    assert check_presence([], NOW).verdict == "ok"


def test_one_that_died_within_the_hour_is_worth_a_look_and_one_that_refuses_is_a_problem() -> None:
    died = check_presence([ONE, GONE], NOW)
    assert (died.verdict, "halter worker 11 on north (3m ago)" in died.finding) == ("warning", True)
    ill = check_presence([replace(ONE, problem="Its clock is wrong.")], NOW)
    assert (ill.verdict, ill.finding) == ("problem", "halter worker 11 on north: Its clock is wrong.")


def test_several_versions_of_the_program_are_reported_and_those_that_are_gone_do_not_count() -> None:
    worker_view = replace(ONE, version="0.8.0", host="south")
    check = check_versions([ONE, worker_view])
    assert check is not None
    assert "0.7.0 on north; 0.8.0 on south" in check.finding
    assert check_versions([ONE, replace(worker_view, alive=False)]) is None


def test_workers_that_wait_because_of_older_files_are_reported() -> None:
    check = check_agent_files([ONE, replace(ONE, host="south", waiting=("watch",))])
    assert check is not None
    assert check.verdict == "warning"
    assert check.finding.startswith("halter worker 11 on south: Another worker has newer files of watch")
    assert check_agent_files([ONE, replace(GONE, waiting=("watch",))]) is None


ELSE = replace(ONE, agents={"clerk": "1"})


@pytest.mark.parametrize(
    ("views", "verdict", "words"),
    [
        ([], "warning", "watch has 2 sessions that have been due for 5m, and no live process has its folder"),
        ([GONE], "warning", "no live process has its folder"),
        ([ELSE], "problem", "run halter off watch"),
        ([replace(ONE, health="waits", waiting=("watch",))], "problem", "wait for newer files or are draining"),
        ([replace(ONE, agents={**ONE.agents, "x": "1"}, waiting=("watch",))], "problem", "wait for newer files"),
        ([replace(ONE, health="draining", closing=True)], "problem", "wait for newer files or are draining"),
        ([replace(ONE, awake=10)], "warning", "all workers with its folder are busy"),
        ([ONE], "ok", "No due session waits for a worker."),
    ],
)
def test_due_sessions_that_no_worker_runs_are_reported_with_the_reason(
    views: list[WorkerView], verdict: str, words: str
) -> None:
    check = check_due_sessions([LATE], views, NOW)
    assert (check.verdict, words in check.finding) == (verdict, True), check


def test_connections_must_be_enough_for_all_and_for_one_more() -> None:
    assert check_connections(97, 20, ["worker"] * 3, 8).verdict == "ok"
    assert "need up to 27," in check_connections(97, 20, ["worker"] * 3 + ["up"], 8).finding
    assert check_connections(97, 90, ["worker"] * 3, 8).verdict == "warning"
    full = check_connections(97, 20, ["worker"] * 13, 8)
    assert (full.verdict, "Raise max_connections before you start another worker." in full.finding) == ("warning", True)


def test_tickets_that_grow_old_or_are_left_over_by_the_thousand_are_reported() -> None:
    assert check_queue(0, 0, 0).verdict == "ok"
    assert check_queue(500, MINUTE, 1000).verdict == "ok"
    old = check_queue(3, 2 * MINUTE, 0)
    assert (old.verdict, "3 tickets wait in the queue, the oldest for 2m" in old.finding) == ("warning", True)
    assert check_queue(0, 0, 1001).verdict == "warning"


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


def seed(doctor: Doctor, url: str, what: Callable[[Runtime], Awaitable[None]], *, lease: int = 15 * SECOND) -> None:
    """Leave something in the store of a doctor."""

    async def do() -> None:
        async with open_runtime(read_settings(doctor.environ, doctor.home, url), lease=lease) as app:
            await what(app)

    asyncio.run(do())


async def begin_session(app: Runtime) -> None:
    event = SessionStarted(session="watch-1", agent="watch", kind="autonomous", started_by="ann")
    await app.store.commit(lifecycle.start_session(event))


def record_heartbeat(worker_info: WorkerInfo) -> Callable[[Runtime], Awaitable[None]]:
    async def beat(app: Runtime) -> None:
        await app.store.beat(WorkerId("w1"), {}, worker_info.encode())

    return beat


async def claim_session(app: Runtime) -> None:
    await app.store.beat(WorkerId("w1"), {}, RAN.encode())
    assert await app.store.claim(WorkerId("w1"), 1, SessionId("watch-1"))


def test_on_a_file_the_workers_are_reported_and_nothing_of_a_server(doctor: Doctor) -> None:
    seed(doctor, str(doctor.store), record_heartbeat(replace(RAN, kind="up")))
    fields = doctor.looks()
    assert fields["workers"] == ("ok", "1 process runs agents here: 1 on north.")
    assert fields["due"][0] == "ok"
    assert not {"connections", "queue", "versions", "files"} & set(fields)


@pytest.mark.postgres
def test_on_postgresql_a_folder_that_is_missing_is_found_and_one_that_is_off_is_nobodys_worry(
    doctor: Doctor, postgres_schema_url: str
) -> None:
    url = postgres_schema_url
    seed(doctor, url, begin_session)
    seed(doctor, url, record_heartbeat(replace(RAN, agents={"clerk": "1"})))
    change_store(url, "UPDATE sessions SET due_at = due_at - 600000000")
    fields = doctor.looks("--store", url)
    assert (fields["code"], fields["due"][0]) == (1, "problem")
    assert "watch has 1 session that has been due for 10m" in fields["due"][1]
    assert fields["workers"] == ("ok", "1 process runs agents here: 1 on north.")
    assert fields["connections"][0] == "ok"
    assert "need up to 8, and each worker up to 8" in fields["connections"][1]
    assert fields["queue"] == ("ok", "0 tickets in the queue, none of them old.")
    assert fields["clock"][0] == "ok"
    change_store(url, "INSERT INTO agents (agent, switched_on, by, at, reason) VALUES ('watch', 0, 'ann', 1, '')")
    assert doctor.looks("--store", url)["due"][0] == "ok"


@pytest.mark.postgres
def test_on_postgresql_what_a_dead_worker_left_is_found(doctor: Doctor, postgres_schema_url: str) -> None:
    url = postgres_schema_url
    seed(doctor, url, begin_session)
    seed(doctor, url, claim_session)
    assert doctor.looks("--store", url)["due"][0] == "ok"
    change_store(url, "UPDATE workers SET alive_until = alive_until - 120000000")
    fields = doctor.looks("--store", url)
    assert (fields["due"][0], "watch has 1 session that has been due for 1m" in fields["due"][1]) == ("warning", True)
    assert "Lost within the hour: halter worker 11 on north" in fields["workers"][1]


@pytest.mark.postgres
def test_on_postgresql_tickets_that_pile_up_are_found(doctor: Doctor, postgres_schema_url: str) -> None:
    url = postgres_schema_url
    seed(doctor, url, record_heartbeat(RAN))
    prepare_queue_tables(url)

    async def offer_tickets(app: Runtime) -> None:
        waiting = ProcrastinateQueue(url, app.clock, {"watch": "1"})
        with psycopg.connect(*list_connection_arguments(url)) as connection:
            waiting.enqueue(connection, [Ticket(SessionId(f"watch-{number}"), "watch", 0) for number in range(3)])

    seed(doctor, url, offer_tickets)
    assert doctor.looks("--store", url)["queue"] == ("ok", "3 tickets in the queue, none of them old.")
    change_store(url, "UPDATE procrastinate_events SET at = at - interval '2 minutes'")
    assert "3 tickets wait in the queue, the oldest for 2m" in doctor.looks("--store", url)["queue"][1]
    seed(doctor, url, record_heartbeat(replace(RAN, agents={"watch": "2"})))
    assert doctor.looks("--store", url)["queue"][0] == "ok"


@pytest.mark.postgres
def test_on_postgresql_a_clock_that_differs_from_the_databases_is_a_problem(
    doctor: Doctor, postgres_schema_url: str
) -> None:
    url = postgres_schema_url
    seed(doctor, url, begin_session)
    text = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint + 60000000"
    change_store(url, f"CREATE OR REPLACE FUNCTION microseconds() RETURNS BIGINT VOLATILE LANGUAGE SQL RETURN {text}")
    fields = doctor.looks("--store", url)
    assert (fields["code"], fields["clock"][0]) == (1, "problem")
    assert "behind the database's" in fields["clock"][1]


def list_connection_arguments(url: str) -> list[Any]:
    server, _, schema = url.partition("?schema=")
    return [f"{server}?options=-csearch_path%3D{schema}"]


def change_store(url: str, statement: str) -> None:
    """Change the store behind its back, as time would."""
    with psycopg.connect(*list_connection_arguments(url)) as connection:
        connection.execute(statement.encode())
