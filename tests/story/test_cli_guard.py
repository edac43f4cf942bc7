"""What a person types at agents that the guard holds back: real commands on a session that a real playbook began."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import Result
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.config.playbook_files import read_playbook
from halter.core.clock import HOUR
from halter.core.events import CallStarted, DecisionAsked, SessionParked
from halter.core.ids import FLEET, SessionId, WorkerId
from halter.core.money import Caps, Spender, make_legs
from halter.core.ports import Draft, Write
from halter.core.rows import DecisionRow
from halter.core.vocabulary import State
from halter.guard.call_answer import ApprovalRequired
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.session_start import begin_playbook, resume_playbook
from halter.settings import read_settings
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold

Halter = Callable[..., Result]


AGENT: Final = """
name: clerk
limits: {max_cost_usd: 0.10, on_cap: ask}
"""
TOOLS: Final = '''
from halter.tools.function_tool import tool


@tool(level="RESTRICTED")
def send(to: str, text: str) -> str:
    """Send a letter."""
    return f"sent {text} to {to}"


@tool(level="RESTRICTED")
def run(argv: list[str]) -> str:
    """Run a command."""
    return " ".join(argv)


@tool(level="SAFE", effect="read", cost=0.25)
def study(page: str) -> str:
    """Read a page very thoroughly."""
    return f"read {page}"
'''
LETTER: Final = "- call: send\n  arguments: {to: bob, text: hello}\n"
COMMANDS: Final = (
    "- call: run\n  arguments: {argv: [git, status, -s]}\n- call: run\n  arguments: {argv: [git, status, -b]}\n"
)
STUDY: Final = "- call: study\n  arguments: {page: one}\n"


class Died(Exception):
    """The process that played came to its end while it waited for a person."""


class Place:
    """An agent's folder, a store beside it, and the commands that a person types there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HALTER_PERSON": "ada",
            "COLUMNS": "80",
        }
        self.agent = folder / "clerk"
        self.agent.mkdir()
        for name, text in {"agent.yaml": AGENT, "tools.py": TOOLS, "letter.yaml": LETTER}.items():
            (self.agent / name).write_text(text)

    def halter(self, *words: str, typed: str = "", **environ: str) -> Result:
        return CliRunner().invoke(build_command_tree(), list(words), env={**self.environment, **environ}, input=typed)

    def answer(self, *words: str, **options: str) -> str:
        """Type a command that must succeed, and return what it answers."""
        result = self.halter(*words, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.answer(*words, "--json"))

    def on_store(self, job: Callable[[Runtime], Any]) -> Any:
        """Do something on the store by hand, as a process whose leases run out at once."""

        async def main() -> Any:
            async with open_runtime(
                read_settings(self.environment, self.folder), environ=self.environment, lease=1
            ) as app:
                return await job(app)

        return asyncio.run(main())

    def play(self, playbook: str, session: str = "") -> tuple[str, str]:
        """Play until a person is needed; then the process dies. Return the session and the decision."""
        file = self.agent / "letter.yaml"
        file.write_text(playbook)
        self.answer("trust", str(self.agent))
        approvals: list[ApprovalRequired] = []

        def dies(needed: ApprovalRequired, _: State) -> None:
            approvals.append(needed)
            raise Died

        async def job(app: Runtime) -> str:
            async with open_folder_agent(app, self.agent) as ready:
                session_id = SessionId(session) or await begin_playbook(ready, read_playbook(file), {})
                with pytest.raises(Died):
                    await resume_playbook(ready, session_id, lambda _, __: None, dies)
                return session_id

        return self.on_store(job), approvals[0].decision

    def resume(self, session: str) -> Result:
        return self.halter("play", str(self.agent / "letter.yaml"), "--resume", session)

    def results(self, session: str) -> list[str]:
        events = self.json("show", session)
        return [event["body"] for event in events if event["kind"] == "call_settled"]

    async def start_session(self, app: Runtime, *, cost: int = 0, parked: bool = True) -> str:
        """Start a session and leave it, with a call in doubt that holds money or is free."""
        async with open_folder_agent(app, self.agent) as ready:
            session = await begin_playbook(ready, read_playbook(self.agent / "letter.yaml"), {})
        (lease,) = await app.store.claim(WorkerId("dead"), 1, session)
        held = make_legs(Caps(), Spender(session, "clerk"), app.clock.now(), usd=cost)
        event = CallStarted(call=f"{session}.1", tool="send", legs=held, level="RESTRICTED")
        if not parked:
            assert isinstance(await hold(app.ledger, lease, event, b'{"to":"bob"}'), HoldTaken)
        else:
            park = SessionParked(state="SLEEPING", wake_at=app.clock.now() + HOUR)
            await app.store.commit(lifecycle.park_session(lease, f"{session}/park", park))
        return session

    def leave(self, **how: Any) -> str:
        self.answer("trust", str(self.agent))
        return self.on_store(lambda app: self.start_session(app, **how))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_waits_is_shown_with_what_a_yes_and_a_no_do(place: Place) -> None:
    session, decision = place.play(LETTER)
    text = place.answer("inbox")
    assert "clerk wants to send to bob, text hello." in text
    assert "RESTRICTED, risk LOW" in text
    assert '{"text":"hello","to":"bob"}' in text
    assert f"halter deny {decision}" in text
    assert max(map(len, text.splitlines())) <= 80
    (result,) = place.json("inbox")
    assert (result["decision"], result["session"], result["name"]) == (decision, session, "send")
    assert result["shown"] == 'send {"text":"hello","to":"bob"}'


