"""Tasks that run together, and waits for a change that any process may make."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from halter.core.clock import SECOND
from halter.core.ports import Change, Store, matters_always

T = TypeVar("T")


async def run_together(functions: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> Sequence[T]:
    """Run functions concurrently. If one fails, cancel the others and raise its error."""
    if len(functions) == 1:
        return [await functions[0]()]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(act()) for act in functions]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_until_first(coroutines: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Run coroutines concurrently until the first one finishes, then cancel the others."""
    tasks = [asyncio.ensure_future(act) for act in coroutines]
    try:
        finished_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in finished_tasks:
        task.result()


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Raises the first error of a task."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if another error has hidden that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@asynccontextmanager
async def watch_changes(
    store: Store, matters: Callable[[Change], bool] = matters_always, change_event: asyncio.Event | None = None
) -> AsyncGenerator[asyncio.Event]:
    """Yield an event that is set whenever a process writes a relevant change, from the start of the block on."""
    change_event, is_listening = change_event or asyncio.Event(), asyncio.Event()

    async def listen() -> None:
        # No other task runs between this line and the store's subscription.
        is_listening.set()
        async for _ in store.changes(matters):
            change_event.set()

    listener_task = asyncio.create_task(listen(), name="halter-rest")
    try:
        await is_listening.wait()
        yield change_event
    finally:
        await cancel_and_wait(listener_task)


async def wait_for_either(first: asyncio.Event, second: asyncio.Event) -> None:
    wait_tasks = [asyncio.create_task(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(wait_tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait_task in wait_tasks:
            wait_task.cancel()


async def wait_for_change(change_event: asyncio.Event, max_wait: int) -> None:
    """Wait for the event or a timeout in microseconds, then clear the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max_wait / SECOND):
            await change_event.wait()
    change_event.clear()
