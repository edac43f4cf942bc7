"""Control of agents and sessions: halt, resume, cancel, switch on or off, message, fork; accept an older store."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, NoReturn

import msgspec
from msgspec import Meta

from halter.core.clock import SECOND, format_duration, read_monotonic
from halter.core.errors import ConfigError, LeaseLost, NotDone
from halter.core.events import SessionParked
from halter.core.ids import Digest, SessionId, make_worker_id
from halter.core.money import format_micros
from halter.core.ports import Draft, Lease, Query, offload_body
from halter.core.rows import AgentRow, HaltRow, SessionRow, TriggerRow, WorkerRow
from halter.core.text import clean, encode_body, format_count, suggest_nearest
from halter.core.tools import File
from halter.dispatch.heartbeat import end_unowned_session
from halter.guard import halts
from halter.journal.open import OlderCopy
from halter.operations.actor import (
    CLEANED,
    MAX_MESSAGE_CHARACTERS,
    MAX_SAFE_INTEGER,
    Actor,
    Agent,
    Done,
    Reason,
    Scope,
    Seconds,
    Session,
    Text,
    fail_conflict,
    fail_invalid,
    readable,
    readable_scope,
)
from halter.operations.queries import list_recorded_agents
from halter.redaction.redact import Redactor
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.needs import describe_continuation, list_unhealthy, read_open_questions
from halter.runtime.runtime import Runtime, accept_missing_events, find_continuity
from halter.state import lifecycle
from halter.state.session import InFlight

CANCEL_WAIT: Final = 5 * SECOND
"""How long to wait for the owner of a session to end it."""
POLL_INTERVAL: Final = SECOND // 4
"""Polling interval while a cancel waits."""

Switch = Annotated[bool, Meta(description="On or off.")]

Files = Annotated[
    tuple[File, ...],
    Meta(
        max_length=20,
        description="Files that come with the message: `data` in base64, `media_type` as in `image/png`, and `name`.",
    ),
]

ForkPoint = Annotated[
    int,
    Meta(
        ge=1, le=MAX_SAFE_INTEGER, description="The last event to copy (default: the newest).", extra={"metavar": "SEQ"}
    ),
]
FirstMessage = Annotated[
    str,
    Meta(
        max_length=MAX_MESSAGE_CHARACTERS,
        description="The first message to the new session.",
        extra={CLEANED: True, "argument": True, "metavar": "MESSAGE"},
    ),
]

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


class SessionForked(Done, frozen=True):
    """A new session with the messages of another one, up to an event."""

    session: str
    at: int
    messages: int


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
    from halter.runtime.supervisor import turn_off, turn_on

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


async def send_message(actor: Actor, session: Session, text: Text, files: Files = ()) -> Done:
    """Send a message to a session.

    The session wakes and reads it in its next turn.
    """
    actor.require_person("operator", "send a message to a session")
    row = await actor.session(session)
    if row.ended_at is not None:
        fail_conflict(
            f"Session {row.session} has ended ({row.state}: {row.terminal_reason}). Start a new one with `halter chat`."
        )
    body, blob = await _store_text(actor, text)
    continuation = await describe_continuation(actor.app.store, row.session, actor.app.clock.now())
    event, drafts = lifecycle.make_message_event(actor.principal.name), await _draft_files(actor, files)
    key = actor.app.ids.make()
    await actor.app.store.commit(lifecycle.post_wake(row.session, key, event, body, blob, files=drafts))
    return Done(row.session, f"Message sent to {row.session}. {continuation}")


async def _draft_files(actor: Actor, files: Sequence[File]) -> tuple[Draft, ...]:
    if not files:
        return ()
    from halter.runtime.document_index import draft_files, read_message_files

    try:
        message = await read_message_files(files)
    except ConfigError as error:
        fail_invalid(str(error))
    return await draft_files(actor.app.store, message, _make_redactor(actor).redact)


async def answer(actor: Actor, session: Session, text: Text, files: Files = ()) -> Done:
    """Answer the question that a session asks."""
    question = (await read_open_questions(actor.app.store)).get(session)
    call = "" if question is None else question.call
    return await answer_question(actor, session, call, text, actor.app.ids.make(), files)


async def answer_question(
    actor: Actor, session: str, call: str, text: str, key: str, files: Sequence[File] = ()
) -> Done:
    """Answer the question that a call of a session asked, but no later question. A key answers once."""
    actor.require_person("operator", "answer a session")
    row = await actor.session(session)
    question = (await read_open_questions(actor.app.store)).get(row.session)
    if question is None or question.call != call:
        fail_conflict("This question was already answered or withdrawn.")
    body, blob = await _store_text(actor, text)
    continuation = await describe_continuation(actor.app.store, row.session, actor.app.clock.now())
    drafts = await _draft_files(actor, files)
    write = lifecycle.answer_question(row, key, actor.principal.name, body, blob, drafts)
    if not (await actor.app.store.commit(write)).events:
        fail_conflict("This question was already answered.")
    return Done(row.session, f"Answer sent to {row.agent}, session {row.session}. {continuation}")


async def _store_text(actor: Actor, text: str) -> tuple[bytes | None, Digest | None]:
    if not text.strip() or len(text) > MAX_MESSAGE_CHARACTERS:
        fail_invalid(f"A message needs 1 to {MAX_MESSAGE_CHARACTERS:,} characters.")
    return await offload_body(actor.app.store, encode_body(_make_redactor(actor).redact(clean(text))))


async def fork(actor: Actor, session: Session, at: ForkPoint | None = None, text: FirstMessage = "") -> SessionForked:
    """Create a session from the messages of another one, up to one of its events.

    It has its own budget. Spending, approvals and grants are not inherited; untrusted content stays marked.
    """
    actor.require_person("operator", "fork a session")
    row = await actor.session(session)
    from halter.runtime.session_start import begin_fork, read_fork

    try:
        source = await read_fork(actor.app.store, row, at)
        new_session = await begin_fork(
            actor.app, source, clean(text), actor.principal.name, _make_redactor(actor).redact
        )
    except ConfigError as error:
        fail_conflict(str(error))
    sentence = (
        f"Created {new_session} from {row.session} at event {source.history.through} "
        f"({format_count(len(source.messages), 'message')}). It has its own budget. "
        f"Run it with: halter run FOLDER --resume {new_session}{actor.option}"
    )
    return SessionForked(new_session, sentence, row.session, source.history.through, len(source.messages))


def _make_redactor(actor: Actor) -> Redactor:
    secrets = read_environment_secrets(actor.app.environ)
    return Redactor({name: secrets.value(name) for name in secrets.names()}, actor.app.environ)


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


async def accept(actor: Actor, reason: str = "") -> OlderCopy:
    """Accept a store that lacks events its checkpoints know.

    The journal and the checkpoints record who accepted it and what is missing.
    """
    app, doubt = actor.app, actor.app.older_copy
    actor.require_person("admin", "accept a store with missing events")
    actor.require_all_agents("accept a store with missing events")
    if doubt is None:
        fail_conflict("The store has every event that its checkpoints know: there is nothing to accept.")
    commit_result = await app.store.commit(accept_missing_events(doubt, app.ids.make(), actor.principal.name, reason))
    # A store in doubt is opened without an observer, so that no checkpoint confirms it: checkpoints start here.
    app.checkpointer.accept(doubt.matching_seq_by_stream)
    app.checkpointer.on_commit(commit_result.events)
    continuity = find_continuity(app.settings)
    if continuity is not None:
        continuity.remember(app.checkpointer.store_id)
    return doubt
