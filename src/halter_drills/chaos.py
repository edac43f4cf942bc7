"""Every session continues while workers are killed and stopped, PostgreSQL is killed, and a clock is wrong.

Real `halter worker` processes share the sessions of one PostgreSQL. A seeded plan lists the faults. The drill judges by
plain SQL, by the events that each worker printed, and by an outside count of payments. It decides about calls in doubt
by that count, as a person would.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from halter.config.trust import TrustFile, digest_folder
from halter.core.clock import SECOND, SystemClock
from halter.core.events import SessionStarted
from halter.core.ports import Query, Store, Write
from halter.core.rows import SessionRow
from halter.dispatch.heartbeat import HEARTBEAT_INTERVAL
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.runtime.runtime import DEFAULT_LEASE_DURATION
from halter.state.lifecycle import start_session
from halter.testing.postgres import Cluster, throwaway_cluster
from halter_drills import checker
from halter_drills.checker import LateFinding, RecordedEvent, Stall, check, metronome, read_store, split_lateness
from halter_drills.children import CHILD_TIMEOUT_SECONDS, ChildStuck, children, wait_until_stopped
from halter_drills.drill import (
    Drill,
    DrillBroken,
    DrillResult,
    Setting,
    Workspace,
    connection,
    examine,
    own_store,
    result,
)
from halter_drills.workload import PERSON

# The agent: its sessions sleep, work, or spend up to their cap; a file records their effects.

Errand = Literal["sleeps", "works", "spends"]

AGENT: Final = "courier"
TRIGGER: Final = f"{AGENT}/errands"
CONFIG: Final = "config"
EFFECTS: Final = "effects"

_ERRANDS: Final[tuple[Errand, ...]] = ("sleeps", "works", "sleeps", "works", "spends")
ENDS: Final[Mapping[Errand, str]] = {"sleeps": "COMPLETED", "works": "COMPLETED", "spends": "BUDGET_EXCEEDED"}
"""The state in which each session must end."""

_AGENT_YAML: Final = f"""\
name: {AGENT}
model: scripted
script: script.yaml
policy: {{provenance: off}}
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


def make_home(home: Path) -> Path:
    """Write the agent's folder, the fleet's file and a trust file."""
    folder = home / AGENT
    folder.mkdir()
    (home / EFFECTS).touch()
    (home / "halter.yaml").write_text(_FLEET_YAML)
    (folder / "agent.yaml").write_text(_AGENT_YAML)
    (folder / "script.yaml").write_text(_SCRIPT_YAML)
    (folder / "tools.py").write_text(_TOOLS_PY.format(effects=str(home / EFFECTS)))
    config_folder = home / CONFIG / "halter"
    config_folder.mkdir(parents=True)
    TrustFile(config_folder / "trust.json").trust(folder, digest_folder(folder), PERSON, 0)
    return folder


def sessions(count: int) -> Iterator[tuple[str, Errand]]:
    for number in range(count):
        errand = _ERRANDS[number % len(_ERRANDS)]
        yield f"{AGENT}.{errand}-{number + 1}", errand


def make_start_write(session: str, errand: Errand) -> Write:
    """Make the write that starts a session: a sleeping one is autonomous, the others are tasks of a trigger."""
    is_autonomous = errand == "sleeps"
    event = SessionStarted(
        session=session,
        agent=AGENT,
        kind="autonomous" if is_autonomous else "task",
        started_by=PERSON if is_autonomous else f"trigger:{TRIGGER}",
        trigger="" if is_autonomous else TRIGGER,
    )
    return start_session(
        event, None if is_autonomous else {"works": b"Work through it.", "spends": b"Spend all you have."}[errand]
    )


def count_paid(home: Path) -> Counter[str]:
    """Count the effects of each call in the outside world."""
    return Counter((home / EFFECTS).read_text().split("\n")[:-1])


