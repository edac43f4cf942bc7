"""Whatever is done to events behind a store's back is found, and called by its name."""

from typing import TYPE_CHECKING, Any

import pytest

from halter.core.ids import session_stream
from halter.journal.rebuild import IntegrityReport
from halter.journal.verify import verify_store

if TYPE_CHECKING:
    from conftest import Forger, Scribe

ONE, TWO, THREE = session_stream("one"), session_stream("two"), session_stream("three")


def list_findings(report: IntegrityReport) -> list[tuple[str, str, int]]:
    return [(finding.kind, finding.stream, finding.seq) for finding in report.findings]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("facts", b'{"call":"one-1","outcome":"ok","charge":{"usd":7}}'),
        ("facts", b"\xff\x00"),
        ("facts", b""),
        ("kind", "call_started"),
        ("version", 2),
        ("version", 0),
        ("version", -(2**63)),
        ("at", 1),
        ("generation", 9),
        ("key", "another"),
        ("blob", "none"),
        ("body", b"\x00"),
        ("salt", b"\x00"),
        ("salt", None),
        ("digest", b""),
    ],
)
async def test_an_edited_event_is_found(history: "Scribe", column: str, value: Any) -> None:
    history.ground.sql(
        f"UPDATE events SET {column} = :value WHERE stream = :stream AND seq = 5", value=value, stream=ONE
    )
    report = await history.ground.verify()
    assert ("edited", ONE, 5) in list_findings(report)
    assert {(kind, stream) for kind, stream, _ in list_findings(report)} <= {("edited", ONE), ("blob_missing", ONE)}
    assert not report.compared


async def test_text_that_is_none_does_not_stop_the_search(sqlite_history: "Scribe") -> None:
    ground = sqlite_history.ground
    ground.sql("UPDATE events SET kind = CAST(x'ff' AS TEXT) WHERE stream = :stream AND seq = 5", stream=ONE)
    ground.sql("UPDATE events SET key = CAST(x'fe' AS TEXT) WHERE stream = :stream AND seq = 2", stream=TWO)
    assert list_findings(await ground.verify()) == [("edited", ONE, 5), ("edited", TWO, 2)]


async def test_an_edited_last_event_is_found(history: "Scribe") -> None:
    history.ground.sql("UPDATE events SET at = at + 1 WHERE stream = :stream AND seq = 8", stream=ONE)
    assert list_findings(await history.ground.verify()) == [("head", ONE, 8), ("edited", ONE, 8)]


async def test_an_edited_hash_is_found(history: "Scribe") -> None:
    change = "UPDATE events SET hash = :zeros WHERE stream = :stream AND seq = 4"
    history.ground.sql(change, zeros=bytes(32), stream=ONE)
    assert list_findings(await history.ground.verify()) == [("edited", ONE, 4), ("edited", ONE, 5)]


async def test_facts_too_deep_to_be_read_do_not_stop_the_search(history: "Scribe") -> None:
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    history.ground.sql("UPDATE events SET facts = :deep WHERE stream = :stream AND seq = 2", deep=deep, stream=TWO)
    history.ground.sql("UPDATE events SET at = 0 WHERE stream = :stream AND seq = 2", stream=ONE)
    assert list_findings(await history.ground.verify()) == [("edited", ONE, 2), ("edited", TWO, 2)]


async def test_a_deleted_event_is_found(history: "Scribe") -> None:
    history.ground.sql("DELETE FROM events WHERE stream = :stream AND seq IN (4, 5)", stream=ONE)
    history.ground.sql("DELETE FROM events WHERE stream = :stream AND seq = 1", stream=TWO)
    assert list_findings(await history.ground.verify()) == [("deleted", ONE, 4), ("deleted", TWO, 1)]


async def test_a_deleted_event_is_found_when_the_others_are_renumbered(history: "Scribe", forger: "Forger") -> None:
    history.ground.sql("DELETE FROM events WHERE stream = :stream AND seq = 4", stream=ONE)
    forger.renumber(ONE, 4, -1)
    history.ground.sql("UPDATE streams SET head = 7 WHERE stream = :stream", stream=ONE)
    report = await history.ground.verify()
    assert ("deleted", ONE, 4) in list_findings(report)
    assert "Deleted: 1 event before event 4" in report.findings[-1].sentence


async def test_the_last_event_but_one_is_found_to_be_deleted_by_the_checkpoint_of_the_last(
    history: "Scribe", forger: "Forger"
) -> None:
    """No event after it tells which one it was written for."""
    history.ground.sql("DELETE FROM events WHERE stream = :stream AND seq = 7", stream=ONE)
    forger.renumber(ONE, 7, -1)
    history.ground.sql("UPDATE streams SET head = 7 WHERE stream = :stream", stream=ONE)
    report = await history.ground.verify()
    assert list_findings(report) == [("cut", ONE, 8), ("deleted", ONE, 7)]
    assert "Deleted: 1 event before event 7" in report.findings[-1].sentence


