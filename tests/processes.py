"""What tests ask of processes that they started or killed."""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self


def live_at(home: Path) -> dict[str, str]:
    """The environment of a person with a home folder of their own, which keeps all that they have."""
    return {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / ".local" / "state")}


async def gone(*family: int) -> None:
    """Wait for what was killed to be gone, which the system does in its own time."""
    async with asyncio.timeout(60):
        while any(runs(pid) for pid in family):  # noqa: ASYNC110  nobody else tells
            await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Halter:
    """The program `halter`, forked from a process that has imported it already; used as a `subprocess.Popen`.

    Its standard input is a pipe or empty; with a `terminal`, that is all of its streams.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | str,
        stdin: int = subprocess.PIPE,
        terminal: int | None = None,
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.returncode: int | None = None
        theirs = [terminal] * 3 if terminal is not None else self._pipes(stdin)
        request = {"words": list(words), "environ": dict(env), "folder": str(cwd), "terminal": terminal is not None}
        text = json.dumps(request).encode()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(str(_forking_process()))
        socket.send_fds(self._line, [struct.pack("!I", len(text))], theirs)
        self._line.sendall(text)
        (self.pid,) = struct.unpack("!i", self._line.recv(4))
        if terminal is None:
            for end in theirs:
                os.close(end)

    def _pipes(self, stdin: int) -> list[int]:
        (reads, ours), (out, writes), (err, complains) = os.pipe(), os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = os.fdopen(ours, "wb", 0), os.fdopen(out, "rb"), os.fdopen(err, "rb")
        if stdin == subprocess.DEVNULL:
            self.stdin.close()
            self.stdin = None
        return [reads, writes, complains]

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            (status,) = struct.unpack("!i", self._line.recv(4))
            self._line.close()
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._line], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("halter", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, body: bytes = b"", timeout: float = 60) -> tuple[bytes, bytes]:
        """Send input, read what it prints to its end, and wait for that."""
        deadline = time.monotonic() + timeout
        with ThreadPoolExecutor(2) as readers:
            read = [readers.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            try:
                if self.stdin and not self.stdin.closed:
                    with contextlib.suppress(BrokenPipeError):
                        self.stdin.write(body)
                    self.stdin.close()
                answers = [each.result(deadline - time.monotonic()) if each else b"" for each in read]
                self.wait(max(0, deadline - time.monotonic()))
            except TimeoutError:
                self.kill()
                raise
        return answers[0], answers[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait(60)


def warm_command(kind: str, *words: str, imports: Sequence[str] = ()) -> list[str]:
    """The command that runs `halter`, or with `python` a file, in a fork of a process that has imported Halter."""
    client = str(Path(__file__).parent / "warm_client.py")
    return [sys.executable, "-IS", client, str(_forking_process()), ",".join(imports), kind, *words]


@functools.cache
def _forking_process() -> Path:
    """Start it once for all tests of this process; it ends when this process does."""
    path = Path(tempfile.mkdtemp(prefix="halter-warm-")) / "socket"
    command = [sys.executable, str(Path(__file__).parent / "warm.py"), str(path)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_end, program)
    assert program.stdout is not None
    assert program.stdout.readline() == b"ready\n"
    return path


def _end(program: "subprocess.Popen[bytes]") -> None:
    for stream in (program.stdin, program.stdout):
        assert stream is not None
        stream.close()
    program.wait(60)
