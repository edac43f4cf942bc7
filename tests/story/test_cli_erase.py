"""Erasing reaches the messages of people, also those that needed no session, and leaves no trace in the files."""

import asyncio
import json
from pathlib import Path

import pytest

from halter import Guard
from halter.settings import read_settings
from tests.story.test_cli_front import Quick, store_of


@pytest.fixture
def ada(tmp_path: Path) -> Quick:
    person = Quick(tmp_path)
    person.writes("- text: All is well.\n")
    return person


def find_files_with(ada: Quick, canary: bytes) -> list[str]:
    """List the files of the store that still contain a text."""
    files = sorted(store_of(ada).parent.glob("halter.db*"))
    return [file.name for file in files if canary in file.read_bytes()]


def list_sessions(ada: Quick) -> list[str]:
    return [row["session"] for row in json.loads(ada.types("sessions", "--json")[1])]


def test_a_message_that_began_a_session_is_erased_with_it(ada: Quick) -> None:
    assert ada.types("run", str(ada.agent), "look after canary-message-7731")[0] == 0
    assert find_files_with(ada, b"canary-message-7731")
    for session in list_sessions(ada):
        assert ada.types("erase", "--session", session, "--yes")[0] == 0
    assert find_files_with(ada, b"canary-message-7731") == []
    assert ada.types("verify")[0] == 0


def test_a_message_that_needed_no_session_can_be_erased(ada: Quick) -> None:
    ada.types("run", str(ada.agent), "cancel schedule canary-quick-9921")
    assert find_files_with(ada, b"canary-quick-9921")
    code, text, _ = ada.types("erase", "--messages", "--yes")
    assert (code, "1 message outside of sessions" in text) == (0, True)
    assert find_files_with(ada, b"canary-quick-9921") == []
    code, text, _ = ada.types("verify")
    assert code == 0
    assert "1 erased" in text


def test_what_needed_no_session_is_erased_by_age_too_and_only_once(ada: Quick) -> None:
    ada.types("run", str(ada.agent), "cancel schedule canary-old-4410")
    assert "message" not in ada.types("erase", "--older-than", "1d", "--yes")[1]
    assert "1 message outside of sessions" in ada.types("erase", "--older-than", "0s", "--yes")[1]
    assert find_files_with(ada, b"canary-old-4410") == []
    assert "message" not in ada.types("erase", "--older-than", "0s", "--yes")[1]


def test_a_question_that_still_waits_for_a_person_keeps_its_words(ada: Quick) -> None:
    ada.types("run", str(ada.agent), "every day at 9 water the canary-plant-6602")
    ada.types("erase", "--messages", "--yes")
    assert find_files_with(ada, b"canary-plant-6602")
    assert "canary-plant-6602" in ada.types("inbox")[1]


@pytest.mark.parametrize("words", [(), ("--messages", "--older-than", "1d"), ("--session", "x", "--messages")])
def test_what_is_to_be_erased_is_named_in_one_way(ada: Quick, words: tuple[str, ...]) -> None:
    assert ada.types("erase", *words, "--yes")[0] == 2


SECRET = "sk-ant-api03-" + "AAAAbbbbCCCCddddEEEEffffGGGGhhhhIIIIjjjjKKKKllll1234567890"


def test_a_secret_in_an_agents_own_words_does_not_stand_in_the_store(ada: Quick) -> None:
    secret = SECRET
    ada.writes(f"- text: All is well with {secret}.\n", more=f"instructions: Use {secret} for everything.\n")
    assert ada.types("run", str(ada.agent), "look around")[0] == 0
    assert list_sessions(ada)
    assert find_files_with(ada, secret.encode()) == []
    assert ada.types("verify")[0] == 0
    checks = json.loads(ada.types("doctor", str(ada.agent), "--json")[1])
    assert "agent.yaml:4, " in str(checks)
    assert "replies.yaml:1 may contain a secret. Replace it with ${secret:NAME}." in str(checks)
    assert secret not in str(checks)


def test_a_secret_in_the_policy_of_a_playbook_or_a_guard_does_not_stand_in_the_store(ada: Quick) -> None:
    ada.writes(more=f"allowed_models: ['scripted:script', 'acme:{SECRET}']\n")
    (ada.agent / "look.yaml").write_text("- call: look\n")
    assert ada.types("trust", str(ada.agent))[0] == 0
    assert ada.types("play", str(ada.agent / "look.yaml"))[0] == 0
    asyncio.run(run_guarded_session(ada))
    assert len(list_sessions(ada)) == 2
    assert find_files_with(ada, SECRET.encode()) == []


async def run_guarded_session(ada: Quick) -> None:
    settings = read_settings(ada.environ, ada.home)
    policy = {"allowed_models": [f"acme:{SECRET}"]}
    guard = Guard(str(store_of(ada)), "clerk", tools=[], settings=settings, policy=policy)
    async with guard, guard.session("look"):
        """The session has begun, and its definition is in the store."""


def test_a_key_in_the_address_of_a_provider_stays_with_the_fleets_file(ada: Quick) -> None:
    file = ada.home / "halter.yaml"
    address = f"https://models.example/{SECRET}/v1"
    file.write_text(f"mode: ASSIST\nproviders: {{acme: {{wire: openai, base_url: '{address}'}}}}\n")
    ada.environ["HALTER_FLEET"] = str(file)
    code, _, text = ada.types("run", str(ada.agent), "look around")
    assert code == 0, text
    assert json.loads(ada.types("policy", "--json")[1])["policy"] == {"mode": "ASSIST", "providers": {}}
    assert find_files_with(ada, SECRET.encode()) == []