# A second shell waits for the end of the worker's input and then kills the worker, so no worker outlives the drill,
# even if the drill is killed.
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
from halter.dispatch.dispatcher import RunningSessions
from halter.journal.store import JournalStore
from halter_drills.zombie import apply_unfenced
JournalStore.__init__.__kwdefaults__["applier"] = apply_unfenced
RunningSessions.cancel_lost = lambda self, leases: None
{_ENTER}"""

PLAIN: Final = ("-m", "halter")
SKEWED: Final = ("-c", _SKEWED)
"""A machine whose clock is two hours ahead."""
UNFENCED: Final = ("-c", _UNFENCED)
"""The teeth: a worker that continues after it has lost its lease."""


class LoggedLine(NamedTuple):
    """One event that was acknowledged to a worker."""

    stream: str
    seq: int
    generation: int
    hash: str


class WorkerProcess(msgspec.Struct, frozen=True):
    """One worker process. It prints each event to its output once the event is durable."""

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
            # End its keeper now, while no other process can have the process id.
            self.process.stdin.close()
        self.process.wait(CHILD_TIMEOUT_SECONDS)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        wait_until_stopped(self.pid)

    def wait_ended(self, max_wait: float = CHILD_TIMEOUT_SECONDS) -> int:
        try:
            return self.process.wait(max_wait)
        except subprocess.TimeoutExpired:
            raise ChildStuck(f"A worker of the drill did not end within {max_wait:.0f} s.") from None

    def read_acknowledged(self) -> Iterator[LoggedLine]:
        """Read the events that were acknowledged to the worker. Skip a last line that was cut off."""
        for line in self.output.read_bytes().split(b"\n")[:-1]:
            entry = json.loads(line)
            if "hash" in entry:
                yield LoggedLine(entry["stream"], entry["seq"], entry["generation"], entry["hash"])

    def complaints(self) -> str:
        return self.errors.read_text("utf-8", "replace").strip()

    @property
    def has_crashed(self) -> bool:
        return "Traceback" in self.complaints()


class Workers:
    """Starts workers. Made by `workers`, which kills the remaining ones."""

    def __init__(self, home: Path, folder: Path, url: str) -> None:
        self._home = home
        self._command = ["worker", str(folder), "--store", url, "--json"]
        self.started: list[WorkerProcess] = []

    def start(self, how: Sequence[str] = PLAIN) -> WorkerProcess:
        name = f"worker-{len(self.started) + 1}"
        output, errors = self._home / f"{name}.out", self._home / f"{name}.err"
        with output.open("wb") as output_file, errors.open("wb") as errors_file:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "keeper", sys.executable, *how, *self._command],
                stdin=subprocess.PIPE,
                stdout=output_file,
                stderr=errors_file,
                cwd=self._home,
                env=environ(self._home),
                start_new_session=True,
            )
        self.started.append(WorkerProcess(name, process, output, errors))
        return self.started[-1]


def environ(home: Path) -> Mapping[str, str]:
    """Give a worker its own home, without the user's HALTER_ variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALTER_")}
    variables = {"HOME": home, "XDG_CONFIG_HOME": home / CONFIG, "XDG_STATE_HOME": home / "state"}
    variables["HALTER_FLEET"] = home / "halter.yaml"
    return inherited | {name: str(folder) for name, folder in variables.items()} | {"HALTER_PERSON": PERSON}


@contextmanager
def workers(home: Path, folder: Path, url: str) -> Generator[Workers]:
    """Start workers inside this block; all are killed when it ends."""
    pool = Workers(home, folder, url)
    try:
        yield pool
    finally:
        for worker in pool.started:
            worker.kill()


# The faults and their times: a plan drawn from a seed.

FaultAction = Literal["kill", "stop", "go on", "restart", "skew"]

WORKERS: Final = 3
ROUND: Final = 27.0
"""Seconds in which each kind of fault happens once."""
STOPPED: Final = 20.0
"""Seconds for which a worker is stopped: longer than its lease and the takeover."""
FIRST_ROUND_AT: Final = 3.0
BURST_SHARE: Final = 0.5
SESSIONS_PER_ROUND: Final = 60


