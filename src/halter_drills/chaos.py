"""Workers are killed, stopped and continued, PostgreSQL is stopped hard, a clock is wrong: and every session goes on.

Real `halter worker` processes share the sessions of one PostgreSQL, by the real command line. What befalls them follows
from a plan; what they did is judged afterwards by plain SQL, by what each of them said, and by the outside world's own
count of what was paid. A person answers what nobody knows, by that count.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from halter.app.opened import LEASE
from halter.core.clock import SECOND, SystemClock
from halter.core.ports import Query, Store
from halter.core.rows import SessionRow
from halter.dispatch.tending import HEARTBEAT
from halter.guard.approvals import decide, needs_you
from halter.testing.postgres import Cluster, throwaway_cluster
from halter_drills.agents import PERSON
from halter_drills.broken import DrillBroken
from halter_drills.chaos_agent import begun, made, paid, sessions
from halter_drills.chaos_judge import Orphan, Seen, judged
from halter_drills.chaos_plan import WORKERS, Blow, beginnings, planned, rounds
from halter_drills.chaos_workers import PLAIN, SKEWED, UNFENCED, Worker, Workers, workers
from halter_drills.drill import Drill, Ground, Result, Setting, connection, own_store, result

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
class Scene:
    """The drill at work: its workers, each at its place, and what was seen so far."""

    ground: Ground
    cluster: Cluster | None
    started: Workers
    how: Sequence[str]
    places: list[Worker] = field(default_factory=list[Worker])
    stopped: set[int] = field(default_factory=set[int])
    resumed: dict[int, int] = field(default_factory=dict[int, int])
    seen: Seen = field(default_factory=Seen)
    clock: SystemClock = field(default_factory=SystemClock)

    def open(self) -> None:
        """Start the workers, and wait until the store knows them."""
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
        """Let something happen."""
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

    async def _busy(self, worker: Worker) -> None:
        """Wait a little for a worker to have sessions: what befalls an idle one proves nothing."""
        for _ in range(LOOKS):
            if self._owned(worker):
                return
            await self.clock.sleep(SECOND // 20)

    def _orphan(self, worker: Worker) -> None:
        """Know whose sessions have nobody now, and until when their lease holds."""
        self.seen.orphans += self._owned(worker)

    def _owned(self, worker: Worker) -> list[Orphan]:
        with closing(connection(self.ground.url)) as database:
            return [Orphan(*row) for row in database.execute(OWNED, (str(worker.pid),)).fetchall()]

    def unsettled(self) -> bool:
        """Tell whether somebody may still act who has lost its sessions and does not know it yet."""
        if self.stopped:
            return True
        for pid, at in list(self.resumed.items()):
            if self._beaten(pid) > at + LEASE - HEARTBEAT:
                del self.resumed[pid]
        return bool(self.resumed)

    def _beaten(self, pid: int) -> int:
        """Tell until when the leases of a process hold."""
        with closing(connection(self.ground.url)) as database:
            return database.execute(BEATEN, (str(pid),)).fetchone()[0] or 0


async def _lived(scene: Scene, setting: Setting, total: int) -> None:
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


async def _begin(scene: Scene, store: Store, began: int, moments: Sequence[float], total: int) -> None:
    for at, (session, errand) in zip(moments, sessions(total), strict=True):
        await _until(scene.clock, began, at)
        await store.commit(begun(session, errand))


async def _over(scene: Scene, store: Store) -> None:
    deadline = scene.clock.now() + PATIENCE
    while scene.clock.now() < deadline:
        rows = await store.ask(Query("all_sessions", SessionRow))
        if all(row.ended_at is not None for row in rows):
            return
        await scene.clock.sleep(LOOK)


async def _answering(scene: Scene, store: Store) -> None:
    """Answer as a person who looks first whether it was paid; not while somebody may still pay without being asked."""
    while True:
        await scene.clock.sleep(2 * LOOK)
        for one in await needs_you(store):
            if not await asyncio.to_thread(scene.unsettled):
                answer = "approve" if paid(scene.ground.folder)[one.subject] else "deny"
                await store.commit(decide(one, answer, PERSON, f"{one.decision}/answer"))
                scene.seen.answered += 1


async def _reviving(scene: Scene) -> None:
    while True:
        await scene.clock.sleep(SECOND)
        scene.revive()


async def _stalls(scene: Scene) -> None:
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


def run(setting: Setting) -> Result:
    """Let workers and server suffer while sessions run, and check what is left."""
    total = setting.seeds or SESSIONS
    with _server(setting) as (on, cluster), own_store(on) as ground:
        folder = made(ground.folder)
        asyncio.run(ground.open().close())
        with workers(ground.folder, folder, ground.url) as started:
            scene = Scene(ground, cluster, started, UNFENCED if setting.teeth else PLAIN)
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
