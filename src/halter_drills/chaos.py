"""Workers are killed, stopped and continued, PostgreSQL is stopped hard, a clock is wrong: and every session continues.

Real `halter worker` processes share the sessions of one PostgreSQL. A seeded plan says what happens to them. The drill
judges by plain SQL, by the events that each worker printed, and by an outside count of payments; calls in doubt are
answered as a person would, by that count.
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
from halter_drills.checker import RecordedEvent, check, read_store
from halter_drills.children import PATIENCE, ChildStuck, wait_until_stopped
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

# The agent: its sessions sleep, work, or spend up to their cap, and a file counts what they do.

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
    trusted = home / CONFIG / "halter"
    trusted.mkdir(parents=True)
    TrustFile(trusted / "trust.json").trust(folder, digest_folder(folder), PERSON, 0)
    return folder


def sessions(count: int) -> Iterator[tuple[str, Errand]]:
    for number in range(count):
        errand = _ERRANDS[number % len(_ERRANDS)]
        yield f"{AGENT}.{errand}-{number + 1}", errand


def make_start_write(session: str, errand: Errand) -> Write:
    """Start a session: one that sleeps is autonomous, the others are tasks of a trigger."""
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


def count_paid(home: Path) -> Counter[str]:
    """Read how often each call had its effect outside."""
    return Counter((home / EFFECTS).read_text().split("\n")[:-1])


# A second shell waits for the end of the worker's input, and kills the worker then: so no worker outlives the drill,
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
"""The teeth: a worker that continues after it has lost its lease."""


class LoggedLine(NamedTuple):
    """One event that was acknowledged to a worker."""

    stream: str
    seq: int
    generation: int
    hash: str


class WorkerProcess(msgspec.Struct, frozen=True):
    """One process. It prints each event on its output when that is durable."""

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
            # Its keeper ends now, while the process id cannot belong to another process.
            self.process.stdin.close()
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        wait_until_stopped(self.pid)

    def wait_ended(self, max_wait: float = PATIENCE) -> int:
        try:
            return self.process.wait(max_wait)
        except subprocess.TimeoutExpired:
            raise ChildStuck(f"A worker of the drill did not end within {max_wait:.0f} s.") from None

    def read_acknowledged(self) -> Iterator[LoggedLine]:
        """Read the events that were acknowledged to it; the last line of a killed worker may be cut off."""
        for line in self.output.read_bytes().split(b"\n")[:-1]:
            logged = json.loads(line)
            if "hash" in logged:
                yield LoggedLine(logged["stream"], logged["seq"], logged["generation"], logged["hash"])

    def complaints(self) -> str:
        return self.errors.read_text("utf-8", "replace").strip()

    @property
    def has_crashed(self) -> bool:
        return "Traceback" in self.complaints()


class Workers:
    """Starts workers; `workers` makes it, and kills those that are left."""

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
    """Give a worker its own home, without the user's HALTER_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALTER_")}
    own = {"HOME": home, "XDG_CONFIG_HOME": home / CONFIG, "XDG_STATE_HOME": home / "state"}
    own["HALTER_FLEET"] = home / "halter.yaml"
    return kept | {name: str(folder) for name, folder in own.items()} | {"HALTER_PERSON": PERSON}


@contextmanager
def workers(home: Path, folder: Path, url: str) -> Generator[Workers]:
    """Start workers inside this block; all are killed when it ends."""
    started = Workers(home, folder, url)
    try:
        yield started
    finally:
        for worker in started.started:
            worker.kill()


# What happens to the workers, and when: a plan drawn from a seed.

What = Literal["kill", "stop", "go on", "restart", "skew"]

WORKERS: Final = 3
ROUND: Final = 27.0
"""Seconds in which everything happens once."""
STOPPED: Final = 20.0
"""Seconds for which a worker is stopped: longer than its lease and the takeover."""
FIRST: Final = 3.0
BURST: Final = 0.5
SESSIONS_PER_ROUND: Final = 60


