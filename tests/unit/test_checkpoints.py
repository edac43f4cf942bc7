"""Checkpoints vouch for what was committed, in a place that may fail without stopping anybody."""

import asyncio
import base64
import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from halter.core.clock import SECOND
from halter.core.events import CallStarted
from halter.core.ids import FLEET
from halter.core.ports import Draft, Write
from halter.journal.checkpoints import (
    IMMEDIATE_KINDS,
    RETRY_INTERVAL,
    Checkpointer,
    CheckpointIo,
    digest_line,
    is_signed,
    load_signing_key,
    parse_checkpoint,
    public_key_path,
    read_lines_backwards,
    read_public_keys,
)
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore

if TYPE_CHECKING:
    from conftest import Desk

PEM_END = b"-----END PRIVATE KEY-----\n"


def test_the_first_commit_is_vouched_for_at_once(desk: "Desk") -> None:
    desk.checkpointer().on_commit([desk.event("a", 1), desk.event("a", 2), desk.event("b", 1)])
    assert desk.heads() == [{"a": 2, "b": 1}]
    assert desk.lines()[0].heads["a"] == (2, (b"\x02" * 32).hex())


def test_a_checkpoint_is_written_every_so_many_events(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=3)
    for seq in range(1, 9):
        checkpointer.on_commit([desk.event("a", seq)])
    assert desk.heads() == [{"a": 1}, {"a": 4}, {"a": 7}]


def test_a_checkpoint_is_written_every_so_many_seconds(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(interval_seconds=60)
    checkpointer.on_commit([desk.event("a", 1)])
    desk.now += 60 * SECOND - 1
    checkpointer.on_commit([desk.event("a", 2)])
    assert desk.heads() == [{"a": 1}]
    desk.now += 1
    checkpointer.on_commit([desk.event("b", 1)])
    assert desk.heads() == [{"a": 1}, {"a": 2, "b": 1}]


def test_a_checkpoint_is_written_at_each_sessions_end(desk: "Desk") -> None:
    checkpointer = desk.checkpointer()
    checkpointer.on_commit([desk.event("a", 1)])
    checkpointer.on_commit([desk.event("a", 2)])
    checkpointer.on_commit([desk.event("a", 3, "session_ended")])
    assert desk.heads() == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("kind", sorted(IMMEDIATE_KINDS))
def test_what_a_person_said_is_checkpointed_with_its_own_commit(desk: "Desk", kind: str) -> None:
    checkpointer = desk.checkpointer()
    checkpointer.on_commit([desk.event("a", 1)])
    checkpointer.on_commit([desk.event("fleet", 1, kind)])
    assert desk.heads() == [{"a": 1}, {"fleet": 1}]


def test_a_checkpoint_names_the_stream_that_was_committed_to_last(desk: "Desk") -> None:
    checkpointer = desk.checkpointer()
    checkpointer.on_commit([desk.event("b", 1)])
    checkpointer.on_commit([desk.event("b", 2), desk.event("a", 1), desk.event("b", 3), desk.event("a", 2)])
    checkpointer.flush()
    assert [(line.last, line.heads[str(line.last)][0]) for line in desk.lines()] == [("b", 1), ("a", 2)]


def test_lines_are_read_from_the_newest_to_the_oldest_also_across_blocks_and_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = [bytes([97 + number % 26]) * (number * 997 % 9_000 + 1) for number in range(60)]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b"torn")
    assert list(read_lines_backwards(path)) == lines[::-1]
    path.write_bytes(b"torn")
    assert list(read_lines_backwards(path)) == []
    assert list(read_lines_backwards(tmp_path / "missing")) == []


def test_a_checkpoint_is_on_the_disk_before_anybody_relies_on_it(desk: "Desk") -> None:
    """Its whole line is synced each time, and at the first one the folder too, which holds the file's name."""
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    lengths: list[int] = []
    for seq in (1, 2):
        checkpointer.on_commit([desk.event("a", seq)])
        lengths.append(desk.path.stat().st_size)
    assert desk.synced == [(desk.path.name, lengths[0]), (desk.folder.name, 0), (desk.path.name, lengths[1])]


