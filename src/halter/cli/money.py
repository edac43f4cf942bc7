"""`halter budget`: caps and spending. `halter policy`: what binds the whole store. `halter prices`: the price table."""

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
from halter.operations.money import NO_POLICY_YET, StorePolicy, lines_of
from halter.present.moments import format_moment
from halter.present.tables import DIFFERENCE_WORDS, build_budgets_sheet, build_prices_sheet
from halter.runtime.runtime import Runtime, describe_price_update, read_local_fleet

_show = command(
    money.budgets,
    """Show every current cap, what is spent and held against it, and the spending of the last day.

    A hold is money reserved for a running call or request; it is settled at the true cost. The reserve of a session's
    cap pays for its wrap-up.
    """,
    build_budgets_sheet,
    despite_doubt=True,
    allow_missing=True,
)

budget = group(
    "Show what is spent and held against every cap; raise or lower one.",
    {
        "show": _show,
        "raise": command(
            money.set_cap,
            """Raise a cap, for its current window or for the whole life of a session. Recorded with your name.

            Sessions in that scope that wait for a budget resume automatically.
            """,
            fixed_values={"direction": "raise"},
            json=lambda changed: changed,
        ),
        "lower": command(
            money.set_cap,
            """Lower a cap. Below the amount already spent, no more effects are admitted. Recorded with your name.

            Running effects continue; `halter halt` stops them.
            """,
            fixed_values={"direction": "lower"},
            json=lambda changed: changed,
        ),
    },
    _show,
)


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


def update(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Fetch the newest price table and keep it in the store. Needs the network; nothing else does.

    New models and higher prices count at once, for every process on the store. Lower prices and free models wait for
    your yes: halter prices accept. The address is `prices.url` in halter.yaml; by default it is that of genai-prices.
    """
    event = run_with_app(store, lambda app: money.update_prices(make_desk(app)), new=True)
    if as_json:
        answer_json({"changed": event is not None, **({} if event is None else msgspec.structs.asdict(event))})
    else:
        print_sentence("The newest price table is kept already." if event is None else describe_price_update(event))


_prices = command(
    money.read_prices,
    """Show the price tables in force, and the lower prices that wait for your yes.

    A fetched table counts beside the bundled one: of each model the higher price, until you accept the newest table.
    """,
    build_prices_sheet,
    despite_doubt=True,
    allow_missing=True,
)

prices = group(
    "Show or update the price table; accept lower prices.",
    {
        "show": _prices,
        "update": update,
        "accept": command(
            money.accept_prices,
            """Let the newest price table count as it is: its lower prices and its free models, too.

            Recorded with your name. The digest is that of the table that halter prices shows.
            """,
            json=lambda accepted: accepted,
        ),
    },
    _prices,
)
