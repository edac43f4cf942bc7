"""Write a report about yesterday's sales, each morning.

    0 8 * * *  python report.py shop.db

Cron mails what it prints. However often it is started on a day, the report is written and paid once; a start after a
crash continues where the last one stopped.
"""

import sqlite3
import sys
from datetime import UTC, date, datetime, timedelta

from halter import Agent, Deps

reporter = Agent(
    "reporter",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    deps_type=sqlite3.Connection,
    max_cost_usd=0.25,
    instructions="Write five sentences for the owner of the shop. Compare the day with the same day a week before.",
)


@reporter.tool(level="SAFE", effect="read", reads="trusted")
async def read_sales(day: date, shop: Deps[sqlite3.Connection]) -> str:
    """Read how many pieces of each product were sold on a day."""
    query = "SELECT product, sum(pieces) FROM sales WHERE day = ? GROUP BY product ORDER BY 2 DESC"
    return "\n".join(f"{product}: {pieces}" for product, pieces in shop.execute(query, [day.isoformat()])) or "nothing"


def main(shop: str, today: date) -> None:
    day = today - timedelta(days=1)
    result = reporter.run_sync(
        f"Report the sales of {day:%A, %B %d, %Y}.", id=f"sales-{day}", deps=sqlite3.connect(shop)
    )
    print(result.require_output())


if __name__ == "__main__":
    main(sys.argv[1], datetime.now(UTC).date())