def test_a_checkpoint_that_cannot_be_synced_is_taken_back_and_made_up_for(desk: "Desk") -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    machine = CheckpointIo(sync=fails)
    checkpointer = Checkpointer(desk.folder, desk.key_path, desk.store_id, lambda: desk.now, machine=machine)
    checkpointer.on_commit([desk.event("a", 1)])
    assert "Input/output error" in checkpointer.problem
    assert desk.path.read_bytes() == b""
    other = desk.checkpointer()
    other.on_commit([desk.event("a", 1)])
    assert desk.heads() == [{"a": 1}]


def test_a_flush_writes_what_is_left_and_nothing_twice(desk: "Desk") -> None:
    checkpointer = desk.checkpointer()
    checkpointer.flush()
    assert not desk.path.exists()
    checkpointer.on_commit([desk.event("a", 1)])
    checkpointer.on_commit([desk.event("b", 7)])
    checkpointer.flush()
    checkpointer.flush()
    assert desk.heads() == [{"a": 1}, {"b": 7}]


def test_events_that_arrive_out_of_order_keep_the_highest_head(desk: "Desk") -> None:
    checkpointer = desk.checkpointer()
    checkpointer.on_commit([desk.event("a", 1)])
    checkpointer.on_commit([desk.event("a", 3)])
    checkpointer.on_commit([desk.event("a", 2)])
    checkpointer.flush()
    assert desk.heads() == [{"a": 1}, {"a": 3}]


def test_several_processes_share_one_chain(desk: "Desk") -> None:
    one, two = desk.checkpointer(events_per_checkpoint=1), desk.checkpointer(events_per_checkpoint=1)
    for seq in range(1, 6):
        one.on_commit([desk.event("a", seq)])
        two.on_commit([desk.event("b", seq)])
    chronicle = desk.read()
    assert chronicle.findings == []
    assert [line.number for line in desk.lines()] == list(range(1, 11))
    assert (chronicle.find_covered("a"), chronicle.find_covered("b"), chronicle.find_covered("c")) == (5, 5, 0)


def edit_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b'{"number":7')
    os.utime(path, ns=(1, 1))


def replace_by_a_file_like_it(path: Path) -> None:
    before, draft = path.stat(), path.with_suffix(".draft")
    draft.write_bytes(path.read_bytes().replace(b'{"number":1', b'{"number":7'))
    os.utime(draft, ns=(before.st_atime_ns, before.st_mtime_ns))
    draft.replace(path)


@pytest.mark.parametrize("change", [edit_in_place, replace_by_a_file_like_it, Path.unlink])
def test_a_checkpoint_names_the_line_that_is_there_and_not_the_one_that_was(
    desk: "Desk", change: Callable[[Path], None]
) -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    checkpointer.on_commit([desk.event("a", 1)])
    change(desk.path)
    checkpointer.on_commit([desk.event("a", 2)])
    *before, last = desk.path.read_bytes().splitlines()
    checkpoint = parse_checkpoint(last)
    assert checkpoint is not None
    assert (checkpoint.number, checkpoint.previous) == ((8, digest_line(before[-1])) if before else (1, ""))


APPEND = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import event
from halter.journal.checkpoints import Checkpointer
folder, key, name = map(Path, sys.argv[2:5])
checkpointer = Checkpointer(folder, key, "store", lambda: 1, events_per_checkpoint=1)
for seq in range(1, 21):
    checkpointer.on_commit([event(name.name, seq)])