async def test_an_event_that_a_checkpoint_knows_from_later_is_not_taken_for_one_after_a_gap(
    history: "Scribe", forger: "Forger"
) -> None:
    forger.swap(ONE, 7, 8)
    history.ground.sql("UPDATE streams SET head = 8 WHERE stream = :stream", stream=ONE)
    findings = list_findings(await history.ground.verify())
    assert {("reordered", ONE, 7), ("reordered", ONE, 8)} <= set(findings)
    assert "deleted" not in {kind for kind, _, _ in findings}


async def test_an_event_that_was_put_in_another_ones_place_leaves_its_own_empty(history: "Scribe") -> None:
    history.ground.sql("DELETE FROM events WHERE stream = :stream AND seq = 7", stream=ONE)
    history.ground.sql("UPDATE events SET seq = 7 WHERE stream = :stream AND seq = 8", stream=ONE)
    report = await history.ground.verify()
    assert list_findings(report) == [("cut", ONE, 8), ("reordered", ONE, 7)]
    assert "written as event 8" in report.findings[-1].sentence


async def test_a_deleted_tail_is_found_by_its_head(history: "Scribe") -> None:
    history.ground.sql("DELETE FROM events WHERE stream = :stream AND seq > 6", stream=ONE)
    report = await verify_store(history.ground.store)
    assert list_findings(report) == [("deleted", ONE, 7)]


async def test_reordered_events_are_found(history: "Scribe", forger: "Forger") -> None:
    forger.swap(ONE, 3, 4)
    assert list_findings(await history.ground.verify()) == [("reordered", ONE, 3), ("reordered", ONE, 4)]


async def test_events_that_changed_places_from_afar_are_found(history: "Scribe", forger: "Forger") -> None:
    forger.swap(TWO, 2, 7)
    assert list_findings(await history.ground.verify()) == [("reordered", TWO, 2), ("reordered", TWO, 7)]


async def test_an_event_that_was_put_last_is_found(history: "Scribe") -> None:
    history.ground.sql("UPDATE events SET seq = 9 WHERE stream = :stream AND seq = 3", stream=ONE)
    assert list_findings(await verify_store(history.ground.store)) == [("head", ONE, 9), ("reordered", ONE, 9)]


async def test_a_duplicated_event_is_found(history: "Scribe", forger: "Forger") -> None:
    forger.copy(ONE, 5, ONE, 9)
    assert list_findings(await history.ground.verify()) == [("head", ONE, 9), ("duplicated", ONE, 9)]


async def test_a_duplicated_event_is_found_when_the_others_are_renumbered(history: "Scribe", forger: "Forger") -> None:
    forger.renumber(ONE, 5, 1)
    forger.copy(ONE, 5, ONE, 6)
    history.ground.sql("UPDATE streams SET head = 9 WHERE stream = :stream", stream=ONE)
    assert ("duplicated", ONE, 6) in list_findings(await history.ground.verify())


async def test_a_second_event_with_the_same_number_is_found(history: "Scribe", forger: "Forger") -> None:
    forger.loosen()
    history.ground.sql("INSERT INTO events SELECT * FROM events WHERE stream = :stream AND seq = 4", stream=ONE)
    assert list_findings(await history.ground.verify()) == [("duplicated", ONE, 4)]


async def test_columns_of_another_type_do_not_stop_the_search(
    sqlite_history: "Scribe", sqlite_forger: "Forger"
) -> None:
    sqlite_forger.loosen()
    for statement in (
        f"UPDATE events SET facts = 'text', digest = 7, key = NULL, kind = 1.5 WHERE stream = '{ONE}' AND seq = 2",
        f"UPDATE events SET body = 'text', salt = 3 WHERE stream = '{ONE}' AND seq = 3",
        f"UPDATE events SET version = 'x', at = NULL, generation = x'00' WHERE stream = '{ONE}' AND seq = 4",
        f"UPDATE events SET hash = NULL WHERE stream = '{TWO}' AND seq = 3",
    ):
        sqlite_history.ground.sql(statement)
    findings = list_findings(await sqlite_history.ground.verify())
    assert {("edited", ONE, 2), ("edited", ONE, 3), ("edited", ONE, 4), ("edited", TWO, 3)} <= set(findings)
    assert {kind for kind, _, _ in findings} == {"edited"}


