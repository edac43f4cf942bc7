"""`halter prices`: the price table."""

import msgspec

from halter.cli.command import (
    JsonOption,
    StoreOption,
    command,
    group,
    make_desk,
    run_with_app,
)
from halter.cli.output import answer_json, print_sentence
from halter.operations import money
from halter.present.tables import build_prices_sheet
from halter.runtime.runtime import describe_price_update


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
