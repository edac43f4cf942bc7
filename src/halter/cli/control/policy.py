"""`halter policy`: what binds the whole store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    YesOption,
    fail,
    group,
    make_desk,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.control.backtest import backtest, diff, suggest
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence
from halter.cli.terminal import confirm
from halter.config.merge import FleetConfig, read_fleet
from halter.config.policy import PolicyDifference
from halter.core.events import FleetPolicyAdopted
from halter.operations import money
from halter.operations.money import NO_POLICY_YET, StorePolicy, lines_of
from halter.present.moments import format_moment
from halter.present.tables import DIFFERENCE_WORDS
from halter.runtime.runtime import Runtime, read_local_fleet


def show_policy(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the store's policy, and how the local halter.yaml differs from it.

    The halter.yaml of a store's first session becomes its policy. After that, the stricter of both applies.
    """
    local_fleet = report_errors(lambda: read_local_fleet(read_cli_settings(store)))
    stored_policy = run_with_app(store, lambda app: money.show(make_desk(app)), despite_doubt=True)
    differences = (
        money.differences(stored_policy, local_fleet) if local_fleet is not None and stored_policy.digest else ()
    )
    if as_json:
        answer_json({**msgspec.structs.asdict(stored_policy), "differences": differences})
        return
    rows = [[key, value] for key, value in lines_of(stored_policy.policy)]
    answer_table(
        "Policy of the store",
        ["key", "value"],
        rows,
        long="key value",
        empty=NO_POLICY_YET if not stored_policy.digest else "",
    )
    if stored_policy.digest:
        print_sentence(
            f"Adopted by {stored_policy.by} on {format_moment(stored_policy.at)} ({stored_policy.digest[:12]})."
        )
    if local_fleet is not None and stored_policy.digest:
        _compare(differences, local_fleet.source_map.file)


def _compare(differences: Sequence[PolicyDifference], file: str) -> None:
    if not differences:
        print_sentence(f"{file} is identical.")
        return
    rows = [[each.key, each.stored, each.written, DIFFERENCE_WORDS[each.how]] for each in differences]
    answer_table(f"Compared with {file}", ["key", "store", "file", "the file is"], rows, long="key store file")


def apply(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Policy file (default: the halter.yaml used here).")
    ] = None,
    *,
    yes: YesOption = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a halter.yaml the policy of the store. Shows the changes, looser keys first, and asks.

    Recorded with your name. The fleet's caps bind every process on the store immediately. Autonomous agents also adopt
    the rest immediately, other agents at their next start.
    """
    fleet = report_errors(lambda: _file(file, store))

    async def job(app: Runtime) -> FleetPolicyAdopted | None:
        actor = make_desk(app)
        stored_policy = await money.show(actor)
        differences = money.differences(stored_policy, fleet)
        if stored_policy.digest and not differences:
            return None
        if not as_json:
            _compare(differences, fleet.source_map.file)
        if not yes and not confirm(_question(stored_policy, differences)):
            fail("Nothing was changed.", EXIT_FAILED)
        return await money.apply(actor, stored_policy, fleet, reason)

    event = run_with_app(store, job)
    if as_json:
        answer_json({"changed": event is not None, **_object(event)})
    elif event is None:
        print_sentence(f"{fleet.source_map.file} is already the store's policy.")
    else:
        print_sentence(f"Applied {fleet.source_map.file} as the store's policy (recorded in the journal).")


def _object(event: FleetPolicyAdopted | None) -> Mapping[str, Any]:
    if event is None:
        return {}
    return {"digest": event.digest, "by": event.by, "replaces": event.replaces, "loosens": event.loosens}


def _file(file: Path | None, store: str | None) -> FleetConfig:
    fleet = read_fleet(file) if file is not None else read_local_fleet(read_cli_settings(store))
    if fleet is None:
        fail("There is no halter.yaml here. Pass the file to apply.", EXIT_USAGE)
    return fleet


def _question(stored_policy: StorePolicy, differences: Sequence[PolicyDifference]) -> str:
    looser_count = sum(each.how == "looser" for each in differences)
    clause = f", which is looser in {looser_count} of its keys" if looser_count and stored_policy.digest else ""
    return f"Make this the policy of the store{clause}?"


policy = group(
    "Show the policy that binds every process on the store, apply another file, or backtest one first.",
    {"show": show_policy, "apply": apply, "diff": diff, "backtest": backtest, "suggest": suggest},
    show_policy,
)
