"""Control of agents and sessions: halt, resume, cancel, switch on or off."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, NoReturn

import msgspec
from msgspec import Meta

from halter.core.clock import SECOND, format_duration, read_monotonic
from halter.core.errors import LeaseLost, NotDone
from halter.core.events import SessionParked
from halter.core.ids import SessionId, make_worker_id
from halter.core.money import format_micros
from halter.core.ports import Lease, Query
from halter.core.rows import AgentRow, HaltRow, SessionRow, TriggerRow
from halter.core.text import clean, suggest_nearest
from halter.dispatch.heartbeat import end_unowned_session
from halter.dispatch.workers import WorkerRow
from halter.guard import halts
from halter.operations.actor import (
    Actor,
    Agent,
    Done,
    Reason,
    Scope,
    Seconds,
    Session,
    fail_conflict,
    readable,
    readable_scope,
)
from halter.operations.queries import list_recorded_agents
from halter.runtime.needs import list_unhealthy
from halter.runtime.runtime import Runtime
from halter.runtime.switches import turn_off, turn_on
from halter.state import lifecycle
from halter.state.session import InFlight

CANCEL_WAIT: Final = 5 * SECOND
"""How long to wait for the owner of a session to end it."""
POLL_INTERVAL: Final = SECOND // 4
"""Polling interval while a cancel waits."""

Switch = Annotated[bool, Meta(description="On or off.")]

CancelOutcome = Literal["ended", "in doubt", "under way"]


class SessionCancelled(msgspec.Struct, frozen=True):
    """A cancelled session. `came` says whether it has ended, still runs, or has a call in doubt."""

    session: str
    came: CancelOutcome
    sentence: str


class HaltDone(Done, frozen=True):
    """A halted scope. `known` is always true: an unknown scope is rejected."""

    known: bool


class ResumeResult(Done, frozen=True):
    """A resumed scope, and the time over which its sessions resume."""

    ramp: int


class SwitchResult(Done, frozen=True):
    """An agent that was switched on or off; `known` if this store has seen it, `stopped` are its stopped sessions."""

    on: bool
    known: bool
    stopped: Sequence[str] = ()


class NamedSession(msgspec.Struct, frozen=True):
    session: str


async def halts_now(actor: Actor) -> Sequence[HaltRow]:
    """List halts.

    A halt of the whole fleet is shown to everyone.
    """
    rows = await actor.app.store.ask(Query("halts_standing", HaltRow))
    return [
        row for row in rows if row.scope == "fleet" or actor.principal.can_see(await actor.agent_of(row.scope) or "")
    ]


async def halt(actor: Actor, scope: Scope, reason: Reason = "") -> HaltDone:
    """Halt everything in a scope.

    Agents may halt, too.
    """
    actor.require_role("approver", "halt anything")
    scope = await _find_scope(actor, scope)
    await actor.require_scope(scope, "halt the fleet")
    await actor.app.store.commit(halts.halt(scope, actor.principal.name, actor.app.ids.make(), clean(reason)))
    sentence = f"Halted {scope}. No call or request starts there until `halter resume {scope}{actor.option}`."
    return HaltDone(scope, sentence, known=True)


async def resume(actor: Actor, scope: Scope, over_seconds: Seconds | None = None, reason: Reason = "") -> ResumeResult:
    """Lift a halt. What it stopped continues in place.

    An agent that is off, stopped or paused, but not halted, is switched on.
    """
    actor.require_person("operator", "lift a halt")
    scope = scope if scope.startswith(("agent:", "trigger:", "key:")) else await _find_scope(actor, scope)
    await actor.require_scope(scope, "lift a halt of the fleet")
    ramp = await halts.compute_ramp(actor.app.store, scope) if over_seconds is None else over_seconds * SECOND
    write = halts.resume(scope, actor.principal.name, actor.app.ids.make(), ramp, clean(reason))
    if not (await actor.app.store.commit(write)).events:
        kind, _, agent = scope.partition(":")
        if kind != "agent" or not await _is_at_rest(actor, agent):
            fail_conflict(f"{scope} is not halted.")
        return ResumeResult(scope, (await switch(actor, agent, on=True, reason=reason)).sentence, 0)
    sentence = halts.describe_resume(scope, ramp)
    agent = scope.removeprefix("agent:")
    if agent != scope and await _is_off(actor, agent):
        sentence = f"{sentence} {agent} is still off. Switch it on with: halter on {agent}{actor.option}"
    return ResumeResult(scope, sentence, ramp)


async def cancel(actor: Actor, session: Session, reason: Reason = "", max_wait: int = CANCEL_WAIT) -> SessionCancelled:
    """End a session. Running calls are cancelled."""
    actor.require_person("operator", "cancel a session")
    row = await actor.session(session)
    if row.ended_at is not None:
        fail_conflict(f"Session {row.session} has already ended ({row.state}: {row.terminal_reason}).")
    await actor.app.store.commit(halts.cancel(row.session, actor.principal.name, actor.app.ids.make(), clean(reason)))
    return SessionCancelled(row.session, *await _end_or_wait(actor, SessionId(row.session), max_wait))


async def switch(actor: Actor, agent: Agent, *, on: Switch, reason: Reason = "") -> SwitchResult:
    """Switch an agent on or off."""
    actor.require_person("operator", f"switch an agent {'on' if on else 'off'}")
    actor.require_agent(readable(agent, "agent name"))

    is_known = agent in await list_known_agents(actor)
    if not is_known and not actor.short_ids:
        raise NotDone(f"There is no agent {agent!r}.", "missing")
    if on:
        await turn_on(actor.app, agent, clean(reason), by=actor.principal.name)
        return SwitchResult(agent, f"{agent} is on: it runs where `halter up` has its folder.", on, is_known)
    stopped_sessions = await turn_off(actor.app, agent, clean(reason), by=actor.principal.name)
    consequence = f"stopped {' and '.join(stopped_sessions)}" if stopped_sessions else "no session was running"
    sentence = f"{agent} is off; {consequence}. `halter on {agent}` starts a new session."
    return SwitchResult(agent, sentence, on, is_known, stopped_sessions)


async def _is_at_rest(actor: Actor, agent: str) -> bool:
    """Return whether an agent is off, stopped or paused, so that only a person can start it."""
    store = actor.app.store
    is_stopped = any(each.agent == agent for each in await list_unhealthy(store, actor.app.clock.now()))
    open_sessions = await store.ask(Query("sessions_under_way", SessionRow))
    is_paused = any(row.agent == agent and row.state == "PAUSED" for row in open_sessions)
    return is_stopped or is_paused or await _is_off(actor, agent)


async def _is_off(actor: Actor, agent: str) -> bool:
    rows = await actor.app.store.ask(Query("all_agents", AgentRow))
    return any(row.agent == agent and not row.switched_on for row in rows)


async def list_known_agents(actor: Actor) -> frozenset[str]:
    """List the agents that were switched on or off, had a session, have a trigger, or run in a process."""
    store = actor.app.store
    switched_agents = {row.agent for row in await store.ask(Query("all_agents", AgentRow))}
    planned_agents = {row.agent for row in await store.ask(Query("all_triggers", TriggerRow)) if row.made_seq}
    running_agents = {
        agent for row in await store.ask(Query("all_workers", WorkerRow)) for agent in row.parse_info().agents
    }
    return frozenset(
        filter(
            actor.principal.can_see,
            switched_agents | planned_agents | running_agents | await list_recorded_agents(store),
        )
    )


def reject_unknown_agent(name: str, agent_names: Iterable[str]) -> NoReturn:
    """Reject an unknown agent; the error suggests the nearest names."""
    raise NotDone(
        f"There is no agent {name!r}: {suggest_nearest(name, sorted(agent_names), 'the agents here')}", "missing"
    )


async def _find_scope(actor: Actor, text: str) -> str:
    """Resolve a typed scope, agent name or session id to a scope; reject an unknown one."""
    kind, colon, name = text.partition(":")
    if text == "fleet" or (colon and kind not in ("agent", "trigger", "session")) or not (name or (not colon and text)):
        return readable_scope(text)
    readable(text, "scope")
    if kind == "session" and colon:
        return f"session:{(await actor.session(name)).session}"
    agents = await list_known_agents(actor)
    scope_name = name if colon else text
    if (kind == "trigger" and colon) or "/" in scope_name:
        rows = await actor.app.store.ask(Query("all_triggers", TriggerRow))
        triggers = sorted(row.trigger for row in rows if row.made_seq and actor.principal.can_see(row.agent))
        if scope_name in triggers or await _has_run(actor, scope_name):
            return f"trigger:{scope_name}"
        raise NotDone(
            f"There is no trigger {scope_name!r}: {suggest_nearest(scope_name, triggers, 'the triggers')}", "missing"
        )
    if scope_name in agents:
        return f"agent:{scope_name}"
    if not colon:
        try:
            return f"session:{(await actor.session(scope_name)).session}"
        except NotDone as error:
            if error.why != "missing":
                raise
            suggestion = suggest_nearest(scope_name, ["fleet", *sorted(agents)], "the scopes")
            raise NotDone(f"There is no agent and no session {scope_name!r}; {suggestion}", "missing") from None
    return reject_unknown_agent(scope_name, agents)


async def _end_or_wait(actor: Actor, session: SessionId, max_wait: int) -> tuple[CancelOutcome, str]:
    """End a session that has no owner; otherwise wait for the owner to end it."""
    app = actor.app
    worker = make_worker_id("cancel", app.ids)
    deadline_at = read_monotonic(app.clock) + max_wait
    while True:
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
        if row.ended_at is not None:
            return "ended", f"It has ended ({row.state}: {row.terminal_reason})."
        for lease in await app.store.claim(worker, 1, session):
            return await _end(actor, lease, row)
        if read_monotonic(app.clock) >= deadline_at:
            return "under way", await _describe_owner(app, row)
        await app.clock.sleep(POLL_INTERVAL)


async def _describe_owner(app: Runtime, row: SessionRow) -> str:
    """Describe the owner of a session that did not end in time. A killed owner has it until its lease expires."""
    owners = [each for each in await app.store.ask(Query("all_workers", WorkerRow)) if each.worker == row.owner]
    now = app.clock.now()
    if not owners or owners[0].alive(now):
        return f"Still running on {row.owner}; no new calls will start."
    wait_text = format_duration(max(SECOND, owners[0].alive_until - now))
    return (
        f"The process that ran it ({row.owner}) was killed; no new calls will start. Its lease expires in "
        f"{wait_text}: then end it with halter cancel {row.session}"
    )


async def _end(actor: Actor, lease: Lease, row: SessionRow) -> tuple[CancelOutcome, str]:
    """End a session that has no owner. Calls in doubt that hold money need a person's answer first."""
    app = actor.app
    try:
        if flights_with_hold := await end_unowned_session(app.store, app.ledger, app.clock, lease):
            parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_wake)
            await app.store.commit(
                lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/cancelled", parked)
            )
            return "in doubt", _doubtful(flights_with_hold)
    except LeaseLost:
        return "under way", "Another process has just claimed it and will end it."
    return "ended", "No process was running it; it was ended here (CANCELLED: cancelled)."


def _doubtful(flights: Sequence[InFlight]) -> str:
    amount = sum(flight.max_charge().usd for flight in flights)
    names = ", ".join(f"{flight.name} ({flight.id})" for flight in flights)
    return (
        f"Not ended: the outcome of {names} is unknown and {format_micros(amount)} is held. No new calls will start; "
        "`halter play --resume` asks you for the outcome and then ends the session."
    )


async def _has_run(actor: Actor, trigger: str) -> bool:
    """Return whether a trigger ever had a session."""
    if not actor.principal.can_see(trigger.partition("/")[0]):
        return False
    return bool(await actor.app.store.ask(Query("ran_as", NamedSession, {"agent": "", "trigger": trigger})))
