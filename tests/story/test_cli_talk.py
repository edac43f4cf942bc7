"""`halter run` and `halter chat` as a person types them: in a pipe, at a terminal, and with a finger on Ctrl-C."""

import json
import os
import pty
import select
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from halter.config.trust import TrustFile, digest_folder
from tests.processes import Halter

REPLIES = """\
- text: I look.
  calls: [{tool: look, arguments: {at: "the 雪 ☃"}}]
- text: All is well.
"""
TOOLS = '''\
from halter import tool


@tool(level="SAFE", effect="read")
async def look(at: str = "") -> str:
    """Look."""
    return f"nothing at {at}"


@tool(level="RESTRICTED")
async def wipe(path: str) -> str:
    """Wipe a file."""
    return f"wiped {path}"
'''


class Person:
    """Somebody with a home folder of their own, and an agent in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agent = home / "my desk"
        self.environ = {
            **os.environ,
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_STATE_HOME": str(home / "state"),
            "HALTER_PERSON": "ada",
            "COLUMNS": "200",
            "TERM": "dumb",
        }

    def writes(self, replies: str = REPLIES, more: str = "") -> None:
        """Write the agent, and trust it."""
        self.agent.mkdir(exist_ok=True)
        (self.agent / "agent.yaml").write_text(f"name: desk\nmodel: scripted\nscript: replies.yaml\n{more}")
        (self.agent / "replies.yaml").write_text(replies)
        (self.agent / "tools.py").write_text(TOOLS)
        trust = TrustFile(self.home / "config" / "halter" / "trust.json")
        trust.trust(self.agent, digest_folder(self.agent), "ada", 0)

    def begins(self, *words: str, stdin: int = subprocess.PIPE) -> Halter:
        return Halter(words, env=self.environ, cwd=self.home, stdin=stdin)

    def types(self, *words: str, given: bytes = b"") -> tuple[int, str, str]:
        with self.begins(*words) as program:
            body, content = program.communicate(given, timeout=60)
        assert b"Traceback" not in content, content.decode()
        return program.returncode, body.decode(), content.decode()

    def looks(self, *words: str) -> Any:
        return json.loads(self.types(*words, "--json")[1])


@pytest.fixture
def ada(tmp_path: Path) -> Person:
    person = Person(tmp_path)
    person.writes()
    return person


def test_the_answer_goes_to_standard_output_and_all_else_beside_it(ada: Person) -> None:
    code, text, output = ada.types("run", str(ada.agent), "look around")
    assert (code, text) == (0, "I look.\nAll is well.\n")
    (session,) = ada.looks("sessions")
    assert output.splitlines() == [
        f"Session {session['session']}",
        '  ok       look {"at":"the 雪 ☃"}  nothing at the 雪 ☃',
        f"COMPLETED, $0.00. Receipt: halter show {session['session']} --receipt",
    ]


def test_files_are_given_with_the_first_message_and_erased_with_the_session(ada: Person) -> None:
    secret = "sk-ant-api03-" + "Zq7" * 31
    (ada.home / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (ada.home / "notes.txt").write_text(f"The cat is grey. {secret}")
    (ada.home / "memo.ogg").write_bytes(b"OggS")
    given = ("--file", "cat.png", "--file", "notes.txt", "--file", "memo.ogg#seconds=9")
    code, text, _ = ada.types("run", str(ada.agent), "17 * 23", *given)
    assert (code, text) == (0, "I look.\nAll is well.\n"), "What comes with files is answered by the model."
    (session,) = ada.looks("sessions")
    output = ada.types("show", session["session"], "--events")[1]
    assert "[cat.png, image/png, 8 bytes]" in output
    assert "The cat is grey." in output
    assert "[memo.ogg, audio/ogg, 4 bytes]" in output
    assert secret not in output
    assert ada.types("erase", "--session", session["session"], "--yes")[0] == 0
    assert "The cat is grey." not in ada.types("show", session["session"], "--events")[1]


@pytest.mark.parametrize(
    ("given", "code", "sentence"),
    [
        (("memo.ogg",), 3, "State its seconds, as in memo.ogg#seconds=90"),
        (("thing.bin",), 3, "has the unsupported type"),
        (("nowhere.png",), 3, "nowhere.png: No such file or directory."),
    ],
    ids=["length", "binary", "missing"],
)
def test_a_file_that_cannot_be_given_is_a_sentence(ada: Person, given: Sequence[str], code: int, sentence: str) -> None:
    (ada.home / "memo.ogg").write_bytes(b"OggS")
    (ada.home / "thing.bin").write_bytes(bytes(9))
    exit_code, text, output = ada.types("run", str(ada.agent), "What is it?", "--file", *given)
    assert (exit_code, text) == (code, "")
    assert sentence in " ".join(output.split())
    assert ada.looks("sessions") == []


def test_files_come_with_an_answer_and_with_a_message(ada: Person) -> None:
    (ada.home / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (ada.home / "notes.txt").write_text("The cat is grey.")
    ada.writes("- calls: [{tool: ask_user, arguments: {question: Which cat?}}]\n")
    assert ada.types("run", str(ada.agent), "tidy up")[1] == "? Which cat?\n"
    (session,) = ada.looks("sessions")
    ada.writes("- calls: [{tool: ask_user, arguments: {question: Which colour?}}]\n")
    assert ada.types("run", str(ada.agent), "--resume", session["session"], "this one", "--file", "cat.png")[0] == 0
    assert ada.types("run", str(ada.agent), "--resume", session["session"], "--file", "cat.png")[0] == 2
    code, _, output = ada.types("tell", session["session"], "this one", "--file", "nowhere.png")
    assert (code, "Cannot read nowhere.png" in " ".join(output.split())) == (3, True)
    assert ada.types("tell", session["session"], "this one", "--file", "notes.txt")[0] == 0
    ada.writes("- {when: The cat is grey., text: Grey it is.}\n")
    assert ada.types("run", str(ada.agent), "--resume", session["session"])[:2] == (0, "Grey it is.\n")
    output = ada.types("show", session["session"], "--events")[1]
    assert "[cat.png, image/png, 8 bytes]" in output


def test_the_cap_of_a_day_is_shown_immediately_with_the_command_that_raises_it(ada: Person) -> None:
    """It then sleeps, and a person at the terminal knows why."""
    first = "- {calls: [{tool: look, arguments: {at: here}}], usage: {input_tokens: 19500, output_tokens: 4000}}\n"
    (ada.home / "halter.yaml").write_text("models: {'scripted:script': {price: {input: 1, output: 10}}}\n")
    ada.writes(f"{first}- {{text: All is well.}}\n", "limits: {max_cost_usd: 5, max_cost_usd_per_day: 0.06}\n")
    with ada.begins("run", str(ada.agent), "look around", stdin=subprocess.DEVNULL) as program:
        assert program.stderr is not None
        lines = map(bytes.decode, program.stderr)
        text = next((line for line in lines if "paused" in line), "it ended")
        assert ada.types("budget", "raise", "agent:desk", "3")[0] == 0
        body, _ = program.communicate(timeout=60)
    assert "agent:desk has spent $0.0595 of $0.06 for this day" in text
    assert "To continue now: halter budget raise agent:desk AMOUNT" in text
    assert (program.returncode, body) == (0, b"All is well.\n")
    output = ada.types("budget")[1]
    assert "By model" in output


def test_the_events_of_a_session_are_shown_in_words(ada: Person) -> None:
    ada.types("run", str(ada.agent), "look around")
    (session,) = ada.looks("sessions")
    text = ada.types("show", session["session"], "--events")[1]
    for words in ("turn 1 begins", "look around", 'look {"at":"the 雪 ☃"}', "turn 1 ends", "COMPLETED, completed"):
        assert words in text
    assert '"part"' not in text


def test_programs_get_one_object_and_nothing_beside_it(ada: Person) -> None:
    code, text, output = ada.types("run", str(ada.agent), "-", "--json", given=b"look around\n")
    assert (code, output) == (0, "")
    answer = json.loads(text)
    results = [answer[key] for key in ("state", "terminal_reason", "ok", "text", "steps", "calls", "cost_usd")]
    assert results == ["COMPLETED", "completed", True, "All is well.", 2, 1, 0]


def test_a_run_that_comes_to_a_bad_end_exits_with_one_and_continues_later(ada: Person) -> None:
    ada.writes("- fails: {kind: Rejected, message: The machine is on fire.}\n")
    code, text, output = ada.types("run", str(ada.agent), "look")
    assert (code, text) == (1, "")
    assert "ERROR: Rejected: The machine is on fire." in output
    (session,) = ada.looks("sessions")
    ada.writes("- text: Better now.\n")
    code, text, _ = ada.types("run", str(ada.agent), "--resume", session["session"][:20])
    assert (code, text) == (0, "Better now.\n")
    result = ada.looks("receipt", session["session"])
    turns = [(turn["turn"], turn["why"], turn["steps"]) for turn in result["turns"]]
    assert turns == [(1, "model_error", 0), (2, "ended", 1)]
    shown = ada.types("receipt", session["session"])[1]
    assert "Turns" in shown
    assert "Rejected: The machine is on fire." in shown


def test_a_question_is_printed_with_how_to_answer_it(ada: Person) -> None:
    ada.writes("- calls: [{tool: ask_user, arguments: {question: Which desk?}}]\n")
    code, text, output = ada.types("run", str(ada.agent), "tidy up")
    assert (code, text) == (0, "? Which desk?\n")
    (session,) = ada.looks("sessions")
    assert f"Answer with: halter run '{ada.agent}' --resume {session['session']} \"your answer\"" in output
    ada.writes("- {when: left, text: The left one it is.}\n")
    code, text, _ = ada.types("run", str(ada.agent), "--resume", session["session"], "the left one")
    assert (code, text) == (0, "The left one it is.\n")


GROWING = "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
NO_AGENT = "No agent.yaml found in nowhere."
BOMB = f"name: desk\nmodel: reflex\na: &a [x, x]\n{GROWING}"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("run", "nowhere", "hello"), 2, f"{NO_AGENT} Pass an agent folder, or make one with halter init."),
        (("run", "my desk", ""), 2, 'No task. Pass one, as in halter run FOLDER "message".'),
        (("run", "my desk", "  \n"), 2, 'No task. Pass one, as in halter run FOLDER "message".'),
        (("run", "my desk", "--resume", "nosuch"), 2, "No session begins with 'nosuch'"),
        (("chat", "nowhere"), 2, f"{NO_AGENT} Pass an agent folder, or make one with halter init."),
        (
            ("run", "bomb", "hello"),
            3,
            "bomb/agent.yaml line 3: anchors (`&name`) are not supported; write each value out.",
        ),
        (("run", "untrusted", "hello"), 3, "halter trust untrusted"),
        (("run", "mindless", "hello"), 3, "mindless has no model"),
        (("run", "keyless", "hello"), 3, "ANTHROPIC_API_KEY is not set, and"),
        (("run", "scriptless", "hello"), 3, "agent.yaml line 3: `script` names `gone.yaml`, which is missing"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_a_code(ada: Person, words: Sequence[str], code: int, sentence: str) -> None:
    files = {
        "bomb": BOMB,
        "untrusted": "name: u\nmodel: reflex\nreflex: [{say: hi}]\n",
        "mindless": "name: mindless\n",
        "keyless": "name: k\nmodel: anthropic:claude-sonnet-4-5\n",
        "scriptless": "name: s\nmodel: scripted\nscript: gone.yaml\n",
    }
    for name, text in files.items():
        (ada.home / name).mkdir()
        (ada.home / name / "agent.yaml").write_text(text)
    (ada.home / "untrusted" / "tools.py").write_text(TOOLS)
    ada.environ.pop("ANTHROPIC_API_KEY", None)
    exit_code, output, errors = ada.types(*words)
    assert (exit_code, output) == (code, ""), errors
    assert sentence in errors


def test_a_message_that_no_model_could_read_is_reported_as_too_large(ada: Person) -> None:
    code, text, output = ada.types("run", str(ada.agent), "-", given=b"all work and no play " * 250_000)
    assert (code, text) == (1, "")
    assert "ERROR: TooLarge: the prompt needs about 5,2" in output
    assert len(output) < 1000


def test_an_interrupted_run_says_how_to_continue_and_does(ada: Person) -> None:
    ada.writes("- {text: never, takes: 600s}\n")
    with ada.begins("run", str(ada.agent), "look") as program:
        assert program.stderr is not None
        session = program.stderr.readline().decode().split()[1]
        until(lambda: any(e["kind"] == "request_started" for e in ada.looks("show", session)))
        program.send_signal(signal.SIGINT)
        body, content = program.communicate(timeout=30)
    assert (program.returncode, body) == (130, b"")
    assert f"Continue with: halter run '{ada.agent}' --resume {session}" in content.decode()
    ada.writes("- text: Here I am.\n")
    assert ada.types("run", str(ada.agent), "--resume", session)[:2] == (0, "Here I am.\n")


def test_lines_in_a_pipe_are_a_chat(ada: Person) -> None:
    ada.writes("- {when: hello, text: Hello.}\n- {when: bye, text: Good bye.}\n")
    code, text, output = ada.types("chat", str(ada.agent), given="hello ☃\n\nbye\n/quit\nnot said\n".encode())
    (session,) = ada.looks("sessions")
    assert code == 0
    assert text == f"Session {session['session']}, with desk. Ctrl-D or /quit leaves.\nHello.\nGood bye.\n"
    assert f"--resume {session['session']}" in output
    lines = ada.types("chat", str(ada.agent), "--resume", session["session"], "--json", given=b"hello again")[1]
    assert [json.loads(line)["text"] for line in lines.splitlines()] == ["Hello."]


def test_a_pipe_that_stays_open_does_not_keep_an_interrupted_chat(ada: Person) -> None:
    with ada.begins("chat", str(ada.agent)) as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith(b"Session ")
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=30) == 130


class Terminal:
    """A real terminal, with a program in it."""

    def __init__(self, person: Person, *words: str, text: str = "") -> None:
        self.keys, self.screen = pty.openpty()
        os.write(self.keys, text.encode())
        self.before = termios.tcgetattr(self.screen)
        self.program = Halter(words, env=person.environ, cwd=person.home, terminal=self.screen)
        self.seen = ""

    def until(self, text: str) -> str:
        """Wait for a text; return what was shown before it, and drop both."""
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.keys], [], [], 0.2)[0]:
                self.seen += os.read(self.keys, 10_000).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def types(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def leaves(self) -> int:
        """Wait for the end; the terminal is then as it was."""
        code = self.program.wait(timeout=30)
        after = termios.tcgetattr(self.screen)
        assert (after[0], after[3]) == (self.before[0], self.before[3])
        os.close(self.screen)
        os.close(self.keys)
        return code


def test_a_person_at_a_terminal_says_yes_and_no_in_place(ada: Person) -> None:
    ada.writes(
        "- calls: [{tool: wipe, arguments: {path: old.txt}}]\n- text: It is gone.\n"
        "- calls: [{tool: wipe, arguments: {path: new.txt}}]\n- text: It is still there.\n"
    )
    terminal = Terminal(ada, "chat", str(ada.agent))
    terminal.until("you> ")
    terminal.types("wipe the old one\n")
    assert 'wipe {"path":"old.txt"}' in terminal.until("approve? [y/n] ")
    terminal.types("perhaps\n")
    terminal.until("approve? [y/n] ")
    terminal.types("y\n")
    assert "wiped old.txt" in terminal.until("It is gone.")
    terminal.until("you> ")
    terminal.types("and the new one\n")
    terminal.until("approve? [y/n] ")
    terminal.types("n\n")
    assert "ada denied this call." in terminal.until("It is still there.")
    terminal.until("you> ")
    terminal.types("\x04")
    terminal.until("Continue with: halter chat")
    assert terminal.leaves() == 0
    rows = ada.looks("audit")
    assert sorted(row["outcome"] for row in rows) == ["approval_denied", "ok"]


def test_approve_with_json_at_a_terminal_says_that_it_does_not_ask(ada: Person) -> None:
    terminal = Terminal(ada, "approve", "--json")
    assert terminal.until("inbox --json.").split()[:5] == ["With", "--json", "you", "are", "not"]
    assert terminal.leaves() == 2


def list_outcomes(person: Person) -> list[str]:
    return sorted(row["outcome"] for row in person.looks("audit"))


@pytest.mark.parametrize("typed", ["y\n", "y\ny\nyes\n", "y"])
def test_what_was_typed_before_a_question_was_shown_does_not_answer_it(ada: Person, typed: str) -> None:
    ada.writes("- calls: [{tool: wipe, arguments: {path: old.txt}}]\n- text: It is still there.\n")
    terminal = Terminal(ada, "chat", str(ada.agent))
    terminal.until("you> ")
    terminal.types(f"wipe the old one\n{typed}")
    terminal.until("approve? [y/n] ")
    terminal.types("n\n")
    assert "ada denied this call." in terminal.until("It is still there.")
    terminal.until("you> ")
    terminal.types("\x04")
    assert terminal.leaves() == 0
    assert list_outcomes(ada) == ["approval_denied"]


def test_an_agents_own_question_is_answered_by_what_is_typed_after_it(ada: Person) -> None:
    question = "calls: [{tool: ask_user, arguments: {question: Shall I wipe all?}}]"
    ada.writes(f"- {question}\n- {{when: 'yes', text: I wipe it.}}\n- {{when: 'no', text: I leave it.}}\n")
    terminal = Terminal(ada, "chat", str(ada.agent))
    terminal.until("you> ")
    terminal.types("look after it\nyes\n")
    terminal.until("? Shall I wipe all?")
    terminal.until("Discarded the input typed before this question.")
    terminal.until("you> ")
    terminal.types("no\n")
    terminal.until("I leave it.")
    terminal.until("you> ")
    terminal.types("\x04")
    assert terminal.leaves() == 0


def test_an_approve_that_was_typed_ahead_shows_what_waits_and_agrees_to_nothing(ada: Person) -> None:
    ada.writes("- {repeat: true, text: Well.}\n")
    terminal = Terminal(ada, "chat", str(ada.agent))
    terminal.until("you> ")
    terminal.types("every day at 9 look around\napprove\napprove\n")
    terminal.until("Nothing is scheduled yet.")
    terminal.until("This decision is pending")
    terminal.until("This decision is pending")
    terminal.until("you> ")
    assert ada.looks("schedules") == []
    terminal.types("approve\n")
    terminal.until("Approved")
    terminal.until("you> ")
    terminal.types("\x04")
    assert terminal.leaves() == 0
    assert len(ada.looks("schedules")) == 1


def test_a_yes_that_was_typed_before_the_question_erases_nothing_and_a_pipe_is_nobody_to_ask(ada: Person) -> None:
    ada.writes("- text: Well.\n")
    assert ada.types("run", str(ada.agent), "look around")[0] == 0
    (session,) = ada.looks("sessions")
    words = ("erase", "--session", session["session"])
    code, _, text = ada.types(*words, given=b"y\n")
    assert (code, "Not a terminal. Pass --yes to confirm." in text) == (2, True)
    terminal = Terminal(ada, *words, text="y\n")
    terminal.until("Discarded the input typed before this question.")
    terminal.until("[y/N]: ")
    terminal.types("perhaps\n")
    terminal.until("[y/N]: ")
    terminal.types("n\n")
    terminal.until("Nothing was erased.")
    assert terminal.leaves() == 1
    terminal = Terminal(ada, *words)
    terminal.until("[y/N]: ")
    terminal.types("y\n")
    terminal.until("Erased the bodies of 1 session.")
    assert terminal.leaves() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was_at_the_prompt(ada: Person) -> None:
    terminal = Terminal(ada, "chat", str(ada.agent))
    terminal.until("you> ")
    os.killpg(terminal.program.pid, signal.SIGINT)
    assert terminal.leaves() == 130
    assert ada.looks("sessions") == []


class SlowProvider(ThreadingHTTPServer):
    """An endpoint that starts the answer to a slow request and never ends it; every other one is answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SlowAnswer)
        self.stopped = threading.Event()
        self.prompts: list[Any] = []


