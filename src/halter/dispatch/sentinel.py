"""Starts a sentinel process that kills this one if its event loop is blocked when it has to stop.

Halts, deadlines and heartbeats run on the event loop. An async tool that computes or waits without an `await` blocks
the loop, and with it everything that could stop the tool. So another process checks whether this one is alive. Killed
sessions resume in another process or at the next start, as after any crash.
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

from halter.journal.engine import load_queries, to_psycopg_parameters
from halter.journal.open import find_store_file, postgres_address
from halter.loop.concurrency import cancel_and_wait
from halter.system.liveness import LIVENESS_BYTES, LivenessWriter
from halter.tools.process import observe_groups

HEARTBEAT_INTERVAL_SECONDS: Final = 0.2
RESTART_SECONDS: Final = 10.0
_PROGRAM: Final = "halter.dispatch.sentinel_program"
_QUERY_NAME: Final = "halted_of_worker"


@asynccontextmanager
async def run_sentinel(store: str, remedy: str) -> AsyncGenerator[LivenessWriter]:
    """Watch this process while the block runs. The yielded writer shows that the process is alive.

    The sentinel starts when the process owns sessions. `remedy` tells the operator how killed sessions resume. A store
    in memory cannot be halted from outside, so it needs no sentinel.
    """
    store_settings = _build_store_settings(store)
    if store_settings is None:
        yield LivenessWriter()
        return
    descriptor = os.memfd_create("halter-pulse", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, LIVENESS_BYTES)
    sentinel = _SentinelProcess(descriptor, {**store_settings, "remedy": remedy})
    liveness = LivenessWriter(mmap(descriptor, LIVENESS_BYTES), sentinel.begin)
    beats = asyncio.create_task(_beat(liveness, sentinel), name="halter-sentinel")
    try:
        with observe_groups(liveness.show_groups):
            yield liveness
    finally:
        await cancel_and_wait(beats)
        sentinel.end()
        os.close(descriptor)


async def _beat(liveness: LivenessWriter, sentinel: "_SentinelProcess") -> None:
    """Give signs of life several times a second, and restart a lost sentinel."""
    while True:
        liveness.beat()
        sentinel.ensure_running()
        await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)


class _SentinelProcess:
    """The sentinel program: started when there are sessions to watch, and restarted if it was lost."""

    def __init__(self, descriptor: int, settings: Mapping[str, Any]) -> None:
        self._descriptor = descriptor
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._started: float | None = None

    def begin(self) -> None:
        if self._started is None:
            self._started = time.monotonic()
            self._process = _start(self._descriptor, self._settings)

    def ensure_running(self) -> None:
        """Restart the program if it has ended, but not too often."""
        is_lost = self._process is None or self._process.poll() is not None
        if self._started is not None and is_lost and time.monotonic() - self._started > RESTART_SECONDS:
            self._started = None
            self.begin()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _start(descriptor: int, settings: Mapping[str, Any]) -> "subprocess.Popen[bytes] | None":
    """Start the sentinel. If no process can be started, this process runs without it."""
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
        pipe.write(json.dumps({**settings, "process": os.getpid(), "memory": descriptor}).encode() + b"\n")
    return process


def _build_store_settings(store: str) -> Mapping[str, Any] | None:
    """Return the settings with which another process queries this store for halts; None if none can."""
    query = load_queries("queries.sql")[_QUERY_NAME]
    if store.lower().startswith(("postgresql:", "postgres:")):
        address = postgres_address(store)
        return {"conninfo": address.conninfo, "schema": address.schema, "sql": to_psycopg_parameters(query)}
    file = find_store_file(store)
    if file is None:
        return None
    return {"file": f"{file.absolute().as_uri()}?mode=ro", "locks": f"{file.absolute()}-shm", "sql": query}
