"""A process that runs agents, as one of the workers of its store: what it takes on, and what others know of it."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from halter.app.living import Living
from halter.app.opened import App, told_time
from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError
from halter.core.ids import SessionId
from halter.core.ports import Agents, Beat, Lease, Query, Store
from halter.core.workers import About, WorkerRow
from halter.dispatch.clocks import StoreTime
from halter.dispatch.due import LOOK
from halter.dispatch.embedded import TOGETHER, Embedded
from halter.dispatch.sessions import Sessions
from halter.dispatch.tending import HEARTBEAT
from halter.dispatch.versions import in_force

DRAIN: Final = 30 * SECOND
"""How long what runs may take to come to its rest when a worker is to end."""


class Dispatch(Protocol):
    """Brings the sessions that are due to whoever attends them."""

    async def run(self) -> None:
        """Do so until cancelled."""
        ...


Dispatching = Callable[[Sessions, Callable[[], Agents], Mapping[str, str]], Dispatch]
"""Makes a dispatcher for the sessions of some agents; their versions are named beside them."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a process runs agents: what it is called, how its sessions come to it, how many at once."""

    kind: str
    dispatch: Dispatching
    concurrency: int
    drain: int = DRAIN
    heartbeat: int = HEARTBEAT
    polling_interval: int = LOOK
    """How often due sessions are looked for without a hint."""


def embedded(kind: str = "up") -> Manner:
    """Let a process claim what is due for itself."""
    return Manner(kind, lambda sessions, agents, _: Embedded(sessions, agents, TOGETHER), TOGETHER)


def distributed(url: str, clock: Clock, concurrency: int, drain: int = DRAIN) -> Manner:
    """Let tickets come to a process from the queue that all workers on a PostgreSQL store share."""
    from halter.dispatch.distributed import Distributed
    from halter.dispatch.procrastinate import ProcrastinateQueue, prepare

    prepare(url)

    def dispatch(sessions: Sessions, agents: Callable[[], Agents], versions: Mapping[str, str]) -> Dispatch:
        return Distributed(sessions, agents, ProcrastinateQueue(url, clock, versions), concurrency)

    return Manner("worker", dispatch, concurrency, drain)


class Drained(Exception):
    """Everything rests, and the process may end."""


class WorkerHands:
    """What a worker has in its hands, says of itself, and hears with each heartbeat."""

    def __init__(
        self,
        app: App,
        sessions: Sessions,
        manner: Manner,
        agents: Mapping[str, Living],
        tell: Callable[[str, str], None],
    ) -> None:
        self.refused = asyncio.Event()
        """Set when this machine must run nothing."""
        self._app = app
        self._sessions = sessions
        self._manner = manner
        self._living = agents
        self._tell = tell
        self._started_at = 0
        self._waiting: frozenset[str] = frozenset()
        self._refusal = ""

    async def enter(self, store: Store) -> None:
        """Be known to the others before anything is taken, and know them."""
        self._started_at = self._app.clock.now()
        await self.beaten(await store.beat(self._sessions.worker, {}, self.about()))
        self.demand_clock()

    def demand_clock(self) -> None:
        """Refuse to run anything on a machine that tells another time than the store."""
        if self._refusal:
            raise ConfigError(self._refusal)

    def agents(self) -> Agents:
        """Name the agents whose sessions are taken here, and how many tasks of each may be awake everywhere."""
        return {name: living.concurrency for name, living in self._living.items() if name not in self._waiting}

    def versions(self) -> Mapping[str, str]:
        """Name the versions of all agents here."""
        return {name: living.version for name, living in self._living.items()}

    def leases(self) -> frozenset[Lease]:
        """Name the sessions that are attended here."""
        return self._sessions.leases()

    def lost(self, leases: frozenset[Lease]) -> None:
        """Stop attending what another process has by now."""
        self._sessions.lost(leases)

    def snapshots(self) -> Mapping[SessionId, bytes]:
        """Tell the hot state of the sessions that stay here."""
        return {
            session: snapshot() for living in self._living.values() for session, snapshot in living.snapshots.items()
        }

    def about(self) -> str:
        """Say what others should know."""
        from halter import __version__

        return About(
            kind=self._manner.kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started_at=self._started_at,
            agents=dict(self.versions()),
            waiting=tuple(sorted(self._waiting)),
            concurrency=self._manner.concurrency,
            awake=self._sessions.awake,
            residents=self._sessions.residents,
            closing=self._sessions.closing.is_set(),
            problem=self._refusal,
        ).said()

    async def beaten(self, beat: Beat) -> None:
        """Compare the clocks, and see which agents are here in the version that is in force."""
        if isinstance(self._app.clock, StoreTime):
            await told_time(self._app.store, self._app.clock)
            self._refusal = self._app.clock.refusal()
            if self._refusal:
                self.refused.set()
        workers = await self._sessions.store.ask(Query("all_workers", WorkerRow))
        newer = {name for name, mine in self.versions().items() if in_force(workers, name, beat.now) not in ("", mine)}
        for name in sorted(newer - self._waiting):
            self._tell(name, OLDER)
        for name in sorted(self._waiting - newer):
            self._tell(name, NEWEST)
        self._waiting = frozenset(newer)


OLDER: Final = (
    "Another worker has a newer version of this agent's files, so its sessions go on there and none is taken here. "
    "Bring this folder to the same version and start again; if all who have the newer one are gone, it goes on here."
)
NEWEST: Final = "No other worker has a newer version of this agent's files any more: its sessions are taken here again."
