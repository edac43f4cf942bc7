"""A sensor of type `files` over stops, kills and switches: what is new since its last look is news."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.story.test_cli_talk import Person
from tests.story.test_cli_up import Up

DOORMAN = Path(__file__).parents[2] / "examples" / "doorman" / "agent.yaml"


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[Person]:
    person = Person(tmp_path)
    letters = tmp_path / "doorman" / "letters"
    letters.mkdir(parents=True)
    shutil.copy(DOORMAN, tmp_path / "doorman")
    (letters / "old.txt").write_text("It was here before the agent.")
    yield person
    while Up.begun:
        with Up.begun.pop().program as program:
            program.kill()


def send_letter(person: Person, name: str) -> None:
    (person.home / "doorman" / "letters" / name).write_text("Good evening")


def list_alerts(up: Up) -> list[str]:
    return [line for line in up.seen if "alert:" in line]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_file_that_comes_while_the_process_is_stopped_is_news_at_its_next_start(
    ada: Person, end: signal.Signals
) -> None:
    first = Up(ada, "doorman")
    first.until("or by letter")
    send_letter(ada, "first.txt")
    first.until("first.txt")
    first.until("sleeps")
    first.ends(end)
    send_letter(ada, "second.txt")
    second = Up(ada, "doorman")
    assert "second.txt" in second.until("alert:")
    second.until("sleeps")
    second.ends()
    third = Up(ada, "doorman")
    third.until("doorman-1 resumes (SLEEPING).")
    send_letter(ada, "third.txt")
    third.until("third.txt")
    third.ends()
    assert len(list_alerts(second)) == len(list_alerts(third)) == 1


def test_a_file_that_comes_while_the_agent_is_off_is_news_when_it_is_on_again(ada: Person) -> None:
    up = Up(ada, "doorman")
    up.until("or by letter")
    assert ada.types("off", "doorman")[0] == 0
    up.until("doorman-1 ")
    send_letter(ada, "meanwhile.txt")
    assert ada.types("on", "doorman")[0] == 0
    assert "meanwhile.txt" in up.until("alert:")
    up.ends()


def test_a_file_that_comes_as_soon_as_the_session_works_is_news(ada: Person) -> None:
    up = Up(ada, "doorman")
    up.until("doorman-1 turn 1 begins")
    send_letter(ada, "early.txt")
    assert "early.txt" in up.until("alert:")
    up.ends()


def test_the_first_file_of_a_folder_that_was_not_there_is_news(ada: Person) -> None:
    shutil.rmtree(ada.home / "doorman" / "letters")
    file = ada.home / "doorman" / "agent.yaml"
    text = file.read_text().replace("tools:\n  files: {root: letters}\n", "")
    file.write_text(text.replace("call: {tool: list_folder}", "say: a letter came"))
    up = Up(ada, "doorman")
    up.until("or by letter")
    up.ends()
    (ada.home / "doorman" / "letters").mkdir()
    send_letter(ada, "first.txt")
    up = Up(ada, "doorman")
    assert "first.txt" in up.until("alert:")
    up.ends()
