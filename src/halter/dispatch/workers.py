"""The workers of a store: what each reports with its heartbeat."""

import os
import socket

import msgspec

from halter.system.processes import ProcessMark, has_process_ended, read_process_mark


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of a worker with each heartbeat.

    `agents` are its agents with the version of their files; `waiting` are those of which another worker has a newer
    version. `problem` is a sentence for people. `mark` tells the process from a later one with the same `pid`. A
    process that runs nothing but its own session has no `kind`.
    """

    kind: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    started_at: int = 0
    agents: dict[str, str] = {}
    waiting: tuple[str, ...] = ()
    concurrency: int = 0
    awake: int = 0
    residents: int = 0
    closing: bool = False
    problem: str = ""
    mark: ProcessMark = ProcessMark()

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    def with_process(self) -> "WorkerInfo":
        """Return a copy that names this process."""
        pid = os.getpid()
        mark = read_process_mark(pid) or ProcessMark()
        return msgspec.structs.replace(self, host=socket.gethostname(), pid=pid, mark=mark)

    def has_ended(self) -> bool:
        """Return whether its process is known to have ended: a process that was killed reports nothing."""
        return has_process_ended(self.host, self.pid, self.mark)


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker, and the time until which its leases are valid.

    A worker whose process has ended on this machine is not alive, though its leases are valid until they expire.
    """

    worker: str
    alive_until: int
    about: str = ""

    def alive(self, now: int) -> bool:
        return self.alive_until >= now and not self.parse_info().has_ended()

    def parse_info(self) -> WorkerInfo:
        """Decode the report; an empty one if it cannot be read."""
        try:
            return msgspec.json.decode(self.about, type=WorkerInfo) if self.about else WorkerInfo()
        except msgspec.DecodeError:
            return WorkerInfo()