checkpointer.flush()
assert checkpointer.problem == "", checkpointer.problem
"""


def test_processes_that_append_at_the_same_time_never_break_the_chain(desk: "Desk") -> None:
    text = str(Path(__file__).parent)
    running = [
        subprocess.Popen([sys.executable, "-c", APPEND, text, str(desk.folder), str(desk.key_path), name])
        for name in ("a", "b", "c")
    ]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    chronicle = desk.read()
    assert chronicle.findings == []
    assert [chronicle.find_covered(name) for name in ("a", "b", "c")] == [20, 20, 20]
    assert len({line.key for line in desk.lines()}) == 1


def test_a_private_key_is_made_once_and_for_its_owner_only(desk: "Desk") -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(load_signing_key(desk.key_path).public)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert len(set(texts)) == 1
    assert desk.key_path.stat().st_mode & 0o777 == 0o600
    assert read_public_keys(public_key_path(desk.key_path)) == set(texts)
    assert sorted(path.name for path in desk.key_path.parent.iterdir()) == ["key", "key.pub", "outside"]


def test_a_key_that_another_tool_made_signs_as_that_tool_does(desk: "Desk") -> None:
    """Version 1.0.0 and `openssl genpkey` write the same form; some tools add the public key."""
    other = Ed25519PrivateKey.generate()
    form = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    seed, public = other.private_bytes_raw(), other.public_key().public_bytes_raw()
    long_form = bytes.fromhex("3051020101300506032b657004220420") + seed + bytes.fromhex("812100") + public
    for number, text in enumerate([form, b"-----BEGIN PRIVATE KEY-----\n" + base64.encodebytes(long_form) + PEM_END]):
        path = desk.key_path.with_name(f"other{number}")
        path.write_bytes(text)
        key = load_signing_key(path)
        assert key.public == public.hex()
        assert key.sign(b"data") == other.sign(b"data").hex()
        assert is_signed(b"data", key.sign(b"data"), key.public)
        assert not is_signed(b"date", key.sign(b"data"), key.public)


def test_a_key_is_written_in_the_form_that_other_tools_read(desk: "Desk") -> None:
    key = load_signing_key(desk.key_path)
    read = load_pem_private_key(desk.key_path.read_bytes(), None)
    assert isinstance(read, Ed25519PrivateKey)
    assert read.public_key().public_bytes_raw().hex() == key.public


def test_a_missing_folder_is_reported_and_its_checkpoints_are_written_later(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    desk.folder.rmdir()
    checkpointer.on_commit([desk.event("a", 1)])
    checkpointer.on_commit([desk.event("b", 1, "session_ended")])
    assert str(desk.path) in checkpointer.problem
    assert "No such file" in checkpointer.problem
    desk.folder.mkdir()
    desk.now += RETRY_INTERVAL
    checkpointer.on_commit([desk.event("a", 2)])
    assert checkpointer.problem == ""
    assert desk.heads() == [{"a": 2, "b": 1}]


def test_a_failing_place_is_not_tried_again_with_every_commit(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    desk.folder.rmdir()
    checkpointer.on_commit([desk.event("a", 1)])
    desk.folder.mkdir()
    desk.now += RETRY_INTERVAL - 1
    checkpointer.on_commit([desk.event("a", 2, "session_ended")])
    assert not desk.path.exists()
    checkpointer.flush()
    assert desk.heads() == [{"a": 2}]


def test_a_full_disk_is_reported_and_loses_nothing(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    desk.path.symlink_to("/dev/full")
    checkpointer.on_commit([desk.event("a", 1)])
    assert checkpointer.problem != ""
    desk.path.unlink()
    checkpointer.flush()
    assert checkpointer.problem == ""
    assert desk.heads() == [{"a": 1}]


OUT_OF_ROOM = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import event
from halter.journal.checkpoints import Checkpointer, checkpoint_file
folder, key = map(Path, sys.argv[2:4])
checkpointer = Checkpointer(folder, key, "store", lambda: 1, events_per_checkpoint=1)
checkpointer.on_commit([event("a", 1)])
size = checkpoint_file(folder, "store").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
checkpointer.on_commit([event("a", 2)])
assert "too large" in checkpointer.problem, checkpointer.problem
assert checkpoint_file(folder, "store").stat().st_size == size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.flush()
assert checkpointer.problem == ""
"""


def test_what_was_written_of_a_line_that_found_no_room_is_taken_back(desk: "Desk") -> None:
    text = str(Path(__file__).parent)
    command = [sys.executable, "-c", OUT_OF_ROOM, text, str(desk.folder), str(desk.key_path)]
    subprocess.run(command, check=True, timeout=60)
    assert desk.heads() == [{"a": 1}, {"a": 2}]
    assert desk.read().findings == []


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n"])
def test_a_key_that_cannot_be_used_is_reported(desk: "Desk", content: bytes) -> None:
    desk.key_path.write_bytes(content)
    checkpointer = desk.checkpointer()
    checkpointer.on_commit([desk.event("a", 1)])
    assert str(desk.key_path) in checkpointer.problem
    desk.key_path.unlink()
    checkpointer.flush()
    assert checkpointer.problem == ""


