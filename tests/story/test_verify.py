"""Verification covers a whole store: rows, bodies, blobs and checkpoints; it reports what it cannot verify."""

import asyncio
import itertools
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from halter.core.clock import SECOND
from halter.core.events import SessionWoken
from halter.core.ids import SessionId, inbox_stream, session_stream
from halter.core.ports import Draft, Write
from halter.journal.checkpoints import Checkpointer, checkpoint_file
from halter.journal.engine import Engine, StoreView
from halter.journal.open import open_engine
from halter.journal.rebuild import FINDING_ADVICE, IntegrityReport
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.state import lifecycle

if TYPE_CHECKING:
    from conftest import Forger, Ground, Scribe

ONE, TWO, THREE = session_stream("one"), session_stream("two"), session_stream("three")


def list_findings(report: IntegrityReport) -> list[tuple[str, str, int]]:
    return [(finding.kind, finding.stream, finding.seq) for finding in report.findings]


async def test_an_untouched_store_has_no_finding(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    await scribe.start("two")
    await scribe.hold("two", "call", 100)
    ground.checkpointer.flush()
    report = await ground.verify()
    assert report.ok
    assert report.findings == ()
    assert report.compared
    assert (report.streams, report.events, report.erased) == (3, 8 + 2 + 2, 0)
    assert report.uncovered == {}
    assert (report.checkpoints or 0) > 0


async def test_an_empty_store_has_no_finding(ground: "Ground") -> None:
    assert (await verify_store(ground.store, ground.folder)).ok


async def test_a_store_is_verified_without_checkpoints_too(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    report = await verify_store(ground.store)
    assert report.ok
    assert report.checkpoints is None
    assert report.uncovered_events == report.events == 10


async def test_a_report_can_be_written_as_json(history: "Scribe") -> None:
    history.ground.sql("UPDATE events SET at = at + 1 WHERE stream = 'fleet'")
    payload = msgspec.json.decode(msgspec.json.encode(await history.ground.verify()))
    assert payload["ok"] is False
    assert [result["kind"] for result in payload["findings"]] == ["head", "edited"]


async def test_a_finding_says_what_and_where_and_what_to_do(history: "Scribe") -> None:
    history.ground.sql("UPDATE events SET facts = :facts WHERE stream = :stream AND seq = 3", facts=b"{}", stream=ONE)
    (integrity_finding,) = (await history.ground.verify()).findings
    assert integrity_finding.sentence.startswith(f"Event 3 of {ONE} ")
    assert integrity_finding.sentence.endswith(FINDING_ADVICE["edited"])


async def test_a_body_that_was_nulled_is_no_erasure(history: "Scribe") -> None:
    change = "UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream AND seq = 2"
    history.ground.sql(change, stream=ONE)
    report = await history.ground.verify()
    assert list_findings(report) == [("body_missing", ONE, 2)]
    assert report.erased == 0


async def write_blob(scribe: "Scribe", data: bytes) -> str:
    digest = await scribe.ground.store.put(data)
    event = SessionWoken(cause="message")
    write = Write(THREE, "blob", lambda _: [Draft(event, blob=digest)], lease=scribe.leases["three"])
    await scribe.commit(write)
    scribe.ground.checkpointer.flush()
    return digest


async def test_an_altered_blob_is_found(history: "Scribe") -> None:
    digest = await write_blob(history, b"what was read")
    assert (await history.ground.verify()).ok
    history.ground.sql("UPDATE blobs SET data = :data WHERE digest = :digest", data=b"another", digest=digest)
    assert list_findings(await history.ground.verify()) == [("blob_altered", THREE, 3)]


async def test_a_missing_blob_is_found(history: "Scribe") -> None:
    await write_blob(history, b"what was read")
    history.ground.sql("DELETE FROM blobs")
    assert list_findings(await history.ground.verify()) == [("blob_missing", THREE, 3)]


async def test_a_definition_that_was_replaced_is_found(history: "Scribe") -> None:
    digest = await history.ground.store.put(b"never spend")
    await history.start("four", definition=digest)
    history.ground.checkpointer.flush()
    assert (await history.ground.verify()).ok
    history.ground.sql("UPDATE blobs SET data = :data WHERE digest = :digest", data=b"spend", digest=digest)
    assert list_findings(await history.ground.verify()) == [("blob_altered", session_stream("four"), 1)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE budgets SET spent = 0 WHERE scope = 'fleet'", "spent is 0, not 4900"),
        ("UPDATE budgets SET cap = 9000000 WHERE scope = 'fleet'", "cap is 9000000, not 900000"),
        ("DELETE FROM holds", "is missing, but the events define it"),
        ("UPDATE sessions SET state = 'RUNNING' WHERE session = 'one'", "state is 'RUNNING', not 'COMPLETED'"),
        ("UPDATE sessions SET generation = 0 WHERE session = 'one'", "generation is 0, not 1"),
        ("DELETE FROM spends WHERE hold = 'one-1'", "is missing"),
        ("UPDATE spends SET usd = 1 WHERE hold = 'two-0'", "usd is 1, not 700"),
        (
            "INSERT INTO budgets VALUES ('nobody', '', 'usd', 1, 1, '', 0, 0, 0)",
            "exists, but no event defines it",
        ),
    ],
)
async def test_a_row_that_was_changed_by_hand_is_found(history: "Scribe", change: str, says: str) -> None:
    history.ground.sql(change)
    report = await history.ground.verify()
    (integrity_finding,) = report.findings
    assert integrity_finding.kind == "row"
    assert says in integrity_finding.sentence


async def test_an_owner_and_its_next_generation_are_nobodys_tampering(history: "Scribe") -> None:
    history.ground.sql("UPDATE sessions SET owner = 'another', generation = 7 WHERE session = 'three'")
    assert (await history.ground.verify()).ok


async def test_a_checkpointed_tail_that_was_cut_off_is_found(history: "Scribe", forger: "Forger") -> None:
    fields = forger.events_of(ONE)[:6]
    forger.rechain(ONE, fields)
    report = await history.ground.verify()
    assert list_findings(report) == [("cut", ONE, 7)]
    assert "had 8 events" in report.findings[0].sentence


async def test_a_checkpointed_stream_that_was_dropped_is_found(history: "Scribe") -> None:
    for table in ("events", "streams"):
        history.ground.sql(f"DELETE FROM {table} WHERE stream = :stream", stream=inbox_stream("one"))
    assert list_findings(await history.ground.verify()) == [("dropped", inbox_stream("one"), 1)]


async def test_a_history_that_was_rewritten_with_good_hashes_is_found(history: "Scribe", forger: "Forger") -> None:
    whole = forger.events_of(ONE)
    whole[2]["facts"] = whole[2]["facts"].replace(b"700", b"007")
    forger.rechain(ONE, whole)
    assert list_findings(await history.ground.verify()) == [("rewritten", ONE, 8)]


async def test_a_rewritten_history_is_found_also_after_later_checkpoints(history: "Scribe", forger: "Forger") -> None:
    whole = forger.events_of(THREE)
    whole[0]["key"] = "forged"
    forger.rechain(THREE, whole)
    await history.settle("three", "three-0", 100)
    await history.end("three")
    report = await history.ground.verify()
    assert ("rewritten", THREE, 2) in list_findings(report)


async def test_the_uncovered_tail_is_reported_and_what_a_person_said_is_no_part_of_it(history: "Scribe") -> None:
    await history.cap(800_000)
    await history.settle("three", "three-0", 100)
    report = await history.ground.verify()
    assert report.ok
    assert report.uncovered == {THREE: 1}
    assert report.uncovered_events == 1


async def test_checkpoints_that_belong_to_the_store_must_be_there(history: "Scribe") -> None:
    """Otherwise changing the store's id would be enough to shake them off."""
    history.ground.sql("UPDATE meta SET value = 'another' WHERE name = 'store'")
    report = await history.ground.verify()
    assert list_findings(report) == [("checkpoint_missing", "", 0)]
    assert str(history.ground.folder) in report.findings[0].sentence


async def test_checkpoints_signed_by_somebody_else_vouch_for_nothing(history: "Scribe") -> None:
    report = await verify_store(history.ground.store, history.ground.folder, ["00" * 32])
    assert {kind for kind, _, _ in list_findings(report)} == {"checkpoint_key"}
    assert report.uncovered_events == report.events


async def test_an_altered_checkpoint_is_found(history: "Scribe") -> None:
    path = checkpoint_file(history.ground.folder, history.ground.store_id)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0].replace(b'"at":', b'"at":1'), *lines[1:]]))
    findings = list_findings(await history.ground.verify())
    assert findings == [("checkpoint_altered", "", 1), ("checkpoint_altered", "", 2)]


