"""A process that runs agents: its sessions, its reports to other workers, and retention."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import UNSET

from halter.autonomy.resident import ResidentSession, WatchedSensor
from halter.autonomy.upkeep import MAX_RESTARTS, REST_STATES, RESTART_WINDOW
from halter.core.clock import DAY, HOUR, SECOND, Clock
from halter.core.errors import ConfigError, StoreError
from halter.core.events import SessionWoken, TurnEnded
from halter.core.ids import SessionId
from halter.core.messages import StreamChunk
from halter.core.ports import AgentConcurrency, HeartbeatReply, Lease, Query, Store, Stored
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.core.tools import DEFAULT_TOOL_TIMEOUT
from halter.dispatch.dispatcher import (
    DEFAULT_CONCURRENCY,
    DUE_POLLING_INTERVAL,
    DistributedDispatcher,
    EmbeddedDispatcher,
    RunningSessions,
    find_version_in_force,
    quarantine_session,
)
from halter.dispatch.heartbeat import HEARTBEAT_INTERVAL
from halter.dispatch.store_clock import StoreClock
from halter.dispatch.workers import WorkerInfo, WorkerRow
from halter.guard.request import MODEL_REQUEST_TIMEOUT
from halter.loop.observer import LoopObserver
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.runtime import PRICES_ACTOR, Runtime, describe_price_update, sync_store_clock, update_prices
from halter.runtime.session_builder import LiveSession, build_live_session
from halter.runtime.session_origin import build_handover
from halter.runtime.session_runner import run_agent_tool
from halter.runtime.session_sensors import SessionSensors, make_fetch_tools
from halter.runtime.session_start import Predecessor, begin_session, is_playbook_run, run_leased_playbook
from halter.state.session import InFlight
from halter.tasks.conversation import Conclusion
from halter_agents import VERSION

MAX_REMEMBERED_SESSIONS: Final = 50
"""Maximum number of parked sessions in memory."""
MAX_TAKEOVERS: Final = 2 * MAX_RESTARTS
"""Number of takeovers without a finished turn after which a session is quarantined."""

PulseListener = Callable[[str, str, Mapping[str, Any]], None]
"""Called with a session, the name of a live update, and its values."""


def ignore_pulse(_: str, __: str, ___: Mapping[str, Any]) -> None:
    """No-op listener."""


class AutonomousAgent:
    """Runs the sessions of one agent in this process."""

    def __init__(self, agent: AgentRuntime, folder: Path, pulse: PulseListener = ignore_pulse) -> None:
        self.context = agent
        self.snapshots: dict[SessionId, Callable[[], bytes]] = {}
        self._folder = folder
        self._pulse = pulse
        self._resident = bool(agent.definition.pacing.sensors)
        self._resting: dict[SessionId, tuple[int, LiveSession]] = {}

    @property
    def name(self) -> str:
        return self.context.policy.name

    def find_time_limit(self, flight: InFlight) -> int:
        """Return how long a call or request in flight may take. Effects inside a verb have their own limits."""
        if not flight.is_call:
            return MODEL_REQUEST_TIMEOUT
        tool = self.context.tools.get(flight.name)
        return DEFAULT_TOOL_TIMEOUT if tool is None else tool.spec.timeout

    async def begin_session(self, number: int, follows: str = "", because: str = "") -> SessionId:
        """Start the agent's session of that number; an existing one is not changed.

        A session that `follows` another one gets a handover from it.
        """
        session = f"{self.name}-{number}"
        if not follows:
            return await begin_session(self.context, "", "autonomous", session)
        text = await build_handover(self.context.store, follows, because)
        return await begin_session(self.context, text, "autonomous", session, Predecessor(follows, because))

    async def run_session(
        self,
        lease: Lease,
        row: SessionRow,
        stays: Callable[[SessionId], None] = lambda _: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Conclusion | None:
        """Run a session until it parks, or one with sensors until it ends. Return its conclusion, if known.

        `row` was read under the lease. `on_wait` is called when a person has to decide.
        """
        live = self._find_in_memory(lease)
        if live is not None:
            return await self._run_until_parked(live, lease, row)
        if await is_playbook_run(self.context, row):
            await run_leased_playbook(self.context, lease)
            return None
        observer = LoopObserver(on_chunk=lambda chunk: self._publish_chunk(lease.session, chunk))
        resident = self._resident and row.kind == "autonomous"
        sensor_tools = make_fetch_tools(self.context) if resident else None
        live = await build_live_session(
            self.context,
            row,
            lease,
            call_agent=run_agent_tool,
            observer=observer,
            sensed=sensor_tools,
            on_wait=lambda _, __: on_wait(),
        )
        live.runtime.on_trouble = on_wait
        if lease.generation > MAX_TAKEOVERS and await self._is_poisoned(live, lease):
            return None
        if not resident:
            return await self._run_until_parked(live, lease, row)
        stays(lease.session)
        self.snapshots[lease.session] = live.hot_view.hot.snapshot
        try:
            return await self._run_resident(live, row, lease)
        finally:
            self.snapshots.pop(lease.session, None)

    async def _run_until_parked(self, live: LiveSession, lease: Lease, row: SessionRow) -> Conclusion:
        """Run a session until it parks, and keep it in memory in case it wakes here again."""
        conclusion = await live.conversation.run_until_parked(row)
        if not conclusion.has_ended:
            self._resting[lease.session] = (lease.generation, live)
            while len(self._resting) > MAX_REMEMBERED_SESSIONS:
                self._resting.pop(next(iter(self._resting)))
        return conclusion

    def _find_in_memory(self, lease: Lease) -> LiveSession | None:
        """Remove and return a parked session, unless another worker has had it since. Its history is not read again."""
        generation, live = self._resting.pop(lease.session, (0, None))
        if live is None or generation != lease.generation - 1:
            return None
        live.runtime.lease = lease
        return live

    def _publish_chunk(self, session: str, chunk: StreamChunk) -> None:
        self._pulse(session, "text", {"request": chunk.request, "text": chunk.text, "finished": chunk.finished})

    async def _run_resident(self, live: LiveSession, row: SessionRow, lease: Lease) -> Conclusion:
        """Run a resident session with its sensors. A sleeping session stays asleep while its sensors run."""
        sensors = SessionSensors(self.context, live.runtime, self._folder, live.hot_view.hot)
        await sensors.load_looks(row)
        watched_sensors = [WatchedSensor(sensor, sensors.signals(sensor)) for sensor in live.terms.pacing.sensors]
        resident = ResidentSession(
            live.conversation,
            live.runtime,
            live.loop,
            live.hot_view,
            watched_sensors,
            sensors.runs,
            lambda name, values: self._pulse(lease.session, name, values),
        )
        return await resident.live(await self._find_sleep(live, row))

    async def _find_sleep(self, live: LiveSession, row: SessionRow) -> Conclusion | None:
        if row.state not in REST_STATES or (row.due_at is not None and row.due_at <= self.context.app.clock.now()):
            return None
        await live.runtime.load_history()
        return Conclusion(row.state, wake_at=row.wake_at, wake_on=tuple(row.wake_on.split()))

    async def _is_poisoned(self, live: LiveSession, lease: Lease) -> bool:
        """Quarantine a session if one process after another died while running it; return true if quarantined."""
        now = self.context.app.clock.now()
        deaths = count_takeovers(await live.runtime.load_history(), now)
        if deaths < MAX_TAKEOVERS:
            return False
        error = f"{deaths} processes that ran it died in a row."
        return await quarantine_session(self.context.store, lease, deaths, error, now)


def count_takeovers(events: Sequence[Stored], now: int) -> int:
    """Count recent takeovers of a session since its last finished turn."""
    count = 0
    for stored in events:
        match stored.event:
            case TurnEnded():
                count = 0
            case SessionWoken(cause="takeover") if stored.at > now - RESTART_WINDOW:
                count += 1
            case _:
                pass
    return count


UPKEEP_INTERVAL: Final = 30 * SECOND
"""Polling interval for changes: hints arrive immediately but may be lost."""
FOLDER_POLLING_INTERVAL: Final = 5 * SECOND
DRAIN_TIMEOUT: Final = 30 * SECOND
"""Time limit for running sessions to park when a worker ends."""


class Dispatcher(Protocol):
    """Finds due sessions and runs them."""

    async def run(self) -> None: ...


DispatcherFactory = Callable[[RunningSessions, Callable[[], AgentConcurrency], Mapping[str, str]], Dispatcher]
"""Makes a dispatcher, given the sessions, the agents and the agents' versions."""


