"""Files on a real disk: found, named by what is in them, and read whole or not at all."""

import hashlib
import itertools
import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import Final

import pytest

from halter.core.ports import UnreadableFile
from halter.documents.files import MAX_DOCUMENT_BYTES, DocumentBytes, digest_file, read_document, scan_documents


def flaw(result: object) -> str:
    assert isinstance(result, UnreadableFile)
    return result.sentence


def names(folder: Path, pattern: str) -> set[str]:
    outcome = scan_documents(folder, pattern)
    assert not isinstance(outcome, UnreadableFile)
    return set(outcome)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    folder = tmp_path / "shelf"
    (folder / "deep" / "deeper").mkdir(parents=True)
    for name in ("a.txt", "b.md", "deep/c.txt", "deep/deeper/d.txt"):
        (folder / name).write_text(name)
    return folder


def test_files_are_named_by_their_paths_in_the_folder(shelf: Path) -> None:
    assert names(shelf, "*.txt") == {"a.txt"}
    assert names(shelf, "**/*.txt") == {"a.txt", "deep/c.txt", "deep/deeper/d.txt"}
    assert names(shelf, "deep/*") == {"deep/c.txt"}


def test_no_link_leads_out_of_the_folder(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "e.txt").write_text("secret")
    (shelf / "link.txt").symlink_to(tmp_path / "secret.txt")
    (shelf / "folder").symlink_to(tmp_path / "others")
    (shelf / "inside.txt").symlink_to(shelf / "a.txt")
    (shelf / "loop").symlink_to(shelf)
    assert names(shelf, "**/*.txt") == {"a.txt", "inside.txt", "deep/c.txt", "deep/deeper/d.txt"}


def test_a_folder_that_vanishes_is_a_sentence(shelf: Path) -> None:
    shutil.rmtree(shelf)
    assert flaw(scan_documents(shelf, "*")) == "The folder shelf cannot be read: No such file or directory."


def test_a_folder_that_is_a_file_is_a_sentence(shelf: Path) -> None:
    assert "cannot be read" in flaw(scan_documents(shelf / "a.txt", "*"))


def test_a_file_is_taken_with_the_digest_of_its_bytes(shelf: Path) -> None:
    digest = hashlib.sha256(b"a.txt").hexdigest()
    assert read_document(shelf / "a.txt") == DocumentBytes(b"a.txt", digest)
    assert digest_file(shelf / "a.txt") == digest


def test_a_large_file_is_refused_without_being_read(tmp_path: Path) -> None:
    large = tmp_path / "large.log"
    with large.open("wb") as file:
        file.truncate(200 * 1024 * 1024)
    assert flaw(read_document(large)) == (
        "large.log has 209,715,200 bytes; the limit is 52,428,800. Split it, or leave it out."
    )
    assert len(str(digest_file(large))) == 64
    with large.open("wb") as file:
        file.truncate(MAX_DOCUMENT_BYTES)
    assert isinstance(read_document(large), DocumentBytes)


@pytest.mark.parametrize("look", [read_document, digest_file])
def test_what_is_no_plain_file_is_a_sentence(shelf: Path, look: object) -> None:
    assert callable(look)
    os.mkfifo(shelf / "pipe.txt")
    assert flaw(look(shelf / "pipe.txt")) == "pipe.txt is not a regular file."
    assert flaw(look(shelf / "deep")) == "deep is a folder: name a file in it."
    assert flaw(look(shelf / "gone.txt")) == "gone.txt does not exist, or was removed."
    assert flaw(look(shelf / "a.txt" / "b.txt")) == "b.txt does not exist, or was removed."
    assert "cannot be read" in flaw(look(shelf / "a\0b"))
    assert "cannot be read" in flaw(look(shelf / ("x" * 300)))


# So many that two readings in a row cannot meet the same run of them, in whatever step reader and writer fall.
BYTES: Final = bytes(range(251))


def scribble(file: Path, event: threading.Event) -> None:
    """Write a file over and over through memory: that leaves its time of change as it is."""
    with file.open("r+b") as buffered_random, mmap.mmap(buffered_random.fileno(), 0) as memory:
        for letter in itertools.cycle(BYTES):
            if event.is_set():
                return
            memory[:] = bytes([letter]) * len(memory)


@pytest.mark.parametrize("times", [5, pytest.param(30, marks=pytest.mark.soak)])
def test_a_file_that_is_written_to_meanwhile_is_never_taken_half(times: int, tmp_path: Path) -> None:
    """Each version is all of one byte, so half of one and half of another would show."""
    file = tmp_path / "busy.txt"
    file.write_bytes(BYTES[:1] * 4_000_000)
    event = threading.Event()
    writer = threading.Thread(target=scribble, args=(file, event))
    writer.start()
    try:
        results = [read_document(file) for _ in range(times)]
        digests = [digest_file(file) for _ in range(times)]
    finally:
        event.set()
        writer.join()
    troubles = [each.sentence for each in (*results, *digests) if isinstance(each, UnreadableFile)]
    assert all("busy.txt changed while it was read." in sentence for sentence in troubles)
    assert all(each.data == each.data[:1] * len(each.data) for each in results if isinstance(each, DocumentBytes))
    whole = {hashlib.sha256(bytes([letter]) * 4_000_000).hexdigest() for letter in BYTES}
    assert {each for each in digests if isinstance(each, str)} <= whole
    assert isinstance(read_document(file), DocumentBytes)
