"""Work that is stopped at any commit, in any way, ends like work that was not stopped.

An agent plays a playbook of reads and writes, and reviews a document: it uses a skill, asks another agent that pays,
and emits two findings, of which a judge withholds one. Its process is stopped and started again, and a person answers
for plain writes in doubt. This is done at every commit in virtual time, and at some of them with processes and signals.
"""

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import msgspec

from halter.cli.command import run_cancelled_by_signals
from halter.config.trust import digest_folder
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SECOND, Clock, SystemClock
from halter.core.events import CallSettled, RequestSettled
from halter.core.ids import SortableIds, WorkerId, session_stream
from halter.core.money import Charge, format_exact_micros
from halter.core.ports import Lease, Query, Store, read_stream
from halter.core.rows import FindingRow, SessionRow
from halter.dispatch.workers import WorkerRow
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.halts import Departures, halt, resume
from halter.guard.ledger import Ledger
from halter.journal.store import JournalStore
from halter.runtime.assembly.folder_code import open_trust
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.runtime.switches import turn_off, turn_on
from halter.settings import read_settings
from halter.state.session import replay
from halter.testing.fakes import Crash
from halter.testing.world import World
from halter_drills.children import END_SIGNALS, Children, Pipe, children
from halter_drills.drill import (
    Drill,
    DrillResult,
    Setting,
    Workspace,
    engine,
    own_store,
    result,
    unseen,
    use_memory_file,
)
from halter_drills.faults import watch_engine
from halter_drills.workload import PERSON, EffectFile

Manner = Literal["SIGTERM", "SIGINT", "lost lease", "SIGKILL", "halt", "off"]
MANNERS: Final[tuple[Manner, ...]] = get_args(Manner)
HALTS: Final = ("halt", "off")
"""A person ends the sessions. A document whose session was ended gets a new one, which begins from the start."""
HALTED_ENDS: Final = (("COMPLETED", "completed"), ("HALTED", "external_halt"), ("CANCELLED", "cancelled"))
VERDICTS: Final = {"approve", "deny"}
AGENTS: Final = ("clerk", "scout")
FILES: Final = Path(__file__).with_suffix(".yaml")
REPLY: Final = "repeat: true, usage: {input_tokens: 100, output_tokens: 50}, takes: TAKESs"
REAL_STOPS: Final = 4 * len(MANNERS)
REAL_STEP: Final = SECOND // 50
"""The time that a request takes, and a call on each side of its effect; in virtual time it is a second."""
LEASE: Final = 15 * SECOND
MAX_WORK: Final = 90 * SECOND


class SettlingDepartures(Departures):
    """The teeth: a process that stops settles what it has in flight as cancelled, as Halter 1.0.0 did."""

    def includes(self, lease: Lease) -> bool:
        return False


class Stop(msgspec.Struct, frozen=True):
    """How a process is stopped: half a step after a commit, or a step later if late; by SIGKILL, before or after it."""

    how: Manner
    commit: int
    late: bool
    real: bool

    def __str__(self) -> str:
        return f"{self.how} {'late ' if self.late else ''}at commit {self.commit}{' of a process' if self.real else ''}"

    def delay(self, step: int) -> int:
        return 0 if self.how == "SIGKILL" else step // 2 + step * self.late


class WorkOutcome(msgspec.Struct):
    """What became of the work. `effects` has the keys of each call, `settled` the outcomes of calls."""

    sessions: list[tuple[str, ...]]
    findings: list[tuple[str, str]]
    effects: dict[str, list[str]]
    settled: dict[str, str]
    spent: int
    in_doubt: set[str]
    verdicts: dict[str, str]


def write_files(home: Path, step: int) -> Path:
    files = cast("dict[str, str]", load_bytes(FILES.read_bytes(), FILES.name).value)
    for name, text in [*files.items(), *((f"{agent}/tools.py", files["tools.py"]) for agent in AGENTS)]:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("REPLY", REPLY).replace("TAKES", f"{step / SECOND}"))
    return home


