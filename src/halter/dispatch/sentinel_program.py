"""The program that watches one process from outside, and ends it if it is blocked while it would have to stop.

It looks at the signs of life that the process leaves in shared memory. While they come, it asks nobody anything. When
they stay away, it asks the store itself whether sessions of that process are halted, and looks whether a deadline has
passed. It ends with the process that it watches.
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
"""Seconds without a sign of life after which an event loop counts as blocked; it gives one five times a second."""
MAX_SILENT_CPU_SECONDS: Final = 0.5
"""Seconds of processor time within which a loop that is not blocked has given a sign of life, however long they take
on a machine that has little to give."""
MAX_AWAKE_SECONDS: Final = 0.6
"""Seconds after the last sign of life by which a loop that is not blocked has woken up to give the next."""
MAX_OVERDUE_SECONDS: Final = 1.0
"""Seconds after a deadline within which the process itself would have stopped the call."""
MAX_TICK_SECONDS: Final = 1.0
"""Seconds: if a tick takes so long, this program itself was held up, and knows nothing about the other."""
MAX_LOCK_SECONDS: Final = 1.0
"""Seconds for which a process that gives no sign of life may keep the store locked for all others."""
MAX_ASLEEP_LOCK_SECONDS: Final = 10.0
"""The same for a process that computes nothing: on a busy machine it may wait for its own turn that long."""
STOPPED_STATES: Final = "Tt"
"""The states of a process that a signal or a debugger has stopped: it does nothing, and is left alone."""
UNENDABLE_NOTICE: Final = (
    "It cannot be ended, as it is the first process of its container: run it under an init (docker --init)."
)
BLOCKING_ADVICE: Final = "An async tool must not block: write it with `def`, or let it await."
_NANO: Final = 1_000_000_000


class ProcessSample(NamedTuple):
    """What one look at the process showed: the time, its signs, the state and the processor time of its main thread.

    `locked` says that no other process could write to the store, since this one had begun to.
    """

    at: float
    signs: LivenessReading
    state: str
    cpu: float
    locked: bool = False


class Silence(NamedTuple):
    """Since when there was no sign of life, what the main thread had computed by then, and whether it sleeps now."""

    since: float
    cpu: float
    alive_at: int
    slept: bool = False
    looked_at: float = 0.0
    locked_since: float | None = None


def begin_silence(look: ProcessSample) -> Silence:
    """Begin to count anew."""
    return Silence(look.at, look.cpu, look.signs.alive_at, looked_at=look.at)


def begin_first_silence(look: ProcessSample) -> Silence:
    """Begin with the first look: this program takes a while to start, and the process may be blocked by then."""
    silence = begin_silence(look)
    if look.state in STOPPED_STATES or not look.signs.alive_at:
        return silence
    return silence._replace(since=min(look.at, look.signs.alive_at / _NANO))


def update_silence(silence: Silence, look: ProcessSample) -> Silence:
    """Count on, or anew if there was a sign of life, if it was stopped, or if this program was held up itself."""
    alive = look.signs.alive_at != silence.alive_at
    if alive or look.state in STOPPED_STATES or look.at - silence.looked_at > MAX_TICK_SECONDS:
        return begin_silence(look)
    slept = look.state == "S" and look.at - silence.since > MAX_AWAKE_SECONDS
    locked = (silence.locked_since or look.at) if look.locked else None
    return silence._replace(slept=silence.slept or slept, looked_at=look.at, locked_since=locked)


def is_blocked(silence: Silence, look: ProcessSample) -> bool:
    """Tell a process that is blocked from one that merely gets no processor: that one wants to run, and cannot."""
    if look.at - silence.since < MAX_SILENCE_SECONDS:
        return False
    return silence.slept or look.cpu - silence.cpu >= MAX_SILENT_CPU_SECONDS


def is_overdue(look: ProcessSample) -> bool:
    """Tell whether something in flight should have been stopped by now."""
    return 0 < look.signs.deadline < (look.at - MAX_OVERDUE_SECONDS) * _NANO


AskForHalts = Callable[[str], str]
"""Names a halt that stands over the sessions of a worker, or nothing."""


def find_reason_to_end(silence: Silence, look: ProcessSample, ask: AskForHalts) -> str:
    """Say why the process has to be ended, or nothing."""
    if not is_blocked(silence, look):
        return ""
    if is_overdue(look):
        return "a call was out of time"
    if silence.locked_since is not None:
        # Not even a halt can be written down then, and SQLite may keep waiting who asks for one.
        patience = MAX_LOCK_SECONDS if look.cpu - silence.cpu >= MAX_SILENT_CPU_SECONDS else MAX_ASLEEP_LOCK_SECONDS
        return "it kept the store locked" if look.at - silence.locked_since >= patience else ""
    return next((f"{scope} is halted" for worker in look.signs.workers if (scope := ask(worker))), "")


_FLOCK: Final = struct.Struct("hhqqi4x")
_WRITE_LOCK_AT: Final = 120
"""The byte of SQLite's file of shared memory that a writer locks, by the format of the WAL index."""


