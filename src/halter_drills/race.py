"""Money under contention: many sessions, processes, crashes and retries on shared caps.

Five parts: seeded runs in virtual time, each replayable from its number; crowds in virtual time that hold four times
what they spend and must use nearly all of one cap; both again with real processes on the real store, some of them
killed; last, real processes in folders whose own `halter.yaml` has other caps than the store's policy.
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
from halter.core.money import BudgetRow, CapReached, Caps, Leg, MustWait, Spender, reserve
from halter.core.ports import Draft, Lease, Query, Rows, Stored, Write
from halter.core.project import rows_of_hold
from halter.core.rows import FleetPolicyRow, SessionRow
from halter.dispatch.heartbeat import keep_leases
from halter.guard.halts import StillHeld
from halter.guard.judge import CallRequest, describe_cap_reached, remove_caps
from halter.guard.judge_request import RequestAttempt
from halter.guard.ledger import ActualResult
from halter.guard.tool_door import Answer
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine, open_connection
from halter.journal.store import JournalStore
from halter.runtime.runtime import Runtime, open_runtime, use_local_policy
from halter.settings import read_settings
from halter.state.lifecycle import start_session
from halter.state.session import InFlight
from halter.testing.fakes import Crashed
from halter.testing.world import VIRTUAL_START, SeedLoop
from halter_drills.checker import RecordedEvent, StoreContents, Sums, check, fact, found_at, found_in, paid
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.drill import Drill, DrillResult, Ground, Setting, own_store, result
from halter_drills.faults import AlteredRows, Faults, FaultyStore
from halter_drills.spenders import ONE_CAP, Crowd, SpendingWorker, begin, cap_change, patience, planned, quarrel, surely
from halter_drills.workload import Refusal, Till, asked_of


class ObeysItsFolder(Till):
    """The teeth in folders: a process that obeys the caps of its own file instead of the store's policy."""

    def intent(self, lease: Lease, asked: CallRequest | RequestAttempt) -> Write:
        write = super().intent(lease, asked)

        def decide(rows: Rows) -> Sequence[Draft]:
            altered = AlteredRows(rows, lambda row: None if isinstance(row, FleetPolicyRow) else row)
            return write.decide(altered)

        return msgspec.structs.replace(write, decide=decide)


class CheckThenSpend(Till):
    """The teeth: it checks the budget first, and spends in another transaction.

    It hides the caps from the store, whose own constraint would stop it.
    """

    async def admit(self, lease: Lease, asked: CallRequest | RequestAttempt) -> InFlight | Refusal | StillHeld:
        """Decide on budgets that may have changed since."""
        if isinstance(asked, RequestAttempt):
            return await super().admit(lease, asked)
        found = await self._store.ask(Query("budgets", BudgetRow))
        rows = {row.key(): row for row in found}
        empty = [(leg, BudgetRow(leg.scope, leg.window, leg.unit)) for leg in asked.legs]
        verdict = reserve([(leg, rows.get(row.key(), row)) for leg, row in empty])
        if isinstance(verdict, MustWait):
            return StillHeld(asked.call)
        legs = remove_caps(asked.legs)
        if isinstance(verdict, CapReached):
            refusal = CostCapReached.refusing(asked.call, asked.tool, verdict)
            await self._blindly(lease, asked.call, refusal, legs)
            return Answer(asked.call, "cost_cap_reached", describe_cap_reached(verdict), cap=refusal)
        await self._blindly(lease, asked.call, CallStarted(call=asked.call, tool=asked.tool, legs=legs), legs)
        return InFlight(asked.call, asked.tool, "turn", legs, self._clock.now(), is_call=True)

    async def _blindly(self, lease: Lease, call: str, event: AnyEvent, legs: tuple[Leg, ...]) -> None:
        stream, reads = lease.stream, rows_of_hold(call, legs)
        write = Write(stream, f"{call}/held", lambda _: [Draft(event)], reads, lease)
        await surely(lambda: self._store.commit(write), self._clock)


# One run in virtual time: processes that crash, a store that loses answers, all from one seed.

PROCESSES: Final = 4
LIVES: Final = 3
"""How often each process may crash, so that every run ends."""

TOO_LONG: Final = 3 * HOUR
SMOOTH: Final = Faults()
ROUGH: Final = Faults(away=0.02, lost=0.05, crash=0.01)


class Race(msgspec.Struct, frozen=True):
    """One run: its crowd, its ledger, its faults, and how often a person changes a cap."""

    seed: int
    crowd: Crowd
    till: type[Till] = Till
    faults: Faults = SMOOTH
    changes: int = 0