@dataclass(frozen=True, slots=True)
class DispatchMode:
    """The way in which a process runs agents: its kind, dispatcher, concurrency and intervals."""

    kind: str
    dispatch: DispatcherFactory
    concurrency: int
    drain: int = DRAIN_TIMEOUT
    heartbeat: int = HEARTBEAT_INTERVAL
    polling_interval: int = DUE_POLLING_INTERVAL
    """Polling interval for due sessions."""
    upkeep_interval: int = UPKEEP_INTERVAL
    """Interval at which every agent is checked even without a change."""
    folder_polling_interval: int = FOLDER_POLLING_INTERVAL
    """Polling interval of watched folders."""


def make_embedded_mode(kind: str = "up") -> DispatchMode:
    return DispatchMode(
        kind,
        lambda sessions, agents, _: EmbeddedDispatcher(sessions, agents, DEFAULT_CONCURRENCY),
        DEFAULT_CONCURRENCY,
    )


def make_distributed_mode(url: str, clock: Clock, concurrency: int, drain: int = DRAIN_TIMEOUT) -> DispatchMode:
    """Make the mode of a worker, which gets tickets from the queue that all workers of a PostgreSQL store share."""
    from halter.dispatch.ticket_queue import ProcrastinateQueue, prepare_queue_tables

    prepare_queue_tables(url)

    def dispatch(
        sessions: RunningSessions, agents: Callable[[], AgentConcurrency], versions: Mapping[str, str]
    ) -> Dispatcher:
        return DistributedDispatcher(sessions, agents, ProcrastinateQueue(url, clock, versions), concurrency)

    return DispatchMode("worker", dispatch, concurrency, drain)


