"""The store that guarded agents of every framework leave behind, and the person who decides."""

from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from halter import Guard
from halter.core.clock import SECOND, SystemClock
from halter.core.ids import SortableIds
from halter.core.ports import matters_always
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.journal.open import open_store
from halter.journal.store import JournalStore
from halter.loop.concurrency import wait_for_change, watch_changes

PRICE = {"models": {"function:desk": {"price": {"input": 1, "output": 10}}}}

# Python 3.11 may fail to parse it for pytest within a call (cpython#106905).
import_module("halter.risk.risk")


class Desk:
    """What the one tool did, and the guard that every agent of a test is under."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "runs.db"
        self.paid: list[int] = []
        self.policy: dict[str, Any] = {}
        self.lease = 15.0

    def guard(self, cap: float = 1.0) -> Guard:
        return Guard(
            self.file,
            agent="desk",
            max_cost_usd=cap,
            fleet=PRICE,
            person="ada",
            environ={},
            policy=self.policy,
            lease=self.lease,
        )

    def store(self) -> JournalStore:
        clock = SystemClock()
        return open_store(str(self.file), clock=clock, ids=SortableIds(clock.now))

    async def decide(self, verdict: Any) -> None:
        store = self.store()
        (waiting,) = await list_pending_decisions(store, SystemClock().now())
        await store.commit(answer_decision(waiting, verdict, "ada", "answer"))
        await store.close()

    async def wait_for_question(self) -> None:
        store = self.store()
        async with watch_changes(store, matters_always) as change_event:
            while not await list_pending_decisions(store, SystemClock().now()):
                await wait_for_change(change_event, SECOND // 20)
        await store.close()

    async def read_spending(self) -> Decimal:
        async with self.guard() as guarded:
            return (await guarded.report()).cost_usd

    async def expect_receipt(self, state: str, calls: list[str], requests: int) -> None:
        async with self.guard() as guarded:
            (receipt,) = await guarded.receipts()
        assert (receipt.state, [line.name for line in receipt.calls]) == (state, calls)
        assert len(receipt.requests) == requests
        assert receipt.cost_usd > 0


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)