class Outcome(msgspec.Struct, frozen=True):
    violations: list[str]
    counts: Counter[str]
    found: StoreContents


@dataclass(slots=True)
class Tape:
    """Observes every commit of a store, in order, before its writer gets the answer."""

    events: list[RecordedEvent] = field(default_factory=list[RecordedEvent])
    open: set[str] = field(default_factory=set[str])
    every_seconds: float = HOUR / SECOND

    def saw(self, events: Sequence[Stored]) -> None:
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
    """What outlives the processes of a run: the store, the clock, and the bills of the outside world."""

    race: Race
    loop: SeedLoop
    store: JournalStore
    tape: Tape
    bills: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list[int]))
    counts: Counter[str] = field(default_factory=Counter[str])

    async def finished(self) -> bool:
        return not self.tape.open

    def bill(self, call: str, truth: int) -> None:
        self.bills[call].append(truth)


def simulated(race: Race) -> Outcome:
    start = VIRTUAL_START + HOUR - MINUTE // 2
    loop = SeedLoop(race.seed, start)
    tape = Tape()
    engine, found = _engine(race, loop, tape)
    store = JournalStore(engine, inline=True, salt=random.Random(race.seed).randbytes, observers=[tape])
    world = RaceWorld(race, loop, store, tape)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        late = runner.run(_run(world))
        left = found()
        runner.run(store.close())
    wrong = late + check(left, planned(race.crowd, start)) + paid(left.events, world.bills)
    world.counts.update(Counter(event.kind for event in left.events))
    return Outcome([f"Number {race.seed}: {sentence}" for sentence in wrong], world.counts, left)


def _engine(race: Race, loop: SeedLoop, tape: Tape) -> tuple[Engine, Callable[[], StoreContents]]:
    new_id = SortableIds(loop.now, random.Random(race.seed).getrandbits).new
    if race.seed % 2:
        connection = open_connection(":memory:")
        engine = SqliteEngine(
            ":memory:", now=loop.now, new_id=new_id, lease=race.crowd.lease, connect=lambda _: connection
        )
        return engine, lambda: found_in(connection)
    memory = MemoryEngine(now=loop.now, new_id=new_id, lease=race.crowd.lease)
    return memory, lambda: _found(memory, tape)


def _found(memory: MemoryEngine, tape: Tape) -> StoreContents:
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
        async with asyncio.timeout(TOO_LONG / SECOND), asyncio.TaskGroup() as tasks:
            for number in range(PROCESSES):
                tasks.create_task(_process(world, number, slots))
            tasks.create_task(_cap_changer(world))
    except TimeoutError:
        return [f"These sessions did not end: {', '.join(sorted(world.tape.open))}."]
    return []


async def _process(world: RaceWorld, number: int, slots: int) -> None:
    """Run one process after another: after a crash, the next one starts from the store alone."""
    for life in range(LIVES + 1):
        chance = random.Random(f"{world.race.seed} {number} {life}")
        faults = world.race.faults if life < LIVES else SMOOTH
        store = FaultyStore(world.store, chance, world.loop, faults)
        name, crowd, till = WorkerId(f"w{number}.{life}"), world.race.crowd, world.race.till
        try:
            await SpendingWorker(name, store, world.loop, crowd, world.bill, world.finished, slots, till).run()
        except* Crashed:
            world.counts["crashes"] += 1
            await world.loop.sleep(chance.randrange(5 * SECOND))
        if await world.finished():
            return


async def _cap_changer(world: RaceWorld) -> None:
    """Raise and lower caps, of a window or of a session, while all spend."""
    chance = random.Random(f"{world.race.seed} person")
    store = FaultyStore(world.store, chance, world.loop, Faults(away=0.2, lost=0.2))
    for number in range(world.race.changes):
        await world.loop.sleep(chance.randrange(5 * SECOND))
        write = cap_change(world.race.crowd, world.loop.now(), chance, number)
        await surely(lambda write=write: store.commit(write), world.loop)


# Folders: one store, and processes whose own `halter.yaml` has other caps.

CAP: Final = 120_000
"""The fleet's cap in the store's policy, in micro-dollars."""
OWN_CAP: Final = 40_000
"""The cap in the stricter file."""
COST: Final = 10_000
WANTED: Final = 8
"""Calls that each process wants to make."""
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


