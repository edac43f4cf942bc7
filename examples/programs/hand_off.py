"""A help desk that answers easy questions, asks a colleague about prices, and hands customers over who want a refund.

    python hand_off.py "I was charged twice for order 7. I want my money back."

What all of them spend together never passes the cap of the desk.
"""

import sys

from halter import Agent

PRICES = {"basic": 9, "team": 29, "company": 99}

sales = Agent(
    "sales",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    instructions="Look up prices before you name them.",
)
refunds = Agent(
    "refunds",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    instructions="You talk to a customer who wants a refund. Read the order first, then decide.",
)
desk = Agent(
    "desk",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    max_cost_usd=0.50,
    instructions="Answer questions in one sentence. Ask your colleagues for what you do not know.",
    agents=[
        sales.as_tool("Knows all plans and prices.", max_cost_usd=0.10),
        refunds.as_tool("Takes over customers who want their money back.", hand_off=True),
    ],
)


@sales.tool(level="SAFE", effect="read", reads="trusted")
async def look_up_price(plan: str) -> str:
    """Look up what a plan costs in a month."""
    return f"{PRICES[plan]} dollars" if plan in PRICES else f"There are only these plans: {', '.join(PRICES)}."


@refunds.tool(level="SAFE", effect="read", reads="trusted")
async def read_order(order: int) -> str:
    """Read the payments of an order."""
    return f"order {order}: 29 dollars on May 2, 29 dollars on May 2"


def main(question: str) -> None:
    result = desk.run_sync(question)
    print(f"{result.require_output()}\n(${result.cost_usd})")


if __name__ == "__main__":
    main(*sys.argv[1:])
