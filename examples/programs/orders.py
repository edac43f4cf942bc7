"""An agent that answers questions about orders. Its tests are in `test_orders.py`."""

from dataclasses import dataclass

from halter import Agent, Deps


@dataclass
class Shop:
    customer: str
    orders: dict[int, str]


desk = Agent(
    "desk",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    deps_type=Shop,
    instructions="Answer questions of customers about their orders.",
)


@desk.tool(level="SAFE", effect="read", reads="trusted")
async def look_up(order: int, shop: Deps[Shop]) -> str:
    """Look up the state of an order."""
    return shop.orders.get(order, "unknown")


@desk.tool(level="RESTRICTED", effect="write", cost=0.05)
async def cancel(order: int, shop: Deps[Shop]) -> str:
    """Cancel an order that is not shipped yet."""
    if shop.orders.get(order) == "shipped":
        return "too late"
    shop.orders[order] = "cancelled"
    return "cancelled"
