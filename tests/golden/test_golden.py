"""What an earlier version wrote, every later one can read, check and finish."""

import base64
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halter.core.clock import SECOND
from halter.core.codec import decode
from halter.core.errors import StoreUnusable
from halter.core.events import WakePosted
from halter.core.ids import SessionId, StreamId, WorkerId, session_stream
from halter.core.ports import Lease, Stored, read_body
from halter.guard.ledger import Ledger
from halter.journal.apply import CHAIN_START, digest_body, hash_event
from halter.journal.export import CheckedExport
from halter.journal.rebuild import compute_projections, read_live_rows
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.loop.history import SessionHistory
from halter.runtime.proof import downgrade_receipt, encode_receipt, prove_receipt
from halter.state.lifecycle import end_session, post_wake, wake_session
from halter.state.session import Session, UnknownEvent, replay
from halter.testing.fakes import ManualClock, SeededIds

HERE = Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/store.db"))
LATER = ManualClock(4_102_444_800 * SECOND)
"""A time at which every lease of every version has run out."""

COLUMNS = "stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash"
BYTES = ("facts", "body", "salt", "digest", "hash")


def open_at(path: Path) -> JournalStore:
    engine = SqliteEngine(str(path), now=LATER.now, new_id=SeededIds("golden", LATER.now).make)
    return JournalStore(engine, inline=True)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Path:
    return HERE / request.param


@pytest.fixture
def path(version: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(version / "store.db", tmp_path))


@pytest.fixture
async def store(path: Path) -> AsyncIterator[JournalStore]:
    store = open_at(path)
    yield store
    await store.close()


@pytest.fixture
def expected(version: Path) -> dict[str, Any]:
    return msgspec.json.decode((version / "expected.json").read_bytes())


TURN_FIELDS = {
    "over": "is_over",
    "heard": "inbox_seen",
    "attempts": "attempt_count",
    "worked": "work_time",
    "since": "clock_started_at",
    "seen_at": "last_event_at",
    "prints": "fingerprints",
    "printed": "fingerprint_count",
    "repeats": "is_cycle_possible",
    "asked": "has_asked",
    "answered": "has_answered",
    "handed": "has_handed_off",
    "troubles": "trouble_count",
    "pauses": "pause_count",
    "settled": "is_settled",
    "cleared": "inbox_cleared",
    "skips": "skip_count",
    "brisk": "sleepless_turn_count",
    "idle": "idle_time",
    "active": "is_active",
    "held": "is_held_back",
}
"""The fields of a turn, which is never stored, as versions up to 1.0.0 called them."""


def says(actual: Any, expected: Any) -> bool:
    """Whether all that an earlier version said is said now; what was added since does not count."""
    match expected:
        case dict():
            return all(key in actual and says(actual[key], value) for key, value in expected.items())
        case list():
            return len(actual) == len(expected) and all(map(says, actual, expected))
        case _:
            return actual == expected


async def state_of(store: JournalStore, session: str) -> Session:
    return replay(await store.read(session_stream(session)))


def in_flight(expected: dict[str, Any]) -> set[str]:
    return {session for session, state in expected["states"].items() if state["ended_at"] is None}


