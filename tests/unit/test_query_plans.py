"""What people look at every day is found by an index: a long past costs nothing."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from halter.journal.engine import list_migrations, load_queries, split_statements

GROWS = (
    "events",
    "sessions",
    "budgets",
    "spends",
    "audit",
    "decisions",
    "findings",
    "notifications",
    "streams",
    "items",
    "halts",
)
WHOLE = {
    "streams": "verify looks at every stream",
    "extent": "a sum, in place of reading every stream again",
    "heads": "a follower that is new begins with every stream",
    "all_*": "verify compares every row",
    "budgets": "asked for by --everything",
    "sessions_called": "a name that was typed in a chat, in letters of any case",
    "sessions_that_return": "ends after sixty",
    "spent_by_name": "a sum over an agent's whole life, asked for by programs",
    "same_hash": "verify looks for a copy",
    "counts": "doctor counts",
    "any_event": "ends at the first",
    "meta": "a handful of rows",
}
"""Questions that do look at all there is, and why that is so."""
_TABLE = re.compile(r"SCAN (\w+)(?! USING INDEX)\b")


@pytest.fixture(scope="module")
def tables() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for _, script in list_migrations("sqlite"):
            for statement in split_statements(script):
                connection.execute(statement)
        yield connection


@pytest.mark.parametrize(
    "name", [name for name in load_queries("queries.sql") if name not in WHOLE and not name.startswith("all_")]
)
def test_no_question_of_a_face_walks_through_all_that_ever_was(tables: sqlite3.Connection, name: str) -> None:
    assert walked(tables, load_queries("queries.sql")[name]) == set()


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("sessions", "sessions_started"),
        ("sessions_of_agent_since", "sessions_agent"),
        ("sessions_ended", "sessions_state"),
        ("sessions_of_agent_ended", "sessions_agent_state"),
        ("audit_of_agent_since", "audit_agent"),
        ("audit_of_agent_until", "audit_agent"),
        ("audit_of_outcome_since", "audit_outcome"),
        ("audit_of_outcome_until", "audit_outcome"),
    ],
)
def test_a_filter_is_answered_in_the_order_of_its_index(tables: sqlite3.Connection, name: str, index: str) -> None:
    """Where an index has the order, as many rows are read as are shown."""
    plan = plan_of(tables, load_queries("queries.sql")[name])
    assert any(line.startswith("SEARCH") and f"INDEX {index} " in line for line in plan)
    assert not [line for line in plan if "TEMP B-TREE" in line]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("ends_since", "sessions USING INDEX sessions_ended (ended_at>?)"),
        ("answers_since", "decisions USING INDEX decisions_decided (decided_at>?)"),
        ("halts_told", "halts USING INDEX halts_at (at>?)"),
    ],
)
def test_a_night_is_summed_up_without_what_was_before_it(tables: sqlite3.Connection, name: str, index: str) -> None:
    plan = plan_of(tables, load_queries("queries.sql")[name])
    assert f"SEARCH {index}" in plan
    assert [line for line in plan if line.startswith("SCAN") and "halts_standing" not in line] in ([], ["SCAN g"])


def test_halts_of_cancelled_sessions_are_not_looked_at_again(tables: sqlite3.Connection) -> None:
    """Every cancelled session leaves a halt: only those that stand, and those of the wanted time, are read."""
    plan = plan_of(tables, load_queries("queries.sql")["halts_since"])
    assert [line for line in plan if "halts" in line] == [
        "SCAN halts USING INDEX halts_standing",
        "SEARCH halts USING INDEX halts_at (at>?)",
    ]


def test_a_question_without_an_index_is_found_out(tables: sqlite3.Connection) -> None:
    assert walked(tables, "SELECT * FROM sessions WHERE state = :state") == {"sessions"}
    assert walked(tables, "SELECT s.* FROM sessions s ORDER BY state LIMIT 5") == {"s"}


def walked(tables: sqlite3.Connection, sql: str) -> set[str]:
    """Name the tables, or their short names, that grow and are read from end to end."""
    plan = plan_of(tables, sql)
    grows = {*GROWS, *(alias for table in GROWS for alias in re.findall(rf"\b{table} ([a-z])\b", sql))}
    return {found[1] for line in plan if (found := _TABLE.fullmatch(line)) and found[1] in grows}


def plan_of(tables: sqlite3.Connection, sql: str) -> list[str]:
    given = dict.fromkeys(re.findall(r"(?<!:):([a-z_]+)", sql), "")
    return [str(row[3]) for row in tables.execute(f"EXPLAIN QUERY PLAN {sql}", given)]
