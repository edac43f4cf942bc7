"""A process that was killed is known to be dead on its own machine, and only there."""

import os
import signal
import socket
import subprocess
import sys

import msgspec

from halter.core.clock import MINUTE
from halter.dispatch.workers import WorkerInfo, WorkerRow
from halter.system.processes import ProcessMark, has_process_ended, read_process_mark

HOST = socket.gethostname()
NOBODY = 2**22 + 1
"""No Linux gives a process a number that large."""


def row(info: WorkerInfo, alive_until: int = MINUTE) -> WorkerRow:
    return WorkerRow("w", alive_until, info.encode())


def test_a_worker_of_this_process_is_alive_as_long_as_its_leases() -> None:
    info = WorkerInfo(kind="up").with_process()
    assert row(info).alive(MINUTE)
    assert not row(info).alive(MINUTE + 1)


def test_a_killed_process_is_dead_at_once_also_before_its_parent_has_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = read_process_mark(process.pid)
        assert mark is not None
        info = WorkerInfo(kind="up", host=HOST, pid=process.pid, mark=mark)
        assert row(info).alive(0)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not row(info).alive(0)
    assert not row(info).alive(0)


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    info = WorkerInfo(kind="up").with_process()
    earlier = msgspec.structs.replace(info, mark=info.mark._replace(start="1"))
    assert info.mark == ProcessMark() or not row(earlier).alive(0)


def test_nothing_is_known_of_a_process_on_another_host_or_in_another_container() -> None:
    assert row(WorkerInfo(kind="up", host=f"not-{HOST}", pid=NOBODY)).alive(0)
    assert not has_process_ended(HOST, NOBODY, ProcessMark("another boot/pid:[1]", "7"))
    assert row(WorkerInfo(kind="up")).alive(0)


def test_a_worker_of_an_earlier_halter_reported_no_mark_and_is_found_by_its_number() -> None:
    assert row(WorkerInfo(kind="up", host=HOST, pid=os.getpid())).alive(0)
    assert not row(WorkerInfo(kind="up", host=HOST, pid=NOBODY)).alive(0)


def test_the_mark_survives_the_store() -> None:
    info = WorkerInfo(kind="up").with_process()
    assert row(info).parse_info() == info
