"""`halter policy`: the policy that binds every process on the store, and a person's word to change it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from halter.app import App
from halter.app.desk import policy as desks
from halter.app.desk.policy import NONE_YET, StorePolicy, lines_of
from halter.app.policy import written_fleet
from halter.app.words.moments import written as when
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    desk_of,
    fail,
    saying_errors,
    settings_for,
    with_app,
)
from halter.cli.keyboard import confirm
from halter.cli.plain import PlainCommand, PlainGroup
from halter.config.fleet import Fleet, read_fleet
from halter.config.policy import Difference, Differs
from halter.core.events import FleetPolicyAdopted

MEANS: Final[Mapping[Difference, str]] = {
    "looser": "LOOSER",
    "stricter": "stricter",
    "fixed": "other",
    "free": "no limit",
}


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="policy", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    for name, command in (("show", show), ("apply", apply)):
        group.command(name, cls=PlainCommand)(command)
    return group


def _default(context: typer.Context, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the policy that binds every process on the store, or make another file that policy."""
    if context.invoked_subcommand is None:
        show(store=store, as_json=as_json)
    elif store is not None or as_json:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", WRONG_USE)


def show(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the store's policy, and how the halter.yaml that is used here differs from it.

    The first halter.yaml that is used on a store becomes the store's policy. From then on the stricter of both counts.
    """
    written = saying_errors(lambda: written_fleet(settings_for(store)))
    found = with_app(store, lambda app: desks.show(desk_of(app)), despite_doubt=True)
    differing = desks.differences(found, written) if written is not None and found.digest else ()
    if as_json:
        answer_json({**msgspec.structs.asdict(found), "differences": differing})
        return
    rows = [[key, value] for key, value in lines_of(found.policy)]
    answer_table(
        "Policy of the store", ["key", "value"], rows, long="key value", empty=NONE_YET if not found.digest else ""
    )
    if found.digest:
        say(f"Adopted by {found.by} on {when(found.at)} ({found.digest[:12]}).")
    if written is not None and found.digest:
        _compare(differing, written.places.file)


def _compare(differing: Sequence[Differs], file: str) -> None:
    if not differing:
        say(f"{file} says the same.")
        return
    rows = [[each.key, each.stored, each.written, MEANS[each.how]] for each in differing]
    answer_table(f"Compared with {file}", ["key", "store", "file", "the file is"], rows, long="key store file")


def apply(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A fleet's file (without it, the halter.yaml used here).")
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a halter.yaml the policy of the store. Shows what changes, what it loosens first, and asks.

    Recorded with your name. The fleet's caps count at once for every process on the store. Agents that run by
    themselves take up all else at once, too, and all others at their next start.
    """
    written = saying_errors(lambda: _file(file, store))

    async def job(app: App) -> FleetPolicyAdopted | None:
        desk = desk_of(app)
        before = await desks.show(desk)
        differing = desks.differences(before, written)
        if before.digest and not differing:
            return None
        if not as_json:
            _compare(differing, written.places.file)
        if not yes and not confirm(_question(before, differing)):
            fail("Nothing was changed.", NOT_FINE)
        return await desks.apply(desk, before, written, reason)

    event = with_app(store, job)
    if as_json:
        answer_json({"changed": event is not None, **_object(event)})
    elif event is None:
        say(f"{written.places.file} is the store's policy already.")
    else:
        say(f"{written.places.file} is the store's policy now; it stands in the journal with your name.")


def _object(event: FleetPolicyAdopted | None) -> Mapping[str, Any]:
    """Write a change for programs."""
    if event is None:
        return {}
    return {"digest": event.digest, "by": event.by, "replaces": event.replaces, "loosens": event.loosens}


def _file(file: Path | None, store: str | None) -> Fleet:
    found = read_fleet(file) if file is not None else written_fleet(settings_for(store))
    if found is None:
        fail("There is no halter.yaml here: name the file that is to be the store's policy.", WRONG_USE)
    return found


def _question(before: StorePolicy, differing: Sequence[Differs]) -> str:
    looser = sum(each.how == "looser" for each in differing)
    words = f", which is looser in {looser} of its keys" if looser and before.digest else ""
    return f"Make this the policy of the store{words}?"