def test_a_process_that_keeps_the_file_locked_stops_nobody(desk: "Desk") -> None:
    checkpointer = desk.checkpointer()
    file = os.open(desk.path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    checkpointer.on_commit([desk.event("a", 1)])
    assert "locked" in checkpointer.problem
    assert 0 < desk.pauses <= 10
    os.close(file)
    checkpointer.flush()
    assert desk.heads() == [{"a": 1}]


def test_a_torn_last_line_is_reported_and_the_next_append_removes_it(desk: "Desk") -> None:
    checkpointer = desk.checkpointer()
    checkpointer.on_commit([desk.event("a", 1)])
    whole = desk.path.read_bytes()
    for cut in range(1, len(whole), 37):
        desk.path.write_bytes(whole + whole[:cut])
        chronicle = desk.read()
        assert (chronicle.torn, chronicle.count, chronicle.findings) == (True, 1, [])
    checkpointer.on_commit([desk.event("a", 2)])
    checkpointer.flush()
    chronicle = desk.read()
    assert (chronicle.torn, chronicle.count, chronicle.findings) == (False, 2, [])


def test_a_file_with_nothing_but_a_torn_line_begins_anew(desk: "Desk") -> None:
    desk.path.write_bytes(b'{"number":1')
    desk.checkpointer().on_commit([desk.event("a", 1)])
    assert desk.heads() == [{"a": 1}]
    assert desk.read().findings == []


def test_lines_longer_than_a_block_are_continued_rightly(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    for seq in (1, 2, 3):
        checkpointer.on_commit([desk.event(f"stream-{number}", seq) for number in range(1500)])
    assert desk.path.stat().st_size > 3 * 64 * 1024
    assert desk.read().findings == []
    assert [line.number for line in desk.lines()] == [1, 2, 3]


def note(key: str) -> Write:
    return Write(FLEET, key, lambda _: [Draft(CallStarted(call=key, tool="search"))])


@pytest.mark.parametrize("how", ["inline", "in threads"])
async def test_a_store_tells_its_observers_and_flushes_them_when_it_closes(desk: "Desk", how: str) -> None:
    engine = MemoryEngine(now=lambda: desk.now, new_id=lambda: desk.store_id)
    store = JournalStore(engine, inline=how == "inline", observers=[desk.checkpointer()])
    for number in range(3):
        await store.commit(note(f"key{number}"))
    assert desk.heads() == [{"fleet": 1}]
    await store.commit(note("key0"))
    await store.close()
    assert desk.heads() == [{"fleet": 1}, {"fleet": 3}]


@pytest.mark.parametrize("commits_before", [0, 2])
async def test_a_store_flushes_its_observers_by_a_timer(desk: "Desk", commits_before: int) -> None:
    flushed = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Timed:
        interval_seconds = 0.001
        flushes = 0

        def on_commit(self, events: object) -> None:
            pass

        def flush(self) -> None:
            self.flushes += 1
            if self.flushes == 3:
                loop.call_soon_threadsafe(flushed.set)

    engine = MemoryEngine(now=lambda: desk.now, new_id=lambda: desk.store_id)
    store = JournalStore(engine)
    for number in range(commits_before):
        await store.commit(note(f"before{number}"))
    store.observe(Timed())
    await store.commit(note("key"))
    async with asyncio.timeout(30):
        await flushed.wait()
    await store.close()


async def test_a_failing_place_refuses_no_commit(desk: "Desk") -> None:
    engine = MemoryEngine(now=lambda: desk.now, new_id=lambda: desk.store_id)
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    desk.folder.rmdir()
    store = JournalStore(engine, observers=[checkpointer])
    assert (await store.commit(note("key"))).events[0].seq == 1
    assert (await store.read(FLEET))[0].key == "key"
    await store.close()
    assert checkpointer.problem != ""
