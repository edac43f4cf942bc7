"""News for pages: in time, never too often, and at nobody's cost."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

from halter.core.clock import SECOND
from halter.dashboard.page import (
    MAX_NAMED_STREAMS,
    MAX_REFRESH_INTERVAL,
    MIN_REFRESH_INTERVAL,
    FeedChanges,
    LiveFeed,
    PageListener,
)
from halter.runtime.feed import Bus
from halter.testing.world import World


def page(world: World, live: LiveFeed, seen: list[tuple[int, FeedChanges]]) -> asyncio.Task[None]:
    async def look() -> None:
        async with aclosing(live.changes()) as grown:
            async for each in grown:
                seen.append((world.now, each))  # noqa: PERF401  what was seen so far counts

    return world.spawn(look())


async def test_a_page_is_told_which_streams_grew_and_no_more_often_than_it_can_be_read(world: World) -> None:
    live = LiveFeed(Bus(world.journal, world.clock), world.clock)
    seen: list[tuple[int, FeedChanges]] = []
    looking = page(world, live, seen)
    await world.advance(0)
    for number in range(40):
        await world.start(f"s{number}")
        await world.advance(SECOND // 100)
    await world.advance(SECOND)
    moments = [at for at, grown in seen if grown.has_changes]
    assert {stream for _, grown in seen for stream in grown.streams} >= {f"session:s{number}" for number in range(40)}
    assert all(later - before >= MIN_REFRESH_INTERVAL for before, later in pairwise(moments))
    looking.cancel()


async def test_a_page_is_told_from_time_to_time_that_what_it_shows_is_older(world: World) -> None:
    live = LiveFeed(Bus(world.journal, world.clock), world.clock)
    seen: list[tuple[int, FeedChanges]] = []
    looking = page(world, live, seen)
    await world.advance(3 * MAX_REFRESH_INTERVAL)
    assert len(seen) >= 2
    assert not any(grown.has_changes for _, grown in seen)
    looking.cancel()


async def test_nothing_listens_any_more_when_the_last_page_is_gone(world: World) -> None:
    live = LiveFeed(Bus(world.journal, world.clock), world.clock)
    pages = [page(world, live, []) for _ in range(3)]
    await world.advance(SECOND)
    assert live.pages == 3
    assert "halter-dashboard" in {task.get_name() for task in asyncio.all_tasks()}
    for looking in pages:
        looking.cancel()
    await world.advance(SECOND)
    assert live.pages == 0
    assert "halter-dashboard" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_page_that_takes_nothing_costs_a_set_of_names_and_is_told_that_all_may_be_new(world: World) -> None:
    live = LiveFeed(Bus(world.journal, world.clock), world.clock)
    with live.listen() as stalled:
        await world.advance(0)
        for number in range(MAX_NAMED_STREAMS + 50):
            await world.start(f"s{number}")
        await world.advance(SECOND)
        assert stalled.drain() == FeedChanges(everything=True)
        assert stalled.drain() == FeedChanges()


def test_an_ear_that_was_told_of_everything_keeps_no_names() -> None:
    ear = PageListener()
    ear.mark_all_changed()
    assert ear.change_event.is_set()
    assert ear.drain().has_changes
    assert not ear.change_event.is_set()
