"""`halter budget`: caps and what is spent against them. `halter policy`: the policy that binds the whole store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from halter.cli.backtest import backtest, diff, suggest
from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    YesOption,
    command,
    fail,
    group,
    make_desk,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence
from halter.cli.terminal import confirm
from halter.config.merge import FleetConfig, read_fleet
from halter.config.policy import PolicyDifference
from halter.core.events import FleetPolicyAdopted
from halter.operations import money
from halter.operations.money import NONE_YET, StorePolicy, lines_of
from halter.present.backtest import DIFFERENCE_WORDS
from halter.present.events import format_moment
from halter.present.tables import build_budgets_sheet
from halter.runtime.runtime import Runtime, read_local_fleet

_show = command(
    money.budgets,
    """Show every current cap, what is spent and held against it, and what the last day was spent on.

    A hold is money reserved for a call or a request under way; it is settled with the real cost. What is kept of a
    session's cap pays for its wrap-up.
    """,
    build_budgets_sheet,
    look=True,
    fresh=True,
)

budget = group(
    "Show what is spent and held against every cap, or raise or lower one.",
    {
        "show": _show,
        "raise": command(
            money.set_cap,
            """Raise a cap, for its present window or for a session's whole life. Recorded with your name.

            Sessions in that scope that wait for more money continue by themselves.
            """,
            values={"direction": "raise"},
            json=lambda changed: changed,
        ),
        "lower": command(
            money.set_cap,
            """Lower a cap, even below what is spent already: then nothing more is admitted. Recorded with your name.

            What is under way continues: `halter halt` stops it.
            """,
            values={"direction": "lower"},
            json=lambda changed: changed,
        ),
    },
    _show,
)


def show_policy(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the store's policy, and how the local halter.yaml differs from it.

    The first halter.yaml used on a store becomes the store's policy. From then on the stricter of both counts.
    """
    written = report_errors(lambda: read_local_fleet(read_cli_settings(store)))
    found = run_with_app(store, lambda app: money.show(make_desk(app)), despite_doubt=True)
    differing = money.differences(found, written) if written is not None and found.digest else ()
    if as_json:
        answer_json({**msgspec.structs.asdict(found), "differences": differing})
        return
    rows = [[key, value] for key, value in lines_of(found.policy)]
    answer_table(
        "Policy of the store", ["key", "value"], rows, long="key value", empty=NONE_YET if not found.digest else ""
    )
    if found.digest:
        print_sentence(f"Adopted by {found.by} on {format_moment(found.at)} ({found.digest[:12]}).")
    if written is not None and found.digest:
        _compare(differing, written.source_map.file)


def _compare(differing: Sequence[PolicyDifference], file: str) -> None:
    if not differing:
        print_sentence(f"{file} says the same.")
        return
    rows = [[each.key, each.stored, each.written, DIFFERENCE_WORDS[each.how]] for each in differing]
    answer_table(f"Compared with {file}", ["key", "store", "file", "the file is"], rows, long="key store file")


def apply(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file (default: the halter.yaml used here).")
    ] = None,
    *,
    yes: YesOption = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a halter.yaml the policy of the store. Shows what changes, looser keys first, and asks.

    Recorded with your name. The fleet's caps bind every process on the store at once. Autonomous agents adopt the rest
    at once, too, others at their next start.
    """
    written = report_errors(lambda: _file(file, store))

    async def job(app: Runtime) -> FleetPolicyAdopted | None:
        actor = make_desk(app)
        before = await money.show(actor)
        differing = money.differences(before, written)
        if before.digest and not differing:
            return None
        if not as_json:
            _compare(differing, written.source_map.file)
        if not yes and not confirm(_question(before, differing)):
            fail("Nothing was changed.", EXIT_FAILED)
        return await money.apply(actor, before, written, reason)

    event = run_with_app(store, job)
    if as_json:
        answer_json({"changed": event is not None, **_object(event)})
    elif event is None:
        print_sentence(f"{written.source_map.file} is the store's policy already.")
    else:
        print_sentence(f"{written.source_map.file} is the store's policy now; it stands in the journal with your name.")


def _object(event: FleetPolicyAdopted | None) -> Mapping[str, Any]:
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


policy = group(
    "Show the policy that binds every process on the store, apply another file, or try one on the past first.",
    {"show": show_policy, "apply": apply, "diff": diff, "backtest": backtest, "suggest": suggest},
    show_policy,
)
