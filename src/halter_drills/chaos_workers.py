"""Real `halter worker` processes, which can be killed, stopped and continued, and what each of them says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from halter.config.trust import TrustFile, digest_folder
from halter.core.events import SessionStarted
from halter.core.ports import Write
from halter.state.lifecycle import start_session
from halter_drills.children import PATIENCE, ChildStuck, process_state
from halter_drills.workload import PERSON

# The agent of the chaos drill: its sessions sleep, work, or spend until their cap, and what they do is counted.

Errand = Literal["sleeps", "works", "spends"]

AGENT: Final = "courier"
TRIGGER: Final = f"{AGENT}/errands"
CONFIG: Final = "config"
EFFECTS: Final = "effects"

_ERRANDS: Final[tuple[Errand, ...]] = ("sleeps", "works", "sleeps", "works", "spends")
_ENDS: Final[Mapping[Errand, str]] = {"sleeps": "COMPLETED", "works": "COMPLETED", "spends": "BUDGET_EXCEEDED"}

_AGENT_YAML: Final = f"""\
name: {AGENT}
model: scripted
script: script.yaml
autonomy: {{enabled: false, token_budget_per_hour: 0, max_actions_per_minute: 0, idle_timeout: 0}}
limits: {{max_cost_usd: 0.40, max_cost_usd_per_day: 10000, max_output_tokens: 300, on_cap: stop}}
schedules:
  - {{name: errands, cron: "0 0 1 1 *", prompt: Happy new year.}}
"""
_FLEET_YAML: Final = """\
models:
  "scripted:script": {price: {input: 1, output: 1}}
limits: {max_cost_usd_per_day: 10000}
"""
_USED: Final = "usage: {input_tokens: 100, output_tokens: 50}, repeat: true"
_SCRIPT_YAML: Final = f"""\
- {{finds: Spend all, calls: [{{tool: pay, arguments: {{part: more}}}}], {_USED}}}
- {{finds: Work through, unless: part-1, calls: [{{tool: pay, arguments: {{part: part-1}}}}], {_USED}}}
- {{finds: Work through, unless: part-2, calls: [{{tool: pay, arguments: {{part: part-2}}}}], {_USED}}}
- {{finds: Work through, text: That is done., {_USED}}}
- unless: part-1
  calls: [{{tool: pay, arguments: {{part: part-1}}}}, {{tool: yield, arguments: {{mode: sleep, sleep: 1s}}}}]
  repeat: true
- unless: part-2
  calls: [{{tool: pay, arguments: {{part: part-2}}}}, {{tool: yield, arguments: {{mode: sleep, sleep: 2s}}}}]
  repeat: true
- unless: part-3
  calls: [{{tool: pay, arguments: {{part: part-3}}}}, {{tool: yield, arguments: {{mode: shutdown}}}}]
  repeat: true
- {{calls: [{{tool: yield, arguments: {{mode: shutdown}}}}], {_USED}}}
"""
_TOOLS_PY: Final = '''\
import asyncio
import os

from halter import CallKey, tool


@tool(level="CONTROLLED", effect="write", cost=0.05)
async def pay(part: str, key: CallKey) -> str:
    """Pay for a part."""
    await asyncio.sleep(0.3)
    file = os.open({effects!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, key.encode() + b"\\n")
    finally:
        os.close(file)
    await asyncio.sleep(0.2)
    return f"Paid as {{key}}."
'''


def made(home: Path) -> Path:
    """Write the agent's folder, the fleet's file and the trust of a person who has read both."""
    folder = home / AGENT
    folder.mkdir()
    (home / EFFECTS).touch()
    (home / "halter.yaml").write_text(_FLEET_YAML)
    (folder / "agent.yaml").write_text(_AGENT_YAML)
    (folder / "script.yaml").write_text(_SCRIPT_YAML)
    (folder / "tools.py").write_text(_TOOLS_PY.format(effects=str(home / EFFECTS)))
    trusted = home / CONFIG / "halter"
    trusted.mkdir(parents=True)
    TrustFile(trusted / "trust.json").trust(folder, digest_folder(folder), PERSON, 0)
    return folder


def sessions(count: int) -> Iterator[tuple[str, Errand]]:
    for number in range(count):
        errand = _ERRANDS[number % len(_ERRANDS)]
        yield f"{AGENT}.{errand}-{number + 1}", errand


def begun(session: str, errand: Errand) -> Write:
    """Begin a session: one that sleeps runs by itself, the others are tasks of a trigger."""
    own = errand == "sleeps"
    event = SessionStarted(
        session=session,
        agent=AGENT,
        kind="autonomous" if own else "task",
        started_by=PERSON if own else f"trigger:{TRIGGER}",
        trigger="" if own else TRIGGER,
    )
    return start_session(
        event, None if own else {"works": b"Work through it.", "spends": b"Spend all you have."}[errand]
    )


def expected_end(errand: Errand) -> str:
    return _ENDS[errand]


def paid(home: Path) -> Counter[str]:
    """Read the outside world's count: how often each call had its effect."""
    return Counter((home / EFFECTS).read_text().split("\n")[:-1])


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
from halter.dispatch.dispatcher import Sessions
from halter_drills.zombie import unfenced
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


class LoggedLine(NamedTuple):
    """One event that a worker was told is durable."""

    stream: str
    seq: int
    generation: int
    hash: str


class WorkerProcess(msgspec.Struct, frozen=True):
    """One process. It says on its output what it has committed, each event when that is durable."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        if self.process.stdin is not None:
            # Whoever watches over it ends now, while its number cannot belong to anybody else.
            self.process.stdin.close()
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while process_state(self.pid) not in ("T", ""):
            if time.monotonic() > deadline:
                raise ChildStuck("A worker of the drill could not be stopped.")
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ended(self, patience: float = PATIENCE) -> int:
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise ChildStuck(f"A worker of the drill did not end within {patience:.0f} s.") from None

    def told(self) -> Iterator[LoggedLine]:
        """Read which events it was told are durable; one that was killed may have said its last word only in part."""
        for line in self.output.read_bytes().split(b"\n")[:-1]:
            said = json.loads(line)
            if "hash" in said:
                yield LoggedLine(said["stream"], said["seq"], said["generation"], said["hash"])

    def complaints(self) -> str:
        return self.errors.read_text("utf-8", "replace").strip()


class Workers:
    """Starts workers; made by `workers`, which ends those that are left."""

    def __init__(self, home: Path, folder: Path, url: str) -> None:
        self._home = home
        self._command = ["worker", str(folder), "--store", url, "--json"]
        self.started: list[WorkerProcess] = []

    def start(self, how: Sequence[str] = PLAIN) -> WorkerProcess:
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
        self.started.append(WorkerProcess(name, process, output, errors))
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
