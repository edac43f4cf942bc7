"""Items that work makes for a reader, one at a time: the next one is made only when it is asked for."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from halter.loop.concurrency import cancel_and_wait

T = TypeVar("T")

Emit = Callable[[Any], Awaitable[None]]
"""Passes on one item of a stream, and waits until the next one is asked for."""


async def stream_from(work: Callable[[Callable[[T], Awaitable[None]]], Awaitable[object]]) -> AsyncGenerator[T]:
    """Run `work` in its own task, yield the items that it emits, and raise its error.

    If the caller stops reading before the end, the task is cancelled. A cancelled request is settled at its hold.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[T, asyncio.Future[None]] | None] = asyncio.Queue()
    waiting: set[asyncio.Future[None]] = set()
    is_closed = False

    async def emit(item: T) -> None:
        if is_closed:
            raise asyncio.CancelledError
        is_asked = loop.create_future()
        waiting.add(is_asked)
        items.put_nowait((item, is_asked))
        try:
            await is_asked
        finally:
            waiting.discard(is_asked)

    task = asyncio.ensure_future(work(emit))
    task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (entry := await items.get()) is not None:
            item, is_asked = entry
            yield item
            if not is_asked.done():
                is_asked.set_result(None)
        task.result()
    finally:
        is_closed = True
        for is_asked in waiting:
            is_asked.cancel()
        await cancel_and_wait(task)
