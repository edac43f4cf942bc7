"""`halter halt`, `resume`, `cancel`: what a person says to agents that run."""

from typing import Annotated, Final, Literal

import typer

from halter.app import App
from halter.cli.answer import answer_json, say
from halter.cli.command import (
    NOT_FINE,
    JsonOption,
    ReasonOption,
    ScopeArgument,
    StoreOption,
    duration,
    fail,
    only_a_person,
    readable_scope,
    with_app,
)
from halter.cli.named import SessionArgument, all_events, session_meant
from halter.core.clock import SECOND
from halter.core.durations import shown_duration
from halter.core.errors import LeaseLost, StoreError
from halter.core.events import SessionParked
from halter.core.ids import SessionId, new_worker, session_stream
from halter.core.money import shown
from halter.core.ports import Lease, Query
from halter.core.rows import SessionRow
from halter.guard.halts import cancel as cancelling
from halter.guard.halts import halt as halting
from halter.guard.halts import resume as resuming
from halter.state import life
from halter.state.session import InFlight, replay

PATIENCE: Final = 5 * SECOND
"""How long a person waits for the owner of a session to end it: it hears of a halt within a second."""

LOOK: Final = SECOND // 4

Came = Literal["ended", "in doubt", "under way"]
"""What came of a cancelled session so far."""


def halt(
    scope: ScopeArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Stop everything in a scope: nothing starts, and what is in flight is cancelled within a second."""
    readable_scope(scope)

    async def job(app: App) -> bool:
        await app.store.commit(halting(scope, app.settings.person, app.ids.new(), reason))
        return await _ran_here(app, scope)

    known = with_app(store, job)
    if as_json:
        answer_json({"subject": scope, "done": True, "known": known})
        return
    say(f"{scope} is halted. Nothing acts there until `halter resume {scope}`.")
    if not known:
        say(f"Nothing has run here as {scope} so far: check the name, if that surprises you.")


def resume(
    scope: ScopeArgument,
    *,
    over: Annotated[
        str, typer.Option("--over", metavar="TIME", help="Let sessions go one after the other, as in 5m.")
    ] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a halted scope act again. After a halt of the fleet, its sessions come back over a minute."""
    readable_scope(scope)
    ramp = duration(over or ("1m" if scope == "fleet" else "0s"))

    async def job(app: App) -> bool:
        only_a_person(app, "lift a halt")
        write = resuming(scope, app.settings.person, app.ids.new(), ramp, reason)
        return bool((await app.store.commit(write)).events)

    if not with_app(store, job):
        fail(f"{scope} is not halted.", NOT_FINE)
    if as_json:
        answer_json({"subject": scope, "done": True})
    else:
        say(f"{scope} may act again{f', over {shown_duration(ramp)}' if ramp else ''}.")


def cancel(
    session: SessionArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """End a session for good: what it has in flight is stopped, and nothing of it starts again.

    Leaves with 1 if it is not over when this ends.
    """

    async def job(app: App) -> tuple[str, Came, str]:
        only_a_person(app, "cancel a session")
        row = await session_meant(app, session)
        if row.ended_at is not None:
            fail(f"Session {row.session} is over already: {row.state}, {row.terminal_reason}.", NOT_FINE)
        await app.store.commit(cancelling(row.session, app.settings.person, app.ids.new(), reason))
        return row.session, *await _ended(app, SessionId(row.session))

    whole, came, sentence = with_app(store, job)
    if as_json:
        answer_json({"subject": whole, "done": True, "ended": came == "ended"})
    else:
        say(f"Session {whole} is cancelled. {sentence}")
    if came != "ended":
        raise typer.Exit(NOT_FINE)


async def _ended(app: App, session: SessionId) -> tuple[Came, str]:
    """End a session that nobody works on; where somebody does, see whether they end it."""
    worker = new_worker("cancel", app.ids)
    deadline = app.clock.now() + PATIENCE
    while True:
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
        if row.ended_at is not None:
            return "ended", f"It is over: {row.state}, {row.terminal_reason}."
        for lease in await app.store.claim(worker, 1, session):
            return await _end(app, lease, row)
        if app.clock.now() >= deadline:
            return "under way", f"A process works on it and has not ended it yet ({row.owner}); it starts nothing more."
        await app.clock.sleep(LOOK)


async def _end(app: App, lease: Lease, row: SessionRow) -> tuple[Came, str]:
    """End a session in its owner's place. What is in doubt and holds money is left to whoever can tell about it."""
    state = replay(await all_events(app, session_stream(lease.session)))
    held = [flight for flight in state.in_flight.values() if flight.most().usd or flight.most().tokens]
    free = [flight for flight in state.in_flight.values() if flight not in held]
    try:
        if held:
            parked = SessionParked(state="PAUSED", inbox_seen=row.inbox_wake)
            await app.store.commit(life.park(lease, f"{lease.session}/{lease.generation}/cancelled", parked))
            return "in doubt", _doubtful(held)
        await app.purse.settle_in_doubt(lease, free)
        await app.store.commit(life.end(lease, "CANCELLED", "cancelled", state.parent))
    except LeaseLost:
        return "under way", "Somebody else took it at this moment, and will end it."
    return "ended", "Nobody was working on it, so it was ended here: CANCELLED, cancelled."


def _doubtful(held: list[InFlight]) -> str:
    amount = sum(flight.most().usd for flight in held)
    names = ", ".join(f"{flight.name} ({flight.id})" for flight in held)
    return (
        f"It is not over: {shown(amount)} is held for {names}, and nobody knows whether it was done. Nothing of it "
        "starts again; whoever takes it up (halter play --resume) asks you about that, and then ends it."
    )


async def _ran_here(app: App, scope: str) -> bool:
    """Tell whether a scope has ever had a session. The halt stands by now, so a store that fails here is no matter."""
    try:
        sessions = await app.store.ask(Query("all_sessions", SessionRow))
    except StoreError:
        return True
    names = {name for row in sessions for name in _scopes(row)}
    return scope == "fleet" or scope in names


def _scopes(row: SessionRow) -> tuple[str, str, str]:
    return f"session:{row.session}", f"agent:{row.agent}", f"trigger:{row.trigger}"
