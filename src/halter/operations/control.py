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
    Agent,
    Desk,
    Done,
    Reason,
    Scope,
    Seconds,
    Session,
    readable,
    readable_scope,
    refused,
    wrong,
)
from halter.operations.queries import agents_seen, all_events
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


class Cancelled(msgspec.Struct, frozen=True):
    """A cancelled session, and how far it has ended."""

    session: str
    came: Came
    sentence: str


class HaltDone(Done, frozen=True):
    """A halted scope. `known` is true: nothing unknown is halted."""

    known: bool


class Resumed(Done, frozen=True):
    """A resumed scope, and the time over which its sessions come back."""

    ramp: int


class Switched(Done, frozen=True):
    """An agent that was switched on or off, whether it is known here, and the sessions that were stopped."""

    on: bool
    known: bool
    stopped: Sequence[str] = ()


class Forked(Done, frozen=True):
    """A session that begins with what was said in another one, up to an event."""

    session: str
    at: int
    messages: int


class NamedSession(msgspec.Struct, frozen=True):
    session: str


async def halts_now(desk: Desk) -> Sequence[HaltRow]:
    """List halts.

    A halt of the whole fleet is shown to everyone.
    """
    rows = await desk.app.store.ask(Query("halts_standing", HaltRow))
    return [row for row in rows if row.scope == "fleet" or desk.who.sees(await desk.agent_of(row.scope) or "")]


async def halt(desk: Desk, scope: Scope, reason: Reason = "") -> HaltDone:
    """Stop everything in a scope, from this moment.

    An agent may halt, too.
    """
    desk.demand_role("approver", "halt anything")
    scope = await _find_scope(desk, scope)
    await desk.demand_scope(scope, "halt the fleet")
    await desk.app.store.commit(halts.halt(scope, desk.who.name, desk.app.ids.new(), clean(reason)))
    sentence = f"{scope} is halted. Nothing acts there until `halter resume {scope}{desk.option}`."
    return HaltDone(scope, sentence, known=True)


async def resume(desk: Desk, scope: Scope, over_seconds: Seconds | None = None, reason: Reason = "") -> Resumed:
    """Resume a halted scope; an agent that is off, has stopped or is paused goes on as well."""
    desk.demand("operator", "lift a halt")
    scope = scope if scope.startswith(("agent:", "trigger:")) else await _find_scope(desk, scope)
    await desk.demand_scope(scope, "lift a halt of the fleet")
    ramp = await halts.compute_ramp(desk.app.store, scope) if over_seconds is None else over_seconds * SECOND
    write = halts.resume(scope, desk.who.name, desk.app.ids.new(), ramp, clean(reason))
    if not (await desk.app.store.commit(write)).events:
        kind, _, agent = scope.partition(":")
        if kind != "agent" or not await _is_at_rest(desk, agent):
            refused(f"{scope} is not halted.")
        return Resumed(scope, (await switch(desk, agent, on=True, reason=reason)).sentence, 0)
    return Resumed(scope, halts.describe_resume(scope, ramp), ramp)


async def cancel(desk: Desk, session: Session, reason: Reason = "", patience: int = PATIENCE) -> Cancelled:
    """End a session for good: what it has in flight is stopped, and nothing of it starts again."""
    desk.demand("operator", "cancel a session")
    row = await desk.session(session)
    if row.ended_at is not None:
        refused(f"Session {row.session} is over already: {row.state}, {row.terminal_reason}.")
    await desk.app.store.commit(halts.cancel(row.session, desk.who.name, desk.app.ids.new(), clean(reason)))
    return Cancelled(row.session, *await _ended(desk, SessionId(row.session), patience))


async def switch(desk: Desk, agent: Agent, *, on: Switch, reason: Reason = "") -> Switched:
    """Switch an agent on or off."""
    desk.demand("operator", f"switch an agent {'on' if on else 'off'}")
    desk.demand_agent(readable(agent, "an agent"))
    from halter.runtime.supervisor import turn_off, turn_on

    known = agent in await known_agents(desk)
    if not known and not desk.short_ids:
        raise NotDone(f"There is no agent {agent!r}.", "missing")
    if on:
        await turn_on(desk.app, agent, clean(reason), by=desk.who.name)
        return Switched(agent, f"{agent} is on: it runs where `halter up` has its folder.", on, known)
    stopped = await turn_off(desk.app, agent, clean(reason), by=desk.who.name)
    what = f"{' and '.join(stopped)} is stopped" if stopped else "nothing of it was running"
    sentence = f"{agent} is off, and {what}. `halter on {agent}` begins a new session."
    return Switched(agent, sentence, on, known, stopped)


