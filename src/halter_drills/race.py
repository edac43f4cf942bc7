"""Money under contention: many sessions, processes, crashes and repeats on shared caps.

Five parts. Seeded runs in virtual time, each of which replays from its number. Crowds, in virtual time too, that hold
four times what they spend and must use nearly all of one cap. Then both again with real processes on the real store,
some of which are killed. Last, real processes in folders whose own `halter.yaml` says other caps than the store's
policy.
"""

import asyncio
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.ids import WorkerId
from halter.core.ports import Query
from halter_drills.careless import CheckThenSpend
from halter_drills.checker import Found, check, found_at, paid
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.crowds import ONE_CAP, cap_change, patience, planned, quarrel
from halter_drills.drill import Drill, Ground, Result, Setting, own_store, result
from halter_drills.folders import spend_in_folders
from halter_drills.simulated import PROCESSES, ROUGH, Race, simulated
from halter_drills.spenders import Crowd, Worker, begin
from halter_drills.till import Till

SEEDS: Final = 40
CROWDS_EVERY: Final = 50
"""How many seeded runs there are for each crowd: crowds are twenty times as slow."""

CHANGES: Final = 6
MUST_USE: Final = 0.95
VIRTUAL: Final = {"latency": 5 * SECOND, "tick": SECOND, "lease": 15 * SECOND}
BRISK: Final = {**VIRTUAL, "latency": SECOND}
REAL: Final = {"latency": SECOND // 50, "tick": SECOND // 50, "lease": SECOND}
DOOMED: Final = (3, 6, 9)
"""After how many calls of its own each of the first processes is killed."""

BILLS: Final = "bills"
Report = tuple[list[str], Counter[str]]


def run(setting: Setting) -> Result:
    """Run all parts on a store of the drill's own."""
    seeds = SEEDS if setting.seeds is None else setting.seeds
    crowds = -(-seeds // CROWDS_EVERY)
    total = seeds + crowds + 3
    violations: list[str] = []
    counts: Counter[str] = Counter()
    with own_store(setting) as ground, children(__name__) as started:
        reports = _reports(ground, started, seeds, crowds, _till(setting))
        for done, (wrong, counted) in enumerate(reports, 1):
            violations += wrong
            counts += counted
            setting.progress(done, total, f"{counts['call_started']} calls, {counts['crashes']} crashes")
    return result(DRILL.name, ground.kind, total, violations, {"seeds": seeds, **counts})


def _till(setting: Setting) -> type[Till]:
    return CheckThenSpend if setting.teeth else Till


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


def _unused(found: Found) -> list[str]:
    """Check that a crowd that wanted more than its cap used nearly all of it."""
    spent = sum(sums.spent for (scope, _, _), sums in found.budgets.items() if scope == "fleet")
    if spent > MUST_USE * ONE_CAP:
        return []
    return [f"The sessions were refused with {spent} of {ONE_CAP} micro-dollars spent: more than 5 % was left unused."]


def _for_real(ground: Ground, started: Children, crowd: Crowd, till: type[Till], *, rough: bool) -> Report:
    """Let real processes spend on the real store, kill some, and check what is left."""
    since = SystemClock().now()
    asyncio.run(_begin(ground, crowd))
    killed = _let_run(ground, started, crowd, till, rough=rough)
    found = found_at(ground.url)
    wrong = check(found, planned(crowd, since)) + paid(found.events, _bills(ground))
    counts = Counter(event.kind for event in found.events)
    counts["crashes"] = killed
    return (wrong if rough else wrong + _unused(found)), counts


async def _begin(ground: Ground, crowd: Crowd) -> None:
    store = ground.open(lease=crowd.lease)
    try:
        await begin(store, crowd)
    finally:
        await store.close()


def _let_run(ground: Ground, started: Children, crowd: Crowd, till: type[Till], *, rough: bool) -> int:
    """Start the processes, kill each doomed one at its hour, put another in its place; wait for all to end."""
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
    """Read what the outside world asked for."""
    bills: dict[str, list[int]] = defaultdict(list)
    for line in (ground.folder / BILLS).read_text().splitlines():
        call, _, truth = line.partition(" ")
        bills[call].append(int(truth))
    return bills


def _worker(pipe: Pipe, ground: Ground, crowd: Crowd, name: str, till: type[Till]) -> None:
    asyncio.run(_work(pipe, ground, crowd, name, till))


async def _work(pipe: Pipe, ground: Ground, crowd: Crowd, name: str, till: type[Till]) -> None:
    store = ground.open(lease=crowd.lease)

    async def finished() -> bool:
        return all(row.ended_at for row in await store.ask(Query("all_sessions", _Row)))

    with (ground.folder / BILLS).open("a") as bills:

        def bill(call: str, truth: int) -> None:
            bills.write(f"{call} {truth}\n")
            bills.flush()
            pipe.send(call)

        slots = -(-len(crowd.members) // PROCESSES)
        await Worker(WorkerId(name), store, SystemClock(), crowd, bill, finished, slots, till).run()
    await store.close()


class _Row(msgspec.Struct, frozen=True):
    ended_at: int | None


def _person(_: Pipe, ground: Ground, crowd: Crowd) -> None:
    """Raise and lower the shared caps while everybody spends."""
    asyncio.run(_change_caps(ground, crowd))


async def _change_caps(ground: Ground, crowd: Crowd) -> None:
    chance = random.Random(len(crowd.members))
    clock = SystemClock()
    store = ground.open(lease=crowd.lease)
    for number in range(CHANGES):
        await clock.sleep(crowd.tick)
        write = cap_change(crowd, clock.now(), chance, number)
        await store.commit(write)
    await store.close()


DRILL: Final = Drill(
    "race", "Parallel spenders that crash and repeat never pass a cap, and nothing is charged twice.", run
)