def test_a_plain_yes_lets_exactly_that_call_run(place: Place) -> None:
    session, decision = place.play(LETTER)
    assert "Approved: send of clerk" in place.answer("approve", decision, "--reason", "he waits for it")
    assert place.resume(session).exit_code == 0
    assert place.results(session) == ["sent hello to bob"]
    (result,) = place.json("receipt", session)["decisions"]
    assert (result["verdict"], result["by"], result["reason"], result["used"]) == (
        "approve",
        "ada",
        "he waits for it",
        True,
    )


def test_a_no_is_recorded_with_its_reason_and_nothing_runs(place: Place) -> None:
    session, decision = place.play(LETTER)
    assert "Denied: send of clerk" in place.answer("deny", decision, "--reason", "not today")
    assert place.resume(session).exit_code == 1
    receipt = place.json("receipt", session)
    assert receipt["calls"] == []
    assert [(brake["brake"], brake["code"], brake["sentence"]) for brake in receipt["brakes"]] == [
        ("grants", "approval_denied", "ada denied this call.")
    ]
    assert receipt["decisions"][0]["reason"] == "not today"


@pytest.mark.parametrize("from_file", [True, False])
def test_a_person_can_say_yes_to_other_arguments(place: Place, *, from_file: bool) -> None:
    session, decision = place.play(LETTER)
    edited = place.folder / "edited.json"
    edited.write_text('{"to": "carol", "text": "hi"}')
    if from_file:
        place.answer("approve", decision, "--edit", str(edited))
    else:
        place.answer("approve", decision, "--edit", "-", typed=edited.read_text())
    assert place.resume(session).exit_code == 0
    assert place.results(session) == ["sent hi to carol"]
    assert place.json("receipt", session)["decisions"][0]["verdict"] == "edit"


def test_arguments_with_a_secret_in_plain_are_never_written_down(place: Place) -> None:
    _, decision = place.play(LETTER)
    secret = "correct-horse-battery"
    text = json.dumps({"to": "carol", "text": secret})
    answer = place.halter("approve", decision, "--edit", "-", typed=text, HALTER_SECRET_MAIL=secret)
    assert answer.exit_code == 1
    assert "Use ${secret:NAME} instead" in answer.stderr
    assert secret not in answer.output
    assert len(place.json("inbox")) == 1


