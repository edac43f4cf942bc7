import _ctypes
import random
import sqlite3
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from halter_drills.disk import (
    Deleted,
    Image,
    Log,
    Recorder,
    RecorderUnusable,
    Synced,
    Wrote,
    commits,
    find_committed,
    images,
    pages,
    parse,
    sqlite_library,
    write_out,
)

Rows = list[tuple[int, bytes]]
COMMITS = 36


def rows(connection: sqlite3.Connection) -> Rows | None:
    if not connection.execute("SELECT name FROM sqlite_master").fetchall():
        return None
    return connection.execute("SELECT number, body FROM event ORDER BY number").fetchall()


def work(connection: sqlite3.Connection, number: int, chance: random.Random) -> None:
    """One commit: mostly a small one, but also ones that spill, shrink the file or come after a rollback."""
    if number % 25 == 19:
        connection.execute("VACUUM")
        return
    connection.execute("BEGIN IMMEDIATE")
    if number % 13 == 7:
        connection.execute("DELETE FROM event")
        connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
    if number % 30 == 5:
        connection.executemany(
            "INSERT INTO event VALUES (?, ?)", ((number * 100 + n, bytes(2000)) for n in range(1, 25))
        )
        connection.execute("UPDATE event SET body = zeroblob(1900) WHERE number > ?", (number * 100,))
    if number % 7 == 3:
        connection.execute("DELETE FROM event WHERE number % 3 = 1 AND number < ?", (number * 100,))
    body = chance.randbytes(chance.randrange(3000))
    connection.execute("INSERT INTO event VALUES (?, ?)", (number * 100, body))
    connection.execute("COMMIT")


def record(path: Path, journal: str, synchronous: str, count: int = COMMITS) -> tuple[Log, dict[str, Rows | None]]:
    """The log of a small workload, and the rows after each commit by the label of its acknowledgment."""
    chance, values = random.Random(7), dict[str, Rows | None]()
    with (
        Recorder(path) as recorder,
        closing(sqlite3.connect(recorder.uri, uri=True, isolation_level=None)) as connection,
    ):
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA wal_autocheckpoint = 20")
        connection.execute("PRAGMA cache_size = 10")
        connection.execute("CREATE TABLE event (number INTEGER PRIMARY KEY, body BLOB)")
        for number in range(count + 1):
            if number:
                work(connection, number, chance)
            recorder.mark(f"acknowledged {number}")
            values[f"acknowledged {number}"] = rows(connection)
    return recorder.log(), values


def recover(image: Image, path: Path) -> Rows | None:
    write_out(image.files, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return rows(connection)


def numbers(log: Log, seed: int = 1, per_point: int = 4) -> Iterator[tuple[Image, int | None]]:
    """Each image with the number of the state that it holds."""
    states = [commit.digest for commit in commits(log)]
    for image in images(log, seed, per_point):
        yield image, find_committed(pages(**image.files), states)


def count_lost(log: Log) -> int:
    return sum(number is None or number < image.acknowledged for image, number in numbers(log))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Log, dict[str, Rows | None]]:
    return record(tmp_path_factory.mktemp("full") / "halter.db", "WAL", "FULL")


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_sqlite_recovers_every_image_to_the_commit_that_the_oracle_names(
    full: tuple[Log, dict[str, Rows | None]], tmp_path: Path, every: int
) -> None:
    log, values = full
    states = commits(log)
    for place, (image, number) in enumerate(numbers(log)):
        assert number is not None, image.moment
        assert number >= image.acknowledged, image.moment
        if place % every:
            continue
        assert recover(image, tmp_path / "image.db") == values.get(states[number].label), image.moment


def test_a_synced_wal_loses_nothing_that_was_acknowledged_and_invents_nothing(
    full: tuple[Log, dict[str, Rows | None]],
) -> None:
    log, _ = full
    for image, number in numbers(log, seed=2):
        assert number is not None, image.moment
        assert image.acknowledged <= number <= image.written, image.moment
        assert not image.acknowledged or number <= image.acknowledged + 1, image.moment


def test_every_commit_of_the_log_is_found_and_named(full: tuple[Log, dict[str, Rows | None]]) -> None:
    log, values = full
    found = commits(log)
    assert [commit.label for commit in found] == ["", "", *values]
    assert len({commit.digest for commit in found}) == len(found)


def test_the_images_show_every_moment_of_commits_checkpoints_and_restarts(
    full: tuple[Log, dict[str, Rows | None]],
) -> None:
    log, _ = full
    drawn = list(images(log, 1))
    moments = Counter(image.moment for image in drawn)
    assert min(moments["writing the wal"], moments["before the wal sync"], moments["after the wal sync"]) > 20
    assert min(moments["writing the db"], moments["before the db sync"], moments["overwriting the wal"]) > 20
    assert min(moments["after the db sync"], moments["at a mark"]) > 5
    assert {image.kind for image in drawn} >= {"all", "none", "torn", "subset"}
    assert {image.acknowledged for image in drawn} == {0, *range(2, COMMITS + 3)}


