"""Control of running agents: halt, resume, cancel, switch, send a message; and accepting an older copy of a store."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, NoReturn

import msgspec
from msgspec import Meta

from halter.core.clock import SECOND
from halter.core.errors import ConfigError, LeaseLost, NotDone
from halter.core.events import SessionParked, StoreAccepted
from halter.core.ids import FLEET, Digest, SessionId, make_worker_id
from halter.core.money import format_micros
from halter.core.ports import Draft, Lease, Query, Write, offload_body
from halter.core.rows import AgentRow, HaltRow, SessionRow, TriggerRow, WorkerRow
from halter.core.text import clean, format_count, suggest_nearest, to_body
from halter.guard import halts
from halter.journal.open import OlderCopy
from halter.operations.desk import (
    CLEANED,
    LATEST,
    Actor,
    Agent,
    Done,
    Reason,
    Scope,
    Seconds,
    Session,
    fail_conflict,
    fail_invalid,
    readable,
    readable_scope,
)
from halter.operations.queries import agents_seen, read_all_events
from halter.redaction.redact import Redactor
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.needs import read_open_questions
from halter.runtime.runtime import find_continuity
from halter.state import lifecycle
from halter.state.session import InFlight, replay

PATIENCE: Final = 5 * SECOND
"""How long to wait for the owner of a session to end it."""
LOOK: Final = SECOND // 4
LONGEST_WORDS: Final = 100_000

Switch = Annotated[bool, Meta(description="On or off.")]
Text = Annotated[str, Meta(min_length=1, max_length=LONGEST_WORDS, description="The message.", extra={CLEANED: True})]

At = Annotated[
    int,
    Meta(
        ge=1, le=LATEST, description="Its last event that counts; the newest, if not given.", extra={"metavar": "SEQ"}
    ),
]
FirstWords = Annotated[
    str,
    Meta(
        max_length=LONGEST_WORDS,
        description="What the new session is told first.",
        extra={CLEANED: True, "argument": True, "metavar": "MESSAGE"},
    ),
]

Came = Literal["ended", "in doubt", "under way"]


class SessionCancelled(msgspec.Struct, frozen=True):
    """A cancelled session, and how far it has ended."""

    session: str
    came: Came
    sentence: str


class HaltDone(Done, frozen=True):
    """A halted scope. `known` is true: nothing unknown is halted."""

    known: bool


class ResumeResult(Done, frozen=True):
    """A resumed scope, and the time over which its sessions come back."""

    ramp: int


class SwitchResult(Done, frozen=True):
    """An agent that was switched on or off, whether it is known here, and the sessions that were stopped."""

    on: bool
    known: bool
    stopped: Sequence[str] = ()


class SessionForked(Done, frozen=True):
    """A session that begins with what was said in another one, up to an event."""

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
    """Stop everything in a scope, from this moment.

    An agent may halt, too.
    """
    actor.require_role("approver", "halt anything")
    scope = await _find_scope(actor, scope)
    await actor.require_scope(scope, "halt the fleet")
    await actor.app.store.commit(halts.halt(scope, actor.principal.name, actor.app.ids.make(), clean(reason)))
    sentence = f"{scope} is halted. Nothing acts there until `halter resume {scope}{actor.option}`."
    return HaltDone(scope, sentence, known=True)


async def resume(actor: Actor, scope: Scope, over_seconds: Seconds | None = None, reason: Reason = "") -> ResumeResult:
    """Resume a halted scope; an agent that is off, has stopped or is paused goes on as well."""
    actor.demand("operator", "lift a halt")
    scope = scope if scope.startswith(("agent:", "trigger:")) else await _find_scope(actor, scope)
    await actor.require_scope(scope, "lift a halt of the fleet")
    ramp = await halts.compute_ramp(actor.app.store, scope) if over_seconds is None else over_seconds * SECOND
    write = halts.resume(scope, actor.principal.name, actor.app.ids.make(), ramp, clean(reason))
    if not (await actor.app.store.commit(write)).events:
        kind, _, agent = scope.partition(":")
        if kind != "agent" or not await _is_at_rest(actor, agent):
            fail_conflict(f"{scope} is not halted.")
        return ResumeResult(scope, (await switch(actor, agent, on=True, reason=reason)).sentence, 0)
    return ResumeResult(scope, halts.describe_resume(scope, ramp), ramp)


async def cancel(actor: Actor, session: Session, reason: Reason = "", max_wait: int = PATIENCE) -> SessionCancelled:
    """End a session for good: what it has in flight is stopped, and nothing of it starts again."""
    actor.demand("operator", "cancel a session")
    row = await actor.session(session)
    if row.ended_at is not None:
        fail_conflict(f"Session {row.session} is over already: {row.state}, {row.terminal_reason}.")
    await actor.app.store.commit(halts.cancel(row.session, actor.principal.name, actor.app.ids.make(), clean(reason)))
    return SessionCancelled(row.session, *await _end_or_wait(actor, SessionId(row.session), max_wait))


async def switch(actor: Actor, agent: Agent, *, on: Switch, reason: Reason = "") -> SwitchResult:
    """Switch an agent on or off."""
    actor.demand("operator", f"switch an agent {'on' if on else 'off'}")
    actor.require_agent(readable(agent, "an agent"))
    from halter.runtime.supervisor import turn_off, turn_on

    known = agent in await list_known_agents(actor)
    if not known and not actor.short_ids:
        raise NotDone(f"There is no agent {agent!r}.", "missing")
    if on:
        await turn_on(actor.app, agent, clean(reason), by=actor.principal.name)
        return SwitchResult(agent, f"{agent} is on: it runs where `halter up` has its folder.", on, known)
    stopped = await turn_off(actor.app, agent, clean(reason), by=actor.principal.name)
    what = f"{' and '.join(stopped)} is stopped" if stopped else "nothing of it was running"
    sentence = f"{agent} is off, and {what}. `halter on {agent}` begins a new session."
    return SwitchResult(agent, sentence, on, known, stopped)


async def _is_at_rest(actor: Actor, agent: str) -> bool:
    """Return whether an agent goes on only after a person's word, although nothing halts it."""
    store = actor.app.store
    off = any(row.agent == agent and not row.switched_on for row in await store.ask(Query("all_agents", AgentRow)))
    stopped = any(row.agent == agent for row in await store.ask(Query("stopped_agents", SessionRow)))
    open_now = await store.ask(Query("sessions_under_way", SessionRow))
    return off or stopped or any(row.agent == agent and row.state == "PAUSED" for row in open_now)


