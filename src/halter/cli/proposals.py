"""`halter proposals`: what agents want remembered, and what a person makes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halter.app import App
from halter.app.words.moments import written
from halter.cli.answer import answer_block, answer_done, answer_json, say
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    desk_of,
    fail,
    only_a_person,
    with_app,
)
from halter.cli.keyboard import confirm
from halter.cli.plain import ListingGroup, PlainCommand
from halter.core.left import Kept

if TYPE_CHECKING:
    from halter.app.desk.left import Among, Settled
    from halter.app.keeping import Left

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Its id; the beginning will do.")]


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(
        name="proposals", cls=ListingGroup, help="Show what agents want remembered; keep or dismiss it."
    )
    for name, command in (("list", show), ("keep", keep), ("dismiss", dismiss), ("promote", promote)):
        group.command(name, cls=PlainCommand)(command)
    return group


def show(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List memories and precedents that agents propose, the newest first, with what became of them.

    No session is told of one before somebody has kept it.
    """
    from halter.app.desk.left import proposals

    found = with_app(store, lambda app: proposals(desk_of(app)), despite_doubt=True)
    show_left(found, "No agent has proposed anything yet.", as_json=as_json)


def show_left(found: "Sequence[Left]", empty: str, *, as_json: bool) -> None:
    """Show what sessions left behind."""
    if as_json:
        answer_json(found)
        return
    if not found:
        say(empty)
    for left in found:
        answer_block("", _facts(left))


def _facts(left: "Left") -> list[tuple[str, str]]:
    checked = ", ".join(part for part in (left.severity, left.support, left.review) if part)
    return [
        (left.about, left.id),
        ("says", left.text),
        ("from", f"{left.agent}, session {left.session}, {written(left.at)}"),
        ("seen", f"{left.observed_count} times" if left.observed_count > 1 else ""),
        ("checked", checked),
        ("status", f"{left.status} by {left.by}" if left.status else "open"),
    ]


def keep(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep it: later sessions of its agent are told of it.

    They are told of what was kept last, as far as it fits; `promote` lets all of them read it always.
    """
    settle(id, "kept", "proposals", reason, store, as_json=as_json)


def dismiss(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dismiss it: no session is told of it.

    It stays on the list as dismissed, with your name and reason.
    """
    settle(id, "dismissed", "proposals", reason, store, as_json=as_json)


def settle(wanted: str, status: Kept, among: "Among", reason: str, store: str | None, *, as_json: bool) -> None:
    """Let a person say what becomes of something."""
    from halter.app.desk import left

    done = with_app(store, lambda app: left.settle(desk_of(app), wanted, status, among, reason))
    answer_done(done, as_json=as_json)


def promote(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write it into the agent's own AGENTS.md, which all of its sessions read. It is shown and asked about first.

    It is settled as promoted, with your name and reason. What stands in the file already is kept.
    """
    if as_json and not yes:
        fail("Nobody can be asked here: add --yes, if you have looked at it.", WRONG_USE)

    async def job(app: App) -> "Settled":
        from halter.app import keeping
        from halter.app.desk.agents import promote_into
        from halter.app.desk.left import left_meant

        only_a_person(app, "promote anything")
        left = await left_meant(desk_of(app), id, "proposals")
        text = keeping.promoted(folder, left)
        if not yes:
            say(f"{folder / keeping.CONTEXT_FILE} would say:\n\n{text}", at_once=True)
            if not confirm("Write it so?"):
                fail("Nothing was written.", NOT_FINE)
        return await promote_into(desk_of(app), left, folder, reason)

    answer_done(with_app(store, job), as_json=as_json)
