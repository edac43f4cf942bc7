"""`halter hook install`, `uninstall` and `status`: other settings stay, and what was done is undone exactly."""

import json
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halter.core.errors import ConfigError
from halter.hooks.registry import DEFAULT_WAIT_SECONDS, find_hook_folder, has_hooks
from halter.settings import read_settings
from tests.processes import Halter

OTHERS = """{
    "model": "opus",  "permissions": {"allow": ["Bash(ls:*)"]},
  "hooks": {"PreToolUse": [{"matcher": "Bash", "hooks": [{"type": "command", "command": "./mine.sh"}]}],
            "Stop": [{"hooks": [{"type": "command", "command": "say done"}]}]}
}"""


class Home:
    """A person's home with a `claude` of some version in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.file = home / ".claude" / "settings.json"
        self.file.parent.mkdir()
        self.environ = {
            "HOME": str(home),
            "PATH": f"{home}/bin:/usr/bin:/bin",
            "HALTER_PERSON": "ada",
            "COLUMNS": "200",
        }
        (home / "bin").mkdir()
        self.has("2.1.325 (Claude Code)")

    def has(self, version: str, program: str = "claude") -> None:
        binary = self.home / "bin" / program
        binary.write_text(f"#!/bin/sh\necho '{version}'\n")
        binary.chmod(0o755)

    def types(self, *words: str, **marks: str) -> tuple[int, str]:
        with Halter(words, env={**self.environ, **marks}, cwd=self.home, stdin=subprocess.DEVNULL) as program:
            body, err = program.communicate()
        assert b"Traceback" not in err, err.decode()
        return program.returncode, (body + err).decode()

    def hooks(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())["hooks"]


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="h-") as text:
        yield Home(Path(text))


def test_hooks_are_written_beside_others_and_taken_out_byte_for_byte(home: Home) -> None:
    home.file.write_text(OTHERS)
    home.file.chmod(0o640)
    code, text = home.types("hook", "install", "--for", "claude")
    assert code == 0, text
    hooks = home.hooks()
    assert hooks["PreToolUse"][0]["hooks"][0]["command"] == "./mine.sh"
    result = hooks["PreToolUse"][1]["hooks"][0]
    assert result["onFailure"] == "block"
    assert int(result["command"].split(" || ")[0].split()[-1]) > DEFAULT_WAIT_SECONDS
    assert result["timeout"] > int(result["command"].split(" || ")[0].split()[-1])
    assert set(hooks) == {
        *("PreToolUse", "PostToolUse", "PostToolUseFailure", "PermissionDenied", "SessionEnd", "Stop"),
    }
    assert stat.S_IMODE(home.file.stat().st_mode) == 0o640
    assert home.types("hook", "uninstall", "--for", "claude")[0] == 0
    assert home.file.read_text() == OTHERS
    assert not (home.home / ".config/halter/hooks/claude-code").exists()


def test_a_file_that_was_not_there_is_removed_again(home: Home) -> None:
    home.types("hook", "install", "--for", "claude")
    home.types("hook", "install", "--for", "claude", "--wait", "5m")
    assert len(home.hooks()["PreToolUse"]) == 1
    home.types("hook", "uninstall", "--for", "claude")
    assert not home.file.exists()


def test_what_was_changed_since_stays(home: Home) -> None:
    home.file.write_text(OTHERS)
    home.types("hook", "install", "--for", "claude")
    settings = json.loads(home.file.read_text())
    settings["model"] = "haiku"
    settings["hooks"]["PreToolUse"].append({"matcher": "Write", "hooks": []})
    home.file.write_text(json.dumps(settings))
    policy = home.home / ".config/halter/hooks/claude-code/agent.yaml"
    policy.write_text(policy.read_text() + "policy: {disabled: [WebFetch]}\n")
    home.types("hook", "uninstall", "--for", "claude")
    payload = json.loads(home.file.read_text())
    assert payload["model"] == "haiku"
    assert [group["matcher"] for group in payload["hooks"]["PreToolUse"]] == ["Bash", "Write"]
    assert set(payload["hooks"]) == {"PreToolUse", "Stop"}
    assert policy.exists()


@pytest.mark.parametrize("version", ["2.1.294 (Claude Code)", "1.0.0", "0.9.9", "no version"])
def test_a_version_that_cannot_be_made_safe_is_refused(home: Home, version: str) -> None:
    home.has(version)
    code, text = home.types("hook", "install", "--for", "claude")
    assert (code, home.file.exists()) == (1, False)
    assert "is not supported" in text or "prints no version" in text


def test_a_program_that_is_not_there_is_refused(home: Home) -> None:
    code, text = home.types("hook", "install", "--for", "codex")
    assert (code, "--binary" in text) == (1, True)
    home.has("codex-cli 0.166.0", "codex")
    code, text = home.types("hook", "install", "--for", "codex")
    assert (code, "trust them" in text) == (0, True)
    payload = json.loads((home.home / ".codex/hooks.json").read_text())["hooks"]["PreToolUse"][0]["hooks"][0]
    assert set(payload) == {"type", "command", "timeout"}


def test_each_program_has_its_own_form(home: Home) -> None:
    home.has("0.61.0", "gemini")
    home.has("3.4.1\nabcdef\nx64", "cursor")
    (home.home / ".cursor").mkdir()
    (home.home / ".cursor/hooks.json").write_text('{"version": 1, "hooks": {"stop": [{"command": "./x.sh"}]}}')
    for program in ("gemini", "cursor"):
        assert home.types("hook", "install", "--for", program)[0] == 0
    (group,) = json.loads((home.home / ".gemini/settings.json").read_text())["hooks"]["BeforeTool"]
    assert (group["matcher"], group["hooks"][0]["timeout"]) == (".*", 220_000)
    (result,) = json.loads((home.home / ".cursor/hooks.json").read_text())["hooks"]["preToolUse"]
    assert (result["failClosed"], "hooks" in result) == (True, False)
    assert "are not tested" in home.types("hook", "status")[1]
    assert home.types("hook", "uninstall", "--for", "cursor")[0] == 0
    assert json.loads((home.home / ".cursor/hooks.json").read_text())["hooks"] == {"stop": [{"command": "./x.sh"}]}


@pytest.mark.parametrize("text", ["{", "[]", '{"hooks": []}', '{"hooks": {"PreToolUse": {}}}', "// x\n{}"])
def test_settings_that_cannot_be_read_stay_as_they_are(home: Home, text: str) -> None:
    home.file.write_text(text)
    code, output = home.types("hook", "install", "--for", "claude")
    assert (code, home.file.read_text(), "nothing was changed" in output) == (1, text, True)


def test_the_status_says_what_does_not_hold(home: Home) -> None:
    assert home.types("hook", "status") == (
        0,
        "No hooks are installed. Install them with: halter hook install --for claude\n",
    )
    home.types("hook", "install", "--for", "claude")
    code, text = home.types("hook", "status")
    assert (code, "No server answers" in text, "--bare" in text) == (1, True, True)
    settings = json.loads(home.file.read_text())
    del settings["hooks"]["PreToolUse"]
    home.file.write_text(json.dumps(settings))
    assert "lacks the hook for `PreToolUse`" in home.types("hook", "status")[1]
    home.file.write_text(json.dumps({**settings, "disableAllHooks": True}))
    assert "disableAllHooks" in home.types("hook", "status")[1]
    home.has("2.1.200 (Claude Code)")
    (result,) = json.loads(home.types("hook", "status", "--json")[1])
    assert (result["intact"], result["server"], result["version"]) == (False, False, "")


def test_an_agent_installs_and_removes_nothing(home: Home) -> None:
    home.types("hook", "install", "--for", "claude")
    before = home.file.read_bytes()
    for words in (("install", "--for", "claude"), ("uninstall", "--for", "claude")):
        code, text = home.types("hook", *words, CLAUDECODE="1")
        assert (code, "Only a person can" in text) == (1, True)
    assert home.file.read_bytes() == before


def test_another_policy_is_named_by_its_folder(home: Home) -> None:
    (home.home / "coder").mkdir()
    (home.home / "coder" / "agent.yaml").write_text("name: coder\n")
    code, text = home.types("hook", "install", "--for", "claude", "--folder", "coder")
    assert (code, "defines the agent coder. Pass --agent coder, or choose another folder." in text) == (3, True)
    assert home.types("hook", "install", "--for", "claude", "--folder", "coder", "--agent", "coder")[0] == 0
    assert "claude coder " in home.hooks()["PreToolUse"][0]["hooks"][0]["command"]


def test_without_a_server_an_event_on_stdin_is_blocked(home: Home) -> None:
    with Halter(["hook", "--for", "claude"], env=home.environ, cwd=home.home) as program:
        body, err = program.communicate(b"{}")
    assert (program.returncode, body, b"This call is blocked" in err) == (2, b"", True)
    assert home.types("hook", "--for", "emacs")[0] == 2


def test_a_long_path_hinders_only_a_person_who_has_hooks(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 30)
    settings = read_settings({"HALTER_HOOKS": str(path)}, tmp_path, "memory:")
    assert not has_hooks(settings)
    with pytest.raises(ConfigError, match="too long for a socket path"):
        find_hook_folder(settings)