async def list_known_agents(actor: Actor) -> frozenset[str]:
    """Name the agents that were switched on or off, had a session, have a trigger, or run in a process."""
    store = actor.app.store
    switched = {row.agent for row in await store.ask(Query("all_agents", AgentRow))}
    planned = {row.agent for row in await store.ask(Query("all_triggers", TriggerRow)) if row.made_seq}
    running = {agent for row in await store.ask(Query("all_workers", WorkerRow)) for agent in row.told().agents}
    return frozenset(filter(actor.principal.can_see, switched | planned | running | await agents_seen(store)))


def reject_unknown_agent(name: str, known: Iterable[str]) -> NoReturn:
    """Refuse the name of an agent that is not known here, with the nearest that are."""
    raise NotDone(f"There is no agent {name!r}: {suggest_nearest(name, sorted(known), 'the agents here')}", "missing")


async def _find_scope(actor: Actor, typed: str) -> str:
    """Find what is meant by a scope, by an agent's name, or by a session's id; refuse what is not known."""
    kind, colon, name = typed.partition(":")
    if (
        typed == "fleet"
        or (colon and kind not in ("agent", "trigger", "session"))
        or not (name or (not colon and typed))
    ):
        return readable_scope(typed)
    readable(typed, "a scope")
    if kind == "session" and colon:
        return f"session:{(await actor.session(name)).session}"
    agents = await list_known_agents(actor)
    query = name if colon else typed
    if (kind == "trigger" and colon) or "/" in query:
        rows = await actor.app.store.ask(Query("all_triggers", TriggerRow))
        triggers = sorted(row.trigger for row in rows if row.made_seq and actor.principal.can_see(row.agent))
        if query in triggers or await _has_run(actor, query):
            return f"trigger:{query}"
        raise NotDone(f"There is no trigger {query!r}: {suggest_nearest(query, triggers, 'the triggers')}", "missing")
    if query in agents:
        return f"agent:{query}"
    if not colon:
        try:
            return f"session:{(await actor.session(query)).session}"
        except NotDone as no:
            if no.why != "missing":
                raise
            words = suggest_nearest(query, ["fleet", *sorted(agents)], "what can be named")
            raise NotDone(f"No agent and no session is called {query!r}: {words}", "missing") from None
    return reject_unknown_agent(query, agents)


async def send_message(actor: Actor, session: Session, text: Text) -> Done:
    """Send a message to a session: it wakes, and sees it in its next turn."""
    actor.demand("operator", "speak to a session")
    row = await actor.session(session)
    if row.ended_at is not None:
        fail_conflict(
            f"Session {row.session} is over: {row.state}, {row.terminal_reason}. `halter chat` begins another one."
        )
    body, blob = await _store_text(actor, text)
    event = lifecycle.make_message_event(actor.principal.name)
    await actor.app.store.commit(lifecycle.post_wake(row.session, actor.app.ids.make(), event, body, blob))
    return Done(row.session, f"{row.session} was told.")


async def answer_question(actor: Actor, session: str, call: str, text: str, key: str) -> Done:
    """Answer the question that a session asked by a call; not one that it asks later. The same key answers once."""
    actor.demand("operator", "answer a session")
    row = await actor.session(session)
    asked = (await read_open_questions(actor.app.store)).get(row.session)
    if asked is None or asked.call != call:
        fail_conflict("This question is answered already, or is no longer asked.")
    body, blob = await _store_text(actor, text)
    write = lifecycle.answer_question(row, key, actor.principal.name, body, blob)
    if not (await actor.app.store.commit(write)).events:
        fail_conflict("This question is answered already.")
    return Done(row.session, f"{row.agent} has your answer, in session {row.session}.")


