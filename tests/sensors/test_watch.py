"""Files and folders on a real disk: bursts, renames, deletions, and folders that come and go."""

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from halter.core.tools import Sensor, SensorFailed
from halter.sensors import files
from halter.sensors.files import make_watch_sensor, read_first_look
from halter.spec.sensors import FilesSensor, FilesSource
from halter.system import folders


def make_spec(pattern: str = "*", path: str = "inbox") -> FilesSensor:
    return FilesSensor(name="inbox", source=FilesSource(path=path, pattern=pattern))


def watching(root: Path, clock: Any, path: str = "inbox", pattern: str = "*") -> Sensor:
    return make_watch_sensor(make_spec(pattern, path), root, clock)


def paths(value: Any) -> set[str]:
    return {file["path"] for file in value["files"]}


def changed(values: list[Any]) -> set[tuple[str, str]]:
    return {(each["change"], each["path"]) for value in values for each in value["changes"]}


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


async def test_a_folder_is_read_at_once_the_newest_file_first(
    tmp_path: Path, inbox: Path, clock: Any, read: Any
) -> None:
    for age, name in enumerate(["new.txt", "old.txt", "oldest.txt"]):
        (inbox / name).write_text("x" * age)
        os.utime(inbox / name, (1_700_000_000 - age, 1_700_000_000 - age))
    (value,) = await read(watching(tmp_path, clock), 1)
    assert value["files"][0] == {"path": "new.txt", "size": 0, "modified_at": "2023-11-14T22:13:20.000Z"}
    assert [file["path"] for file in value["files"]] == ["new.txt", "old.txt", "oldest.txt"]
    assert value["changes"] == []


async def test_a_folder_tells_what_is_added_modified_renamed_and_deleted(
    tmp_path: Path, inbox: Path, clock: Any, listen: Any
) -> None:
    async with listen(watching(tmp_path, clock)) as listener:
        await listener.until_read(1)
        (inbox / "a").write_text("1")
        await listener.until(lambda: ("added", "a") in changed(listener.taken))
        (inbox / "a").write_text("22")
        await listener.until(lambda: ("modified", "a") in changed(listener.taken))
        (inbox / "a").rename(inbox / "b")
        await listener.until(lambda: ("added", "b") in changed(listener.taken))
        assert ("deleted", "a") in changed(listener.taken)
        (inbox / "b").unlink()
        await listener.until(lambda: ("deleted", "b") in changed(listener.taken))
        assert paths(listener.taken[-1]) == set()
    assert [report.health for report in listener.told] == ["ok"]


async def test_a_burst_is_a_few_readings_that_miss_nothing(
    tmp_path: Path, inbox: Path, clock: Any, listen: Any
) -> None:
    names = {f"{number}.log" for number in range(2000)}
    async with listen(watching(tmp_path, clock)) as listener:
        await listener.until_read(1)
        for name in names:
            (inbox / name).write_text("x")
        await listener.until(lambda: len(listener.taken) > 1)
        (inbox / "last.log").write_text("x")
        await listener.until(lambda: "last.log" in paths(listener.taken[-1]))
    assert len(listener.taken) < 10
    assert len(listener.taken[-1]["files"]) == files.MAX_FILES_REPORTED
    assert all(len(value["changes"]) <= files.MAX_FILES_REPORTED for value in listener.taken)


async def test_a_folder_that_vanishes_is_failing_until_it_is_back(
    tmp_path: Path, inbox: Path, clock: Any, listen: Any
) -> None:
    (inbox / "a").write_text("1")
    async with listen(watching(tmp_path, clock)) as listener:
        await listener.until_read(1)
        shutil.rmtree(inbox)
        await listener.until(lambda: listener.told[-1].health == "failing")
        assert listener.told[-1].sentence == "The folder inbox cannot be read: No such file or directory."
        make(inbox, "b")
        await listener.until(lambda: listener.told[-1].health == "ok" and paths(listener.taken[-1]) == {"b"})
        (inbox / "c").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"b", "c"})
    assert {("deleted", "a"), ("added", "b"), ("added", "c")} <= changed(listener.taken)


