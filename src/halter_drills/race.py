"""Money under contention: many sessions, processes, crashes and retries on shared caps.

Five parts: seeded runs in virtual time, each replayable from its number; crowds in virtual time that hold four times
their spending and must use nearly all of one cap; both again with real processes on the real store, some of them
killed; and real processes in folders whose own `halter.yaml` has other caps than the store's policy.
"""

import asyncio
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from halter.config.agent_files import parse_agent
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import HOUR, MINUTE, SECOND, SystemClock, window_at
from halter.core.events import AnyEvent, CallStarted, CostCapReached, SessionStarted
from halter.core.ids import SortableIds, WorkerId
from halter.core.money import BudgetRow, CapReached, Caps, Contended, Leg, Spender, reserve
from halter.core.ports import Draft, Lease, Query, Rows, Stored, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import FleetPolicyRow, SessionRow
from halter.dispatch.heartbeat import renew_leases
from halter.guard.budget import describe_cap_reached, remove_caps
from halter.guard.call_answer import Answer
from halter.guard.call_request import CallRequest
from halter.guard.halts import BudgetBusy
from halter.guard.judge_request import ModelAttempt
from halter.guard.ledger import ActualResult
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine
from halter.journal.sqlite_connection import open_connection
from halter.journal.store import JournalStore
from halter.runtime.runtime import Runtime, open_runtime, use_local_policy
from halter.settings import read_settings
from halter.state.lifecycle import start_session
from halter.state.session import InFlight
from halter.testing.fakes import Crashed
from halter.testing.world import VIRTUAL_START, SeedLoop
from halter_drills.checker import RecordedEvent, StoreContents, Sums, check, check_paid, fact, read_database, read_store
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result
from halter_drills.faults import AlteredRows, Faults, FaultyStore
from halter_drills.spenders import (
    ONE_CAP,
    Crowd,
    SpendingWorker,
    begin,
    cap_change,
    draw_crowd,
    draw_patient_crowd,
    list_caps,
    surely,
)
from halter_drills.workload import DrillLedger, Refusal, make_request


class ObeysItsFolder(DrillLedger):
    """The teeth for folders: a ledger that applies the caps of its own file instead of the store's policy."""

    def intent(self, lease: Lease, request: CallRequest | ModelAttempt) -> Write:
        write = super().intent(lease, request)

        def decide(rows: Rows) -> Sequence[Draft]:
            altered_rows = AlteredRows(rows, lambda row: None if isinstance(row, FleetPolicyRow) else row)
            return write.decide(altered_rows)

        return msgspec.structs.replace(write, decide=decide)


class CheckThenSpend(DrillLedger):
    """The teeth: a ledger that checks the budget in one transaction, and spends in another.

    It hides the caps from the store, whose own constraint would refuse the write.
    """

    async def admit(self, lease: Lease, request: CallRequest | ModelAttempt) -> InFlight | Refusal | BudgetBusy:
        """Decide on budgets that may have changed since."""
        if isinstance(request, ModelAttempt):
            return await super().admit(lease, request)
        budgets = await self._store.ask(Query("budgets", BudgetRow))
        rows = {row.key(): row for row in budgets}
        empty = [(leg, BudgetRow(leg.scope, leg.window, leg.unit)) for leg in request.legs]
        verdict = reserve([(leg, rows.get(row.key(), row)) for leg, row in empty])
        if isinstance(verdict, Contended):
            return BudgetBusy(request.call)
        legs = remove_caps(request.legs)
        if isinstance(verdict, CapReached):
            refusal = CostCapReached.refusing(request.call, request.tool, verdict)
            await self._blindly(lease, request.call, refusal, legs)
            return Answer(request.call, "cost_cap_reached", describe_cap_reached(verdict), cap=refusal)
        await self._blindly(lease, request.call, CallStarted(call=request.call, tool=request.tool, legs=legs), legs)
        return InFlight(request.call, request.tool, "turn", legs, self._clock.now(), is_call=True)

    async def _blindly(self, lease: Lease, call: str, event: AnyEvent, legs: tuple[Leg, ...]) -> None:
        stream, reads = lease.stream, rows_of_hold(call, legs)
        write = Write(stream, f"{call}/held", lambda _: [Draft(event)], reads, lease)
        await surely(lambda: self._store.commit(write), self._clock)


