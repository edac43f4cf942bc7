"""Every row can be made anew from the events alone, whatever order their streams are read in."""

import asyncio
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import MINUTE
from halter.core.errors import LeaseLost, StoreUnusable
from halter.core.events import SessionWoken
from halter.core.ids import session_stream
from halter.core.money import BudgetRow
from halter.core.ports import Draft, Query, Write
from halter.core.rows import SessionRow
from halter.core.vocabulary import Row, RowKey
from halter.journal.engine import PROJECTIONS, StoreView
from halter.journal.rebuild import (
    RowFold,
    compare_rows,
    compute_projections,
    list_streams,
    read_live_rows,
    read_raw_events,
    rebuild_tables,
    sort_streams,
)
from halter.journal.retention import erase_session_bodies
from halter.journal.verify import verify_store

if TYPE_CHECKING:
    from conftest import Ground, Scribe

SESSIONS = ("a", "b", "c", "d")


class Days:
    """Lets sessions live through a list of drawn numbers; what cannot happen where it is drawn does not."""

    def __init__(self, scribe: "Scribe") -> None:
        self.scribe = scribe
        self.ground = scribe.ground
        self.parents: dict[str, str] = {}
        self.holds: dict[str, str] = {}
        self.number = 0

    async def live(self, steps: Iterable[tuple[str, str, int]]) -> None:
        for text, session, amount in steps:
            self.number += 1
            self.ground.time += MINUTE // 3
            await self.scribe.claim()
            is_started = session in self.scribe.leases
            if text in ("start", "child"):
                if not is_started:
                    await self._begin(session, amount if text == "child" else 0)
            elif text == "cap":
                await self.scribe.cap(None if amount % 7 == 0 else 10 * amount)
            elif is_started and await self._is_working(session):
                await getattr(self, f"_{text}")(session, amount)

    async def _begin(self, session: str, carved: int) -> None:
        parent = next((name for name in self.scribe.leases if name not in self.parents), None)
        if not carved or parent is None or not await self._is_working(parent):
            await self.scribe.start(session)
            return
        await self.scribe.start_child(session, parent, carved)
        if session in self.scribe.leases:
            self.parents[session] = parent

    async def _is_working(self, session: str) -> bool:
        (row,) = await self.ground.store.ask(Query("session", SessionRow, {"session": session}))
        return row.ended_at is None and row.owner != ""

    async def _say(self, session: str, amount: int) -> None:
        await self.scribe.say(session, f"still there? {amount}")

    async def _hold(self, session: str, amount: int) -> None:
        name = f"{session}-{self.number}"
        if await self.scribe.hold(session, name, amount // 10, cap=8_000 + amount // 3, call=amount % 2 == 0):
            self.holds[name] = session

    async def _settle(self, session: str, amount: int) -> None:
        """Settle the oldest hold of the session, often with more than was held."""
        name = next((hold for hold, owner in self.holds.items() if owner == session), None)
        if name is not None:
            del self.holds[name]
            await self.scribe.settle(session, name, amount // 2)

    async def _park(self, session: str, amount: int) -> None:
        """Park, and be claimed later by a worker that looks for work."""
        (row,) = await self.ground.store.ask(Query("session", SessionRow, {"session": session}))
        taken_up = amount % 3 > 0
        await self.scribe.park(session, rest=0 if taken_up else MINUTE, inbox_seen=row.inbox_head)
        if taken_up:
            await self.scribe.claim()
            await self.scribe.wake(session, row.inbox_head)

    async def _end(self, session: str, amount: int) -> None:
        await self.scribe.end(session, parent=self.parents.get(session, ""))
        if amount % 2:
            await erase_session_bodies(self.ground.store, [session], "ann")


WHATS = ("start", "child", "hold", "hold", "hold", "settle", "settle", "cap", "park", "say", "end")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(WHATS),
        st.sampled_from(SESSIONS),
        st.integers(1, 30_000),
    ),
    max_size=40,
)


def fold_in(order: random.Random, view: StoreView) -> dict[RowKey, Row]:
    streams = list_streams(view)
    order.shuffle(streams)
    fold = RowFold()
    for stream in sort_streams(streams):
        for event in read_raw_events(view, stream):
            fold.apply(event)
    return fold.merge_live_leases(read_live_rows(view))


async def check_rows_against_events(scribe: "Scribe", steps: list[tuple[str, str, int]], order: random.Random) -> None:
    ground = scribe.ground
    await Days(scribe).live(steps)
    live = await ground.store.study(read_live_rows)
    anew = await compute_projections(ground.store)
    assert compare_rows(live, anew) == []
    assert await ground.store.study(lambda view: fold_in(order, view)) == anew
    await rebuild_tables(ground.store)
    assert await ground.store.study(read_live_rows) == live
    assert (await verify_store(ground.store)).ok


