"""Evals: cases under one cap, what counts as failed, how a run is held against the last one, and recorded cases."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from halter import Agent, tool
from halter.cli.commands import build_command_tree
from halter.config.trust import AgentCode, digest_folder
from halter.config.yaml_reader import load_bytes
from halter.core.errors import ConfigError, HalterError
from halter.core.messages import Prompt, Reply, Text, ToolCall
from halter.core.usage import ModelName, Usage
from halter.runtime.assembly.folder_code import open_trust, require_trusted
from halter.settings import read_settings
from halter.testing.evals import EvalFile, MakeAgent, add_case, divide_cap, parse_evals, run_evals
from halter.testing.models import FunctionModel, Said
from tests.story.test_cli_talk import Person


def file(text: str) -> EvalFile:
    return parse_evals(load_bytes(text.encode(), "evals.yaml"))


@tool(level="SAFE", effect="read")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(level="RESTRICTED", cost=0.01)
def send(to: str) -> str:
    """Send a letter."""
    return f"sent to {to}"


def last_words(prompt: Prompt) -> str:
    return "".join(part.text for part in prompt.messages[0].parts if isinstance(part, Text))


def answers(prompt: Prompt) -> Said:
    """Do what the first message asks: add, send, or repeat it."""
    text, done = last_words(prompt), len(prompt.messages) > 1
    if "add" in text and not done:
        return ToolCall("1", "add", '{"a": 1, "b": 2}')
    if "send" in text and not done:
        return ToolCall("1", "send", '{"to": "bob"}')
    return f"You said: {text}"


async def test_a_program_may_write_its_cap_as_an_exact_amount() -> None:
    agent = Agent("desk", store="memory:", model=FunctionModel(answers), max_cost_usd=Decimal("0.25"))
    assert (await agent.run("hello")).ok


@pytest.mark.parametrize("amount", ["NaN", "Infinity", "-1"])
async def test_a_cap_that_is_no_amount_is_refused(amount: str) -> None:
    agent = Agent("desk", store="memory:", model=FunctionModel(answers), max_cost_usd=Decimal(amount))
    with pytest.raises(ConfigError, match="max_cost_usd"):
        await agent.run("hello")


def maker(tmp_path: Path, caps: list[Decimal] | None = None, model: Any = None) -> MakeAgent:
    def make(cap: Decimal, waits: Any) -> Agent:
        if caps is not None:
            caps.append(cap)
        return Agent(
            "desk",
            store=tmp_path / "evals.db",
            model=model or FunctionModel(answers),
            tools=[add, send],
            max_cost_usd=cap,
            waits=waits,
            environ={"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
        )

    return make


async def test_each_expectation_is_checked_and_a_failure_says_which(tmp_path: Path) -> None:
    cases = file(
        """\
max_cost_usd: 1.00
cases:
  - {name: finishes, input: hello}
  - {name: contains, input: hello, expect: {contains: [YOU SAID], lacks: [goodbye], matches: "said: h"}}
  - {name: calls, input: add it, expect: {calls: [add], avoids: [send]}}
  - {name: equals, input: hello, expect: {equals: Hello.}}
  - {name: lacks, input: hello, expect: {lacks: [HELLO]}}
  - {name: misses, input: hello, expect: {calls: [add]}}
  - {name: avoids, input: add it, expect: {avoids: [add]}}
