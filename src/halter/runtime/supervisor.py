"""Runs agents in this process for as long as it lives.

Each agent has one autonomous session at a time. It starts when the agent is switched on, is found again when the
process starts, ends when the agent is switched off, and resumes when a halt is lifted.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

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
from halter.core.agent_spec import Tasks
from halter.core.clock import MINUTE, SECOND, format_duration
from halter.core.errors import ConfigError, LeaseLost
from halter.core.events import WakePosted
from halter.core.ids import FLEET, SessionId, make_worker_id
from halter.core.messages import Model
from halter.core.ports import EVERY_STREAM, Change, Lease, Query
from halter.core.rows import (
    NO_OWNER,
    AgentRow,
    OutageRow,
    SessionRow,
    TriggerRow,
    WorkerRow,
    explain_newer_format,
)
from halter.core.text import clean, shorten
from halter.core.vocabulary import ProviderTrouble
from halter.dispatch.dispatcher import RunningSessions
from halter.dispatch.heartbeat import IdleLimits, keep_leases
from halter.guard.halts import halt, read_halts, switch_off, switch_on
from halter.loop.session_runtime import raise_if_cancelled, run_together, wait_for_either, wait_for_news, watch_changes
from halter.runtime.agent_context import AgentContext, models_of
from halter.runtime.assemble import assemble_agent, withdraw_questions
from halter.runtime.forecast import describe_spending_limits, forecast_spending
from halter.runtime.notices import Notices, Outbox, make_senders
from halter.runtime.runtime import Runtime, bind_policy, is_superseded
from halter.runtime.sessions import find_exhausted_session
from halter.runtime.triggers import AgentTriggers, WebhookReceiver
from halter.runtime.worker import (
    AutonomousAgent,
    DispatchMode,
    Drained,
    PulseListener,
    WorkerState,
    erase_expired,
    ignore_pulse,
    make_embedded_mode,
    read_retention,
)
from halter.state import lifecycle

SUPERVISOR_DEBOUNCE: Final = SECOND // 10
NOTICE_POLLING_INTERVAL: Final = 10 * MINUTE
"""Polling interval for undelivered notices."""
SYSTEM_RANDOM: Final = random.SystemRandom()

Serve = Callable[[WebhookReceiver], Coroutine[Any, Any, None]]
"""Serves webhook deliveries until cancelled."""
AgentMessageListener = Callable[[str, str], None]
"""Called with an agent's name, or "", and a sentence about it."""


