"""When to look for sessions that are due."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from halter.brain.together import heard
from halter.core.clock import SECOND, Clock
from halter.core.ids import WorkerId
from halter.core.ports import EVERY_STREAM, Change, Query, Store
from halter.dispatch.clocks import StoreTime

LOOK: Final = 5 * SECOND
"""How often it is looked without a hint: for sessions whose owner died, and because hints may be lost."""

UNSURE: Final = SECOND // 50
"""How far off the store's time may be as it is told here."""


class _Due(msgspec.Struct, frozen=True):
    due_at: int | None


async def next_look(store: Store, clock: Clock, worker: WorkerId, at_most: int = LOOK) -> int:
    """Tell for how long nothing is due, and nobody's lease runs out.

    Whoever only believes to know the store's time may come a little early, and so looks again a little later.
    """
    now, unsure = clock.now(), UNSURE if isinstance(clock, StoreTime) else 0
    (due,) = await store.ask(Query("next_due", _Due, {"now": now - unsure}))
    (lapse,) = await store.ask(Query("next_lapse", _Due, {"now": now - unsure, "worker": worker}))
    moments = [at for at in (due.due_at, None if lapse.due_at is None else lapse.due_at + 1) if at is not None]
    return min([at_most, *(max(unsure // 4, at - now) for at in moments)])


@asynccontextmanager
async def maybe_due(store: Store, news: asyncio.Event) -> AsyncGenerator[None]:
    """Set an event whenever somebody writes something by which a session may have become due."""
    async with heard(store, _may_be_due, news):
        yield


def _may_be_due(change: Change) -> bool:
    """An inbox grew, a session began, or nobody knows."""
    return change.stream == EVERY_STREAM or change.stream.endswith("/in") or change.head == 1
