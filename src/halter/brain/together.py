"""Several things at once, and news of what others do meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from halter.core.clock import SECOND
from halter.core.ports import Change, Store

T = TypeVar("T")


async def together(acts: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> Sequence[T]:
    """Do several things at once; if one fails, the others are stopped, and it is its failure that is told."""
    if len(acts) == 1:
        return [await acts[0]()]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(act()) for act in acts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def until_first(acts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do several things at once until the first of them is done; the others are then stopped."""
    tasks = [asyncio.ensure_future(act) for act in acts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def demand_wanted() -> None:
    """Stop here if whoever runs this was told to stop, whatever else went wrong on the way."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _any(_: Change) -> bool:
    return True


@asynccontextmanager
async def heard(
    store: Store, matters: Callable[[Change], bool] = _any, news: asyncio.Event | None = None
) -> AsyncGenerator[asyncio.Event]:
    """Set an event whenever something is written that matters, by anybody, from the first moment of the block on."""
    news, listens = news or asyncio.Event(), asyncio.Event()

    async def listen() -> None:
        # Nobody else runs between this and the moment at which the store knows of it.
        listens.set()
        async for change in store.changes():
            if matters(change):
                news.set()

    listening = asyncio.create_task(listen(), name="halter-rest")
    try:
        await listens.wait()
        yield news
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


async def either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Wait for the first of two events."""
    waits = [asyncio.create_task(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def until(news: asyncio.Event, at_most: int) -> None:
    """Wait for news, or so many microseconds; after that, what was heard counts as heard."""
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most / SECOND):
            await news.wait()
    news.clear()