async def test_a_folder_that_is_replaced_is_watched_in_its_new_place(
    tmp_path: Path, inbox: Path, clock: Any, listen: Any
) -> None:
    async with listen(watching(tmp_path, clock)) as listener:
        await listener.until_read(1)
        shutil.move(inbox, tmp_path / "before")
        make(inbox, "a")
        await listener.until(lambda: paths(listener.taken[-1]) == {"a"})
        (tmp_path / "before" / "elsewhere").write_text("1")
        (inbox / "b").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"a", "b"})


async def test_a_folder_is_found_again_when_another_comes_at_once_or_one_above_it_is_moved(
    tmp_path: Path, clock: Any, listen: Any
) -> None:
    """The next folder may have the number of the last one, and of what is moved above nobody is told."""
    outer, inbox = tmp_path / "outer", tmp_path / "outer" / "inbox"
    inbox.mkdir(parents=True)
    async with listen(watching(tmp_path, clock, path="outer/inbox")) as listener:
        await listener.until_read(1)
        shutil.rmtree(inbox)
        make(inbox, "a")
        await listener.until(lambda: paths(listener.taken[-1]) == {"a"})
        (inbox / "b").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"a", "b"})
        shutil.move(outer, tmp_path / "before")
        make(inbox, "c")
        await listener.until(lambda: paths(listener.taken[-1]) == {"c"})
        (inbox / "d").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"c", "d"})


async def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path, clock: Any, listen: Any) -> None:
    async with listen(watching(tmp_path, clock, path="later/")) as listener:
        await listener.until_told("failing")
        (tmp_path / "later").mkdir()
        (tmp_path / "later" / "a").write_text("1")
        await listener.until(lambda: bool(listener.taken) and paths(listener.taken[-1]) == {"a"})


async def test_only_files_that_the_pattern_names_are_read(tmp_path: Path, inbox: Path, clock: Any, listen: Any) -> None:
    async with listen(watching(tmp_path, clock, pattern="*.log")) as listener:
        await listener.until_read(1)
        (inbox / "a.txt").write_text("1")
        (inbox / "below").mkdir()
        (inbox / "below" / "c.log").write_text("1")
        (inbox / "b.log").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"b.log"})
    assert changed(listener.taken) == {("added", "b.log")}


async def test_folders_that_appear_below_are_watched_where_the_pattern_leads_there(
    tmp_path: Path, inbox: Path, clock: Any, listen: Any
) -> None:
    async with listen(watching(tmp_path, clock, pattern="**/*.log")) as listener:
        await listener.until_read(1)
        (inbox / "x" / "y").mkdir(parents=True)
        (inbox / "x" / "y" / "a.log").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"x/y/a.log"})
        (inbox / "x" / "y" / "b.log").write_text("1")
        await listener.until(lambda: paths(listener.taken[-1]) == {"x/y/a.log", "x/y/b.log"})
        (inbox / "x").rename(inbox / "z")
        await listener.until(lambda: paths(listener.taken[-1]) == {"z/y/a.log", "z/y/b.log"})
        (inbox / "z" / "y" / "c.log").write_text("1")
        await listener.until(lambda: "z/y/c.log" in paths(listener.taken[-1]))


async def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, inbox: Path, clock: Any, read: Any) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "key").write_text("made up")
    (inbox / "plain").write_text("1")
    (inbox / "inside").symlink_to("plain")
    (inbox / "file").symlink_to(secret / "key")
    (inbox / "folder").symlink_to(secret)
    (inbox / "root").symlink_to("/")
    (inbox / "loop").symlink_to(inbox)
    (inbox / "nowhere").symlink_to("gone")
    (value,) = await read(watching(tmp_path, clock, pattern="**/*"), 1)
    assert paths(value) == {"plain", "inside"}
    (value,) = await read(watching(tmp_path, clock, pattern="folder/*"), 1)
    assert paths(value) == set()


