"""What a program logs while it waits leads a person to the store where the question is."""

import asyncio
import logging
from pathlib import Path

from halter import Agent, Store, tool
from halter.testing.models import TestModel


class Heard(logging.Handler):
    """Keeps the first sentence of the log, and tells that it came."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()
        self.sentence = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.sentence = self.sentence or record.getMessage()
        self.came.set()


@tool(level="PRIVILEGED")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


async def hear(store: str) -> tuple[str, asyncio.Task[object]]:
    """Run an agent whose store is overridden until it waits for a person; return what it logged."""
    agent, heard, logger = Agent("clerk", tools=[pay], store="own.db"), Heard(), logging.getLogger("halter")
    logger.addHandler(heard)

    async def run() -> object:
        with agent.override(model=TestModel(), store=store):
            return await agent.run("Pay.")

    task = asyncio.create_task(run())
    await heard.came.wait()
    logger.removeHandler(heard)
    return heard.sentence, task


async def test_the_sentence_names_the_store_of_an_override(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    sentence, task = await hear(str(other))
    assert sentence.endswith(f"Run: halter inbox --store {other}")
    async with Store(str(other)) as store:
        (need,) = await store.inbox()
        await store.deny(need.decision, by="ada")
    await task


async def test_the_sentence_says_that_nobody_can_answer_in_memory() -> None:
    sentence, task = await hear("memory:")
    assert sentence.endswith("Nobody can answer in a store in memory; pass a file as `store`.")
    task.cancel()
    await asyncio.wait([task])