def make_app(store: Any, clock: Clock, home: Path, *, teeth: bool = False) -> Runtime:
    environ = {"HALTER_TRUST": str(home / "trust"), "HALTER_PERSON": PERSON, "HALTER_FLEET": str(home / "halter.yaml")}
    settings, departures = read_settings(environ, home, "memory:"), SettlingDepartures() if teeth else Departures()
    for agent in AGENTS:
        open_trust(settings).trust(home / agent, digest_folder(home / agent), PERSON, clock.now())
    ids, policy, no_log = SortableIds(clock.now), use_local_policy(settings), cast("Any", None)
    ledger = Ledger(store, clock)
    return Runtime(settings, clock, ids, store, no_log, ledger, environ, policy=policy, departures=departures)


async def run_agents(app: Runtime, home: Path) -> None:
    await Supervisor(app, unseen, rng=random.Random(1)).run([home / AGENTS[0]])


class VirtualProcess:
    """A process in virtual time. `app` is the person's own access to the store."""

    step = SECOND

    def __init__(self, world: World, home: Path, *, teeth: bool) -> None:
        self.app = make_app(world.journal, world.clock, home)
        self._world, self._home, self._teeth = world, home, teeth

    def start(self) -> None:
        app = make_app(self._world.store, self._world.clock, self._home, teeth=self._teeth)
        self._task = self._world.spawn(run_agents(app, self._home))

    def is_struck(self) -> bool:
        return self._world.store.dead or self._world.store.stop_requested.is_set()

    async def end(self) -> None:
        if self._world.store.dead:
            await self._world.restart()
        self._task.cancel()
        await asyncio.wait([self._task])


class RealProcess:
    """A process that sends itself its signal, and reports a stop of another kind, or each commit if none is planned."""

    step = REAL_STEP

    def __init__(self, app: Runtime, processes: Children, terms: tuple[str, Path, bool], stop: Stop | None) -> None:
        self.app = app
        self._processes, self._terms, self._stop = processes, terms, stop

    def start(self) -> None:
        self._child = self._processes.start(run_process, *self._terms, self._stop)
        self._stop = None

    def is_struck(self) -> bool:
        return self._child.pipe.poll()

    async def end(self) -> None:
        await asyncio.to_thread(self._child.wait)

    def count_commits(self) -> int:
        commits = 0
        while self._child.pipe.poll():
            commits += self._child.receive()
        return commits


def run_process(pipe: Pipe, url: str, home: Path, teeth: bool, stop: Stop | None) -> None:  # noqa: FBT001
    def strike(number: int) -> None:
        if stop is None or (number == stop.commit and stop.how not in signal.Signals.__members__):
            pipe.send(1)
        elif number == stop.commit and stop.how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif number == stop.commit:
            threading.Timer(stop.delay(REAL_STEP) / SECOND, os.kill, (os.getpid(), signal.Signals[stop.how])).start()

    for number in END_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    is_early = stop is not None and stop.how == "SIGKILL" and not stop.late
    before, after = (strike, unseen) if is_early else (unseen, strike)
    store = JournalStore(watch_engine(engine(url, SystemClock(), LEASE), before, after))
    with suppress(KeyboardInterrupt):
        run_cancelled_by_signals(run_agents(make_app(store, SystemClock(), home, teeth=teeth), home))


