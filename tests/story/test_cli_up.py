"""`halter up`, `on` and `off` as a person types them, in processes of their own."""

import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from halter.testing.postgres import throwaway_cluster
from tests.story.test_cli_talk import Person, Terminal, until

SLEEPS = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 1h, reason: all quiet}}]\n"
RUNS = "autonomy: {enabled: true}\n"
LINE = re.compile(r"\d\d:\d\d:\d\d (\S+) +(.+)")


class Up:
    """Unattended agents in a process of their own, and what it shows."""

    begun: ClassVar[list["Up"]] = []
    command: ClassVar[tuple[str, ...]] = ("up",)

    def __init__(self, person: Person, *words: str) -> None:
        self.program = person.begins(*self.command, *words, stdin=subprocess.DEVNULL)
        self.seen: list[str] = []
        self.begun.append(self)

    def until(self, *texts: str) -> str:
        """Read until some line has held each of these texts, in whatever order; return the last such line."""
        assert self.program.stdout is not None
        missing, line = set(texts), ""
        while missing:
            line = self.program.stdout.readline().decode()
            assert line, (self.seen, self.program.communicate()[1])
            self.seen.append(line.rstrip("\n"))
            missing -= {text for text in missing if text in line}
        return line

    def ends(self, by: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """End it; return its exit code and its standard error."""
        self.program.send_signal(by)
        body, content = self.program.communicate(timeout=30)
        self.seen += body.decode().splitlines()
        assert b"Traceback" not in content, content.decode()
        return self.program.returncode, content.decode()

    def read_lines(self) -> list[str]:
        """Return the shown lines without their times."""
        return [" ".join(match.groups()) if (match := LINE.match(line)) else line for line in self.seen]


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[Person]:
    person = Person(tmp_path)
    person.writes(SLEEPS * 9, RUNS)
    yield person
    while Up.begun:
        # Whatever failed, no program outlives its test.
        with Up.begun.pop().program as program:
            program.kill()


def test_the_view_shows_the_money_then_of_turns_and_sleeps_and_ends_in_silence(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    assert up.ends() == (130, "")
    texts = up.read_lines()
    forecast = texts.pop(2)
    assert forecast.startswith("desk Unattended, it spends at most $")
    assert forecast.endswith(" in thirty days: its own turns, bounded by every cap.")
    assert texts[:6] == [
        "Stop with Ctrl-C; the next start continues.",
        "desk It may spend at most $1.00 a session and $5.00 a day, and all agents together $20.00 a day.",
        "desk Messages, webhooks and watched folders cannot raise that: it is all that its caps leave.",
        "desk desk-1 starts.",
        "desk-1 turn 1 begins",
        "desk-1 turn 1 ends, $0.00: sleep 1h (all quiet)",
    ]
    assert texts[6].startswith("desk-1 sleeps 1h, until ")
    (row,) = ada.looks("sessions")
    assert (row["session"], row["state"], row["owner"]) == ("desk-1", "SLEEPING", "")


def test_the_next_start_resumes_the_session_of_a_stopped_process(ada: Person) -> None:
    first = Up(ada, str(ada.agent))
    first.until("sleeps")
    assert first.ends(signal.SIGTERM)[0] == 130
    second = Up(ada, str(ada.agent))
    second.until("desk-1 resumes (SLEEPING).")
    second.ends()
    assert len(ada.looks("sessions")) == 1


def test_programs_get_one_object_a_line(ada: Person) -> None:
    up = Up(ada, str(ada.agent), "--json")
    up.until('"session_parked"')
    assert up.ends() == (130, "")
    objects = [json.loads(line) for line in up.seen]
    names = [each["name"] for each in objects]
    assert names[:5] == ["told", "told", "told", "told", "session_started"]
    assert "autonomy:turn_started" in names
    assert "autonomy:turn_completed" in names
    (result,) = [each for each in objects if each["name"] == "autonomy:turn_completed"]
    assert (result["stream"], result["facts"]["yielded"]["reason"]) == ("session:desk-1", "all quiet")


def test_a_broken_agent_is_reported_and_the_others_run(ada: Person) -> None:
    (ada.home / "broken").mkdir()
    (ada.home / "broken" / "agent.yaml").write_text("name: broken\nmodle: x\n")
    (ada.home / "still").mkdir()
    (ada.home / "still" / "agent.yaml").write_text("name: still\nmodel: reflex\nreflex: [{say: hi}]\n")
    up = Up(ada, "broken", "nowhere", "still", str(ada.agent))
    up.until("sleeps")
    code, text = up.ends()
    assert code == 130
    assert "broken/agent.yaml line 2: `modle` is not a key" in text
    assert "nowhere" in text
    assert (
        "still has nothing to run unattended. Set `autonomy: {enabled: true}`, or add a schedule, a watch or a webhook"
        in text
    )
    code, output, text = ada.types("up", "broken", "nowhere", "still")
    assert code == 3
    assert output == "Stop with Ctrl-C; the next start continues.\n"
    assert text.endswith("No agent can run. Fix one of the problems above, and start again.\n")


def test_off_stops_what_runs_elsewhere_and_on_begins_the_next_session(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    code, text, _ = ada.types("off", "desk", "--reason", "enough")
    assert (code, text) == (0, "desk is off; stopped desk-1. `halter on desk` starts a new session.\n")
    up.until("desk-1 ended: HALTED, external_halt", "desk is switched off. Run `halter on desk`.")
    code, text, _ = ada.types("on", str(ada.agent))
    assert (code, text.splitlines()[-1]) == (0, "desk is on: it runs where `halter up` has its folder.")
    up.until("desk-2 starts.", "sleeps")
    assert ada.looks("off", "desk") == {"agent": "desk", "on": False, "known": True, "stopped": ["desk-2"]}
    up.until("desk-2 ended: HALTED, external_halt")
    up.ends()
    again = Up(ada, str(ada.agent))
    again.until("desk is switched off. Run `halter on desk`.")
    again.ends()


def test_an_agent_whose_file_broke_can_be_switched_off_by_its_name(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    (ada.agent / "agent.yaml").write_text("}")
    ada.agent.rename(ada.home / "desk")
    assert ada.looks("off", "desk")["stopped"] == ["desk-1"]
    up.until("desk-1 ended: HALTED, external_halt")
    up.ends()


def test_a_name_that_is_not_known_is_refused_with_the_nearest(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    up.ends()
    for word, name in (("on", "desc"), ("off", "deks")):
        code, _, text = ada.types(word, name)
        assert code == 2
        assert f"There is no agent {name!r}: did you mean `desk`?" in text
    assert ada.types("off", "no/where")[0] == 2
    assert ada.types("off", "")[0] == 2


def test_no_agent_switches_agents(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    ada.environ["HALTER_PERSON"] = "agent:desk"
    for word in ("on", "off"):
        code, _, text = ada.types(word, "desk")
        assert code == 1
        assert f"Only a person can switch an agent {word}" in text
    ada.environ["HALTER_PERSON"] = "ada"
    assert ada.looks("sessions")[0]["state"] == "SLEEPING"
    up.ends()


def test_a_chat_says_that_the_agent_runs_unattended_and_reaches_it(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    code, text, _ = ada.types("chat", str(ada.agent), given=b"is the door locked?\n")
    assert code == 0
    assert "desk also runs unattended, in desk-1 (SLEEPING, next turn in 59m" in text
    assert "Your messages here reach it" in text
    # What it hears stands in one stream, that it wakes in another: either may be shown first.
    up.until("message: ada says in the chat", "wakes, by message", "turn 2 begins")
    up.ends()
    kinds = {row["kind"] for row in ada.looks("sessions")}
    assert kinds == {"chat", "autonomous"}


def test_what_needs_a_person_is_shown_with_the_command_to_type(ada: Person) -> None:
    ada.writes(f"- calls: [{{tool: wipe, arguments: {{path: old.txt}}}}]\n{SLEEPS}", RUNS)
    up = Up(ada, str(ada.agent))
    line = up.until("Needs you: ")
    decision = line.partition("halter approve ")[2].split()[0]
    assert ada.types("approve", decision)[0] == 0
    up.until("ada says approve")
    assert "1 call" in up.until("turn 1 ends")
    up.ends()


def test_a_second_up_says_where_the_agent_runs_already(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    again = Up(ada, str(ada.agent))
    text = again.until("Already running: ")
    assert f"halter up {up.program.pid} on " in text
    assert f"kill {up.program.pid}" in text
    code, output, _ = ada.types("status")
    assert (code, "2 of" in output, f"up {up.program.pid} on" in " ".join(output.split())) == (0, False, True)
    again.ends()
    up.ends()


def test_after_a_kill_the_next_up_does_not_say_that_the_dead_process_runs_the_agent(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    up.program.send_signal(signal.SIGKILL)
    up.program.wait()
    assert ada.looks("status")["agents"][0]["alive"] is False
    again = Up(ada, str(ada.agent))
    again.until("desk-1")
    again.ends()
    assert not [line for line in again.seen if "Already running" in line]


BUSY = "- calls: [{tool: yield, arguments: {mode: continue}}]\n"
TIRELESS = "autonomy: {enabled: true, max_consecutive_turns: 1000, token_budget_per_hour: 0, idle_timeout: 0}\n"


def test_an_agent_does_not_wait_for_whoever_reads_what_is_shown(ada: Person) -> None:
    ada.writes(BUSY * 400, TIRELESS)
    up = Up(ada, str(ada.agent))
    assert up.program.stdout is not None
    fcntl.fcntl(up.program.stdout, fcntl.F_SETPIPE_SZ, 4096)
    # So much is never written into such a pipe before anybody reads it.
    until(lambda: _turns(ada) > 200)
    code, _ = up.ends()
    assert code == 130
    # Each turn is two lines.
    assert len(up.seen) < 2 * 200


def _turns(person: Person) -> int:
    code, text, _ = person.types("show", "desk-1", "--json")
    return sum(event["kind"] == "turn_ended" for event in json.loads(text)) if code == 0 else 0


def test_whoever_stops_reading_ends_it(ada: Person) -> None:
    ada.writes(BUSY * 400, TIRELESS)
    up = Up(ada, str(ada.agent))
    up.until("turn 1 ends")
    assert up.program.stdout is not None
    up.program.stdout.close()
    up.program.stdout = None
    assert up.program.wait(timeout=30) == 141


def test_a_narrow_terminal_shows_it_between_words(ada: Person) -> None:
    ada.environ["COLUMNS"] = "40"
    terminal = Terminal(ada, "up", str(ada.agent))
    text = terminal.until("sleeps 1h") + terminal.until("\n")
    os.killpg(terminal.program.pid, signal.SIGINT)
    assert terminal.leaves() == 130
    lines = text.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 40
    assert "turn 1 begins" in text


def test_the_help_has_a_group_for_unattended_agents(ada: Person) -> None:
    text = ada.types("--help")[1]
    panels = [text.index(title) for title in ("Run ", "Run unattended", "Inspect", "Control", "Trust")]
    assert panels == sorted(panels)
    output = text[text.index("Run unattended") : text.index("Inspect")]
    commands = ["up", "worker", "serve", "hook", "proxy", "gateway", "on", "off"]
    assert re.findall(r"^│ (\w+) ", output, re.MULTILINE) == commands


def read_checks(person: Person, *words: str) -> dict[str, Any]:
    code, text, _ = person.types("doctor", *words, "--json")
    return {"code": code, **{check["name"]: (check["verdict"], check["finding"]) for check in json.loads(text)}}


def test_the_doctor_reports_switches_and_fields_that_nothing_writes(ada: Person) -> None:
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    up.ends()
    assert read_checks(ada)["autonomy"] == ("ok", "desk is on, by ada.")
    (ada.agent / "agent.yaml").write_text(
        f"name: desk\nmodel: scripted\nscript: replies.yaml\n{RUNS}hot_state: {{fields: {{cash: {{}}}}}}\n"
    )
    fields = read_checks(ada, str(ada.agent))
    assert fields["desk"][0] == "warning"
    assert "Nothing writes the field `cash`" in fields["desk"][1]
    assert fields["code"] == 0
    (ada.agent / "agent.yaml").write_text("nam: desk\n")
    assert read_checks(ada, str(ada.agent))["code"] == 1


def test_sessions_and_show_say_when_a_sleeping_session_wakes(ada: Person) -> None:
    ada.writes(SLEEPS.replace("reason: all quiet", "wake_early_if: [message]"), RUNS)
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    up.ends()
    assert re.search(r"in 59m\d+s \(.*\), or by message", " ".join(ada.types("sessions")[1].split()))
    text = " ".join(ada.types("show", "desk-1", "--events")[1].split())
    assert "turn 1 ends: sleep 1h" in text
    assert re.search(r"sleeps 1h, until .*\d\d:\d\d:\d\d, or by message", text)


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres_binaries")
def test_a_server_that_goes_away_is_reported_and_waited_for_and_so_is_its_return(ada: Person) -> None:
    with throwaway_cluster() as cluster:
        ada.environ["HALTER_STORE"] = cluster.url
        up = Up(ada, str(ada.agent))
        up.until("sleeps")
        cluster.stop_hard()
        assert up.program.stderr is not None
        texts = map(bytes.decode, up.program.stderr)
        assert re.match(r".*PostgreSQL at 127\.0\.0\.1:\d+ .* Retrying\.", next(texts))
        cluster.start()
        assert "Store available again; resuming.\n" in texts
        assert ada.types("off", "desk")[0] == 0
        up.until("desk is switched off")
        assert up.ends() == (130, "")
