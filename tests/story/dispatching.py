"""Which dispatcher the stories run on: the embedded one, or with `--dispatcher distributed`, the one of many machines.

The distributed one is the very same code as on PostgreSQL; in virtual time its queue is the shipped one in memory,
which passes the contract suite of the real one.
"""

import os
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from halter.app.working import Dispatch, Manner
from halter.core.clock import MINUTE
from halter.core.ports import Agents
from halter.dispatch.distributed import CONCURRENCY, Distributed
from halter.dispatch.embedded import Embedded
from halter.dispatch.sessions import Sessions
from halter.testing.fleet import HEARTBEAT, quiet_manner
from halter.testing.queue import LocalQueue, Tickets
from halter.testing.world import World

CHOICE = "HALTER_TEST_DISPATCHER"

_tickets: WeakKeyDictionary[World, Tickets] = WeakKeyDictionary()


def distributed() -> bool:
    return os.environ.get(CHOICE) == "distributed"


def tickets_of(world: World) -> Tickets:
    """What all workers of a world share."""
    return _tickets.setdefault(world, Tickets())


def manner_of(world: World) -> Manner:
    """How processes of a world run agents."""
    if not distributed():
        return quiet_manner()

    def dispatch(sessions: Sessions, agents: Callable[[], Agents], versions: Mapping[str, str]) -> Dispatch:
        return Distributed(sessions, agents, LocalQueue(tickets_of(world), versions))

    return Manner("worker", dispatch, CONCURRENCY, heartbeat=HEARTBEAT, polling_interval=MINUTE)


def dispatcher(world: World, sessions: Sessions, agents: tuple[str, ...], together: int = CONCURRENCY) -> Dispatch:
    """Make the dispatcher of one process by itself."""
    sessions.polling_interval = MINUTE
    wanted: Agents = dict.fromkeys(agents)
    if not distributed():
        return Embedded(sessions, lambda: wanted, together)
    queue = LocalQueue(tickets_of(world), dict.fromkeys(agents, "1"))
    return Distributed(sessions, lambda: wanted, queue, together)
