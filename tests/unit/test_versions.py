"""Which version of an agent is in force, and whose clock may be trusted."""

import pytest

from halter.core.clock import HOUR, SECOND
from halter.dispatch.dispatcher import find_version_in_force
from halter.dispatch.store_clock import StoreClock, read_steady_clock, read_wall_clock
from halter.dispatch.workers import WorkerInfo, WorkerRow

NOW = 1_000


def worker(version: str, started_at: int, *, alive_until: int = NOW, closing: bool = False) -> WorkerRow:
    worker_info = WorkerInfo(agents={"desk": version}, started_at=started_at, closing=closing)
    return WorkerRow(f"{version}.{started_at}", alive_until, worker_info.encode())


@pytest.mark.parametrize(
    ("workers", "version"),
    [
        ([], ""),
        ([worker("old", 1)], "old"),
        ([worker("old", 1), worker("new", 5)], "new"),
        ([worker("new", 5), worker("old", 1), worker("old", 9)], "new"),
        ([worker("old", 1), worker("new", 5, alive_until=NOW - 1)], "old"),
        ([worker("old", 1), worker("new", 5, closing=True)], "old"),
        ([worker("old", 1), WorkerRow("says nothing", NOW), WorkerRow("says nonsense", NOW, "{")], "old"),
    ],
)
def test_the_newest_version_that_a_live_worker_brought_is_in_force(workers: list[WorkerRow], version: str) -> None:
    assert find_version_in_force(workers, "desk", NOW) == version
    assert find_version_in_force(workers, "another", NOW) == ""


@pytest.mark.parametrize(("ahead", "word"), [(2 * HOUR, "behind"), (-2 * HOUR, "ahead of"), (3 * SECOND, "behind")])
def test_a_machine_whose_clock_differs_from_the_stores_is_refused(ahead: int, word: str) -> None:
    clock, now = StoreClock(), read_steady_clock()
    clock.set_time(now, read_wall_clock() + ahead, now)
    assert word in clock.refusal()
    assert "Set it, for example with `timedatectl set-ntp true`" in clock.refusal()


def test_the_stores_time_is_told_and_a_slow_answer_proves_nothing() -> None:
    clock, now = StoreClock(), read_steady_clock()
    assert clock.refusal() == ""
    clock.set_time(now, read_wall_clock() + HOUR, now)
    assert HOUR - SECOND < clock.now() - read_wall_clock() < HOUR + SECOND
    clock.set_time(now - 3 * HOUR, read_wall_clock() - HOUR, now)
    assert clock.refusal() == ""
