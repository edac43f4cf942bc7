"""The processes that run agents, as everybody is shown them."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.ids import WorkerId
from halter.dispatch.workers import WorkerInfo
from halter.operations import fleet as desk_workers
from halter.operations.fleet import DEAD_WORKER_TTL, WorkerView
from halter.present import report as words
from halter.runtime.runtime import DEFAULT_LEASE_DURATION
from tests.story.test_desk import Office

BOTH = {"mine": "a" * 64, "theirs": "b" * 64}
ABOUT = WorkerInfo(
    kind="worker", host="north", pid=11, version="0.7.0", started_at=5, agents=BOTH, concurrency=100, awake=3,
    residents=2,
)  # fmt: skip

Beat = Callable[..., Awaitable[None]]


@pytest.fixture
async def office(make_scribe: Any, tmp_path: Path) -> AsyncGenerator[Office]:
    new_office = Office(make_scribe.on("memory:", tmp_path))
    yield new_office
    await new_office.ground.store.close()


@pytest.fixture
def beat(office: Office) -> Beat:
    """Let a worker say something of itself."""

    async def say(name: str, **other: Any) -> None:
        worker_info = WorkerInfo(**{field: getattr(ABOUT, field) for field in ABOUT.__struct_fields__} | other)
        await office.ground.store.beat(WorkerId(name), {}, worker_info.encode())

    return say


async def read_only_worker(office: Office, *agents: str, everything: bool = False) -> WorkerView:
    (worker_view,) = await desk_workers.workers(office.desk("viewer", *agents), everything=everything)
    return worker_view


async def test_a_worker_is_shown_with_all_that_it_says_of_itself(office: Office, beat: Beat) -> None:
    await beat("w1")
    worker_view = await read_only_worker(office)
    assert (
        worker_view.worker,
        worker_view.kind,
        worker_view.host,
        worker_view.pid,
        worker_view.version,
        worker_view.since,
    ) == (
        "w1",
        "worker",
        "north",
        11,
        "0.7.0",
        5,
    )
    assert (worker_view.health, worker_view.alive, worker_view.agents) == (
        "alive",
        True,
        {"mine": "a" * 12, "theirs": "b" * 12},
    )
    assert words.name_worker(worker_view) == "halter worker 11 on north"
    assert words.describe_load(worker_view) == "3 of 100, 2 stay"
    assert words.agents_of_worker(worker_view) == "mine aaaaaaaaaaaa, theirs bbbbbbbbbbbb"
    assert words.describe_worker_condition(worker_view, office.ground.now()) == ""


async def test_who_sees_one_agent_is_shown_only_that_of_a_worker_that_has_two(office: Office, beat: Beat) -> None:
    await beat("w1", waiting=("mine", "theirs"))
    await beat("w2", agents={"theirs": "1"})
    worker_view = await read_only_worker(office, "mine")
    assert (worker_view.worker, list(worker_view.agents), worker_view.waiting) == ("w1", ["mine"], ["mine"])
    assert "theirs" not in words.describe_worker_condition(worker_view, office.ground.now())


async def test_one_that_dies_is_shown_for_an_hour_and_afterwards_only_to_who_asks(office: Office, beat: Beat) -> None:
    await beat("w1")
    office.ground.time += DEFAULT_LEASE_DURATION + MINUTE
    worker_view = await read_only_worker(office)
    assert (worker_view.health, worker_view.alive, words.describe_load(worker_view)) == ("lapsed", False, "")
    assert "last heartbeat 1m15s ago" in words.describe_worker_condition(worker_view, office.ground.now())
    office.ground.time += DEAD_WORKER_TTL
    assert await desk_workers.workers(office.desk()) == []
    assert (await read_only_worker(office, everything=True)).worker == "w1"


async def test_one_that_ended_in_good_order_is_shown_only_to_who_asks(office: Office, beat: Beat) -> None:
    await beat("w1")
    await office.ground.store.leave(WorkerId("w1"))
    assert await desk_workers.workers(office.desk()) == []
    worker_view = await read_only_worker(office, everything=True)
    assert (worker_view.health, worker_view.heard_at) == ("left", None)


async def test_a_process_that_only_has_a_conversation_is_no_worker(office: Office) -> None:
    await office.ground.store.beat(WorkerId("chat"))
    await office.ground.store.beat(WorkerId("odd"), {}, "{no json")
    assert await desk_workers.workers(office.desk(), everything=True) == []


async def test_one_that_drains_waits_or_refuses_says_so(office: Office, beat: Beat) -> None:
    await beat("a", closing=True)
    await beat("b", waiting=("mine", "theirs"))
    await beat("c", waiting=("mine",))
    await beat("d", problem="This machine's clock is 9s ahead.")
    worker_views = {worker_view.worker: worker_view for worker_view in await desk_workers.workers(office.desk())}
    assert [worker_view.health for worker_view in worker_views.values()] == ["draining", "waits", "alive", "draining"]
    now = office.ground.now()
    assert words.describe_worker_condition(worker_views["a"], now).startswith("Takes no new sessions, and ends when")
    assert "newer files of mine, theirs and runs their sessions" in words.describe_worker_condition(
        worker_views["b"], now
    )
    assert "newer files of mine and runs their sessions" in words.describe_worker_condition(worker_views["c"], now)
    assert words.describe_worker_condition(worker_views["d"], now) == "This machine's clock is 9s ahead."


async def test_a_worker_that_was_heard_lately_is_never_said_to_be_heard_in_the_future(
    office: Office, beat: Beat
) -> None:
    await beat("w1")
    office.ground.time -= 10 * SECOND
    assert words.describe_last_heartbeat(await read_only_worker(office), office.ground.now()) == "0ms ago"
