"""A queue of tickets in memory, for workers of one world: it passes the same contract suite as the real one."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halter.core.ports import Ticket
from halter.dispatch.distributed import Serve


class Tickets:
    """What all workers of a world share: the tickets of each version of each agent that wait."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, Ticket]] = deque()
        self._ears: list[asyncio.Event] = []

    def put(self, tickets: Sequence[tuple[str, Ticket]]) -> None:
        """Put tickets in, and tell everybody."""
        self.waiting.extend(tickets)
        for ear in self._ears:
            ear.set()

    def take(self, versions: Mapping[str, str]) -> Ticket | None:
        """Take the oldest ticket out that somebody with these versions may have."""
        for place, (version, ticket) in enumerate(self.waiting):
            if versions.get(ticket.agent) == version:
                del self.waiting[place]
                return ticket
        return None

    def ear(self) -> asyncio.Event:
        """Hear of new tickets from now on."""
        self._ears.append(ear := asyncio.Event())
        return ear


class LocalQueue:
    """One worker's hand on them."""

    def __init__(self, tickets: Tickets, versions: Mapping[str, str]) -> None:
        self._tickets = tickets
        self._versions = versions

    def put(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        """Put tickets in; memory has no transaction that could still fail after this."""
        self._tickets.put([(self._versions[ticket.agent], ticket) for ticket in tickets])

    async def hand_out(self, serve: Serve, concurrency: int) -> None:
        """Serve tickets as they come, so many at once, until cancelled."""
        ear, running = self._tickets.ear(), set[asyncio.Task[None]]()
        try:
            while True:
                ear.clear()
                while len(running) < concurrency and (ticket := self._tickets.take(self._versions)) is not None:
                    task = asyncio.create_task(_served(serve, ticket))
                    running.add(task)
                    task.add_done_callback(_done(running, ear))
                await ear.wait()
        finally:
            for task in running:
                task.cancel()


async def _served(serve: Serve, ticket: Ticket) -> None:
    await serve(ticket)


def _done(running: set[asyncio.Task[None]], ear: asyncio.Event) -> Callable[[asyncio.Task[None]], None]:
    def done(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled():
            # Whoever serves knows what went wrong: here it is nobody's affair.
            task.exception()
        ear.set()

    return done