async def test_a_torn_last_checkpoint_is_reported_and_is_not_tampering(history: "Scribe") -> None:
    path = checkpoint_file(history.ground.folder, history.ground.store_id)
    with path.open("ab") as file:
        file.write(b'{"number":9')
    report = await history.ground.verify()
    assert report.ok
    assert report.torn


async def test_an_event_of_a_kind_to_come_is_verified_and_said_to_be_unreadable(
    history: "Scribe", forger: "Forger"
) -> None:
    whole = forger.events_of("fleet")
    whole[0]["kind"] = "from_the_future"
    forger.rechain("fleet", whole)
    report = await verify_store(history.ground.store)
    assert list_findings(report) == [("unreadable", "fleet", 1)]
    assert not report.compared


async def test_numbers_that_no_program_wrote_do_not_stop_the_search(history: "Scribe", forger: "Forger") -> None:
    whole = forger.events_of(THREE)
    whole[1]["facts"] = whole[1]["facts"].replace(b",500]", b",5" + b"0" * 30 + b"]")
    forger.rechain(THREE, whole)
    assert {kind for kind, _, _ in list_findings(await verify_store(history.ground.store))} == {"unreadable"}


async def test_a_store_can_be_verified_while_it_is_written_to(ground: "Ground", scribe: "Scribe") -> None:
    """Rows and events are compared as of one moment, however many are committed meanwhile."""
    sessions = [f"session-{number}" for number in range(5)]
    for session in sessions:
        await scribe.start(session)
    ground.store = JournalStore(ground.engine)

    async def work(session: str) -> None:
        for number in range(40):
            await scribe.hold(session, f"{session}-{number}", 100, cap=1_000_000)
            await scribe.settle(session, f"{session}-{number}", 70)

    async with asyncio.TaskGroup() as group:
        working = [group.create_task(work(session)) for session in sessions]
        reports = [await verify_store(ground.store)]
        while not all(task.done() for task in working):
            reports.append(await verify_store(ground.store))
    reports.append(await verify_store(ground.store))
    await ground.store.close()
    assert [report.findings for report in reports if not report.ok] == []
    assert reports[-1].events == 5 * 81


