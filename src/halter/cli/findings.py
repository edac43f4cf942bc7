"""`halter findings`: what sessions found, and what a person makes of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from halter.app import App
from halter.cli.command import JsonOption, ReasonOption, StoreOption, desk_of, with_app
from halter.cli.named import MOST, session_meant
from halter.cli.plain import ListingGroup, PlainCommand
from halter.cli.proposals import IdArgument, settle, show_left

if TYPE_CHECKING:
    from halter.app.keeping import Left


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="findings", cls=ListingGroup, help="Show what sessions found; keep or dismiss it.")
    for name, command in (("list", show), ("keep", keep), ("dismiss", dismiss)):
        group.command(name, cls=PlainCommand)(command)
    return group


def show(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Only those of this session.")] = "",
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MOST, help="How many of the newest.")] = 50,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what sessions found, the newest first, with what was checked of it.

    A quote was looked for in its document, and where the agent has judges, somebody else than its author looked at
    it.
    """

    async def job(app: App) -> "Sequence[Left]":
        from halter.app.desk.left import findings

        wanted = (await session_meant(app, session)).session if session else ""
        return await findings(desk_of(app), wanted, limit)

    show_left(with_app(store, job, despite_doubt=True), "Nothing was found yet.", as_json=as_json)


def keep(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep it.

    It stays on the list as kept, with your name and reason.
    """
    settle(id, "kept", "findings", reason, store, as_json=as_json)


def dismiss(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dismiss it.

    It stays on the list as dismissed, with your name and reason; nothing is deleted.
    """
    settle(id, "dismissed", "findings", reason, store, as_json=as_json)
