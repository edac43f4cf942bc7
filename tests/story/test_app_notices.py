"""A notice to the app is read where a person looks: its subject and its text, shortened only at a terminal."""

import json
from pathlib import Path

import pytest

from halter.dashboard.home import build_story
from halter.operations import queries
from halter.operations.actor import Actor, Principal
from halter.operations.report import NightSummary
from halter.runtime.runtime import open_runtime
from halter.settings import read_settings
from tests.story.test_cli_talk import Person

SUBJECT = "The pump is hot"
TEXT = "It has 91 °C.\nSwitch it off, or it breaks. " + "Oil is low. " * 500 + "Call 0123."


@pytest.fixture
def ada(tmp_path: Path) -> Person:
    person = Person(tmp_path)
    notices = [{"subject": SUBJECT, "text": TEXT}, {"subject": "Done", "text": "All is well now."}, {"text": "Bye."}]
    calls = [{"calls": [{"tool": "notify", "arguments": notice}]} for notice in notices]
    person.writes(json.dumps([*calls, {"text": "Told."}]), "phases: {tell: [notify]}\n")
    return person


def test_the_inbox_shows_the_text_of_a_notice_and_where_to_read_a_long_one(ada: Person) -> None:
    assert ada.types("run", str(ada.agent), "Look at the pump.")[0] == 0
    (session,) = ada.looks("sessions")
    lines = ada.types("inbox")[1].splitlines()
    (subject_at,) = [number for number, line in enumerate(lines) if line.endswith(f"desk: {SUBJECT}")]
    shown, command = lines[subject_at + 1 : subject_at + 3]
    assert shown.startswith("  It has 91 °C. Switch it off, or it breaks. Oil is low.")
    assert len(shown) < 320
    assert command == f"  Read it all with: halter show {session['session']} --events"
    assert "Call 0123." in ada.types("show", session["session"], "--events")[1]
    (done_at,) = [number for number, line in enumerate(lines) if line.endswith("desk: Done")]
    assert lines[done_at + 1] == "  All is well now."
    assert sum("Bye." in line for line in lines) == 1


def test_json_has_the_whole_text_of_a_notice(ada: Person) -> None:
    ada.types("run", str(ada.agent), "Look at the pump.")
    (session,) = ada.looks("sessions")
    notices = {need["sentence"]: need for need in ada.looks("inbox") if need["kind"] == "notice"}
    assert notices[SUBJECT]["text"] == TEXT
    assert (notices[SUBJECT]["session"], notices[SUBJECT]["decision"]) == (session["session"], "")
    assert ada.types("inbox", "--check")[0] == 0, "A notice is news, and needs nobody."


async def test_home_shows_the_text_of_a_notice_and_leads_to_its_session(ada: Person) -> None:
    ada.types("run", str(ada.agent), "Look at the pump.")
    async with open_runtime(read_settings(ada.environ, ada.home), environ=ada.environ) as app:
        notices = await queries.read_notices(Actor(app, Principal("ada", "viewer")))
    lines = build_story(NightSummary(since=0), [], notices)
    (line,) = [line for line in lines if line.text.startswith(f"desk: {SUBJECT}")]
    assert line.text.startswith(f"desk: {SUBJECT}. It has 91 °C. Switch it off")
    assert line.path == f"/session/{line.link}"
