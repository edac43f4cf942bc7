"""What a store on a file promises when the world fails: a clear sentence, nothing lost, and it goes on afterwards."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halter.core.clock import SystemClock
from halter.core.errors import StoreUnavailable, StoreUnusable
from halter.core.events import CallStarted
from halter.core.ids import FLEET, SortableIds
from halter.core.ports import Draft, Write
from halter.journal.open import mask_url, open_store
from halter.journal.sqlite import SqliteEngine
from halter.journal.sqlite_connection import ForkSafeConnection, open_connection
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store

if TYPE_CHECKING:
    from conftest import Place, SmallDisk

CLOCK = SystemClock()
IDS = SortableIds(CLOCK.now)


def open_at(url: str | Path) -> JournalStore:
    return open_store(str(url), clock=CLOCK, ids=IDS)


def note(key: str, body: bytes | None = None) -> Write:
    return Write(FLEET, key, lambda _: [Draft(CallStarted(call=key, tool="search"), body)])


async def read(file: Path) -> dict[str, bytes | None]:
    store = open_at(file)
    try:
        return {event.key: event.body for event in await store.read(FLEET)}
    finally:
        await store.close()


async def fill(store: JournalStore, bodies: Mapping[str, bytes], values: dict[str, bytes]) -> None:
    for key, body in bodies.items():
        await store.commit(note(key, body))
        values[key] = body


@pytest.mark.parametrize(
    "url",
    [
        "mysql://halter:open-sesame@host/database",
        "sqlite://host/store.db",
        "memory:somewhere",
        "postgresql:halter",
        "file:store.db?password=open-sesame",
        "halter:open-sesame%zz@host/database",
        "",
    ],
)
def test_a_url_of_no_known_form_is_refused_with_the_forms_that_are(url: str) -> None:
    with pytest.raises(StoreUnusable, match=r"sqlite:///folder/halter\.db, postgresql://") as refusal:
        open_at(url)
    assert "open-sesame" not in str(refusal.value)


def test_passwords_are_masked() -> None:
    assert mask_url("postgresql://me:p@ss:word@host/db?sslpassword=x&schema=y") == (
        "postgresql://me:***@host/db?sslpassword=***&schema=y"
    )
    assert mask_url("postgresql://me@host/db") == "postgresql://me@host/db"
    assert mask_url("me:p%zz@host/db") == "me:***@host/db"
    assert mask_url("postgresql:me:secret@host/db") == "postgresql:***@host/db"


@pytest.mark.parametrize(
    "form", ["{folder}/new/store.db", "sqlite:///{folder}/new/store.db", "sqlite:{folder}/new/store.db"]
)
async def test_a_store_and_its_folder_are_made_for_their_owner_alone(tmp_path: Path, form: str) -> None:
    store = open_at(form.format(folder=tmp_path))
    await store.commit(note("key"))
    await store.close()
    assert (tmp_path / "new/store.db").exists()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


async def test_a_relative_file_is_made_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await open_at("sqlite:here.db").close()
    await open_at("there.db").close()
    assert (tmp_path / "here.db").exists()
    assert (tmp_path / "there.db").exists()


def test_the_plain_package_says_what_to_install_for_postgresql() -> None:
    program = """
import sys
sys.modules["psycopg"] = None
from halter.core.clock import SystemClock
from halter.core.ids import SortableIds
from halter.journal.open import open_store
open_store("postgresql://me:open-sesame@host/db", clock=SystemClock(), ids=SortableIds(SystemClock().now))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    last = process.stderr.splitlines()[-1]
    assert "StoreUnusable" in last
    assert "pip install 'halter-agents[postgres]'" in last
    assert "open-sesame" not in last


async def test_a_store_that_a_newer_program_changed_is_not_opened(shared_place: "Place") -> None:
    store = shared_place.open()
    await store.commit(note("key"))
    await store.close()
    [(result,)] = shared_place.sql("SELECT value FROM meta WHERE name = 'schema'")
    shared_place.sql("UPDATE meta SET value = '99' WHERE name = 'schema'")
    with pytest.raises(StoreUnusable, match="has schema version 99, but this version of Halter supports up to"):
        shared_place.open()
    shared_place.sql(f"UPDATE meta SET value = '{result}' WHERE name = 'schema'")
    assert len(await shared_place.open().read(FLEET)) == 1


