"""A review that is stopped in order at any commit, and started again, ends as one that was never stopped.

Ctrl-C and TERM cancel what runs. What is in flight then stays in flight, as after a crash, and the next start resolves
it: a judge is asked again, a playbook continues at its step, and nothing ends as cancelled.
"""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from halter.core.clock import SECOND
from halter.core.events import CallSettled, RequestSettled
from halter.core.ports import Lease
from halter.guard.halts import Departures
from halter.testing.fakes import Crash
from halter.testing.world import World
from tests.crash.test_task_crashes import check_outcome, make_office
from tests.story.tasks import Office


async def review_with_stop(world: World, office: Office) -> None:
    process = office.start(office.home / "clerk")
    while not (rows := await office.runs()) or rows[-1].ended_at is None:
        if world.store.stop_requested.is_set():
            world.store.stop_requested.clear()
            await world.clock.sleep(SECOND // 2)
            process.cancel()
            await asyncio.wait([process])
            process = office.start(office.home / "clerk")
        await world.clock.sleep(SECOND // 100)
    process.cancel()


def stop_everywhere(
    home: Path, every: int, departures: type[Departures] = Departures
) -> Iterator[tuple[World, Office]]:
    """Review a document again and again, each time with a stop after another commit; the first has none."""
    commits = 0
    for number in itertools.count():
        commit = 0 if number == 0 else 1 + (number - 1) * every
        if commit > commits:
            return
        with World(crash=Crash(commit, "stop") if commit else None, orderly=True) as world:
            office = make_office(home, number, world, takes="1s")
            office.departures = departures()
            world.run(review_with_stop(world, office))
            commits = commits or world.commits
            yield world, office


async def check_nothing_was_cancelled(world: World, office: Office) -> None:
    (row,) = (await office.runs())[-1:]
    settlements = [
        stored.event
        for stored in await office.events(row.session)
        if isinstance(stored.event, CallSettled | RequestSettled)
    ]
    assert [event for event in settlements if event.outcome == "cancelled"] == []
    assert not (await world.session(row.session)).in_flight


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_a_review_that_is_stopped_at_any_commit_ends_as_one_that_was_not(every: int, tmp_path: Path) -> None:
    stops = 0
    for world, office in stop_everywhere(tmp_path, every):
        world.run(check_outcome(world, office))
        world.run(check_nothing_was_cancelled(world, office))
        stops += 1
    assert stops * every > 40


class SettlingDepartures(Departures):
    """The teeth: as in 1.0.0, a stop settles what is in flight as cancelled."""

    def includes(self, lease: Lease) -> bool:
        return False


def test_a_process_that_settles_what_it_leaves_is_caught(tmp_path: Path) -> None:
    caught = 0
    for world, office in stop_everywhere(tmp_path, 3, SettlingDepartures):
        try:
            world.run(check_outcome(world, office))
            world.run(check_nothing_was_cancelled(world, office))
        except AssertionError:
            caught += 1
    assert caught
