"""What is not left undone: it comes to its end, whoever waits for it."""

import asyncio
import gc
from typing import Any

import pytest

from halter.core.errors import LeaseLost
from halter.guard.halts import run_shielded


async def test_it_continues_when_the_waiting_task_is_cancelled() -> None:
    go_on, event = asyncio.Event(), asyncio.Event()

    async def act() -> None:
        await go_on.wait()
        event.set()

    waiting = asyncio.create_task(run_shielded(act()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    await event.wait()


async def test_whoever_waits_hears_what_went_wrong() -> None:
    async def act() -> None:
        raise LeaseLost("It belongs to somebody else.")

    with pytest.raises(LeaseLost):
        await run_shielded(act())


async def test_an_error_while_no_task_waits_is_ignored() -> None:
    fields: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: fields.append(context))
    go_on, event = asyncio.Event(), asyncio.Event()

    async def act() -> None:
        event.set()
        await go_on.wait()
        raise LeaseLost("It belongs to somebody else.")

    waiting = asyncio.create_task(run_shielded(act()))
    await event.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert fields == []