async def _is_at_rest(desk: Desk, agent: str) -> bool:
    """Return whether an agent goes on only after a person's word, although nothing halts it."""
    store = desk.app.store
    off = any(row.agent == agent and not row.switched_on for row in await store.ask(Query("all_agents", AgentRow)))
    stopped = any(row.agent == agent for row in await store.ask(Query("stopped_agents", SessionRow)))
    open_now = await store.ask(Query("sessions_under_way", SessionRow))
    return off or stopped or any(row.agent == agent and row.state == "PAUSED" for row in open_now)


async def known_agents(desk: Desk) -> frozenset[str]:
    """Name the agents that were switched on or off, had a session, have a trigger, or run in a process."""
    store = desk.app.store
    switched = {row.agent for row in await store.ask(Query("all_agents", AgentRow))}
    planned = {row.agent for row in await store.ask(Query("all_triggers", TriggerRow)) if row.made_seq}
    running = {agent for row in await store.ask(Query("all_workers", WorkerRow)) for agent in row.told().agents}
    return frozenset(filter(desk.who.sees, switched | planned | running | await agents_seen(store)))


def refuse_unknown_agent(name: str, known: Iterable[str]) -> NoReturn:
    """Refuse the name of an agent that is not known here, with the nearest that are."""
    raise NotDone(f"There is no agent {name!r}: {suggest_nearest(name, sorted(known), 'the agents here')}", "missing")


async def _find_scope(desk: Desk, typed: str) -> str:
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
        return f"session:{(await desk.session(name)).session}"
    agents = await known_agents(desk)
    wanted = name if colon else typed
    if (kind == "trigger" and colon) or "/" in wanted:
        rows = await desk.app.store.ask(Query("all_triggers", TriggerRow))
        triggers = sorted(row.trigger for row in rows if row.made_seq and desk.who.sees(row.agent))
        if wanted in triggers or await _has_run(desk, wanted):
            return f"trigger:{wanted}"
        raise NotDone(f"There is no trigger {wanted!r}: {suggest_nearest(wanted, triggers, 'the triggers')}", "missing")
    if wanted in agents:
        return f"agent:{wanted}"
    if not colon:
        try:
            return f"session:{(await desk.session(wanted)).session}"
        except NotDone as no:
            if no.why != "missing":
                raise
            words = suggest_nearest(wanted, ["fleet", *sorted(agents)], "what can be named")
            raise NotDone(f"No agent and no session is called {wanted!r}: {words}", "missing") from None
    return refuse_unknown_agent(wanted, agents)


async def tell(desk: Desk, session: Session, text: Text) -> Done:
    """Send a message to a session: it wakes, and sees it in its next turn."""
    desk.demand("operator", "speak to a session")
    row = await desk.session(session)
    if row.ended_at is not None:
        refused(f"Session {row.session} is over: {row.state}, {row.terminal_reason}. `halter chat` begins another one.")
    body, blob = await _keep_words(desk, text)
    event = lifecycle.make_message_event(desk.who.name)
    await desk.app.store.commit(lifecycle.post_wake(row.session, desk.app.ids.new(), event, body, blob))
    return Done(row.session, f"{row.session} was told.")


async def answer_question(desk: Desk, session: str, call: str, text: str, key: str) -> Done:
    """Answer the question that a session asked by a call; not one that it asks later. The same key answers once."""
    desk.demand("operator", "answer a session")
    row = await desk.session(session)
    asked = (await read_open_questions(desk.app.store)).get(row.session)
    if asked is None or asked.call != call:
        refused("This question is answered already, or is no longer asked.")
    body, blob = await _keep_words(desk, text)
    write = lifecycle.answer_question(row, key, desk.who.name, body, blob)
    if not (await desk.app.store.commit(write)).events:
        refused("This question is answered already.")
    return Done(row.session, f"{row.agent} has your answer, in session {row.session}.")