def test_a_file_that_is_no_store_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear Ada,\n" * 1_000)
    with pytest.raises(StoreUnusable, match="damaged or not a Halter store"):
        open_at(file)
    assert file.read_text() == "Dear Ada,\n" * 1_000


async def test_a_damaged_store_says_so(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    store = open_at(file)
    for number in range(50):
        await store.commit(note(f"key {number}", os.urandom(4_000)))
    await store.close()
    with file.open("r+b") as handle:
        handle.seek(8_192)
        handle.write(os.urandom(file.stat().st_size - 8_192))
    with pytest.raises(StoreUnusable, match="damaged or not a Halter store"):
        await read(file)


async def test_a_store_whose_very_tables_are_no_text_any_more_says_so(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    await open_at(file).close()
    file.write_bytes(file.read_bytes().replace(b"CREATE INDEX sessions_due ON", b"CREATE INDEX sessions_due O\x9e"))
    with pytest.raises(StoreUnusable, match="damaged or not a Halter store"):
        open_at(file)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        yield connection


async def test_a_locked_file_is_waited_for_and_then_said_to_be_locked(
    tmp_path: Path, locked: sqlite3.Connection
) -> None:
    file = str(tmp_path / "store.db")
    store = JournalStore(SqliteEngine(file, now=CLOCK.now, new_id=IDS.make, lock_seconds=0.02))
    await store.commit(note("first"))
    locked.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="is locked by another process"):
        await store.commit(note("second"))
    assert [event.key for event in await store.read(FLEET)] == ["first"]
    locked.execute("ROLLBACK")
    assert not (await store.commit(note("second"))).is_repeated
    await store.close()


async def test_a_full_disk_loses_nothing_and_work_continues_when_there_is_room(small_disk: "SmallDisk") -> None:
    file = small_disk.folder / "store.db"
    store = open_at(file)
    bodies = {f"key {number}": os.urandom(32_000) for number in range(100)}
    values: dict[str, bytes] = {}
    with pytest.raises(StoreUnavailable, match=r"is full\. Nothing was written\. Free some space"):
        await fill(store, bodies, values)
    assert {event.key: event.body for event in await store.read(FLEET)} == values
    small_disk.change("size=16m")
    await fill(store, bodies, values)
    await store.close()
    assert await read(file) == bodies


async def test_a_disk_that_can_only_be_read_is_called_so(small_disk: "SmallDisk") -> None:
    store = open_at(small_disk.folder / "store.db")
    await store.commit(note("key"))
    await store.close()
    small_disk.change("ro")
    with pytest.raises(StoreUnusable, match="writ"):
        open_at(small_disk.folder / "other.db")
    with pytest.raises(StoreUnusable, match=r"Cannot create the folder .*/deeper of the store"):
        open_at(small_disk.folder / "deeper" / "store.db")
    store = open_at(small_disk.folder / "store.db")
    with pytest.raises(StoreUnusable, match=r"is not writable\. Make the file and its folder writable"):
        await store.commit(note("another key"))
    await store.close()
    small_disk.change("rw")
    store = open_at(small_disk.folder / "store.db")
    assert len(await store.read(FLEET)) == 1
    await store.close()


async def test_a_store_that_may_only_be_read_can_be_read_and_verified(small_disk: "SmallDisk") -> None:
    file = small_disk.folder / "store #1?.db"
    store = open_at(file)
    await store.commit(note("key", b"what was said"))
    await store.close()
    assert list(small_disk.folder.iterdir()) == [file]
    small_disk.change("ro")
    store = open_at(file)
    assert [event.body for event in await store.read(FLEET)] == [b"what was said"]
    report = await verify_store(store)
    assert (report.ok, report.events) == (True, 1)
    with pytest.raises(StoreUnusable, match="is not writable"):
        await store.now()
    await store.close()


def copy_files(small_disk: "SmallDisk", file: Path, *names: str) -> Path:
    for name in names:
        (small_disk.folder / name).write_bytes((file.parent / name).read_bytes())
    small_disk.change("ro")
    return small_disk.folder / file.name


async def test_a_log_that_cannot_be_read_is_never_left_out(tmp_path: Path, small_disk: "SmallDisk") -> None:
    """Otherwise a copy that was taken while somebody wrote would look shorter than it is, and cut off."""
    store = open_at(tmp_path / "store.db")
    await store.commit(note("key"))
    copy = copy_files(small_disk, tmp_path / "store.db", "store.db", "store.db-wal")
    with pytest.raises(StoreUnusable, match=r"still in .*store\.db-wal\. Copy both into a writable folder"):
        open_at(copy)
    await store.close()


async def test_an_older_store_that_may_only_be_read_is_not_taken_for_a_new_one(
    tmp_path: Path, small_disk: "SmallDisk"
) -> None:
    await open_at(tmp_path / "store.db").close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as file, file:
        file.execute("UPDATE meta SET value = '1' WHERE name = 'schema'")
    file.close()
    copy = copy_files(small_disk, tmp_path / "store.db", "store.db")
    with pytest.raises(StoreUnusable, match=r"has schema version 1 and is read-only.* Copy it into a"):
        open_at(copy)


async def test_a_full_disk_is_called_so_when_an_existing_store_is_opened(small_disk: "SmallDisk") -> None:
    file = small_disk.folder / "store.db"
    store = open_at(file)
    await store.commit(note("key"))
    await store.close()
    with (small_disk.folder / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(bytes(4_096))
    with pytest.raises(StoreUnavailable, match=r"The disk of .* is full"):
        await open_at(file).commit(note("another key", bytes(100_000)))
    (small_disk.folder / "rest").unlink()
    assert await read(file) == {"key": None}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("UPDATE meta SET value = 'abc' WHERE name = 'schema'", "has an invalid schema version: 'abc'"),
        ("UPDATE meta SET value = '-1' WHERE name = 'schema'", "has an invalid schema version: '-1'"),
        ("UPDATE meta SET value = '0' WHERE name = 'schema'", "has an invalid schema version: '0'"),
        ("DELETE FROM meta WHERE name = 'schema'", "has an invalid schema version: none"),
        ("DELETE FROM meta WHERE name = 'store'", "has an invalid id: none"),
        ("UPDATE meta SET value = '../../etc/x' WHERE name = 'store'", "has an invalid id: '../../etc"),
    ],
)
async def test_a_store_whose_words_about_itself_were_changed_is_refused(
    shared_place: "Place", damage: str, sentence: str
) -> None:
    await shared_place.open().close()
    shared_place.sql(damage)
    with pytest.raises(StoreUnusable, match=re.escape(sentence)) as refused:
        shared_place.open()
    assert "Restore it from a backup" in str(refused.value)


