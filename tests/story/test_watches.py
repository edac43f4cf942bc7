"""Watches: what counts as a new document, what does not, and that nothing of it stops the watch."""

import os
from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import ItemQuarantined, ItemReleased, ItemSeen, RunsDelayed, RunStarted
from halter.guard.halts import cancel, halt, resume
from halter.loop.concurrency import watch_changes
from halter.runtime.switches import turn_off, turn_on
from halter.runtime.trigger_runner import MAX_DOCUMENTS_PER_CHECK, record_trigger_events
from halter.testing.fakes import Crash
from halter.testing.world import World
from tests.documents.test_extract import pdf, protected
from tests.story.tasks import WORK, Office, all_is_well, paper, watch

DONE = "- {repeat: true, text: That is done.}\n"
SLOW = "- {repeat: true, takes: 30s, text: That is done.}\n"


def office_of(world: World, home: Path, text: str = "", script: str = DONE, head: str = WORK) -> Office:
    office = Office(world, home)
    office.reviewer(watch(text), script, head=head)
    return office


async def list_names(office: Office) -> list[str]:
    return sorted(item.name for item in await office.items() if not item.ignored)


async def test_a_file_that_grows_is_taken_when_it_has_come_to_rest(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, "debounce: 10s")
    office.start(tmp_path / "clerk")
    await world.advance(SECOND)
    for size in range(1, 6):
        office.drop("a.txt", "word " * size)
        await world.advance(6 * SECOND)
        assert await office.items() == []
    await world.advance(20 * SECOND)
    (item,) = await office.items()
    assert (item.name, item.size) == ("a.txt", 25)
    assert await office.states() == {"COMPLETED": 1}