def unreadable(folder: Path) -> Path:
    return Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff"))


def make(folder: Path, file: str) -> None:
    folder.mkdir(parents=True)
    (folder / file).write_text("1")


async def test_pipes_and_names_that_are_no_text_do_no_harm(tmp_path: Path, inbox: Path, clock: Any, read: Any) -> None:
    os.mkfifo(inbox / "pipe")
    unreadable(inbox).write_text("1")
    (value,) = await read(watching(tmp_path, clock), 1)
    assert paths(value) == {"bad\ufffd"}


async def test_a_folder_with_too_many_files_is_a_failure(tmp_path: Path, inbox: Path, clock: Any, read: Any) -> None:
    for number in range(folders.MAX_FOLDERS):
        (inbox / str(number)).mkdir()
    with pytest.raises(SensorFailed, match="has more than 100,000 files or 1,000 folders"):
        await read(watching(tmp_path, clock, pattern="**/*"), 1)
    assert await read(watching(tmp_path, clock), 1)


async def test_a_file_is_read_at_once_and_after_each_change(tmp_path: Path, clock: Any, listen: Any) -> None:
    file = tmp_path / "note.txt"
    file.write_text("one")
    (tmp_path / "other.txt").write_text("1")
    async with listen(watching(tmp_path, clock, path="note.txt")) as listener:
        (first, *_) = await listener.until_read(1)
        assert (first["path"], first["exists"], first["size"], first["text"]) == ("note.txt", True, 3, "one")
        (tmp_path / "other.txt").write_text("2")
        file.write_text("two!")
        await listener.until(lambda: listener.taken[-1]["text"] == "two!")
        (tmp_path / "new").write_text("put in its place")
        (tmp_path / "new").replace(file)
        await listener.until(lambda: listener.taken[-1]["text"] == "put in its place")
        file.unlink()
        await listener.until(lambda: listener.taken[-1]["exists"] is False)
        file.write_text("back")
        await listener.until(lambda: listener.taken[-1]["text"] == "back")
    assert [report.health for report in listener.told] == ["ok"]


async def test_a_file_whose_folder_is_not_there_is_a_failure(tmp_path: Path, clock: Any, read: Any) -> None:
    with pytest.raises(SensorFailed, match="The folder of no/such/file does not exist"):
        await read(watching(tmp_path, clock, path="no/such/file"), 1)


CONTENTS = {
    "text": (b"hello", "hello"),
    "a mark of byte order": (b"\xef\xbb\xbfhello", "hello"),
    "bytes": (b"\x7fELF\x02\xff", None),
    "text with NUL": (b"a\0b", None),
    "half a letter at its end": (b"a\xc3", None),
    "a letter on the edge": (b"x" * (files.MAX_TEXT_BYTES - 1) + "ü".encode() * 10, "x" * (files.MAX_TEXT_BYTES - 1)),
    "more than is read": (b"x" * 1_000_000, "x" * files.MAX_TEXT_BYTES),
}


@pytest.mark.parametrize("case", CONTENTS)
async def test_a_file_shows_how_it_begins_if_it_is_text(tmp_path: Path, clock: Any, read: Any, case: str) -> None:
    data, text = CONTENTS[case]
    (tmp_path / "file").write_bytes(data)
    (value,) = await read(watching(tmp_path, clock, path="file"), 1)
    assert (value["text"], value["size"]) == (text, len(data))


async def test_a_pipe_in_place_of_a_file_is_a_failure_and_hangs_nobody(tmp_path: Path, clock: Any, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SensorFailed, match="not a regular file"):
        await read(watching(tmp_path, clock, path="pipe"), 1)


async def test_a_cancelled_watch_leaves_no_thread_behind(tmp_path: Path, inbox: Path, clock: Any, listen: Any) -> None:
    before = set(threading.enumerate())
    async with listen(watching(tmp_path, clock)) as listener:
        await listener.until_read(1)
        threads = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("halter-watch")]
        assert len(threads) == 1
    async with asyncio.timeout(20):
        await asyncio.to_thread(threads[0].join)


