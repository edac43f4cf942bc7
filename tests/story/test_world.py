"""A day of an agent in virtual time."""

import asyncio
from pathlib import Path

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import CallStarted, SessionParked, SessionWoken, WakePosted
from halter.core.ids import WorkerId, inbox_stream
from halter.core.money import BudgetRow, Caps, Spender, make_legs
from halter.core.ports import Lease, Query
from halter.core.text import decode_body
from halter.guard.ledger import ActualResult
from halter.state.lifecycle import end_session, park_session, post_wake, wake_session
from halter.testing.fakes import Crash, Crashed, CrashKind, HoldTaken, hold
from halter.testing.world import VIRTUAL_START, Deadlock, World

LEASE = 15 * SECOND


class Diary:
    """An agent that wakes every few minutes, spends a little, and notes when it was awake."""

    def __init__(self, world: World, every: int, until: int) -> None:
        self.world = world
        self.every = every
        self.until = until
        self.notes: list[tuple[str, int]] = []

    async def turn(self, lease: Lease) -> None:
        world, turn = self.world, f"{lease.session}/{lease.generation}"
        self.notes.append((lease.session, world.now - VIRTUAL_START))
        await world.store.commit(wake_session(lease, f"{turn}/wake", "timer", 0))
        spender = Spender(lease.session, "diarist")
        call = CallStarted(call=f"{turn}/call", tool="look", legs=make_legs(Caps(), spender, world.now, usd=20))
        outcome = await hold(world.ledger, lease, call)
        assert isinstance(outcome, HoldTaken)
        await world.ledger.settle(lease, outcome.flight, ActualResult("ok", usd=10))
        if world.now >= self.until:
            await world.store.commit(end_session(lease, "COMPLETED", "completed"))
            return
        rest = SessionParked(state="SLEEPING", wake_at=world.now + self.every)
        await world.store.commit(park_session(lease, f"{turn}/park", rest))


async def run_a_day(world: World) -> list[tuple[str, int]]:
    diary = Diary(world, 5 * MINUTE, VIRTUAL_START + DAY)
    for name in ("a", "b", "c"):
        await world.start(name)
    world.work(diary.turn)
    await world.advance(DAY)
    return diary.notes


async def test_for_a_whole_day_sleepers_wake_exactly_on_time(world: World) -> None:
    notes = await run_a_day(world)
    on_time = list(range(0, DAY + 1, 5 * MINUTE))
    for name in ("a", "b", "c"):
        assert [at for session, at in notes if session == name] == on_time
        session = await world.session(name)
        assert (session.state, session.ended_at, session.spent.usd) == (
            "COMPLETED",
            VIRTUAL_START + DAY,
            10 * len(on_time),
        )
    days = await world.store.ask(Query("budgets", BudgetRow))
    assert {row.window: (row.spent, row.held) for row in days if row.scope == "fleet"} == {
        "day/2026-01-01": (3 * 10 * (len(on_time) - 1), 0),
        "day/2026-01-02": (3 * 10, 0),
    }


def day_of(seed: int, path: Path | None = None, workers: int = 1) -> tuple[list[tuple[str, int]], list[bytes]]:
    with World(seed, path=path) as world:
        diary = Diary(world, HOUR, VIRTUAL_START + 6 * HOUR)

        async def main() -> None:
            for name in ("a", "b", "c"):
                await world.start(name)
            for _ in range(workers):
                world.work(diary.turn)
            await world.advance(6 * HOUR)

        world.run(main())
        return diary.notes, [event.hash for event in world.history]


def test_a_day_replays_from_its_seed_to_the_last_hash() -> None:
    assert day_of(17) == day_of(17)


def test_a_day_with_many_workers_replays_wherever_things_lie_in_memory() -> None:
    first = day_of(2, workers=5)
    for size in range(1, 6):
        elsewhere = [bytearray(1000 * size) for _ in range(50)]
        assert day_of(2, workers=5) == first
        assert elsewhere


def test_other_seeds_wake_those_who_are_due_together_in_another_order() -> None:
    orders = [[session for session, _ in day_of(seed)[0]] for seed in range(5)]
    assert len({tuple(order) for order in orders}) > 1