class SentinelStore:
    """Asks the store for halts, over a connection that is opened when it is first needed."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._connection: Any = None
        self._locks: int | None = None

    def is_locked_by(self, process: int) -> bool:
        """Tell whether a process keeps all others from writing; PostgreSQL itself ends what does so for too long.

        A thread inside a transaction needs the interpreter to come to its end, and whoever holds that may never let go.
        The file that is asked about stays open: to close it would give up the locks of this program's connection.
        """
        if "locks" not in self._told:
            return False
        try:
            if self._locks is None:
                self._locks = os.open(self._told["locks"], os.O_RDWR | os.O_CLOEXEC)
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _WRITE_LOCK_AT, 1, 0)
            found = _FLOCK.unpack(fcntl.fcntl(self._locks, fcntl.F_GETLK, asked))
        except OSError:
            return False
        return found[0] != fcntl.F_UNLCK and found[-1] == process

    def halted(self, worker: str) -> str:
        """Name a halt that stands over the sessions of a worker. A store that does not answer is asked again."""
        try:
            self._connection = self._connection or self._connected()
            row = self._connection.execute(self._told["sql"], {"worker": worker}).fetchone()
        except Exception:  # noqa: BLE001 Whatever a driver raises: without an answer nothing is ended, and it is asked again.
            self._connection = None
            return ""
        return str(row[0]) if row else ""

    def _connected(self) -> Any:
        if "file" in self._told:
            import sqlite3

            return sqlite3.connect(self._told["file"], uri=True, timeout=1)
        import psycopg

        connection = psycopg.connect(self._told["conninfo"], autocommit=True, connect_timeout=2)
        connection.execute(f'SET search_path TO "{self._told["schema"]}"'.encode())
        return connection


class ProcessStatus(NamedTuple):
    """What the system knows of a process."""

    state: str
    parent: int
    session: int
    cpu: float


def read_process_status(place: str) -> ProcessStatus | None:
    """Read the state of a process or a thread; its name stands in brackets and may contain anything."""
    try:
        with open(f"/proc/{place}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 Slow to load.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessStatus(fields[0], int(fields[1]), int(fields[3]), (int(fields[11]) + int(fields[12])) / ticks)


def end_process_tree(process: int, opened: int, groups: Iterable[int]) -> bool:
    """End a process with all that it has started; tell whether it is gone.

    It is stopped first, so that it starts nothing more while its descendants are looked for. Signals go to the process
    that was `opened`, whose number cannot be another's meanwhile.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(opened, signal.SIGSTOP)
    family = find_descendants(process)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(opened, signal.SIGKILL)
    end_groups({*groups, *family})
    return is_gone(process)


def find_descendants(process: int) -> set[int]:
    """Find what a process has started, and what that has started."""
    parents = {pid: found.parent for pid, found in _processes().items()}
    family, newest = set[int](), {process}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest} - family - {os.getpid()}
        family |= newest
    return family


def end_groups(leaders: Iterable[int]) -> None:
    """Kill processes, and all others of the sessions that they lead."""
    wanted = set(leaders)
    for pid, found in _processes().items() if wanted else ():
        if pid in wanted or found.session in wanted:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> dict[int, ProcessStatus]:
    names = [name for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 As above.
    return {int(name): found for name in names if (found := read_process_status(name)) is not None}


def is_gone(process: int, patience: float = 2.0) -> bool:
    """Wait until a process is over. The first one of a container cannot be ended from inside."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = read_process_status(str(process))
        if found is None or found.state in "ZX":
            return True
        time.sleep(0.01)
    return False


def watch_process(told: dict[str, Any]) -> None:
    """Look again and again, until the process is over, by itself or not."""
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
        look = ProcessSample(time.monotonic(), signs, found.state, found.cpu, locked)
        silence = begin_first_silence(look) if silence is None else update_silence(silence, look)
        why = find_reason_to_end(silence, look, store.halted)
        if why:
            gone = end_process_tree(process, over, signs.groups)
            _tell(told, look.at - silence.since, signs.call, why, gone=gone)
            return
    end_groups(read_liveness(memory).groups)


def _tell(told: dict[str, Any], silent: float, call: str, why: str, *, gone: bool) -> None:
    last = f" The last call to begin was {call}." if call else ""
    outcome = f"It was ended. {told['remedy']}" if gone else UNENDABLE_NOTICE
    sys.stderr.write(
        f"halter: process {told['process']} was blocked for {silent:.1f} s while {why}. {outcome}{last} "
        f"{BLOCKING_ADVICE}\n"
    )
    sys.stderr.flush()


def main() -> None:
    """Read what to watch from standard input, and watch it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    if "conninfo" in told:
        # It takes a moment to load: there is none to lose later, nor before the first look.
        threading.Thread(target=importlib.import_module, args=("psycopg",), daemon=True).start()
    watch_process(told)


if __name__ == "__main__":
    main()