class Fault(NamedTuple):
    """One fault of the plan, in seconds from the start, and the index of its worker."""

    at: float
    what: FaultAction
    worker_index: int = 0


def rounds(sessions: int) -> int:
    return max(1, round(sessions / SESSIONS_PER_ROUND))


def plan_faults(seed: int, count: int) -> Sequence[Fault]:
    """Plan `count` rounds. In each, one worker is stopped, another is killed, and the server is killed.

    Between rounds the third worker is killed. At any time, one worker is untouched or newly started.
    """
    rng = random.Random(seed)
    return sorted(fault for number in range(count) for fault in _round(rng, number, last=number == count - 1))


def _round(rng: random.Random, number: int, *, last: bool) -> Iterator[Fault]:
    round_start = FIRST_ROUND_AT + number * ROUND
    first, second, third = rng.sample(range(WORKERS), WORKERS)
    stop = round_start + rng.uniform(0, 0.5)
    yield Fault(stop, "stop", first)
    yield Fault(round_start + rng.uniform(0.6, 2), "kill", second)
    if number == 0:
        yield Fault(round_start + 16, "skew")
    yield Fault(round_start + rng.uniform(6, 9), "restart")
    yield Fault(stop + STOPPED, "go on", first)
    if not last:
        yield Fault(stop + STOPPED + rng.uniform(0.5, 2), "kill", third)


