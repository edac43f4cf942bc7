"""The independent checker names what is wrong with a journal that was made wrong by hand."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import SystemClock
from halter.core.ids import SortableIds
from halter.journal.open import open_store
from halter_drills.checker import Account, RecordedEvent, StoreContents, Sums, check, check_paid, read_store

SESSION = ("session:s", "", "usd")
LEG = ["session:s", "", "usd", 100]


class Journal:
    """Writes events as facts, one after the other, and keeps the tables as a faultless store would."""

    def __init__(self) -> None:
        self.events: list[RecordedEvent] = []

    def add(self, kind: str, /, *, stream: str = "session:s", generation: int = 1, **facts: Any) -> None:
        seq = 1 + sum(event.stream == stream for event in self.events)
        self.events.append(RecordedEvent(stream, seq, kind, len(self.events), generation, facts))

    def add_start(self, call: str, amount: int, cap: int | None = 100) -> None:
        self.add("call_started", call=call, legs=[["session:s", "", "usd", cap, amount]])

    def add_settlement(self, call: str, usd: int, **charge: Any) -> None:
        self.add("call_settled", call=call, outcome="ok", charge={"usd": usd, **charge})

    def read_contents(
        self, sums: Sums, holds: dict[str, list[list[Any]]] | None = None, spends: dict[str, int] | None = None
    ) -> StoreContents:
        heads = {event.stream: event.seq for event in self.events}
        return StoreContents(self.events, {SESSION: sums}, holds or {}, spends or {}, heads)


@pytest.fixture
def journal() -> Journal:
    journal = Journal()
    journal.add("session_started", generation=0, session="s", agent="a", started_by="ada")
    return journal


def test_a_faultless_journal_has_no_violation(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_start("c2", 40)
    journal.add_settlement("c1", 10)
    journal.add_settlement("c2", 40)
    assert check(journal.read_contents(Sums(50, 0, 0), spends={"c1": 10, "c2": 40})) == []


def test_a_hold_above_the_cap_is_named(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_start("c2", 41)
    journal.add_settlement("c1", 0)
    journal.add_settlement("c2", 0)
    assert check(journal.read_contents(Sums(0, 0, 0), spends={"c1": 0, "c2": 0})) == [
        "The event 3 of session:s (call_started) brings session:s (micro-dollars) to 101 of 100."
    ]


def test_a_cap_that_the_events_hide_is_known_from_the_plan(journal: Journal) -> None:
    journal.add_start("c1", 101, cap=None)
    journal.add_settlement("c1", 0)
    planned: dict[Account, int | None] = {SESSION: 100}
    store_contents = journal.read_contents(Sums(0, 0, 0), spends={"c1": 0})
    assert check(store_contents) == []
    assert check(store_contents, planned) == [
        "The event 2 of session:s (call_started) brings session:s (micro-dollars) to 101 of 100."
    ]


def test_a_second_settling_is_named(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_settlement("c1", 10)
    journal.add_settlement("c1", 10)
    assert check(journal.read_contents(Sums(10, 0, 0), spends={"c1": 10})) == [
        "The event 4 of session:s (call_settled) settles c1 for the second time."
    ]


def test_settling_what_was_never_started_is_named(journal: Journal) -> None:
    journal.add_settlement("c1", 10)
    assert check(journal.read_contents(Sums(0, 0, 0))) == [
        "The event 2 of session:s (call_settled) settles c1, which was never started."
    ]


def test_a_second_start_is_named(journal: Journal) -> None:
    journal.add_start("c1", 10)
    journal.add_start("c1", 10)
    journal.add_settlement("c1", 10)
    wrong = check(journal.read_contents(Sums(10, 10, 0), spends={"c1": 10}))
    assert wrong == ["The event 3 of session:s (call_started) starts c1 for the second time."]


def test_an_orphan_hold_is_named_once_all_is_finished(journal: Journal) -> None:
    journal.add_start("c1", 60)
    store_contents = journal.read_contents(Sums(0, 60, 0), holds={"c1": [[*LEG, 60]]})
    assert check(store_contents) == ["The hold c1 was never settled."]
    assert check(store_contents, finished=False) == []


def test_an_overrun_that_is_not_recorded_is_named(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_settlement("c1", 130)
    assert check(journal.read_contents(Sums(130, 0, 0), spends={"c1": 130})) == [
        (
            "The event 3 of session:s (call_settled) leaves session:s (micro-dollars) "
            "at 130 of 100 with 0 recorded as overrun."
        )
    ]


def test_an_overrun_that_is_recorded_is_fine(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_settlement("c1", 130, overruns=[["session:s", "", "usd", 30]])
    assert check(journal.read_contents(Sums(130, 0, 30), spends={"c1": 130})) == []


def test_a_lowered_cap_counts_from_its_event_on(journal: Journal) -> None:
    journal.add_start("c1", 30)
    journal.add_settlement("c1", 30)
    journal.add("cap_changed", stream="fleet", scope="session:s", window="", unit="usd", cap=50, by="ada")
    journal.add_start("c2", 30)
    journal.add_settlement("c2", 0)
    assert check(journal.read_contents(Sums(30, 0, 0), spends={"c1": 30, "c2": 0})) == [
        "The event 4 of session:s (call_started) brings session:s (micro-dollars) to 60 of 50."
    ]


def test_a_refusal_of_what_still_fits_what_is_unspent_is_named(journal: Journal) -> None:
    journal.add_start("c1", 80)
    facts = {"scope": "session:s", "window": "", "unit": "usd", "cap": 100, "spent": 0, "amount": 90}
    journal.add("cost_cap_reached", refused="c2", name="work", **facts)
    journal.add_settlement("c1", 0)
    assert check(journal.read_contents(Sums(0, 0, 0), spends={"c1": 0})) == [
        (
            "The event 3 of session:s (cost_cap_reached) refuses 90 on session:s (micro-dollars), "
            "although 100 of 100 was unspent."
        )
    ]


def test_a_gap_in_a_stream_is_named(journal: Journal) -> None:
    journal.events.append(RecordedEvent("session:s", 3, "session_woken", 9, 1, {}))
    assert check(journal.read_contents(Sums(0, 0, 0))) == [
        "The event 3 of session:s (session_woken) is at the position of event 2."
    ]


def test_a_head_that_does_not_fit_its_stream_is_named(journal: Journal) -> None:
    store_contents = StoreContents(journal.events, {}, {}, {}, {"session:s": 2})
    assert check(store_contents) == ["The stream session:s ends with event 1, but its head is 2."]


def test_a_former_owner_that_writes_again_is_named(journal: Journal) -> None:
    journal.add("session_woken", generation=2, cause="takeover")
    journal.add("session_woken", generation=1, cause="takeover")
    assert check(journal.read_contents(Sums(0, 0, 0))) == [
        "The event 3 of session:s (session_woken) was written by generation 1 after generation 2."
    ]


def test_tables_that_do_not_follow_from_the_events_are_named(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_settlement("c1", 10)
    wrong = check(journal.read_contents(Sums(11, 0, 0), holds={"c9": []}, spends={"c1": 11}))
    assert wrong == [
        (
            "The table has 11 spent, 0 held, 0 over for session:s (micro-dollars), "
            "but the events yield 10 spent, 0 held, 0 over."
        ),
        "The table of holds has [] for c9, but the events yield nothing.",
        "The table of spends has 11 for c1, but the events yield 10.",
    ]


def test_what_the_world_billed_is_charged_once_and_in_full(journal: Journal) -> None:
    journal.add_start("c1", 60)
    journal.add_settlement("c1", 10)
    assert check_paid(journal.events, {"c1": [10]}) == []
    assert check_paid(journal.events, {"c1": [11], "c2": [5, 5]}) == [
        "The call c2 ran 2 times.",
        "The call c1 cost 11 and was charged 10.",
        "The call c2 cost 5 and was not charged.",
    ]


async def test_a_store_is_read_with_plain_sql(tmp_path: Path) -> None:
    file = tmp_path / "halter.db"
    clock = SystemClock()
    await open_store(str(file), clock=clock, ids=SortableIds(clock.now)).close()
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(
            "INSERT INTO events (stream, seq, kind, version, at, generation, key, facts, digest, hash) "
            """VALUES ('fleet', 2, 'cap_changed', 1, 0, 0, 'k', CAST('{"scope":"fleet","window":"","unit":"usd","""
            """"cap":1,"by":"ada"}' AS BLOB), x'', x'')"""
        )
    assert check(read_store(str(file))) == [
        "The event 2 of fleet (cap_changed) is at the position of event 1.",
        "The stream fleet ends with event 2, but its head is None.",
    ]
