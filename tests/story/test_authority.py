"""An agent cannot change what it is allowed: no root reaches its own policy, another agent's, or Halter's own files."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halter import Agent, Guard
from halter.core.errors import ConfigError
from halter.core.tools import SensorFailed
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.runtime import Runtime, open_runtime
from halter.sensors.files import read_file_value
from halter.settings import Settings
from halter.system.folders import FileEntry
from halter.tools.files import make_file_tools

POLICY = "name: {name}\nmodel: scripted\nscript: replies.yaml\nlimits: {{max_cost_usd: 0.05}}\n"
REWRITES = """\
- calls: [{tool: write_file, arguments: {path: PATH, text: "name: clerk\\nlimits: {max_cost_usd: 500}\\n"}}]
- text: I tried.
"""


def settings(home: Path) -> Settings:
    path = home / "kept" / "halter"
    return Settings(
        str(path / "halter.db"), path / "checkpoints", path / "key", "ada", path / "trust", None, path / "t"
    )


def write_agent(home: Path, text: str, name: str = "clerk", path: str = "agent.yaml") -> Path:
    folder = home / name
    (folder / "desk").mkdir(parents=True)
    (folder / "agent.yaml").write_text(POLICY.format(name=name) + text)
    (folder / "replies.yaml").write_text(REWRITES.replace("PATH", path))
    return folder


@asynccontextmanager
async def open_app(home: Path) -> AsyncGenerator[Runtime]:
    async with open_runtime(settings(home)) as app:
        yield app


@pytest.mark.parametrize("kind", ["files", "shell"])
@pytest.mark.parametrize("root", [".", "..", "desk/..", "{home}", "{home}/clerk", "{home}/kept/halter", "/", "link"])
async def test_an_agent_whose_root_reaches_its_policy_is_not_loaded_and_told_why(
    tmp_path: Path, kind: str, root: str
) -> None:
    folder = write_agent(tmp_path, f"tools:\n  {kind}: {{root: '{root.format(home=tmp_path)}'}}\n")
    (folder / "link").symlink_to(folder)
    async with open_app(tmp_path) as app:
        with pytest.raises(ConfigError, match=rf"agent.yaml line 6: `tools.{kind}.root` is .*as in `root: work`"):
            async with open_folder_agent(app, folder):
                pass


async def test_a_model_that_rewrites_its_policy_later_is_refused_and_the_policy_stays(tmp_path: Path) -> None:
    folder = write_agent(tmp_path, "mode: SEMI\ntools: {files: {root: desk}}\n")
    policy = (folder / "agent.yaml").read_bytes()
    async with Agent.load(folder, store=tmp_path / "runs.db", settings=settings(tmp_path)) as agent:
        (folder / "desk").rename(folder / "aside")
        (folder / "desk").symlink_to(".")
        result = await agent.run("go")
    assert result.text == "I tried."
    assert (folder / "agent.yaml").read_bytes() == policy
    async with open_app(tmp_path) as app:
        with pytest.raises(ConfigError, match=r"contains .*agent.yaml, the agent's own definition"):
            async with open_folder_agent(app, folder):
                pass


async def test_a_model_that_makes_an_agent_of_its_desk_is_refused(tmp_path: Path) -> None:
    folder = write_agent(tmp_path, "tools: {files: {root: desk}}\n", path="helper/agent.yaml")
    async with Agent.load(folder, store=tmp_path / "runs.db", settings=settings(tmp_path)) as agent:
        await agent.run("go")
    assert not (folder / "desk" / "helper" / "agent.yaml").exists()


async def test_what_lies_where_tools_can_write_is_not_loaded_as_an_agent(tmp_path: Path) -> None:
    clerk = write_agent(tmp_path, "tools: {files: {root: ../shared}}\n")
    (tmp_path / "shared").mkdir()
    async with open_app(tmp_path) as app, open_folder_agent(app, clerk):
        path = write_agent(tmp_path / "shared", "", "helper")
        with pytest.raises(ConfigError, match=r"is inside .*shared, where the tools of the agent in .*clerk can write"):
            await _loaded(app, path)
    async with open_app(tmp_path) as app:
        with pytest.raises(ConfigError, match=r"contains .*helper/agent.yaml, the definition of an agent"):
            await _loaded(app, clerk)
        inside = write_agent(clerk / "desk", "", "inner")
        (clerk / "agent.yaml").write_text(POLICY.format(name="clerk") + "tools: {files: {root: desk}}\n")
        with pytest.raises(ConfigError, match=r"is inside .*desk, where the tools of the agent in .*clerk can write"):
            await _loaded(app, inside)


async def _loaded(app: Runtime, folder: Path) -> AgentRuntime:
    async with open_folder_agent(app, folder) as agent:
        return agent


@pytest.mark.parametrize("place", ["", "kept", "kept/halter/checkpoints"])
async def test_the_tools_of_a_program_reach_nothing_of_it_either(tmp_path: Path, place: str) -> None:
    (tmp_path / "kept/halter/checkpoints").mkdir(parents=True)
    tools, app_settings = make_file_tools(tmp_path / place), settings(tmp_path)
    with pytest.raises(ConfigError, match=r"The root of the tool read_file, .* No tool may reach that"):
        async with Guard(app_settings.store, tools=tools, settings=app_settings):
            pass
    with pytest.raises(ConfigError, match="The root of the tool read_file"):
        async with Agent(
            "desk", model="reflex", reflex=[{"say": "hi"}], store=app_settings.store, tools=tools, settings=app_settings
        ):
            pass


async def test_a_program_whose_tools_have_a_folder_of_their_own_works(tmp_path: Path) -> None:
    (tmp_path / "desk").mkdir()
    app_settings = settings(tmp_path)
    async with Guard(app_settings.store, tools=make_file_tools(tmp_path / "desk"), settings=app_settings) as guard:
        answer = await guard.call("write_file", path="note.txt", text="fine")
    assert answer.outcome == "ok"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "collections: {c: {path: ../kept/halter}}\n",
            r"line 5: `collections.c.path` is .*Agents cannot read protected files: use another folder",
        ),
        (
            "collections: {c: {path: .., pattern: '**/*'}}\n",
            r"`collections.c.path` is `..`, which contains .*the store",
        ),
        ("watches: [{name: w, path: ../kept/halter/checkpoints, prompt: x}]\n", r"`watches\[1\].path`.*checkpoints"),
        (
            "sensors: [{name: s, type: files, source: {path: ../kept/halter/trust.json}}]\n",
            r"`sensors\[1\].source.path`",
        ),
    ],
)
async def test_what_halter_keeps_is_not_read_as_a_document_or_a_fact(tmp_path: Path, more: str, message: str) -> None:
    folder = write_agent(tmp_path, more)
    async with open_app(tmp_path) as app:
        (tmp_path / "kept/halter/trust.json").write_text("{}")
        with pytest.raises(ConfigError, match=message):
            await _loaded(app, folder)


async def test_a_definition_can_be_read_where_nothing_can_write_it(tmp_path: Path) -> None:
    folder = write_agent(tmp_path, "collections: {own: {path: ., pattern: '*.yaml'}}\n")
    async with open_app(tmp_path) as app, open_folder_agent(app, folder) as agent:
        assert agent.library is not None
        shelved = await agent.library.index_collection("own", ".", "*.yaml")
    assert [(each.name, each.problem) for each in shelved] == [("agent.yaml", ""), ("replies.yaml", "")]


async def test_a_link_that_a_tool_could_have_made_is_not_followed_out_of_its_root(tmp_path: Path) -> None:
    folder = write_agent(tmp_path, "tools: {files: {root: desk}}\ncollections: {c: {path: desk}}\n")
    (tmp_path / "private.txt").write_text("not for agents")
    link = folder / "desk" / "notes.txt"
    async with open_app(tmp_path) as app, open_folder_agent(app, folder) as agent:
        link.write_text("fine")
        assert read_file_value(link, "notes", agent.is_refused)["text"] == "fine"
        about = link.stat()
        link.unlink()
        link.symlink_to(tmp_path / "private.txt")
        with pytest.raises(SensorFailed, match="leads to a file that the agent may not read"):
            read_file_value(link, "notes", agent.is_refused)
        assert agent.library is not None
        indexed_file = await agent.library.index_file(
            link, FileEntry(about.st_size, about.st_mtime_ns, about.st_ino), "notes.txt"
        )
        assert "leads to a file that the agent may not read" in indexed_file.problem
