"""Files below a root: what is written is there as a whole, and no path leads out."""

import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from halter.core.errors import ConfigError
from halter.core.tools import Failed, Permit, Valid
from halter.tools.files import make_file_tools
from halter.tools.function_tool import FunctionTool

SECRET = "not for agents"


class Desk:
    """A root with a secret beside it."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.root = folder / "root"
        self.root.mkdir(exist_ok=True)
        self.outside = folder / "outside"
        self.outside.mkdir(exist_ok=True)
        (self.outside / "secret.txt").write_text(SECRET)
        self.tools: dict[str, FunctionTool] = {each.spec.name: each for each in make_file_tools(self.root, **limits)}

    async def do(self, name: str, **arguments: Any) -> str:
        subject = self.tools[name]
        valid = subject.validate(json.dumps(arguments).encode())
        assert isinstance(valid, Valid)
        return (await subject.run(valid, Permit("call-1", 0, {}))).text


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_levels_follow_what_a_tool_can_do(desk: Desk) -> None:
    levels = {name: (each.spec.level, each.spec.effect) for name, each in desk.tools.items()}
    assert levels == {
        "read_file": ("SAFE", "read"),
        "list_folder": ("SAFE", "read"),
        "find_files": ("SAFE", "read"),
        "write_file": ("CONTROLLED", "write"),
        "delete_file": ("RESTRICTED", "write"),
    }


async def test_what_is_written_is_read_listed_found_and_deleted(desk: Desk) -> None:
    assert await desk.do("write_file", path="a/b.txt", text="grüße\n") == "Wrote 8 bytes to a/b.txt."
    assert await desk.do("read_file", path="./a//b.txt") == "grüße\n"
    assert json.loads(await desk.do("list_folder")) == [
        {"name": "a", "kind": "folder", "size": (desk.root / "a").stat().st_size}
    ]
    assert json.loads(await desk.do("find_files", pattern="*.txt")) == ["a/b.txt"]
    await desk.do("delete_file", path="a/b.txt")
    await desk.do("delete_file", path="a")
    assert list(desk.root.iterdir()) == []


async def test_replacing_a_file_keeps_who_may_read_it_but_never_that_it_can_be_run(desk: Desk) -> None:
    script = desk.root / "run"
    script.write_text("old")
    script.chmod(0o750)
    await desk.do("write_file", path="run", text="new")
    assert stat.S_IMODE(script.stat().st_mode) == 0o640
    assert [each.name for each in desk.root.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["read_file", "write_file", "list_folder", "delete_file", "find_files"])
@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret.txt",
        "a/../../outside/secret.txt",
        "..",
        "/etc/passwd",
        "//etc/passwd",
        "a\0b",
        "link/secret.txt",
        "link",
        "a/" * 100,
        "x" * 5000,
    ],
)
async def test_no_path_leads_out(desk: Desk, name: str, path: str) -> None:
    (desk.root / "link").symlink_to(desk.outside)
    values = {"write_file": {"text": "x"}, "find_files": {"pattern": "*"}}.get(name, {})
    if (name, path) == ("delete_file", "link"):
        await desk.do(name, path=path)
        assert not (desk.root / "link").is_symlink()
    else:
        with pytest.raises(Failed):
            await desk.do(name, path=path, **values)
    assert (desk.outside / "secret.txt").read_text() == SECRET
    assert [each.name for each in desk.outside.iterdir()] == ["secret.txt"]


async def test_a_link_to_a_file_is_neither_read_nor_written_through(desk: Desk) -> None:
    (desk.root / "notes").symlink_to(desk.outside / "secret.txt")
    with pytest.raises(Failed, match="links are not followed"):
        await desk.do("read_file", path="notes")
    with pytest.raises(Failed, match="is a link"):
        await desk.do("write_file", path="notes", text="x")
    assert json.loads(await desk.do("list_folder"))[0]["kind"] == "link"
    assert (desk.outside / "secret.txt").read_text() == SECRET


@contextmanager
def swap_folder(folder: Path, link: Path, target: Path) -> Iterator[None]:
    """Exchange a folder for a link and back, as often as can be."""
    event = threading.Event()

    def swap() -> None:
        aside = folder.with_name("aside")
        while not event.is_set():
            folder.rename(aside)
            with suppress(FileExistsError):
                link.symlink_to(target)
                link.unlink()
            while aside.exists():  # A write may have made a folder of this name meanwhile.
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):
                    aside.rename(folder)
            event.wait(0.0005)  # Without a pause, few calls would ever meet the folder.

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        event.set()
        thread.join()


async def test_a_link_swapped_in_between_leads_nowhere(desk: Desk) -> None:
    folder = desk.root / "inner"
    folder.mkdir()
    (folder / "secret.txt").write_text("harmless")
    answers: set[str] = set()
    with swap_folder(folder, desk.root / "inner", desk.outside):
        for number in range(10):
            for name, values in (("read_file", {}), ("write_file", {"text": "harmless"})):
                try:
                    answers.add(await desk.do(name, path="inner/secret.txt", **values))
                except Failed as failed:
                    answers.add(str(failed)[:10])
            assert (desk.outside / "secret.txt").read_text() == SECRET, number
    assert SECRET not in answers
    assert answers & {"harmless", "Wrote 8 bytes to inner/secret.txt."}, "No call ever met the folder itself."
    assert [each.name for each in desk.outside.iterdir()] == ["secret.txt"]


async def test_special_files_are_not_opened(desk: Desk) -> None:
    os.mkfifo(desk.root / "pipe")
    with pytest.raises(Failed, match="NotAFile: pipe is a pipe"):
        await desk.do("read_file", path="pipe")
    with pytest.raises(Failed, match="NotAFile: pipe is a pipe"):
        await desk.do("write_file", path="pipe", text="x")
    (desk.root / "folder").mkdir()
    with pytest.raises(Failed, match="NotAFile: folder is a folder"):
        await desk.do("read_file", path="folder")


async def test_large_files_are_read_in_parts_and_too_large_ones_not_written(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_read=10, max_write=20, max_entries=2)
    (desk.root / "big").write_text("0123456789abcde")
    assert await desk.do("read_file", path="big") == "0123456789\n[5 more bytes; continue with offset=10]"
    assert await desk.do("read_file", path="big", offset=10) == "abcde"
    with pytest.raises(Failed, match="TooLarge"):
        await desk.do("write_file", path="big", text="x" * 21)
    assert (desk.root / "big").stat().st_size == 15
    for name in "cd":
        (desk.root / name).touch()
    assert json.loads(await desk.do("list_folder"))[-1] == {"note": "1 more are not shown"}
    assert len(json.loads(await desk.do("find_files", pattern="*"))) == 3


async def test_binary_files_are_reported_as_binary(desk: Desk) -> None:
    (desk.root / "image").write_bytes(b"\x89PNG\0")
    assert (await desk.do("read_file", path="image")).startswith("[5 bytes that are not text, in base64]")


@pytest.mark.parametrize("name", ["read_file", "delete_file", "list_folder"])
async def test_what_is_missing_is_said_by_its_path(desk: Desk, name: str) -> None:
    (desk.root / "a").mkdir()
    with pytest.raises(Failed, match="FileNotFoundError: a/b: No such file"):
        await desk.do(name, path="a/b")


def test_a_root_that_is_not_a_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing, is not a folder\. Create it, or set another root\."):
        make_file_tools(tmp_path / "missing")