async def _keep_words(desk: Desk, text: str) -> tuple[bytes | None, Digest | None]:
    if not text.strip() or len(text) > LONGEST_WORDS:
        wrong(f"Say something, in at most {LONGEST_WORDS:,} characters.")
    return await offload_body(desk.app.store, to_body(_make_redactor(desk).redact(clean(text))))


async def fork(desk: Desk, session: Session, at: At | None = None, text: FirstWords = "") -> Forked:
    """Begin a new session with what was said in another one, up to one of its events.

    Its budget is its own. What was spent, approved or granted there is not inherited; what others wrote stays marked.
    """
    desk.demand("operator", "fork a session")
    row = await desk.session(session)
    from halter.runtime.sessions import begin_fork, read_fork

    try:
        found = await read_fork(desk.app.store, row, at)
        made = await begin_fork(desk.app, found, clean(text), desk.who.name, _make_redactor(desk).redact)
    except ConfigError as error:
        refused(str(error))
    sentence = (
        f"{made} begins with {format_count(len(found.messages), 'message')} of {row.session}, up to its event "
        f"{found.history.through}, with a budget of its own. To run it: halter run FOLDER --resume {made}{desk.option}"
    )
    return Forked(made, sentence, row.session, found.history.through, len(found.messages))


def _make_redactor(desk: Desk) -> Redactor:
    secrets = read_environment_secrets(desk.app.environ)
    return Redactor({name: secrets.value(name) for name in secrets.names()}, desk.app.environ)


async def _ended(desk: Desk, session: SessionId, patience: int) -> tuple[Came, str]:
    """End a session that has no owner; otherwise wait for the owner to end it."""
    app = desk.app
    worker = make_worker_id("cancel", app.ids)
    deadline = app.clock.now() + patience
    while True:
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
        if row.ended_at is not None:
            return "ended", f"It is over: {row.state}, {row.terminal_reason}."
        for lease in await app.store.claim(worker, 1, session):
            return await _end(desk, lease, row)
        if app.clock.now() >= deadline:
            return "under way", f"A process works on it and has not ended it yet ({row.owner}); it starts nothing more."
        await app.clock.sleep(LOOK)


async def _end(desk: Desk, lease: Lease, row: SessionRow) -> tuple[Came, str]:
    """End a session in its owner's place. Calls in doubt that hold money need a person's answer first."""
    app = desk.app
    state = replay(await all_events(app, lease.stream))
    held = [flight for flight in state.in_flight.values() if flight.most().usd or flight.most().tokens]
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
    amount = sum(flight.most().usd for flight in held)
    names = ", ".join(f"{flight.name} ({flight.id})" for flight in held)
    return (
        f"It is not over: {format_micros(amount)} is held for {names}, and it is unknown whether it was done. Nothing "
        "of it starts again; halter play --resume asks you about that, and then ends it."
    )


async def _has_run(desk: Desk, trigger: str) -> bool:
    """Return whether a trigger ever had a session."""
    if not desk.who.sees(trigger.partition("/")[0]):
        return False
    return bool(await desk.app.store.ask(Query("ran_as", NamedSession, {"agent": "", "trigger": trigger})))


async def accept(desk: Desk, reason: str = "") -> OlderCopy:
    """Accept a store as it is. The journal and the checkpoints record who did it and what is missing."""
    app, doubt = desk.app, desk.app.doubt
    desk.demand("admin", "go on with a store that lacks something")
    desk.demand_all("go on with a store that lacks something")
    if doubt is None:
        refused("The store has all that its checkpoints know: there is nothing to accept.")
    event = StoreAccepted(
        by=desk.who.name, lacks=doubt.lacks(), events=doubt.events, known_at=doubt.at, reason=clean(reason)
    )
    done = await app.store.commit(Write(FLEET, app.ids.new(), lambda _: [Draft(event)]))
    # A store in doubt is opened without an observer, so that no checkpoint is written that it fits: it begins here.
    app.checkpointer.accept(doubt.given_up)
    app.checkpointer.saw(done.events)
    continuity = find_continuity(app.settings)
    if continuity is not None:
        continuity.remember(app.checkpointer.store_id)
    return doubt