class Fault(NamedTuple):
    """One event of the plan, in seconds from the start, for one of the workers' places."""

    at: float
    what: What
    place: int = 0


def rounds(sessions: int) -> int:
    return max(1, round(sessions / SESSIONS_PER_ROUND))


def plan_faults(seed: int, count: int) -> Sequence[Fault]:
    """Plan `count` rounds. In each, one worker is stopped, another is killed, and the server is stopped hard.

    Between rounds the third one is killed. There is always one that is untouched or has just been started.
    """
    rng = random.Random(seed)
    return sorted(fault for number in range(count) for fault in _round(rng, number, last=number == count - 1))


def _round(rng: random.Random, number: int, *, last: bool) -> Iterator[Fault]:
    begin = FIRST + number * ROUND
    first, second, third = rng.sample(range(WORKERS), WORKERS)
    stop = begin + rng.uniform(0, 0.5)
    yield Fault(stop, "stop", first)
    yield Fault(begin + rng.uniform(0.6, 2), "kill", second)
    if number == 0:
        yield Fault(begin + 16, "skew")
    yield Fault(begin + rng.uniform(6, 9), "restart")
    yield Fault(stop + STOPPED, "go on", first)
    if not last:
        yield Fault(stop + STOPPED + rng.uniform(0.5, 2), "kill", third)


