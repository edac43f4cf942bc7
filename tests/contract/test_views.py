"""What every store promises to whoever looks at all of it, or makes its projections anew."""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pytest

from halter.core.errors import StoreUnusable
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import session_stream
from halter.core.money import BudgetRow, Leg
from halter.core.ports import Draft, Query, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import HaltRow, HoldRow, SessionRow, StreamRow
from halter.core.vocabulary import Row
from halter.guard.halts import halt
from halter.journal.engine import StoreView
from halter.journal.store import JournalStore
from halter.state import lifecycle

if TYPE_CHECKING:
    from conftest import Place

ONE = session_stream("one")
LEGS = (Leg("fleet", "", "usd", 100, 1),)


def make_hold(call: str) -> Write:
    event = CallStarted(call=call, tool="search", legs=LEGS)
    return Write(ONE, call, lambda _: [Draft(event, b"said")], rows_of_hold(call, LEGS))


async def start_session(store: JournalStore) -> JournalStore:
    await store.commit(lifecycle.start_session(SessionStarted(session="one", agent="a", kind="task", started_by="me")))
    await store.commit(make_hold("first"))
    return store


async def test_a_view_stays_as_it_was_while_others_write(place: "Place") -> None:
    store = await start_session(place.open())
    event, written = threading.Event(), threading.Event()

    def look(view: StoreView) -> list[Sequence[object]]:
        before = view.rows("all_holds", {})
        event.set()
        written.wait(60)
        return [before, view.rows("all_holds", {})]

    looking = asyncio.create_task(store.study(look))
    await asyncio.to_thread(event.wait, 60)
    await store.commit(make_hold("second"))
    written.set()
    before, after = await looking
    assert before == after
    assert len(before) == 1
    assert len(await store.ask(Query("holds", HoldRow))) == 2


async def test_a_view_answers_what_the_store_answers(place: "Place") -> None:
    store = await start_session(place.open())
    digest = await store.put(b"a blob")
    fields, columns, blob = await store.study(
        lambda view: (view.ask("all_holds", {}), view.rows("all_holds", {}), view.get(digest))
    )
    assert [tuple(row.values()) for row in fields] == [tuple(row) for row in columns]
    assert [row["hold"] for row in fields] == ["first"]
    assert blob == b"a blob"


async def test_projections_are_replaced_all_at_once(place: "Place") -> None:
    store = await start_session(place.open())
    heads = await store.ask(Query("heads", StreamRow))
    fresh = [SessionRow("other", agent="b"), BudgetRow("fleet", "", "usd", 50), BudgetRow("agent:b", "", "usd", 50)]
    await store.replace(lambda _: fresh)
    assert [row.session for row in await store.ask(Query("all_sessions", SessionRow))] == ["other"]
    assert [row.scope for row in await store.ask(Query("all_budgets", BudgetRow))] == ["agent:b", "fleet"]
    assert await store.ask(Query("all_holds", HoldRow)) == []
    assert await store.ask(Query("heads", StreamRow)) == heads


async def test_a_replacement_that_fails_changes_nothing(place: "Place") -> None:
    store = await start_session(place.open())

    def fails(view: StoreView) -> Iterable[Row]:
        yield SessionRow("other")
        raise ZeroDivisionError(view)

    with pytest.raises(ZeroDivisionError):
        await store.replace(fails)
    assert [row.session for row in await store.ask(Query("all_sessions", SessionRow))] == ["one"]
    await store.commit(make_hold("second"))


@pytest.mark.parametrize(
    "rows",
    [
        [BudgetRow("fleet", "", "usd", cap=1, spent=2)],
        [BudgetRow("fleet", "", "usd"), BudgetRow("fleet", "", "usd")],
        [BudgetRow("fleet", "", "usd", spent=2**63)],
    ],
    ids=["above its cap", "twice the same", "beyond all numbers"],
)
async def test_a_replacement_that_cannot_be_right_changes_nothing(shared_place: "Place", rows: list[Row]) -> None:
    store = await start_session(shared_place.open())
    with pytest.raises(StoreUnusable, match="produce invalid rows"):
        await store.replace(lambda _: rows)
    assert [row.held for row in await store.ask(Query("all_budgets", BudgetRow))] == [1]


async def test_writers_wait_while_projections_are_replaced(shared_place: "Place") -> None:
    store, journal_store = await start_session(shared_place.open()), shared_place.open()
    making, go_on = threading.Event(), threading.Event()

    def same(view: StoreView) -> list[Row]:
        making.set()
        go_on.wait(60)
        hold_rows = [HoldRow(**row) for row in view.ask("all_holds", {})]
        budget_rows = [BudgetRow(**row) for row in view.ask("all_budgets", {})]
        return [*hold_rows, *budget_rows, *(SessionRow(**row) for row in view.ask("all_sessions", {}))]

    replacing = asyncio.create_task(store.replace(same))
    await asyncio.to_thread(making.wait, 60)
    writing = asyncio.create_task(journal_store.commit(make_hold("second")))
    claiming = asyncio.create_task(journal_store.beat("a worker"))
    go_on.set()
    await replacing
    await writing
    await claiming
    assert [row.held for row in await store.ask(Query("all_budgets", BudgetRow))] == [2]


async def test_what_is_committed_while_somebody_asks_is_in_later_answers(store: JournalStore) -> None:
    event = asyncio.Event()

    async def ask_on() -> None:
        while not event.is_set():
            await store.ask(Query("all_halts", HaltRow))

    asking = asyncio.create_task(ask_on())
    for number in range(60):
        await store.commit(halt(f"agent:{number}", "ada", f"halt-{number}"))
    event.set()
    await asking
    assert len(await store.ask(Query("all_halts", HaltRow))) == 60


async def test_a_store_lets_those_who_ask_finish_before_it_closes(store: JournalStore) -> None:
    await start_session(store)
    asking = [asyncio.create_task(store.ask(Query("holds", HoldRow))) for _ in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert [len(rows) for rows in await asyncio.gather(*asking)] == [1] * 20