PATTERNS = [
    ("a.log", "*.log", True),
    ("b/a.log", "*.log", False),
    ("b/a.log", "**/*.log", True),
    ("a.log", "**/*.log", True),
    ("c/b/a.log", "**/b/*.log", True),
    ("c/b/a.log", "c/**", True),
    ("b/a.log", "b/*", True),
    ("b/c/a.log", "b/*", False),
    ("a.txt", "*.log", False),
]


@pytest.mark.parametrize(("path", "pattern", "does"), PATTERNS)
def test_a_pattern_names_paths_as_in_a_shell(tmp_path: Path, path: str, pattern: str, does: bool) -> None:  # noqa: FBT001
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("1")
    assert set(files.list_folder(tmp_path, pattern).files) == ({path} if does else set())


async def read_looks(sensor: Sensor, count: int = 1) -> list[tuple[Any, Any]]:
    """Read this many readings; return each value with its look."""
    results: list[tuple[Any, Any]] = []
    async with asyncio.timeout(30):
        async for reading in sensor.readings():
            results.append((reading.value, json.loads(json.dumps(reading.look))))
            if len(results) == count:
                break
    return results


async def test_a_sensor_goes_on_from_the_look_of_an_earlier_one(tmp_path: Path, inbox: Path, clock: Any) -> None:
    for name in ("kept", "edited", "gone"):
        (inbox / name).write_text("1")
    ((_, look),) = await read_looks(watching(tmp_path, clock))
    (inbox / "edited").write_text("22")
    (inbox / "gone").unlink()
    (inbox / os.fsdecode(b"new-\xff")).write_text("1")
    spec = make_spec()
    ((value, look),) = await read_looks(make_watch_sensor(spec, tmp_path, clock, look=look))
    assert [(each["change"], each["path"][:4]) for each in value["changes"]] == [
        ("deleted", "gone"),
        ("added", "new-"),
        ("modified", "edit"),
    ]
    ((value, _),) = await read_looks(make_watch_sensor(spec, tmp_path, clock, look=look))
    assert value["changes"] == []


async def test_more_changes_than_one_reading_holds_are_all_read(tmp_path: Path, inbox: Path, clock: Any) -> None:
    ((_, look),) = await read_looks(watching(tmp_path, clock))
    names = {f"{number}.log" for number in range(files.MAX_FILES_REPORTED + 5)}
    for name in names:
        (inbox / name).write_text("1")
    readings = await read_looks(make_watch_sensor(make_spec(), tmp_path, clock, look=look), 2)
    assert {path for _, path in changed([value for value, _ in readings])} == names
    ((value, _),) = await read_looks(make_watch_sensor(make_spec(), tmp_path, clock, look=readings[0][1]))
    assert len(value["changes"]) == 5


async def test_a_look_of_another_path_or_of_no_sense_is_not_used(tmp_path: Path, inbox: Path, clock: Any) -> None:
    ((_, look),) = await read_looks(watching(tmp_path, clock))
    (inbox / "a.log").write_text("1")
    for spec, old_look in ((make_spec("*.log"), look), (make_spec(), {"files": 1}), (make_spec(), "")):
        ((value, _),) = await read_looks(make_watch_sensor(spec, tmp_path, clock, look=old_look))
        assert value["changes"] == []


async def test_what_a_folder_holds_that_was_missing_at_the_first_look_is_news(
    tmp_path: Path, inbox: Path, clock: Any
) -> None:
    shutil.rmtree(inbox)
    look = read_first_look(make_spec(), tmp_path)
    make(inbox, "a")
    ((value, _),) = await read_looks(make_watch_sensor(make_spec(), tmp_path, clock, look=look))
    assert changed([value]) == {("added", "a")}


async def test_a_reading_of_a_file_has_no_look(tmp_path: Path, inbox: Path, clock: Any) -> None:
    (inbox / "a").write_text("1")
    ((_, look),) = await read_looks(watching(tmp_path, clock, path="inbox/a"))
    assert look is None
