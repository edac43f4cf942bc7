"""Code in a folder is trusted by a person, once per digest."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from halter.config.trust import (
    MAX_BYTES,
    AgentCode,
    TrustFile,
    digest_contents,
    digest_folder,
    find_data_load,
    list_data_places,
)
from halter.core.errors import ConfigError
from halter.core.tools import ToolServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "agent"
    (path / "lib").mkdir(parents=True)
    (path / "tools.py").write_text("def look() -> str: ...\n")
    (path / "lib/deep.py").write_text("x = 1\n")
    (path / ".mcp.json").write_text("{}")
    (path / "notes.txt").write_text("data")
    (path / "server").write_text("#!/bin/sh\ntrue\n")
    for folder in ("node_modules/pkg", ".venv/lib", ".git/hooks"):
        (path / folder).mkdir(parents=True)
    return path


@pytest.fixture
def trust(tmp_path: Path) -> TrustFile:
    return TrustFile(tmp_path / "state/trust.json")


def test_nothing_is_trusted_before_a_person_said_so(folder: Path, trust: TrustFile) -> None:
    assert not trust.is_trusted(folder, digest_folder(folder))


def test_what_a_person_trusted_stays_trusted(folder: Path, trust: TrustFile, tmp_path: Path) -> None:
    trust.trust(folder, digest_folder(folder), "ada", 7)
    trust_file = TrustFile(tmp_path / "state/trust.json")
    assert trust_file.is_trusted(folder, digest_folder(folder))
    assert [(trust_entry.by, trust_entry.at) for trust_entry in trust_file.folders().values()] == [("ada", 7)]


CHANGES: list[Callable[[Path], object]] = [
    lambda folder: (folder / "tools.py").write_text("evil\n"),
    lambda folder: (folder / ".mcp.json").write_text('{"mcpServers": {}}'),
    lambda folder: (folder / "new.py").write_text(""),
    lambda folder: (folder / "lib/deep.py").unlink(),
    lambda folder: (folder / "lib/deep.py").rename(folder / "lib/other.py"),
    lambda folder: (folder / "run.sh").write_text("true"),
    lambda folder: (folder / "server").write_text("#!/bin/sh\nevil\n"),
    lambda folder: (folder / "server").chmod(0o755),
    lambda folder: (folder / "node_modules/pkg/index").write_text("evil"),
    lambda folder: (folder / ".venv/lib/x.pth").write_text("import evil"),
    lambda folder: (folder / "sitecustomize.py").write_text("evil"),
    lambda folder: (folder / "package.json").write_text("{}"),
    lambda folder: (folder / ".env").write_text("A=b"),
    lambda folder: (folder / "notes.txt").write_text("other data"),
    lambda folder: (folder / "inner").symlink_to("lib"),
    lambda folder: (folder / ".git/hooks/post-checkout").write_text("evil"),
    lambda folder: (
        (folder / "__pycache__").mkdir(),
        (folder / "__pycache__/tools.cpython-311.pyc").write_text(""),
    ),
]


@pytest.mark.parametrize(
    "change",
    CHANGES,
    ids=[
        *("edited", "commands", "added", "removed", "renamed", "script", "no suffix", "executable", "node_modules"),
        *("venv", "sitecustomize", "package.json", "dotenv", "any file", "link", "git hook", "bytecode"),
    ],
)
def test_changed_code_is_not_trusted(folder: Path, trust: TrustFile, change: Callable[[Path], object]) -> None:
    trust.trust(folder, digest_folder(folder), "ada", 7)
    change(folder)
    assert not trust.is_trusted(folder, digest_folder(folder))


AGENT = """\
name: clerk
model: scripted
script: replies.yaml
tools: {files: {root: desk}}
collections: {letters: {path: letters/new}}
"""


@pytest.mark.parametrize(
    "file",
    [
        *("agent.yaml", "AGENTS.md", "replies.yaml", "playbooks/one.yaml", ".agents/skills/count/SKILL.md"),
        *("desk/new.py", "letters/new/x.py", "data/state.json", ".git/index", ".git/logs/HEAD"),
    ],
)
def test_declarations_and_data_are_no_code(folder: Path, file: str) -> None:
    (folder / "agent.yaml").write_text(AGENT)
    before = digest_folder(folder)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    with (folder / file).open("a") as changed:
        changed.write("# other\n")
    assert digest_folder(folder) == before


@pytest.mark.parametrize("root", [".", "..", "/"])
def test_a_root_over_everything_leaves_nothing_out(folder: Path, root: str) -> None:
    (folder / "agent.yaml").write_text(AGENT.replace("root: desk", f"root: {root}"))
    before = digest_folder(folder)
    (folder / "server").write_text("evil")
    assert digest_folder(folder) != before


def test_files_that_changed_since_are_listed(folder: Path, trust: TrustFile) -> None:
    contents = AgentCode(folder).contents()
    trust.trust(folder, digest_contents(contents), "ada", 7, contents)
    (folder / "server").write_text("evil")
    (folder / "new").write_text("")
    (folder / "notes.txt").unlink()
    change = trust.describe_change(folder, AgentCode(folder).contents())
    assert change == "changed: `server`; new: `new`; gone: `notes.txt`"


def test_what_looks_as_it_did_is_not_read_again_and_what_does_not_is(folder: Path) -> None:
    code = AgentCode(folder)
    before = code.digest()
    about = (folder / "server").stat()
    (folder / "server").write_text("#!/bin/sh\nevil\n")
    os.utime(folder / "server", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert code.digest() != before


def test_names_and_contents_cannot_be_taken_for_each_other(tmp_path: Path) -> None:
    for name, files in (("one", {"a.py": "1", "b.py": ""}), ("two", {"a.py": "", "b.py": "1"})):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    assert digest_folder(tmp_path / "one") != digest_folder(tmp_path / "two")


def test_the_same_code_elsewhere_has_to_be_trusted_there(folder: Path, trust: TrustFile, tmp_path: Path) -> None:
    trust.trust(folder, digest_folder(folder), "ada", 7)
    copied = tmp_path / "copy"
    folder.rename(copied)
    assert not trust.is_trusted(copied, digest_folder(copied))


def test_a_link_out_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "linked").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="links to a folder outside the agent's folder"):
        digest_folder(folder)


def test_a_link_to_data_is_refused(folder: Path) -> None:
    (folder / "agent.yaml").write_text(AGENT)
    (folder / "desk").mkdir()
    (folder / "linked").symlink_to("desk/server")
    with pytest.raises(ConfigError, match="links to a data folder"):
        digest_folder(folder)


def test_what_a_link_leads_out_to_is_covered(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "server").write_text("one")
    (folder / "linked").symlink_to(tmp_path / "server")
    before = digest_folder(folder)
    (tmp_path / "server").write_text("two")
    assert digest_folder(folder) != before


@pytest.mark.parametrize(
    "server",
    [
        ToolServer("x", command="./desk/server"),
        ToolServer("x", command="python", args=("desk/server.py",)),
        ToolServer("x", command="python", args=("-m", "desk")),
        ToolServer("x", command="python", args=("./desk",)),
        ToolServer("x", command="sh", args=("-c", "cd desk && ./server")),
        ToolServer("x", command="node", args=("--require=./desk/x.js", "server.js")),
        ToolServer("x", command="python", args=("server.py",), env={"PYTHONPATH": "lib:desk"}),
        ToolServer("x", command="python", args=("-m", "desk.server")),
        ToolServer("x", command="uvicorn", args=("desk.server:app",)),
        ToolServer("x", command="ruby", args=("-Idesk", "server.rb")),
        ToolServer("x", command="sh", args=("-c", "cd desk&&./server")),
        ToolServer("x", command="linked/server"),
    ],
)
def test_no_command_line_loads_from_where_an_agent_writes(folder: Path, server: ToolServer) -> None:
    (folder / "agent.yaml").write_text(AGENT)
    (folder / "desk").mkdir()
    (folder / "linked").symlink_to("desk")
    assert find_data_load(replace(server, cwd=str(folder)), list_data_places(folder), {})
    assert find_data_load(ToolServer("x", command="python", cwd=str(folder / "desk")), list_data_places(folder), {})
    assert find_data_load(
        ToolServer("x", command="s", cwd=str(folder)), list_data_places(folder), {"PATH": f"/bin:{folder}/desk"}
    )
    honest = ToolServer("x", command="python", args=("-m", "server", "--port=80"), cwd=str(folder))
    assert not find_data_load(honest, list_data_places(folder), {"PATH": "/bin"})


def test_a_program_may_work_on_data_but_not_be_loaded_from_it(folder: Path) -> None:
    (folder / "agent.yaml").write_text(AGENT)
    (folder / "data").mkdir()
    (folder / "data" / "server.py").touch()
    works = ToolServer("x", command="npx", args=("-y", "some-files-server", "data"), cwd=str(folder))
    assert not find_data_load(works, list_data_places(folder), {})
    for args in (("data",), ("-m", "data"), ("data/server.py",), ("server.py", "data/server.py")):
        assert find_data_load(replace(works, command="python", args=args), list_data_places(folder), {})


@pytest.mark.parametrize(
    "line",
    [
        *("timeout 5 python data", "nice -n 5 python data", "env node data", "env A=1 PYTHONPATH=data python server"),
        *(
            "python -W ignore data",
            "python -X dev data",
            "node --require ./server data",
            "npx tsx data",
            "bun run data",
        ),
        *("npm start --prefix data", "make all -C data", "make -Cdata", "perl -Idata server", "sh -O extglob data"),
        *("uv run --directory data server", "uv run python data", "deno run -A data", "python -m pytest data"),
        *("python -m uvicorn server:app --app-dir data", "npx -y nodemon data", "some-runner server data"),
    ],
)
def test_data_is_not_given_to_a_program_that_could_load_it(folder: Path, line: str) -> None:
    (folder / "data").mkdir()
    command, *args = line.split()
    assert find_data_load(
        ToolServer("x", command=command, args=tuple(args), cwd=str(folder)), list_data_places(folder), {}
    )


@pytest.mark.parametrize(
    "line",
    [
        *("python server data", "python3.11 -u -X dev server --root data", "python -m server data", "node server data"),
        *("npx -y some-files-server data", "npx -p other some-server data", "uvx some-server --repository data"),
        *("uv run server data", "uv run python server data", "deno run -A server data", "sh -eu server data"),
        *("./server serve data", ".venv/bin/python server data"),
    ],
)
def test_data_is_given_to_a_program_where_it_is_certain_what_is_run(folder: Path, line: str) -> None:
    (folder / "data").mkdir()
    command, *args = line.split()
    assert not find_data_load(
        ToolServer("x", command=command, args=tuple(args), cwd=str(folder)), list_data_places(folder), {}
    )


@pytest.mark.parametrize(
    ("named", "file"),
    [
        ('["AGENTS.md"]', "AGENTS.md"),
        ('["-c", "exec ./playbooks/one.yaml"]', "playbooks/one.yaml"),
        ('["replies.yaml"]', "replies.yaml"),
        ('[".git/description"]', ".git/description"),
        ('["linked"]', "AGENTS.md"),
        ("[]", "tools.py"),
    ],
)
def test_a_declaration_is_covered_if_it_could_be_run(folder: Path, named: str, file: str) -> None:
    (folder / "agent.yaml").write_text(AGENT.replace("name: clerk", "name: clerk\nreflex: tools.py"))
    (folder / ".mcp.json").write_text(f'{{"mcpServers": {{"x": {{"command": "sh", "args": {named}}}}}}}')
    (folder / "linked").symlink_to("AGENTS.md")
    (folder / "playbooks").mkdir()
    for each in ("AGENTS.md", "playbooks/one.yaml", "replies.yaml", ".git/description"):
        (folder / each).write_text("one")
    before = digest_folder(folder)
    (folder / file).write_text("two")
    assert digest_folder(folder) != before


def test_words_of_a_command_line_that_are_no_paths_are_passed_over(folder: Path) -> None:
    (folder / ".mcp.json").write_text('{"mcpServers": {"x": {"command": "sh", "args": ["' + "x" * 5000 + '"]}}}')
    assert digest_folder(folder)


def test_a_link_to_a_folder_is_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="is not a folder"):
        digest_folder(tmp_path / "link")


def test_a_pipe_in_the_folder_is_not_waited_for(folder: Path) -> None:
    before = digest_folder(folder)
    os.mkfifo(folder / "pipe.py")
    assert digest_folder(folder) != before


def test_trust_can_be_taken_back(folder: Path, trust: TrustFile) -> None:
    trust.trust(folder, digest_folder(folder), "ada", 7)
    trust.distrust(folder)
    assert not trust.is_trusted(folder, digest_folder(folder))


def test_the_record_is_for_its_owner_alone_and_replaced_as_a_whole(
    folder: Path, trust: TrustFile, tmp_path: Path
) -> None:
    trust.trust(folder, "one", "ada", 7)
    trust.trust(folder, "two", "ada", 8)
    record = tmp_path / "state/trust.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert list(record.parent.iterdir()) == [record]


def test_a_record_that_others_may_write_is_not_believed(folder: Path, trust: TrustFile, tmp_path: Path) -> None:
    trust.trust(folder, "one", "ada", 7)
    (tmp_path / "state/trust.json").chmod(0o666)
    with pytest.raises(ConfigError, match="Other users can write to"):
        trust.is_trusted(folder, "one")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_record_is_a_sentence_and_no_trust(trust: TrustFile, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/trust.json").write_bytes(damage)
    (tmp_path / "state/trust.json").chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        trust.is_trusted(tmp_path, "one")


def test_a_record_that_cannot_be_written_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"trust\.json cannot be"):
        TrustFile(tmp_path / "state/trust.json").trust(folder, "one", "ada", 7)


def test_a_folder_in_place_of_the_record_is_a_sentence(folder: Path, trust: TrustFile, tmp_path: Path) -> None:
    (tmp_path / "state/trust.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"trust\.json cannot be read: Is a directory"):
        trust.is_trusted(folder, "one")


def test_too_much_code_is_a_sentence(folder: Path) -> None:
    with (folder / "large.py").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="contains too much code to check"):
        digest_folder(folder)
