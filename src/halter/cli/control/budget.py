"""`halter budget`: caps and spending."""

from halter.cli.command import (
    command,
    group,
)
from halter.operations import money
from halter.present.tables import build_budgets_sheet

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
