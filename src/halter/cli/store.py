"""`halter store`: whether the store has all that its checkpoints know, and going on without what is missing."""

from typing import Annotated

import msgspec
import typer

from halter.app import App
from halter.app.opened import continuity_of
from halter.cli.answer import answer_json, say, warn
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    desk_of,
    fail,
    only_a_person,
    saying_errors,
    settings_for,
    with_app,
)
from halter.cli.keyboard import confirm
from halter.cli.plain import PlainCommand, PlainGroup


class Whole(msgspec.Struct, frozen=True):
    """Whether a store has all that its checkpoints know; if not, how many events are known to be missing."""

    store: str
    whole: bool
    missing: int = 0
    sentence: str = ""


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="store", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    group.command("accept", cls=PlainCommand)(accept)
    return group


def _default(context: typer.Context, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Tell whether the store has all that its checkpoints know, or go on without what is missing.

    Leaves with 1 if something is missing.
    """
    if context.invoked_subcommand is None:
        _show(store, as_json=as_json)
    elif store is not None or as_json:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", WRONG_USE)


def _show(store: str | None, *, as_json: bool) -> None:
    async def job(app: App) -> Whole:
        if app.doubt is None:
            return Whole(app.checkpointer.store_id, whole=True)
        return Whole(app.checkpointer.store_id, False, app.doubt.events, app.doubt.sentence())

    found = with_app(store, job, warned=False, despite_doubt=True)
    if as_json:
        answer_json(found)
    else:
        say(found.sentence or f"The store {found.store} has all that its newest checkpoints know.")
    if not found.whole:
        raise typer.Exit(NOT_FINE)


def accept(
    *,
    reason: ReasonOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a store that lacks what its checkpoints know, such as a backup, without what is missing.

    It says what is missing and asks first, unless --yes is given. The journal and the checkpoints keep who did it.
    What happened outside since then is not undone: look at `halter inbox` before you let agents run.
    """

    async def job(app: App) -> int | None:
        from halter.app.desk import stores

        only_a_person(app, "go on with a store that lacks something")
        if app.doubt is None:
            return None
        if not yes:
            warn(app.doubt.lacks())
            if not confirm("Go on without it? This cannot be undone."):
                fail("Nothing was accepted.", NOT_FINE)
        done = await stores.accept(desk_of(app), reason)
        if app.checkpointer.problem:
            warn(app.checkpointer.problem)
        return done.events

    settings = saying_errors(lambda: settings_for(store))
    continuity = saying_errors(lambda: continuity_of(settings))
    gone = None if continuity is None else continuity.gone()
    missing = with_app(store, job, new=gone is not None, despite_doubt=True, warned=False, settings=settings)
    if as_json:
        answer_json({"subject": "store", "done": missing is not None, "missing": missing or 0})
    elif missing is None:
        say("The store has all that its newest checkpoints know: there is nothing to accept.")
    else:
        say("The store is accepted as it is. Agents run on it from their next start.")
