"""What no tool may reach: compared by what it is, whatever a root is called, and looked at again for every call."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halter.config.agent_files import read_agent
from halter.core.tools import Failed, Permit, Valid
from halter.runtime.assembly.protected_paths import list_protected_paths
from halter.settings import Settings
from halter.system.protected_paths import ProtectedEntry, ProtectedPaths
from halter.tools.files import make_file_tools
from halter.tools.function_tool import FunctionTool
from halter.tools.shell import Sandbox, make_shell_tool

POLICY = "name: clerk\nmodel: reflex\nreflex: rules/first.yaml\nlimits: {max_cost_usd: 0.05}\n"
SKILL = ".agents/skills/count/SKILL.md"
RAISED = "name: clerk\nlimits: {max_cost_usd: 500}\n"


class House:
    """An agent with a desk, a neighbour, and all that Halter keeps."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agent = home / "agents" / "clerk"
        self.desk = self.agent / "desk"
        for folder in ("desk", ".agents/skills/count", "playbooks", ".venv/lib", "rules", "node_modules/x", ".git"):
            (self.agent / folder).mkdir(parents=True)
        (home / "agents" / "scout" / ".agents").mkdir(parents=True)
        (home / "elsewhere" / "inbox").mkdir(parents=True)
        for file, text in (("agent.yaml", POLICY), ("rules/first.yaml", "- say: hi\n"), ("playbooks/one.yaml", "[]\n")):
            (self.agent / file).write_text(text)
        (self.agent / SKILL).write_text("Count.\n")
        (home / "agents" / "scout" / "agent.yaml").write_text("name: scout\n")
        state, config = home / "state" / "halter", home / "config" / "halter"
        self.settings = Settings(
            store=str(state / "halter.db"),
            checkpoints=state / "checkpoints",
            signing_key=config / "signing.key",
            person="ada",
            trust=config / "trust.json",
            fleet=home / "fleet" / "halter.yaml",
            tokens=home / "tokens" / "tokens.json",
            fleets=(Path("halter.yaml"), home / "usual" / "halter" / "halter.yaml"),
        )
        for folder in (
            state / "checkpoints" / "old",
            config / "notes",
            home / "fleet",
            home / "tokens",
            home / "usual/halter",
        ):
            folder.mkdir(parents=True)
        (home / "fleet" / "halter.yaml").write_text("mode: SEMI\n")
        (state / "halter.db").write_text("the store")

    @property
    def paths(self) -> ProtectedPaths:
        return list_protected_paths(self.settings, read_agent(self.agent), self.agent)

    def protect(self, *tools: FunctionTool) -> dict[str, FunctionTool]:
        for each in tools:
            assert each.rooted_tool is not None
            each.rooted_tool.protect(self.paths)
        return {each.spec.name: each for each in tools}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def run_tool(subject: FunctionTool, **arguments: Any) -> str:
    valid = subject.validate(json.dumps(arguments).encode())
    assert isinstance(valid, Valid)
    return (await subject.run(valid, Permit("call-1", 0, {}))).text


