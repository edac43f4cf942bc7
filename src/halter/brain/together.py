"""Several things at once, and news of what others do meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from halter.core.ports import Store

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


@asynccontextmanager
async def heard(store: Store) -> AsyncGenerator[asyncio.Event]:
    """Set an event whenever something is written, by anybody."""
    news = asyncio.Event()

    async def listen() -> None:
        async for _ in store.changes():
            news.set()

    listening = asyncio.create_task(listen(), name="halter-rest")
    try:
        yield news
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