def test_memory_and_sqlite_tell_the_same_story(tmp_path: Path) -> None:
    assert day_of(3, tmp_path / "world.db") == day_of(3)


class Sleeper:
    """An agent that notes its wake cause and its messages, and sleeps for another day."""

    def __init__(self, world: World, wake_on: tuple[str, ...] = ()) -> None:
        self.world = world
        self.wake_on = wake_on
        self.notes: list[tuple[int, list[str]]] = []

    async def turn(self, lease: Lease) -> None:
        world, turn = self.world, f"{lease.session}/{lease.generation}"
        inbox = await world.events(inbox_stream(lease.session))
        event = (await world.session(lease.session)).inbox_seen
        self.notes.append((world.now - VIRTUAL_START, [decode_body(stored.body or b"") for stored in inbox[event:]]))
        await world.store.commit(
            wake_session(lease, f"{turn}/wake", "message" if inbox[event:] else "timer", len(inbox))
        )
        rest = SessionParked(state="SLEEPING", inbox_seen=len(inbox), wake_at=world.now + DAY, wake_on=self.wake_on)
        await world.store.commit(park_session(lease, f"{turn}/park", rest))


async def test_a_message_wakes_a_sleeper_early(world: World) -> None:
    session = await world.start()
    sleeper = Sleeper(world)
    world.work(sleeper.turn)
    await world.advance(3 * HOUR)
    await world.send_message(session, "Good morning.")
    await world.advance(2 * DAY)
    assert sleeper.notes == [(0, []), (3 * HOUR, ["Good morning."]), (3 * HOUR + DAY, []), (3 * HOUR + 2 * DAY, [])]


async def test_a_signal_wakes_only_a_sleeper_that_asked_for_it(world: World) -> None:
    session = await world.start()
    sleeper = Sleeper(world, wake_on=("smoke", "water"))
    world.work(sleeper.turn)
    for hour, name in enumerate(("draught", "smoke", "noise"), start=1):
        await world.advance(HOUR)
        signal = WakePosted(cause="signal", origin="sensor", sender="sensor", name=name)
        await world.store.commit(post_wake(session, f"{hour}", signal, name.encode()))
    await world.advance(0)
    assert sleeper.notes == [(0, []), (2 * HOUR, ["draught", "smoke"])]


async def test_parking_is_refused_when_the_inbox_has_grown(world: World) -> None:
    session = await world.start()
    numbers: list[int] = []

    async def turn(lease: Lease) -> None:
        await world.store.commit(wake_session(lease, "wake", "timer", 0))
        await world.send_message(session, "One more thing!")
        for text in (0, 1):
            rest = SessionParked(state="SLEEPING", inbox_seen=text)
            numbers.append(len((await world.store.commit(park_session(lease, f"park {text}", rest))).events))

    world.work(turn)
    await world.advance(HOUR)
    assert numbers == [0, 1]
    assert (await world.session(session)).state == "SLEEPING"


async def test_a_wake_that_fell_due_while_nothing_ran_fires_once_after_the_restart(world: World) -> None:
    session = await world.start()
    sleeper = Sleeper(world)
    world.work(sleeper.turn)
    await world.advance(HOUR)
    world.crash()
    await world.advance(7 * DAY)
    await world.restart()
    world.work(sleeper.turn)
    await world.advance(0)
    assert sleeper.notes == [(0, []), (7 * DAY + HOUR, [])]
    assert (await world.session(session)).wake_at == VIRTUAL_START + 8 * DAY + HOUR