class Drained(Exception):
    """All sessions are parked; the process may end."""


class WorkerState:
    """The state of a worker: the sessions it runs, its description, and the results of its heartbeats."""

    def __init__(
        self,
        app: Runtime,
        sessions: RunningSessions,
        mode: DispatchMode,
        agents: Mapping[str, AutonomousAgent],
        report: Callable[[str, str], None],
    ) -> None:
        self.clock_refused = asyncio.Event()
        """Set when this machine must not run sessions because its clock is wrong."""
        self._app = app
        self._sessions = sessions
        self._mode = mode
        self._agents = agents
        self._report = report
        self._started_at = 0
        self._waiting: frozenset[str] = frozenset()
        self._refusal = ""

    async def enter(self, store: Store) -> None:
        """Register this worker before it claims anything."""
        self._started_at = self._app.clock.now()
        await self.on_heartbeat(await store.beat(self._sessions.worker, {}, self.describe()))
        self.require_clock()

    def require_clock(self) -> None:
        """Raise ConfigError on a machine whose clock differs from the store's."""
        if self._refusal:
            raise ConfigError(self._refusal)

    def agents(self) -> AgentConcurrency:
        """Return the agents whose sessions are claimed here, with their concurrency across all workers."""
        return {
            name: agent.context.definition.tasks.concurrency
            for name, agent in self._agents.items()
            if name not in self._waiting
        }

    def versions(self) -> Mapping[str, str]:
        return {name: agent.context.folder_digest for name, agent in self._agents.items()}

    def leases(self) -> frozenset[Lease]:
        return self._sessions.leases()

    def cancel_lost(self, leases: frozenset[Lease]) -> None:
        self._sessions.cancel_lost(leases)

    def snapshots(self) -> Mapping[SessionId, bytes]:
        return {session: snapshot() for agent in self._agents.values() for session, snapshot in agent.snapshots.items()}

    def describe(self) -> str:
        info = WorkerInfo(
            kind=self._mode.kind,
            version=VERSION,
            started_at=self._started_at,
            agents=dict(self.versions()),
            waiting=tuple(sorted(self._waiting)),
            concurrency=self._mode.concurrency,
            awake=self._sessions.count_running,
            residents=self._sessions.residents,
            closing=self._sessions.closing.is_set(),
            problem=self._refusal,
        )
        return info.with_process().encode()

    async def on_heartbeat(self, beat: HeartbeatReply) -> None:
        """Compare the clocks, and find the agents whose version is outdated here."""
        if isinstance(self._app.clock, StoreClock):
            await sync_store_clock(self._app.store, self._app.clock)
            self._refusal = self._app.clock.refusal()
            if self._refusal:
                self.clock_refused.set()
        workers = await self._sessions.store.ask(Query("all_workers", WorkerRow))
        outdated = {
            name
            for name, own_version in self.versions().items()
            if find_version_in_force(workers, name, beat.now) not in ("", own_version)
        }
        for name in sorted(outdated - self._waiting):
            self._report(name, OUTDATED_AGENT)
        for name in sorted(self._waiting - outdated):
            self._report(name, CURRENT_AGENT)
        self._waiting = frozenset(outdated)
        self._sessions.remote_capacity = self._count_remote_capacity(workers, beat.now)

    def _count_remote_capacity(self, workers: Sequence[WorkerRow], now: int) -> int:
        others = [row.parse_info() for row in workers if row.worker != self._sessions.worker and row.alive(now)]
        sharing = [info for info in others if not info.closing and self.versions().items() & info.agents.items()]
        return sum(max(0, info.concurrency - info.awake) for info in sharing)


