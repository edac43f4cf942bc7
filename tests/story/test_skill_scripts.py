"""Scripts that a skill brings along: tools like any other, trusted, judged and shut in their skill's folder."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from halter import Agent, Result
from halter.core.errors import ConfigError
from halter.core.tools import Failed
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.assembly.folder_code import find_agent_code, open_trust
from halter.runtime.runtime import open_runtime
from halter.settings import Settings
from halter.tools.shell import Sandbox

AGENT = "name: clerk\nmodel: scripted\nscript: replies.yaml\n"
SKILL = """---
name: check
description: Checks papers.
scripts:
  count: {file: scripts/count.py, description: Count the lines of a text.}
  warn: {file: warn.sh, description: Warn., level: RESTRICTED, reach: others, timeout: 5s}
---
Check it as a careful reader would.
"""
COUNT = '''"""Counts lines, and tries what it must not be able to do."""
import pathlib
import sys

here = pathlib.Path(__file__).resolve().parent
print(len(sys.stdin.read().splitlines()), "lines", *sys.argv[1:])
print("skill", (here.parent / "SKILL.md").exists())
print("agent", (here.parents[3] / "agent.yaml").exists())
pathlib.Path("/tmp/scratch").write_text("for itself")
try:
    (here / "left.txt").write_text("left")
except OSError as error:
    print("write", error.strerror)
'''
CALLS = """
- calls: [{tool: check_count, arguments: {arguments: ["--all"], stdin: "one\\ntwo\\n"}}]
- text: Counted.
"""


@pytest.fixture(scope="module", autouse=True)
def bubblewrap(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip loudly where no sandbox can be made; where everything is required, one that is installed must work."""
    try:
        asyncio.run(Sandbox(tmp_path_factory.mktemp("probe"), writable=False).verify())
    except Failed as failed:
        if shutil.which("bwrap") is not None and os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(failed))
        pytest.skip(str(failed))


def make_settings(home: Path) -> Settings:
    path = home / "kept" / "halter"
    return Settings(
        str(path / "halter.db"), path / "checkpoints", path / "key", "ada", path / "trust", None, path / "t"
    )


def clerk(home: Path, skill: str = SKILL, replies: str = CALLS) -> Path:
    folder = home / "clerk"
    path = folder / ".agents" / "skills" / "check"
    (path / "scripts").mkdir(parents=True)
    (folder / "agent.yaml").write_text(AGENT)
    (folder / "replies.yaml").write_text(replies)
    (path / "SKILL.md").write_text(skill)
    (path / "scripts" / "count.py").write_text(COUNT)
    (path / "warn.sh").write_text("echo warned; exit 3\n")
    return folder


def trust(home: Path, folder: Path) -> None:
    code = find_agent_code(make_settings(home), folder)
    open_trust(make_settings(home)).trust(folder, code.digest(), "ada", 1, code.contents())


async def run(home: Path, folder: Path) -> Result[str]:
    return await Agent.load(folder, store="", settings=make_settings(home)).run("Count it.")


async def test_a_script_runs_through_the_door_and_sees_its_skills_folder_alone(tmp_path: Path) -> None:
    folder = clerk(tmp_path)
    trust(tmp_path, folder)
    result = await run(tmp_path, folder)
    (call,) = result.receipt.calls
    assert (result.text, call.name, call.outcome, call.level) == ("Counted.", "check_count", "ok", "CONTROLLED")
    text = next(part.text for message in result.messages for part in message.parts if hasattr(part, "outcome"))
    assert text == "2 lines --all\nskill True\nagent False\nwrite Read-only file system\n"
    assert not (folder / ".agents" / "skills" / "check" / "scripts" / "left.txt").exists()


async def test_a_scripts_level_and_reach_are_those_declared_and_never_safe_by_default(tmp_path: Path) -> None:
    folder = clerk(tmp_path)
    trust(tmp_path, folder)
    async with open_runtime(make_settings(tmp_path)) as app, open_folder_agent(app, folder) as agent:
        count, warn = agent.tools["check_count"].spec, agent.tools["check_warn"].spec
    assert (count.level, count.effect, count.declaration.reads, count.declaration.reach) == (
        "CONTROLLED",
        "write",
        "anyone",
        "own",
    )
    assert (warn.level, warn.declaration.reach, warn.timeout) == ("RESTRICTED", "others", 5_000_000)
    assert (count.isolate, count.egress) == (False, False)


async def test_a_folder_whose_only_code_is_a_script_must_be_trusted(tmp_path: Path) -> None:
    folder = clerk(tmp_path)
    with pytest.raises(ConfigError, match="no person has trusted its current version"):
        await run(tmp_path, folder)


async def test_a_script_that_was_changed_after_the_agent_was_loaded_does_not_run(tmp_path: Path) -> None:
    folder = clerk(tmp_path)
    trust(tmp_path, folder)
    async with Agent.load(folder, store="", settings=make_settings(tmp_path)) as agent:
        (folder / ".agents" / "skills" / "check" / "scripts" / "count.py").write_text("print('changed')\n")
        result = await agent.run("Count it.")
    (call,) = result.receipt.calls
    assert call.outcome == "error"
    assert any("NotTrusted" in getattr(part, "text", "") for message in result.messages for part in message.parts)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("{file: ../../../agent.yaml, description: Out.}", "is outside the skill's folder; move it there"),
        ("{file: link.py, description: Out.}", "is outside the skill's folder; move it there"),
        ("{file: gone.py, description: Gone.}", "names gone.py, which does not exist in"),
        ("{file: SKILL.md, description: Text.}", "Make it executable .chmod .x., or use a .py or .sh file"),
        ("{file: warn.sh}", "missing required field `description`"),
        ("{file: warn.sh, description: Warn., levle: SAFE}", "unknown field `levle`"),
        ("{file: warn.sh, description: Warn., level: HARMLESS}", "Invalid enum value 'HARMLESS'"),
        ("[warn.sh]", "Expected `object`, got `array`"),
    ],
)
async def test_a_script_that_cannot_run_is_an_error_that_names_its_file(
    tmp_path: Path, script: str, sentence: str
) -> None:
    folder = clerk(tmp_path, f"---\nname: check\nscripts:\n  warn: {script}\n---\nCheck it.\n")
    (folder / ".agents" / "skills" / "check" / "link.py").symlink_to(folder / "replies.yaml")
    with pytest.raises(ConfigError, match=rf"SKILL.md: `scripts.warn`.*{sentence}"):
        await run(tmp_path, folder)