def test_every_version_of_the_program_has_left_a_golden_journal() -> None:
    assert {"0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "1.0.0"} <= set(VERSIONS)


async def test_a_store_of_an_earlier_version_has_no_finding(store: JournalStore) -> None:
    report = await verify_store(store)
    assert report.findings == ()
    assert report.compared
    assert report.erased > 0


async def test_sessions_of_an_earlier_version_fold_into_the_same_states(
    store: JournalStore, expected: dict[str, Any]
) -> None:
    for session, state in expected["states"].items():
        assert says(msgspec.to_builtins(await state_of(store, session)), state), session


async def test_receipts_of_an_earlier_version_still_say_the_same(store: JournalStore, expected: dict[str, Any]) -> None:
    for session, result in expected["receipts"].items():
        now = msgspec.json.decode(encode_receipt(await store.read(session_stream(session)), ()))
        assert says(now if "format" in result else downgrade_receipt(now), result), session


async def test_a_receipt_of_the_version_before_is_proven_by_its_events_to_the_last_field() -> None:
    expected = msgspec.json.decode((HERE / "0.7.0" / "expected.json").read_bytes())
    exported = journal(HERE / "0.7.0")
    text = 0
    for session, result in expected["receipts"].items():
        stream = session_stream(session)
        events = [event for event in exported if event.stream == stream]
        checked_export = CheckedExport((session,), {stream: events}, {}, (), len(events), 0)
        assert prove_receipt(result, checked_export).findings == (), session
        assert prove_receipt({**result, "cost_usd": result["cost_usd"] + 1}, checked_export).findings
        text += result["cost_usd"]
    assert text > 1000


async def test_turns_of_an_earlier_version_are_recalled_as_they_were(
    store: JournalStore, expected: dict[str, Any]
) -> None:
    for session, turns in expected.get("turns", {}).items():
        events = await store.read(session_stream(session))
        recalled = SessionHistory(session)
        await recalled.apply(events, lambda stored: read_body(store, stored))
        transcript = recalled.transcript
        values = {"turn": recalled.turn, "said": transcript.messages, "sent": transcript.sent}
        turn = {TURN_FIELDS.get(name, name): value for name, value in turns["turn"].items()}
        assert says(msgspec.to_builtins(values), {**turns, "turn": turn}), session


async def test_rows_of_an_earlier_version_are_rebuilt_as_they_were(
    store: JournalStore, expected: dict[str, Any]
) -> None:
    projections = await compute_projections(store)
    assert projections == await store.study(read_live_rows)
    rows: dict[str, list[Any]] = {}
    for row in projections.values():
        rows.setdefault(row.TABLE, []).append(msgspec.to_builtins(row))
    assert says(rows, expected["rows"])


async def test_an_exported_journal_of_an_earlier_version_is_the_same_as_its_store(
    version: Path, store: JournalStore
) -> None:
    exported = journal(version)
    for stream in {event.stream for event in exported}:
        assert await store.read(stream) == [event for event in exported if event.stream == stream]


def test_an_exported_journal_of_an_earlier_version_can_be_checked_without_a_store(version: Path) -> None:
    heads: dict[StreamId, bytes] = {}
    for event in journal(version):
        header = (event.stream, event.seq, event.kind, event.version, event.at, event.generation, event.key, event.blob)
        assert hash_event(heads.get(event.stream, CHAIN_START), header, event.facts, event.digest) == event.hash
        assert event.body is None or digest_body(event.salt or b"", event.body) == event.digest
        heads[event.stream] = event.hash


def journal(version: Path) -> list[Stored]:
    return [stored(msgspec.json.decode(line)) for line in (version / "journal.jsonl").read_bytes().splitlines()]


def stored(columns: dict[str, Any]) -> Stored:
    del columns["position"]
    plain = {
        name: base64.b64decode(value) if name in BYTES and value is not None else value
        for name, value in columns.items()
    }
    return Stored(**plain, event=decode(plain["kind"], plain["version"], plain["facts"]))


async def test_what_an_earlier_version_left_in_flight_is_claimed_and_finished(
    store: JournalStore, expected: dict[str, Any]
) -> None:
    unfinished = in_flight(expected)
    assert unfinished
    while leases := await store.claim(WorkerId("successor"), 100):
        for lease in leases:
            await finish(store, lease)
    for session in unfinished:
        assert (await state_of(store, session)).terminal_reason == "cancelled", session
    assert (await verify_store(store)).findings == ()
    assert not await store.study(lambda view: view.ask("holds", {}))


async def finish(store: JournalStore, lease: Lease) -> None:
    """Take a session over, settle what is in doubt, end it, and tell its parent."""
    state = await state_of(store, lease.session)
    await store.commit(wake_session(lease, f"{lease.session}/{lease.generation}/wake", None, state.inbox_seen))
    await Ledger(store, LATER).settle_in_doubt(lease, list(state.in_flight.values()))
    await store.commit(end_session(lease, "CANCELLED", "cancelled", state.parent))
    if state.parent:
        wake_posted = WakePosted(cause="child", origin="agent", sender=lease.session)
        await store.commit(post_wake(state.parent, f"{lease.session}/told", wake_posted))


def test_a_store_with_a_newer_schema_is_not_changed(path: Path) -> None:
    change(path, "UPDATE meta SET value = '9999' WHERE name = 'schema'")
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=r"has schema version 9999, .* Use the newer Halter"):
        open_at(path)
    assert path.read_bytes() == before


async def test_a_session_of_a_newer_format_is_never_claimed(path: Path, expected: dict[str, Any]) -> None:
    change(path, "UPDATE sessions SET format = 9999")
    store = open_at(path)
    assert await store.claim(WorkerId("older"), 100) == []
    await store.close()
    assert in_flight(expected)


async def test_an_event_of_a_newer_kind_is_shown_and_never_folded(path: Path, expected: dict[str, Any]) -> None:
    session = min(in_flight(expected))
    stream = add_unknown(path, SessionId(session))
    store = open_at(path)
    events = await store.read(stream)
    assert events[-1].kind == "dream_dreamt"
    with pytest.raises(UnknownEvent, match=r"dream_dreamt of version 1, which .* Use the newer Halter"):
        replay(events)
    with pytest.raises(StoreUnusable, match="Use the newer Halter"):
        await compute_projections(store)
    await store.close()


def add_unknown(path: Path, session: SessionId) -> StreamId:
    """Append what a newer program might have written."""
    stream = session_stream(session)
    with closing(sqlite3.connect(path)) as connection, connection:
        [(head, previous, at)] = connection.execute("SELECT head, hash, at FROM streams WHERE stream = ?", (stream,))
        header = (stream, head + 1, "dream_dreamt", 1, at, 0, "dream", None)
        value = hash_event(previous, header, b"{}", b"")
        text = ", ".join("?" * 13)
        row = (*header, b"{}", None, None, b"", value)
        connection.execute(f"INSERT INTO events ({COLUMNS}) VALUES ({text})", row)
        connection.execute("UPDATE streams SET head = ?, hash = ? WHERE stream = ?", (head + 1, value, stream))
    return stream


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        with connection:
            connection.execute(statement)
