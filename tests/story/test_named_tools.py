"""What an agent's files say of tools that are not there, or that nobody can use, is found when the agent is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halter.cli import build
from halter.journal.sqlite import is_disk_full

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
        return CliRunner().invoke(build(), [word.replace("~", str(tmp_path)) for word in words], env=environment)

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


def test_a_tool_without_a_type_or_a_docstring_is_said_with_its_line(halter: Types, tmp_path: Path) -> None:
    code = f"{TOOLS}\n\n@tool\nasync def lookup(who, *, most: int = 3):\n    return who\n\n\ndef helper(x): ...\n"
    write_rules(tmp_path / "desk", "", code)
    for words in (("trust", "~/desk"), ("run", "~/desk", "Hello.")):
        result = halter(*words)
        assert result.exit_code == 0, result.output
        assert "tools.py line 11: the tool `lookup` has no docstring" in result.stderr
        assert "tools.py line 11: the tool `lookup` has no type for `who`" in result.stderr
        assert "helper" not in result.stderr
        assert "`find`" not in result.stderr


@pytest.mark.parametrize(
    ("code", "line", "reason"),
    [
        ("from halter import tool\n\ndef (:\n", 3, "SyntaxError"),
        ("import nosuchmodule_at_all\n", 1, "No module named"),
        ("from halter import tool\n\n\ndef make():\n    return 1 / 0\n\n\nmake()\n", 5, "ZeroDivisionError"),
    ],
)
def test_trust_and_run_say_where_code_that_does_not_load_is_broken(
    halter: Types, tmp_path: Path, code: str, line: int, reason: str
) -> None:
    write_rules(tmp_path / "desk", "", code)
    trusted = halter("trust", "~/desk")
    assert f"tools.py line {line} cannot be used: " in trusted.stderr
    assert reason in trusted.stderr
    result = halter("run", "~/desk", "Hello.")
    assert result.exit_code == 3
    assert f"tools.py line {line} cannot be used: " in result.output


def test_a_store_on_a_file_system_without_files_is_not_said_to_be_full(halter: Types, tmp_path: Path) -> None:
    write_rules(tmp_path / "desk", "")
    result = halter("run", "~/desk", "Hello.", "--store", "/proc/x.db")
    assert result.exit_code == 3
    assert "full" not in result.output
    assert "Cannot open the store /proc/x.db. Check that /proc exists and is writable." in result.output
    assert not is_disk_full("/proc/x.db")