def spend_in_folders(ground: Ground, started: Children, *, broken: bool) -> tuple[list[str], Counter[str]]:
    """Let one process per folder spend at the same time, and check the total."""
    since = SystemClock().now()
    asyncio.run(_begin_in_folders(ground))
    spenders: dict[Child, str] = {}
    for name, file in FOLDERS.items():
        folder = ground.folder / name
        folder.mkdir()
        if file:
            (folder / "halter.yaml").write_text(file)
        child = started.start(_spender, ground, folder, broken)
        child.hear()
        spenders[child] = name
    for child in spenders:
        child.tell("go")
    spent: Counter[str] = Counter()
    for child, cost in started.words():
        spent[spenders[child]] += cost
    days = len({window_at("day", since), window_at("day", SystemClock().now())})
    return _wrong(spent, days), Counter({"folders": len(FOLDERS)})


def _wrong(spent: Counter[str], days: int) -> list[str]:
    found: list[str] = []
    if spent.total() > days * CAP:
        who = ", ".join(f"{name} {cost}" for name, cost in spent.items())
        found.append(f"Folders: {spent.total()} micro-dollars were spent, and the store's policy allows {CAP} ({who}).")
    if spent.total() < CAP:
        found.append(f"Folders: only {spent.total()} of {CAP} micro-dollars were spent, and all wanted more.")
    if spent["stricter"] > days * OWN_CAP:
        found.append(f"Folders: {spent['stricter']} were spent where the file in the folder allows {OWN_CAP}.")
    return found


async def _begin_in_folders(ground: Ground) -> None:
    async with ground.opened() as store:
        for name in FOLDERS:
            event = SessionStarted(session=name, agent=AGENT, kind="task", started_by="the drill")
            await store.commit(start_session(event))


async def _spender(pipe: Pipe, ground: Ground, folder: Path, broken: bool) -> None:  # noqa: FBT001  passed to a process
    """Start as any process that runs agents, and spend as soon as all others have started."""
    os.chdir(folder)
    worker = WorkerId(folder.name)
    settings = read_settings({"HALTER_PERSON": "the drill"}, ground.folder, ground.url)
    async with open_runtime(settings) as app, keep_leases(app.store, app.clock, worker):
        pipe.send(0)
        await asyncio.to_thread(pipe.recv)
        fleet = use_local_policy(settings).fleet if broken else app.fleet
        caps = resolve_policy(fleet, parse_agent(load_bytes(AGENT_FILE, "agent.yaml"))).caps
        till = (ObeysItsFolder if broken else Till)(app.store, app.clock)
        (lease,) = await app.store.claim(worker, 1)
        for number in range(WANTED):
            if not await _bought(app, till, lease, caps, f"{worker}.{number}"):
                return
            pipe.send(COST)


