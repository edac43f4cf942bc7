"""Twenty parallel spenders under one cap. Killed at any moment and started again, they go on where they were."""

import asyncio
import sys
from contextlib import suppress

from halter import Guard, Output, SessionAlreadyEnded

guard = Guard(
    sys.argv[1],
    agent="spender",
    fleet={"limits": {"max_cost_usd_per_day": 1.00}},
    policy={"limits": {"max_cost_usd": 0.20}},
    lease=0.5,
)


@guard.tool(level="SAFE", cost=0.03, idempotent=True)
async def spend() -> Output:
    """Spend two cents of the three that are held."""
    sys.stdout.write("spending\n")
    sys.stdout.flush()
    await asyncio.sleep(0.005)
    return Output("spent", 20_000)


async def spender(number: int) -> None:
    with suppress(SessionAlreadyEnded):
        async with guard.session(f"spender {number}", id=f"spender-{number}") as session:
            for call in range(4):
                await session.attempt(f"{call}", spend)


async def main() -> None:
    async with guard, asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(spender(number))


asyncio.run(main())