def beginnings(sessions: int, count: int) -> Sequence[float]:
    """List the start times of sessions: half of them right before the first fault of a round, the others one by one."""
    share = -(-sessions // count)

    def moment(number: int) -> float:
        round_start, fraction = FIRST_ROUND_AT + number // share * ROUND, number % share / share
        return (
            round_start - 0.5
            if fraction < BURST_SHARE
            else round_start + (fraction - BURST_SHARE) / (1 - BURST_SHARE) * STOPPED
        )

    return sorted(map(moment, range(sessions)))


# The checks.

PRICE: Final = 50_000
MAX_TAKEOVER_DELAY: Final = 2 * SECOND
"""Longest time from the end of its lease until an orphan gets a new owner."""
REFUSED_EXIT_CODE: Final = 3
MAX_EXCERPT_LENGTH: Final = 3000
"""Characters of a worker's error output in a violation."""
REFUSAL_TEXT: Final = "ahead of the database's"


class Presence(NamedTuple):
    """A time in which a worker could take sessions over."""

    since: int
    until: int


class Orphan(NamedTuple):
    """A session whose owner was killed or stopped, and the end of the owner's lease."""

    session: str
    generation: int
    alive_until: int


@dataclass(slots=True)
class ChaosSeen:
    """Observations of the drill: faults with their start and end, orphans, and the worker with the wrong clock."""

    blows: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    presences: list[Presence] = field(default_factory=list[Presence])
    orphans: list[Orphan] = field(default_factory=list[Orphan])
    skewed: WorkerProcess | None = None
    answered: int = 0
    revived: int = 0
    stalls: list[Stall] = field(default_factory=list[Stall])


def judge(
    workspace: Workspace,
    all_workers: Sequence[WorkerProcess],
    running: Sequence[WorkerProcess],
    observations: ChaosSeen,
    total: int,
) -> tuple[list[str], dict[str, Any]]:
    async def examine_store() -> list[str]:
        async with workspace.open_store() as store:
            return await examine(store)

    exit_violations = [*check_refused(observations.skewed), *drain_workers(running)]
    contents = read_store(workspace.url)
    effects = count_paid(workspace.folder)
    late_findings, longest = lateness(contents.events, observations)
    late_violations, unsure = split_lateness(late_findings, observations.stalls)
    wrong = [
        *find_shared(all_workers),
        *check(contents),
        *find_unended(contents.events, total),
        *asyncio.run(examine_store()),
        *find_lost(workspace, all_workers),
        *checker.check_paid(contents.events, {call: [PRICE] * times for call, times in effects.items()}),
        *find_unpaid(contents.events, effects),
        *late_violations,
        *(
            f"{each.name} wrote a traceback: {each.complaints()[-MAX_EXCERPT_LENGTH:]}"
            for each in all_workers
            if each.has_crashed
        ),
        *exit_violations,
    ]
    kinds = [event.kind for event in contents.events]
    counts = {
        "workers": len(all_workers),
        "revived": observations.revived,
        "events": len(contents.events),
        "payments": len(effects),
        "caps_reached": kinds.count("cost_cap_reached"),
        "doubts_answered": observations.answered,
        "orphans": len(observations.orphans),
        "longest_after_the_lease_ms": longest // 1000,
        "machine_stalled_ms": max((stall.until - stall.since for stall in observations.stalls), default=0) // 1000,
    }
    return wrong, {**counts, "too_busy_to_tell": unsure} if unsure else counts


def find_unended(events: Sequence[RecordedEvent], total: int) -> Iterator[str]:
    """Check that each session ended once, in the expected state."""
    end_states: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.kind == "session_ended":
            end_states[event.stream].append(event.facts["state"])
    for session, errand in sessions(total):
        if end_states[f"session:{session}"] != [ENDS[errand]]:
            yield f"The session {session} ended {end_states[f'session:{session}']} instead of {ENDS[errand]}."


def find_lost(workspace: Workspace, all_workers: Sequence[WorkerProcess]) -> Iterator[str]:
    """Check that every event that was acknowledged to a worker is in the store."""
    with closing(connection(workspace.url)) as database:
        rows = database.execute("SELECT stream, seq, hash FROM events").fetchall()
    hashes = {(stream, seq): bytes(value).hex() for stream, seq, value in rows}
    for worker in all_workers:
        for line in worker.read_acknowledged():
            if hashes.get((line.stream, line.seq)) != line.hash:
                yield f"Event {line.seq} of {line.stream} was acknowledged to {worker.name} and is lost."


def find_shared(all_workers: Sequence[WorkerProcess]) -> Iterator[str]:
    """Check that each generation of a session has one worker."""
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for worker in all_workers:
        for line in worker.read_acknowledged():
            if line.stream.startswith("session:") and not line.stream.endswith("/in") and line.generation:
                owners[line.stream, line.generation].add(worker.name)
    for (stream, generation), names in owners.items():
        if len(names) > 1:
            yield f"Generation {generation} of {stream} was written by {' and '.join(sorted(names))}."


def find_unpaid(events: Sequence[RecordedEvent], effects: Mapping[str, int]) -> Iterator[str]:
    """Check that every settled payment had its effect, and every effect its intent."""
    pay_calls = {
        event.facts["call"] for event in events if event.kind == "call_started" and event.facts["tool"] == "pay"
    }
    for event in events:
        if event.kind == "call_settled" and event.facts["outcome"] == "ok" and event.facts["call"] in pay_calls:
            call = event.facts["call"]
            if call not in effects:
                yield f"The call {call} was settled as done, but had no effect."
    for call in effects.keys() - pay_calls:
        yield f"The call {call} had an effect, but has no intent."


def lateness(events: Sequence[RecordedEvent], observations: ChaosSeen) -> tuple[list[LateFinding], int]:
    """Check how soon each orphan got a new owner; return what was late and the longest time after a lease."""
    first_event_at: dict[tuple[str, int], int] = {}
    ended_streams: set[str] = set()
    for event in events:
        first_event_at.setdefault((event.stream, event.generation), event.at)
        if event.kind == "session_ended":
            ended_streams.add(event.stream)
    late: list[LateFinding] = []
    longest = 0
    for orphan in set(observations.orphans):
        stream = f"session:{orphan.session}"
        takeover_times = [
            at for (name, generation), at in first_event_at.items() if name == stream and generation > orphan.generation
        ]
        if not takeover_times:
            if stream not in ended_streams:
                late.append(LateFinding(f"{orphan.session} got no new owner."))
            continue
        since = find_orphaned_since(orphan.alive_until, min(takeover_times), observations)
        delay = min(takeover_times) - since
        longest = max(longest, delay)
        if delay > MAX_TAKEOVER_DELAY:
            sentence = f"{orphan.session} got a new owner {delay / SECOND:.1f} s after its lease expired."
            late.append(LateFinding(sentence, since, delay - MAX_TAKEOVER_DELAY, MAX_TAKEOVER_DELAY))
    return late, longest


def find_orphaned_since(alive_until: int, resumed_at: int, observations: ChaosSeen) -> int:
    """Compute the earliest time at which an orphan could get a new owner.

    This is after the server was down, and when a worker was there: on a slow machine, one that replaces a killed worker
    takes seconds to start. If another worker was killed or stopped meanwhile, it may have been the new owner, so the
    time counts from the end of that worker's lease.
    """
    moment = alive_until
    for action, begin, end in observations.blows:
        if action == "restart" and begin < resumed_at and end > moment:
            moment = end
        if action in ("kill", "stop") and alive_until < begin < resumed_at:
            moment = max(moment, begin + DEFAULT_LEASE_DURATION)
    present_since = (max(moment, each.since) for each in observations.presences if each.until > moment)
    return min(min(present_since, default=moment), resumed_at)


def check_refused(worker: WorkerProcess | None) -> Iterator[str]:
    """Check that a worker with a wrong clock reported it and took no session."""
    if worker is None:
        return
    code, output = worker.wait_ended(), worker.complaints()
    if code != REFUSED_EXIT_CODE or REFUSAL_TEXT not in output:
        yield f"A worker whose clock was two hours ahead ended with {code}: {output}"
    if any(line.generation for line in worker.read_acknowledged()):
        yield "A worker whose clock was two hours ahead took a session."


def drain_workers(running: Sequence[WorkerProcess]) -> Iterator[str]:
    """End the remaining workers with SIGTERM, and check that they exit with 0."""
    for worker in running:
        worker.process.send_signal(signal.SIGTERM)
    for worker in running:
        code = worker.wait_ended()
        if code != 0:
            yield f"{worker.name} exited with {code} after SIGTERM: {worker.complaints()}"


DEFAULT_SESSIONS: Final = 300
POLL_INTERVAL: Final = SECOND // 4
MAX_POLLS: Final = 40
MAX_END_DELAY: Final = 120 * SECOND
"""Longest time from the last fault until all sessions have ended."""
NEVER: Final = sys.maxsize
SERVER_NOT_STOPPED: Final = "The PostgreSQL server was not stopped, because it was passed with --store."

OWNED_QUERY: Final = """
SELECT s.session, s.generation, w.alive_until FROM workers w JOIN sessions s ON s.owner = w.worker
WHERE w.about::json ->> 'pid' = %s AND w.about <> ''
"""
STARTED_QUERY: Final = "SELECT about::json ->> 'pid', about::json ->> 'started_at' FROM workers WHERE about <> ''"
HEARTBEAT_QUERY: Final = "SELECT MAX(alive_until) FROM workers WHERE about <> '' AND about::json ->> 'pid' = %s"


@dataclass(slots=True)
class ChaosScene:
    """The running drill: its workers, and its observations so far."""

    workspace: Workspace
    cluster: Cluster | None
    workers: Workers
    how: Sequence[str]
    processes: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    stopped: set[int] = field(default_factory=set[int])
    resumed: dict[int, int] = field(default_factory=dict[int, int])
    absences: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Times in which a process could do nothing: its process id, since when and until when."""
    observed: ChaosSeen = field(default_factory=ChaosSeen)
    clock: SystemClock = field(default_factory=SystemClock)

    def open(self) -> None:
        self.processes = [self.workers.start(self.how) for _ in range(WORKERS)]
        deadline = time.monotonic() + MAX_END_DELAY / SECOND
        while not all(self._beaten(worker.pid) for worker in self.processes):
            if time.monotonic() > deadline or any(worker.process.poll() is not None for worker in self.processes):
                output = " ".join(worker.complaints() for worker in self.processes)
                raise DrillBroken(f"The workers of the drill did not start. {output}")
            time.sleep(POLL_INTERVAL / SECOND)

    async def strike(self, fault: Fault) -> None:
        if fault.what in ("kill", "stop"):
            await self._busy(self.processes[fault.worker_index])
        at, worker = self.clock.now(), self.processes[fault.worker_index]
        match fault.what:
            case "kill":
                worker.kill()
                self.absences.append((worker.pid, at, NEVER))
                self.observed.orphans += self._list_owned(worker)
                self.processes[fault.worker_index] = self.workers.start(self.how)
            case "stop":
                worker.stop()
                self.stopped.add(worker.pid)
                self.observed.orphans += self._list_owned(worker)
            case "go on":
                worker.process.send_signal(signal.SIGCONT)
                stopped_at = next(begin for action, begin, _ in reversed(self.observed.blows) if action == "stop")
                self.absences.append((worker.pid, stopped_at, at))
                self.stopped.discard(worker.pid)
                self.resumed[worker.pid] = at
            case "restart" if self.cluster is not None:
                await asyncio.to_thread(self.cluster.stop_hard)
                await asyncio.to_thread(self.cluster.start)
            case "restart":
                return
            case "skew":
                self.observed.skewed = self.workers.start(SKEWED)
        self.observed.blows.append((fault.what, at, self.clock.now()))

    async def _busy(self, worker: WorkerProcess) -> None:
        """Wait until a worker has sessions: a fault in an idle worker proves nothing."""
        for _ in range(MAX_POLLS):
            if self._list_owned(worker):
                return
            await self.clock.sleep(SECOND // 20)

    def _list_owned(self, worker: WorkerProcess) -> list[Orphan]:
        with closing(connection(self.workspace.url)) as database:
            return [Orphan(*row) for row in database.execute(OWNED_QUERY, (str(worker.pid),)).fetchall()]

    def record_presences(self) -> None:
        """Record when which worker could take sessions over: from its start in the store on, except its absences."""
        with closing(connection(self.workspace.url)) as database:
            starts = database.execute(STARTED_QUERY).fetchall()
        for pid, started_at in starts:
            if self.observed.skewed is not None and int(pid) == self.observed.skewed.pid:
                continue
            since = int(started_at)
            for _, begin, end in sorted(each for each in self.absences if each[0] == int(pid)):
                self.observed.presences.append(Presence(since, begin))
                since = end
            self.observed.presences.append(Presence(since, NEVER))

    def is_unsettled(self) -> bool:
        """Return True while a worker that lost its sessions may still act on them."""
        if self.stopped:
            return True
        for pid, at in list(self.resumed.items()):
            if self._beaten(pid) > at + DEFAULT_LEASE_DURATION - HEARTBEAT_INTERVAL:
                del self.resumed[pid]
        return bool(self.resumed)

    def _beaten(self, pid: int) -> int:
        with closing(connection(self.workspace.url)) as database:
            return database.execute(HEARTBEAT_QUERY, (str(pid),)).fetchone()[0] or 0


async def _run_rounds(scene: ChaosScene, setting: Setting, total: int) -> None:
    """Start the sessions and inject all faults; return when all sessions have ended, or after a deadline."""
    count = rounds(total)
    plan, start_times = plan_faults(1, count), beginnings(total, count)
    store = scene.workspace.open().patient(scene.clock)
    began_at = scene.clock.now()
    try:
        async with asyncio.TaskGroup() as group:
            person = group.create_task(_answer(scene, store))
            reviver = group.create_task(_revive(scene))
            starting = group.create_task(_begin(scene, store, began_at, start_times, total))
            for number, fault in enumerate(plan):
                await _wait_until(scene.clock, began_at, fault.at)
                setting.progress(number, len(plan) + 1, fault.what)
                await scene.strike(fault)
            await starting
            await _wait_for_end(scene, store)
            for task in (person, reviver):
                task.cancel()
    finally:
        await store.close()


async def _wait_until(clock: SystemClock, began_at: int, seconds: float) -> None:
    await clock.sleep(max(0, began_at + round(seconds * SECOND) - clock.now()))


async def _begin(scene: ChaosScene, store: Store, began_at: int, start_times: Sequence[float], total: int) -> None:
    for at, (session, errand) in zip(start_times, sessions(total), strict=True):
        await _wait_until(scene.clock, began_at, at)
        await store.commit(make_start_write(session, errand))


async def _wait_for_end(scene: ChaosScene, store: Store) -> None:
    deadline = scene.clock.now() + MAX_END_DELAY
    while scene.clock.now() < deadline:
        rows = await store.ask(Query("all_sessions", SessionRow))
        if all(row.ended_at is not None for row in rows):
            return
        await scene.clock.sleep(POLL_INTERVAL)


async def _answer(scene: ChaosScene, store: Store) -> None:
    """Answer decisions as a person who checks the payments first, but not while a worker without its lease may pay."""
    while True:
        await scene.clock.sleep(2 * POLL_INTERVAL)
        for decision in await list_pending_decisions(store):
            if not await asyncio.to_thread(scene.is_unsettled):
                answer = "approve" if count_paid(scene.workspace.folder)[decision.subject] else "deny"
                await store.commit(answer_decision(decision, answer, PERSON, f"{decision.decision}/answer"))
                scene.observed.answered += 1


async def _revive(scene: ChaosScene) -> None:
    """Restart workers that exited while the server was down, as a service manager does."""
    while True:
        await scene.clock.sleep(SECOND)
        for index, worker in enumerate(scene.processes):
            if worker.process.poll() is not None:
                scene.absences.append((worker.pid, scene.clock.now(), NEVER))
                scene.processes[index] = scene.workers.start(scene.how)
                scene.observed.revived += 1


@contextmanager
def _server(setting: Setting) -> Generator[tuple[Setting, Cluster | None]]:
    if setting.store is not None:
        yield setting, None
        return
    with throwaway_cluster() as cluster:
        yield replace(setting, store=cluster.url), cluster


def run(setting: Setting) -> DrillResult:
    total = setting.seeds or DEFAULT_SESSIONS
    with _server(setting) as (server_setting, cluster), own_store(server_setting) as workspace:
        folder = make_home(workspace.folder)
        asyncio.run(workspace.open().close())
        with workers(workspace.folder, folder, workspace.url) as pool, children(checker.__name__) as processes:
            metronome_child = processes.start(metronome)
            scene = ChaosScene(workspace, cluster, pool, UNFENCED if setting.teeth else PLAIN)
            scene.open()
            asyncio.run(_run_rounds(scene, setting, total))
            metronome_child.send(None)
            scene.observed.stalls = metronome_child.receive()
            scene.record_presences()
            violations, counts = judge(workspace, pool.started, scene.processes, scene.observed, total)
        steps = len(plan_faults(1, rounds(total))) + 1
        setting.progress(steps, steps, "checked")
    blows = Counter(action for action, _, _ in scene.observed.blows)
    fault_counts = {"kills": blows["kill"], "stops": blows["stop"], "server_stopped": blows["restart"]}
    omission = {} if cluster else {"left_out": SERVER_NOT_STOPPED}
    return result(DRILL.name, "postgresql", total, violations, fault_counts | counts | omission)


DRILL: Final = Drill(
    "chaos",
    "Killed and stopped workers lose no session and no event, and no call runs twice or on two workers.",
    run,
    ("postgresql",),
)
