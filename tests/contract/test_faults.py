"""What a store on a file promises when the world fails: a clear sentence, nothing lost, and it goes on afterwards."""

import os
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
from halter.journal.open import masked, open_store
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore

if TYPE_CHECKING:
    from conftest import Place, SmallDisk

CLOCK = SystemClock()
IDS = SortableIds(CLOCK.now)


def opened(url: str | Path) -> JournalStore:
    return open_store(str(url), clock=CLOCK, ids=IDS)


def note(key: str, body: bytes | None = None) -> Write:
    return Write(FLEET, key, lambda _: [Draft(CallStarted(call=key, tool="search"), body)])


async def read(file: Path) -> dict[str, bytes | None]:
    store = opened(file)
    try:
        return {event.key: event.body for event in await store.read(FLEET)}
    finally:
        await store.close()


async def fill(store: JournalStore, bodies: Mapping[str, bytes], kept: dict[str, bytes]) -> None:
    for key, body in bodies.items():
        await store.commit(note(key, body))
        kept[key] = body


@pytest.mark.parametrize(
    "url",
    [
        "mysql://halter:open-sesame@host/database",
        "sqlite://host/store.db",
        "memory:somewhere",
        "postgresql:halter",
        "file:store.db?password=open-sesame",
        "",
    ],
)
def test_a_url_of_no_known_form_is_refused_with_the_forms_that_are(url: str) -> None:
    with pytest.raises(StoreUnusable, match=r"sqlite:///folder/halter\.db, postgresql://") as refusal:
        opened(url)
    assert "open-sesame" not in str(refusal.value)


def test_passwords_are_masked() -> None:
    assert masked("postgresql://me:p@ss:word@host/db?sslpassword=x&schema=y") == (
        "postgresql://me:***@host/db?sslpassword=***&schema=y"
    )
    assert masked("postgresql://me@host/db") == "postgresql://me@host/db"


@pytest.mark.parametrize(
    "form", ["{folder}/new/store.db", "sqlite:///{folder}/new/store.db", "sqlite:{folder}/new/store.db"]
)
async def test_a_store_and_its_folder_are_made_for_their_owner_alone(tmp_path: Path, form: str) -> None:
    store = opened(form.format(folder=tmp_path))
    await store.commit(note("key"))
    await store.close()
    assert (tmp_path / "new/store.db").exists()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


async def test_a_relative_file_is_made_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await opened("sqlite:here.db").close()
    await opened("there.db").close()
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert "StoreUnusable" in last
    assert "pip install 'halter[postgres]'" in last
    assert "open-sesame" not in last


async def test_a_store_that_a_newer_program_changed_is_left_alone(shared_place: "Place") -> None:
    store = shared_place.open()
    await store.commit(note("key"))
    await store.close()
    [(known,)] = shared_place.sql("SELECT value FROM meta WHERE name = 'schema'")
    shared_place.sql("UPDATE meta SET value = '99' WHERE name = 'schema'")
    with pytest.raises(StoreUnusable, match="has schema 99, and this program knows only"):
        shared_place.open()
    shared_place.sql(f"UPDATE meta SET value = '{known}' WHERE name = 'schema'")
    assert len(await shared_place.open().read(FLEET)) == 1


def test_a_file_that_is_no_store_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear Ada,\n" * 1_000)
    with pytest.raises(StoreUnusable, match="damaged or not a Halter store"):
        opened(file)
    assert file.read_text() == "Dear Ada,\n" * 1_000


async def test_a_damaged_store_says_so(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    store = opened(file)
    for number in range(50):
        await store.commit(note(f"key {number}", os.urandom(4_000)))
    await store.close()
    with file.open("r+b") as handle:
        handle.seek(8_192)
        handle.write(os.urandom(file.stat().st_size - 8_192))
    with pytest.raises(StoreUnusable, match="damaged or not a Halter store"):
        await read(file)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        yield other


async def test_a_locked_file_is_waited_for_and_then_said_to_be_locked(
    tmp_path: Path, locked: sqlite3.Connection
) -> None:
    file = str(tmp_path / "store.db")
    store = JournalStore(SqliteEngine(file, now=CLOCK.now, new_id=IDS.new, lock_seconds=0.02))
    await store.commit(note("first"))
    locked.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="is locked by another process"):
        await store.commit(note("second"))
    assert [event.key for event in await store.read(FLEET)] == ["first"]
    locked.execute("ROLLBACK")
    assert not (await store.commit(note("second"))).repeated
    await store.close()


async def test_a_full_disk_loses_nothing_and_work_goes_on_when_there_is_room(small_disk: "SmallDisk") -> None:
    file = small_disk.folder / "store.db"
    store = opened(file)
    bodies = {f"key {number}": os.urandom(32_000) for number in range(100)}
    kept: dict[str, bytes] = {}
    with pytest.raises(StoreUnavailable, match=r"is full\. Nothing was written; free some space"):
        await fill(store, bodies, kept)
    assert {event.key: event.body for event in await store.read(FLEET)} == kept
    small_disk.change("size=16m")
    await fill(store, bodies, kept)
    await store.close()
    assert await read(file) == bodies


async def test_a_disk_that_can_only_be_read_is_called_so(small_disk: "SmallDisk") -> None:
    store = opened(small_disk.folder / "store.db")
    await store.commit(note("key"))
    await store.close()
    small_disk.change("ro")
    for url in (small_disk.folder / "store.db", small_disk.folder / "other.db"):
        with pytest.raises(StoreUnusable, match="writ"):
            opened(url)
    with pytest.raises(StoreUnusable, match=r"The folder .*/deeper of the store cannot be made"):
        opened(small_disk.folder / "deeper" / "store.db")
    small_disk.change("rw")
    store = opened(small_disk.folder / "store.db")
    assert len(await store.read(FLEET)) == 1
    await store.close()