def beginnings(sessions: int, count: int) -> Sequence[float]:
    """List when each session starts: half of them right before the first blow of a round, the others one by one."""
    share = -(-sessions // count)

    def moment(number: int) -> float:
        begin, place = FIRST + number // share * ROUND, number % share / share
        return begin - 0.5 if place < BURST else begin + (place - BURST) / (1 - BURST) * STOPPED

    return sorted(map(moment, range(sessions)))


# What must hold afterwards.

PRICE: Final = 50_000
WITHIN: Final = 2 * SECOND
"""How long after the end of its lease an orphan may wait for a new owner."""
REFUSES: Final = 3
TOLD: Final = 3000
"""Characters of a worker's error output in a violation."""
REFUSAL: Final = "ahead of the database's"


class Orphan(NamedTuple):
    """A session whose owner was killed or stopped, and the end of the owner's lease."""

    session: str
    generation: int
    alive_until: int


@dataclass(slots=True)
class ChaosSeen:
    """What the drill saw: blows with their start and end, orphans, and the worker with the wrong clock."""

    blows: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    orphans: list[Orphan] = field(default_factory=list[Orphan])
    skewed: WorkerProcess | None = None
    answered: int = 0
    revived: int = 0
    stalled: int = 0


def judge(
    workspace: Workspace,
    all_workers: Sequence[WorkerProcess],
    living: Sequence[WorkerProcess],
    seen: ChaosSeen,
    total: int,
) -> tuple[list[str], dict[str, Any]]:
    async def verified() -> list[str]:
        async with workspace.open_store() as store:
            return await examine(store)

    ended = [*check_refused(seen.skewed), *drain_workers(living)]
    contents = read_store(workspace.url)
    effects = count_paid(workspace.folder)
    late, longest = lateness(contents.events, seen)
    wrong = [
        *find_shared(all_workers),
        *check(contents),
        *find_unended(contents.events, total),
        *asyncio.run(verified()),
        *find_lost(workspace, all_workers),
        *checker.check_paid(contents.events, {call: [PRICE] * times for call, times in effects.items()}),
        *find_unpaid(contents.events, effects),
        *late,
        *(f"{each.name} wrote a traceback: {each.complaints()[-TOLD:]}" for each in all_workers if each.has_crashed),
        *ended,
    ]
    kinds = [event.kind for event in contents.events]
    counts = {
        "workers": len(all_workers),
        "revived": seen.revived,
        "events": len(contents.events),
        "payments": len(effects),
        "caps_reached": kinds.count("cost_cap_reached"),
        "doubts_answered": seen.answered,
        "orphans": len(seen.orphans),
        "longest_after_the_lease_ms": longest // 1000,
        "machine_stalled_ms": seen.stalled // 1000,
    }
    return wrong, counts


def find_unended(events: Sequence[RecordedEvent], total: int) -> Iterator[str]:
    """Check that each session ended once, in the expected state."""
    ends: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.kind == "session_ended":
            ends[event.stream].append(event.facts["state"])
    for session, errand in sessions(total):
        if ends[f"session:{session}"] != [ENDS[errand]]:
            yield f"The session {session} ended {ends[f'session:{session}']} instead of {ENDS[errand]}."


def find_lost(workspace: Workspace, all_workers: Sequence[WorkerProcess]) -> Iterator[str]:
    """Check that every event that was acknowledged to a worker is there."""
    with closing(connection(workspace.url)) as database:
        rows = database.execute("SELECT stream, seq, hash FROM events").fetchall()
    kept = {(stream, seq): bytes(value).hex() for stream, seq, value in rows}
    for worker in all_workers:
        for line in worker.read_acknowledged():
            if kept.get((line.stream, line.seq)) != line.hash:
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
    begun = {event.facts["call"] for event in events if event.kind == "call_started" and event.facts["tool"] == "pay"}
    for event in events:
        if event.kind == "call_settled" and event.facts["outcome"] == "ok" and event.facts["call"] in begun:
            call = event.facts["call"]
            if call not in effects:
                yield f"The call {call} is settled as done and had no effect."
    for call in effects.keys() - begun:
        yield f"The call {call} had its effect, and has no intent."


def lateness(events: Sequence[RecordedEvent], seen: ChaosSeen) -> tuple[list[str], int]:
    """Check how soon each orphan got a new owner; return the longest time after its lease."""
    moments: dict[tuple[str, int], int] = {}
    ended: set[str] = set()
    for event in events:
        moments.setdefault((event.stream, event.generation), event.at)
        if event.kind == "session_ended":
            ended.add(event.stream)
    wrong: list[str] = []
    longest = 0
    for orphan in set(seen.orphans):
        stream = f"session:{orphan.session}"
        later = [at for (name, generation), at in moments.items() if name == stream and generation > orphan.generation]
        if not later:
            if stream not in ended:
                wrong.append(f"{orphan.session} got no new owner.")
            continue
        after = min(later) - find_orphaned_since(orphan.alive_until, min(later), seen)
        longest = max(longest, after)
        if after > WITHIN + seen.stalled:
            wrong.append(f"{orphan.session} got a new owner {after / SECOND:.1f} s after its lease had expired.")
    return wrong, longest


def find_orphaned_since(alive_until: int, resumed: int, seen: ChaosSeen) -> int:
    """Compute from when on an orphan could get a new owner.

    Not while the server was down. If another worker was killed or stopped meanwhile, it may have been the new owner:
    then the time counts from the end of that worker's lease.
    """
    moment = alive_until
    for what, begin, end in seen.blows:
        if what == "restart" and begin < resumed and end > moment:
            moment = end
        if what in ("kill", "stop") and alive_until < begin < resumed:
            moment = max(moment, begin + DEFAULT_LEASE_DURATION)
    return min(moment, resumed)


def check_refused(skewed: WorkerProcess | None) -> Iterator[str]:
    """Check that a worker with a wrong clock reported it, and did nothing."""
    if skewed is None:
        return
    code, output = skewed.wait_ended(), skewed.complaints()
    if code != REFUSES or REFUSAL not in output:
        yield f"A worker whose clock was two hours ahead ended with {code}: {output}"
    if any(line.generation for line in skewed.read_acknowledged()):
        yield "A worker whose clock was two hours ahead took a session."


def drain_workers(living: Sequence[WorkerProcess]) -> Iterator[str]:
    """End the remaining workers with SIGTERM, and check that they exit with 0."""
    for worker in living:
        worker.process.send_signal(signal.SIGTERM)
    for worker in living:
        code = worker.wait_ended()
        if code != 0:
            yield f"{worker.name} exited with {code} after SIGTERM: {worker.complaints()}"


SESSIONS: Final = 300
LOOK: Final = SECOND // 4
LOOKS: Final = 40
SESSIONS_END_WITHIN: Final = 120 * SECOND
"""How long the sessions may take to end after the last blow."""
LEFT_OUT: Final = "The server was not stopped, since --store names it."

OWNED: Final = """
SELECT s.session, s.generation, w.alive_until FROM workers w JOIN sessions s ON s.owner = w.worker
WHERE w.about::json ->> 'pid' = %s AND w.about <> ''
"""
BEATEN: Final = "SELECT MAX(alive_until) FROM workers WHERE about <> '' AND about::json ->> 'pid' = %s"


@dataclass(slots=True)
class ChaosScene:
    """The running drill: its workers, each at its place, and what was seen so far."""

    workspace: Workspace
    cluster: Cluster | None
    workers: Workers
    how: Sequence[str]
    processes: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    stopped: set[int] = field(default_factory=set[int])
    resumed: dict[int, int] = field(default_factory=dict[int, int])
    observed: ChaosSeen = field(default_factory=ChaosSeen)
    clock: SystemClock = field(default_factory=SystemClock)

    def open(self) -> None:
        self.processes = [self.workers.start(self.how) for _ in range(WORKERS)]
        deadline = time.monotonic() + SESSIONS_END_WITHIN / SECOND
        while not all(self._beaten(worker.pid) for worker in self.processes):
            if time.monotonic() > deadline or any(worker.process.poll() is not None for worker in self.processes):
                output = " ".join(worker.complaints() for worker in self.processes)
                raise DrillBroken(f"The workers of the drill did not start. {output}")
            time.sleep(LOOK / SECOND)

    async def strike(self, fault: Fault) -> None:
        if fault.what in ("kill", "stop"):
            await self._busy(self.processes[fault.place])
        at, worker = self.clock.now(), self.processes[fault.place]
        match fault.what:
            case "kill":
                worker.kill()
                self.observed.orphans += self._list_owned(worker)
                self.processes[fault.place] = self.workers.start(self.how)
            case "stop":
                worker.stop()
                self.stopped.add(worker.pid)
                self.observed.orphans += self._list_owned(worker)
            case "go on":
                worker.process.send_signal(signal.SIGCONT)
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
        """Wait until a worker has sessions: a blow to an idle one proves nothing."""
        for _ in range(LOOKS):
            if self._list_owned(worker):
                return
            await self.clock.sleep(SECOND // 20)

    def _list_owned(self, worker: WorkerProcess) -> list[Orphan]:
        with closing(connection(self.workspace.url)) as database:
            return [Orphan(*row) for row in database.execute(OWNED, (str(worker.pid),)).fetchall()]

    def is_unsettled(self) -> bool:
        """Whether a worker may still act that has lost its sessions and does not know it yet."""
        if self.stopped:
            return True
        for pid, at in list(self.resumed.items()):
            if self._beaten(pid) > at + DEFAULT_LEASE_DURATION - HEARTBEAT_INTERVAL:
                del self.resumed[pid]
        return bool(self.resumed)

    def _beaten(self, pid: int) -> int:
        with closing(connection(self.workspace.url)) as database:
            return database.execute(BEATEN, (str(pid),)).fetchone()[0] or 0


async def _run_rounds(scene: ChaosScene, setting: Setting, total: int) -> None:
    """Start sessions and strike all blows; return when all have ended, or after a deadline."""
    count = rounds(total)
    plan, moments = plan_faults(1, count), beginnings(total, count)
    store = scene.workspace.open().patient(scene.clock)
    began = scene.clock.now()
    try:
        async with asyncio.TaskGroup() as group:
            person = group.create_task(_answer(scene, store))
            more = [group.create_task(_measure_stalls(scene)), group.create_task(_revive(scene))]
            beginning = group.create_task(_begin(scene, store, began, moments, total))
            for number, fault in enumerate(plan):
                await _wait_until(scene.clock, began, fault.at)
                setting.progress(number, len(plan) + 1, fault.what)
                await scene.strike(fault)
            await beginning
            await _wait_for_end(scene, store)
            for task in (person, *more):
                task.cancel()
    finally:
        await store.close()


async def _wait_until(clock: SystemClock, began: int, seconds: float) -> None:
    await clock.sleep(max(0, began + round(seconds * SECOND) - clock.now()))


async def _begin(scene: ChaosScene, store: Store, began: int, moments: Sequence[float], total: int) -> None:
    for at, (session, errand) in zip(moments, sessions(total), strict=True):
        await _wait_until(scene.clock, began, at)
        await store.commit(make_start_write(session, errand))


async def _wait_for_end(scene: ChaosScene, store: Store) -> None:
    deadline = scene.clock.now() + SESSIONS_END_WITHIN
    while scene.clock.now() < deadline:
        rows = await store.ask(Query("all_sessions", SessionRow))
        if all(row.ended_at is not None for row in rows):
            return
        await scene.clock.sleep(LOOK)


async def _answer(scene: ChaosScene, store: Store) -> None:
    """Answer as a person who checks the payments first; not while a worker without its lease may still pay."""
    while True:
        await scene.clock.sleep(2 * LOOK)
        for decision in await list_pending_decisions(store):
            if not await asyncio.to_thread(scene.is_unsettled):
                answer = "approve" if count_paid(scene.workspace.folder)[decision.subject] else "deny"
                await store.commit(answer_decision(decision, answer, PERSON, f"{decision.decision}/answer"))
                scene.observed.answered += 1


async def _revive(scene: ChaosScene) -> None:
    """Restart workers that ended while the server was down, as a service manager does."""
    while True:
        await scene.clock.sleep(SECOND)
        for place, worker in enumerate(scene.processes):
            if worker.process.poll() is not None:
                scene.processes[place] = scene.workers.start(scene.how)
                scene.observed.revived += 1


async def _measure_stalls(scene: ChaosScene) -> None:
    """Measure how late the machine wakes a task that only sleeps."""
    while True:
        at = scene.clock.now()
        await scene.clock.sleep(SECOND // 20)
        scene.observed.stalled = max(scene.observed.stalled, scene.clock.now() - at - SECOND // 20)


@contextmanager
def _server(setting: Setting) -> Generator[tuple[Setting, Cluster | None]]:
    if setting.store is not None:
        yield setting, None
        return
    with throwaway_cluster() as cluster:
        yield replace(setting, store=cluster.url), cluster


def run(setting: Setting) -> DrillResult:
    total = setting.seeds or SESSIONS
    with _server(setting) as (on, cluster), own_store(on) as workspace:
        folder = make_home(workspace.folder)
        asyncio.run(workspace.open().close())
        with workers(workspace.folder, folder, workspace.url) as started:
            scene = ChaosScene(workspace, cluster, started, UNFENCED if setting.teeth else PLAIN)
            scene.open()
            asyncio.run(_run_rounds(scene, setting, total))
            violations, counts = judge(workspace, started.started, scene.processes, scene.observed, total)
        steps = len(plan_faults(1, rounds(total))) + 1
        setting.progress(steps, steps, "checked")
    blows = Counter(what for what, _, _ in scene.observed.blows)
    told = {"kills": blows["kill"], "stops": blows["stop"], "server_stopped": blows["restart"]}
    left_out = {} if cluster else {"left_out": LEFT_OUT}
    return result(DRILL.name, "postgresql", total, violations, told | counts | left_out)


DRILL: Final = Drill(
    "chaos",
    "Killed and stopped workers lose no session and no event, and nothing is done twice or by two workers.",
    run,
    ("postgresql",),
)