@pytest.mark.parametrize(
    ("match", "scope"),
    [("words:argv=git status -*", "agent"), ("words:argv=git status -*", "session"), ("same", "fleet")],
)
def test_always_answers_later_calls_of_the_same_kind_and_no_others(place: Place, match: str, scope: str) -> None:
    session, decision = place.play(COMMANDS)
    payload = place.json("approve", decision, "--always", "--match", match, "--scope", scope, "--for", "1h")
    (rule,) = place.json("rules")
    assert (rule["rule"], rule["by"], rule["scope"], rule["tool"]) == (payload["rule"], "ada", scope, "run")
    if match == "same":
        assert place.play(COMMANDS, session)[1] != decision
        return
    assert place.resume(session).exit_code == 0
    assert place.results(session) == ["git status -s", "git status -b"]
    receipt = place.json("receipt", session)
    assert receipt["rules"] == [payload["rule"]]
    assert {call["decided_by"] for call in receipt["calls"]} == {"ada", f"ada, always, by rule {payload['rule']}"}


def test_a_rule_that_was_ended_answers_nothing(place: Place) -> None:
    session, decision = place.play(COMMANDS)
    rule = place.json("approve", decision, "--always", "--match", "words:argv=git status -*")["rule"]
    text = place.answer("rules")
    assert "where argv is git status -* (* matches part of one word, never an option)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "need approval again" in place.answer("rules", "end", rule[:24])
    assert "ended by ada" in " ".join(place.answer("rules").split())
    assert place.halter("rules", "end", rule).exit_code == 1
    assert place.play(COMMANDS, session)[1] == f"{session}.2/approval"


def test_a_session_at_its_cap_resumes_with_the_cap_that_a_person_sets(place: Place) -> None:
    session, decision = place.play(STUDY)
    text = " ".join(place.answer("inbox").split())
    assert f"clerk needs more money for study than the cap of session:{session} leaves." in text
    assert "--cap AMOUNT" in text
    assert "$0.25" in text
    bare = place.halter("approve", decision)
    sentence = f"session:{session} has reached its cap. Set a new one, as in --cap 2.50."
    assert (bare.exit_code, sentence in " ".join(bare.stderr.split())) == (2, True)
    low = place.halter("approve", decision, "--cap", "0.05")
    assert (low.exit_code, f"The cap of session:{session} is $0.10. Give a higher one." in low.stderr) == (2, True)
    raised = " ".join(place.answer("approve", decision, "--cap", "1").split())
    command = f"halter run FOLDER --resume {session} or halter play PLAYBOOK --resume {session}"
    sentence = f"Cap of session:{session} is now $1.00. No process runs the session. To continue it: {command}"
    assert raised == sentence
    assert place.resume(session).exit_code == 0
    assert place.results(session) == ["read one"]
    (brake,) = place.json("receipt", session)["brakes"]
    assert (brake["brake"], brake["scope"]) == ("budget", f"session:{session}")
    assert "$0.25" in brake["sentence"]


def test_raising_the_cap_answers_the_question_for_more(place: Place) -> None:
    session, _ = place.play(STUDY)
    place.answer("budget", "raise", f"session:{session}", "1", "--reason", "worth it")
    assert [need["kind"] for need in place.json("inbox")] == ["unclaimed"]
    assert place.resume(session).exit_code == 0
    assert place.json("inbox") == []
    (decision,) = place.json("receipt", session)["decisions"]
    assert (decision["about"], decision["verdict"], decision["by"]) == ("cap_raise", "approve", "ada")


@pytest.mark.parametrize(("word", "results"), [("approve", 1), ("deny", 2)])
def test_a_person_says_whether_a_call_in_doubt_was_done(place: Place, word: str, results: int) -> None:
    session = place.leave(parked=False)
    _, decision = place.play(LETTER, session)
    text = " ".join(place.answer("inbox").split())
    assert "clerk started to send to bob, and the outcome is unknown." in text
    assert '{"to":"bob"}' in text
    assert f"The call was not made; it is retried: halter deny {decision}" in text
    assert "Recorded: the call of send was" in place.answer(word, decision)
    if word == "approve":
        assert place.resume(session).exit_code == 0
    else:
        place.answer("approve", place.play(LETTER, session)[1])
        assert place.resume(session).exit_code == 0
    assert len(place.results(session)) == results