@pytest.mark.parametrize(
    ("root", "told"),
    [
        (".", "contains .*agent.yaml, the agent's own definition"),
        ("..", "contains .*agent.yaml"),
        ("desk/..", "contains .*agent.yaml"),
        ("../clerk", "contains .*agent.yaml"),
        ("/", "contains"),
        ("{home}", "contains"),
        ("{home}/agents", "contains"),
        ("{home}/agents/clerk", "contains .*agent.yaml"),
        ("rules", "contains .*first.yaml, the agent's own definition"),
        (".agents", "is inside .*agents, the agent's own definition"),
        (".agents/skills", "is inside"),
        (".agents/skills/count", "is inside"),
        ("playbooks", "is inside"),
        (".venv/lib", "is inside .*venv"),
        ("node_modules/x", "is inside"),
        (".git", "is inside"),
        ("../scout", "contains .*scout/agent.yaml, from which the agent in .*scout is loaded"),
        ("../scout/.agents", "is inside .*scout/.agents"),
        ("{home}/config/halter", "a folder of Halter's own"),
        ("{home}/config/halter/notes", "is inside .*a folder of Halter's own"),
        ("{home}/config", "contains .*signing.key"),
        ("{home}/state", "contains .*halter.db, the store"),
        ("{home}/state/halter/checkpoints", "is inside .*checkpoints"),
        ("{home}/state/halter/checkpoints/old", "is inside .*checkpoints"),
        ("{home}/fleet", "contains .*halter.yaml, the fleet's file"),
        ("{home}/tokens", "contains .*tokens.json, the list of tokens"),
        ("{code}", "from which this program loads code"),
        ("{home}/usual", "contains .*usual/halter/halter.yaml, where the fleet's file is looked for"),
        ("{home}/usual/halter", "a folder of Halter's own"),
        ("/usr/local/bin", "is inside /usr/local/bin, from which programs are started"),
        ("/proc/self", "is inside /proc"),
        ("to-agent", "contains .*agent.yaml"),
        ("to-agents/clerk", "contains .*agent.yaml"),
        ("to-desk/..", "contains .*agent.yaml"),
    ],
)
def test_a_root_that_reaches_what_is_protected_is_reported_however_it_is_spelled(
    house: House, root: str, told: str
) -> None:
    (house.agent / "to-agent").symlink_to(house.agent)
    (house.agent / "to-agents").symlink_to("..")
    (house.agent / "to-desk").symlink_to("desk")
    code = Path(sys.modules["halter"].__file__ or "").parent
    text = house.paths.reach(house.agent / root.format(home=house.home, code=code))
    assert text
    assert re.search(told, text), text


@pytest.mark.parametrize("root", ["desk", "desk/inner", "{home}/elsewhere", "{home}/elsewhere/inbox", "to-desk"])
def test_a_folder_of_its_own_can_be_a_root(house: House, root: str) -> None:
    (house.desk / "inner").mkdir()
    (house.agent / "to-desk").symlink_to("desk")
    assert not house.paths.reach(house.agent / root.format(home=house.home))


def test_a_root_above_any_agent_is_reported(house: House) -> None:
    (house.home / "elsewhere/inbox/deep/hidden").mkdir(parents=True)
    (house.home / "elsewhere/inbox/deep/hidden/agent.yaml").write_text("name: hidden\n")
    assert "hidden/agent.yaml, the definition of an agent" in house.paths.reach(house.home / "elsewhere")


@pytest.mark.parametrize(
    "file", ["agent.yaml", "rules/first.yaml", "playbooks/one.yaml", ".agents/skills/count/SKILL.md"]
)
def test_another_name_of_a_protected_file_is_reported(house: House, file: str) -> None:
    (house.desk / "inner").mkdir()
    os.link(house.agent / file, house.desk / "inner" / "notes.txt")
    assert house.paths.reach(house.desk).startswith("is another name of")


@pytest.mark.parametrize(
    "link", ["playbooks/two.yaml", ".agents/skills/two/SKILL.md", ".agents/skills/two", "AGENTS.md"]
)
@pytest.mark.parametrize("dangles", [False, True])
def test_a_root_that_holds_the_target_of_a_linked_skill_or_playbook_is_reported(
    house: House, link: str, *, dangles: bool
) -> None:
    path = house.home / "elsewhere" / "kept"
    path.mkdir()
    if not dangles:
        (path / "two").mkdir() if link.endswith("skills/two") else (path / "two").write_text("[]\n")
    (house.agent / link).parent.mkdir(exist_ok=True)
    (house.agent / link).symlink_to(path / "two")
    assert re.match(r"(?:contains|is inside) .*, the agent's own definition", house.paths.reach(path))
    assert not house.paths.reach(house.desk)