@given(steps=STEPS, order=st.randoms(use_true_random=False))
def test_rows_made_anew_equal_the_live_ones_after_any_life(
    make_scribe: "type[Scribe]", steps: list[tuple[str, str, int]], order: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scribe = make_scribe.on("memory:", Path(folder))
        asyncio.run(check_rows_against_events(scribe, steps, order))
        scribe.ground.engine.close()


@pytest.mark.parametrize("seed", range(4))
async def test_rows_made_anew_equal_the_live_ones_on_every_store(ground: "Ground", scribe: "Scribe", seed: int) -> None:
    chance = random.Random(seed)
    steps = [
        (chance.choice(WHATS[: 10 + number // 60]), chance.choice(SESSIONS), chance.randint(1, 30_000))
        for number in range(120)
    ]
    await check_rows_against_events(scribe, steps, chance)
    texts = await ground.store.study(
        lambda view: {event.kind for name in list_streams(view) for event in read_raw_events(view, name)}
    )
    assert {"call_settled", "request_settled", "cap_changed", "session_parked", "wake_posted"} <= texts
    assert {"session_ended", "overrun_incurred", "cost_cap_reached"} & texts


async def test_every_row_that_was_spoiled_is_put_right(history: "Scribe") -> None:
    ground = history.ground
    before = await ground.store.study(read_live_rows)
    ground.sql("UPDATE budgets SET spent = 1, held = 0")
    ground.sql("DELETE FROM spends")
    ground.sql("DELETE FROM holds")
    ground.sql("UPDATE sessions SET state = 'RUNNING', due_at = 5, agent = 'another'")
    assert not (await ground.verify()).ok
    await rebuild_tables(ground.store)
    assert await ground.store.study(read_live_rows) == before
    assert (await ground.verify()).ok


async def test_a_worker_continues_its_session_after_a_rebuild(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.start("one")
    await scribe.hold("one", "call", 100)
    await rebuild_tables(ground.store)
    await scribe.settle("one", "call", 70)
    await scribe.end("one")
    (fleet,) = [row for row in await ground.store.ask(Query("budgets", BudgetRow)) if row.scope == "fleet"]
    assert (fleet.spent, fleet.held) == (70, 0)
    assert (await verify_store(ground.store)).ok


async def test_a_rebuilt_session_row_lets_no_earlier_owner_write_again(history: "Scribe") -> None:
    ground = history.ground
    ground.sql("DELETE FROM sessions")
    await rebuild_tables(ground.store)
    (row,) = await ground.store.ask(Query("session", SessionRow, {"session": "three"}))
    assert (row.owner, row.generation) == ("", 1)
    woken = SessionWoken(cause="timer")
    lease = history.leases["three"]
    with pytest.raises(LeaseLost):
        await ground.store.commit(Write(session_stream("three"), "late", lambda _: [Draft(woken)], lease=lease))
    await history.claim()
    assert history.leases["three"].generation == 2


async def test_events_that_this_program_does_not_know_are_left_to_a_newer_one(history: "Scribe") -> None:
    ground = history.ground
    before = await ground.store.study(read_live_rows)
    ground.sql("UPDATE events SET kind = 'from_the_future' WHERE stream = 'fleet'")
    with pytest.raises(StoreUnusable, match=r"Event 1 of fleet .*'from_the_future', version 1.* newer Halter"):
        await rebuild_tables(ground.store)
    assert await ground.store.study(read_live_rows) == before


async def test_rows_that_cannot_be_right_replace_nothing(history: "Scribe") -> None:
    ground = history.ground
    before = await ground.store.study(read_live_rows)
    wrong = BudgetRow("fleet", "", "usd", cap=1, spent=2)
    with pytest.raises(StoreUnusable, match="produce invalid rows"):
        await ground.store.replace(lambda _: [wrong])
    assert await ground.store.study(read_live_rows) == before


async def test_every_table_of_rows_can_be_read_whole(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    await scribe.start("two")
    await scribe.hold("two", "call", 1)
    await scribe.guarded("two")
    await scribe.tasked("two")
    await scribe.park("two", inbox_seen=9, trouble="outage")
    assert (await ground.verify()).ok
    for table in PROJECTIONS:
        results = await ground.store.study(lambda view, table=table: view.ask(f"all_{table.TABLE}", {}))
        assert results, table.TABLE
        assert list(results[0]) == [field.name for field in msgspec.structs.fields(table)]
