"""Many runs of one agent at once, under one cap for the day; each answer costs nearly what is held for it.

With the word `broken` nothing is held: each looks at what is spent, and spends if that is below the cap.
"""

import asyncio
import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing

from halter import Agent
from halter.core.clock import SystemClock
from halter.core.messages import Prompt, Reply, Text, TextListener
from halter.core.tools import Permit
from halter.core.usage import ModelName, Usage

STORE, RUNS, BROKEN = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["broken"]
DOLLAR = 1_000_000
WRITTEN = 1000


class Dear:
    """A model that uses all that it is given: what it read, and as many tokens as it may write."""

    name = ModelName("house", "dear")
    base_url: None = None

    def count(self, prompt: Prompt) -> int:
        return sum(len(part.text) for message in prompt.messages for part in message.parts if isinstance(part, Text))

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        await SystemClock().sleep(5_000)
        used = Usage(10, min(WRITTEN, prompt.max_output_tokens))
        return Reply((Text("Done.", "model", trusted=False),), "end", used)


agent = Agent(
    "crowd",
    store=STORE,
    model=Dear(),
    fleet={"models": {"house:dear": {"price": {"input": 1, "output": 100}}}},
    limits={
        "max_cost_usd_per_day": "none" if BROKEN else 1,
        "max_cost_usd": "none",
        "max_output_tokens": WRITTEN,
    },
)


def asked(query: str) -> int:
    with closing(sqlite3.connect(STORE)) as store:
        (answer,) = store.execute(query).fetchone()
        return answer


async def run(number: int) -> str:
    query = "SELECT coalesce(max(spent), 0) FROM budgets WHERE scope = 'fleet'"
    if BROKEN and asked(query) >= DOLLAR:
        return "refused"
    return (await agent.run(f"task {number}", id=f"{os.getpid()}-{number}")).state


async def main() -> Sequence[str]:
    """Let all run; those that the cap puts to sleep until tomorrow are left asleep."""
    asleep = f"SELECT count(*) FROM sessions WHERE state = 'SLEEPING' AND session LIKE '{os.getpid()}-%'"
    async with agent:
        runs = {asyncio.create_task(run(number)) for number in range(RUNS)}
        tasks, left = await asyncio.wait(runs, timeout=0)
        while len(left) > asked(asleep):
            tasks, left = await asyncio.wait(runs, timeout=0.02)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return [each.result() for each in tasks]


states = asyncio.run(main())
sys.stdout.write(f"{sum(state == 'COMPLETED' for state in states)} of {RUNS}\n")