async def test_a_document_is_known_by_its_content_and_not_by_its_name(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    file = office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert len(await office.runs()) == 1
    renamed = file.rename(file.parent / "b.txt")
    await world.advance(MINUTE)
    assert len(await office.runs()) == 1
    renamed.write_text("other words")
    await world.advance(MINUTE)
    assert len(await office.runs()) == 2
    renamed.write_text("the first words")
    await world.advance(MINUTE)
    assert len(await office.runs()) == 2
    assert [event.name for event in await office.told_of(ItemSeen)] == ["a.txt", "b.txt"]


async def test_after_a_restart_nothing_counts_as_new_that_was_known(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    office.drop("a.txt", "the first words")
    process = office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    process.cancel()
    office.drop("b.txt", "words of the night")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert [event.name for event in await office.told_of(ItemSeen)] == ["a.txt", "b.txt"]
    assert await office.states() == {"COMPLETED": 2}


async def test_existing_documents_are_ignored_at_the_start_if_the_file_says_so(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, "existing: false")
    office.drop("old.txt", "old words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await office.runs() == []
    office.drop("new.txt", "new words")
    await world.advance(MINUTE)
    assert [event.item for event in await office.told_of(RunStarted)] == [
        item.item for item in await office.items() if item.name == "new.txt"
    ]


@pytest.mark.parametrize("commit", range(1, 7))
def test_what_lies_there_at_the_beginning_is_left_alone_wherever_the_first_start_crashes(
    commit: int, tmp_path: Path
) -> None:
    async def life(world: World) -> None:
        office = office_of(world, tmp_path, "existing: false")
        office.drop("old.txt", "old words")
        office.drop("older.txt", "older words")
        office.start(tmp_path / "clerk")
        await world.clock.sleep(MINUTE)
        assert await office.runs() == []

    with World(crash=Crash(commit, "after")) as world:
        world.run(world.survive(life))


WRITES = """
- finds: 'The document is order.txt'
  unless: wrote
  calls: [{tool: write_file, arguments: {path: answer.txt, text: "wrote this myself"}}]
- {repeat: true, text: That is done.}
"""


async def test_what_an_agent_writes_itself_starts_nothing(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path, "mode: FULL\n")
    office.reviewer(
        watch(), WRITES, head=f"{WORK}mode: FULL\npolicy: {{provenance: observe}}\ntools: {{files: {{root: inbox}}}}\n"
    )
    office.drop("order.txt", "please answer")
    office.start(tmp_path / "clerk")
    await world.advance(2 * MINUTE)
    assert (tmp_path / "clerk" / "inbox" / "answer.txt").read_text() == "wrote this myself"
    assert await office.states() == {"COMPLETED": 1}
    assert [(item.name, item.ignored) for item in await office.items()] == [("order.txt", 0), ("answer.txt", 1)]


async def test_a_folder_that_vanishes_is_reported_once_and_watched_again_when_it_is_back(
    world: World, tmp_path: Path
) -> None:
    office = office_of(world, tmp_path)
    file = office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    file.unlink()
    file.parent.rmdir()
    await world.advance(5 * MINUTE)
    texts = [sentence for _, sentence in office.told if "clerk/papers" in sentence]
    assert len(texts) == 1
    assert texts[0].endswith(" Retrying.")
    file.parent.mkdir()
    office.drop("a.txt", "the first words")
    office.drop("b.txt", "more words")
    await world.advance(MINUTE)
    assert [event.name for event in await office.told_of(ItemSeen)] == ["a.txt", "b.txt"]
    assert await office.states() == {"COMPLETED": 2}


async def test_a_collection_can_be_watched_in_the_place_of_a_folder(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path)
    watches = "watches: [{name: papers, collection: contracts, prompt: Look., debounce: 2s}]\n"
    reads = "- {when: The document is, calls: [{tool: retrieve_chunks, arguments: {file: a.md}}]}\n"
    office.reviewer(f"collections: {{contracts: {{path: inbox, pattern: '*.md'}}}}\n{watches}", reads + DONE, head=WORK)
    office.drop("a.md", "the first words")
    office.drop("a.txt", "other words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await list_names(office) == ["a.md"]
    assert await office.states() == {"COMPLETED": 1}
    assert await office.calls("clerk.papers-1") == [("retrieve_chunks", "ok")]


async def test_hidden_files_and_those_that_the_pattern_does_not_name_are_left_alone(
    world: World, tmp_path: Path
) -> None:
    office = office_of(world, tmp_path, "pattern: '*.txt'")
    for name in (".secret.txt", "a.txt", "a.md", "~$b.doc"):
        office.drop(name, f"the words of {name}")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await list_names(office) == ["a.txt"]


UNREADABLE: dict[str, tuple[str, bytes, str]] = {
    "a password": ("a.pdf", protected(pdf("secret"), "made up", "AES-128"), "a.pdf is protected by a password"),
    "a broken PDF": ("a.pdf", pdf("one")[:200], "a.pdf is damaged, or is not a PDF"),
    "nothing": ("a.txt", b"", "a.txt is empty"),
    "noise": ("a.txt", bytes(range(256)) * 20, "a.txt contains bytes that are not text"),
    "a broken Word file": ("a.docx", b"PK", "a.docx is damaged, or does not match its suffix"),
    "another kind": ("a.odt", b"PK", "a.odt has an unsupported type"),
}


@pytest.mark.parametrize("case", UNREADABLE)
async def test_a_document_that_cannot_be_read_is_left_to_a_person_with_a_sentence(
    world: World, tmp_path: Path, case: str
) -> None:
    name, data, sentence = UNREADABLE[case]
    office = office_of(world, tmp_path, "debounce: 0s")
    office.drop(name, data)
    await wait_until_quarantined(world, office)
    (event,) = await office.told_of(ItemQuarantined)
    assert event.sentence.startswith(sentence)
    assert event.attempts == 0
    office.drop("good.txt", "good words")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 1}


async def wait_until_quarantined(world: World, office: Office) -> None:
    """Start the process, and let no virtual time pass while another real one reads a document."""
    with world.clock.outside():
        async with watch_changes(world.journal) as event:
            office.start(office.home / "clerk")
            while True:
                event.clear()
                if await office.told_of(ItemQuarantined):
                    return
                await event.wait()


async def test_a_document_of_hundreds_of_megabytes_is_not_read_in(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    os.truncate(office.drop("huge.txt", b""), 200 << 20)
    office.drop("good.txt", "good words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    (event,) = await office.told_of(ItemQuarantined)
    assert event.sentence.startswith("huge.txt has 209,715,200 bytes; the limit is 52,428,800.")
    assert await office.states() == {"COMPLETED": 1}


async def test_odd_encodings_are_read_as_what_they_are(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    office.drop("wide.txt", "Der Verkäufer haftet unbegrenzt.".encode("utf-16"))
    office.drop("old.txt", "Der Käufer haftet unbegrenzt.".encode("latin-1"))
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 2}
    for item in await office.items():
        (chunk,) = await world.journal.chunks(item.item)
        assert "äufer haftet" in chunk.text


ODD = ["new\nline.txt", 'quo"te.txt', "it's.txt", "\x1b[31mred.txt", "\u202egnp.txt", "a b.txt", "-rf.txt", "ü.txt"]


async def test_odd_names_of_documents_do_no_harm(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    for number, name in enumerate(ODD):
        office.drop(name, f"the words of {number}")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": len(ODD)}
    texts = [part.text for prompt in office.prompts("clerk") for message in prompt.messages for part in message.parts]
    assert not any("\x1b" in text for text in texts)
    assert not any("new\nline" in text for text in texts)
    assert not any("\x1b" in item.name or "\n" in item.name for item in await office.items())


async def test_a_document_whose_name_is_no_text_is_worked_on_as_any_other(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    for number in (b"\xff", b"\xfe"):
        (tmp_path / "clerk" / "inbox" / os.fsdecode(b"caf" + number + b".txt")).write_text(f"the words of {number!r}")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 2}
    assert {item.name for item in await office.items()} == {"caf\ufffd.txt"}


async def test_many_documents_are_taken_in_little_by_little(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    for number in range(3 * MAX_DOCUMENTS_PER_CHECK):
        office.drop(f"{number}.txt", f"the words of {number}")
    office.start(tmp_path / "clerk")
    await world.advance(5 * MINUTE)
    kinds = [event.kind for event in await office.happened()]
    assert kinds[: kinds.index("run_started")].count("item_seen") == MAX_DOCUMENTS_PER_CHECK
    assert await office.states() == {"COMPLETED": 3 * MAX_DOCUMENTS_PER_CHECK}


async def test_off_stops_what_runs_and_on_resumes_it(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, script=SLOW)
    office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(10 * SECOND)
    assert await turn_off(office.app, "clerk") == ["clerk.papers-1"]
    office.drop("b.txt", "other words")
    await world.advance(5 * MINUTE)
    assert await office.states() == {"HALTED": 1}
    assert len(await office.items()) == 1
    await turn_on(office.app, "clerk")
    await world.advance(5 * MINUTE)
    assert await office.states() == {"HALTED": 1, "COMPLETED": 2}
    assert [item.attempts for item in await office.items()] == [1, 1]


@pytest.mark.parametrize("scope", ["trigger:clerk/papers", "agent:clerk", "fleet"])
async def test_a_halt_stops_what_runs_and_says_why_the_rest_waits(world: World, tmp_path: Path, scope: str) -> None:
    office = office_of(world, tmp_path, "max_parallel: 1", SLOW)
    office.drop("a.txt", "the first words")
    office.drop("b.txt", "other words")
    office.start(tmp_path / "clerk")
    await world.advance(10 * SECOND)
    await world.store.commit(halt(scope, "ada", "enough"))
    await world.advance(5 * MINUTE)
    assert await office.states() == {"HALTED": 1}
    assert (await office.trigger()).delayed == f"{scope} was halted by ada. Run: halter resume {scope}"
    assert [event.why for event in await office.told_of(RunsDelayed)][-1] == "halted"
    await world.store.commit(resume(scope, "ada", "go on"))
    await world.advance(5 * MINUTE)
    assert await office.states() == {"HALTED": 1, "COMPLETED": 2}
    assert (await office.trigger()).delayed == ""
    await all_is_well(world)


async def test_a_document_whose_session_a_person_cancels_is_left_to_them(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, script=SLOW)
    office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(10 * SECOND)
    await world.store.commit(cancel("clerk.papers-1", "ada", "no"))
    await world.advance(5 * MINUTE)
    (event,) = await office.told_of(ItemQuarantined)
    assert event.sentence == "a.txt: a person cancelled clerk.papers-1."
    assert await office.states() == {"CANCELLED": 1}


async def test_no_more_documents_are_worked_on_at_once_than_the_file_says(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, "max_parallel: 2", SLOW)
    for number in range(5):
        office.drop(f"{number}.txt", paper(number))
    office.start(tmp_path / "clerk")
    text = 0
    for _ in range(40):
        await world.advance(5 * SECOND)
        text = max(text, sum(row.ended_at is None for row in await office.runs()))
    assert text == 2
    assert await office.states() == {"COMPLETED": 5}


async def test_two_processes_on_one_store_start_each_document_once(world: World, tmp_path: Path) -> None:
    office, other = office_of(world, tmp_path), Office(world, tmp_path)
    for number in range(6):
        office.drop(f"{number}.txt", paper(number))
    office.start(tmp_path / "clerk")
    other.start(tmp_path / "clerk")
    await world.advance(3 * MINUTE)
    assert await office.states() == {"COMPLETED": 6}
    assert [event.attempt for event in await office.told_of(RunStarted)] == [1] * 6
    await all_is_well(world)


ASKS = "- {when: The document is, repeat: true, calls: [{tool: ask_user, arguments: {question: Which?}}]}\n" + DONE


@pytest.mark.parametrize("how", ["trigger:clerk/papers", "agent:clerk", "fleet", "off"])
async def test_who_waits_for_a_person_is_stopped_as_well(world: World, tmp_path: Path, how: str) -> None:
    office = office_of(world, tmp_path, script=ASKS)
    office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await office.states() == {"WAITING_FOR_INPUT": 1}
    if how == "off":
        await turn_off(office.app, "clerk")
    else:
        await world.store.commit(halt(how, "ada", "stop"))
    await world.advance(MINUTE)
    assert await office.states() == {"HALTED": 1}


FAILS = "- {when: The document is, repeat: true, fails: {kind: Refused}}\n"


async def test_a_document_that_a_person_lets_be_tried_anew_has_all_its_attempts_again(
    world: World, tmp_path: Path
) -> None:
    office = office_of(world, tmp_path, "max_attempts: 2", FAILS)
    office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(10 * MINUTE)
    for number in range(1, 4):
        assert await office.states() == {"ERROR": 2 * number}
        (item,) = await office.items()
        assert item.quarantined_at is not None
        event = ItemReleased(trigger="clerk/papers", item=item.item, by="ada")
        await world.store.commit(record_trigger_events("clerk/papers", f"released {number}", event))
        await world.advance(10 * MINUTE)
    assert [event.attempt for event in await office.told_of(RunStarted)] == [1, 2] * 4


async def test_why_documents_wait_is_reported_again_whenever_the_reason_changes(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    office.start(tmp_path / "clerk")
    await world.store.commit(halt("fleet", "ada", "stop 1"))
    office.drop("a.txt", "the first words")
    await world.advance(MINUTE)
    assert (await office.trigger()).delayed == "fleet was halted by ada. Run: halter resume fleet"
    for number, scope in enumerate(["agent:clerk", "fleet", "agent:clerk", "fleet"]):
        text = "fleet" if scope == "agent:clerk" else "agent:clerk"
        await world.store.commit(halt(scope, "ada", f"halt {number}"))
        await world.store.commit(resume(text, "ada", f"resume {number}"))
        await world.advance(MINUTE)
        assert (await office.trigger()).delayed == f"{scope} was halted by ada. Run: halter resume {scope}"
    assert len(await office.told_of(RunsDelayed)) == 5


async def test_a_document_whose_session_a_person_halts_waits_until_they_resume_it(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, script=SLOW)
    office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(10 * SECOND)
    scope = "session:clerk.papers-1"
    await world.store.commit(halt(scope, "ada", "stop"))
    office.drop("b.txt", "other words")
    await world.advance(5 * MINUTE)
    assert await office.states() == {"HALTED": 1, "COMPLETED": 1}
    assert (await office.trigger()).delayed == f"{scope} was halted by ada. Run: halter resume {scope}"
    await world.store.commit(resume(scope, "ada", "go on"))
    await world.advance(5 * MINUTE)
    assert await office.states() == {"HALTED": 1, "COMPLETED": 2}