async def test_a_forged_event_between_others_is_found(history: "Scribe", forger: "Forger") -> None:
    """The forger links it in properly, and only lacks the hashes of all that follow."""
    fourth = forger.events_of(ONE)[3]
    forger.renumber(ONE, 4, 1)
    forger.copy(ONE, 4, ONE, 5)
    forged = forger.hash_of({**fourth, "seq": 5, "key": "forged"}, fourth["hash"])
    change = "UPDATE events SET key = 'forged', hash = :hash WHERE stream = :stream AND seq = 5"
    history.ground.sql(change, hash=forged, stream=ONE)
    history.ground.sql("UPDATE streams SET head = 9 WHERE stream = :stream", stream=ONE)
    assert list_findings(await verify_store(history.ground.store)) == [("inserted", ONE, 6)]


async def test_an_event_before_the_first_is_found(history: "Scribe", forger: "Forger") -> None:
    forger.copy(TWO, 1, ONE, 0)
    assert list_findings(await history.ground.verify()) == [("inserted", ONE, 0)]


async def test_swapped_streams_are_found(history: "Scribe") -> None:
    ground = history.ground
    for table in ("events", "streams"):
        for old, new in ((ONE, "aside"), (TWO, ONE), ("aside", TWO)):
            ground.sql(f"UPDATE {table} SET stream = :new WHERE stream = :old", old=old, new=new)
    findings = list_findings(await verify_store(ground.store))
    assert findings == [("moved", ONE, 1), ("moved", TWO, 1)]


async def test_long_streams_that_were_swapped_are_found_as_such(history: "Scribe") -> None:
    ground = history.ground
    ada, bob = session_stream("ada"), session_stream("bob")
    for session in ("ada", "bob"):
        await history.whole_session(session, calls=40)
    for table in ("events", "streams"):
        for old, new in ((ada, "aside"), (bob, ada), ("aside", bob)):
            ground.sql(f"UPDATE {table} SET stream = :new WHERE stream = :old", old=old, new=new)
    report = await verify_store(ground.store)
    assert list_findings(report) == [("moved", ada, 1), ("moved", bob, 1)]
    assert "and so were 81 events after it" in report.findings[0].sentence


async def test_an_event_that_was_moved_to_another_stream_is_found(history: "Scribe") -> None:
    ground = history.ground
    ground.sql("UPDATE events SET stream = :two, seq = 11 WHERE stream = :one AND seq = 4", one=ONE, two=TWO)
    assert list_findings(await verify_store(ground.store)) == [("head", TWO, 11), ("moved", TWO, 11)]


async def test_a_copied_stream_is_found(history: "Scribe", forger: "Forger") -> None:
    for seq in range(1, 9):
        forger.copy(ONE, seq, "session:four", seq)
    findings = list_findings(await history.ground.verify())
    assert findings == [("head", "session:four", 8), ("duplicated", "session:four", 1)]


@pytest.mark.parametrize(("column", "value"), [("head", 7), ("hash", bytes(32)), ("at", 1)])
async def test_a_head_that_disagrees_is_found(history: "Scribe", column: str, value: Any) -> None:
    history.ground.sql(f"UPDATE streams SET {column} = :value WHERE stream = :stream", value=value, stream=ONE)
    report = await history.ground.verify()
    assert list_findings(report) == [("head", ONE, 8)]
    assert report.compared


async def test_a_missing_head_is_found(history: "Scribe") -> None:
    history.ground.sql("DELETE FROM streams WHERE stream = :stream", stream=ONE)
    assert list_findings(await history.ground.verify()) == [("head", ONE, 8)]


async def test_a_stream_without_a_readable_name_is_found(sqlite_history: "Scribe") -> None:
    ground = sqlite_history.ground
    ground.sql("UPDATE events SET stream = CAST(x'fffe' AS TEXT) WHERE stream = :stream", stream=ONE)
    report = await verify_store(ground.store)
    assert ("head", "\ufffd\ufffd", 0) in list_findings(report)
    assert ("deleted", ONE, 1) in list_findings(report)


async def test_much_tampering_is_reported_in_bounds(history: "Scribe") -> None:
    columns = "kind, version, at, generation, key, blob, facts, body, salt, digest, hash"
    history.ground.sql(
        "WITH RECURSIVE numbers (number) AS (SELECT 2 UNION ALL SELECT number + 1 FROM numbers WHERE number < 1500) "
        f"INSERT INTO events (stream, seq, {columns}) SELECT stream, number, {columns} FROM events, numbers "
        "WHERE stream = 'fleet'"
    )
    report = await verify_store(history.ground.store)
    assert len(report.findings) == 1000
    assert "more findings" in "".join(report.notes)