async def _store_text(actor: Actor, text: str) -> tuple[bytes | None, Digest | None]:
    if not text.strip() or len(text) > LONGEST_WORDS:
        fail_invalid(f"Say something, in at most {LONGEST_WORDS:,} characters.")
    return await offload_body(actor.app.store, to_body(_make_redactor(actor).redact(clean(text))))


async def fork(actor: Actor, session: Session, at: At | None = None, text: FirstWords = "") -> SessionForked:
    """Begin a new session with what was said in another one, up to one of its events.

    Its budget is its own. What was spent, approved or granted there is not inherited; what others wrote stays marked.
    """
    actor.demand("operator", "fork a session")
    row = await actor.session(session)
    from halter.runtime.sessions import begin_fork, read_fork

    try:
        found = await read_fork(actor.app.store, row, at)
        made = await begin_fork(actor.app, found, clean(text), actor.principal.name, _make_redactor(actor).redact)
    except ConfigError as error:
        fail_conflict(str(error))
    sentence = (
        f"{made} begins with {format_count(len(found.messages), 'message')} of {row.session}, up to its event "
        f"{found.history.through}, with a budget of its own. To run it: halter run FOLDER --resume {made}{actor.option}"
    )
    return SessionForked(made, sentence, row.session, found.history.through, len(found.messages))


def _make_redactor(actor: Actor) -> Redactor:
    secrets = read_environment_secrets(actor.app.environ)
    return Redactor({name: secrets.value(name) for name in secrets.names()}, actor.app.environ)


async def _end_or_wait(actor: Actor, session: SessionId, max_wait: int) -> tuple[Came, str]:
    """End a session that has no owner; otherwise wait for the owner to end it."""
    app = actor.app
    worker = make_worker_id("cancel", app.ids)
    deadline = app.clock.now() + max_wait
    while True:
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
        if row.ended_at is not None:
            return "ended", f"It is over: {row.state}, {row.terminal_reason}."
        for lease in await app.store.claim(worker, 1, session):
            return await _end(actor, lease, row)
        if app.clock.now() >= deadline:
            return "under way", f"A process works on it and has not ended it yet ({row.owner}); it starts nothing more."
        await app.clock.sleep(LOOK)


async def _end(actor: Actor, lease: Lease, row: SessionRow) -> tuple[Came, str]:
    """End a session in its owner's place. Calls in doubt that hold money need a person's answer first."""
    app = actor.app
    state = replay(await read_all_events(app, lease.stream))
    held = [flight for flight in state.in_flight.values() if flight.max_charge().usd or flight.max_charge().tokens]
    free = [flight for flight in state.in_flight.values() if flight not in held]
    try:
        if held:
            parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_wake)
            await app.store.commit(
                lifecycle.park_session(lease, f"{lease.session}/{lease.generation}/cancelled", parked)
            )
            return "in doubt", _doubtful(held)
        await app.ledger.settle_in_doubt(lease, free)
        asked = await lifecycle.read_questions(app.store, lease.session, app.clock.now())
        await app.store.commit(lifecycle.end_session(lease, "CANCELLED", "cancelled", state.parent, asked=asked))
    except LeaseLost:
        return "under way", "Another process took it at this moment, and will end it."
    return "ended", "No process had it, so it was ended here: CANCELLED, cancelled."


def _doubtful(held: list[InFlight]) -> str:
    amount = sum(flight.max_charge().usd for flight in held)
    names = ", ".join(f"{flight.name} ({flight.id})" for flight in held)
    return (
        f"It is not over: {format_micros(amount)} is held for {names}, and it is unknown whether it was done. Nothing "
        "of it starts again; halter play --resume asks you about that, and then ends it."
    )


async def _has_run(actor: Actor, trigger: str) -> bool:
    """Return whether a trigger ever had a session."""
    if not actor.principal.can_see(trigger.partition("/")[0]):
        return False
    return bool(await actor.app.store.ask(Query("ran_as", NamedSession, {"agent": "", "trigger": trigger})))


async def accept(actor: Actor, reason: str = "") -> OlderCopy:
    """Accept a store as it is. The journal and the checkpoints record who did it and what is missing."""
    app, doubt = actor.app, actor.app.doubt
    actor.demand("admin", "go on with a store that lacks something")
    actor.require_all_agents("go on with a store that lacks something")
    if doubt is None:
        fail_conflict("The store has all that its checkpoints know: there is nothing to accept.")
    event = StoreAccepted(
        by=actor.principal.name,
        lacks=doubt.describe_missing(),
        events=doubt.events,
        known_at=doubt.at,
        reason=clean(reason),
    )
    done = await app.store.commit(Write(FLEET, app.ids.make(), lambda _: [Draft(event)]))
    # A store in doubt is opened without an observer, so that no checkpoint is written that it fits: it begins here.
    app.checkpointer.accept(doubt.count_given_up)
    app.checkpointer.on_commit(done.events)
    continuity = find_continuity(app.settings)
    if continuity is not None:
        continuity.remember(app.checkpointer.store_id)
    return doubt
