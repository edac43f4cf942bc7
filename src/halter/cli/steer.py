"""`halter halt`, `resume`, `inbox`, `approve`, `deny`: what a person says to agents that run."""

from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer

from halter.app import App
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    StoreOption,
    answer_json,
    answer_table,
    fail,
    saying_errors,
    with_app,
)
from halter.core.durations import parse_duration, shown_duration
from halter.core.events import Verdict
from halter.core.ports import Write
from halter.core.text import from_body
from halter.guard.approvals import Open, decide, needs_you
from halter.guard.halts import halt as halting
from halter.guard.halts import resume as resuming

ScopeArgument = Annotated[str, typer.Argument(help="fleet, agent:NAME, trigger:NAME or session:ID")]
DecisionArgument = Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it stands in the journal.")]

SCOPES: Final = ("agent:", "trigger:", "session:")
WriteOf = Callable[[App], Write]


def halt(
    scope: ScopeArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Stop everything in a scope: nothing starts, and what is in flight is cancelled within a second."""
    _refuse_unknown(scope)
    done = _committed(store, lambda app: halting(scope, app.settings.person, app.ids.new(), reason))
    _say(as_json, scope, done, f"{scope} is halted. Nothing acts there until `halter resume {scope}`.")


def resume(
    scope: ScopeArgument,
    *,
    over: Annotated[str, typer.Option("--over", help="Let sessions go one after the other, as in 5m.")] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a halted scope act again. After a halt of the fleet, its sessions come back over a minute."""
    _refuse_unknown(scope)
    ramp = saying_errors(lambda: parse_duration(over or ("1m" if scope == "fleet" else "0s")))
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


def _refuse_unknown(scope: str) -> None:
    if scope != "fleet" and not any(scope.startswith(kind) and scope != kind for kind in SCOPES):
        fail(f"{scope!r} is no scope: write fleet, agent:NAME, trigger:NAME or session:ID.", WRONG_USE)


def _committed(store: str | None, write: WriteOf) -> bool:
    async def job(app: App) -> bool:
        return bool((await app.store.commit(write(app))).events)

    return with_app(store, job)


def _say(as_json: bool, subject: str, done: bool, sentence: str) -> None:
    if as_json:
        answer_json({"subject": subject, "done": done})
    else:
        typer.echo(sentence)