# One run in virtual time: processes that crash, a store that loses answers, all from one seed.

PROCESSES: Final = 4
MAX_CRASHES: Final = 3
"""Number of crashes per process, bounded so that every run ends."""

MAX_RUN_TIME: Final = 3 * HOUR
SMOOTH: Final = Faults()
ROUGH: Final = Faults(away=0.02, lost=0.05, crash=0.01)


class Race(msgspec.Struct, frozen=True):
    """One run: its crowd, its ledger, its faults, and the number of cap changes by a person."""

    seed: int
    crowd: Crowd
    till: type[DrillLedger] = DrillLedger
    faults: Faults = SMOOTH
    changes: int = 0


class Outcome(msgspec.Struct, frozen=True):
    violations: list[str]
    counts: Counter[str]
    contents: StoreContents


@dataclass(slots=True)
class Tape:
    """Records every commit of a store, in order, before its writer gets the answer."""

    events: list[RecordedEvent] = field(default_factory=list[RecordedEvent])
    open: set[str] = field(default_factory=set[str])
    interval_seconds: float = HOUR / SECOND

    def on_commit(self, events: Sequence[Stored]) -> None:
        for event in events:
            self.events.append(fact(event.stream, event.seq, event.kind, event.at, event.generation, event.facts))
            if event.kind == "session_started":
                self.open.add(event.stream)
            elif event.kind == "session_ended":
                self.open.discard(event.stream)

    def flush(self) -> None:
        """Nothing is buffered."""


@dataclass(frozen=True, slots=True)
class RaceWorld:
    """State that outlives the processes of a run: the store, the clock, and the bills of the outside world."""

    race: Race
    loop: SeedLoop
    store: JournalStore
    tape: Tape
    bills: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list[int]))
    counts: Counter[str] = field(default_factory=Counter[str])

    async def has_finished(self) -> bool:
        return not self.tape.open

    def bill(self, call: str, cost: int) -> None:
        self.bills[call].append(cost)


def simulate(race: Race) -> Outcome:
    start = VIRTUAL_START + HOUR - MINUTE // 2
    loop = SeedLoop(race.seed, start)
    tape = Tape()
    engine, read_contents = _engine(race, loop, tape)
    store = JournalStore(engine, inline=True, salt=random.Random(race.seed).randbytes, observers=[tape])
    world = RaceWorld(race, loop, store, tape)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        unfinished = runner.run(_run(world))
        contents = read_contents()
        runner.run(store.close())
    wrong = unfinished + check(contents, list_caps(race.crowd, start)) + check_paid(contents.events, world.bills)
    world.counts.update(Counter(event.kind for event in contents.events))
    return Outcome([f"Number {race.seed}: {sentence}" for sentence in wrong], world.counts, contents)


def _engine(race: Race, loop: SeedLoop, tape: Tape) -> tuple[Engine, Callable[[], StoreContents]]:
    new_id = SortableIds(loop.now, random.Random(race.seed).getrandbits).make
    if race.seed % 2:
        connection = open_connection(":memory:")
        engine = SqliteEngine(
            ":memory:", now=loop.now, new_id=new_id, lease=race.crowd.lease, connect=lambda _: connection
        )
        return engine, lambda: read_database(connection)
    memory = MemoryEngine(now=loop.now, new_id=new_id, lease=race.crowd.lease)
    return memory, lambda: _read_contents(memory, tape)


def _read_contents(memory: MemoryEngine, tape: Tape) -> StoreContents:
    budgets = {
        (row["scope"], row["window"], row["unit"]): Sums(row["spent"], row["held"], row["overrun"])
        for row in memory.ask("budgets", {})
    }
    return StoreContents(
        tape.events,
        budgets,
        {row["hold"]: json.loads(row["legs"]) for row in memory.ask("holds", {})},
        {row["hold"]: row["usd"] for row in memory.ask("all_spends", {})},
        {row["stream"]: row["head"] for row in memory.ask("heads", {})},
    )


