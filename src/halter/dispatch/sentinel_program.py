"""Watches one process from outside, and kills it if it is blocked while it has to stop.

It reads the signs of life that the process leaves in shared memory. Only when they are missing it asks the store
whether sessions of that process are halted, and checks whether a deadline has passed. It ends with the process that it
watches.
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

from halter.core.processes import LIVENESS_BYTES, LivenessReading, read_liveness

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
"""Seconds: if a tick takes longer, this program itself was held up and knows nothing."""
MAX_LOCK_SECONDS: Final = 1.0
"""Seconds for which a silent process may keep the store locked."""
MAX_ASLEEP_LOCK_SECONDS: Final = 10.0
"""The same for a process that uses no CPU: on a busy machine it may wait that long for its turn."""
STOPPED_STATES: Final = "Tt"
"""States of a process that a signal or a debugger has stopped: it is left alone."""
UNENDABLE_NOTICE: Final = (
    "It cannot be ended, as it is the first process of its container: run it under an init (docker --init)."
)
BLOCKING_ADVICE: Final = "An async tool must not block: write it with `def`, or let it await."
_NANO: Final = 1_000_000_000


class ProcessSample(NamedTuple):
    """One sample of the process: time, signs of life, state and CPU time of its main thread.

    `locked` says that it holds the write lock of the store.
    """

    at: float
    signs: LivenessReading
    state: str
    cpu: float
    locked: bool = False


class Silence(NamedTuple):
    """Since when there was no sign of life, the CPU time at that moment, and whether the main thread sleeps."""

    since: float
    cpu: float
    alive_at: int
    slept: bool = False
    looked_at: float = 0.0
    locked_since: float | None = None


def begin_silence(sample: ProcessSample) -> Silence:
    return Silence(sample.at, sample.cpu, sample.signs.alive_at, looked_at=sample.at)


def begin_first_silence(sample: ProcessSample) -> Silence:
    """Starts with the first sample: the process may have been blocked before this program was up."""
    silence = begin_silence(sample)
    if sample.state in STOPPED_STATES or not sample.signs.alive_at:
        return silence
    return silence._replace(since=min(sample.at, sample.signs.alive_at / _NANO))


def update_silence(silence: Silence, sample: ProcessSample) -> Silence:
    """Continues the count, or restarts it after a sign of life, a stop signal, or a hold-up of this program."""
    alive = sample.signs.alive_at != silence.alive_at
    if alive or sample.state in STOPPED_STATES or sample.at - silence.looked_at > MAX_TICK_SECONDS:
        return begin_silence(sample)
    slept = sample.state == "S" and sample.at - silence.since > MAX_AWAKE_SECONDS
    locked = (silence.locked_since or sample.at) if sample.locked else None
    return silence._replace(slept=silence.slept or slept, looked_at=sample.at, locked_since=locked)


def is_blocked(silence: Silence, sample: ProcessSample) -> bool:
    """Tells a blocked process from one that merely gets no CPU."""
    if sample.at - silence.since < MAX_SILENCE_SECONDS:
        return False
    return silence.slept or sample.cpu - silence.cpu >= MAX_SILENT_CPU_SECONDS


def is_overdue(sample: ProcessSample) -> bool:
    return 0 < sample.signs.deadline < (sample.at - MAX_OVERDUE_SECONDS) * _NANO


AskForHalts = Callable[[str], str]
"""Returns a halted scope of a worker's sessions, or ""."""


def find_reason_to_end(silence: Silence, sample: ProcessSample, ask: AskForHalts) -> str:
    """Returns why the process has to be killed, or ""."""
    if not is_blocked(silence, sample):
        return ""
    if is_overdue(sample):
        return "a call was out of time"
    if silence.locked_since is not None:
        # Then no halt can be written, and a query for one may wait.
        max_wait = MAX_LOCK_SECONDS if sample.cpu - silence.cpu >= MAX_SILENT_CPU_SECONDS else MAX_ASLEEP_LOCK_SECONDS
        return "it kept the store locked" if sample.at - silence.locked_since >= max_wait else ""
    return next((f"{scope} is halted" for worker in sample.signs.workers if (scope := ask(worker))), "")


_FLOCK: Final = struct.Struct("hhqqi4x")
_WRITE_LOCK_AT: Final = 120
"""The byte of SQLite's shared memory file that a writer locks, by the WAL index format."""


