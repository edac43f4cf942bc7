"""Watches one process from outside, and kills it if it is blocked when it has to stop.

The program reads the signs of life that the process writes to shared memory. Only if they are missing, it queries the
store for halts of the process's sessions and checks deadlines. It ends with the process that it watches.
"""

import fcntl
import importlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from halter.system.liveness import LIVENESS_BYTES, LivenessReading, read_liveness

TICK_SECONDS: Final = 0.1
MAX_SILENCE_SECONDS: Final = 1.2
"""Seconds without a sign of life after which an event loop counts as blocked; it beats five times a second."""
MAX_SILENT_CPU_SECONDS: Final = 0.5
"""Seconds of CPU time within which a loop that is not blocked gives a sign of life, also on a busy machine."""
MAX_AWAKE_SECONDS: Final = 0.6
"""Seconds after the last sign of life by which a loop that is not blocked has woken up to give the next."""
MAX_OVERDUE_SECONDS: Final = 1.0
"""Seconds after a deadline within which the process itself would have stopped the call."""
MAX_TICK_SECONDS: Final = 1.0
"""Seconds: if a tick takes longer, this program itself was delayed and its samples prove nothing."""
MAX_LOCK_SECONDS: Final = 1.0
"""Seconds for which a silent process may keep the store locked."""
MAX_ASLEEP_LOCK_SECONDS: Final = 10.0
"""The same for a process that uses no CPU: on a busy machine it may wait that long for its turn."""
STOPPED_STATES: Final = "Tt"
"""States of a process that a signal or a debugger has stopped. It is not killed."""
UNENDABLE_NOTICE: Final = (
    "It cannot be killed, because it is the first process of its container. Run it under an init (docker --init)."
)
BLOCKING_ADVICE: Final = "An async tool must not block: define it with `def`, or make it await."
_NANO: Final = 1_000_000_000


class ProcessSample(NamedTuple):
    """One sample of the process: time, signs of life, state and CPU time of its main thread.

    `has_lock` says that it holds the write lock of the store.
    """

    at: float
    signs: LivenessReading
    state: str
    cpu: float
    has_lock: bool = False


class Silence(NamedTuple):
    """A period without signs of life: its start, the CPU time at its start, and whether the main thread has slept."""

    since: float
    cpu: float
    alive_at: int
    slept: bool = False
    looked_at: float = 0.0
    locked_since: float | None = None


def begin_silence(sample: ProcessSample) -> Silence:
    return Silence(sample.at, sample.cpu, sample.signs.alive_at, looked_at=sample.at)


def begin_first_silence(sample: ProcessSample) -> Silence:
    """Start with the first sample: the process may have been blocked before this program started."""
    silence = begin_silence(sample)
    if sample.state in STOPPED_STATES or not sample.signs.alive_at:
        return silence
    return silence._replace(since=min(sample.at, sample.signs.alive_at / _NANO))


def update_silence(silence: Silence, sample: ProcessSample) -> Silence:
    """Continue the period, or restart it after a sign of life, a stop signal or a delay of this program."""
    alive = sample.signs.alive_at != silence.alive_at
    if alive or sample.state in STOPPED_STATES or sample.at - silence.looked_at > MAX_TICK_SECONDS:
        return begin_silence(sample)
    has_slept = sample.state == "S" and sample.at - silence.since > MAX_AWAKE_SECONDS
    locked_since = (silence.locked_since or sample.at) if sample.has_lock else None
    return silence._replace(slept=silence.slept or has_slept, looked_at=sample.at, locked_since=locked_since)


def is_blocked(silence: Silence, sample: ProcessSample) -> bool:
    """Return true if the process is blocked, and false if it merely gets no CPU time."""
    if sample.at - silence.since < MAX_SILENCE_SECONDS:
        return False
    return silence.slept or sample.cpu - silence.cpu >= MAX_SILENT_CPU_SECONDS


def is_overdue(sample: ProcessSample) -> bool:
    return 0 < sample.signs.deadline < (sample.at - MAX_OVERDUE_SECONDS) * _NANO


FindHalt = Callable[[str], str]
"""Returns a halted scope of a worker's sessions, or ""."""


def find_reason_to_end(silence: Silence, sample: ProcessSample, find_halted: FindHalt) -> str:
    """Return why the process has to be killed; "" if it need not be."""
    if not is_blocked(silence, sample):
        return ""
    if is_overdue(sample):
        return "a call was out of time"
    if silence.locked_since is not None:
        # While the store is locked, no halt can be written, and a query for one may wait.
        max_wait = MAX_LOCK_SECONDS if sample.cpu - silence.cpu >= MAX_SILENT_CPU_SECONDS else MAX_ASLEEP_LOCK_SECONDS
        return "it kept the store locked" if sample.at - silence.locked_since >= max_wait else ""
    return next((f"{scope} is halted" for worker in sample.signs.workers if (scope := find_halted(worker))), "")


_FLOCK: Final = struct.Struct("hhqqi4x")
_WRITE_LOCK_AT: Final = 120
"""The byte of SQLite's shared memory file that a writer locks, by the WAL index format."""


