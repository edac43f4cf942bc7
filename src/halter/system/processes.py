"""What tells a process from every other one, and whether it has ended or is ending."""

import os
import socket
import threading
from functools import lru_cache
from typing import Final, NamedTuple

_ENDING: Final = threading.Event()


def note_end() -> None:
    """Note that a signal ends this process in order, so that it leaves its sessions to a later owner."""
    _ENDING.set()


def is_ending() -> bool:
    return _ENDING.is_set()


class ProcessMark(NamedTuple):
    """What tells a process from every other one: its boot and process namespace, and its start time in clock ticks.

    Where the system does not show them, both are empty.
    """

    namespace: str = ""
    start: str = ""


@lru_cache(1)
def _read_namespace() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 Paths load slowly.
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def read_process_mark(pid: int) -> ProcessMark | None:
    """Read the mark of a process of this machine; None if it has ended, also if its parent has not noticed."""
    if not _read_namespace():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return ProcessMark()
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessMark(_read_namespace(), fields[19])


def has_process_ended(host: str, pid: int, mark: ProcessMark) -> bool:
    """Return whether a process is known to have ended. Nothing is known about those of another host or container."""
    if not pid or host != socket.gethostname() or mark.namespace not in ("", _read_namespace()):
        return False
    current_mark = read_process_mark(pid)
    return current_mark is None or (mark != ProcessMark() and current_mark != mark)
