"""Sessions of many processes on many machines, over one store.

Whoever looks finds what is due and what a dead worker left, and offers it: in one transaction, a ticket for each goes
into a queue that all workers share. Whoever takes a ticket out claims its session with it. The lease alone decides who
runs: a ticket that comes twice, late or not at all does no harm.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from halter.brain.together import together, until, until_first
from halter.core.clock import SECOND
from halter.core.ports import Agents, Offered, Ticket
from halter.dispatch.due import maybe_due, next_look
from halter.dispatch.sessions import Sessions

CONCURRENCY: Final = 100
"""How many sessions are awake at once in one worker. Those that stay there while they sleep are not counted."""
SOON: Final = SECOND // 20
"""How soon it is looked again when there may be more to offer, or another process was offering."""

Serve = Callable[[Ticket], Awaitable[None]]


class Queue(Protocol):
    """What all workers share. One contract suite holds for all that implement it."""

    def put(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        """Put tickets in, in the transaction of a connection: they are there if it is committed, and not before."""
        ...

    async def hand_out(self, serve: Serve, concurrency: int) -> None:
        """Serve tickets of this worker's agents as they come, so many at once, until cancelled."""
        ...


class Distributed:
    """Runs sessions of some agents in this process, wherever they became due."""

    def __init__(
        self, sessions: Sessions, agents: Callable[[], Agents], queue: Queue, concurrency: int = CONCURRENCY
    ) -> None:
        self._sessions = sessions
        self._agents = agents
        self._queue = queue
        self._concurrency = concurrency

    async def run(self) -> None:
        """Offer what is due and serve what is offered until cancelled; what is under way is then stopped."""
        try:
            await together([self._offer, self._hand_out])
        finally:
            await self._sessions.stop()

    async def _hand_out(self) -> None:
        """Serve tickets until nothing more is to be taken."""
        closing = self._sessions.closing
        await until_first([self._queue.hand_out(self._serve, self._concurrency), _set(closing)])

    async def _offer(self) -> None:
        """Offer as much as there is room for here. Others may take it, who have offered or will offer as much."""
        sessions = self._sessions
        async with maybe_due(sessions.store, sessions.news):
            while True:
                room, agents = sessions.room(self._concurrency), self._agents()
                wanted = room > 0 and agents
                offered = await sessions.store.offer(room, agents, self._queue.put) if wanted else Offered()
                await sessions.watch()
                polling = sessions.polling_interval
                look = await next_look(sessions.store, sessions.clock, sessions.worker, polling)
                await until(sessions.news, min(look, SOON) if offered.more else look)

    async def _serve(self, ticket: Ticket) -> None:
        """Take the session of a ticket, if nobody else has, and wait until there is room for another."""
        sessions = self._sessions
        if sessions.closing.is_set():
            # Nothing is claimed, but the ticket is used up: so it is offered anew, to somebody who stays.
            await sessions.store.claim(sessions.worker, 0, ticket)
            return
        lease = await sessions.fetch(ticket)
        if lease is not None:
            await sessions.placed(lease)


async def _set(event: asyncio.Event) -> None:
    await event.wait()