@pytest.mark.parametrize("point", ["desk", "desk/mounted"])
@pytest.mark.parametrize("source", [".", "playbooks", ".agents/skills/count", ".git/hooks"])
def test_what_is_mounted_at_a_root_or_below_it_is_reported(house: House, source: str, point: str) -> None:
    (house.desk / "mounted").mkdir()
    (house.agent / ".git" / "hooks").mkdir()
    asked = (
        "import sys; from pathlib import Path; from halter.config.roots import definition_of;"
        "from halter.system.protected_paths import ProtectedPaths as P; place = Path(sys.argv[1]);"
        "print(P(tuple(definition_of(place)), place).reach(place / 'desk'))"
    )
    mount = 'mount --bind "$1/$4" "$1/$5" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    process = subprocess.run(
        [*command, str(house.agent), sys.executable, asked, source, point], capture_output=True, text=True, check=False
    )
    if "peration not permitted" in process.stderr or "unshare failed" in process.stderr:
        pytest.skip("No user namespace can be made here.")
    assert re.match("contains|is inside", process.stdout), process.stderr


def replace_by_link(house: House) -> None:
    house.desk.rename(house.agent / "aside")
    house.desk.symlink_to(".")


def replace_by_link_above(house: House) -> None:
    house.desk.rename(house.agent / "aside")
    house.desk.symlink_to("../../agents")


def replace_by_settings(house: House) -> None:
    house.desk.rmdir()
    house.desk.symlink_to(house.home / "config" / "halter")


def rename_into_skills(house: House) -> None:
    house.desk.rename(house.agent / ".agents" / "desk")
    house.desk.symlink_to(house.agent / ".agents" / "desk")


def make_agent_folder(house: House) -> None:
    (house.desk / "agent.yaml").write_text("name: other\n")


def exchange_for_agent_folder(house: House) -> None:
    house.desk.rename(house.home / "aside")
    (house.home / "agents" / "scout").rename(house.desk)


LATER = (
    replace_by_link,
    replace_by_link_above,
    replace_by_settings,
    rename_into_skills,
    make_agent_folder,
    exchange_for_agent_folder,
)


OF_NO_TOOL = ("agent.yaml", "AGENTS.md", "clerk/agent.yaml", "trust.json", "x/SKILL.md", "plain.txt")


@pytest.mark.parametrize("happens", LATER)
async def test_what_a_root_leads_to_is_looked_at_for_every_write(
    house: House, happens: Callable[[House], None]
) -> None:
    tools = house.protect(*make_file_tools(house.desk))
    await run_tool(tools["write_file"], path="before.txt", text="fine")
    (house.desk / "before.txt").unlink()
    happens(house)
    before = _all(house.home)
    deleted = [("delete_file", path, {}) for path in ("agent.yaml", "plain.txt")]
    for name, path, values in [*(("write_file", path, {"text": RAISED}) for path in OF_NO_TOOL), *deleted]:
        with pytest.raises(Failed, match="Protected"):
            await run_tool(tools[name], path=path, **values)
        assert _all(house.home) == before, (name, path)


@pytest.mark.parametrize("path", ["agent.yaml", "Agent.YAML", "halter.yaml", "inner/agent.yaml", "old/AGENTS.md"])
async def test_no_tool_makes_or_changes_an_agent(house: House, path: str) -> None:
    tools = house.protect(*make_file_tools(house.desk))
    (house.desk / "old").mkdir()
    (house.desk / "old" / "agent.yaml").write_text("name: old\n")
    with pytest.raises(Failed, match="Protected"):
        await run_tool(tools["write_file"], path=path, text=RAISED)


@pytest.mark.parametrize("name", ["read_file", "write_file", "delete_file"])
async def test_another_name_of_the_store_is_neither_read_nor_written(house: House, name: str) -> None:
    tools = house.protect(*make_file_tools(house.desk))
    os.link(house.settings.store, house.desk / "notes")
    values = {"text": "x"} if name == "write_file" else {}
    with pytest.raises(Failed, match=r"Protected: notes is protected from tools: the store\."):
        await run_tool(tools[name], path="notes", **values)
    assert (house.home / "state/halter/halter.db").read_text() == "the store"


async def test_a_root_that_leads_to_the_keys_later_is_not_read(house: House) -> None:
    tools = house.protect(*make_file_tools(house.desk))
    (house.home / "tokens" / "tokens.json").write_text("not for agents")
    house.desk.rmdir()
    house.desk.symlink_to(house.home / "tokens")
    for name, values in (("read_file", {"path": "tokens.json"}), ("list_folder", {}), ("find_files", {"pattern": "*"})):
        with pytest.raises(Failed, match="Protected"):
            await run_tool(tools[name], **values)


