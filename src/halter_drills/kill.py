"""A process is killed, at any moment: nothing that it was told is lost, and its successor does nothing twice.

For each kill, a real process opens a store of its own and walks the plan of the drills' session, saying what is
acknowledged before it goes on. SIGKILL ends it right before a commit, right after one, or somewhere inside. Then
another process looks at what is left, takes the session over and finishes it.
"""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, islice
from typing import Final

import msgspec

from halter.core.clock import SystemClock
from halter.core.ids import SortableIds, StreamId, session_stream
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore
from halter.state.session import Session, replay
from halter_drills import effects
from halter_drills.checker import check, found_at
from halter_drills.children import Child, Pipe, children
from halter_drills.drill import Drill, Ground, Result, Setting, connection, engine, own_store, result
from halter_drills.effects import EffectsLane, acting
from halter_drills.engines import writing_behind
from halter_drills.examine import examined, in_memory
from halter_drills.hand import EMPTY, TABLES
from halter_drills.lanes import NO_LEASE, Death, buried, deaths, dying, heard, killed
from halter_drills.plan import Act, End, plan
from halter_drills.workload import Told, Workload

SESSION: Final = "drill"
LANES: Final = 2

PRELOADED: Final = (__name__, "halter.cli", "halter.journal.postgres")
"""What children import in any case: among it the program that they were started from."""


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """One event that a process was told is durable, and a digest of the state that it folded."""

    stream: str
    seq: int
    hash: bytes
    state: bytes


def digest(state: Session) -> bytes:
    """Digest a folded state, so that two can be compared across processes."""
    return sha256(msgspec.json.encode(state)).digest()


def victim(pipe: Pipe, url: str, death: Death) -> None:
    """Walk the plan on the real store until death comes."""
    _live(pipe, engine(url, SystemClock(), NO_LEASE), death)


def careless_victim(pipe: Pipe, url: str, death: Death) -> None:
    """Walk the plan on a store that answers before it writes."""
    _live(pipe, writing_behind(engine(url, SystemClock(), NO_LEASE)), death)


def _live(pipe: Pipe, real: Engine, death: Death) -> None:
    def acknowledged(told: Sequence[Told]) -> None:
        pipe.send([Ack(stored.stream, stored.seq, stored.hash, digest(state)) for stored, state in told])

    store = JournalStore(dying(real, death, pipe))
    asyncio.run(Workload(store, SystemClock(), "victim", SESSION, acknowledged).run())
    signal.pause()


def heir(pipe: Pipe, url: str, acks: Sequence[Ack]) -> None:
    """Look at what a dead process left, take its session over and finish it; send what is wrong, in sentences."""
    wrong = lost(url, acks)
    pipe.send([*wrong, *asyncio.run(_inherit(url, acks))])


async def _inherit(url: str, acks: Sequence[Ack]) -> list[str]:
    clock = SystemClock()
    store = JournalStore(engine(url, clock, NO_LEASE))
    try:
        wrong = [*await unlike(store, acks), *await examined(store), *check(found_at(url), finished=False)]
        state = await Workload(store, clock, "heir", SESSION).run()
        if state.state != "COMPLETED":
            wrong.append(f"The successor left the session {state.state}.")
        return [*wrong, *await examined(store), *check(found_at(url)), *repeated(url)]
    finally:
        await store.close()


def lost(url: str, acks: Sequence[Ack]) -> list[str]:
    """Check with plain SQL that all acknowledged events are there, and besides them at most one commit."""
    with closing(connection(url)) as database:
        rows = database.execute("SELECT stream, seq, hash, key FROM events").fetchall()
    found = {(stream, seq): bytes(value) for stream, seq, value, _ in rows}
    wrong = [
        f"Event {ack.seq} of {ack.stream} was acknowledged and is lost."
        for ack in acks
        if found.get((ack.stream, ack.seq)) != ack.hash
    ]
    known = {(ack.stream, ack.seq) for ack in acks}
    untold = {key for stream, seq, _, key in rows if (stream, seq) not in known}
    if len(untold) > 1:
        wrong.append(f"{len(untold)} commits were made that nobody was told of, and only one can have been under way.")
    return wrong


async def unlike(store: JournalStore, acks: Sequence[Ack]) -> list[str]:
    """Check that the events fold into the very states that the dead process had folded."""
    last = {ack.stream: ack for ack in acks}
    wrong: list[str] = []
    for stream, ack in last.items():
        events = await store.read(StreamId(stream), limit=ack.seq)
        if digest(replay(events)) != ack.state:
            wrong.append(f"{stream} folds into another state at event {ack.seq} than the process had that died.")
    return wrong