class SlowAnswer(BaseHTTPRequestHandler):
    server: SlowProvider

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.prompts.append(payload["messages"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        slow = "slowly" in json.dumps(payload["messages"][-2:])
        self._write({"choices": [{"index": 0, "delta": {"content": "It begins. " * 60 if slow else "Here."}}]})
        if slow:
            self.server.stopped.wait(60)
            return
        self._write({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _write(self, chunk: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 The name is given.
        """Stay silent."""


@pytest.fixture
def provider() -> Iterator[SlowProvider]:
    with SlowProvider() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.stopped.set()
        server.shutdown()
        serving.join()


def test_ctrl_c_ends_the_answer_and_not_the_chat(ada: Person, provider: SlowProvider) -> None:
    (ada.agent / "agent.yaml").write_text(
        "name: desk\nmodel: near:small\n"
        f"providers: {{near: {{base_url: 'http://127.0.0.1:{provider.server_address[1]}/v1'}}}}\n"
    )
    (ada.home / "halter.yaml").write_text("models: {'near:small': {price: {input: 1, output: 1}}}\n")
    trust = TrustFile(ada.home / "config" / "halter" / "trust.json")
    trust.trust(ada.agent, digest_folder(ada.agent), "ada", 0)
    terminal = Terminal(ada, "chat", str(ada.agent))
    terminal.until("you> ")
    terminal.types("read it slowly\n")
    terminal.until("It begins")
    os.killpg(terminal.program.pid, signal.SIGINT)
    terminal.until("A person interrupted the answer.")
    terminal.until("you> ")
    terminal.types("and now\n")
    terminal.until("Here.")
    terminal.until("you> ")
    (row,) = ada.looks("sessions")
    messages = [(message["role"], message["content"]) for message in provider.prompts[-1]]
    assert [role for role, _ in messages] == ["user", "assistant", "user", "user"]
    assert messages[1][1].startswith("It begins. ")
    result = ada.looks("show", row["session"])
    assert [e["facts"]["outcome"] for e in result if e["kind"] == "request_settled"] == ["cancelled", "ok"]
    terminal.types("once more, slowly\n")
    terminal.until("It begins")
    os.killpg(terminal.program.pid, signal.SIGINT)
    terminal.until("you> ")
    os.killpg(terminal.program.pid, signal.SIGINT)
    terminal.until(f"Continue with: halter chat '{ada.agent}' --resume {row['session']}")
    assert terminal.leaves() == 130
    assert ada.looks("sessions")[0]["state"] == "WAITING_FOR_INPUT"


def until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline


SUMMARIZE = "---\nname: summarize\ndescription: Says it in a sentence.\n---\nSay it in one sentence.\n"


def test_a_playbook_with_verbs_is_played_and_says_its_cap_first(ada: Person) -> None:
    path = ada.agent / ".agents" / "skills" / "summarize"
    path.mkdir(parents=True)
    (path / "SKILL.md").write_text(SUMMARIZE)
    step = "{call: run_skill, arguments: {skill: summarize, input: It rains.}}"
    (ada.agent / "steps.yaml").write_text(f"max_cost_usd: 0.05\nsteps: [{step}]\n")
    ada.writes("- {repeat: true, text: Rain.}\n")
    code, text, _ = ada.types("play", str(ada.agent / "steps.yaml"))
    assert code == 0
    first, session, *rest = text.splitlines()
    assert first == "The session may spend at most $0.05."
    assert session.startswith("Session ")
    assert rest[0] == "  ok       run_skill  Rain."


def test_a_playbook_without_a_cap_says_the_cap_of_its_session_before_anything_runs(ada: Person) -> None:
    (ada.agent / "steps.yaml").write_text("- {call: ask, arguments: {what: rain}}\n")
    code, text, output = ada.types("play", str(ada.agent / "steps.yaml"))
    assert (code, text) == (3, "The session may spend at most $1.00.\n")
    assert "no person has trusted its current version" in output
    ada.agent.joinpath("agent.yaml").write_text("name: desk\nlimits: {max_cost_usd: none}\n")
    text = ada.types("play", str(ada.agent / "steps.yaml"))[1]
    assert text == "The session has no cap of its own; the caps of its agent and of the fleet apply.\n"
