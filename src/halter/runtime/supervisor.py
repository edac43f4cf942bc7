"""Runs agents in this process until it ends.

Each agent has one autonomous session at a time. It starts when the agent is switched on, resumes when the process
starts or a halt is lifted, and ends when the agent is switched off.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from halter.autonomy.upkeep import (
    REST_STATES,
    AttendSession,
    BeginSession,
    LeaveAlone,
    ReopenSession,
    StopSession,
    decide_upkeep,
    list_scopes,
)
from halter.config.sections import list_unwritten_fields
from halter.core.clock import MINUTE, SECOND, format_duration, read_monotonic
from halter.core.errors import ConfigError, LeaseLost
from halter.core.ids import FLEET, SessionId, make_worker_id
from halter.core.messages import Model
from halter.core.ports import ALL_STREAMS, Change, Lease, Query
from halter.core.rows import NO_OWNER, AgentRow, SessionRow, TriggerRow, explain_newer_format
from halter.core.text import clean, shorten
from halter.dispatch.dispatcher import RunningSessions
from halter.dispatch.heartbeat import renew_leases
from halter.dispatch.idle import IdleLimits
from halter.dispatch.workers import WorkerRow
from halter.guard.halts import halt, read_halts, switch_on
from halter.loop.concurrency import raise_if_cancelled, run_together, wait_for_change, wait_for_either, watch_changes
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.forecast import describe_spending_limits, forecast_spending
from halter.runtime.notices import Notices, Outbox, make_senders
from halter.runtime.runtime import Runtime, bind_policy, follow_prices, is_superseded
from halter.runtime.session_start import find_exhausted_session
from halter.runtime.switches import list_open_tasks, wake_troubled
from halter.runtime.trigger_runner import AgentTriggers
from halter.runtime.webhooks import WebhookReceiver, list_webhook_problems
from halter.runtime.worker import (
    AutonomousAgent,
    DispatchMode,
    Drained,
    PulseListener,
    WorkerState,
    erase_expired,
    ignore_pulse,
    list_price_jobs,
    make_embedded_mode,
    read_retention,
)
from halter.spec.tasks import Tasks
from halter.state import lifecycle

SUPERVISOR_DEBOUNCE: Final = SECOND // 10
NOTICE_POLLING_INTERVAL: Final = 10 * MINUTE
"""Polling interval for undelivered notices."""
SYSTEM_RANDOM: Final = random.SystemRandom()

Serve = Callable[[WebhookReceiver], Coroutine[Any, Any, None]]
"""Serves webhook deliveries until cancelled."""
AgentMessageListener = Callable[[str, str], None]
"""Called with the name of an agent or "", and a sentence about it."""


class Supervisor:
    """Keeps the agents of this process running: starts their sessions, runs their triggers and sends their notices."""

    def __init__(
        self,
        app: Runtime,
        on_report: AgentMessageListener,
        pulse: PulseListener = ignore_pulse,
        rng: random.Random = SYSTEM_RANDOM,
        serve: Serve | None = None,
        model_overrides: Mapping[str, Model] | None = None,
        mode: DispatchMode | None = None,
    ) -> None:
        """`model_overrides` replace the configured models of the same name."""
        self.agents: dict[str, AutonomousAgent] = {}
        self._triggers: dict[str, AgentTriggers] = {}
        self._app = app
        self._store = app.patient()
        app.store_problem.report = self._report_store_problem
        self._on_report = on_report
        self._pulse = pulse
        self._rng = rng
        self._serve = serve
        self._model_overrides = model_overrides
        self._mode = mode or make_embedded_mode()
        self._worker = make_worker_id(self._mode.kind, app.ids)
        self._last_reported: dict[tuple[str, str], str] = {}
        self._upkeep_times: dict[str, tuple[int, ...]] = {}
        self._change_event = asyncio.Event()
        self._tellable = False
        self._noticed_at = read_monotonic(app.clock)
        self._notices = Notices(self._store, app.clock, self._tasks, self._redact)
        self._sessions = RunningSessions(
            self._store, app.clock, self._worker, self._attend, self._redact, app.departures
        )
        self._sessions.polling_interval = self._mode.polling_interval
        self._sessions.idle_limits = IdleLimits(
            self._idle_halt, lambda agent, flight: self.agents[agent].find_time_limit(flight)
        )
        self._sessions.on_watch_failed = lambda agent, error: self._report_failure(
            agent, "Could not check whether its session is idle", error, "watch"
        )
        self._worker_state = WorkerState(app, self._sessions, self._mode, self.agents, on_report)
        self._ending = asyncio.Event()
        self.attends: Callable[[SessionRow], None] = lambda _: None
        """Called with the row of each session before it runs here."""
        self.superseded = False
        """Set when the store's policy has changed. The new policy applies after a restart."""

    async def run(self, folders: Sequence[Path]) -> None:
        """Run the agents of these folders until cancelled or drained. An agent that cannot be loaded is left out."""
        async with AsyncExitStack() as stack:
            for folder in folders:
                await self._join(stack, folder)
            if not self.agents:
                raise ConfigError("No agent can run. Fix one of the problems above, and start again.")
            await self._worker_state.enter(self._store)
            await stack.enter_async_context(
                renew_leases(
                    self._store,
                    self._app.clock,
                    self._worker,
                    self._mode.heartbeat,
                    holder=self._worker_state,
                    liveness=self._app.liveness,
                )
            )
            senders = {
                channel: sender
                for agent in self.agents.values()
                for channel, sender in make_senders(
                    agent.name, agent.context.definition.tasks, agent.context.secrets
                ).items()
            }
            outbox_jobs = [Outbox(self._app, senders).run] if senders else []
            receiver = self.hooks()
            webhook_jobs = [lambda: serve(receiver)] if (serve := self._serve) and receiver.has_webhooks() else []
            age = read_retention(self._app)
            retention_jobs = (
                []
                if age is None
                else [lambda: erase_expired(self._app, age, lambda sentence: self._on_report("retention", sentence))]
            )
            price_jobs = list_price_jobs(self._app, partial(self._on_report, "prices"))
            await stack.enter_async_context(follow_prices(self._app))
            dispatcher = self._mode.dispatch(self._sessions, self._worker_state.agents, self._worker_state.versions())
            jobs = [dispatcher.run, self._supervise_agents, self._drain]
            with suppress(Drained):
                await run_together([*jobs, *outbox_jobs, *webhook_jobs, *retention_jobs, *price_jobs])
        self._worker_state.require_clock()

    def drain(self) -> None:
        """Claim no more sessions, let the running ones park, and end `run`."""
        self._ending.set()

    async def _drain(self) -> None:
        await wait_for_either(self._ending, self._worker_state.clock_refused)
        self._sessions.closing.set()
        await self._sessions.wait_idle(self._mode.drain)
        raise Drained

    async def _join(self, stack: AsyncExitStack, folder: Path) -> None:
        """Load the agent of a folder. If that raises ConfigError, report the error and leave the agent out."""
        try:
            report = partial(self._on_report, folder.name)
            opening = open_folder_agent(self._app, folder, self._worker, models=self._model_overrides, report=report)
            agent = await stack.enter_async_context(opening)
            agent = replace(agent, rng=self._rng, nested_sessions=self._sessions.nested)
            agent.require_model()
            await self._require_autonomy(agent, folder)
        except ConfigError as error:
            self._on_report("", str(error))
            return
        name = agent.policy.name
        limits = await describe_spending_limits(self._app, agent.policy)
        now, environ = self._app.clock.now(), self._app.environ
        forecast = await forecast_spending(self._store, agent.definition, folder, environ, now)
        problems = (
            *agent.unavailable_tools,
            *list_unwritten_fields(agent.definition.pacing),
            *list_webhook_problems(agent),
        )
        for sentence in (limits, *forecast.describe(), *problems):
            self._on_report(name, sentence)
        await self._report_other_workers(name)
        self.agents[name] = AutonomousAgent(agent, folder, self._pulse)
        self._triggers[name] = AgentTriggers(agent, folder, self._on_report, self._wait_for_change)
        await self._switch_on_first(name)

    async def _report_other_workers(self, name: str) -> None:
        """Report other processes that already run an agent. Workers are expected to share agents."""
        now = self._app.clock.now()
        for row in await self._store.ask(Query("all_workers", WorkerRow)):
            info = row.parse_info()
            if self._mode.kind == "worker" or not info.kind or name not in info.agents or not row.alive(now):
                continue
            process = f"halter {info.kind} {info.pid} on {info.host}"
            duration = format_duration(max(0, now - info.started_at) // SECOND * SECOND)
            self._on_report(
                name,
                f"Already running: {process}, for {duration}. Both processes share its work, and each continues alone "
                f"when the other ends. To stop one, run kill {info.pid} on {info.host}, or press Ctrl-C here.",
            )

    async def _require_autonomy(self, agent: AgentRuntime, folder: Path) -> None:
        name = agent.name
        trigger_rows = await self._store.ask(Query("triggers_of", TriggerRow, {"agent": name}))
        if not agent.definition.pacing.autonomy.enabled and not agent.definition.tasks.triggers() and not trigger_rows:
            raise ConfigError(
                f"{name} has nothing to run unattended. Set `autonomy: {{enabled: true}}`, or add a schedule, a watch "
                f"or a webhook, in {folder}/agent.yaml."
            )
        if name in self.agents:
            raise ConfigError(f"There are two agents named {name}. Rename one of them.")

    async def _switch_on_first(self, name: str) -> None:
        """Switch on an agent that was never switched on. An agent that was switched off stays off."""
        if name not in await self._switches():
            person = self._app.settings.person
            await self._store.commit(switch_on(name, person, f"first/{name}", "started for the first time"))

    def hooks(self) -> WebhookReceiver:
        return WebhookReceiver({name: agent.context for name, agent in self.agents.items()}, self._triggers)

    def _tasks(self) -> Mapping[str, Tasks]:
        return {name: agent.context.definition.tasks for name, agent in self.agents.items()}

    def _redact(self, text: str) -> str:
        for agent in self.agents.values():
            text = agent.context.guard().redact(text)
        return text

    def _idle_halt(self, agent: str) -> int:
        return self.agents[agent].context.definition.tasks.idle_halt

    async def _attend(self, lease: Lease, row: SessionRow) -> None:
        """Run a session until it parks or ends, and queue notices if a person may have to act.

        A session of an agent that does not run here is released: the call that claimed it was interrupted.
        """
        if row.agent not in self.agents:
            await self._store.release(lease)
            return
        self.attends(row)
        conclusion = await self.agents[row.agent].run_session(
            lease, row, self._sessions.mark_resident, self._wait_for_change
        )
        if conclusion is None or conclusion.has_ended or conclusion.state in ("WAITING_FOR_INPUT", "PAUSED"):
            self._wait_for_change()

    def _wait_for_change(self) -> None:
        """Queue notices now instead of at the next interval."""
        self._tellable = True
        self._change_event.set()

    async def _supervise_agents(self) -> None:
        """Check every agent: at the start, when a person acts, when a session ends, and at intervals."""
        starting = True
        await self._try_again()
        async with watch_changes(self._store, _is_from_person) as self._change_event:
            while True:
                await self._check_policy()
                check_times: list[int] = []
                for agent in list(self.agents.values()):
                    await self._tend_or_report(agent, starting=starting)
                    check_times += [at for at in self._upkeep_times.pop(agent.name, ()) if at > self._app.clock.now()]
                    check_times += await self._run_triggers(agent.name)
                if (
                    starting
                    or self._tellable
                    or read_monotonic(self._app.clock) >= self._noticed_at + NOTICE_POLLING_INTERVAL
                ):
                    self._tellable, self._noticed_at = False, read_monotonic(self._app.clock)
                    await self._queue_notices()
                starting = False
                await wait_for_change(
                    self._change_event,
                    max(0, min([self._mode.upkeep_interval, *(at - self._app.clock.now() for at in check_times)])),
                )

    async def _try_again(self) -> None:
        """Wake the sessions whose model a person has to fix: it may be fixed now."""
        for name in self.agents:
            await wake_troubled(self._app, name, ("needs_person",))

    async def _check_policy(self) -> None:
        """Drain this process if its policy is superseded: claim no more sessions, and let running ones park."""
        policy = self._app.policy
        if policy is None or self.superseded or not await is_superseded(self._store, policy):
            return
        self.superseded = True
        self._on_report(
            "policy", "The store's policy has changed. Running sessions park and resume under the new policy."
        )
        self.drain()

    async def _queue_notices(self) -> None:
        """Queue notices. A failure is reported and stops no agent."""
        try:
            await self._notices.queue_due()
        except Exception as error:  # noqa: BLE001  no failure here may stop an agent
            raise_if_cancelled()
            self._report_failure("", "Could not queue notices", error, "upkeep")

    async def _tend_or_report(self, agent: AutonomousAgent, *, starting: bool) -> None:
        """Tend one agent. A failure is reported and stops no other agent."""
        if not agent.context.definition.pacing.autonomy.enabled:
            return
        try:
            if await self._tend_agent(agent, starting=starting):
                # The agent may have been switched off at the same time.
                await self._tend_agent(agent)
        except Exception as error:  # noqa: BLE001  no failure here may stop another agent
            raise_if_cancelled()
            self._report_failure(agent.name, "Could not start or check its session", error, "upkeep")

    async def _run_triggers(self, name: str) -> Sequence[int]:
        """Run one agent's triggers. A failure is reported and stops no other agent."""
        try:
            return await self._trigger(name)
        except LeaseLost:
            return ()
        except Exception as error:  # noqa: BLE001  no failure here may stop another agent
            raise_if_cancelled()
            self._report_failure(name, "Could not run its triggers", error, "triggers")
            return ()

    async def _trigger(self, name: str) -> Sequence[int]:
        """Run the due triggers of an agent and claim its halted, parked sessions; return when to check again."""
        triggers, now = self._triggers[name], self._app.clock.now()
        tasks = await list_open_tasks(self._app, name)
        self._report(name, next((newer for row in tasks if (newer := explain_newer_format(row))), ""), "format")
        parked_rows = [row for row in tasks if row.owner == NO_OWNER and row.state in REST_STATES]
        for row in await triggers.find_halted(parked_rows):
            await self._sessions.fetch(SessionId(row.session))
        next_at = await triggers.run_due((await self._switches()).get(name))
        self._sessions.check()
        return (
            *(() if next_at is None else (max(next_at, now + SUPERVISOR_DEBOUNCE),)),
            *((now + self._mode.folder_polling_interval,) if triggers.watches else ()),
        )

    async def _switches(self) -> Mapping[str, AgentRow]:
        return {row.agent: row for row in await self._store.ask(Query("all_agents", AgentRow))}

    async def _tend_agent(self, agent: AutonomousAgent, *, starting: bool = False) -> bool:
        """Start, reopen, claim or stop an agent's session as upkeep decides; return true if one started or reopened."""
        name, now = agent.name, self._app.clock.now()
        params = {"agent": name, "kind": "autonomous", "limit": 1}
        newest = next(iter(await self._store.ask(Query("sessions_of", SessionRow, params))), None)
        halts = await read_halts(self._store, list_scopes(name, newest.session if newest else ""))
        switch = (await self._switches()).get(name)
        since = 0 if switch is None else switch.at
        exhausted = await find_exhausted_session(self._store, agent.context.policy, newest, now, since)
        match decide_upkeep(name, switch, newest, halts, now, starting=starting, used_up=exhausted):
            case BeginSession(number, follows, because):
                session = await agent.begin_session(number, follows, because)
                self._report(name, f"{session} starts: {because}" if because else f"{session} starts.")
                self._sessions.check()
                return True
            case ReopenSession(session, by):
                await self._store.commit(lifecycle.reopen_session(session, f"{session}/reopened/{now}", by))
                self._report(name, f"{session} resumes.")
                self._sessions.check()
                return True
            case AttendSession(session):
                await self._sessions.fetch(SessionId(session))
            case StopSession(session, by):
                await self._store.commit(halt(f"session:{session}", by, f"{session}/off/{now}", f"{name} is off"))
            case LeaveAlone("") if starting and newest is not None:
                self._report(name, f"{newest.session} resumes ({newest.state}).")
            case LeaveAlone(sentence, check_at):
                self._upkeep_times[name] = () if check_at is None else (check_at,)
                self._report(name, sentence)
        return False

    def _report_store_problem(self, problem: str) -> None:
        self._on_report("", problem or "Store available again; resuming.")

    def _report_failure(self, name: str, what: str, error: Exception, topic: str) -> None:
        sentence = self._redact(clean(f"{type(error).__name__}: {error}"))
        self._report(name, f"{what}; retrying: {shorten(sentence, 300)}", topic)

    def _report(self, name: str, sentence: str, topic: str = "upkeep") -> None:
        """Report a sentence about an agent, unless it is the last one on the same topic."""
        if self._last_reported.get((name, topic)) != sentence:
            self._last_reported[name, topic] = sentence
            if sentence:
                self._on_report(name, sentence)


class FleetRunner:
    """Runs agents, and restarts them when the store's policy changes."""

    def __init__(self, app: Runtime, make_supervisor: Callable[[Runtime], Supervisor]) -> None:
        self._app = app
        self._make_supervisor = make_supervisor
        self._draining = False
        self.supervisor = make_supervisor(app)

    def runs(self, agent: str) -> bool:
        return agent in self.supervisor.agents

    def drain(self) -> None:
        self._draining = True
        self.supervisor.drain()

    async def run(self, folders: Sequence[Path]) -> None:
        """Run the agents of these folders until cancelled or drained."""
        while True:
            await self.supervisor.run(folders)
            if self._draining or not self.supervisor.superseded:
                return
            local_fleet = None if self._app.policy is None else self._app.policy.local_file
            policy = await bind_policy(self._app.patient(), local_fleet, self._app.settings.person)
            self._app = replace(self._app, policy=policy)
            self.supervisor = self._make_supervisor(self._app)


def _is_from_person(change: Change) -> bool:
    return change.stream in (FLEET, ALL_STREAMS)
