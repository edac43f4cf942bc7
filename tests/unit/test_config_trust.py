"""Code in a folder is trusted by a person, once per digest."""

import os
import stat
from pathlib import Path

import pytest

from halter.config.trust import MAX_BYTES, Trust, folder_digest
from halter.core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "agent"
    (made / "lib").mkdir(parents=True)
    (made / "tools.py").write_text("def look() -> str: ...\n")
    (made / "lib/deep.py").write_text("x = 1\n")
    (made / ".mcp.json").write_text("{}")
    (made / "notes.txt").write_text("data")
    return made


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return Trust(tmp_path / "state/trust.json")


def test_nothing_is_trusted_before_a_person_said_so(folder: Path, trust: Trust) -> None:
    assert not trust.is_trusted(folder, folder_digest(folder))


def test_what_a_person_trusted_stays_trusted(folder: Path, trust: Trust, tmp_path: Path) -> None:
    trust.trust(folder, folder_digest(folder), "ada", 7)
    again = Trust(tmp_path / "state/trust.json")
    assert again.is_trusted(folder, folder_digest(folder))
    assert [(found.by, found.at) for found in again.folders().values()] == [("ada", 7)]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "tools.py").write_text("evil\n"),
        lambda folder: (folder / ".mcp.json").write_text('{"mcpServers": {}}'),
        lambda folder: (folder / "new.py").write_text(""),
        lambda folder: (folder / "lib/deep.py").unlink(),
        lambda folder: (folder / "lib/deep.py").rename(folder / "lib/other.py"),
        lambda folder: (folder / "run.sh").write_text("true"),
        lambda folder: (
            (folder / "__pycache__").mkdir(),
            (folder / "__pycache__/tools.cpython-311.pyc").write_text(""),
        ),
    ],
    ids=["edited", "commands", "added", "removed", "renamed", "script", "bytecode"],
)
def test_changed_code_is_not_trusted(folder: Path, trust: Trust, change: object) -> None:
    trust.trust(folder, folder_digest(folder), "ada", 7)
    assert callable(change)
    change(folder)
    assert not trust.is_trusted(folder, folder_digest(folder))


def test_data_is_not_code(folder: Path) -> None:
    before = folder_digest(folder)
    (folder / "notes.txt").write_text("other data")
    assert folder_digest(folder) == before


def test_names_and_contents_cannot_be_taken_for_each_other(tmp_path: Path) -> None:
    for name, files in (("one", {"a.py": "1", "b.py": ""}), ("two", {"a.py": "", "b.py": "1"})):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    assert folder_digest(tmp_path / "one") != folder_digest(tmp_path / "two")


def test_the_same_code_elsewhere_has_to_be_trusted_there(folder: Path, trust: Trust, tmp_path: Path) -> None:
    trust.trust(folder, folder_digest(folder), "ada", 7)
    copied = tmp_path / "copy"
    folder.rename(copied)
    assert not trust.is_trusted(copied, folder_digest(copied))


@pytest.mark.parametrize("name", ["linked.py", "data"])
def test_links_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a symbolic link: put the file itself"):
        folder_digest(folder)


def test_a_link_to_a_folder_is_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="is not a folder"):
        folder_digest(tmp_path / "link")


def test_a_pipe_in_the_folder_is_not_waited_for(folder: Path) -> None:
    before = folder_digest(folder)
    os.mkfifo(folder / "pipe.py")
    assert folder_digest(folder) != before


def test_trust_can_be_taken_back(folder: Path, trust: Trust) -> None:
    trust.trust(folder, folder_digest(folder), "ada", 7)
    trust.distrust(folder)
    assert not trust.is_trusted(folder, folder_digest(folder))


def test_the_record_is_for_its_owner_alone_and_replaced_as_a_whole(folder: Path, trust: Trust, tmp_path: Path) -> None:
    trust.trust(folder, "one", "ada", 7)
    trust.trust(folder, "two", "ada", 8)
    record = tmp_path / "state/trust.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert list(record.parent.iterdir()) == [record]


def test_a_record_that_others_may_write_is_not_believed(folder: Path, trust: Trust, tmp_path: Path) -> None:
    trust.trust(folder, "one", "ada", 7)
    (tmp_path / "state/trust.json").chmod(0o666)
    with pytest.raises(ConfigError, match="Others may write to"):
        trust.is_trusted(folder, "one")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_record_is_a_sentence_and_no_trust(trust: Trust, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/trust.json").write_bytes(damage)
    (tmp_path / "state/trust.json").chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        trust.is_trusted(tmp_path, "one")


def test_a_record_that_cannot_be_written_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"trust\.json cannot be"):
        Trust(tmp_path / "state/trust.json").trust(folder, "one", "ada", 7)


def test_a_folder_in_place_of_the_record_is_a_sentence(folder: Path, trust: Trust, tmp_path: Path) -> None:
    (tmp_path / "state/trust.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"trust\.json cannot be read: Is a directory"):
        trust.is_trusted(folder, "one")


def test_too_much_code_is_a_sentence(folder: Path) -> None:
    with (folder / "large.py").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="holds too much code to be looked at"):
        folder_digest(folder)