class Supervisor:
    """Runs agents."""

    def __init__(
        self,
        app: Runtime,
        tell: AgentMessageListener,
        pulse: PulseListener = ignore_pulse,
        rng: random.Random = SYSTEM_RANDOM,
        serve: Serve | None = None,
        given: Mapping[str, Model] | None = None,
        mode: DispatchMode | None = None,
    ) -> None:
        """Models that are `given`, by name, replace the configured ones."""
        self.agents: dict[str, AutonomousAgent] = {}
        self._triggers: dict[str, AgentTriggers] = {}
        self._app = app
        self._store = app.patient()
        app.trouble.tell = self._report_store_problem
        self._on_report = tell
        self._pulse = pulse
        self._rng = rng
        self._serve = serve
        self._given = given
        self._mode = mode or make_embedded_mode()
        self._worker = make_worker_id(self._mode.kind, app.ids)
        self._last_reported: dict[str, str] = {}
        self._news = asyncio.Event()
        self._tellable = False
        self._noticed_at = app.clock.now()
        self._notices = Notices(self._store, app.clock, self._tasks, self._redact)
        self._sessions = RunningSessions(self._store, app.clock, self._worker, self._attend, self._redact)
        self._sessions.polling_interval = self._mode.polling_interval
        self._sessions.idle_limits = IdleLimits(
            self._idle_halt, lambda agent, flight: self.agents[agent].find_time_limit(flight)
        )
        self._worker_state = WorkerState(app, self._sessions, self._mode, self.agents, tell)
        self._ending = asyncio.Event()
        self.attends: Callable[[SessionRow], None] = lambda _: None
        """Called with the row of each session that is about to be run here."""
        self.superseded = False
        """Set when the store's policy has changed: it applies after a restart."""

    async def run(self, folders: Sequence[Path]) -> None:
        """Runs the agents of these folders until cancelled. One that cannot be loaded is reported; the others run."""
        async with AsyncExitStack() as stack:
            for folder in folders:
                await self._join(stack, folder)
            if not self.agents:
                raise ConfigError("There is no agent that could run: fix one of those above, and start again.")
            await self._worker_state.enter(self._store)
            await stack.enter_async_context(
                keep_leases(
                    self._store,
                    self._app.clock,
                    self._worker,
                    self._mode.heartbeat,
                    holder=self._worker_state,
                    liveness=self._app.liveness,
                )
            )
            senders = {
                way: sender
                for agent in self.agents.values()
                for way, sender in make_senders(
                    agent.name, agent.context.agent.tasks, agent.context.agent.secrets
                ).items()
            }
            sending = [Outbox(self._app, senders).run] if senders else []
            hooks = self.hooks()
            listening = [lambda: serve(hooks)] if (serve := self._serve) and hooks.has_webhooks() else []
            age = read_retention(self._app)
            forgetting = (
                []
                if age is None
                else [lambda: erase_expired(self._app, age, lambda sentence: self._on_report("retention", sentence))]
            )
            dispatch = self._mode.dispatch(self._sessions, self._worker_state.agents, self._worker_state.versions())
            with suppress(Drained):
                await run_together(
                    [dispatch.run, self._keep_agents_running, self._drain, *sending, *listening, *forgetting]
                )
        self._worker_state.require_clock()

    def drain(self) -> None:
        """Claims nothing more, lets running sessions rest, and ends."""
        self._ending.set()

    async def _drain(self) -> None:
        await wait_for_either(self._ending, self._worker_state.clock_refused)
        self._sessions.closing.set()
        await self._sessions.wait_idle(self._mode.drain)
        raise Drained

    async def _join(self, stack: AsyncExitStack, folder: Path) -> None:
        try:
            agent = await stack.enter_async_context(
                assemble_agent(self._app, folder, report=partial(self._on_report, folder.name))
            )
            models = await stack.enter_async_context(models_of(self._app, agent, self._given))
            context = AgentContext(self._app, agent, models, self._worker, rng=self._rng)
            context.require_model()
            await self._require_autonomy(context, folder)
        except ConfigError as error:
            self._on_report("", str(error))
            return
        name = agent.policy.name
        most = await describe_spending_limits(self._app, agent.policy)
        now, environ = self._app.clock.now(), self._app.environ
        foreseen = await forecast_spending(self._store, agent, folder, environ, now)
        for sentence in (most, *foreseen.describe(), *agent.left_out, *list_unwritten_fields(agent.pacing)):
            self._on_report(name, sentence)
        await self._report_other_workers(name)
        self.agents[name] = AutonomousAgent(context, folder, self._pulse)
        self._triggers[name] = AgentTriggers(context, folder, self._on_report, self._wait_for_change)
        await self._switch_on_first(name)

    async def _report_other_workers(self, name: str) -> None:
        """Tell where an agent runs already. Workers are many on purpose."""
        now = self._app.clock.now()
        for row in await self._store.ask(Query("all_workers", WorkerRow)):
            about = row.told()
            if self._mode.kind == "worker" or not about.kind or name not in about.agents or not row.alive(now):
                continue
            place = f"halter {about.kind} {about.pid} on {about.host}"
            since = format_duration(max(0, now - about.started_at) // SECOND * SECOND)
            self._on_report(
                name,
                f"It runs already: {place}, for {since}. Both share its work, and this process goes on alone when that "
                f"one ends. If one is enough, stop either of them: kill {about.pid} on {about.host}, or Ctrl-C here.",
            )

    async def _require_autonomy(self, context: AgentContext, folder: Path) -> None:
        name = context.agent.policy.name
        agent = context.agent
        planned = await self._store.ask(Query("triggers_of", TriggerRow, {"agent": name}))
        if not agent.pacing.autonomy.enabled and not agent.tasks.triggers() and not planned:
            raise ConfigError(
                f"{name} does not run by itself: write `autonomy: {{enabled: true}}`, or a schedule, a watch or a "
                f"webhook, into {folder}/agent.yaml."
            )
        if name in self.agents:
            raise ConfigError(f"There are two agents called {name}: give one of them another name.")

    async def _switch_on_first(self, name: str) -> None:
        """Switches on an agent that was never switched on; one that was switched off stays off."""
        if name not in await self._switches():
            person = self._app.settings.person
            await self._store.commit(switch_on(name, person, f"first/{name}", "started for the first time"))

    def hooks(self) -> WebhookReceiver:
        return WebhookReceiver({name: agent.context for name, agent in self.agents.items()}, self._triggers)

    def _tasks(self) -> Mapping[str, Tasks]:
        return {name: agent.context.agent.tasks for name, agent in self.agents.items()}

    def _redact(self, text: str) -> str:
        for agent in self.agents.values():
            text = agent.context.guard().redact(text)
        return text

    def _idle_halt(self, agent: str) -> int:
        return self.agents[agent].context.agent.tasks.idle_halt

    async def _attend(self, lease: Lease, row: SessionRow) -> None:
        self.attends(row)
        came = await self.agents[row.agent].run_session(lease, row, self._sessions.mark_resident, self._wait_for_change)
        if came is None or came.has_ended or came.state in ("WAITING_FOR_INPUT", "PAUSED"):
            # Notify at once: a person may have to act.
            self._wait_for_change()

    def _wait_for_change(self) -> None:
        self._tellable = True
        self._news.set()

    async def _keep_agents_running(self) -> None:
        """Checks every agent: at the start, when a person acted or a session ended, and at intervals."""
        starting = True
        await self._try_again()
        async with watch_changes(self._store, _is_from_person) as self._news:
            while True:
                await self._check_policy()
                moments: list[int] = []
                for agent in list(self.agents.values()):
                    if agent.context.agent.pacing.autonomy.enabled and await self._tend_agent(agent, starting=starting):
                        # It may have been switched off at that very moment.
                        await self._tend_agent(agent)
                    moments += await self._run_triggers(agent.name)
                if starting or self._tellable or self._app.clock.now() >= self._noticed_at + NOTICE_POLLING_INTERVAL:
                    self._tellable, self._noticed_at = False, self._app.clock.now()
                    await self._queue_notices()
                starting = False
                await wait_for_news(
                    self._news,
                    max(0, min([self._mode.upkeep_interval, *(at - self._app.clock.now() for at in moments)])),
                )

    async def _try_again(self) -> None:
        """Wakes what a person had to mend the model of: it may be mended with this start."""
        for name in self.agents:
            await wake_troubled(self._app, name, ("needs_person",))

    async def _check_policy(self) -> None:
        """Claims nothing more under a superseded policy, and lets running sessions rest."""
        policy = self._app.policy
        if policy is None or self.superseded or not await is_superseded(self._store, policy):
            return
        self.superseded = True
        self._on_report("policy", "The store's policy has changed: what runs comes to its rest, and goes on under it.")
        self.drain()

    async def _queue_notices(self) -> None:
        """Queues notices. A failure is reported and stops no agent."""
        try:
            await self._notices.queue_due()
        except Exception as error:  # noqa: BLE001  no failure here may stop an agent
            raise_if_cancelled()
            sentence = self._redact(clean(f"{type(error).__name__}: {error}"))
            self._report(
                "", f"People could not be told of what needs them, which is tried again: {shorten(sentence, 300)}"
            )

    async def _run_triggers(self, name: str) -> Sequence[int]:
        """Runs one agent's triggers. A failure is reported and stops no other agent."""
        try:
            return await self._trigger(name)
        except LeaseLost:
            return ()
        except Exception as error:  # noqa: BLE001  no failure here may stop another agent
            raise_if_cancelled()
            sentence = self._redact(clean(f"{type(error).__name__}: {error}"))
            self._report(
                f"{name} ", f"Its triggers could not be looked after, which is tried again: {shorten(sentence, 300)}"
            )
            return ()

    async def _trigger(self, name: str) -> Sequence[int]:
        """Starts what is due for an agent, wakes halted sessions that rest; returns when to look again."""
        triggers, now = self._triggers[name], self._app.clock.now()
        tasks = await list_open_tasks(self._app, name)
        self._report(f"{name}  ", next((newer for row in tasks if (newer := explain_newer_format(row))), ""))
        resting = [row for row in tasks if row.owner == NO_OWNER and row.state in REST_STATES]
        for row in await triggers.find_halted(resting):
            await self._sessions.fetch(SessionId(row.session))
        at = await triggers.run_due((await self._switches()).get(name))
        self._sessions.check()
        return (
            *(() if at is None else (max(at, now + SUPERVISOR_DEBOUNCE),)),
            *((now + self._mode.folder_polling_interval,) if triggers.watches else ()),
        )

    async def _switches(self) -> Mapping[str, AgentRow]:
        return {row.agent: row for row in await self._store.ask(Query("all_agents", AgentRow))}

    async def _tend_agent(self, agent: AutonomousAgent, *, starting: bool = False) -> bool:
        """Does what an agent needs; returns whether a session was started or reopened."""
        name, now = agent.name, self._app.clock.now()
        params = {"agent": name, "kind": "autonomous", "limit": 1}
        last = next(iter(await self._store.ask(Query("sessions_of", SessionRow, params))), None)
        halts = await read_halts(self._store, list_scopes(name, last.session if last else ""))
        switch = (await self._switches()).get(name)
        capped = await find_exhausted_session(self._store, agent.context.agent.policy, last, now)
        match decide_upkeep(name, switch, last, halts, now, starting=starting, used_up=capped):
            case BeginSession(number, follows, because):
                session = await agent.begin_session(number, follows, because)
                self._report(name, f"{session} begins: {because}" if because else f"{session} begins.")
                self._sessions.check()
                return True
            case ReopenSession(session, by):
                await self._store.commit(lifecycle.reopen_session(session, f"{session}/reopened/{now}", by))
                self._report(name, f"{session} goes on.")
                self._sessions.check()
                return True
            case AttendSession(session):
                await self._sessions.fetch(SessionId(session))
            case StopSession(session, by):
                await self._store.commit(halt(f"session:{session}", by, f"{session}/off/{now}", f"{name} is off"))
            case LeaveAlone("") if starting and last is not None:
                self._report(name, f"{last.session} goes on where it stands ({last.state}).")
            case LeaveAlone(sentence):
                self._report(name, sentence)
        return False

    def _report_store_problem(self, problem: str) -> None:
        self._on_report("", problem or "The store is back, and everything goes on.")

    def _report(self, name: str, sentence: str) -> None:
        if self._last_reported.get(name) != sentence:
            self._last_reported[name] = sentence
            if sentence:
                self._on_report(name.strip(), sentence)


class FleetRunner:
    """Runs agents, and restarts them when the store's policy changes."""

    def __init__(self, app: Runtime, make: Callable[[Runtime], Supervisor]) -> None:
        self._app = app
        self._make = make
        self._draining = False
        self.supervisor = make(app)

    def runs(self, agent: str) -> bool:
        return agent in self.supervisor.agents

    def drain(self) -> None:
        self._draining = True
        self.supervisor.drain()

    async def run(self, folders: Sequence[Path]) -> None:
        """Runs the agents of these folders until cancelled or drained."""
        while True:
            await self.supervisor.run(folders)
            if self._draining or not self.supervisor.superseded:
                return
            written = None if self._app.policy is None else self._app.policy.local_file
            policy = await bind_policy(self._app.patient(), written, self._app.settings.person)
            self._app = replace(self._app, policy=policy)
            self.supervisor = self._make(self._app)


def _is_from_person(change: Change) -> bool:
    return change.stream in (FLEET, EVERY_STREAM)


async def turn_on(app: Runtime, agent: str, reason: str = "", by: str = "") -> None:
    """Switches an agent on, and resumes what was paused after a breakdown or idling."""
    store, by = app.patient(), by or app.settings.person
    committed = await store.commit(switch_on(agent, by, app.ids.make(), reason))
    if not committed.events:
        raise ConfigError("Only a person switches an agent on, and this was started by an agent.")
    for row in (*await _list_open_sessions(app, agent), *await list_open_tasks(app, agent)):
        if row.state == "PAUSED":
            await store.commit(lifecycle.post_message(row.session, app.ids.make(), b"", by))
    await wake_troubled(app, agent, get_args(ProviderTrouble))


async def wake_troubled(app: Runtime, agent: str, troubles: Sequence[str]) -> None:
    """Wakes the sessions of an agent that no model answers, so that they try again now."""
    for row in await app.patient().ask(Query("open_outages", OutageRow)):
        if row.agent == agent and row.trouble in troubles:
            event = WakePosted(cause="timer", origin="config", sender="halter")
            await app.patient().commit(lifecycle.post_wake(row.session, app.ids.make(), event))


async def turn_off(app: Runtime, agent: str, reason: str = "", by: str = "") -> Sequence[str]:
    """Switches an agent off and stops its sessions; returns the sessions that were stopped."""
    sessions = [row.session for row in (*await _list_open_sessions(app, agent), *await list_open_tasks(app, agent))]
    await app.store.commit(switch_off(agent, sessions, by or app.settings.person, app.ids.make(), reason))
    await withdraw_questions(app, agent, f"{agent} was switched off: it is asked about when it runs again.")
    return sessions


async def list_open_tasks(app: Runtime, agent: str) -> Sequence[SessionRow]:
    """Returns the open sessions of an agent that a trigger started."""
    return await app.store.ask(Query("open_tasks", SessionRow, {"agent": agent}))


async def _list_open_sessions(app: Runtime, agent: str) -> Sequence[SessionRow]:
    params = {"agent": agent, "kind": "autonomous", "limit": 10}
    rows = await app.store.ask(Query("sessions_of", SessionRow, params))
    return [row for row in rows if row.ended_at is None]
