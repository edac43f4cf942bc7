"""The processes of a drill can be heard, killed, stopped and continued, and none is left behind."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from halter.core.errors import StoreUnavailable
from halter_drills.children import ChildFailed, Pipe, children


def counting(pipe: Pipe, first: int) -> None:
    for number in range(first, first + 3):
        pipe.send(number)


def repeating(pipe: Pipe) -> None:
    while True:
        pipe.send(pipe.recv())


def failing(pipe: Pipe) -> None:
    raise StoreUnavailable("The disk is full.")


def failing_together(pipe: Pipe) -> None:
    raise ExceptionGroup("several", [StoreUnavailable("The disk is full."), StoreUnavailable("The disk is full.")])


def failing_alone(pipe: Pipe) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def masked_signals(pipe: Pipe) -> None:
    pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_words_of_several_children_are_heard_until_all_have_ended() -> None:
    with children() as started:
        for first in (0, 10):
            started.start(counting, first)
        assert sorted(word for _, word in started.messages()) == [0, 1, 2, 10, 11, 12]


def test_a_killed_child_is_gone_at_once() -> None:
    with children() as started:
        child = started.start(repeating)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        with pytest.raises(EOFError):
            child.receive()


def test_a_stopped_child_does_nothing_until_it_is_continued() -> None:
    with children() as started:
        child = started.start(repeating)
        child.send("one")
        assert child.receive() == "one"
        child.stop()
        child.send("two")
        assert not child.pipe.poll(0.05)
        child.resume()
        assert child.receive() == "two"


@pytest.mark.parametrize("work", [failing, failing_together])
def test_an_error_of_a_child_is_said_in_its_own_sentence(work: Callable[[Pipe], None]) -> None:
    with children() as started:
        started.start(work)
        with pytest.raises(ChildFailed, match=r"^The disk is full\.$"):
            list(started.messages())


def test_what_a_disk_does_to_a_child_is_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with children() as started:
        started.start(failing_alone)
        with pytest.raises(ChildFailed, match="No space left on device"):
            list(started.messages())
    assert "Traceback" not in capfd.readouterr().err


def test_signals_to_end_are_for_the_drill_and_not_for_its_children() -> None:
    with children() as started:
        assert started.start(masked_signals).receive() >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_no_child_outlives_the_block_that_started_it() -> None:
    with children() as started:
        child = started.start(repeating)
        child.stop()
        number = child.pid
        assert Path(f"/proc/{number}").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
