"""What people look at every day is found by an index: a long past costs nothing."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import halter
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
SOURCES = Path(halter.__file__).parent
WHOLE = {
    "streams": "verify looks at every stream",
    "extent": "a sum, in place of reading every stream again",
    "heads": "a follower that is new begins with every stream",
    "all_*": "verify compares every row",
    "budgets": "asked for by --everything",
    "sessions_called": "a name that was typed in a chat, in letters of any case",
    "spent_by_name": "a sum over an agent's whole life, asked for by programs",
    "same_hash": "verify looks for a copy",
    "counts": "doctor counts",
    "any_event": "ends at the first",
    "meta": "a handful of rows",
}
"""Questions that do look at all there is, and why that is so."""
_TABLE = re.compile(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?")


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
    assert find_walked_tables(tables, load_queries("queries.sql")[name]) == set()


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


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("open_of", "sessions_open (agent=?)"),
        ("open_tasks", "sessions_open (agent=?)"),
        ("open_runs", "sessions_open_runs (trigger=?)"),
        ("open_children", "sessions_open_children (parent=?)"),
        ("open_decisions", "events_key (key=?)"),
    ],
)
def test_what_is_open_is_found_without_reading_what_has_ended(
    tables: sqlite3.Connection, name: str, index: str
) -> None:
    """Asked at every wake. An index by time, or from the beginning of a stream, would walk all that ever was."""
    plan = plan_of(tables, load_queries("queries.sql")[name])
    assert any(line.startswith("SEARCH") and line.endswith(f"USING INDEX {index}") for line in plan)
    assert not [line for line in plan if "sessions_agent " in line or "sessions_trigger " in line]


def test_nothing_that_acts_asks_for_all_that_ever_was() -> None:
    """What every call, wake or look asks for is as long as what it is about. A list for people may be long."""
    whole = {f'"all_{table}"' for table in (*GROWS, "rules")}
    asked = {
        (path.relative_to(SOURCES).as_posix(), name)
        for path in SOURCES.rglob("*.py")
        if path.parts[len(SOURCES.parts)] not in {"journal", "demo", "testing"}
        for name in whole
        if name in path.read_text("utf-8")
    }
    assert asked == {
        ("operations/rules.py", '"all_rules"'),
        ("runtime/budgets.py", '"all_sessions"'),
        ("server/stream.py", '"all_sessions"'),
    }


def test_the_rules_that_have_ended_are_not_read_again(tables: sqlite3.Connection) -> None:
    plan = plan_of(tables, load_queries("queries.sql")["rules_of"])
    assert [line.partition(" (")[2] for line in plan if "rules_standing" in line] == [
        "tool=? AND owner=? AND <expr>=?)",
        "tool=? AND owner=? AND <expr><?)",
        "tool=? AND owner=? AND <expr>>?)",
    ]


ENGINE = load_queries("sqlite/engine.sql")
SWEEPS = ("erase_blobs", "sweep_blobs")
"""They look for what no session names any more."""


@pytest.mark.parametrize("name", [name for name in ENGINE if name not in SWEEPS])
def test_the_engine_looks_at_no_event_and_no_session_twice(tables: sqlite3.Connection, name: str) -> None:
    """It claims, offers and follows many times a second: also an index of all sessions of an agent is too long."""
    assert find_walked_tables(tables, ENGINE[name]) == set()
    assert not [line for line in plan_of(tables, ENGINE[name]) if "INDEX sessions_agent (agent=?)" in line]


def test_a_question_without_an_index_is_found_out(tables: sqlite3.Connection) -> None:
    assert find_walked_tables(tables, "SELECT stream, MAX(seq) FROM events WHERE position > 9 GROUP BY stream") == {
        "events"
    }
    assert find_walked_tables(tables, "SELECT * FROM sessions WHERE state = :state") == {"sessions"}
    assert find_walked_tables(tables, "SELECT s.* FROM sessions s ORDER BY state LIMIT 5") == {"s"}


def find_walked_tables(tables: sqlite3.Connection, sql: str) -> set[str]:
    """Name the tables, or their short names, that grow and are read from end to end."""
    plan = plan_of(tables, sql)
    grows = {*GROWS, *(alias for table in GROWS for alias in re.findall(rf"\b{table} ([a-z])\b", sql))}
    partial = {name for (name,) in tables.execute("SELECT name FROM sqlite_master WHERE sql LIKE '% WHERE %'")}
    matches = [match for line in plan if (match := _TABLE.fullmatch(line)) and match[2] not in partial]
    return {match[1] for match in matches if match[1] in grows}


def plan_of(tables: sqlite3.Connection, sql: str) -> list[str]:
    values = dict.fromkeys(re.findall(r"(?<!:):([a-z_]+)", sql), "")
    return [str(row[3]) for row in tables.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