class SentinelStore:
    """Queries the store for halts, over a connection that is opened on first use."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._settings = told
        self._connection: Any = None
        self._locks: int | None = None

    def is_locked_by(self, process: int) -> bool:
        """Whether a process blocks all other writers. PostgreSQL itself ends one that does so for too long.

        A thread inside a transaction needs the interpreter to finish, and a blocked thread may never release it. The
        file stays open: closing it would release the locks of this program's connection.
        """
        if "locks" not in self._settings:
            return False
        try:
            if self._locks is None:
                self._locks = os.open(self._settings["locks"], os.O_RDWR | os.O_CLOEXEC)
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _WRITE_LOCK_AT, 1, 0)
            found = _FLOCK.unpack(fcntl.fcntl(self._locks, fcntl.F_GETLK, asked))
        except OSError:
            return False
        return found[0] != fcntl.F_UNLCK and found[-1] == process

    def find_halted(self, worker: str) -> str:
        """Returns a halted scope of a worker's sessions. A store that does not answer is asked again."""
        try:
            self._connection = self._connection or self._connect()
            row = self._connection.execute(self._settings["sql"], {"worker": worker}).fetchone()
        except Exception:  # noqa: BLE001 Any driver error: without an answer nothing is killed, and it is asked again.
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


def read_process_status(place: str) -> ProcessStatus | None:
    """Reads the state of a process or a thread; its name stands in brackets and may contain anything."""
    try:
        with open(f"/proc/{place}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 Slow to load.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessStatus(fields[0], int(fields[1]), int(fields[3]), (int(fields[11]) + int(fields[12])) / ticks)


def end_process_tree(process: int, opened: int, groups: Iterable[int]) -> bool:
    """Kills a process with all that it has started; returns whether it is gone.

    It is stopped first, so that it starts nothing more while its descendants are found. Signals go to the `opened`
    pidfd, which cannot be reused by another process.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(opened, signal.SIGSTOP)
    family = find_descendants(process)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(opened, signal.SIGKILL)
    end_groups({*groups, *family})
    return is_gone(process)


def find_descendants(process: int) -> set[int]:
    parents = {pid: found.parent for pid, found in _processes().items()}
    family, newest = set[int](), {process}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest} - family - {os.getpid()}
        family |= newest
    return family


def end_groups(leaders: Iterable[int]) -> None:
    """Kills processes, and all others of the sessions that they lead."""
    wanted = set(leaders)
    for pid, found in _processes().items() if wanted else ():
        if pid in wanted or found.session in wanted:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> dict[int, ProcessStatus]:
    names = [name for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 As above.
    return {int(name): found for name in names if (found := read_process_status(name)) is not None}


def is_gone(process: int, max_wait: float = 2.0) -> bool:
    """Waits until a process has ended. The init of a container cannot be killed from inside."""
    deadline = time.monotonic() + max_wait
    while time.monotonic() < deadline:
        found = read_process_status(str(process))
        if found is None or found.state in "ZX":
            return True
        time.sleep(0.01)
    return False


def watch_process(told: dict[str, Any]) -> None:
    """Samples the process until it ends or is killed."""
    process, store = int(told["process"]), SentinelStore(told)
    memory = mmap.mmap(int(told["memory"]), LIVENESS_BYTES, access=mmap.ACCESS_READ)
    over = os.pidfd_open(process)
    place = f"{process}/task/{process}"
    silence: Silence | None = None
    while not select.select([over], [], [], TICK_SECONDS)[0]:
        found, signs = read_process_status(place), read_liveness(memory)
        if found is None:
            break
        silent = silence is not None and time.monotonic() - silence.since > MAX_AWAKE_SECONDS
        locked = silent and store.is_locked_by(process)
        sample = ProcessSample(time.monotonic(), signs, found.state, found.cpu, locked)
        silence = begin_first_silence(sample) if silence is None else update_silence(silence, sample)
        why = find_reason_to_end(silence, sample, store.find_halted)
        if why:
            gone = end_process_tree(process, over, signs.groups)
            _report_kill(told, sample.at - silence.since, signs.call, why, gone=gone)
            return
    end_groups(read_liveness(memory).groups)


def _report_kill(settings: dict[str, Any], silent: float, call: str, why: str, *, gone: bool) -> None:
    last = f" The last call to begin was {call}." if call else ""
    outcome = f"It was ended. {settings['remedy']}" if gone else UNENDABLE_NOTICE
    sys.stderr.write(
        f"halter: process {settings['process']} was blocked for {silent:.1f} s while {why}. {outcome}{last} "
        f"{BLOCKING_ADVICE}\n"
    )
    sys.stderr.flush()


def main() -> None:
    """Reads what to watch from stdin, and watches it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    if "conninfo" in told:
        # Slow to import: not later, and not before the first sample.
        threading.Thread(target=importlib.import_module, args=("psycopg",), daemon=True).start()
    watch_process(told)


if __name__ == "__main__":
    main()
