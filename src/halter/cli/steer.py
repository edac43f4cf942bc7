"""`halter halt`, `resume`, `cancel`: what a person says to agents that run."""

from typing import Annotated

import typer

from halter.app.desk import steering
from halter.cli.answer import answer_done, answer_json, say
from halter.cli.command import (
    NOT_FINE,
    JsonOption,
    ReasonOption,
    ScopeArgument,
    StoreOption,
    desk_of,
    duration,
    with_app,
)
from halter.cli.named import SessionArgument


def halt(
    scope: ScopeArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Stop everything in a scope: nothing starts, and what is in flight is cancelled within a second.

    It holds for every process on the store, and until somebody resumes the scope. `halter halt fleet` stops all
    agents.
    """
    done = with_app(store, lambda app: steering.halt(desk_of(app), scope, reason), despite_doubt=True)
    answer_done(done, as_json=as_json)


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
    """Let a halted scope act again. A fleet comes back over a second for each session, at most a minute.

    Leaves with 1 if the scope was not halted.
    """
    wanted = duration(over) if over else None
    done = with_app(store, lambda app: steering.resume(desk_of(app), scope, wanted, reason))
    answer_done(done, as_json=as_json)


def cancel(
    session: SessionArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """End a session for good: what it has in flight is stopped, and nothing of it starts again.

    Leaves with 1 if it is not over when this ends.
    """
    cancelled = with_app(store, lambda app: steering.cancel(desk_of(app), session, reason), despite_doubt=True)
    if as_json:
        answer_json({"subject": cancelled.session, "done": True, "ended": cancelled.came == "ended"})
    else:
        say(f"Session {cancelled.session} is cancelled. {cancelled.sentence}")
    if cancelled.came != "ended":
        raise typer.Exit(NOT_FINE)
