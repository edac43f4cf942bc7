"""Agents of programs, for tests: a clock that runs fast, prices, and what their journals add up to."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from halter import Agent, Result, StreamChunk
from halter.core.clock import SECOND
from halter.core.ids import SortableIds
from halter.core.money import micros_to_usd
from halter.core.usage import ModelName
from halter.journal.open import open_store
from halter.models.scripted import Scripted, ScriptLine

NOON = 1_767_268_800 * SECOND
FAST = 200
"""So many seconds pass in one: a back-off is over at once, and no test waits."""
PRICED = {"models": {f"scripted:{name}": {"price": {"input": 1, "output": 10}} for name in ("first", "second")}}


class FastClock:
    """A clock that runs ahead of the machine's."""

    def __init__(self) -> None:
        self._began = time.monotonic_ns()

    def now(self) -> int:
        return NOON + (time.monotonic_ns() - self._began) // 1000 * FAST

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / SECOND / FAST)


class Bench:
    """A folder with one store, on which agents are made anew as in another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "runs.db"
        self.clock = FastClock()
        self.models: list[Scripted] = []

    def agent(self, *lines: ScriptLine, fallback: Any = None, **more: Any) -> Agent:
        """Make an agent that says these lines; without any, one whose model is named in `more`."""
        if lines:
            self.models.append(Scripted(lines, self.clock, ModelName("scripted", "first")))
            more["model"] = self.models[-1]
        if fallback:
            more["fallback_models"] = [Scripted(fallback, self.clock, ModelName("scripted", "second"))]
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder / ".local" / "state")}
        values = {"store": self.file, "clock": self.clock, "lease": 3600, "environ": home, "person": "ada"}
        return Agent("desk", **{**values, **more})

    async def person(self, *writes: Any) -> None:
        """Write what a person writes, from elsewhere."""
        store = open_store(str(self.file), clock=self.clock, ids=SortableIds(self.clock.now))
        for write in writes:
            await store.commit(write)
        await store.close()

    def facts(self, *kinds: str) -> list[dict[str, Any]]:
        """Read events with plain SQL."""
        text = ", ".join("?" for _ in kinds)
        query = f"SELECT kind, facts FROM events WHERE kind IN ({text}) ORDER BY stream, seq"
        with closing(sqlite3.connect(self.file)) as file:
            return [{"kind": kind, **msgspec.json.decode(facts)} for kind, facts in file.execute(query, kinds)]

    def balanced(self, result: Result[Any]) -> None:
        """Every attempt has its end, and its money stands in the receipt: nothing is lost, nothing counted twice."""
        results = [fact["request"] for fact in self.facts("request_started")]
        fields = self.facts("request_settled")
        assert sorted(results) == sorted(fact["request"] for fact in fields)
        assert len(set(results)) == len(results)
        payloads = (*fields, *self.facts("call_settled"))
        charged = sum(fact.get("charge", {}).get("usd", 0) for fact in payloads)
        assert result.receipt.cost_usd == micros_to_usd(charged) == result.cost_usd
        with closing(sqlite3.connect(self.file)) as file:
            (held,) = file.execute("SELECT coalesce(sum(held), 0) FROM budgets").fetchone()
            query = "SELECT coalesce(sum(spent), 0) FROM budgets WHERE scope = 'fleet' AND unit = 'usd'"
            (spent,) = file.execute(query).fetchone()
        assert (held, spent) == (0, charged)


def finished(chunks: list[StreamChunk]) -> None:
    """Each attempt that was heard ends with exactly one chunk that says so, and nothing follows it."""
    for request in {chunk.request for chunk in chunks}:
        ends = [chunk.finished for chunk in chunks if chunk.request == request]
        assert ends == [*[False] * (len(ends) - 1), True], request


def shown(chunks: list[StreamChunk]) -> str:
    """Show a stream as a screen does: what is to be discarded goes."""
    text = ""
    for chunk in chunks:
        text = ("" if chunk.discard else text) + chunk.text
    return text