def test_the_images_that_prove_nothing_can_be_counted_and_are_few(
    full: tuple[Log, dict[str, Rows | None]],
) -> None:
    drawn = list(numbers(full[0]))
    blank = [number for image, number in drawn if image.blank]
    assert set(blank) == {0}
    assert len(blank) < len(drawn) / 50


def test_the_same_seed_gives_the_same_images_and_another_one_others(
    full: tuple[Log, dict[str, Rows | None]],
) -> None:
    log, _ = full
    assert all(image == other for image, other in zip(images(log, 3), images(log, 3), strict=True))
    assert any(image != other for image, other in zip(images(log, 3), images(log, 4), strict=False))


def test_a_point_gives_at_most_as_many_images_as_asked_for(full: tuple[Log, dict[str, Rows | None]]) -> None:
    log, _ = full
    for text in (1, 3, 6):
        points = Counter(image.point for image in images(log, 1, text))
        assert max(points.values()) == text


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
def test_without_a_sync_at_each_commit_an_acknowledged_commit_is_lost(synchronous: str, tmp_path: Path) -> None:
    log, _ = record(tmp_path / "halter.db", "WAL", synchronous, 20)
    assert count_lost(log) > 20


def test_a_disk_that_only_claims_to_sync_loses_an_acknowledged_commit(
    full: tuple[Log, dict[str, Rows | None]],
) -> None:
    log = full[0]
    assert count_lost(replace(log, operations=tuple(o for o in log.operations if not isinstance(o, Synced))[:300])) > 20


@pytest.mark.parametrize("journal", ["DELETE", "TRUNCATE", "PERSIST"])
def test_a_rollback_journal_recovers_to_the_commit_that_the_oracle_names(journal: str, tmp_path: Path) -> None:
    log, values = record(tmp_path / "halter.db", journal, "EXTRA", 5)
    states = commits(log)
    for image, number in numbers(log, per_point=2):
        assert number is not None, image.moment
        assert image.acknowledged <= number <= image.acknowledged + 1, image.moment
        assert recover(image, tmp_path / "image.db") == values.get(states[number].label), image.moment


def test_a_deleted_journal_may_come_back_where_its_folder_is_not_synced(tmp_path: Path) -> None:
    log, _ = record(tmp_path / "halter.db", "DELETE", "FULL", 5)
    assert Deleted("journal") in log.operations
    assert count_lost(log) > 0


def test_the_log_replays_to_what_is_on_the_disk_even_where_memory_mapping_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "half #1?.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE event (number INTEGER PRIMARY KEY, body BLOB)")
    with (
        Recorder(path) as recorder,
        closing(sqlite3.connect(recorder.uri, uri=True, isolation_level=None)) as connection,
    ):
        connection.execute("PRAGMA mmap_size = 1000000")
        connection.execute("PRAGMA wal_autocheckpoint = 5")
        for number in range(1, 12):
            work(connection, number, random.Random(number))
        *_, last = (image for image in images(recorder.log(), 1) if image.kind == "all")
        assert last.files["db"] == path.read_bytes()
        assert last.files["wal"] == Path(f"{path}-wal").read_bytes()
        assert recorder.log().base["db"]


