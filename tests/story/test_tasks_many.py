"""Many documents at once: each is worked on once, within the cap, and a document that waits shows why."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import (
    CallSettled,
    CallStarted,
    FindingEmitted,
    ItemQuarantined,
    RequestSettled,
    RequestStarted,
    RunsDelayed,
    RunStarted,
)
from halter.core.money import Leg
from halter.core.ports import Stored
from halter.guard.halts import halt, resume
from halter.testing.world import VIRTUAL_START, World
from tests.story.tasks import DONE, PRICED, SCRIPT, STEP, USED, WORK, Office, all_is_well, paper, watch

pytestmark = pytest.mark.both_dispatchers

CAP = 200_000
"""Cap of all sessions of the watch per day, in micro-dollars."""


def find_most_bound(history: Iterable[Stored], scope: str) -> dict[str, int]:
    """Add up what was spent and held in each window, event by event, and return the maximum."""
    values: dict[str, tuple[Leg, ...]] = {}
    bound, most = defaultdict[str, int](int), defaultdict[str, int](int)
    for stored in history:
        match stored.event:
            case RequestStarted(request=name, legs=legs) | CallStarted(call=name, legs=legs):
                values[name] = tuple(leg for leg in legs if leg.scope == scope and leg.unit == "usd")
                for leg in values[name]:
                    bound[leg.window] += leg.amount
                    most[leg.window] = max(most[leg.window], bound[leg.window])
            case RequestSettled(request=name, charge=charge) | CallSettled(call=name, charge=charge):
                for leg in values.pop(name):
                    bound[leg.window] += (charge.usd if charge else 0) - leg.amount
                    most[leg.window] = max(most[leg.window], bound[leg.window])
            case _:
                pass
    return dict(most)


def read_budgets(path: Path) -> list[tuple[str, int, int]]:
    with closing(sqlite3.connect(path)) as file:
        cursor = file.execute("SELECT window, spent, held FROM budgets WHERE scope = 'trigger:clerk/papers'")
        return sorted(cursor.fetchall())


def read_spent(path: Path) -> int:
    with closing(sqlite3.connect(path)) as file:
        return file.execute("SELECT SUM(usd) FROM spends WHERE trigger = 'clerk/papers'").fetchone()[0]


def test_fifty_documents_at_once_are_each_reviewed_once_within_the_cap_of_each_day(tmp_path: Path) -> None:
    with World(7, path=tmp_path / "store.db", orderly=True) as world:
        world.run(_review_fifty(world, tmp_path))


async def _review_fifty(world: World, home: Path) -> None:
    office = Office(world, home, PRICED)
    folder = office.reviewer(watch(f"max_cost_usd_per_day: {CAP / 1e6}, max_parallel: 4"))
    for number in range(50):
        office.drop(f"{number}.txt", paper(max(number, 1)))
    path, delays = home / "store.db", set[str]()
    for day in range(1, 7):
        # Nothing happens between the evening and the morning, so the clock can skip that time.
        process = office.start(folder)
        await world.advance(3 * MINUTE)
        delays.add((await office.trigger()).delayed)
        process.cancel()
        assert all(spent + held <= CAP for _, spent, held in read_budgets(path))
        await world.advance(VIRTUAL_START + day * DAY - world.now)
    assert len(await office.items()) == 49
    assert await office.states() == {"COMPLETED": 49}
    assert len({item.session for item in await office.items()}) == 49
    assert delays >= {"Running sessions may need the rest of the budget.", ""}
    assert "cost_cap_reached" in {event.why for event in await office.told_of(RunsDelayed)}
    most = find_most_bound(world.history, "trigger:clerk/papers")
    assert len(most) >= 3
    assert max(most.values()) <= CAP
    assert sum(amount for _, amount, _ in read_budgets(path)) == read_spent(path) == 49 * 8 * STEP
    assert sum(isinstance(stored.event, FindingEmitted) for stored in world.history) == 49
    await all_is_well(world)


FAILS = f"""
- finds: 'The document is bad\\.txt\\.'
  repeat: true
  {USED}
  fails: {{kind: Refused, message: this one never works}}
"""


async def test_a_document_that_always_fails_is_left_to_a_person_after_three_attempts(
    world: World, tmp_path: Path
) -> None:
    office = Office(world, tmp_path, PRICED)
    folder = office.reviewer(script=FAILS + SCRIPT)
    office.drop("bad.txt", "This is the one that never works.")
    for number in range(4):
        office.drop(f"{number}.txt", paper(number))
    office.start(folder)
    await world.advance(2 * HOUR)
    assert await office.states() == {"COMPLETED": 4, "ERROR": 3}
    (told,) = await office.told_of(ItemQuarantined)
    (bad,) = [item for item in await office.items() if item.name == "bad.txt"]
    assert (told.item, told.attempts) == (bad.item, 3)
    assert bad.sentence == told.sentence == f"bad.txt was tried 3 times; the last session, {bad.session}, ended ERROR."
    assert (bad.attempts, bad.quarantined_at is not None) == (3, True)
    tried = [event for event in await office.told_of(RunStarted) if event.item == bad.item]
    assert [event.attempt for event in tried] == [1, 2, 3]
    start_times = [(await office.row(event.session)).started_at for event in tried]
    assert start_times[1] - start_times[0] >= 5 * SECOND
    assert start_times[2] - start_times[1] >= 20 * SECOND
    await world.advance(HOUR)
    assert len(await office.runs()) == 7
    await all_is_well(world)


BREAKS = '''
from halter import tool


@tool(level="SAFE", effect="read")
async def stamp() -> str:
    """Break."""
    raise RuntimeError("the stamp is broken")
'''


async def test_a_tool_that_breaks_is_reported_to_the_model_and_does_not_stop_the_watch(
    world: World, tmp_path: Path
) -> None:
    office = Office(world, tmp_path)
    script = "- finds: 'The document is 0.txt'\n  calls: [{tool: stamp}]\n" + DONE
    folder = office.reviewer(script=script, tools=BREAKS, head=WORK)
    for number in range(3):
        office.drop(f"{number}.txt", paper(number))
    office.start(folder)
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 3}
    calls = [call for row in await office.runs() for call in await office.calls(row.session)]
    assert calls == [("stamp", "error")]


async def test_what_failed_by_somebodys_word_is_not_held_against_the_document(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path)
    script = "- finds: 'The document is'\n  takes: 20s\n  repeat: true\n  text: Done.\n"
    office.reviewer(script=script, head=WORK)
    office.drop("a.txt", paper(1))
    office.start(tmp_path / "clerk")
    for number in range(4):
        await world.advance(10 * SECOND)
        await world.store.commit(halt("trigger:clerk/papers", "ada", f"halt {number}"))
        await world.advance(10 * SECOND)
        await world.store.commit(resume("trigger:clerk/papers", "ada", f"resume {number}"))
    await world.advance(MINUTE)
    assert await office.states() == {"HALTED": 4, "COMPLETED": 1}
    (item,) = await office.items()
    assert (item.attempts, item.quarantined_at) == (1, None)
    assert await office.told_of(ItemQuarantined) == []