async def test_a_store_that_lacks_a_table_is_refused_with_a_sentence(shared_place: "Place") -> None:
    await shared_place.open().close()
    shared_place.sql("DROP TABLE events")
    with pytest.raises(StoreUnusable, match="restore it from a backup"):
        await shared_place.open().read(FLEET)


def test_a_database_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "photos.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    before = file.read_bytes()
    with pytest.raises(StoreUnusable, match=r"is a SQLite database, but not a Halter store.*Use another file"):
        open_at(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("form", ["{folder}", "sqlite://{folder}", "sqlite:{folder}/"])
def test_a_folder_is_no_store_and_the_sentence_says_what_to_write(tmp_path: Path, form: str) -> None:
    with pytest.raises(StoreUnusable, match=r"is a folder\. Use a file in it, such as .*/halter\.db"):
        open_at(form.format(folder=tmp_path))


@pytest.mark.parametrize("url", ["store\0.db", "sqlite:///tmp/store\0.db", "~nobody-of-that-name/store.db"])
def test_a_name_that_no_file_can_have_is_refused(url: str) -> None:
    with pytest.raises(StoreUnusable, match=r"Use another file|Write the full path"):
        open_at(url)


async def test_a_commit_is_synced_and_readers_are_not_in_its_way(tmp_path: Path) -> None:
    """The connection that writes waits for the disk at each commit (FULL is 2) and keeps its log apart (WAL)."""
    opened_by_engine: list[ForkSafeConnection] = []

    def connect(path: str) -> ForkSafeConnection:
        opened_by_engine.append(open_connection(path))
        return opened_by_engine[-1]

    engine = SqliteEngine(str(tmp_path / "store.db"), now=CLOCK.now, new_id=IDS.make, connect=connect)
    for connection in opened_by_engine:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    engine.close()
