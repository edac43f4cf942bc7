"""One unique word goes every way by which words come into a store: after erasing, no byte of it is left."""

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import psycopg
import pytest
from psycopg import sql

from halter.config.trust import TrustFile, digest_folder
from tests.docs.pages import ROOT
from tests.story.tasks import ALL_VERBS
from tests.story.test_cli_front import Quick

CANARY = "canary7731"
TOOLS = '''
from halter import tool


@tool(level="SAFE", effect="read")
async def look(at: str = "") -> str:
    """Look."""
    return f"there is something at {at}"


@tool(level="SAFE", effect="read")
async def stumble(over: str) -> str:
    """Stumble."""
    raise ValueError(f"stumbled over {over}")


@tool(level="RESTRICTED")
async def wipe(path: str) -> str:
    """Wipe a file."""
    return f"wiped {path}"
'''
FINDS = r"finds: '(?P<bird>canary\w+)'"
REPLIES = f"""
- when: look after
  {FINDS}
  text: "I look for ${{bird}}."
  calls:
    - {{tool: look, arguments: {{at: "${{bird}}"}}}}
    - {{tool: propose_memory, arguments: {{text: "Remember ${{bird}}."}}}}
    - {{tool: propose_precedent, arguments: {{kind: case, summary: "It was ${{bird}}."}}}}
    - {{tool: emit_finding, arguments: {{title: "${{bird}}", severity: low}}}}
    - {{tool: run_skill, arguments: {{skill: check, input: "${{bird}}"}}}}
- when: wipe
  {FINDS}
  calls: [{{tool: wipe, arguments: {{path: "${{bird}}"}}}}]
- when: stumble
  {FINDS}
  calls:
    - {{tool: stumble, arguments: {{over: "${{bird}}"}}}}
- {{repeat: true, {FINDS}, text: "All is well with ${{bird}}."}}
- {{repeat: true, text: All is well.}}
"""


class Ada(Quick):
    """Somebody whose every word is the canary, and an agent that repeats it."""

    def __init__(self, home: Path, store: str) -> None:
        super().__init__(home)
        self.store = store
        self.environ["HALTER_STORE"] = store
        self.makes("my desk", "desk", ALL_VERBS)
        self.makes("scout", "scout", "")
        skill = self.agent / "skills" / "check"
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text("---\nname: check\ndescription: Checks.\n---\nCheck it.\n")

    def makes(self, folder: str, name: str, text: str) -> None:
        path = self.home / folder
        path.mkdir()
        (path / "agent.yaml").write_text(f"name: {name}\nmodel: scripted\nscript: replies.yaml\n{text}")
        (path / "replies.yaml").write_text(REPLIES)
        (path / "tools.py").write_text(TOOLS)

    def trusts(self) -> None:
        trust = TrustFile(self.home / "config" / "halter" / "trust.json")
        for folder in (self.agent, self.home / "scout"):
            trust.trust(folder, digest_folder(folder), "ada", 0)

    def waits_for(self, text: str) -> str:
        while not (results := [result["decision"] for result in self.looks("inbox") if result["kind"] == text]):
            time.sleep(0.1)
        return results[0]

    def erases_all(self) -> None:
        for row in self.looks("sessions"):
            if row["ended_at"] is None:
                assert self.types("cancel", row["session"])[0] == 0
            assert self.types("erase", "--session", row["session"], "--yes")[0] == 0

    def find_canaries(self) -> list[str]:
        """Name the places in which the canary still stands, byte for byte."""
        if "://" in self.store:
            return list(_left_on_server(self.store))
        files = sorted(Path(self.store).parent.glob("halter.db*"))
        return [file.name for file in files if CANARY.encode() in file.read_bytes()]


def _left_on_server(store: str) -> Iterator[str]:
    url, _, text = store.partition("?")
    (schema,) = parse_qs(text)["schema"]
    with psycopg.connect(url) as server:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = %s"
        for (table,) in server.execute(query, [schema]).fetchall():
            composed = sql.SQL("SELECT row_to_json(t)::text FROM {} t").format(sql.Identifier(schema, table))
            needles = (CANARY, CANARY.encode().hex())
            for (row,) in server.execute(composed).fetchall():
                if any(needle in row for needle in needles):
                    yield f"{table}: {row}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def ada(tmp_path: Path, request: pytest.FixtureRequest) -> Ada:
    sqlite = request.param == "sqlite"
    ada = Ada(tmp_path, str(tmp_path / "halter.db") if sqlite else request.getfixturevalue("postgres_schema_url"))
    ada.trusts()
    return ada


def test_no_byte_is_left_of_what_was_said_found_proposed_asked_and_answered(ada: Ada) -> None:
    assert ada.types("run", str(ada.agent), f"look after {CANARY}")[0] == 0
    with ada.begins("run", str(ada.agent), f"wipe {CANARY}") as program:
        decision = ada.waits_for("approval")
        assert CANARY in ada.types("inbox")[1]
        assert ada.types("approve", decision)[0] == 0
        assert CANARY.encode() in program.communicate(timeout=60)[0]
    text = ada.types("chat", str(ada.agent), given=f"say {CANARY}\n@scout find {CANARY}\n".encode())[1]
    assert text.count(CANARY) == 2
    memory = ada.waits_for("proposal")
    assert f"Remember {CANARY}" in ada.types("inbox")[1]
    assert ada.types("approve", memory)[0] == 0
    assert ada.find_canaries()
    ada.erases_all()
    assert ada.find_canaries() == []
    assert ada.types("verify")[0] == 0
    assert "(erased)" in ada.types("inbox")[1]


def test_what_a_message_planned_is_erased_when_it_has_ended(ada: Ada) -> None:
    ada.types("run", str(ada.agent), f"every day at 9 look after the {CANARY}")
    assert ada.types("approve", ada.waits_for("schedule"))[0] == 0
    (plan,) = ada.looks("schedules")
    ada.types("erase", "--messages", "--yes")
    assert CANARY in ada.types("schedules", "--json")[1]
    assert ada.types("schedules", "cancel", plan["trigger"])[0] == 0
    assert "of 1 message outside of sessions" in ada.types("erase", "--messages", "--yes")[1]
    assert ada.types("verify")[0] == 0


def test_what_stays_of_an_erased_session_are_the_facts_that_the_page_of_limits_names(ada: Ada) -> None:
    ada.types("run", str(ada.agent), f"stumble over {CANARY}")
    ada.erases_all()
    assert ada.find_canaries()
    page = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    for text in ("the error of a call that failed", "why a call was refused", "the reason of a yes, a no, a halt"):
        assert text in page
