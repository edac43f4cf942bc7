"""Real `halter worker` processes, which can be killed, stopped and continued, and what each of them says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from halter_drills.agents import PERSON
from halter_drills.chaos_agent import CONFIG
from halter_drills.children import PATIENCE, ChildStuck, process_state

# A second shell waits until nobody holds the other end of the worker's input, and kills the worker then: so no worker
# outlives the drill, not even one that was killed itself.
_KEEPER: Final = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL $$) >/dev/null 2>&1 & exec "$@" 3<&-'

_ENTER: Final = """
sys.argv[0] = "halter"
from halter.cli import main
main()
"""
_SKEWED: Final = f"""
import sys, time
seconds, nanoseconds = time.time, time.time_ns
time.time = lambda: seconds() + 7200
time.time_ns = lambda: nanoseconds() + 7200 * 10**9
{_ENTER}"""
_UNFENCED: Final = f"""
import sys
from halter.dispatch.sessions import Sessions
from halter_drills.takeover import unfenced
from halter.journal import engine
from halter.journal.store import JournalStore
engine.fence = lambda lease, rows: None
JournalStore.__init__.__kwdefaults__["applier"] = unfenced
Sessions.lost = lambda self, leases: None
{_ENTER}"""

PLAIN: Final = ("-m", "halter")
SKEWED: Final = ("-c", _SKEWED)
"""A machine whose clock is two hours ahead."""
UNFENCED: Final = ("-c", _UNFENCED)
"""A worker that goes on whoever owns the session by now: the mistake that the drill must see."""


class Line(NamedTuple):
    """One event that a worker was told is durable."""

    stream: str
    seq: int
    generation: int
    hash: str


@dataclass(frozen=True, slots=True)
class Worker:
    """One process. It says on its output what it has committed, each event when that is durable."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    @property
    def pid(self) -> int:
        """Its number, by which the store knows it too."""
        return self.process.pid

    def kill(self) -> None:
        """Send SIGKILL and wait until it is gone."""
        self.process.kill()
        if self.process.stdin is not None:
            # Whoever watches over it ends now, while its number cannot belong to anybody else.
            self.process.stdin.close()
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        """Send SIGSTOP and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while process_state(self.pid) not in ("T", ""):
            if time.monotonic() > deadline:
                raise ChildStuck("A worker of the drill could not be stopped.")
            time.sleep(0.001)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def ended(self, patience: float = PATIENCE) -> int:
        """Wait until it has ended by itself, and tell with which code."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise ChildStuck(f"A worker of the drill did not end within {patience:.0f} s.") from None

    def told(self) -> Iterator[Line]:
        """Read which events it was told are durable; one that was killed may have said its last word only in part."""
        for line in self.output.read_bytes().split(b"\n")[:-1]:
            said = json.loads(line)
            if "hash" in said:
                yield Line(said["stream"], said["seq"], said["generation"], said["hash"])

    def complaints(self) -> str:
        """Read what it said beside its answer."""
        return self.errors.read_text("utf-8", "replace").strip()


class Workers:
    """Starts workers; made by `workers`, which ends those that are left."""

    def __init__(self, home: Path, folder: Path, url: str) -> None:
        self._home = home
        self._command = ["worker", str(folder), "--store", url, "--json"]
        self.started: list[Worker] = []

    def start(self, how: Sequence[str] = PLAIN) -> Worker:
        """Start one more."""
        name = f"worker-{len(self.started) + 1}"
        output, errors = self._home / f"{name}.out", self._home / f"{name}.err"
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "keeper", sys.executable, *how, *self._command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=self._home,
                env=environ(self._home),
                start_new_session=True,
            )
        self.started.append(Worker(name, process, output, errors))
        return self.started[-1]


def environ(home: Path) -> Mapping[str, str]:
    """Give a worker a home of its own, without anything that the user has set for Halter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALTER_")}
    own = {"HOME": home, "XDG_CONFIG_HOME": home / CONFIG, "XDG_STATE_HOME": home / "state"}
    own["HALTER_FLEET"] = home / "halter.yaml"
    return kept | {name: str(place) for name, place in own.items()} | {"HALTER_PERSON": PERSON}


@contextmanager
def workers(home: Path, folder: Path, url: str) -> Generator[Workers]:
    """Lend a place to start workers from; none of them is left when it closes."""
    started = Workers(home, folder, url)
    try:
        yield started
    finally:
        for worker in started.started:
            worker.kill()
