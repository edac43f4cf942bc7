"""Workers are killed, stopped and continued, PostgreSQL is stopped hard, a clock is wrong: and every session goes on.

Real `halter worker` processes share the sessions of one PostgreSQL, by the real command line. What befalls them follows
from a plan; what they did is judged afterwards by plain SQL, by what each of them said, and by the outside world's own
count of what was paid. A person answers what nobody knows, by that count.
"""

import asyncio
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from halter.core.clock import SECOND, SystemClock
from halter.core.ports import Query, Store
from halter.core.rows import SessionRow
from halter.dispatch.heartbeat import HEARTBEAT_INTERVAL
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.runtime.runtime import DEFAULT_LEASE_DURATION
from halter.testing.postgres import Cluster, throwaway_cluster
from halter_drills import checker
from halter_drills.chaos_workers import (
    PLAIN,
    SKEWED,
    UNFENCED,
    WorkerProcess,
    Workers,
    begun,
    expected_end,
    made,
    paid,
    sessions,
    workers,
)
from halter_drills.checker import RecordedEvent, check, found_at
from halter_drills.drill import (
    Drill,
    DrillBroken,
    DrillResult,
    Ground,
    Setting,
    connection,
    examined,
    own_store,
    result,
)
from halter_drills.workload import PERSON

# What befalls the workers of the chaos drill, and when: a plan that follows from its seed.

What = Literal["kill", "stop", "go on", "restart", "skew"]

WORKERS: Final = 3
ROUND: Final = 27.0
"""Seconds in which everything happens once."""
STOPPED: Final = 20.0
"""Seconds for which a worker stands still: longer than its lease, and than others may take to act on that."""
FIRST: Final = 3.0
BURST: Final = 0.5
SESSIONS_PER_ROUND: Final = 60
"""How many sessions there are to a round."""


class Blow(NamedTuple):
    """Something that happens at a moment, in seconds from the beginning, to one of the workers' places."""

    at: float
    what: What
    place: int = 0


def rounds(sessions: int) -> int:
    return max(1, round(sessions / SESSIONS_PER_ROUND))


def planned(seed: int, count: int) -> Sequence[Blow]:
    """Plan so many rounds. In each, one worker stands still, another one is killed, and the server is stopped hard.

    Between rounds the third one is killed. There is always one whom nothing happens to, or who has just been started.
    """
    chance = random.Random(seed)
    return sorted(blow for number in range(count) for blow in _round(chance, number, last=number == count - 1))


def _round(chance: random.Random, number: int, *, last: bool) -> Iterator[Blow]:
    begin = FIRST + number * ROUND
    first, second, third = chance.sample(range(WORKERS), WORKERS)
    stop = begin + chance.uniform(0, 0.5)
    yield Blow(stop, "stop", first)
    yield Blow(begin + chance.uniform(0.6, 2), "kill", second)
    if number == 0:
        yield Blow(begin + 16, "skew")
    yield Blow(begin + chance.uniform(6, 9), "restart")
    yield Blow(stop + STOPPED, "go on", first)
    if not last:
        yield Blow(stop + STOPPED + chance.uniform(0.5, 2), "kill", third)


def beginnings(sessions: int, count: int) -> Sequence[float]:
    """Tell when each session begins: half of them right before the first blow of a round, the others one by one."""
    return sorted(_beginning(number, sessions, count) for number in range(sessions))


