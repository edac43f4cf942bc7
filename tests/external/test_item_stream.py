"""Work that streams never runs ahead of its reader: in one loop, from a thread, and between two loops."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest

from halter.external.item_stream import Emit, stream_from
from halter.external.loop_thread import LoopThread

PASSES = 50
"""More passes of a loop than any work here needs for its next item."""


async def let_the_loop_run() -> None:
    for _ in range(PASSES):
        await asyncio.sleep(0)


class Counter:
    """Work that counts, and notes each number when it makes it."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.ending = ""

    async def count(self, emit: Emit) -> None:
        try:
            for number in range(3):
                self.made.append(number)
                await emit(number)
            self.ending = "complete"
        except asyncio.CancelledError:
            self.ending = "cancelled"
            raise


async def test_the_next_item_is_made_only_when_it_is_asked_for() -> None:
    counter = Counter()
    async for item in stream_from(counter.count):
        await let_the_loop_run()
        assert counter.made == [*range(item + 1)]
    assert (counter.made, counter.ending) == ([0, 1, 2], "complete")


def test_the_next_item_for_a_thread_is_made_only_when_it_is_asked_for() -> None:
    counter, thread = Counter(), LoopThread()
    for item in thread.stream(stream_from(counter.count)):
        thread.run(let_the_loop_run())
        assert counter.made == [*range(item + 1)]
    thread.close()
    assert (counter.made, counter.ending) == ([0, 1, 2], "complete")


async def test_the_next_item_for_another_loop_is_made_only_when_it_is_asked_for() -> None:
    counter, thread = Counter(), LoopThread()
    async for item in thread.stream_async(stream_from(counter.count)):
        await thread.start(let_the_loop_run()).wait_async()
        assert counter.made == [*range(item + 1)]
    thread.close()
    assert (counter.made, counter.ending) == ([0, 1, 2], "complete")


async def stop_reading(counter: Counter, _: LoopThread) -> None:
    async with aclosing(stream_from(counter.count)) as items:
        await anext(items)


async def stop_reading_in_a_thread(counter: Counter, thread: LoopThread) -> None:
    items = thread.stream(stream_from(counter.count))
    next(items)
    items.close()


async def stop_reading_in_another_loop(counter: Counter, thread: LoopThread) -> None:
    async with aclosing(thread.stream_async(stream_from(counter.count))) as items:
        await anext(items)


@pytest.mark.parametrize("read", [stop_reading, stop_reading_in_a_thread, stop_reading_in_another_loop])
async def test_a_reader_that_stops_ends_the_work(read: Callable[[Counter, LoopThread], Awaitable[None]]) -> None:
    counter, thread = Counter(), LoopThread()
    await read(counter, thread)
    thread.close()
    assert (counter.made, counter.ending) == ([0], "cancelled")


async def test_work_in_another_task_that_passes_on_an_item_ends_with_its_reader() -> None:
    """A framework's own task or thread makes the items: it must not wait for a reader that is gone."""
    tasks: list[asyncio.Future[None]] = []

    async def work(emit: Emit) -> None:
        tasks.append(asyncio.ensure_future(emit(1)))
        await asyncio.Event().wait()

    async with aclosing(stream_from(work)) as items:
        await anext(items)
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()


@pytest.mark.parametrize("has_reader_stopped", [False, True])
async def test_an_error_of_the_work_reaches_the_reader(*, has_reader_stopped: bool) -> None:
    async def work(emit: Emit) -> None:
        await emit(1)
        raise OSError("the line is cut")

    items: AsyncGenerator[int] = stream_from(work)
    assert await anext(items) == 1
    if has_reader_stopped:
        await items.aclose()
    else:
        with pytest.raises(OSError, match="the line is cut"):
            await anext(items)
