"""Files in later messages: with a message to a session that waits or has ended, with an answer, and after a crash."""

from pathlib import Path

import pytest
from library_bench import PRICED, Bench
from loops import calls, says, used

from halter import File, Store
from halter.core.errors import ConfigError
from halter.core.ids import SortableIds, inbox_stream
from halter.core.messages import Message, Text
from halter.journal.open import open_store
from halter.journal.retention import erase_session_bodies
from halter.models.input_files import IMAGE_TOKENS

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 300
CAT = File(PNG, "image/png", "cat.png")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def texts_of(message: Message) -> list[tuple[str, bool, bytes]]:
    return [(part.text, part.trusted, part.data) for part in message.parts if isinstance(part, Text)]


def question() -> str:
    return '{"question": "Which cat?"}'


@pytest.mark.parametrize("place", ["run", "resume"])
async def test_a_session_that_has_ended_continues_with_a_message_and_its_files(bench: Bench, place: str) -> None:
    agent = bench.agent(says("Hello."), says("A cat.", usage=used(1500, 10)), fleet=PRICED)
    session = (await agent.run("Hello.")).session
    if place == "run":
        result = await agent.run("What is it?", session=session, files=[CAT])
    else:
        result = await agent.resume(session, "What is it?", files=[CAT])
    assert result.text == "A cat."
    label = "[cat.png, image/png, 76,808 bytes]"
    message = bench.models[0].requests[-1].messages[-1]
    assert texts_of(message)[:2] == [("What is it?", True, b""), (label, False, PNG)]
    assert result.receipt.requests[-1].held_usd >= IMAGE_TOKENS / 1_000_000


async def test_an_answer_brings_files_and_a_crash_before_it_is_read_loses_none(bench: Bench) -> None:
    first = bench.agent(calls(("ask_user", question())))
    session = (await first.run("Tidy up.")).session
    async with Store(bench.file, clock=bench.clock, environ={"HOME": str(bench.folder)}) as store:
        await store.answer(session, "This one.", by="ada", files=[CAT])
    second = bench.agent(says("A cat."), says("A grey one."))
    assert (await second.resume(session)).text == "A cat."
    assert texts_of(bench.models[-1].requests[-1].messages[-1])[:2] == [
        ("This one.", True, b""),
        ("[cat.png, image/png, 76,808 bytes]", False, PNG),
    ]
    third = bench.agent(says("A grey one."))
    await third.run("Which colour?", session=session)
    sent = [data for message in bench.models[-1].requests[-1].messages for _, _, data in texts_of(message) if data]
    assert sent == [PNG]


async def test_the_files_of_each_message_stay_with_it_and_are_erased_with_the_session(bench: Bench) -> None:
    agent = bench.agent(says("Hello."), says("Two cats."))
    session = (await agent.run("Hello.")).session
    files = [File(PNG + b"1", "image/png", "1.png"), File(b"a,b", "text/csv", "2.csv")]
    await agent.run("Compare.", session=session, files=files)
    texts = [text for text, _, _ in texts_of(bench.models[0].requests[-1].messages[-1])]
    assert texts[:3] == ["Compare.", "[1.png, image/png, 76,809 bytes]", "[2.csv, text/csv, 3 bytes]\na,b"]
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    stored = next(each for each in await store.read(inbox_stream(session), 0, 99) if each.kind == "files_given")
    assert stored.blob is not None
    await erase_session_bodies(store, [session], "ada")
    with pytest.raises(KeyError):
        await store.get(stored.blob)
    await store.close()


async def test_a_file_that_cannot_be_sent_posts_nothing(bench: Bench) -> None:
    agent = bench.agent(says("Hello."), says("Nothing."))
    session = (await agent.run("Hello.")).session
    with pytest.raises(ConfigError, match="unsupported type"):
        await agent.run("What is it?", session=session, files=[File(b"\0", "video/mp4", "a.mp4")])
    with pytest.raises(ConfigError, match="The message is empty"):
        await agent.resume(session, files=[CAT])
    assert bench.facts("wake_posted", "files_given") == []


async def test_an_agent_that_hides_names_is_given_no_files_later_either(bench: Bench) -> None:
    agent = bench.agent(says("Hello."), policy={"anonymize": True})
    session = (await agent.run("Hello.")).session
    with pytest.raises(ConfigError, match="anonymizes its prompts"):
        await agent.run("What is it?", session=session, files=[CAT])
