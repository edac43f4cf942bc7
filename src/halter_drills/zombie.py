"""A worker that continues after its lease expired changes nothing.

Each zombie is a real process. It runs its session up to some moment and is stopped with SIGSTOP. Another process takes
the session over and ends it. Then the zombie continues and tries every write of an owner.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.errors import LeaseLost
from halter.core.events import CallStarted, SessionParked, SessionStarted
from halter.core.ids import SessionId, WorkerId, inbox_stream
from halter.core.money import Caps, Spender, carve
from halter.core.ports import Committed, Lease, Write
from halter.guard.ledger import ActualResult
from halter.journal.apply import Applier, WorkingSet, WriteAnswer, apply_write
from halter.state.lifecycle import end_session, park_session, post_message, start_child, start_session, wake_session
from halter.state.session import InFlight, replay
from halter_drills.checker import StoreContents, check, read_store
from halter_drills.children import Children, Pipe, children
from halter_drills.drill import Drill, DrillBroken, DrillResult, Setting, Workspace, own_store, result
from halter_drills.workload import DrillLedger, make_request

Moment = Literal["before an intent", "before an effect", "before an outcome", "parked", "resident"]
MOMENTS: Final[tuple[Moment, ...]] = get_args(Moment)
STEPS: Final = 3
TOGETHER: Final = 15
"""Number of workers that are stopped and taken over at the same time."""
LEASE: Final = SECOND
EFFECTS: Final = "effects"
AMOUNT: Final = 1000
MAX_CLAIMS: Final = 500
POLL_INTERVAL: Final = SECOND // 50

Answer = Literal["refused", "let through"]
Testimony = list[tuple[str, Answer]]
"""The attempts of a zombie after it continued, and their results."""


class ZombieCase(msgspec.Struct, frozen=True):
    """The moment at which a zombie is stopped; it learns of its loss from a heartbeat or from its next write."""

    number: int

    @property
    def moment(self) -> Moment:
        return MOMENTS[self.number % len(MOMENTS)]

    @property
    def step(self) -> int:
        return self.number // len(MOMENTS) % STEPS

    @property
    def agent(self) -> str:
        """One agent per batch, so that the heir claims its sessions and no others."""
        return f"drill-{self.number // TOGETHER}"

    @property
    def beats_first(self) -> bool:
        return self.number // len(MOMENTS) // STEPS % 2 == 1


def apply_unfenced(write: Write, rows: WorkingSet, salts: Iterator[bytes]) -> WriteAnswer:
    """The teeth: apply a write without checking its lease."""
    return apply_write(write, rows, salts, fenced=False)


class Mortal:
    """A worker that runs the steps of a session, with effects in the outside world: base of zombie and heir."""

    def __init__(self, workspace: Workspace, name: str, agent: str, applier: Applier) -> None:
        self._name = WorkerId(name)
        self._agent = agent
        self._clock = SystemClock()
        self._store = workspace.open(lease=LEASE, applier=applier)
        self._till = DrillLedger(self._store, self._clock)
        self._effects = workspace.folder / EFFECTS

    async def _step(self, lease: Lease, number: int) -> None:
        flight = await self._begin(lease, number)
        if flight is not None:
            self._act(flight)
            await self._settle(lease, flight)

    async def _begin(self, lease: Lease, number: int) -> InFlight | None:
        session, now = lease.session, self._clock.now()
        request = make_request(f"{session}/{number}", "work", Caps(), Spender(session, self._agent), now, AMOUNT)
        answer = await self._till.admit(lease, request)
        return answer if isinstance(answer, InFlight) else None

    def _act(self, flight: InFlight) -> None:
        """Have an effect that cannot be undone."""
        with self._effects.open("a") as effects:
            effects.write(f"{flight.id}\n")

    async def _settle(self, lease: Lease, flight: InFlight) -> Committed:
        return (await self._till.settle(lease, flight, ActualResult("ok", usd=AMOUNT // 2))).committed


class Heir(Mortal):
    """Takes over the sessions of zombies, and ends them."""

    async def take_over(self, count: int) -> list[str]:
        ended_sessions: list[str] = []
        for _ in range(MAX_CLAIMS):
            # Only those of its agent: with teeth, earlier zombies have started sub-sessions.
            for lease in await self._store.claim(self._name, count, agents={self._agent: None}):
                await self._finish(lease)
                await self._store.beat(self._name)
                ended_sessions.append(lease.session)
            if len(ended_sessions) >= count:
                break
            await self._clock.sleep(POLL_INTERVAL)
        await self._store.close()
        return ended_sessions

    async def _finish(self, lease: Lease) -> None:
        events = await self._store.read(lease.stream)
        inbox_head = len(await self._store.read(inbox_stream(lease.session)))
        await self._store.commit(wake_session(lease, f"{lease.session}/{lease.generation}/woken", None, inbox_head))
        await self._till.settle_in_doubt(lease, list(replay(events).in_flight.values()))
        started_calls = {stored.event.call for stored in events if isinstance(stored.event, CallStarted)}
        for number in range(STEPS):
            if f"{lease.session}/{number}" not in started_calls:
                await self._step(lease, number)
        await self._store.commit(end_session(lease, "COMPLETED", "completed"))


class Zombie(Mortal):
    """Works up to its moment, is stopped, continues, and reports its attempts."""

    def __init__(self, pipe: Pipe, workspace: Workspace, case: ZombieCase, applier: Applier) -> None:
        super().__init__(workspace, f"zombie-{case.number}", case.agent, applier)
        self._pipe = pipe
        self._case = case

    async def live(self) -> None:
        session = f"z{self._case.number}"
        event = SessionStarted(session=session, agent=self._agent, kind="autonomous", started_by="the drill")
        await self._store.commit(start_session(event))
        lease = await self._claim(session)
        flight = await self._work(lease)
        self._pipe.send(lease.session)
        while not self._pipe.poll():
            await self._store.beat(self._name)
            await self._clock.sleep(LEASE // 5)
        self._pipe.recv()
        self._pipe.send("still")  # It does nothing from here on, so it holds no lock when it is stopped.
        self._pipe.recv()
        self._pipe.send(await self._testimony(lease, flight))
        await self._store.close()

    async def _claim(self, session: str) -> Lease:
        """Claim only its own session: on a busy machine, another lease can expire before its owner is stopped."""
        for _ in range(MAX_CLAIMS):
            for lease in await self._store.claim(self._name, 1, SessionId(session)):
                return lease
            await self._clock.sleep(POLL_INTERVAL)
        raise DrillBroken(f"The drill's worker {self._name} could not claim its session.")

    async def _work(self, lease: Lease) -> InFlight | None:
        """Work up to the moment; return the effect in flight, if any."""
        for number in range(self._case.step):
            await self._step(lease, number)
            await self._store.beat(self._name)
        match self._case.moment:
            case "before an intent":
                return None
            case "parked" | "resident":
                event = SessionParked(state="SLEEPING", resident=self._case.moment == "resident")
                await self._store.commit(park_session(lease, f"{lease.session}/rest", event))
                return None
            case "before an effect" | "before an outcome":
                flight = await self._begin(lease, self._case.step)
        if flight is not None and self._case.moment == "before an outcome":
            self._act(flight)
        return flight

    async def _testimony(self, lease: Lease, flight: InFlight | None) -> Testimony:
        attempts = [await self._beaten(lease)] if self._case.beats_first else []
        attempts += await self._went_on(lease, flight)
        for name, write in _list_writes(lease):
            attempts.append(await _try_write(name, lambda write=write: self._store.commit(write)))
        return attempts if self._case.beats_first else [*attempts, await self._beaten(lease)]

    async def _went_on(self, lease: Lease, flight: InFlight | None) -> Testimony:
        if self._case.moment == "parked":
            wake = wake_session(lease, f"{lease.session}/woken", None, 0)
            return [await _try_write("its waking up", lambda: self._store.commit(wake))]
        if flight is not None:
            if self._case.moment == "before an effect":
                self._act(flight)
            return [await _try_write("its outcome", lambda: self._settle(lease, flight))]
        return [await _try_write("its next step", lambda: self._step(lease, self._case.step))]

    async def _beaten(self, lease: Lease) -> tuple[str, Answer]:
        """A heartbeat after the lease expired must report the session as lost."""
        beat = await self._store.beat(self._name)
        is_lost = beat.remaining_leases is not None and lease not in beat.remaining_leases
        return ("a heartbeat that reported no loss", "refused" if is_lost else "let through")


async def _try_write(description: str, attempt: Callable[[], Awaitable[object]]) -> tuple[str, Answer]:
    try:
        await attempt()
    except LeaseLost:
        return (description, "refused")
    return (description, "let through")


def _list_writes(lease: Lease) -> list[tuple[str, Write]]:
    session = lease.session
    child = SessionStarted(
        session=f"{session}-child",
        agent="drill-child",
        kind="task",
        started_by="the drill",
        parent=session,
        carved=carve(session, AMOUNT, None),
    )
    return [
        ("waking it", wake_session(lease, f"{session}/zombie/woken", None, 0)),
        ("parking it", park_session(lease, f"{session}/zombie/parked", SessionParked(state="SLEEPING"))),
        ("a sub-session", start_child(child, lease)),
        ("ending it", end_session(lease, "ERROR", "error")),
    ]


CASES: Final = 2 * STEPS * len(MOMENTS)


def run(setting: Setting) -> DrillResult:
    cases = [ZombieCase(number) for number in range(CASES if setting.seeds is None else setting.seeds)]
    violations: list[str] = []
    with own_store(setting) as workspace, children(__name__) as processes:
        for start in range(0, len(cases), TOGETHER):
            batch = cases[start : start + TOGETHER]
            setting.progress(start, len(cases), f"stopping and replacing {len(batch)} workers")
            violations += _batch(workspace, processes, batch, apply_unfenced if setting.teeth else apply_write)
        contents = read_store(workspace.url)
        violations += check(contents) + _check_done_once(contents) + _check_acted_once(workspace)
        setting.progress(len(cases), len(cases), "checked")
    counts = {"moments": dict(Counter(case.moment for case in cases)), "events": len(contents.events)}
    return result(DRILL.name, workspace.kind, len(cases), violations, counts)


def _batch(workspace: Workspace, children: Children, cases: Sequence[ZombieCase], applier: Applier) -> list[str]:
    zombies = [children.start(_zombie, workspace, case, applier) for case in cases]
    sessions: list[str] = [zombie.receive() for zombie in zombies]
    parked_sessions = [session for session, case in zip(sessions, cases, strict=True) if case.moment == "parked"]
    asyncio.run(_wake_sessions(workspace, parked_sessions))
    for zombie in zombies:
        zombie.send("stand still")
        zombie.receive()
        zombie.stop()
    time.sleep(1.2 * LEASE / SECOND)
    heir = children.start(_heir, workspace, len(sessions), cases[0])
    ended_sessions = heir.receive()
    for zombie in zombies:
        zombie.send("go on")
        zombie.resume()
    wrong = (
        [] if sorted(ended_sessions) == sorted(sessions) else [f"Only {ended_sessions} of {sessions} were taken over."]
    )
    for case, zombie in zip(cases, zombies, strict=True):
        where = f"The worker of case {case.number}, stopped {case.moment} in step {case.step}, continued"
        testimony: Testimony = zombie.receive()
        wrong += [
            f"{where}, and {description} was let through." for description, answer in testimony if answer != "refused"
        ]
    children.end()
    return wrong


def _check_done_once(contents: StoreContents) -> list[str]:
    """Check that each step of each session was started and settled once, and that no event follows the end."""
    wrong: list[str] = []
    times = Counter((event.kind, event.facts["call"]) for event in contents.events if "call" in event.facts)
    last = {event.stream: event for event in contents.events}
    for stream, event in last.items():
        if stream.endswith("/in"):
            continue
        if event.kind != "session_ended":
            wrong.append(f"The last event of the session is not its end, but the {event}.")
        for number in range(STEPS):
            call = f"{stream.removeprefix('session:')}/{number}"
            counts = times["call_started", call], times["call_settled", call]
            if counts != (1, 1):
                wrong.append(f"The call {call} was started {counts[0]} times and settled {counts[1]} times.")
    return wrong


def _check_acted_once(workspace: Workspace) -> list[str]:
    """Check in the outside world that no effect happened twice."""
    times = Counter((workspace.folder / EFFECTS).read_text().splitlines())
    return [f"The call {call} had its effect {count} times." for call, count in times.items() if count > 1]


async def _wake_sessions(workspace: Workspace, sessions: Sequence[str]) -> None:
    async with workspace.open_store(LEASE) as store:
        for session in sessions:
            await store.commit(post_message(session, f"{session}/hello", b"Are you there?", "ada"))


async def _zombie(pipe: Pipe, workspace: Workspace, case: ZombieCase, applier: Applier) -> None:
    await Zombie(pipe, workspace, case, applier).live()


async def _heir(pipe: Pipe, workspace: Workspace, count: int, first: ZombieCase) -> None:
    pipe.send(await Heir(workspace, f"heir-{first.number}", first.agent, apply_write).take_over(count))


DRILL: Final = Drill("zombie", "A worker that continues after its lease expired cannot write anything.", run)
