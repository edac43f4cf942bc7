"""`halter budget`: what stands against every cap, and raising or lowering one.

`halter policy`: the policy that binds every process on the store, and a person's word to change it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    ScopeArgument,
    StoreOption,
    fail,
    make_desk,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.commands import PlainCommand, PlainGroup
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, say
from halter.cli.terminal import confirm
from halter.config.merge import FleetConfig, read_fleet
from halter.config.policy import DifferenceKind, PolicyDifference
from halter.core.events import FleetPolicyAdopted
from halter.core.money import format_micros, format_unit_amount, format_usd
from halter.operations import money
from halter.operations import money as desks
from halter.operations.money import NONE_YET, Budget, Direction, StorePolicy, amount_of, lines_of
from halter.present.events import format_moment as when
from halter.runtime.runtime import Runtime, read_local_fleet


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="budget", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    for name, command in (("show", show), ("raise", raise_cap), ("lower", lower_cap)):
        group.command(name, cls=PlainCommand)(command)
    return group


EverythingOption = Annotated[bool, typer.Option("--everything", help="Show windows that are over, too.")]


def _default(
    context: typer.Context,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
    everything: EverythingOption = False,
) -> None:
    """Show what is spent and held against every cap, or raise or lower one."""
    if context.invoked_subcommand is None:
        show(store=store, as_json=as_json, everything=everything)
    elif store is not None or as_json or everything:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", EXIT_USAGE)


def show(*, store: StoreOption = None, as_json: JsonOption = False, everything: EverythingOption = False) -> None:
    """Show every cap that counts now, what is spent and held against it, and what the last day was spent on.

    A hold is money kept back for a call or a request that is under way; it is settled with what that really cost.
    What is kept of a session's cap pays for its last words.
    """
    found = run_with_app(store, lambda app: money.budgets(make_desk(app), everything=everything), despite_doubt=True)
    if as_json:
        answer_json(found)
        return
    kept = any(row.kept for row in found.budgets)
    answer_table(
        "Budgets",
        ["scope", "window", "cap", "spent", "held", *(["kept"] if kept else []), "left", "set by"],
        [_budget_line(row, kept=kept) for row in found.budgets],
        right="cap spent held kept left",
        long="scope window",
        empty="Nothing was spent or held yet.",
    )
    answer_table(
        "Spent in the last 24 hours",
        ["agent", "purpose", "on", "times", "cost"],
        [
            [line.agent, line.purpose, line.name, str(line.spends), format_usd(line.spent_usd)]
            for line in found.last_day
        ],
        right="times cost",
        empty="Nothing was spent in the last 24 hours.",
    )


def _budget_line(row: Budget, *, kept: bool) -> list[str]:
    cap = "none" if row.cap is None else format_unit_amount(row.cap, row.unit)
    left = "" if row.left is None else format_unit_amount(row.left, row.unit)
    spent, held = format_unit_amount(row.spent, row.unit), format_unit_amount(row.held, row.unit)
    reserve = ([format_unit_amount(row.kept, row.unit)] if row.kept else [""]) if kept else []
    return [row.scope, row.window or "its life", cap, spent, held, *reserve, left, row.cap_by or "config"]


CapArgument = Annotated[str, typer.Argument(help="The new cap in dollars, or none.")]
WindowOption = Annotated[
    str, typer.Option("--window", metavar="WINDOW", help="Which window, as in day/2026-11-15, if there are several.")
]


def raise_cap(
    scope: ScopeArgument,
    cap: CapArgument,
    *,
    window: WindowOption = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Raise a cap, for its present window or for a session's whole life. Recorded with your name.

    What waits for more money in that scope goes on by itself.
    """
    _change("raise", scope, cap, window, reason, store, as_json=as_json)


def lower_cap(
    scope: ScopeArgument,
    cap: CapArgument,
    *,
    window: WindowOption = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lower a cap, also below what is spent already: then nothing more is admitted. Recorded with your name.

    What is under way is not stopped by it: `halter halt` does that.
    """
    _change("lower", scope, cap, window, reason, store, as_json=as_json)


def _change(
    direction: Direction, scope: str, cap: str, window: str, reason: str, store: str | None, *, as_json: bool
) -> None:
    amount = report_errors(lambda: amount_of(cap))
    changed = run_with_app(
        store, lambda app: money.change_cap(make_desk(app), direction, scope, amount, window, reason)
    )
    if as_json:
        answer_json(changed)
        return
    limit = "no cap" if amount is None else f"a cap of {format_micros(amount)}"
    say(f"{scope} has {limit} now; it stands in the journal with your name.")


DIFFERENCE_LABELS: Final[Mapping[DifferenceKind, str]] = {
    "looser": "LOOSER",
    "stricter": "stricter",
    "fixed": "other",
    "free": "no limit",
}


def build_policy() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="policy", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default_policy)
    for name, command in (("show", show_policy), ("apply", apply)):
        group.command(name, cls=PlainCommand)(command)
    return group


def _default_policy(context: typer.Context, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the policy that binds every process on the store, or make another file that policy."""
    if context.invoked_subcommand is None:
        show_policy(store=store, as_json=as_json)
    elif store is not None or as_json:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", EXIT_USAGE)


def show_policy(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the store's policy, and how the halter.yaml that is used here differs from it.

    The first halter.yaml that is used on a store becomes the store's policy. From then on the stricter of both counts.
    """
    written = report_errors(lambda: read_local_fleet(read_cli_settings(store)))
    found = run_with_app(store, lambda app: desks.show(make_desk(app)), despite_doubt=True)
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


def _compare(differing: Sequence[PolicyDifference], file: str) -> None:
    if not differing:
        say(f"{file} says the same.")
        return
    rows = [[each.key, each.stored, each.written, DIFFERENCE_LABELS[each.how]] for each in differing]
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
    written = report_errors(lambda: _file(file, store))

    async def job(app: Runtime) -> FleetPolicyAdopted | None:
        desk = make_desk(app)
        before = await desks.show(desk)
        differing = desks.differences(before, written)
        if before.digest and not differing:
            return None
        if not as_json:
            _compare(differing, written.places.file)
        if not yes and not confirm(_question(before, differing)):
            fail("Nothing was changed.", EXIT_FAILED)
        return await desks.apply(desk, before, written, reason)

    event = run_with_app(store, job)
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


def _file(file: Path | None, store: str | None) -> FleetConfig:
    found = read_fleet(file) if file is not None else read_local_fleet(read_cli_settings(store))
    if found is None:
        fail("There is no halter.yaml here: name the file that is to be the store's policy.", EXIT_USAGE)
    return found


def _question(before: StorePolicy, differing: Sequence[PolicyDifference]) -> str:
    looser = sum(each.how == "looser" for each in differing)
    words = f", which is looser in {looser} of its keys" if looser and before.digest else ""
    return f"Make this the policy of the store{words}?"
