"""When a sentinel ends the process that it watches, and when it does not."""

import os
from mmap import mmap

import pytest

from halter.core.clock import SECOND
from halter.dispatch.sentinel_program import (
    ProcessSample,
    begin_first_silence,
    begin_silence,
    find_reason_to_end,
    is_blocked,
    update_silence,
)
from halter.system.liveness import LIVENESS_BYTES, LivenessReading, LivenessWriter, read_liveness

NANO = 1_000_000_000


@pytest.fixture
def memory() -> mmap:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, LIVENESS_BYTES)
    shared = mmap(descriptor, LIVENESS_BYTES)
    os.close(descriptor)
    return shared


def test_a_pulse_shows_what_another_process_has_to_know(memory: mmap) -> None:
    numbers: list[int] = []
    pulse = LivenessWriter(memory, lambda: numbers.append(1))
    pulse.beat()
    pulse.show_groups([7, 8])
    assert read_liveness(memory)[1:] == (0, "", (), (7, 8))
    with pulse.works_as("up.1"):
        slow = pulse.begin_call("slow\0tool", 60 * SECOND)
        quick = pulse.begin_call("quick", SECOND)
        signs = read_liveness(memory)
        pulse.end_call(quick)
        assert (signs.call, signs.workers, signs.groups) == ("quick", ("up.1",), (7, 8))
        assert 0 < signs.deadline - signs.alive_at <= NANO
        assert read_liveness(memory).deadline - signs.alive_at > 59 * NANO
        pulse.end_call(slow)
    assert read_liveness(memory)[1:] == (0, "quick", (), (7, 8))
    assert numbers == [1]


def test_whatever_a_process_has_fits_into_its_pulse(memory: mmap) -> None:
    pulse = LivenessWriter(memory)
    pulse.show_groups(range(100_000))
    with pulse.works_as("w" * 100_000):
        pulse.begin_call("ü" * 100_000, SECOND)
        signs = read_liveness(memory)
    assert signs.call == "ü" * 200
    assert len(signs.groups) == 1024


def test_a_pulse_that_nobody_reads_costs_nothing() -> None:
    pulse = LivenessWriter()
    with pulse.works_as("up.1"):
        assert pulse.begin_call("tool", SECOND) is None
        pulse.beat()
        pulse.show_groups([1])


def looks(*seen: tuple[float, int, str, float], deadline: int = 0, workers: tuple[str, ...] = ("w",)) -> str:
    """Look again and again: when, at which last sign of life, in which state, after how much processor time."""
    first, *process_samples = [
        ProcessSample(at, LivenessReading(alive, deadline, "tool", workers), state, cpu)
        for at, alive, state, cpu in seen
    ]
    silence = begin_silence(first)
    for process_sample in process_samples:
        silence = update_silence(silence, process_sample)
    return find_reason_to_end(silence, [first, *process_samples][-1], lambda worker: f"agent:{worker}")


def each_tenth(seconds: float, state: str, cpu: float) -> list[tuple[float, int, str, float]]:
    """Look every tenth of a second at a process that gives no sign of life."""
    return [(tick / 10, 1, state, cpu * tick / 10) for tick in range(int(seconds * 10) + 1)]


def test_a_process_that_computes_without_a_sign_of_life_is_blocked() -> None:
    assert looks(*each_tenth(1.1, "R", 1.0)) == ""
    assert looks(*each_tenth(1.3, "R", 1.0)) == "agent:w is halted"
    assert looks(*each_tenth(2.4, "R", 0.2)) == ""
    assert looks(*each_tenth(2.6, "R", 0.2)) == "agent:w is halted"


def test_a_process_that_waits_without_a_sign_of_life_is_blocked() -> None:
    assert looks(*each_tenth(1.3, "S", 0.0)) == "agent:w is halted"


def test_a_process_that_gives_signs_of_life_is_not_blocked() -> None:
    assert looks(*[(tick / 10, tick // 2, "R", tick / 10) for tick in range(100)]) == ""


def test_a_process_that_gets_no_processor_is_not_blocked() -> None:
    assert looks(*each_tenth(40, "R", 0.01)) == ""
    idle_before = [(0.0, 1, "S", 0.0), (0.1, 1, "S", 0.0), *((0.2 + tick / 10, 1, "R", 0.0) for tick in range(100))]
    assert looks(*idle_before) == ""


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_process_that_is_stopped_or_debugged_is_left_alone(state: str) -> None:
    assert looks(*each_tenth(60, state, 0.0), deadline=1) == ""
    resumed = [*each_tenth(60, state, 0.0), (60.1, 1, "R", 0.1), (61.0, 1, "R", 1.0)]
    assert looks(*resumed, deadline=1) == ""


def test_a_machine_that_slept_ends_nothing() -> None:
    """The clock of the sentinel stands still then, or its own looks are far apart."""
    assert looks((0.0, 1, "S", 0.0), (3600.0, 1, "S", 0.0), (3600.1, 1, "S", 0.0), deadline=1) == ""


def test_a_blocked_process_is_ended_for_a_deadline_or_a_halt_and_nothing_else() -> None:
    blocked = each_tenth(3, "S", 0.0)
    assert looks(*blocked, deadline=NANO) == "a call was out of time"
    assert looks(*blocked, deadline=int(2.5 * NANO), workers=()) == ""
    assert looks(*blocked, deadline=0, workers=()) == ""


@pytest.mark.parametrize(
    ("seconds", "state", "share", "locked", "why"),
    [
        (2.0, "R", 0.9, (0.6, 2.0), "it kept the store locked"),
        (2.0, "R", 0.9, (0.6, 1.4), ""),
        (2.0, "R", 0.9, (1.2, 2.0), ""),
        (9.0, "S", 0.0, (0.6, 9.0), ""),
        (11.0, "S", 0.0, (0.6, 11.0), "it kept the store locked"),
    ],
)
def test_a_blocked_process_that_keeps_the_store_locked_is_ended_since_no_halt_could_be_written(
    seconds: float, state: str, share: float, locked: tuple[float, float], why: str
) -> None:
    """One that computes nothing is given longer: it may have the lock, and wait for a busy processor."""
    times = [tick / 10 for tick in range(int(seconds * 10) + 1)]
    signs = [ProcessSample(at, LivenessReading(1), state, share * at, locked[0] <= at <= locked[1]) for at in times]
    silence = begin_silence(signs[0])
    for process_sample in signs[1:]:
        silence = update_silence(silence, process_sample)
    assert find_reason_to_end(silence, signs[-1], lambda _: "") == why


def test_a_silence_counts_from_before_the_first_look_unless_the_process_was_stopped() -> None:
    """The sentinel needs a while to start; a process that was blocked by then is not given another while."""
    signs = LivenessReading(10 * NANO, 0, "tool", ("w",))
    for state, since in (("S", 10.0), ("R", 10.0), ("T", 11.0)):
        assert begin_first_silence(ProcessSample(11.0, signs, state, 0.0)).since == since
    assert begin_first_silence(ProcessSample(11.0, LivenessReading(0), "S", 0.0)).since == 11.0


def test_a_silence_counts_from_the_last_sign_of_life() -> None:
    first = ProcessSample(0.0, LivenessReading(1), "S", 0.0)
    silence = update_silence(begin_silence(first), ProcessSample(0.9, LivenessReading(2), "S", 0.0))
    assert silence.since == 0.9
    assert not is_blocked(silence, ProcessSample(2.3, LivenessReading(2), "S", 0.0))