OUTDATED_AGENT: Final = (
    "Another worker has a newer version of this agent's files, so its sessions run there and not here. Update this "
    "folder to the same version and restart. When no worker with the newer version is left, sessions run here again."
)
CURRENT_AGENT: Final = "No other worker has a newer version of this agent's files now; its sessions run here again."


RETENTION_ACTOR: Final = "halter.yaml"
"""The actor of erasure events in the journal."""
RETENTION_INTERVAL: Final = HOUR


def read_retention(app: Runtime) -> int | None:
    """Return the age after which session texts are erased; None if never."""
    retention = app.fleet.spec.retention
    return None if retention is UNSET else retention


async def erase_expired(app: Runtime, age: int, report: Callable[[str], None]) -> None:
    """Erase expired sessions now and every hour. After a failure of the store, it retries an hour later."""
    from halter.journal.retention import erase_older_than

    while True:
        try:
            erased_sessions = (await erase_older_than(app.store, age, RETENTION_ACTOR)).erased
        except StoreError as error:
            report(f"Could not erase expired sessions; retrying: {error}")
        else:
            if erased_sessions:
                report(f"Erased the texts of {format_count(len(erased_sessions), 'session')}, as retention requires.")
        await app.clock.sleep(RETENTION_INTERVAL)


def list_price_jobs(app: Runtime, report: Callable[[str], None]) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """List the job that updates prices, if the fleet's file asks for it."""
    return [partial(update_prices_daily, app, report)] if app.fleet.spec.prices.update == "daily" else []


async def update_prices_daily(app: Runtime, report: Callable[[str], None]) -> None:
    """Fetch the price table now and every day. After a failure, the prices in force stay until the next day."""
    while True:
        try:
            event = await update_prices(app, PRICES_ACTOR)
        except (ConfigError, StoreError) as error:
            report(str(error))
        else:
            if event is not None:
                report(describe_price_update(event))
        await app.clock.sleep(DAY)