async def finish(process: VirtualProcess | RealProcess, home: Path, stop: Stop | None) -> WorkOutcome:
    """Let the work be stopped once, start it again, and answer for plain writes in doubt until all is done."""
    store, clock = process.app.store, process.app.clock
    shop, in_doubt, verdicts = EffectFile(home / "effects"), set[str](), dict[str, str]()
    deadline, is_stopped = clock.now() + MAX_WORK, stop is None
    process.start()
    while clock.now() < deadline:
        await clock.sleep(process.step // 2)
        if stop is not None and not is_stopped and process.is_struck():
            is_stopped, in_doubt = True, await stop_process(process, stop)
        for decision in await list_pending_decisions(store):
            await clock.sleep(3 * process.step)  # A process that has lost its lease may still be about to pay.
            verdict = "approve" if any(each.key == decision.subject for each in shop.effects()) else "deny"
            await store.commit(answer_decision(decision, verdict, PERSON, f"{decision.decision}/answer"))
            verdicts[decision.subject] = verdict if decision.about == "unknown_call" else decision.about
        rows = await store.ask(Query("all_sessions", SessionRow))
        if len(rows) > 1 and all(row.ended_at for row in rows):
            break
    return await read_outcome(store, shop, in_doubt, verdicts)


async def stop_process(process: VirtualProcess | RealProcess, stop: Stop) -> set[str]:
    """Stop a process, start another one, and return the plain writes that were in flight."""
    app, store = process.app, process.app.store
    if stop.how not in signal.Signals.__members__ or not stop.real:
        await app.clock.sleep(stop.delay(process.step))
    if stop.how in HALTS:
        await (turn_off(app, AGENTS[0]) if stop.how == "off" else store.commit(halt("fleet", PERSON, "halt")))
        await wait_until_ended(app)
        await (turn_on(app, AGENTS[0]) if stop.how == "off" else store.commit(resume("fleet", PERSON, "resume")))
        return set()
    if stop.how != "lost lease":
        await process.end()
    in_flight = set[str]()
    for row in await store.ask(Query("all_sessions", SessionRow)):
        session = replay(await read_stream(store, session_stream(row.session)))
        in_flight |= {flight.id for flight in session.in_flight.values() if flight.name == "pay"}
    for row in await store.ask(Query("all_workers", WorkerRow)):
        await store.leave(WorkerId(row.worker))
    process.start()
    return in_flight


async def wait_until_ended(app: Runtime) -> None:
    """Wait until a halt has ended all sessions: a person lifts it then. A busy machine may be late."""
    deadline = app.clock.now() + MAX_WORK // 2
    while app.clock.now() < deadline:
        await app.clock.sleep(SECOND)
        if all(row.ended_at for row in await app.store.ask(Query("all_sessions", SessionRow))):
            return


async def read_outcome(store: Store, shop: EffectFile, in_doubt: set[str], verdicts: dict[str, str]) -> WorkOutcome:
    rows = await store.ask(Query("all_sessions", SessionRow))
    ends = [(row.session, row.state, row.terminal_reason) for row in rows]
    findings = [(row.severity, row.review) for row in await store.ask(Query("all_findings", FindingRow))]
    outcome = WorkOutcome(ends, sorted(findings), {}, {}, 0, in_doubt, verdicts)
    for effect in shop.effects():
        outcome.effects.setdefault(f"{effect.tool} {effect.order}", []).append(effect.key)
    for row in rows:
        for stored in await read_stream(store, session_stream(row.session)):
            match stored.event:
                case CallSettled(call=call, outcome=settled):
                    outcome.settled[call] = settled
                case RequestSettled(outcome="ok", charge=Charge(usd=spent)):
                    outcome.spent += spent
                case _:
                    pass
    return outcome


def find_violations(outcome: WorkOutcome, whole: WorkOutcome, stop: Stop) -> Iterator[str]:
    """Compare an outcome with that of the work that was not stopped."""
    for name, keys in outcome.effects.items():
        is_plain, has_halted = name.startswith("pay"), stop.how in HALTS
        if len(keys if is_plain else {*keys}) > (len({*keys}) if has_halted else 1):
            yield f"the call {name} ran more than once: {', '.join(keys)}"
        if is_plain and any(outcome.settled.get(key) in ("cancelled", "external_halt") for key in keys):
            yield f"the call {name} was settled as not begun, although it was done"
    if ("low", "released") in outcome.findings:
        yield "the finding that the judge withholds was released"
    if stop.how in HALTS:
        yield from (f"session {' '.join(end)}" for end in outcome.sessions if end[1:] not in HALTED_ENDS)
        return
    for what in ("sessions", "findings"):
        if getattr(outcome, what) != getattr(whole, what):
            yield f"the {what} are {getattr(outcome, what)} instead of {getattr(whole, what)}"
    yield from (f"the call {name} did not run" for name in whole.effects.keys() - outcome.effects.keys())
    asked, doubts = outcome.verdicts.keys(), outcome.in_doubt
    # A process that has lost its lease may still settle what it has in flight.
    if asked - doubts or (doubts - asked and stop.how != "lost lease") or {*outcome.verdicts.values()} - VERDICTS:
        yield f"{doubts or 'nothing'} was in doubt, and a person was asked about {outcome.verdicts}"
    # A model does again what was not done, which costs a request more.
    if outcome.spent != whole.spent and "deny" not in outcome.verdicts.values():
        yield f"{format_exact_micros(outcome.spent)} was spent instead of {format_exact_micros(whole.spent)}"


def plan(commits: int, *, real: bool) -> Iterator[Stop]:
    """List stops in every way at every commit, in seeded order; then again, with those late that were not."""
    manners: list[Manner] = [
        how for how in MANNERS if real or how != "SIGINT"
    ]  # In virtual time it would be another SIGTERM.
    for seed in count():
        for commit in random.Random(seed).sample(range(1, commits + 1), commits):
            yield from (Stop(how, commit, (commit + index + seed) % 2 == 0, real) for index, how in enumerate(manners))


def run_virtual(folder: Path, stop: Stop | None, *, teeth: bool) -> tuple[WorkOutcome, int]:
    home, kind = write_files(folder, SECOND), "stop"
    if stop is not None and stop.how == "SIGKILL":
        kind = "after" if stop.late else "before"
    with World(crash=stop and Crash(stop.commit, kind), orderly=True) as world:
        return world.run(finish(VirtualProcess(world, home, teeth=teeth), home, stop)), world.commits


async def run_real(workspace: Workspace, folder: Path, stop: Stop | None, *, teeth: bool) -> tuple[WorkOutcome, int]:
    workspace.fresh()
    home = write_files(folder, REAL_STEP)
    async with workspace.open_store(LEASE) as store:
        with children(__name__) as processes:
            app = make_app(store, SystemClock(), home)
            process = RealProcess(app, processes, (workspace.url, home, teeth), stop)
            return await finish(process, home, stop), 0 if stop else process.count_commits()


def run(setting: Setting) -> DrillResult:
    violations, seeds = list[str](), setting.seeds
    with own_store(use_memory_file(setting)) as workspace:

        def play(name: str, stop: Stop | None, *, real: bool) -> tuple[WorkOutcome, int]:
            folder, teeth = workspace.folder / name, setting.teeth and stop is not None
            return (
                asyncio.run(run_real(workspace, folder, stop, teeth=teeth))
                if real
                else run_virtual(folder, stop, teeth=teeth)
            )

        whole, commits = play("virtual", None, real=False)
        real_whole, real_commits = play("real", None, real=True)
        virtual_count, real_count = (
            (seeds - seeds // 2, seeds // 2) if seeds else ((len(MANNERS) - 1) * commits, REAL_STOPS)
        )
        stops = [*islice(plan(commits, real=False), virtual_count), *islice(plan(real_commits, real=True), real_count)]
        for number, stop in enumerate(stops):
            setting.progress(number, len(stops), str(stop))
            outcome, _ = play(f"case-{number}", stop, real=stop.real)
            wrong = find_violations(outcome, real_whole if stop.real else whole, stop)
            violations += [f"{stop}: {violation}" for violation in wrong]
        setting.progress(len(stops), len(stops), "checked")
    manners = Counter[str](stop.how for stop in stops)
    counts = {
        "commits": commits,
        "commits_of_a_process": real_commits,
        "of_a_process": real_count,
        "manners": dict(manners),
    }
    return result(DRILL.name, workspace.kind, len(stops), violations, counts)


DRILL: Final = Drill("stop", "Work that is stopped in any way, at any commit, ends as if it had not been stopped.", run)
