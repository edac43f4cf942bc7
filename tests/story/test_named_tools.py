"""What an agent's files say of tools that are not there, or that nobody can use, is found when the agent is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halter.cli.commands import build_command_tree
from halter.config.trust import digest_folder
from halter.journal.sqlite_connection import is_disk_full
from halter.runtime.assembly.folder_code import open_trust
from halter.settings import read_settings

Types = Callable[..., Result]


@pytest.fixture
def halter(tmp_path: Path) -> Types:
    (tmp_path / "desk").mkdir()
    environment = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "300",
    }

    def types(*words: str) -> Result:
        return CliRunner().invoke(
            build_command_tree(), [word.replace("~", str(tmp_path)) for word in words], env=environment
        )

    return types


def write_rules(folder: Path, rules: str, tools: str = "") -> None:
    (folder / "agent.yaml").write_text(f"name: desk\nmodel: reflex\nreflex:\n{rules}  - say: hi\n")
    if tools:
        (folder / "tools.py").write_text(tools)


TOOLS = '''from halter import tool


@tool(level="SAFE", effect="read")
def find(name: str) -> str:
    """Find a person."""
    return name
'''


@pytest.mark.parametrize(
    "rule", ["call: {tool: fnd, arguments: {}}", "calls: [{tool: find, arguments: {name: x}}, {tool: fnd}]"]
)
def test_a_rule_that_calls_a_tool_which_is_not_there_is_found_before_it_is_reached(
    halter: Types, tmp_path: Path, rule: str
) -> None:
    write_rules(tmp_path / "desk", f'  - when: message == "never"\n    {rule}\n', TOOLS)
    assert halter("trust", "~/desk").exit_code == 0
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 3
    assert "agent.yaml line 5: there is no tool `fnd`; " in result.output
    assert "find" in result.output


def test_rules_may_call_every_tool_that_halter_gives(halter: Types, tmp_path: Path) -> None:
    rules = "".join(
        f'  - when: message == "never"\n    call: {{tool: {name}}}\n' for name in ("notify", "ask_user", "find")
    )
    write_rules(tmp_path / "desk", rules, TOOLS)
    assert halter("trust", "~/desk").output.count("\n") == 1
    assert halter("run", "~/desk", "Hello.").exit_code == 0


UNDESCRIBED = f"{TOOLS}\n\n@tool\nasync def lookup(who, *, most: int = 3):\n    return who\n\n\ndef helper(x): ...\n"


@pytest.mark.parametrize(
    ("code", "sentences"),
    [
        (
            UNDESCRIBED,
            [
                "tools.py line 11: the tool `lookup` has no docstring",
                "line 11: the tool `lookup` has no type for `who`",
            ],
        ),
        (
            f'{TOOLS}\n\ndef plain(a, b: int):\n    """Do it."""\n\n\nmade = tool(plain, name="made")\n',
            ["tools.py line 10: the tool `made` has no type for `a`"],
        ),
        (
            f'from halter import tool as offer\n{TOOLS}\n\n@offer(\n    level="SAFE",\n)\ndef bare() -> str: ...\n',
            ["tools.py line 14: the tool `bare` has no docstring"],
        ),
    ],
)
def test_a_tool_without_a_type_or_a_docstring_is_neither_trusted_nor_started_and_its_line_is_said(
    halter: Types, tmp_path: Path, code: str, sentences: list[str]
) -> None:
    write_rules(tmp_path / "desk", "", code)
    result = halter("trust", "~/desk")
    assert result.exit_code == 3, result.output
    for sentence in sentences:
        assert sentence in result.output
    assert "helper" not in result.output
    assert "`find`" not in result.output
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 3
    assert "halter trust" in result.output


def test_code_that_was_trusted_before_its_tools_had_to_be_described_says_so_at_its_start(
    halter: Types, tmp_path: Path
) -> None:
    write_rules(tmp_path / "desk", "", UNDESCRIBED)
    settings = read_settings({"XDG_CONFIG_HOME": str(tmp_path / "config")}, tmp_path, "memory:")
    open_trust(settings).trust(tmp_path / "desk", digest_folder(tmp_path / "desk"), "ada", 0)
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 3
    assert "tools.py line 11: the tool `lookup` has no docstring" in result.output


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        ("from halter import tool\n\ndef (:\n", 3, "SyntaxError"),
        ("import nosuchmodule_at_all\n", 1, "No module named"),
        ("from halter import tool\n\n\ndef make():\n    return 1 / 0\n\n\nmake()\n", 5, "ZeroDivisionError"),
    ],
)
def test_code_that_does_not_load_is_not_trusted_and_its_line_is_said(
    halter: Types, tmp_path: Path, code: str, line: int, reason: str
) -> None:
    write_rules(tmp_path / "desk", "", code)
    trusted = halter("trust", "~/desk")
    assert trusted.exit_code == 3
    assert f"tools.py line {line} cannot be used: " in trusted.output
    assert reason in trusted.output
    assert "Trusted" not in trusted.output
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 3
    assert "no person has trusted its current version" in result.output


def test_code_that_no_longer_loads_where_it_runs_says_where_it_is_broken(halter: Types, tmp_path: Path) -> None:
    code = "import os\n\nassert os.path.exists(os.path.join(os.path.dirname(__file__), '..', 'library'))\n"
    write_rules(tmp_path / "desk", "", code)
    (tmp_path / "library").mkdir()
    assert halter("trust", "~/desk").exit_code == 0
    (tmp_path / "library").rmdir()
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 3
    assert "tools.py line 3 cannot be used: AssertionError" in result.output


def test_servers_in_a_file_that_cannot_be_read_are_not_trusted(halter: Types, tmp_path: Path) -> None:
    write_rules(tmp_path / "desk", "")
    (tmp_path / "desk" / ".mcp.json").write_text('{"mcpServers": {')
    result = halter("trust", "~/desk")
    assert result.exit_code == 3
    assert ".mcp.json" in result.output
    assert "Trusted" not in result.output


def test_a_trusted_version_stays_trusted_when_the_next_one_does_not_load(halter: Types, tmp_path: Path) -> None:
    write_rules(tmp_path / "desk", "", TOOLS)
    assert halter("trust", "~/desk").exit_code == 0
    (tmp_path / "desk" / "tools.py").write_text("def (:\n")
    assert halter("trust", "~/desk").exit_code == 3
    (tmp_path / "desk" / "tools.py").write_text(TOOLS)
    assert halter("run", "~/desk", "Hello.").exit_code == 0


PLAYBOOKS = {
    "- call: find\n  arguments: {name: Ada}\n- call: fnd\n": "round.yaml line 3 calls `fnd`, which desk does not have",
    "- call: find\n  arguments: {nam: Ada}\n": "round.yaml line 1: `find` cannot take these arguments. ",
    "- call: find\n  arguments: {name: 7}\n": "round.yaml line 1: `find` cannot take these arguments. ",
    "- call: find\n": "round.yaml line 1: `find` cannot take these arguments. ",
    "- {call: find, arguments: {nam: '${inputs.who}'}}\n": "round.yaml line 1: `find` cannot take these arguments. ",
    "- {call: find, arguments: {name: '${inputs.who}', more: 1}}\n": "`more` is not one of its arguments.",
    "- call: find\n  as: a\n  arguments: {name: Ada}\n- {call: notify}\n": "round.yaml line 4 calls `notify`, ",
    "max_cost_usd: 1\nsteps:\n- call: x__find\n": "round.yaml line 3 calls `x__find`, which desk does not have; ",
}


@pytest.mark.parametrize(("text", "sentence"), PLAYBOOKS.items())
def test_a_step_of_a_playbook_that_cannot_work_is_said_at_the_start_and_nothing_of_it_is_played(
    halter: Types, tmp_path: Path, text: str, sentence: str
) -> None:
    write_rules(tmp_path / "desk", "", TOOLS)
    (tmp_path / "desk" / "playbooks").mkdir()
    (tmp_path / "desk" / "playbooks" / "round.yaml").write_text(text)
    (tmp_path / "desk" / "round.yaml").write_text(text)
    halter("trust", "~/desk")
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 0, result.output
    assert f"playbooks/{sentence}" in result.stderr or not sentence.startswith("round")
    assert sentence in result.stderr
    for playbook in ("playbooks/round.yaml", "round.yaml"):
        result = halter("play", f"~/desk/{playbook}", "--input", "who=Ada")
        assert result.exit_code == 3, result.output
        assert sentence in result.output
        assert "Session" not in result.output


def test_a_playbook_may_call_a_tool_with_what_a_person_or_an_earlier_step_gives(halter: Types, tmp_path: Path) -> None:
    write_rules(tmp_path / "desk", "", TOOLS)
    (tmp_path / "desk" / "round.yaml").write_text(
        "- {call: find, as: who, arguments: {name: '${inputs.who}'}}\n"
        "- {call: find, arguments: {name: 'x ${steps.who.text}'}}\n"
    )
    halter("trust", "~/desk")
    result = halter("play", "~/desk/round.yaml", "--input", "who=Ada")
    assert result.exit_code == 0, result.output


def test_a_rule_of_the_fleet_for_a_tool_that_no_agent_here_has_is_said_with_its_line(
    halter: Types, tmp_path: Path
) -> None:
    write_rules(tmp_path / "desk", "", TOOLS)
    (tmp_path / "config" / "halter").mkdir(parents=True)
    (tmp_path / "config" / "halter" / "halter.yaml").write_text(
        "policy:\n  tools:\n    fnd: {level: CONTROLLED}\n    find: {level: CONTROLLED}\n"
        "    Bash: {level: RESTRICTED}\n    post_it: {rate: 1/hour}\n    http_get: {level: CONTROLLED}\n"
        "  disabled: [notify, mcp__github__push, htp_get]\n"
    )
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "agent.yaml").write_text("name: mail\nmodel: reflex\n")
    (tmp_path / "mail" / "tools.py").write_text(TOOLS.replace("find", "post_it"))
    halter("trust", "~/desk")
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 0, result.output
    assert "halter.yaml line 3: no agent here has a tool `fnd`; did you mean `find`?" in result.stderr
    assert "no agent here has a tool `htp_get`; did you mean `http_get`?" in result.stderr
    assert result.stderr.count("no agent here has a tool") == 2


def test_a_store_on_a_file_system_without_files_is_not_said_to_be_full(halter: Types, tmp_path: Path) -> None:
    write_rules(tmp_path / "desk", "")
    result = halter("run", "~/desk", "Hello.", "--store", "/proc/x.db")
    assert result.exit_code == 3
    assert "full" not in result.output
    assert "Cannot open the store /proc/x.db. Check that /proc exists and is writable." in result.output
    assert not is_disk_full("/proc/x.db")
