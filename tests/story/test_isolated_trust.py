"""A tool in an interpreter of its own loads its code anew for each call: only what is trusted at that moment."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halter.config.trust import digest_folder
from halter.core.tools import Failed, Permit, Tool, Valid
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.assembly.folder_code import open_trust
from halter.runtime.runtime import open_runtime
from halter.settings import Settings, read_settings

TOOLS = """\
from halter import tool
from pathlib import Path

@tool(level="SAFE", effect="read", isolate=True)
def look() -> str:
    "Look."
    return "WORDS"
"""


class Desk:
    """An agent with a tool that runs in an interpreter of its own."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "desk"
        self.folder.mkdir()
        (self.folder / "agent.yaml").write_text("name: desk\n")
        environ = {"HALTER_TRUST": str(home / "trust.json"), "USER": "ada"}
        self.settings: Settings = read_settings(environ, home, str(home / "halter.db"))

    def write(self, words: str) -> None:
        (self.folder / "tools.py").write_text(TOOLS.replace("WORDS", words))

    def trust(self) -> None:
        open_trust(self.settings).trust(self.folder, digest_folder(self.folder), "ada", 0)

    @asynccontextmanager
    async def tool(self) -> AsyncGenerator[Tool]:
        async with open_runtime(self.settings) as app, open_folder_agent(app, self.folder) as agent:
            yield agent.tools["look"]


async def ran(tool: Tool) -> str:
    arguments = tool.validate(b"{}")
    assert isinstance(arguments, Valid)
    return (await tool.run(arguments, Permit("call-1", 0, {}))).text


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    desk.write("as it was trusted")
    desk.trust()
    return desk


@pytest.mark.parametrize("changed", ["tools.py", "helper.py"])
async def test_code_that_changed_since_it_was_trusted_is_not_started(desk: Desk, changed: str) -> None:
    async with desk.tool() as tool:
        assert await ran(tool) == "as it was trusted"
        desk.write("as it was changed") if changed == "tools.py" else (desk.folder / changed).write_text("")
        with pytest.raises(Failed, match=r"NotTrusted: .* no person has trusted its current version"):
            await ran(tool)
        desk.trust()
        assert await ran(tool) == ("as it was changed" if changed == "tools.py" else "as it was trusted")


async def test_a_call_leaves_no_compiled_code_behind(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    async with desk.tool() as tool:
        assert await ran(tool) == "as it was trusted"
        assert await ran(tool) == "as it was trusted"
    assert sorted(path.name for path in desk.folder.iterdir()) == ["agent.yaml", "tools.py"]