async def test_what_a_crashed_worker_left_is_taken_over_after_its_lease_with_the_next_generation(world: World) -> None:
    session = await world.start()
    claims: list[tuple[int, str, int]] = []

    async def turn(lease: Lease) -> None:
        claims.append((world.now - VIRTUAL_START, lease.worker, lease.generation))
        await world.store.commit(wake_session(lease, f"wake {lease.generation}", None, 0))
        await world.clock.sleep(DAY)

    world.work(turn)
    await world.advance(MINUTE)
    world.crash()
    await world.restart()
    world.work(turn)
    await world.advance(HOUR)
    assert [(worker, generation) for _, worker, generation in claims] == [("worker-1", 1), ("worker-2", 2)]
    assert MINUTE + LEASE - 5 * SECOND <= claims[1][0] <= MINUTE + LEASE + 5 * SECOND
    zombie = Lease(session, WorkerId("worker-1"), 1)
    with pytest.raises(LeaseLost):
        await world.store.commit(wake_session(zombie, "back again", None, 0))
    woken = [stored for stored in world.history if isinstance(stored.event, SessionWoken)]
    assert [stored.generation for stored in woken] == [1, 2]


async def test_the_lease_of_a_long_turn_is_renewed_while_its_worker_lives(world: World) -> None:
    await world.start()
    generations: list[int] = []

    async def turn(lease: Lease) -> None:
        generations.append(lease.generation)
        await world.clock.sleep(HOUR)
        await world.store.commit(end_session(lease, "COMPLETED", "completed"))

    world.work(turn)
    world.work(turn)
    await world.advance(2 * HOUR)
    assert generations == [1]


async def test_a_dead_process_ends_and_can_do_nothing_more(world: World) -> None:
    survived: list[str] = []

    async def stubborn() -> None:
        try:
            while True:
                await world.clock.sleep(SECOND)
                await world.start()
        finally:
            with pytest.raises(Crashed):
                await world.start()
            survived.append("its last words")

    task = world.spawn(stubborn())
    await world.advance(10 * SECOND)
    world.crash()
    written = len(world.history)
    await world.advance(HOUR)
    assert task.done()
    assert survived == ["its last words"]
    with pytest.raises(Crashed):
        await world.send_message("anybody", "there?")
    await world.restart()
    await world.start()
    assert len(world.history) == written + 1


@pytest.mark.parametrize(
    ("kind", "error", "written", "dead"),
    [("before", Crashed, 1, True), ("after", Crashed, 2, True), ("answer_lost", StoreUnavailable, 2, False)],
)
def test_a_planned_crash_befalls_exactly_its_commit(
    kind: CrashKind, error: type[BaseException], written: int, *, dead: bool
) -> None:
    async def two_sessions() -> None:
        await world.start("one")
        await world.start("two")

    with World(crash=Crash(2, kind)) as world:
        with pytest.raises(error):
            world.run(two_sessions())
        assert [event.stream for event in world.history] == ["session:one", "session:two"][:written]
        assert [event.stream for event in world.acknowledged] == ["session:one"]
        assert world.store.dead == dead


def test_a_write_whose_answer_was_lost_answers_when_it_is_repeated_and_is_written_once() -> None:
    async def main() -> None:
        with pytest.raises(StoreUnavailable):
            await world.start("one")
        await world.start("one")

    with World(crash=Crash(1, "answer_lost")) as world:
        world.run(main())
        assert len(world.history) == len(world.acknowledged) == 1


async def test_no_except_exception_survives_a_crash(world: World) -> None:
    steps: list[str] = []

    async def careless() -> None:
        for step in range(100):
            try:
                await world.start()
                steps.append(f"did {step}")
            except Exception:  # noqa: BLE001  this is the carelessness that must not help
                steps.append("carried on")
            if step == 3:
                world.crash()

    await asyncio.wait([world.spawn(careless())])
    assert steps == ["did 0", "did 1", "did 2", "did 3"]


def test_a_task_that_fails_fails_the_run_with_its_own_error() -> None:
    async def fail() -> None:
        await world.clock.sleep(SECOND)
        raise ValueError("The kettle is empty.")

    async def main() -> None:
        world.spawn(fail())
        await world.advance(DAY)

    with World() as world:
        with pytest.raises(ValueError, match="kettle"):
            world.run(main())
        assert world.now == VIRTUAL_START + SECOND


def test_a_world_in_which_all_wait_for_each_other_says_so_and_can_still_be_closed() -> None:
    with World() as world, pytest.raises(Deadlock):
        world.run(asyncio.Event().wait())