def test_a_changed_tool_is_put_before_a_person_and_may_be_used_after_a_yes(place: Place) -> None:
    place.leave()

    async def ask(app: Runtime) -> None:
        event = DecisionAsked(
            decision="clerk/web__get/abc",
            about="changed_tool",
            subject="web__get",
            name="web__get",
            digest="abc",
            expires_at=app.clock.now() + HOUR,
            agent="clerk",
        )
        reads = [(DecisionRow, "clerk/web__get/abc")]
        await app.store.commit(Write(FLEET, "asked", lambda _: [Draft(event, b"web__get: Fetch a page.")], reads))

    place.on_store(ask)
    text = " ".join(place.answer("inbox").split())
    assert "clerk cannot use web__get until you approve it: it is new or has changed." in text
    assert "web__get: Fetch a page." in text
    assert "may use" in place.answer("approve", "clerk/web__get")
    assert place.json("inbox") == []


def test_cancel_ends_a_session_that_nobody_works_on(place: Place) -> None:
    session = place.leave()
    assert "CANCELLED: cancelled" in place.answer("cancel", session[:20], "--reason", "not needed")
    (row,) = place.json("sessions")
    assert (row["state"], row["terminal_reason"]) == ("CANCELLED", "cancelled")
    result = place.halter("cancel", session)
    assert result.exit_code == 1
    assert f"Session {session} has already ended (CANCELLED: cancelled)." in result.stderr
    assert place.resume(session).exit_code == 1


def test_cancel_settles_a_free_call_in_doubt_as_unknown(place: Place) -> None:
    session = place.leave(parked=False)
    assert place.json("cancel", session) == {"subject": session, "done": True, "ended": True}
    receipt = place.json("receipt", session)
    assert (receipt["terminal_reason"], receipt["unknown_calls"]) == ("cancelled", [f"{session}.1"])
    assert "outcome unknown" in " ".join(place.answer("receipt", session).split())


def test_cancel_frees_no_money_that_is_in_doubt_and_says_so(place: Place) -> None:
    session = place.leave(cost=50_000, parked=False)
    answer = place.halter("cancel", session)
    assert answer.exit_code == 1
    assert "$0.05 is held. No new calls will start" in answer.stdout
    (row,) = place.json("sessions")
    assert (row["state"], row["owner"]) == ("PAUSED", "")
    fields = {budget["scope"]: budget["held"] for budget in place.json("budget", "show")["budgets"]}
    assert fields[f"session:{session}"] == 0.05


def process(place: Place, *words: str, **pipes: Any) -> subprocess.Popen[str]:
    """Start a command as a process of its own, whose signals are as from a terminal."""
    command = ["env", "--default-signal", sys.executable, "-m", "halter", *words]
    return subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(place.folder), **_path(), **place.environment},
        text=True,
        **pipes,
    )


def _path() -> Mapping[str, str]:
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}