def test_commits_of_two_writer_threads_are_recorded_in_their_order(tmp_path: Path) -> None:
    def write(uri: str, first: int) -> None:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=60)) as connection:
            for number in range(first, first + 10):
                connection.execute("INSERT INTO event VALUES (?, zeroblob(500))", (number,))

    with Recorder(tmp_path / "halter.db") as recorder:
        with closing(sqlite3.connect(recorder.uri, uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE event (number INTEGER PRIMARY KEY, body BLOB)")
        threads = [threading.Thread(target=write, args=(recorder.uri, first)) for first in (100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(commits(recorder.log())) == 1 + 2 + 20
    assert all(number is not None for _, number in numbers(recorder.log()))


def test_only_the_files_of_the_database_itself_are_recorded(tmp_path: Path) -> None:
    with (
        Recorder(tmp_path / "halter.db") as recorder,
        closing(sqlite3.connect(recorder.uri, uri=True, isolation_level=None)) as connection,
    ):
        connection.execute("ATTACH ? AS other", (str(tmp_path / "other.db"),))
        connection.execute("CREATE TABLE other.event (number INTEGER)")
        connection.execute("CREATE TEMP TABLE passing (number INTEGER)")
        assert recorder.log().operations == ()


def test_a_recorder_refuses_to_go_while_a_connection_is_open(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "halter.db").__enter__()
    with (
        closing(sqlite3.connect(recorder.uri, uri=True)) as connection,
        pytest.raises(RecorderUnusable, match="Close every connection"),
    ):
        recorder.__exit__()
    connection.close()
    recorder.__exit__()
    with pytest.raises(sqlite3.OperationalError, match="no such vfs"):
        sqlite3.connect(recorder.uri, uri=True)


@pytest.mark.parametrize("origin", ["/nowhere/_sqlite3.so", _ctypes.__file__])
def test_a_library_that_cannot_be_reached_is_reported_in_a_sentence(origin: str) -> None:
    with pytest.raises(RecorderUnusable, match="Use a Python whose sqlite3 module is linked to"):
        sqlite_library(origin)


def test_what_a_deleted_file_held_never_mixes_with_its_successor() -> None:
    log = Log(
        {"db": b"", "wal": b"old old", "journal": b""},
        (Deleted("wal"), Wrote("wal", 0, b"new"), Synced("folder"), Synced("wal")),
    )
    assert {image.files["wal"] for image in images(log, 1, 9) if image.point < 3} == {b"old old", b"", b"new"}
    assert {image.files["wal"] for image in images(log, 1, 9) if image.point == 3} == {b"", b"new"}
    assert {image.files["wal"] for image in images(log, 1, 9) if image.point == 4} == {b"new"}


def test_a_write_is_torn_where_a_sector_of_the_file_ends() -> None:
    log = Log({"db": b"", "wal": b"", "journal": b""}, (Wrote("wal", 100, bytes(range(256)) * 4),))
    sizes = {len(image.files["wal"]) for seed in range(20) for image in images(log, seed) if image.kind == "torn"}
    assert sizes == {512, 1024}


@pytest.fixture
def wal(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """A database with five commits that are all in the WAL, and that WAL."""
    path = tmp_path / "oracle.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("CREATE TABLE event (number INTEGER PRIMARY KEY, body BLOB)")
        for number in range(4):
            connection.execute("INSERT INTO event VALUES (?, zeroblob(3000))", (number,))
        yield path, Path(f"{path}-wal").read_bytes()


def reopen(db: bytes, wal: bytes, copy: Path) -> Rows | None:
    write_out({"db": db, "wal": wal, "journal": b""}, copy)
    with closing(sqlite3.connect(copy)) as connection:
        return rows(connection)


def checksum(data: bytes, order: str, first: int = 0, second: int = 0) -> tuple[int, int]:
    for even, odd in struct.iter_unpack(f"{order}II", data):
        first = (first + even + second) % 2**32
        second = (second + odd + first) % 2**32
    return first, second


def swap_byte_order(wal: bytes) -> bytes:
    """The same WAL with the checksums of the other byte order, as a machine of the other kind writes it."""
    order = "<" if wal[3] & 1 else ">"
    header = wal[:3] + bytes([wal[3] ^ 1]) + wal[4:24]
    sums = checksum(header, order)
    turned, step = header + struct.pack(">II", *sums), 24 + int.from_bytes(wal[8:12])
    for start in range(32, len(wal), step):
        head, data = wal[start : start + 16], wal[start + 24 : start + step]
        sums = checksum(head[:8] + data, order, *sums)
        turned += head + struct.pack(">II", *sums) + data
    return turned


def test_both_byte_orders_of_checksums_are_understood_as_sqlite_does(wal: tuple[Path, bytes], tmp_path: Path) -> None:
    path, content = wal
    assert swap_byte_order(content) != content
    assert swap_byte_order(swap_byte_order(content)) == content
    assert parse(swap_byte_order(content)) == parse(content)
    assert parse(content).commits == 5
    assert reopen(path.read_bytes(), swap_byte_order(content), tmp_path / "copy.db") == [
        (n, bytes(3000)) for n in range(4)
    ]


def test_wherever_a_wal_is_damaged_the_oracle_and_sqlite_keep_the_same_commits(
    wal: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, content = wal
    step = 24 + int.from_bytes(content[8:12])
    anywhere = random.Random(5).sample(range(len(content)), 50)
    counts = Counter[int]()
    for place in (*range(32 + 3 * step, 56 + 3 * step), *anywhere):
        damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        cut = content[:place]
        for attempt in (damaged, cut):
            number = parse(attempt).commits
            counts[number] += 1
            read = reopen(path.read_bytes(), attempt, tmp_path / "copy.db")
            assert read == ([(n, bytes(3000)) for n in range(number - 1)] if number else None)
    assert len(counts) == 5


def test_the_wal_of_an_empty_database_counts_for_nothing(wal: tuple[Path, bytes], tmp_path: Path) -> None:
    assert pages(b"", wal[1]).size == 0
    assert reopen(b"", wal[1], tmp_path / "copy.db") is None


def test_a_content_that_was_never_committed_or_twice_is_no_state() -> None:
    content = pages(b"SQLite format 3\0")
    assert find_committed(content, []) is None
    assert find_committed(content, [b"", content.digest]) == 1
    assert find_committed(content, [content.digest, content.digest]) is None