def _beginning(number: int, sessions: int, count: int) -> float:
    share = -(-sessions // count)
    begin, place = FIRST + number // share * ROUND, number % share / share
    return begin - 0.5 if place < BURST else begin + (place - BURST) / (1 - BURST) * STOPPED


# What became of the sessions of the chaos drill: judged by plain SQL, by what each worker said, and by the world.

PRICE: Final = 50_000
WITHIN: Final = 2 * SECOND
"""How long after the end of its lease an orphan may be without anybody."""
REFUSES: Final = 3
TOLD: Final = 3000
"""So much is repeated of what a worker complained of."""
REFUSAL: Final = "ahead of the database's"


class Orphan(NamedTuple):
    """A session whose owner was killed or stopped, and until when the owner's lease holds."""

    session: str
    generation: int
    alive_until: int


@dataclass(slots=True)
class ChaosSeen:
    """What the drill saw: what happened when, from when to when; whose sessions had nobody; and a wrong clock."""

    blows: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    orphans: list[Orphan] = field(default_factory=list[Orphan])
    skewed: WorkerProcess | None = None
    answered: int = 0
    revived: int = 0
    stalled: int = 0


def judged(
    ground: Ground, all_workers: Sequence[WorkerProcess], living: Sequence[WorkerProcess], seen: ChaosSeen, total: int
) -> tuple[list[str], dict[str, Any]]:
    ended = [*refused(seen.skewed), *drained(living)]
    found = found_at(ground.url)
    effects = paid(ground.folder)
    late, longest = lateness(found.events, seen)
    wrong = [
        *shared(all_workers),
        *check(found),
        *unended(found.events, total),
        *asyncio.run(_examined(ground)),
        *lost(ground, all_workers),
        *checker.paid(found.events, {call: [PRICE] * times for call, times in effects.items()}),
        *unpaid(found.events, effects),
        *late,
        *untidy(all_workers),
        *ended,
    ]
    kinds = [event.kind for event in found.events]
    counts = {
        "workers": len(all_workers),
        "revived": seen.revived,
        "events": len(found.events),
        "payments": len(effects),
        "caps_reached": kinds.count("cost_cap_reached"),
        "doubts_answered": seen.answered,
        "orphans": len(seen.orphans),
        "longest_after_the_lease_ms": longest // 1000,
        "machine_stalled_ms": seen.stalled // 1000,
    }
    return wrong, counts


async def _examined(ground: Ground) -> list[str]:
    store = ground.open()
    try:
        return await examined(store)
    finally:
        await store.close()


def unended(events: Sequence[RecordedEvent], total: int) -> Iterator[str]:
    """Check that each session came to the end that it had to come to, once."""
    ends: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.kind == "session_ended":
            ends[event.stream].append(event.facts["state"])
    for session, errand in sessions(total):
        if ends[f"session:{session}"] != [expected_end(errand)]:
            yield f"The session {session} ended {ends[f'session:{session}']} instead of {expected_end(errand)}."


def lost(ground: Ground, all_workers: Sequence[WorkerProcess]) -> Iterator[str]:
    """Check that whatever a worker was told is durable is there, just so."""
    with closing(connection(ground.url)) as database:
        rows = database.execute("SELECT stream, seq, hash FROM events").fetchall()
    kept = {(stream, seq): bytes(value).hex() for stream, seq, value in rows}
    for worker in all_workers:
        for line in worker.told():
            if kept.get((line.stream, line.seq)) != line.hash:
                yield f"Event {line.seq} of {line.stream} was acknowledged to {worker.name} and is lost."


def shared(all_workers: Sequence[WorkerProcess]) -> Iterator[str]:
    """Check that each generation of a session was one worker's alone."""
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for worker in all_workers:
        for line in worker.told():
            if line.stream.startswith("session:") and not line.stream.endswith("/in") and line.generation:
                owners[line.stream, line.generation].add(worker.name)
    for (stream, generation), names in owners.items():
        if len(names) > 1:
            yield f"Generation {generation} of {stream} was written by {' and '.join(sorted(names))}."


def unpaid(events: Sequence[RecordedEvent], effects: Mapping[str, int]) -> Iterator[str]:
    """Check that what is taken for paid was paid, and that nobody paid without having said so before."""
    begun = {event.facts["call"] for event in events if event.kind == "call_started" and event.facts["tool"] == "pay"}
    for event in events:
        if event.kind == "call_settled" and event.facts["outcome"] == "ok" and event.facts["call"] in begun:
            call = event.facts["call"]
            if call not in effects:
                yield f"The call {call} is taken for done and had no effect."
    for call in effects.keys() - begun:
        yield f"The call {call} had its effect, and there is no intent of it."


def lateness(events: Sequence[RecordedEvent], seen: ChaosSeen) -> tuple[list[str], int]:
    """Check how soon somebody went on with each orphan; tell the longest time after its lease that counts."""
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
                wrong.append(f"Nobody went on with {orphan.session} after its owner was gone.")
            continue
        after = min(later) - since(orphan.alive_until, min(later), seen)
        longest = max(longest, after)
        if after > WITHIN + seen.stalled:
            wrong.append(f"Somebody went on with {orphan.session} {after / SECOND:.1f} s after its lease had run out.")
    return wrong, longest


def since(alive_until: int, resumed: int, seen: ChaosSeen) -> int:
    """Tell from when on somebody could go on with an orphan.

    Not while the server was away. And a worker that was killed or stopped meanwhile may have been about to do so: then
    it counts from the end of that one's lease.
    """
    moment = alive_until
    for what, begin, end in seen.blows:
        if what == "restart" and begin < resumed and end > moment:
            moment = end
        if what in ("kill", "stop") and alive_until < begin < resumed:
            moment = max(moment, begin + DEFAULT_LEASE_DURATION)
    return min(moment, resumed)


def refused(skewed: WorkerProcess | None) -> Iterator[str]:
    """Check that a worker whose clock is wrong said so, and did nothing."""
    if skewed is None:
        return
    code, said = skewed.ended(), skewed.complaints()
    if code != REFUSES or REFUSAL not in said:
        yield f"A worker whose clock was two hours ahead ended with {code} and said: {said}"
    if any(line.generation for line in skewed.told()):
        yield "A worker whose clock was two hours ahead took a session."


def drained(living: Sequence[WorkerProcess]) -> Iterator[str]:
    """End those that are left as an operator would, and check that they end well."""
    for worker in living:
        worker.process.send_signal(signal.SIGTERM)
    for worker in living:
        code = worker.ended()
        if code != 0:
            yield f"{worker.name} was asked to end and left with {code}: {worker.complaints()}"


def untidy(all_workers: Sequence[WorkerProcess]) -> Iterator[str]:
    """Check that nobody was shown a traceback."""
    for worker in all_workers:
        if "Traceback" in worker.complaints():
            yield f"{worker.name} wrote a traceback: {worker.complaints()[-TOLD:]}"


SESSIONS: Final = 300
LOOK: Final = SECOND // 4
LOOKS: Final = 40
PATIENCE: Final = 120 * SECOND
"""How long the sessions may take to come to their end after everything has happened."""
LEFT_OUT: Final = "The server is not the drill's own, so it was not stopped."

OWNED: Final = """
SELECT s.session, s.generation, w.alive_until FROM workers w JOIN sessions s ON s.owner = w.worker
WHERE w.about::json ->> 'pid' = %s AND w.about <> ''
"""
BEATEN: Final = "SELECT MAX(alive_until) FROM workers WHERE about <> '' AND about::json ->> 'pid' = %s"


@dataclass(slots=True)
class ChaosScene:
    """The drill at work: its workers, each at its place, and what was seen so far."""

    ground: Ground
    cluster: Cluster | None
    started: Workers
    how: Sequence[str]
    places: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    stopped: set[int] = field(default_factory=set[int])
    resumed: dict[int, int] = field(default_factory=dict[int, int])
    seen: ChaosSeen = field(default_factory=ChaosSeen)
    clock: SystemClock = field(default_factory=SystemClock)

    def open(self) -> None:
        self.places = [self.started.start(self.how) for _ in range(WORKERS)]
        deadline = time.monotonic() + PATIENCE / SECOND
        while not all(self._beaten(worker.pid) for worker in self.places):
            if time.monotonic() > deadline or any(worker.process.poll() is not None for worker in self.places):
                said = " ".join(worker.complaints() for worker in self.places)
                raise DrillBroken(f"The workers of the drill did not come to work. {said}")
            time.sleep(LOOK / SECOND)

    def revive(self) -> None:
        """Start those again that ended because the server was away, as whoever keeps services alive would."""
        for place, worker in enumerate(self.places):
            if worker.process.poll() is not None:
                self.places[place] = self.started.start(self.how)
                self.seen.revived += 1

    async def befall(self, blow: Blow) -> None:
        if blow.what in ("kill", "stop"):
            await self._busy(self.places[blow.place])
        at, worker = self.clock.now(), self.places[blow.place]
        match blow.what:
            case "kill":
                worker.kill()
                self._orphan(worker)
                self.places[blow.place] = self.started.start(self.how)
            case "stop":
                worker.stop()
                self.stopped.add(worker.pid)
                self._orphan(worker)
            case "go on":
                worker.go_on()
                self.stopped.discard(worker.pid)
                self.resumed[worker.pid] = at
            case "restart" if self.cluster is not None:
                await asyncio.to_thread(self.cluster.stop_hard)
                await asyncio.to_thread(self.cluster.start)
            case "restart":
                return
            case "skew":
                self.seen.skewed = self.started.start(SKEWED)
        self.seen.blows.append((blow.what, at, self.clock.now()))

    async def _busy(self, worker: WorkerProcess) -> None:
        """Wait a little for a worker to have sessions: what befalls an idle one proves nothing."""
        for _ in range(LOOKS):
            if self._owned(worker):
                return
            await self.clock.sleep(SECOND // 20)

    def _orphan(self, worker: WorkerProcess) -> None:
        """Know whose sessions have nobody now, and until when their lease holds."""
        self.seen.orphans += self._owned(worker)

    def _owned(self, worker: WorkerProcess) -> list[Orphan]:
        with closing(connection(self.ground.url)) as database:
            return [Orphan(*row) for row in database.execute(OWNED, (str(worker.pid),)).fetchall()]

    def unsettled(self) -> bool:
        """Tell whether somebody may still act who has lost its sessions and does not know it yet."""
        if self.stopped:
            return True
        for pid, at in list(self.resumed.items()):
            if self._beaten(pid) > at + DEFAULT_LEASE_DURATION - HEARTBEAT_INTERVAL:
                del self.resumed[pid]
        return bool(self.resumed)

    def _beaten(self, pid: int) -> int:
        with closing(connection(self.ground.url)) as database:
            return database.execute(BEATEN, (str(pid),)).fetchone()[0] or 0


async def _lived(scene: ChaosScene, setting: Setting, total: int) -> None:
    """Begin sessions and let everything happen; return when all is over, or when that takes too long."""
    count = rounds(total)
    plan, moments = planned(1, count), beginnings(total, count)
    store = scene.ground.open().patient(scene.clock)
    began = scene.clock.now()
    try:
        async with asyncio.TaskGroup() as group:
            person = group.create_task(_answering(scene, store))
            more = [group.create_task(_stalls(scene)), group.create_task(_reviving(scene))]
            beginning = group.create_task(_begin(scene, store, began, moments, total))
            for number, blow in enumerate(plan):
                await _until(scene.clock, began, blow.at)
                setting.progress(number, len(plan) + 1, blow.what)
                await scene.befall(blow)
            await beginning
            await _over(scene, store)
            for task in (person, *more):
                task.cancel()
    finally:
        await store.close()


async def _until(clock: SystemClock, began: int, seconds: float) -> None:
    await clock.sleep(max(0, began + round(seconds * SECOND) - clock.now()))


async def _begin(scene: ChaosScene, store: Store, began: int, moments: Sequence[float], total: int) -> None:
    for at, (session, errand) in zip(moments, sessions(total), strict=True):
        await _until(scene.clock, began, at)
        await store.commit(begun(session, errand))


async def _over(scene: ChaosScene, store: Store) -> None:
    deadline = scene.clock.now() + PATIENCE
    while scene.clock.now() < deadline:
        rows = await store.ask(Query("all_sessions", SessionRow))
        if all(row.ended_at is not None for row in rows):
            return
        await scene.clock.sleep(LOOK)


async def _answering(scene: ChaosScene, store: Store) -> None:
    """Answer as a person who looks first whether it was paid; not while somebody may still pay without being asked."""
    while True:
        await scene.clock.sleep(2 * LOOK)
        for one in await list_pending_decisions(store):
            if not await asyncio.to_thread(scene.unsettled):
                answer = "approve" if paid(scene.ground.folder)[one.subject] else "deny"
                await store.commit(answer_decision(one, answer, PERSON, f"{one.decision}/answer"))
                scene.seen.answered += 1


async def _reviving(scene: ChaosScene) -> None:
    while True:
        await scene.clock.sleep(SECOND)
        scene.revive()


async def _stalls(scene: ChaosScene) -> None:
    """Measure for how long the machine keeps even those waiting who want nothing but to look at the clock."""
    while True:
        at = scene.clock.now()
        await scene.clock.sleep(SECOND // 20)
        scene.seen.stalled = max(scene.seen.stalled, scene.clock.now() - at - SECOND // 20)


@contextmanager
def _server(setting: Setting) -> Generator[tuple[Setting, Cluster | None]]:
    if setting.store is not None:
        yield setting, None
        return
    with throwaway_cluster() as cluster:
        yield replace(setting, store=cluster.url), cluster


def run(setting: Setting) -> DrillResult:
    total = setting.seeds or SESSIONS
    with _server(setting) as (on, cluster), own_store(on) as ground:
        folder = made(ground.folder)
        asyncio.run(ground.open().close())
        with workers(ground.folder, folder, ground.url) as started:
            scene = ChaosScene(ground, cluster, started, UNFENCED if setting.teeth else PLAIN)
            scene.open()
            asyncio.run(_lived(scene, setting, total))
            violations, counts = judged(ground, started.started, scene.places, scene.seen, total)
        steps = len(planned(1, rounds(total))) + 1
        setting.progress(steps, steps, "checked")
    blows = Counter(what for what, _, _ in scene.seen.blows)
    told = {"kills": blows["kill"], "stops": blows["stop"], "server_stopped": blows["restart"]}
    left_out = {} if cluster else {"left_out": LEFT_OUT}
    return result(DRILL.name, "postgresql", total, violations, told | counts | left_out)


DRILL: Final = Drill(
    "chaos",
    "Workers that are killed or stopped lose no session and no event, and nothing is done twice or by two at once.",
    run,
    ("postgresql",),
)