async def _run(world: RaceWorld) -> list[str]:
    await begin(world.store, world.race.crowd)
    slots = -(-len(world.race.crowd.members) // PROCESSES)
    try:
        async with asyncio.timeout(MAX_RUN_TIME / SECOND), asyncio.TaskGroup() as tasks:
            for number in range(PROCESSES):
                tasks.create_task(_process(world, number, slots))
            tasks.create_task(_cap_changer(world))
    except TimeoutError:
        return [f"These sessions did not end: {', '.join(sorted(world.tape.open))}."]
    return []


async def _process(world: RaceWorld, number: int, slots: int) -> None:
    """Run one process after another: after a crash, the next one starts from the store alone."""
    for generation in range(MAX_CRASHES + 1):
        rng = random.Random(f"{world.race.seed} {number} {generation}")
        faults = world.race.faults if generation < MAX_CRASHES else SMOOTH
        store = FaultyStore(world.store, rng, world.loop, faults)
        name, crowd, ledger_type = WorkerId(f"w{number}.{generation}"), world.race.crowd, world.race.till
        try:
            await SpendingWorker(
                name, store, world.loop, crowd, world.bill, world.has_finished, slots, ledger_type
            ).run()
        except* Crashed:
            world.counts["crashes"] += 1
            await world.loop.sleep(rng.randrange(5 * SECOND))
        if await world.has_finished():
            return


async def _cap_changer(world: RaceWorld) -> None:
    """Raise and lower caps of windows and sessions while all sessions spend."""
    rng = random.Random(f"{world.race.seed} person")
    store = FaultyStore(world.store, rng, world.loop, Faults(away=0.2, lost=0.2))
    for number in range(world.race.changes):
        await world.loop.sleep(rng.randrange(5 * SECOND))
        write = cap_change(world.race.crowd, world.loop.now(), rng, number)
        await surely(lambda write=write: store.commit(write), world.loop)


# Folders: one store, and processes whose own `halter.yaml` has other caps.

CAP: Final = 120_000
"""The fleet's cap in the store's policy, in micro-dollars."""
OWN_CAP: Final = 40_000
"""The cap in the stricter file."""
COST: Final = 10_000
CALLS_PER_PROCESS: Final = 8
"""Number of calls that each process tries to make."""
AGENT: Final = "clerk"
AGENT_FILE: Final = b"name: clerk\nlimits: {max_cost_usd: none, max_cost_usd_per_day: none}\n"
FOLDERS: Final[Mapping[str, str]] = {
    "early": "",
    "first": "limits: {max_cost_usd_per_day: 0.12}\n",
    "bare": "",
    "looser": "limits: {max_cost_usd_per_day: 500}\n",
    "unlimited": "limits: {max_cost_usd_per_day: none}\nmode: FULL\n",
    "stricter": "limits: {max_cost_usd_per_day: 0.04}\n",
}
"""The process of `early` starts before the one of `first`, whose file becomes the policy; the others start after it."""


def spend_in_folders(workspace: Workspace, children: Children, *, broken: bool) -> tuple[list[str], Counter[str]]:
    """Run one spending process per folder at the same time, and check the total."""
    started_at = SystemClock().now()
    asyncio.run(_begin_in_folders(workspace))
    spenders: dict[Child, str] = {}
    for name, file in FOLDERS.items():
        folder = workspace.folder / name
        folder.mkdir()
        if file:
            (folder / "halter.yaml").write_text(file)
        child = children.start(_spender, workspace, folder, broken)
        child.receive()
        spenders[child] = name
    for child in spenders:
        child.send("go")
    spent_by_folder: Counter[str] = Counter()
    for child, cost in children.messages():
        spent_by_folder[spenders[child]] += cost
    days = len({window_at("day", started_at), window_at("day", SystemClock().now())})
    return _find_violations(spent_by_folder, days), Counter({"folders": len(FOLDERS)})


def _find_violations(spent_by_folder: Counter[str], days: int) -> list[str]:
    violations: list[str] = []
    if spent_by_folder.total() > days * CAP:
        breakdown = ", ".join(f"{name} {cost}" for name, cost in spent_by_folder.items())
        violations.append(
            f"Folders: {spent_by_folder.total()} micro-dollars spent; the store's policy allows {CAP} ({breakdown})."
        )
    if spent_by_folder.total() < CAP:
        violations.append(f"Folders: only {spent_by_folder.total()} of {CAP} micro-dollars were spent.")
    if spent_by_folder["stricter"] > days * OWN_CAP:
        violations.append(
            f"Folders: {spent_by_folder['stricter']} were spent; the file in the folder allows {OWN_CAP}."
        )
    return violations


async def _begin_in_folders(workspace: Workspace) -> None:
    async with workspace.open_store() as store:
        for name in FOLDERS:
            event = SessionStarted(session=name, agent=AGENT, kind="task", started_by="the drill")
            await store.commit(start_session(event))


async def _spender(pipe: Pipe, workspace: Workspace, folder: Path, with_teeth: bool) -> None:  # noqa: FBT001  passed to a process
    """Start like any process that runs agents, and spend once all processes have started."""
    os.chdir(folder)
    worker = WorkerId(folder.name)
    settings = read_settings({"HALTER_PERSON": "the drill"}, workspace.folder, workspace.url)
    async with open_runtime(settings) as app, renew_leases(app.store, app.clock, worker):
        await app.adopt_policy()
        pipe.send(0)
        await asyncio.to_thread(pipe.recv)
        fleet = use_local_policy(settings).fleet if with_teeth else app.fleet
        caps = resolve_policy(fleet, parse_agent(load_bytes(AGENT_FILE, "agent.yaml"))).caps
        ledger = (ObeysItsFolder if with_teeth else DrillLedger)(app.store, app.clock)
        (lease,) = await app.store.claim(worker, 1)
        for number in range(CALLS_PER_PROCESS):
            if not await _buy(app, ledger, lease, caps, f"{worker}.{number}"):
                return
            pipe.send(COST)


async def _buy(app: Runtime, ledger: DrillLedger, lease: Lease, caps: Caps, call: str) -> bool:
    """Hold, act, settle; return False if the cap refuses it."""
    while True:
        spender = Spender(lease.session, AGENT)
        match await ledger.admit(lease, make_request(call, "buy", caps, spender, app.clock.now(), COST)):
            case InFlight() as flight:
                await app.clock.sleep(SECOND // 100)
                await ledger.settle(lease, flight, ActualResult("ok", usd=COST))
                return True
            case BudgetBusy():
                pass
            case _:
                return False


SEEDS: Final = 40
RUNS_PER_CROWD: Final = 50
"""Number of seeded runs per crowd: a crowd takes twenty times as long."""

CHANGES: Final = 6
MIN_USED_SHARE: Final = 0.95
VIRTUAL: Final = {"latency": 5 * SECOND, "tick": SECOND, "lease": 15 * SECOND}
FAST_VIRTUAL: Final = {**VIRTUAL, "latency": SECOND}
REAL: Final = {"latency": SECOND // 50, "tick": SECOND // 50, "lease": SECOND}
KILL_AFTER_CALLS: Final = (3, 6, 9)
"""Number of calls after which each of the first processes is killed."""

BILLS: Final = "bills"
Report = tuple[list[str], Counter[str]]


def run(setting: Setting) -> DrillResult:
    seeds = SEEDS if setting.seeds is None else setting.seeds
    crowds = -(-seeds // RUNS_PER_CROWD)
    total = seeds + crowds + 3
    violations: list[str] = []
    counts: Counter[str] = Counter()
    with own_store(setting) as workspace, children(__name__) as processes:
        reports = _reports(workspace, processes, seeds, crowds, CheckThenSpend if setting.teeth else DrillLedger)
        for part_number, (wrong, part_counts) in enumerate(reports, 1):
            violations += wrong
            counts += part_counts
            setting.progress(part_number, total, f"{counts['call_started']} calls, {counts['crashes']} crashes")
    return result(DRILL.name, workspace.kind, total, violations, {"seeds": seeds, **counts})


def _reports(
    workspace: Workspace, children: Children, seeds: int, crowds: int, ledger_type: type[DrillLedger]
) -> Iterator[Report]:
    processors = os.cpu_count() or 1
    for first in range(processors):
        children.start(_virtual, range(first, seeds, processors), range(first, crowds, processors), ledger_type)
    for _, report in children.messages():
        yield report
    yield _run_processes(workspace, children, draw_crowd(seeds, **REAL), ledger_type, rough=True)
    workspace.fresh()
    (workspace.folder / BILLS).unlink()
    yield _run_processes(workspace, children, draw_patient_crowd(seeds, **REAL), ledger_type, rough=False)
    workspace.fresh()
    yield spend_in_folders(workspace, children, broken=ledger_type is not DrillLedger)


def _virtual(pipe: Pipe, seeds: Sequence[int], crowds: Sequence[int], ledger_type: type[DrillLedger]) -> None:
    changes = CHANGES if ledger_type is DrillLedger else 0
    for seed in seeds:
        outcome = simulate(Race(seed, draw_crowd(seed, **VIRTUAL), ledger_type, ROUGH, changes))
        pipe.send((outcome.violations, outcome.counts))
    for seed in crowds:
        outcome = simulate(Race(seed, draw_patient_crowd(seed, **FAST_VIRTUAL), ledger_type))
        unused_violations = [f"Number {seed}: {sentence}" for sentence in _find_unused(outcome.contents)]
        pipe.send((outcome.violations + unused_violations, outcome.counts))


def _find_unused(contents: StoreContents) -> list[str]:
    """Check that a crowd that tries to exceed its cap uses nearly all of it."""
    spent_usd = sum(sums.spent for (scope, _, _), sums in contents.budgets.items() if scope == "fleet")
    if spent_usd > MIN_USED_SHARE * ONE_CAP:
        return []
    return [f"Sessions were refused with {spent_usd} of {ONE_CAP} micro-dollars spent: more than 5 % was unused."]


def _run_processes(
    workspace: Workspace, children: Children, crowd: Crowd, ledger_type: type[DrillLedger], *, rough: bool
) -> Report:
    """Let real processes spend on the real store, kill some, and check the result."""
    started_at = SystemClock().now()

    async def begin_all() -> None:
        async with workspace.open_store(crowd.lease) as store:
            await begin(store, crowd)

    asyncio.run(begin_all())
    kill_count = _run_until_done(workspace, children, crowd, ledger_type, rough=rough)
    contents = read_store(workspace.url)
    wrong = check(contents, list_caps(crowd, started_at)) + check_paid(contents.events, _bills(workspace))
    counts = Counter(event.kind for event in contents.events)
    counts["crashes"] = kill_count
    return (wrong if rough else wrong + _find_unused(contents)), counts


def _run_until_done(
    workspace: Workspace, children: Children, crowd: Crowd, ledger_type: type[DrillLedger], *, rough: bool
) -> int:
    """Start the processes, kill and replace some at their planned call, and wait for all to end."""
    workers = [children.start(_worker, workspace, crowd, f"w{number}", ledger_type) for number in range(PROCESSES)]
    kill_after = dict(zip(workers, KILL_AFTER_CALLS, strict=False)) if rough else {}
    if rough and ledger_type is DrillLedger:
        children.start(_act_as_person, workspace, crowd)
    calls: Counter[Child] = Counter()
    kill_count = 0
    for child, _ in children.messages():
        calls[child] += 1
        if calls[child] == kill_after.get(child):
            child.kill()
            kill_count += 1
            children.start(_worker, workspace, crowd, f"heir{kill_count}", ledger_type)
    return kill_count


def _bills(workspace: Workspace) -> dict[str, list[int]]:
    bills: dict[str, list[int]] = defaultdict(list)
    for line in (workspace.folder / BILLS).read_text().splitlines():
        call, _, cost = line.partition(" ")
        bills[call].append(int(cost))
    return bills


async def _worker(pipe: Pipe, workspace: Workspace, crowd: Crowd, name: str, ledger_type: type[DrillLedger]) -> None:
    with (workspace.folder / BILLS).open("a") as bills:

        def bill(call: str, cost: int) -> None:
            bills.write(f"{call} {cost}\n")
            bills.flush()
            pipe.send(call)

        slots = -(-len(crowd.members) // PROCESSES)
        async with workspace.open_store(crowd.lease) as store:

            async def has_finished() -> bool:
                return all(row.ended_at for row in await store.ask(Query("all_sessions", SessionRow)))

            await SpendingWorker(
                WorkerId(name), store, SystemClock(), crowd, bill, has_finished, slots, ledger_type
            ).run()


async def _act_as_person(_: Pipe, workspace: Workspace, crowd: Crowd) -> None:
    rng, clock = random.Random(len(crowd.members)), SystemClock()
    async with workspace.open_store(crowd.lease) as store:
        for number in range(CHANGES):
            await clock.sleep(crowd.tick)
            await store.commit(cap_change(crowd, clock.now(), rng, number))


DRILL: Final = Drill(
    "race", "Parallel spenders that crash and retry never exceed a cap, and no call is charged twice.", run
)
