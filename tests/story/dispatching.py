"""Which dispatcher the stories run on: the embedded one, or with `--dispatcher distributed`, the one of many machines.

The distributed one is the very same code as on PostgreSQL; in virtual time its queue is the shipped one in memory,
which passes the contract suite of the real one.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from halter.core.clock import MINUTE
from halter.core.ports import AgentConcurrency
from halter.dispatch.dispatcher import DEFAULT_CONCURRENCY, DistributedDispatcher, EmbeddedDispatcher, RunningSessions
from halter.runtime.worker import Dispatcher, DispatchMode
from halter.testing.fakes import LocalTicketQueue, SharedTickets
from halter.testing.world import World, quiet_mode

CHOICE = "HALTER_TEST_DISPATCHER"

_tickets: WeakKeyDictionary[World, SharedTickets] = WeakKeyDictionary()


def distributed() -> bool:
    return os.environ.get(CHOICE) == "distributed"


def tickets_of(world: World) -> SharedTickets:
    """What all workers of a world share."""
    return _tickets.setdefault(world, SharedTickets())


def mode_of(world: World) -> DispatchMode:
    """How processes of a world run agents."""
    if not distributed():
        return quiet_mode(world.lease)

    def dispatch(
        sessions: RunningSessions, agents: Callable[[], AgentConcurrency], versions: Mapping[str, str]
    ) -> Dispatcher:
        return DistributedDispatcher(sessions, agents, LocalTicketQueue(tickets_of(world), versions))

    return replace(quiet_mode(world.lease), kind="worker", dispatch=dispatch, concurrency=DEFAULT_CONCURRENCY)


def dispatcher(
    world: World, sessions: RunningSessions, agents: tuple[str, ...], together: int = DEFAULT_CONCURRENCY
) -> Dispatcher:
    """Make the dispatcher of one process by itself."""
    sessions.polling_interval = MINUTE
    values: AgentConcurrency = dict.fromkeys(agents)
    if not distributed():
        return EmbeddedDispatcher(sessions, lambda: values, together)
    queue = LocalTicketQueue(tickets_of(world), dict.fromkeys(agents, "1"))
    return DistributedDispatcher(sessions, lambda: values, queue, together)