def test_cancel_ends_a_session_whose_owner_waits_for_a_person(place: Place) -> None:
    place.answer("trust", str(place.agent))
    with process(
        place, "play", str(place.agent / "letter.yaml"), stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as play:
        assert play.stderr is not None
        waits = play.stderr.readline()
        session = re.findall(r"halter approve (\w+)\.1/approval", waits)[0]
        assert "It has ended (CANCELLED: cancelled)." in place.answer("cancel", session)
        text, _ = play.communicate(timeout=30)
    assert play.returncode == 1
    assert "CANCELLED: cancelled." in text


@pytest.mark.parametrize(
    "words",
    [
        ("approve", "{decision}"),
        ("approve", "{decision}", "--always"),
        ("deny", "{decision}"),
        ("cancel", "{session}"),
        ("resume", "agent:clerk"),
        ("rules", "end", "x"),
        ("budget", "raise", "fleet", "99"),
        ("budget", "lower", "fleet", "1"),
    ],
)
def test_an_agent_decides_nothing(place: Place, words: tuple[str, ...]) -> None:
    session, decision = place.play(LETTER)
    before = place.json("show", session)
    texts = [word.format(decision=decision, session=session) for word in words]
    answer = place.halter(*texts, HALTER_AGENT="clerk")
    assert answer.exit_code == 1
    assert "Only a person can" in answer.stderr
    assert "agent:clerk" in answer.stderr
    assert len(place.json("inbox")) == 1
    assert place.json("show", session) == before


def test_an_agent_may_halt(place: Place) -> None:
    place.play(LETTER)
    assert place.halter("halt", "agent:clerk", HALTER_AGENT="clerk").exit_code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--edit", "x", "--always"), "cannot be combined"),
        (("--always", "--cap", "3"), "cannot be combined"),
        (("--for", "7d"), "require --always"),
        (("--match", "same"), "require --always"),
        (("--scope", "fleet"), "require --always"),
        (("--cap", "3"), "does not ask for a cap"),
        (("--cap", "much"), "Invalid amount"),
        (("--edit", "/nowhere/at/all"), "Cannot read '/nowhere/at/all': No such file or directory"),
        (("--edit", "\0"), "Cannot read"),
        (("--always", "--for", "0s"), "needs a positive duration"),
        (("--always", "--for", "x"), "is not a duration"),
        (("--always", "--scope", "world"), "Unknown rule scope 'world'. Use session, agent or fleet"),
        (("--always", "--match", "words"), "Use same"),
        (("--always", "--match", "words:argv="), "Invalid match"),
        (("--always", "--match", "glob:argv=*"), "Invalid match"),
        (("--always", "--match", "words:command=git"), "has no argument 'command'. Its arguments: argv"),
        (("--always", "--match", "words:argv='git"), "is not a valid command line"),
        (("--always", "--match", "words:argv=git"), "does not match the call itself"),
        (("--always", "--match", "words:argv=g*t status -s"), "cannot contain a wildcard"),
        (("--always", "--match", "any:argv", "--match", "words:argv=git status -s"), "appears twice"),
        (("--always", "--match", "any:argv=x"), "Invalid match"),
        (("--always", "--match", "words:argv=svn"), "does not match the call itself"),
        (("--always", "--match", "under:argv=/srv"), "does not match the call itself"),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_a_sentence(
    place: Place, words: tuple[str, ...], sentence: str
) -> None:
    _, decision = place.play(COMMANDS)
    answer = place.halter("approve", decision, *words)
    assert answer.exit_code in {2, 3}, answer.output
    assert sentence in answer.stderr
    assert "Traceback" not in answer.output
    assert len(place.json("inbox")) == 1


@pytest.mark.parametrize("text", ["", "[]", '"x"', "{", "[" * 50_000, '{"a": "' + "x" * 40_000 + '"}', "\x00"])
def test_arguments_that_are_no_json_object_are_a_sentence(place: Place, text: str) -> None:
    _, decision = place.play(LETTER)
    answer = place.halter("approve", decision, "--edit", "-", typed=text)
    assert answer.exit_code == 2
    assert "The arguments in '-'" in answer.stderr


@pytest.mark.parametrize("words", [("--edit", "-"), ("--always",)])
def test_a_question_of_another_kind_takes_a_plain_answer(place: Place, words: tuple[str, ...]) -> None:
    _, decision = place.play(LETTER, place.leave(parked=False))
    answer = place.halter("approve", decision, *words, typed="{}")
    assert answer.exit_code == 2
    assert "is not a pending call" in answer.stderr


def test_a_decision_is_made_once(place: Place) -> None:
    _, decision = place.play(LETTER)
    place.answer("approve", decision)
    result = place.halter("deny", decision)
    assert result.exit_code == 2
    assert "was already answered (approve, by " in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("tail", "{session}"),
        ("audit", "--follow"),
        ("audit", "--follow", "--json"),
        ("audit", "--follow", "--export", "-", "--cursor", "sink"),
    ],
)
def test_a_command_that_follows_ends_when_it_is_interrupted(place: Place, words: tuple[str, ...]) -> None:
    session = place.leave()
    refused, decision = place.play(LETTER)
    place.answer("deny", decision)
    place.resume(refused)
    texts = [word.format(session=session) for word in words]
    with process(place, *texts, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, complaints = following.communicate(timeout=30)
    assert (following.returncode, complaints) == (130, "")