class SentinelStore:
    """Queries the store for halts, over a connection that opens on first use."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._connection: Any = None
        self._locks: int | None = None

    def is_locked_by(self, process: int) -> bool:
        """Return true if a process blocks all other writers. PostgreSQL itself ends such a transaction.

        A thread inside a transaction needs the interpreter to finish, and a blocked thread may never release it. The
        file stays open: closing it would release the locks of this program's connection.
        """
        if "locks" not in self._settings:
            return False
        try:
            if self._locks is None:
                self._locks = os.open(self._settings["locks"], os.O_RDWR | os.O_CLOEXEC)
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _WRITE_LOCK_AT, 1, 0)
            lock = _FLOCK.unpack(fcntl.fcntl(self._locks, fcntl.F_GETLK, request))
        except OSError:
            return False
        return lock[0] != fcntl.F_UNLCK and lock[-1] == process

    def find_halted(self, worker: str) -> str:
        """Return a halted scope of a worker's sessions, or "". A store that does not answer is queried again later."""
        try:
            self._connection = self._connection or self._connect()
            row = self._connection.execute(self._settings["sql"], {"worker": worker}).fetchone()
        except Exception:  # noqa: BLE001 Any driver error: nothing is killed, and the next sample queries again.
            self._disconnect()
            return ""
        return str(row[0]) if row else ""

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    def _connect(self) -> Any:
        if "file" in self._settings:
            import sqlite3

            return sqlite3.connect(self._settings["file"], uri=True, timeout=1)
        import psycopg

        connection = psycopg.connect(self._settings["conninfo"], autocommit=True, connect_timeout=2)
        connection.execute(f'SET search_path TO "{self._settings["schema"]}"'.encode())
        return connection


class ProcessStatus(NamedTuple):
    state: str
    parent: int
    session: int
    cpu: float


def read_process_status(entry: str) -> ProcessStatus | None:
    """Read the state of a process or a thread. In the file, its name is in brackets and may contain anything."""
    try:
        with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 Slow to load.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessStatus(fields[0], int(fields[1]), int(fields[3]), (int(fields[11]) + int(fields[12])) / ticks)


def end_process_tree(process: int, pidfd: int, groups: Iterable[int]) -> bool:
    """Kill a process and its descendants; return true if it has ended.

    The process is stopped first, so that it starts no more processes while its descendants are found. Signals go to its
    pidfd, which no other process can reuse.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    descendants = find_descendants(process)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    end_groups({*groups, *descendants})
    return is_gone(process)


def find_descendants(process: int) -> set[int]:
    parents = {pid: status.parent for pid, status in _processes().items()}
    descendants, newest = set[int](), {process}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest} - descendants - {os.getpid()}
        descendants |= newest
    return descendants


def end_groups(leaders: Iterable[int]) -> None:
    """Kill processes, and all others of the sessions that they lead."""
    leader_ids = set(leaders)
    for pid, status in _processes().items() if leader_ids else ():
        if pid in leader_ids or status.session in leader_ids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> dict[int, ProcessStatus]:
    names = [name for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 As above.
    return {int(name): status for name in names if (status := read_process_status(name)) is not None}


def is_gone(process: int, max_wait: float = 2.0) -> bool:
    """Wait until a process has ended; return false if it has not. A container's init cannot be killed from inside."""
    deadline = time.monotonic() + max_wait
    while time.monotonic() < deadline:
        status = read_process_status(str(process))
        if status is None or status.state in "ZX":
            return True
        time.sleep(0.01)
    return False


def watch_process(settings: dict[str, Any]) -> None:
    """Sample the process until it ends or is killed."""
    process, store = int(settings["process"]), SentinelStore(settings)
    memory = mmap.mmap(int(settings["memory"]), LIVENESS_BYTES, access=mmap.ACCESS_READ)
    pidfd = os.pidfd_open(process)
    main_thread = f"{process}/task/{process}"
    silence: Silence | None = None
    while not select.select([pidfd], [], [], TICK_SECONDS)[0]:
        status, signs = read_process_status(main_thread), read_liveness(memory)
        if status is None:
            break
        is_silent = silence is not None and time.monotonic() - silence.since > MAX_AWAKE_SECONDS
        has_lock = is_silent and store.is_locked_by(process)
        sample = ProcessSample(time.monotonic(), signs, status.state, status.cpu, has_lock)
        silence = begin_first_silence(sample) if silence is None else update_silence(silence, sample)
        reason = find_reason_to_end(silence, sample, store.find_halted)
        if reason:
            has_ended = end_process_tree(process, pidfd, signs.groups)
            _report_kill(settings, sample.at - silence.since, signs.call, reason, gone=has_ended)
            return
    end_groups(read_liveness(memory).groups)


def _report_kill(settings: dict[str, Any], silent: float, call: str, reason: str, *, gone: bool) -> None:
    last_call = f" The last call to start was {call}." if call else ""
    outcome = f"It was killed. {settings['remedy']}" if gone else UNENDABLE_NOTICE
    sys.stderr.write(
        f"halter: process {settings['process']} was blocked for {silent:.1f} s while {reason}. {outcome}{last_call} "
        f"{BLOCKING_ADVICE}\n"
    )
    sys.stderr.flush()


def main() -> None:
    """Read the settings from stdin, and watch the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    if "conninfo" in settings:
        # Slow to import, so it is imported in the background, without a delay of the first sample.
        threading.Thread(target=importlib.import_module, args=("psycopg",), daemon=True).start()
    watch_process(settings)


if __name__ == "__main__":
    main()
