"""What a loop is given that nobody should give it: each is told clearly, recorded, and lets the session go on."""

from typing import Any

import msgspec
import pytest

from halter.core.messages import Reply, Text, ToolCall
from halter.core.vocabulary import SessionKind
from halter.models.scripted import ScriptLine
from halter.testing.world import World
from tests.story.loops import Story, calls, says


def silent(text: str = "", **more: Any) -> ScriptLine:
    return ScriptLine(reply=Reply((Text(text, "model", trusted=False),) if text else (), **more))


def raw(*asked: ToolCall) -> ScriptLine:
    return ScriptLine(reply=Reply(asked, "calls"))


@pytest.mark.parametrize("text", ["", " ", "\n\t \u2003"])
async def test_an_empty_message_opens_no_turn_and_costs_nothing(world: World, text: str) -> None:
    story = Story(world, [says("Hello.")])
    await story.begin()
    ending = await story.says(text)
    assert ending.state == "WAITING_FOR_INPUT"
    assert story.model.requests == []
    await story.says("Hi.")
    assert [part.text for message in story.messages for part in message.parts] == ["Hi.", "Hello."]


@pytest.mark.parametrize("kind", ["task", "chat"])
async def test_an_empty_task_waits_for_a_message(world: World, kind: SessionKind) -> None:
    story = Story(world, [says("Hello.")], kind=kind)
    assert (await story.run("")).state == "WAITING_FOR_INPUT"
    assert (await story.says("Hi.")).state == ("COMPLETED" if kind == "task" else "WAITING_FOR_INPUT")


@pytest.mark.parametrize("before", [0, 1])
async def test_a_message_of_5_mb_is_rejected_with_a_sentence_and_the_chat_continues(world: World, before: int) -> None:
    story = Story(world, [says("Hello."), says("Fine.")])
    await story.begin()
    for _ in range(before):
        await story.says("Hi.")
    ending = await story.says("x" * 5_000_000)
    assert ending.state == "WAITING_FOR_INPUT"
    assert "Shorten it" in ending.sentence
    assert len(story.model.requests) == before
    ending = await story.says("Shorter now.")
    assert (ending.state, ending.sentence) == ("WAITING_FOR_INPUT", "")
    assert len(msgspec.json.encode(story.model.requests[-1])) < 100_000
    assert "Shorter now." in str(story.model.requests[-1].messages[-1])


async def test_a_task_of_5_mb_ends_with_a_sentence(world: World) -> None:
    story = Story(world, [says("Never said.")], kind="task")
    ending = await story.run("x" * 5_000_000)
    assert (ending.state, ending.terminal_reason) == ("ERROR", "model_error")
    assert ending.sentence.startswith("TooLarge: ")
    assert (await story.receipt()).terminal_reason == "model_error"


@pytest.mark.parametrize("text", ["", "   ", "\n\n"])
async def test_a_model_that_answers_nothing_is_asked_once_more(world: World, text: str) -> None:
    story = Story(world, [silent(text), says("Sorry: here.")], kind="task")
    assert (await story.run("Say something.")).state == "COMPLETED"
    assert story.told() == ["empty_answer"]
    assert all(message.parts for prompt in story.model.requests for message in prompt.messages)


@pytest.mark.parametrize("kind", ["chat", "task"])
async def test_a_model_that_gives_two_empty_answers_is_an_error_with_a_sentence(
    world: World, kind: SessionKind
) -> None:
    story = Story(world, [silent(), silent(" "), says("Back again.")], kind=kind)
    ending = await story.run("Say something.")
    assert "gave an empty answer" in ending.sentence
    assert ending.state == ("ERROR" if kind == "task" else "WAITING_FOR_INPUT")
    if kind == "chat":
        assert (await story.says("And now?")).sentence == ""


async def test_500_calls_at_once_are_all_refused_and_the_model_may_ask_for_fewer(world: World) -> None:
    script_line = calls(*(("send", {"text": f"{number}"}) for number in range(500)))
    story = Story(world, [script_line, calls(("send", {"text": "one"})), says("Done.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    assert story.desk.done == {"send one": 1}
    results = story.results()
    assert [result.outcome for result in results] == ["rate_limited"] * 500 + ["ok"]
    assert "requested 500 calls" in results[0].text
    assert len((await story.receipt()).brakes) == 500


async def test_50_calls_at_once_are_made(world: World) -> None:
    script_line = calls(*(("send", {"text": f"{number}"}) for number in range(50)))
    story = Story(world, [script_line, says("Done.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    assert sum(story.desk.done.values()) == 50


NONSENSE = [
    "",
    "{",
    '{"text": ',
    "[]",
    "null",
    '"send"',
    '{"text": 7}',
    '{"other": 1}',
    "\x00",
    "{" * 10_000,
    "é" * 9000,
]


@pytest.mark.parametrize("arguments", NONSENSE, ids=range(len(NONSENSE)))
async def test_arguments_that_no_tool_takes_are_answered_and_never_run(world: World, arguments: str) -> None:
    story = Story(world, [raw(ToolCall("a", "send", arguments)), says("I see.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    (result,) = story.results()
    if arguments:
        assert (result.outcome, story.desk.done) == ("invalid_arguments", {})
        assert len(result.text) < 5000


@pytest.mark.parametrize("name", ["nothing", "", "send ", "sénd", "x" * 100_000, "\x00", "drop table\n"])
async def test_a_tool_that_does_not_exist_is_answered_as_such(world: World, name: str) -> None:
    story = Story(world, [raw(ToolCall("a", name, "{}")), says("I see.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    (result,) = story.results()
    assert result.outcome == "unknown_tool"
    assert len(result.text) < 1000


async def test_two_calls_with_the_same_id_are_two_calls(world: World) -> None:
    same = raw(
        ToolCall("a", "send", '{"text": "1"}'), ToolCall("a", "send", '{"text": "2"}'), ToolCall("", "look", "{}")
    )
    story = Story(world, [same, says("Done.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    assert story.desk.done == {"send 1": 1, "send 2": 1, "look": 1}
    assert len({result.id for result in story.results()}) == 3


async def test_the_same_ids_in_the_next_step_are_other_calls(world: World) -> None:
    script_lines = [raw(ToolCall("a", "send", f'{{"text": "{number}"}}')) for number in range(3)]
    story = Story(world, [*script_lines, says("Done.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    assert sum(story.desk.done.values()) == 3


async def test_text_of_any_kind_passes_through_the_journal_and_back(world: World) -> None:
    odd = "a\x00b \ud800 \U0001f600 \u202e"
    story = Story(world, [calls(("send", {"text": "x"}), text=odd), says("Done.")])
    await story.begin()
    await story.says("odd \x00 text")
    live = list(story.messages)
    await story.attend()
    assert story.messages == live
