"""One run of the spenders in virtual time: processes that crash, a store that loses answers, all from one number.

Even numbers run in memory, odd ones on SQLite without a disk: what a disk can do is another drill's matter.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.ids import SortableIds, WorkerId
from halter.core.ports import Stored
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine, open_connection
from halter.journal.store import JournalStore
from halter.testing.crash import Crashed
from halter.testing.seedloop import START, SeedLoop
from halter_drills.checker import Fact, Found, Sums, check, fact, found_in, paid
from halter_drills.crowds import cap_change, planned
from halter_drills.faults import Faults, FaultyStore
from halter_drills.spenders import Crowd, Worker, begin, surely
from halter_drills.till import Till

PROCESSES: Final = 4
LIVES: Final = 3
"""How often each process may die before its luck turns; so every run comes to an end."""

TOO_LONG: Final = 3 * HOUR
SMOOTH: Final = Faults()
ROUGH: Final = Faults(away=0.02, lost=0.05, crash=0.01)


@dataclass(frozen=True, slots=True)
class Race:
    """What is run: who spends, how well the till is made, what goes wrong, how often a person changes a cap."""

    seed: int
    crowd: Crowd
    till: type[Till] = Till
    faults: Faults = SMOOTH
    changes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    violations: list[str]
    counts: Counter[str]
    found: Found


@dataclass(slots=True)
class Tape:
    """Hears every commit of a store, in order; the store tells it before it tells whoever wrote."""

    events: list[Fact] = field(default_factory=list[Fact])
    open: set[str] = field(default_factory=set[str])
    every_seconds: float = HOUR / SECOND

    def saw(self, events: Sequence[Stored]) -> None:
        """Keep the events, and who is not over yet."""
        for event in events:
            self.events.append(fact(event.stream, event.seq, event.kind, event.at, event.generation, event.facts))
            if event.kind == "session_started":
                self.open.add(event.stream)
            elif event.kind == "session_ended":
                self.open.discard(event.stream)

    def flush(self) -> None:
        """Nothing is put off."""


@dataclass(frozen=True, slots=True)
class World:
    """What outlives the processes of a run: the store, the clock, and what the outside world asked for."""

    race: Race
    loop: SeedLoop
    store: JournalStore
    tape: Tape
    bills: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list[int]))
    counts: Counter[str] = field(default_factory=Counter[str])

    async def finished(self) -> bool:
        """Tell whether every session that was started is over."""
        return not self.tape.open

    def bill(self, call: str, truth: int) -> None:
        """Ask for money."""
        self.bills[call].append(truth)


def simulated(race: Race) -> Outcome:
    """Run a crowd to its end, and check what is left. It begins shortly before an hour is over."""
    start = START + HOUR - MINUTE // 2
    loop = SeedLoop(race.seed, start)
    tape = Tape()
    engine, found = _engine(race, loop, tape)
    store = JournalStore(engine, inline=True, salt=random.Random(race.seed).randbytes, observers=[tape])
    world = World(race, loop, store, tape)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        late = runner.run(_run(world))
        left = found()
        runner.run(store.close())
    wrong = late + check(left, planned(race.crowd, start)) + paid(left.events, world.bills)
    world.counts.update(Counter(event.kind for event in left.events))
    return Outcome([f"Number {race.seed}: {sentence}" for sentence in wrong], world.counts, left)


def _engine(race: Race, loop: SeedLoop, tape: Tape) -> tuple[Engine, Callable[[], Found]]:
    new_id = SortableIds(loop.now, random.Random(race.seed).getrandbits).new
    if race.seed % 2:
        connection = open_connection(":memory:")
        engine = SqliteEngine(
            ":memory:", now=loop.now, new_id=new_id, lease=race.crowd.lease, connect=lambda _: connection
        )
        return engine, lambda: found_in(connection)
    memory = MemoryEngine(now=loop.now, new_id=new_id, lease=race.crowd.lease)
    return memory, lambda: _found(memory, tape)


def _found(memory: MemoryEngine, tape: Tape) -> Found:
    budgets = {
        (row["scope"], row["window"], row["unit"]): Sums(row["spent"], row["held"], row["overrun"])
        for row in memory.ask("budgets", {})
    }
    return Found(
        tape.events,
        budgets,
        {row["hold"]: json.loads(row["legs"]) for row in memory.ask("holds", {})},
        {row["hold"]: row["usd"] for row in memory.ask("all_spends", {})},
        {row["stream"]: row["head"] for row in memory.ask("heads", {})},
    )


async def _run(world: World) -> list[str]:
    await begin(world.store, world.race.crowd)
    slots = -(-len(world.race.crowd.members) // PROCESSES)
    try:
        async with asyncio.timeout(TOO_LONG / SECOND), asyncio.TaskGroup() as tasks:
            for number in range(PROCESSES):
                tasks.create_task(_process(world, number, slots))
            tasks.create_task(_person(world))
    except TimeoutError:
        return [f"These sessions did not come to an end: {', '.join(sorted(world.tape.open))}."]
    return []


async def _process(world: World, number: int, slots: int) -> None:
    """Be one process after another: when one has crashed, the next one starts with nothing but the store."""
    for life in range(LIVES + 1):
        chance = random.Random(f"{world.race.seed} {number} {life}")
        faults = world.race.faults if life < LIVES else SMOOTH
        store = FaultyStore(world.store, chance, world.loop, faults)
        worker = Worker(
            WorkerId(f"w{number}.{life}"),
            store,
            world.loop,
            world.race.crowd,
            world.bill,
            world.finished,
            slots,
            world.race.till,
        )
        try:
            await worker.run()
        except* Crashed:
            world.counts["crashes"] += 1
            await world.loop.sleep(chance.randrange(5 * SECOND))
        if await world.finished():
            return


async def _person(world: World) -> None:
    """Raise and lower caps, for one window or for the life of a session, while everybody spends."""
    chance = random.Random(f"{world.race.seed} person")
    store = FaultyStore(world.store, chance, world.loop, Faults(away=0.2, lost=0.2))
    for number in range(world.race.changes):
        await world.loop.sleep(chance.randrange(5 * SECOND))
        write = cap_change(world.race.crowd, world.loop.now(), chance, number)
        await surely(lambda write=write: store.commit(write), world.loop)