async def _bought(app: Runtime, till: Till, lease: Lease, caps: Caps, call: str) -> bool:
    """Hold, act, settle; return False if there is no money for it."""
    while True:
        spender = Spender(lease.session, AGENT)
        match await till.admit(lease, asked_of(call, "buy", caps, spender, app.clock.now(), COST)):
            case InFlight() as flight:
                await app.clock.sleep(SECOND // 100)
                await till.settle(lease, flight, ActualResult("ok", usd=COST))
                return True
            case StillHeld():
                pass
            case _:
                return False


SEEDS: Final = 40
CROWDS_EVERY: Final = 50
"""Seeded runs per crowd: crowds are twenty times as slow."""

CHANGES: Final = 6
MUST_USE: Final = 0.95
VIRTUAL: Final = {"latency": 5 * SECOND, "tick": SECOND, "lease": 15 * SECOND}
BRISK: Final = {**VIRTUAL, "latency": SECOND}
REAL: Final = {"latency": SECOND // 50, "tick": SECOND // 50, "lease": SECOND}
DOOMED: Final = (3, 6, 9)
"""After how many calls each of the first processes is killed."""

BILLS: Final = "bills"
Report = tuple[list[str], Counter[str]]


def run(setting: Setting) -> DrillResult:
    seeds = SEEDS if setting.seeds is None else setting.seeds
    crowds = -(-seeds // CROWDS_EVERY)
    total = seeds + crowds + 3
    violations: list[str] = []
    counts: Counter[str] = Counter()
    with own_store(setting) as ground, children(__name__) as started:
        reports = _reports(ground, started, seeds, crowds, CheckThenSpend if setting.teeth else Till)
        for done, (wrong, counted) in enumerate(reports, 1):
            violations += wrong
            counts += counted
            setting.progress(done, total, f"{counts['call_started']} calls, {counts['crashes']} crashes")
    return result(DRILL.name, ground.kind, total, violations, {"seeds": seeds, **counts})


def _reports(ground: Ground, started: Children, seeds: int, crowds: int, till: type[Till]) -> Iterator[Report]:
    processors = os.cpu_count() or 1
    for first in range(processors):
        started.start(_virtual, range(first, seeds, processors), range(first, crowds, processors), till)
    for _, report in started.words():
        yield report
    yield _for_real(ground, started, quarrel(seeds, **REAL), till, rough=True)
    ground.fresh()
    (ground.folder / BILLS).unlink()
    yield _for_real(ground, started, patience(seeds, **REAL), till, rough=False)
    ground.fresh()
    yield spend_in_folders(ground, started, broken=till is not Till)


def _virtual(pipe: Pipe, seeds: Sequence[int], crowds: Sequence[int], till: type[Till]) -> None:
    changes = CHANGES if till is Till else 0
    for seed in seeds:
        outcome = simulated(Race(seed, quarrel(seed, **VIRTUAL), till, ROUGH, changes))
        pipe.send((outcome.violations, outcome.counts))
    for seed in crowds:
        outcome = simulated(Race(seed, patience(seed, **BRISK), till))
        unused = [f"Number {seed}: {sentence}" for sentence in _unused(outcome.found)]
        pipe.send((outcome.violations + unused, outcome.counts))


def _unused(found: StoreContents) -> list[str]:
    """Check that a crowd that wants more than its cap uses nearly all of it."""
    spent = sum(sums.spent for (scope, _, _), sums in found.budgets.items() if scope == "fleet")
    if spent > MUST_USE * ONE_CAP:
        return []
    return [f"The sessions were refused with {spent} of {ONE_CAP} micro-dollars spent: more than 5 % was left unused."]


def _for_real(ground: Ground, started: Children, crowd: Crowd, till: type[Till], *, rough: bool) -> Report:
    """Let real processes spend on the real store, kill some, and check the result."""
    since = SystemClock().now()

    async def begin_all() -> None:
        async with ground.opened(crowd.lease) as store:
            await begin(store, crowd)

    asyncio.run(begin_all())
    killed = _let_run(ground, started, crowd, till, rough=rough)
    found = found_at(ground.url)
    wrong = check(found, planned(crowd, since)) + paid(found.events, _bills(ground))
    counts = Counter(event.kind for event in found.events)
    counts["crashes"] = killed
    return (wrong if rough else wrong + _unused(found)), counts


def _let_run(ground: Ground, started: Children, crowd: Crowd, till: type[Till], *, rough: bool) -> int:
    """Start the processes, kill each doomed one at its call, replace it, and wait for all to end."""
    workers = [started.start(_worker, ground, crowd, f"w{number}", till) for number in range(PROCESSES)]
    hours = dict(zip(workers, DOOMED, strict=False)) if rough else {}
    if rough and till is Till:
        started.start(_person, ground, crowd)
    calls: Counter[Child] = Counter()
    killed = 0
    for child, _ in started.words():
        calls[child] += 1
        if calls[child] == hours.get(child):
            child.kill()
            killed += 1
            started.start(_worker, ground, crowd, f"heir{killed}", till)
    return killed


def _bills(ground: Ground) -> dict[str, list[int]]:
    bills: dict[str, list[int]] = defaultdict(list)
    for line in (ground.folder / BILLS).read_text().splitlines():
        call, _, truth = line.partition(" ")
        bills[call].append(int(truth))
    return bills


async def _worker(pipe: Pipe, ground: Ground, crowd: Crowd, name: str, till: type[Till]) -> None:
    with (ground.folder / BILLS).open("a") as bills:

        def bill(call: str, truth: int) -> None:
            bills.write(f"{call} {truth}\n")
            bills.flush()
            pipe.send(call)

        slots = -(-len(crowd.members) // PROCESSES)
        async with ground.opened(crowd.lease) as store:

            async def finished() -> bool:
                return all(row.ended_at for row in await store.ask(Query("all_sessions", SessionRow)))

            await SpendingWorker(WorkerId(name), store, SystemClock(), crowd, bill, finished, slots, till).run()


async def _person(_: Pipe, ground: Ground, crowd: Crowd) -> None:
    chance, clock = random.Random(len(crowd.members)), SystemClock()
    async with ground.opened(crowd.lease) as store:
        for number in range(CHANGES):
            await clock.sleep(crowd.tick)
            await store.commit(cap_change(crowd, clock.now(), chance, number))


DRILL: Final = Drill(
    "race", "Parallel spenders that crash and retry never exceed a cap, and nothing is charged twice.", run
)
