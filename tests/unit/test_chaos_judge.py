"""The judge of the chaos drill finds what is wrong where it is, and only there."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import SECOND
from halter.runtime.runtime import DEFAULT_LEASE_DURATION
from halter_drills.chaos import (
    ChaosSeen,
    Orphan,
    Presence,
    WorkerProcess,
    find_shared,
    find_unended,
    find_unpaid,
    lateness,
)
from halter_drills.checker import LateFinding, RecordedEvent, Stall, split_lateness


def fact(
    kind: str, at: float = 0, generation: int = 1, session: str = "courier.sleeps-1", **facts: Any
) -> RecordedEvent:
    return RecordedEvent(f"session:{session}", 1, kind, round(at * SECOND), generation, facts)


def worker(folder: Path, name: str, *lines: tuple[str, int, int]) -> WorkerProcess:
    """Make one that has said so much, and was cut off in the middle of a word."""
    values = [{"name": "it", "stream": stream, "seq": seq, "generation": own, "hash": ""} for stream, seq, own in lines]
    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in values) + '{"name": "session_wo')
    with subprocess.Popen(["/bin/true"]) as process:
        return WorkerProcess(name, process, folder / name, folder / name)


def test_two_workers_in_one_generation_are_found(tmp_path: Path) -> None:
    anna = worker(tmp_path, "anna", ("session:one", 1, 1), ("session:one", 5, 3), ("session:one/in", 1, 2))
    bert = worker(tmp_path, "bert", ("session:one", 3, 2), ("session:one/in", 2, 2), ("session:two", 1, 1))
    assert list(find_shared([anna, bert])) == []
    carl = worker(tmp_path, "carl", ("session:one", 4, 2))
    assert list(find_shared([anna, bert, carl])) == ["Generation 2 of session:one was written by bert and carl."]


def test_what_was_taken_for_paid_and_was_not_is_found_and_the_other_way_round() -> None:
    events = [fact("call_started", call="a", tool="pay"), fact("call_settled", call="a", outcome="ok")]
    assert list(find_unpaid(events, {"a": 1})) == []
    assert list(find_unpaid(events, {})) == ["The call a was settled as done, but had no effect."]
    assert list(find_unpaid(events, {"a": 1, "b": 1})) == ["The call b had an effect, but has no intent."]


def test_a_session_that_ends_twice_otherwise_or_not_at_all_is_found() -> None:
    well = fact("session_ended", state="COMPLETED")
    assert list(find_unended([well], 1)) == []
    for events in ([], [well, well], [fact("session_ended", state="ERROR")]):
        assert len(list(find_unended(events, 1))) == 1


ORPHAN = Orphan("courier.sleeps-1", 1, 10 * SECOND)


@pytest.mark.parametrize(
    ("resumed", "blows", "longest"),
    [
        (11.5, [], 1.5),
        (12.5, [], 2.5),
        (9.0, [], 0.0),
        (16.0, [("restart", 9, 15)], 1.0),
        (19.0, [("restart", 9, 15)], 4.0),
        (19.0, [("restart", 20, 25)], 9.0),
        (28.0, [("kill", 11, 11)], 28 - 11 - DEFAULT_LEASE_DURATION / SECOND),
        (28.0, [("kill", 9, 9)], 18.0),
        (28.0, [("go on", 11, 11)], 18.0),
    ],
)
def test_an_orphan_is_late_by_the_time_in_which_somebody_could_have_gone_on(
    resumed: float, blows: list[tuple[str, int, int]], longest: float
) -> None:
    event = ChaosSeen(blows=[(text, begin * SECOND, end * SECOND) for text, begin, end in blows], orphans=[ORPHAN])
    late, found = lateness([fact("session_woken", 1), fact("session_woken", resumed, 2)], event)
    assert found == round(longest * SECOND)
    assert bool(late) == (longest > 2)


@pytest.mark.parametrize(
    ("presences", "longest"),
    [
        ([(0, 9), (14, 99)], 1.0),
        ([(0, 9), (16, 99)], 0.0),
        ([(0, 11), (14, 99)], 5.0),
        ([(0, 99), (14, 99)], 5.0),
    ],
)
def test_the_time_in_which_no_worker_was_there_is_no_delay(presences: list[tuple[int, int]], longest: float) -> None:
    """On a slow machine a worker that replaces a killed one takes seconds to start."""
    present = [Presence(since * SECOND, until * SECOND) for since, until in presences]
    event = ChaosSeen(presences=present, orphans=[ORPHAN])
    late, found = lateness([fact("session_woken", 1), fact("session_woken", 15, 2)], event)
    assert found == round(longest * SECOND)
    assert bool(late) == (longest > 2)


def test_a_delay_within_the_load_of_the_machine_at_that_time_is_no_proof() -> None:
    event = ChaosSeen(orphans=[ORPHAN])
    late, _ = lateness([fact("session_woken", 1), fact("session_woken", 12.5, 2)], event)
    sentences = ["courier.sleeps-1 got a new owner 2.5 s after its lease expired."]
    busy, earlier = Stall(11 * SECOND, 12 * SECOND), Stall(3 * SECOND, 9 * SECOND)
    assert split_lateness(late, [busy]) == ([], sentences)
    assert split_lateness(late, [earlier]) == (sentences, [])


def test_an_orphan_that_nobody_resumes_is_found_unless_it_has_ended() -> None:
    event = ChaosSeen(orphans=[ORPHAN])
    assert lateness([fact("session_woken", 1)], event)[0] == [LateFinding("courier.sleeps-1 got no new owner.")]
    assert lateness([fact("session_ended", 1)], event) == ([], 0)