class Busy:
    """An engine beside which somebody ends a session, and signs a checkpoint, whenever the store was just looked at."""

    def __init__(self, engine: Engine, meanwhile: Callable[[], None]) -> None:
        self._engine = engine
        self._meanwhile = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def view(self) -> StoreView:
        view = self._engine.view()
        self._meanwhile()
        return view


@pytest.mark.parametrize("before", [0, 1], ids=["from the very beginning", "later"])
async def test_what_is_committed_and_checkpointed_meanwhile_never_looks_cut_off(
    ground: "Ground", scribe: "Scribe", before: int
) -> None:
    sessions = (f"session-{number}" for number in itertools.count())

    def meanwhile() -> None:
        """Run a whole session before the reader can continue, in a thread with its own event loop."""
        thread = threading.Thread(target=lambda: asyncio.run(scribe.whole_session(next(sessions))))
        thread.start()
        thread.join(60)

    for _ in range(before):
        await scribe.whole_session(next(sessions))
    busy = JournalStore(cast("Engine", Busy(ground.engine, meanwhile)), inline=True)
    for _ in range(3):
        report = await verify_store(busy, ground.folder, ())
        assert report.findings == ()
    assert next(sessions) == f"session-{before + 6}"


async def test_a_damaged_index_is_found_though_every_event_is_sound(sqlite_history: "Scribe") -> None:
    """A repeated write is looked up by its key: through an index that misses it, it would be done twice."""
    ground = sqlite_history.ground
    ground.engine.close()
    with closing(sqlite3.connect(ground.url, isolation_level=None)) as file:
        file.execute("PRAGMA writable_schema = ON")
        (sound,) = file.execute("SELECT sql FROM sqlite_master WHERE name = 'events_key'").fetchone()
        result = sound.replace("(key)", "(kind)")
        file.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'events_key'", (result,))
    with closing(sqlite3.connect(ground.url, isolation_level=None)) as file:
        file.execute("REINDEX events_key")
        file.execute("PRAGMA writable_schema = ON")
        file.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'events_key'", (sound,))
    store = JournalStore(open_engine(ground.url, clock=ground, ids=ground), inline=True)
    report = await verify_store(store, ground.folder, ())
    await store.close()
    assert {finding.kind for finding in report.findings} == {"damaged"}
    assert "missing from index events_key" in report.findings[0].sentence
    assert "REINDEX" in report.findings[0].sentence