async def test_an_honest_agent_writes_reads_and_deletes(house: House) -> None:
    tools = house.protect(*make_file_tools(house.desk))
    await run_tool(tools["write_file"], path="a/b.txt", text="fine")
    assert await run_tool(tools["read_file"], path="a/b.txt") == "fine"
    await run_tool(tools["delete_file"], path="a/b.txt")


@pytest.fixture
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        asyncio.run(Sandbox(tmp_path_factory.mktemp("probe")).verify())
    except Failed as failed:
        if shutil.which("bwrap") is not None and os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(failed))
        pytest.skip(str(failed))


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("happens", LATER)
async def test_no_command_runs_in_a_root_that_leads_elsewhere_later(
    house: House, happens: Callable[[House], None]
) -> None:
    tools = house.protect(make_shell_tool(house.desk))
    assert await run_tool(tools["run_command"], argv=["touch", "fine"]) == ""
    (house.desk / "fine").unlink()
    happens(house)
    before = _all(house.home)
    with pytest.raises(Failed, match=r"Protected|cannot be used"):
        await run_tool(tools["run_command"], argv=["sh", "-c", "echo x > agent.yaml; echo x > trust.json; touch y"])
    assert _all(house.home) == before


@pytest.mark.usefixtures("sandbox")
async def test_a_link_on_the_way_to_a_root_is_seen_as_well(house: House) -> None:
    inner = house.desk / "playbooks"
    inner.mkdir()
    tools = house.protect(make_shell_tool(inner), *make_file_tools(inner))
    replace_by_link(house)
    with pytest.raises(Failed, match="Protected"):
        await run_tool(tools["run_command"], argv=["touch", "new.yaml"])
    with pytest.raises(Failed, match="Protected"):
        await run_tool(tools["write_file"], path="new.yaml", text="[]")
    assert [each.name for each in (house.agent / "playbooks").iterdir()] == ["one.yaml"]


@pytest.mark.usefixtures("sandbox")
async def test_no_command_runs_beside_another_name_of_the_policy(house: House) -> None:
    tools = house.protect(make_shell_tool(house.desk))
    os.link(house.agent / "agent.yaml", house.desk / "notes")
    with pytest.raises(Failed, match="Protected"):
        await run_tool(tools["run_command"], argv=["sh", "-c", "echo x > notes"])
    assert (house.agent / "agent.yaml").read_text() == POLICY


@pytest.mark.usefixtures("sandbox")
async def test_no_command_runs_where_the_sandbox_itself_would_show_a_key(house: House) -> None:
    key = ProtectedEntry(Path("/etc/ssl/halter/signing.key"), "the signing key", is_secret=True)
    tool = make_shell_tool(house.desk)
    assert tool.rooted_tool is not None
    tool.rooted_tool.protect(ProtectedPaths((key,)))
    with pytest.raises(Failed, match="Protected"):
        await run_tool(tool, argv=["cat", str(key.path)])


@pytest.mark.usefixtures("sandbox")
async def test_a_root_that_is_exchanged_between_the_look_and_the_start_runs_nothing(house: House) -> None:
    class Late(Sandbox):
        """A sandbox whose root is exchanged at the worst moment."""

        def _identify_folder(self, source: Path | None = None) -> tuple[int, int]:
            file_identity = super()._identify_folder(source)
            if house.desk.is_dir() and not house.desk.is_symlink() and (house.desk / "now").exists():
                replace_by_link(house)
            return file_identity

    late = Late(house.desk)
    late.protect(house.paths)
    await late.verify()
    (house.desk / "now").touch()
    process_exit = await late.run(["sh", "-c", "echo x > agent.yaml"], house.desk)
    assert "nothing was run" in process_exit.text
    assert (house.agent / "agent.yaml").read_text() == POLICY


def _all(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder, by path: content, or where a link leads."""
    values: dict[str, bytes | str] = {}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            link = str(path.readlink()) if path.is_symlink() else ""
            values[str(path)] = link or (b"" if path.is_dir() else path.read_bytes())
    return values
