"""`halter halt`, `resume`, `inbox`, `approve`, `deny`: what a person says to agents that run."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from halter.app import App
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    ScopeArgument,
    StoreOption,
    duration,
    fail,
    readable_scope,
    with_app,
)
from halter.core.durations import shown_duration
from halter.core.errors import StoreError
from halter.core.events import Verdict
from halter.core.ports import Query, Write
from halter.core.rows import SessionRow
from halter.core.text import from_body
from halter.guard.approvals import Open, decide, needs_you
from halter.guard.halts import halt as halting
from halter.guard.halts import resume as resuming

DecisionArgument = Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")]

WriteOf = Callable[[App], Write]


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
    done = _committed(store, lambda app: resuming(scope, app.settings.person, app.ids.new(), ramp, reason))
    if not done:
        fail(f"{scope} is not halted.", NOT_FINE)
    _say(as_json, scope, done, f"{scope} may act again{f', over {shown_duration(ramp)}' if ramp else ''}.")


def inbox(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what needs you: everything that waits for a yes or a no."""

    async def job(app: App) -> tuple[Sequence[Open], int]:
        return await needs_you(app.store), app.clock.now()

    waiting, now = with_app(store, job)
    if as_json:
        answer_json(waiting)
        return
    answer_table(
        "Needs you",
        ["decision", "agent", "what", "risk", "waits", "expires in", "shown"],
        [_line(one, now) for one in waiting],
        long="decision shown",
        empty="Nothing needs you.",
    )


def approve(decision: DecisionArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Say yes to exactly what was asked, once."""
    _decide(decision, "approve", store, as_json=as_json)


def deny(decision: DecisionArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Say no."""
    _decide(decision, "deny", store, as_json=as_json)


def _decide(decision: str, verdict: Verdict, store: str | None, *, as_json: bool) -> None:
    async def job(app: App) -> tuple[Open, bool]:
        meant = _meant(await needs_you(app.store), decision)
        write = decide(meant, verdict, app.settings.person, app.ids.new())
        return meant, bool((await app.store.commit(write)).events)

    meant, done = with_app(store, job)
    if not done:
        fail(f"{meant.decision} was decided by somebody else, or has expired, in the meantime.", NOT_FINE)
    said = "Approved" if verdict == "approve" else "Denied"
    _say(as_json, meant.decision, done, f"{said}: {meant.name} of {meant.agent}, session {meant.session}.")


def _meant(waiting: Sequence[Open], decision: str) -> Open:
    found = [one for one in waiting if one.decision.startswith(decision)]
    if len(found) == 1:
        return found[0]
    if not found:
        return fail(f"No open decision begins with {decision!r}: look at `halter inbox`.", WRONG_USE)
    return fail(f"{decision!r} could be any of {', '.join(one.decision for one in found)}.", WRONG_USE)


def _line(one: Open, now: int) -> list[str]:
    return [
        one.decision,
        one.agent,
        f"{one.about} {one.name}",
        one.risk or one.level,
        shown_duration(now - one.asked_at),
        shown_duration(max(0, one.expires_at - now)),
        from_body(one.body or b""),
    ]


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


def _committed(store: str | None, write: WriteOf) -> bool:
    async def job(app: App) -> bool:
        return bool((await app.store.commit(write(app))).events)

    return with_app(store, job)


def _say(as_json: bool, subject: str, done: bool, sentence: str) -> None:
    if as_json:
        answer_json({"subject": subject, "done": done})
    else:
        say(sentence)