async def test_two_copies_of_a_store_get_a_reason_why_they_contradict_each_other(sqlite_history: "Scribe") -> None:
    ground = sqlite_history.ground
    copy = Path(ground.url).with_name("copy.db")
    with closing(sqlite3.connect(ground.url)) as file, closing(sqlite3.connect(copy)) as connection:
        file.backup(connection)
    engine = open_engine(str(copy), clock=ground, ids=ground)
    checkpointer = Checkpointer(ground.folder, ground.key_path, ground.store_id, ground.now)
    twin = JournalStore(engine, inline=True, observers=[checkpointer])
    for store, text in ((ground.store, "here"), (twin, "there")):
        await store.commit(lifecycle.post_message(SessionId("three"), text, text.encode(), "ann"))
    checkpointer.flush()
    ground.checkpointer.flush()
    for report in (await ground.verify(), await verify_store(twin, ground.folder)):
        assert not report.ok
        for finding in report.findings:
            assert "a copy of another" in finding.sentence
            assert "give each a separate folder of checkpoints with HALTER_CHECKPOINTS" in finding.sentence
    await twin.close()


async def test_what_is_looked_at_does_not_change_while_somebody_commits(history: "Scribe") -> None:
    ground = history.ground
    view = ground.engine.view()
    await history.settle("three", "three-0", 100)
    (head,) = [row for row in view.ask("heads", {}) if row["stream"] == THREE]
    assert head["head"] == 2
    assert len(view.ask("events_of", {"stream": THREE, "seq": 0, "position": 0, "limit": 9})) == 2
    view.close()
    assert (await ground.store.read(THREE))[-1].seq == 3


async def test_removed_checkpoints_are_missed_also_after_new_ones_were_written(sqlite_history: "Scribe") -> None:
    ground = sqlite_history.ground
    for file in ground.folder.glob("*.jsonl"):
        file.unlink()
    ground.time += 10 * SECOND
    await sqlite_history.whole_session("later")
    report = await ground.verify()
    assert not report.ok
    assert {finding.kind for finding in report.findings} == {"checkpoint_missing"}
    assert {finding.stream for finding in report.findings} >= {"session:one", "session:two"}
