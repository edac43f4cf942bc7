"""A sentinel process kills this one if its event loop is blocked while it has to stop.

Halts, deadlines and heartbeats run on the event loop. An async tool that computes or waits without an `await` blocks
the loop, and with it everything that could stop the tool. So another process checks whether this one is alive. Killed
sessions resume elsewhere or at the next start, as after any crash.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from mmap import mmap
from typing import IO, Any, Final, cast

from halter.core.processes import LIVENESS_BYTES, LivenessWriter
from halter.journal.engine import load_queries, to_psycopg_parameters
from halter.journal.open import find_store_file, postgres_address
from halter.loop.session_runtime import cancel_and_wait
from halter.tools.process import observe_groups

HEARTBEAT_INTERVAL_SECONDS: Final = 0.2
RESTART_SECONDS: Final = 10.0
_PROGRAM: Final = "halter.dispatch.sentinel_program"
_QUESTION: Final = "halted_of_worker"


@asynccontextmanager
async def run_sentinel(store: str, remedy: str) -> AsyncGenerator[LivenessWriter]:
    """Watches this process while the block runs; the pulse shows that it is alive.

    The sentinel starts when the process owns sessions. `remedy` tells the operator how killed sessions resume. A store
    in memory cannot be halted from outside and needs no sentinel.
    """
    place = _describe_store(store)
    if place is None:
        yield LivenessWriter()
        return
    descriptor = os.memfd_create("halter-pulse", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, LIVENESS_BYTES)
    watching = _SentinelProcess(descriptor, {**place, "remedy": remedy})
    liveness = LivenessWriter(mmap(descriptor, LIVENESS_BYTES), watching.begin)
    beating = asyncio.create_task(_beat(liveness, watching), name="halter-sentinel")
    try:
        with observe_groups(liveness.show_groups):
            yield liveness
    finally:
        await cancel_and_wait(beating)
        watching.end()
        os.close(descriptor)


async def _beat(liveness: LivenessWriter, watching: "_SentinelProcess") -> None:
    """Beats several times a second, and restarts a lost sentinel."""
    while True:
        liveness.beat()
        watching.ensure_running()
        await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)


class _SentinelProcess:
    """The sentinel program: started once there is something to watch, and again if it was lost."""

    def __init__(self, descriptor: int, told: Mapping[str, Any]) -> None:
        self._descriptor = descriptor
        self._settings = told
        self._process: subprocess.Popen[bytes] | None = None
        self._started: float | None = None

    def begin(self) -> None:
        if self._started is None:
            self._started = time.monotonic()
            self._process = _start(self._descriptor, self._settings)

    def ensure_running(self) -> None:
        """Restarts it if it is gone, though not too often."""
        lost = self._process is None or self._process.poll() is not None
        if self._started is not None and lost and time.monotonic() - self._started > RESTART_SECONDS:
            self._started = None
            self.begin()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _start(descriptor: int, told: Mapping[str, Any]) -> "subprocess.Popen[bytes] | None":
    """Starts the sentinel. If no process can be started, this one runs without it."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,
        )
    except OSError:
        return None
    pipe = cast("IO[bytes]", process.stdin)
    with suppress(BrokenPipeError), pipe:
        pipe.write(json.dumps({**told, "process": os.getpid(), "memory": descriptor}).encode() + b"\n")
    return process


def _describe_store(store: str) -> Mapping[str, Any] | None:
    """Returns how another process queries this store for halts; None if none can."""
    question = load_queries("queries.sql")[_QUESTION]
    if store.lower().startswith(("postgresql:", "postgres:")):
        address = postgres_address(store)
        return {"conninfo": address.conninfo, "schema": address.schema, "sql": to_psycopg_parameters(question)}
    file = find_store_file(store)
    if file is None:
        return None
    return {"file": f"{file.absolute().as_uri()}?mode=ro", "locks": f"{file.absolute()}-shm", "sql": question}
