"""`halter doctor` lists the keys that an agent's files write under a former name, and finds nothing wrong with them."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from halter.cli.commands import build_command_tree

FORMER = """\
name: trader
model: reflex
reflex: [{say: hi}]
guardrails:
  reserve_tokens: 100
hot_state:
  fields:
    cash:
      refresh_tool: look
      refresh_params: {of: cash}
sensors:
- name: prices
  type: poll
  source:
    tool: look
    params: {of: prices}
- name: mail
  type: watch
  source: {path: inbox}
schedules:
- name: nightly
  every: 1d
  playbook: nightly.yaml
"""
PRESENT = FORMER.replace("guardrails", "limits").replace("params", "arguments").replace("type: watch", "type: files")
PLAYBOOK = "- call: look\n  with: {of: cash}\n"


def run_doctor(home: Path, agent: str, playbook: str) -> dict[str, Any]:
    """Check an agent of these files; return each check's verdict and finding by its name."""
    folder = home / "trader"
    folder.mkdir()
    (folder / "inbox").mkdir()
    (folder / "agent.yaml").write_text(agent)
    (folder / "nightly.yaml").write_text(playbook)
    environ = {
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "80",
    }
    result = CliRunner().invoke(build_command_tree(), ["doctor", str(folder), "--json"], env=environ)
    checks = json.loads(result.stdout)
    return {check["name"]: (check["verdict"], check["finding"]) for check in checks}


def test_the_doctor_lists_the_former_names_of_an_agents_files(tmp_path: Path) -> None:
    checks = run_doctor(tmp_path, FORMER, PLAYBOOK)
    verdict, finding = checks["trader keys"]
    file = tmp_path / "trader" / "agent.yaml"
    assert verdict == "ok"
    assert finding.endswith(" Former names keep working.")
    for sentence in (
        f"{file} line 4: `guardrails` is now called `limits`.",
        f"{file} line 10: `refresh_params` is now called `refresh_arguments`.",
        f"{file} line 16: `params` is now called `arguments`.",
        f"{file} line 18: `type: watch` is now written `type: files`.",
        "nightly.yaml line 2: `with` is now called `arguments`.",
    ):
        assert finding.count(sentence) == 1, sentence
    assert finding.count(" line ") == 5


def test_the_doctor_lists_no_keys_where_none_has_a_former_name(tmp_path: Path) -> None:
    checks = run_doctor(tmp_path, PRESENT, PLAYBOOK.replace("with", "arguments"))
    assert "trader" in checks
    assert "trader keys" not in checks