def repeated(url: str) -> list[str]:
    """Check with plain SQL that every step of the plan happened exactly once, whoever did it."""
    with closing(connection(url)) as database:
        rows = database.execute("SELECT kind, stream, key, facts FROM events").fetchall()
    times = Counter(_step(*row) for row in rows)
    return [f"The step {step} happened {times[step]} times." for step in _steps() if times[step] != 1]


def _step(kind: str, stream: str, key: str, facts: bytes) -> str:
    """Tell which step of the plan an event completes."""
    match kind:
        case "call_settled":
            return json.loads(facts)["call"]
        case "request_settled":
            return json.loads(facts)["request"]
        case "cost_cap_reached":
            return json.loads(facts)["refused"]
        case "session_ended":
            return f"{stream} ends"
        case _:
            return key


def _steps() -> Iterator[str]:
    for step in plan(SESSION):
        match step:
            case Act():
                yield from (spend.id for spend in step.together)
            case End():
                yield f"{session_stream(step.session)} ends"
            case _:
                yield step.id


@dataclass(frozen=True, slots=True)
class JournalLane:
    """One store, on which one process after the other is killed."""

    ground: Ground
    teeth: bool

    def kill(self, death: Death) -> list[str]:
        """Let one process live and die, and its heir finish; say what is wrong."""
        self._clear()
        with children(*PRELOADED) as started:
            child = started.start(careless_victim if self.teeth else victim, self.ground.url, death)
            acks = self._last_words(child, death)
            wrong: list[str] = heard(started.start(heir, self.ground.url, acks))
        return [f"{death}: {what}" for what in wrong]

    def _clear(self) -> None:
        """Empty the tables, which is quicker than to make them anew."""
        with closing(connection(self.ground.url)) as database:
            database.execute("BEGIN")
            for table in TABLES:
                database.execute(EMPTY.format(table=table))
            database.execute("COMMIT")

    def _last_words(self, child: Child, death: Death) -> list[Ack]:
        """Collect what the process was told; kill it if it does not do so itself."""
        acks: list[Ack] = []
        if death.how == "inside":
            while (word := heard(child)) is not None:
                acks += word
            time.sleep(death.delay)
            child.kill()
        acks += [ack for word in child.hear_all() for ack in word]
        buried(child)
        return acks


@dataclass(frozen=True, slots=True)
class Plan:
    """Who dies how: processes that only write the journal, and processes that act on the outside world."""

    writing: Sequence[Death]
    playing: Sequence[Death]

    @property
    def total(self) -> int:
        """How many die in all."""
        return len(self.writing) + len(self.playing)


def planned(commits: int, played: int, seeds: int | None) -> Plan:
    """Kill at every commit of both, or as often as is wanted, half of them the one and half the other."""
    if seeds is None:
        return Plan(deaths(commits, seed=1), acting(played, seed=1))
    writing = (death for seed in count(1) for death in deaths(commits, seed))
    playing = (death for seed in count(1) for death in acting(played, seed))
    return Plan(list(islice(writing, seeds - seeds // 2)), list(islice(playing, seeds // 2)))


def run(setting: Setting) -> Result:
    """Kill processes that write the journal, and then processes that act."""
    with ExitStack() as stack:
        grounds = [stack.enter_context(own_store(in_memory(setting))) for _ in range(LANES)]
        for ground in grounds:
            engine(ground.url, SystemClock(), NO_LEASE).close()
        commits, played = asyncio.run(counted()), asyncio.run(effects.counted(grounds[0].folder))
        plan = planned(commits, played, setting.seeds)
        writing = [JournalLane(ground, setting.teeth) for ground in grounds]
        wrong = killed(writing, plan.writing, lambda done, note: setting.progress(done, plan.total, note))
        playing = [EffectsLane(ground, setting.teeth) for ground in grounds]
        before = len(plan.writing)
        acted = killed(playing, plan.playing, lambda done, note: setting.progress(before + done, plan.total, note))
    counts = {
        "kills": plan.total,
        "commits": commits,
        **Counter(f"killed_{death.how}_a_commit" for death in plan.writing),
        "kills_while_playing": len(plan.playing),
        "commits_while_playing": played,
        "kills_with_violations": sum(bool(each) for each in (*wrong, *acted)),
    }
    found = [what for each in (*wrong, *acted) for what in each]
    return result("kill", grounds[0].kind, plan.total, found, counts)


async def counted() -> int:
    """Count the commits of the session when nothing happens to it."""
    clock = SystemClock()
    heard: list[Sequence[Told]] = []
    store = JournalStore(MemoryEngine(now=clock.now, new_id=SortableIds(clock.now).new), inline=True)
    await Workload(store, clock, "worker", SESSION, heard.append).run()
    return len(heard)


DRILL: Final = Drill(
    "kill", "A killed process loses nothing that it was told, and its successor does nothing twice.", run
)