"""
    )
    evals = await run_evals(cases, maker(tmp_path))
    assert [(case.name, case.passed, case.why) for case in evals] == [
        ("finishes", True, ""),
        ("contains", True, ""),
        ("calls", True, ""),
        ("equals", False, "The answer is not “Hello.”."),
        ("lacks", False, "The answer contains “HELLO”."),
        ("misses", False, "add was not called."),
        ("avoids", False, "add was called."),
    ]
    assert len({case.session for case in evals}) == len(evals)


async def test_a_case_that_waits_for_a_person_fails_and_the_others_go_on(tmp_path: Path) -> None:
    cases = file("max_cost_usd: 1\ncases:\n  - {name: asks, input: send it}\n  - {name: says, input: hello}\n")
    eval_outcome, says = await run_evals(cases, maker(tmp_path))
    assert not eval_outcome.passed
    assert eval_outcome.why.startswith("The session waits for a person: ")
    assert says.passed


async def test_a_case_may_expect_the_question_that_a_session_asks(tmp_path: Path) -> None:
    cases = file(
        "max_cost_usd: 1\ncases:\n  - {name: asks, input: send it, expect: {asks: [send]}}\n"
        "  - {name: says, input: hello, expect: {asks: [send]}}\n"
        "  - {name: asks another, input: send it, expect: {asks: [add]}}\n"
        "  - {name: asks too early, input: send it, expect: {asks: [send], calls: [add]}}\n"
    )
    outcomes = await run_evals(cases, maker(tmp_path))
    assert [outcome.passed for outcome in outcomes] == [True, False, False, False]
    assert outcomes[1].why == "No approval of `send` was asked for."
    assert outcomes[2].why.endswith(" If it should ask, expect that: `asks: [send]`.")
    assert outcomes[3].why == "add was not called."


class Dear(FunctionModel):
    """Does as its function says, for a price."""

    name = ModelName("openai", "gpt-5-mini")

    async def ask(self, prompt: Prompt, permit: Any, on_text: Any = None) -> Reply:
        reply = await super().ask(prompt, permit, on_text)
        return msgspec.structs.replace(reply, usage=Usage(1_000, 1_000))


async def test_a_case_that_waits_or_raises_says_what_it_cost(tmp_path: Path) -> None:
    def raises(prompt: Prompt) -> Said:
        if len(prompt.messages) > 1:
            raise HalterError("The provider's key is gone.")
        return answers(prompt)

    text = "max_cost_usd: 1\ncases:\n  - {name: one, input: %s it}\n"
    (waits,) = await run_evals(file(text % "send"), maker(tmp_path, model=Dear(answers)))
    (broke,) = await run_evals(file(text % "add"), maker(tmp_path, model=Dear(raises)))
    assert waits.why.startswith("The session waits for a person: ")
    assert broke.why == "The provider's key is gone."
    assert all(Decimal("0.002") <= case.cost_usd < Decimal("0.02") and case.session for case in (waits, broke))


async def test_a_judge_that_raises_fails_its_case_which_keeps_its_cost(tmp_path: Path) -> None:
    def raises(prompt: Prompt) -> Said:
        raise HalterError("The judge's key is gone.")

    cases = file("max_cost_usd: 1\njudge_model: a:b\ncases:\n  - {name: one, input: x, expect: {judge: Good.}}\n")
    (case,) = await run_evals(cases, maker(tmp_path, model=Dear(answers)), maker(tmp_path, model=Dear(raises)))
    assert case.why == "The judge gave no verdict: The judge's key is gone."
    assert case.cost_usd > Decimal("0.002")
    assert case.session


async def test_all_cases_together_never_cost_more_than_their_cap(tmp_path: Path) -> None:
    def adds(prompt: Prompt) -> Said:
        return ToolCall(str(len(prompt.messages)), "add", '{"a": 1, "b": 2}')

    lines = "".join(f"  - {{name: c{number}, input: add it}}\n" for number in range(8))
    cases, caps = file(f"max_cost_usd: 0.04\nparallel: 8\ncases:\n{lines}"), list[Decimal]()
    evals = await run_evals(cases, maker(tmp_path, caps, Dear(adds)))
    assert sum(caps) <= Decimal("0.04")
    assert not any(case.passed for case in evals)
    assert Decimal(0) < sum(case.cost_usd for case in evals) <= Decimal("0.04")


def test_the_cap_is_divided_and_what_a_case_has_of_its_own_comes_first() -> None:
    cases = file(
        "max_cost_usd: 1\ncases:\n  - {name: a, input: x, max_cost_usd: 0.4}\n  - {name: b, input: x}\n"
        "  - {name: c, input: x}\n"
    )
    assert divide_cap(cases) == [400_000, 300_000, 300_000]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_cost_usd: 1\ncases: []\n", "no cases"),
        ("max_cost_usd: none\ncases: [{name: a, input: x}]\n", "need a common cap"),
        ("cases: [{name: a, input: x}]\n", "max_cost_usd"),
        ("max_cost_usd: 1\ncases: [{name: a, input: x, max_cost_usd: 2}]\n", "exceeds this amount"),
        ("max_cost_usd: 1\ncases: [{name: a, input: x}, {name: a, input: y}]\n", "earlier case"),
        ('max_cost_usd: 1\ncases: [{name: a, input: x, expect: {matches: "("}}]\n', "not a regular expression"),
        ("max_cost_usd: 1\ncases: [{name: a, input: x, expect: {judge: polite}}]\n", "judge_model"),
        ("max_cost_usd: 1\ncases: [{name: a, input: x, expects: {}}]\n", "expects"),
    ],
)
def test_a_file_that_could_not_work_is_refused_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        file(text)


async def test_a_judge_decides_and_is_paid_from_the_case(tmp_path: Path) -> None:
    cases = file(
        "max_cost_usd: 1\njudge_model: openai:gpt-5-mini\ncases:\n"
        "  - {name: good, input: hello, expect: {judge: It repeats the words.}}\n"
        "  - {name: bad, input: hello, expect: {judge: It is in French.}}\n"
        "  - {name: wrong, input: hello, expect: {equals: x, judge: It repeats the words.}}\n"
    )
    texts: list[str] = []

    def verdict(prompt: Prompt) -> Said:
        texts.append(last_words(prompt))
        met = "repeats" in texts[-1]
        return ToolCall("1", "final_answer", msgspec.json.encode({"value": {"met": met, "why": "no French"}}).decode())

    judge_costs: list[Decimal] = []
    judge = maker(tmp_path, judge_costs, FunctionModel(verdict))
    good, bad, wrong = await run_evals(cases, maker(tmp_path), judge)
    assert (good.why, good.passed, bad.passed, wrong.passed) == ("", True, False, False)
    assert bad.why == "The judge: no French"
    assert len(texts) == 2, "what failed by itself is not judged"
    assert all(cap <= Decimal("0.07") for cap in judge_costs)


AGENT = "name: desk\nmodel: scripted\nscript: replies.yaml\n"


@pytest.fixture
def halter(tmp_path: Path) -> Any:
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "agent.yaml").write_text(AGENT)
    (desk / "replies.yaml").write_text("- text: Good evening.\n")
    environment = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
    }

    def types(*words: str) -> Result:
        return CliRunner().invoke(
            build_command_tree(), [word.replace("~", str(tmp_path)) for word in words], env=environment
        )

    return types


def test_a_recorded_session_becomes_a_case_and_a_run_is_held_against_the_last(halter: Any, tmp_path: Path) -> None:
    session = msgspec.json.decode(halter("run", "~/desk", "Hello.", "--json").stdout)["session"]
    assert halter("eval", "add", session, "~/desk", "--name", "greets").exit_code == 0
    text = (tmp_path / "desk" / "evals.yaml").read_text()
    assert "name: greets" in text
    assert "equals: Good evening." in text
    result = halter("eval", "add", session, "~/desk", "--name", "greets")
    assert result.exit_code != 0
    assert "already" in result.output

    first = halter("eval", "~/desk")
    assert first.exit_code == 0, first.output
    assert "1 of 1 cases passed" in first.output
    assert "First run." in first.output

    (tmp_path / "desk" / "replies.yaml").write_text("- text: Go away.\n")
    second = halter("eval", "~/desk", "--json")
    payload = msgspec.json.decode(second.stdout)
    assert second.exit_code == 1
    assert [(case["name"], case["passed"], case["before"]) for case in payload["cases"]] == [
        ("greets", False, "passed")
    ]
    third = halter("eval", "~/desk")
    assert third.exit_code == 1
    assert "FAILED" in third.output
    assert "nothing changed" in third.output
    assert Path(payload["store"]).is_file()
    shown = halter("sessions", "--store", payload["store"], "--json")
    assert [row["session"] for row in msgspec.json.decode(shown.stdout)] == [payload["cases"][0]["session"]]
    assert "Nothing needs you" in halter("inbox").output


WIPES = """- calls: [{tool: look}, {tool: wipe, arguments: {path: old.txt}}]
- text: Done.
"""


def test_a_recorded_session_that_was_approved_becomes_a_case_that_passes_and_its_agent_still_starts(
    tmp_path: Path,
) -> None:
    ada = Person(tmp_path)
    ada.writes(WIPES)
    with ada.begins("run", str(ada.agent), "Tidy up.", "--json") as program:
        while not (decisions := ada.looks("inbox")):
            pass
        assert ada.types("approve", decisions[0]["decision"])[0] == 0
        session = msgspec.json.decode(program.communicate(timeout=60)[0])["session"]
    code, output, _ = ada.types("eval", "add", session, str(ada.agent), "--json")
    assert (code, msgspec.json.decode(output)["case"]["expect"]) == (0, {"calls": ["look"], "asks": ["wipe"]})
    code, output, error = ada.types("eval", str(ada.agent))
    assert code == 0, (output, error)
    assert "1 of 1 cases passed" in output


def test_a_folder_that_was_trusted_with_its_cases_by_an_earlier_version_is_still_trusted(tmp_path: Path) -> None:
    folder, settings = tmp_path / "desk", read_settings({"HALTER_TRUST": str(tmp_path / "trust.json")}, tmp_path)
    folder.mkdir()
    for name, text in {"agent.yaml": AGENT, "tools.py": "", "evals.yaml": "max_cost_usd: 1\ncases: []\n"}.items():
        (folder / name).write_text(text)
    former = AgentCode(folder).former_digest()
    assert former != digest_folder(folder)
    open_trust(settings).trust(folder, former, "ada", 0)
    assert require_trusted(settings, folder).has("tools.py")
    (folder / "evals.yaml").write_text("cases: []\n")
    with pytest.raises(ConfigError, match="no person has trusted"):
        require_trusted(settings, folder)


def test_a_folder_without_cases_is_told_how_to_make_one(halter: Any) -> None:
    result = halter("eval", "~/desk")
    assert result.exit_code != 0
    assert "halter eval add SESSION FOLDER" in result.output


def test_a_file_that_cannot_be_read_or_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    case = {"name": "greets", "input": "Hello."}
    with pytest.raises(ConfigError, match=r"Cannot write .*none.evals\.yaml: No such file"):
        add_case(tmp_path / "none" / "evals.yaml", case)
    (tmp_path / "evals.yaml").write_bytes(b"max_cost_usd: 1\ncases:\n  - {name: a, input: \xff}\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        add_case(tmp_path / "evals.yaml", case)


def test_the_cases_run_with_the_model_that_is_named(halter: Any, tmp_path: Path) -> None:
    folder = tmp_path / "desk"
    text = (folder / "agent.yaml").read_text()
    (folder / "agent.yaml").write_text(f"{text}reflex: [{{say: By rules.}}]\n")
    cases = "max_cost_usd: 1\ncases: [{name: one, input: Hello., expect: {equals: By rules.}}]\n"
    (folder / "evals.yaml").write_text(cases)
    assert "FAILED" in halter("eval", "~/desk").output
    assert "1 of 1 cases passed" in halter("eval", "~/desk", "--model", "reflex").output
