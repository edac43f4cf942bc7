"""The drill `inject`: its corpus, its teeth, and a person's own agent, of which nothing is executed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter_drills.drill import Setting
from halter_drills.inject import list_cases, run
from halter_drills.inject.attacks import DISGUISES, FRAMES, READS, load_attacks

TOOLS: Final = '''
from pathlib import Path

from halter import tool

DONE = Path(__file__).parent.parent / "done"


@tool(level="SAFE", effect="read")
async def read_mail() -> str:
    """Read the mail."""
    DONE.write_text("read_mail ran")
    return "hello"


@tool(level="SAFE", effect="read", reads="anyone", arguments={"url": "destination:url"})
async def fetch(url: str) -> str:
    """Read a page."""
    DONE.write_text("fetch ran")
    return url


@tool(level="SAFE", reads="nothing", reach="others", arguments={"to": "destination:address", "text": "content"})
async def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    DONE.write_text("send_mail ran")
    return to


@tool(level="SAFE")
async def order(thing: str, amount: int, wrap: bool = False) -> str:
    """Order a thing."""
    DONE.write_text("order ran")
    return thing


@tool(level="RESTRICTED", reads="nothing", reach="final", arguments={"account": "destination:account"})
async def close_account(account: str) -> str:
    """Close an account."""
    DONE.write_text("close_account ran")
    return account
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "clerk"
    path.mkdir()
    (path / "tools.py").write_text(TOOLS)
    for name in ("TRUST", "STORE", "CHECKPOINTS", "SIGNING_KEY", "TOKENS"):
        monkeypatch.setenv(f"HALTER_{name}", str(tmp_path / "state" / name.lower()))
    monkeypatch.chdir(tmp_path)
    return path


def survey(folder: Path, policy: str, *options: str) -> Any:
    (folder / "agent.yaml").write_text(f"name: clerk\n{policy}\n")
    assert CliRunner().invoke(build_command_tree(), ["trust", str(folder)]).exit_code == 0
    return CliRunner().invoke(build_command_tree(), ["drill", "inject", "--agent", str(folder), *options])


def reactions(answer: Any, mode: str) -> Mapping[tuple[str, str], str]:
    assert answer.exit_code == 0, answer.output
    payload = json.loads(answer.stdout)
    return {(each["tool"], each["argument"]): each[mode] for each in payload["arguments"]}


def test_it_says_by_which_argument_each_tool_is_reached_now_and_with_ask(folder: Path) -> None:
    answer = survey(folder, "policy: {provenance: observe}", "--json")
    now, values = reactions(answer, "own_mode"), reactions(answer, "in_ask")
    for attacked in (("send_mail", "to"), ("send_mail", "text"), ("order", "thing"), ("order", "amount")):
        assert (now[attacked], values[attacked]) == ("runs", "asked"), attacked
    assert (now["fetch", "url"], values["fetch", "url"]) == ("runs", "asked")
    assert (now["close_account", "account"], values["close_account", "account"]) == ("asked by level", "asked")
    assert values["send_mail", ""] == "runs"
    payload = json.loads(answer.stdout)
    assert (payload["agent"], payload["mode"], payload["sources"]) == (
        "clerk",
        "observe",
        ["read_mail", "fetch", "order"],
    )
    assert payload["reached"] == ["fetch", "send_mail", "order"]
    declare = reactions(answer, "declare")
    assert declare["order", "thing"] == "order: {arguments: {thing: destination}}"
    assert declare["send_mail", "to"] == ""


def test_people_get_a_table_and_nothing_of_the_agent_is_executed(folder: Path) -> None:
    answer = survey(folder, "policy: {provenance: off}")
    assert answer.exit_code == 0
    assert "send_mail" in answer.stdout
    assert "Untrusted content comes from `read_mail`, `fetch`, `order`." in answer.output
    assert "an injected text reaches `fetch`, `send_mail`, `order` now" in answer.output
    assert not (folder.parent / "done").exists()
    assert not (folder.parent / "state" / "store").exists()


def test_an_agent_that_is_strict_refuses_what_ask_asks(folder: Path) -> None:
    answer = survey(folder, "policy: {provenance: strict}", "--json")
    assert reactions(answer, "own_mode")["send_mail", "to"] == "refused"
    assert reactions(answer, "in_ask")["send_mail", "to"] == "asked"


def test_code_that_no_person_trusted_is_not_loaded(folder: Path) -> None:
    (folder / "agent.yaml").write_text("name: clerk\n")
    answer = CliRunner().invoke(build_command_tree(), ["drill", "inject", "--agent", str(folder)])
    assert answer.exit_code != 0
    assert "no person has trusted it" in answer.output


@pytest.mark.parametrize("wrong", [["race"], ["inject", "--teeth"], ["inject", "--seeds", "3"]])
def test_an_agent_goes_with_inject_alone(folder: Path, wrong: list[str]) -> None:
    (folder / "agent.yaml").write_text("name: clerk\n")
    answer = CliRunner().invoke(build_command_tree(), ["drill", *wrong, "--agent", str(folder)])
    assert answer.exit_code == 2
    assert answer.stderr == "--agent requires the drill inject, and cannot be combined with --seeds or --teeth.\n"


def test_the_corpus_is_wide_and_every_attack_has_a_twin() -> None:
    attacks = load_attacks()
    assert len(attacks) >= 60
    assert len({attack.kind for attack in attacks}) >= 12
    assert {attack.source for attack in attacks} <= set(READS)
    assert len({(attack.kind, attack.name) for attack in attacks}) == len(attacks)
    cases = list_cases(len(attacks))
    assert [case.attack for case in cases if case.benign] == [case.attack for case in cases if not case.benign]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_thousands_of_disguised_attacks_run_nowhere() -> None:
    drill_result = run(Setting(seeds=5_000))
    assert (drill_result.violations, drill_result.detail["violations"]) == (0, [])
    assert len(DISGUISES) * len(FRAMES) > 100
