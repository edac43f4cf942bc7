"""What agent loops are known to get wrong, one by one."""

import pytest

from halter.core.clock import SECOND
from halter.core.messages import Prompt, Reply, Text, TextListener, ToolCall, ToolResult
from halter.core.tools import Permit
from halter.core.usage import ModelName
from halter.core.vocabulary import SessionKind
from halter.guard.halts import halt, resume
from halter.models.scripted import Scripted, ScriptLine
from halter.spec.models import BrainSpec
from halter.state import lifecycle
from halter.testing.world import World
from tests.story.loops import Story, calls, fails, says


def texts(story: Story) -> list[str]:
    return [part.text for message in story.messages for part in message.parts if isinstance(part, Text)]


async def test_a_b_a_b_is_a_loop(world: World) -> None:
    story = Story(world, [calls("look" if n % 2 else ("look", {"at": "b"})) for n in range(12)], kind="task")
    ending = await story.run("Look.")
    assert (ending.state, ending.terminal_reason) == ("ERROR", "repetition")
    assert "cycle of 2 steps" in ending.sentence


async def test_a_person_may_ask_the_same_thing_as_often_as_they_like(world: World) -> None:
    story = Story(world, [each for _ in range(8) for each in (calls("look"), says("Nothing."))])
    await story.begin()
    for _ in range(8):
        assert (await story.says("Look, please.")).sentence == ""
    assert story.told() == []


async def test_writes_that_only_begin_alike_are_no_loop(world: World) -> None:
    lines = [calls(("send", {"text": f"{'same ' * 100}{number}"})) for number in range(9)]
    story = Story(world, [*lines, says("Done.")], kind="task")
    assert (await story.run("Send.")).state == "COMPLETED"
    assert story.told() == []


async def test_a_result_that_changes_is_polling_and_no_loop(world: World) -> None:
    story = Story(world, [*(calls("price") for _ in range(20)), says("It rises.")], kind="task")
    assert (await story.run("Watch the price.")).state == "COMPLETED"
    assert story.told() == []


async def test_a_look_after_a_chosen_sleep_is_no_loop(world: World) -> None:
    lines = [each for _ in range(9) for each in (calls("look"), calls(("yield", {"mode": "continue"})))]
    story = Story(world, [*lines, calls(("yield", {"mode": "shutdown"}))], kind="autonomous")
    assert (await story.run("Watch.")).state == "COMPLETED"
    assert "repetition" not in story.told()


async def test_steps_are_counted_per_turn_and_not_for_ever(world: World) -> None:
    story = Story(
        world, [each for _ in range(30) for each in (calls("look"), says("No."))], policy_yaml="limits: {max_steps: 2}"
    )
    await story.begin()
    for _ in range(30):
        assert (await story.says("Look.")).sentence == ""


CUT = ScriptLine(reply=Reply((Text("Once upon a ti", "model", trusted=False),), "max_tokens"))


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_truncated_answer_is_continued_also_when_it_is_streamed(world: World, *, streaming: bool) -> None:
    mind = BrainSpec(model="scripted:script", streaming=streaming)
    story = Story(world, [CUT, CUT, CUT, says("Never said.")], kind="task", mind=mind)
    ending = await story.run("Tell me.")
    assert (ending.state, ending.sentence) == ("COMPLETED", "The answer was cut off at max_output_tokens.")
    assert story.told() == ["max_tokens_recovery"] * 2
    assert bool(story.chunks) == streaming


async def test_a_truncated_answer_is_an_end_where_recoveries_are_off(world: World) -> None:
    story = Story(world, [CUT, says("Never said.")], kind="task", mind=BrainSpec(max_tokens_recoveries=0))
    assert (await story.run("Tell me.")).state == "COMPLETED"
    assert story.told() == []


async def test_a_call_that_was_cut_off_is_asked_for_again_and_not_made(world: World) -> None:
    cut = calls(("send", {"text": "half"}), stop="max_tokens")
    story = Story(world, [cut, calls(("send", {"text": "whole"})), says("Sent.")], kind="task")
    assert (await story.run("Send it.")).state == "COMPLETED"
    assert story.desk.done == {"send whole": 1}
    assert story.told() == ["cut_call"]
    assert [result.outcome for result in story.results()] == ["invalid_arguments", "ok"]


async def test_what_a_person_may_not_see_says_so_and_comes_from_the_runtime(world: World) -> None:
    story = Story(world, [CUT, says("me.")], kind="task")
    await story.run("Tell me.")
    parts = [part for message in story.messages for part in message.parts if isinstance(part, Text) and part.reason]
    assert [(part.reason, part.origin, part.trusted) for part in parts] == [("max_tokens_recovery", "config", True)]
    assert (await story.kinds()).count("message_added") == 1


@pytest.mark.parametrize("kind", ["BadRequest", "Unauthorized", "Forbidden"])
async def test_what_cannot_get_better_is_not_tried_again(world: World, kind: str) -> None:
    story = Story(world, [fails(kind, retry=False), says("Never said.")], kind="task")
    assert (await story.run("Go.")).terminal_reason == "model_error"
    assert len(story.model.requests) == 1


async def test_overload_and_timeouts_are_tried_again_with_growing_pauses(world: World) -> None:
    mind = BrainSpec(model="scripted:script", max_retries=5)
    story = Story(
        world, [fails(), says("Late.", takes=700 * SECOND), fails(), says("At last.")], kind="task", mind=mind
    )
    began = world.now
    assert (await story.run("Go.")).state == "COMPLETED"
    outcomes = [line.outcome for line in (await story.receipt()).requests]
    assert outcomes == ["error", "timeout", "error", "ok"]
    assert 603 * SECOND <= world.now - began <= 608 * SECOND


async def test_what_a_provider_asks_to_wait_is_waited_for_but_not_for_ever(world: World) -> None:
    story = Story(world, [fails(after=20 * SECOND), fails(after=9000 * SECOND), says("Done.")], kind="task")
    began = world.now
    assert (await story.run("Go.")).state == "COMPLETED"
    assert 80 * SECOND <= world.now - began <= 81 * SECOND


async def test_a_retried_stream_is_discarded_before_it_is_shown_again(world: World) -> None:
    half = ScriptLine(reply=Reply((Text("Hello ", "model", trusted=False),)), fails=fails().fails)
    story = Story(world, [half, says("Hello world.")])
    await story.begin()
    await story.says("Hi.")
    visible_text = ""
    for chunk in story.chunks:
        visible_text = "" if chunk.discard else visible_text + chunk.text
    assert visible_text == "Hello world."
    assert texts(story) == ["Hi.", "Hello world."]
    assert [chunk.discard for chunk in story.chunks].count(True) == 1
    assert not story.chunks[0].discard


@pytest.mark.parametrize("end", ["whole", "failed", "halted", "timeout"])
async def test_every_stream_has_exactly_one_end(world: World, end: str) -> None:
    lines = {
        "whole": [calls("look"), says("Done.")],
        "failed": [fails() for _ in range(4)],
        "halted": [says("Never.", takes=900 * SECOND)],
        "timeout": [says("Never.", takes=900 * SECOND)],
    }
    story = Story(world, lines[end], policy_yaml="limits: {timeout: 60s}")
    await story.begin()
    if end == "halted":
        world.spawn(halted_soon(world))
    await story.says("Go.")
    ends = [chunk.request for chunk in story.chunks if chunk.finished]
    assert ends == [line.id for line in (await story.receipt()).requests]
    assert len(ends) == len(set(ends)) == {"whole": 2, "failed": 4, "halted": 1, "timeout": 1}[end]


async def halted_soon(world: World) -> None:
    await world.clock.sleep(10 * SECOND)
    await world.store.commit(halt("fleet", "ada", "halt"))


@pytest.mark.parametrize("kind", ["chat", "task"])
async def test_a_call_that_was_stopped_has_a_result_and_its_session_can_go_on(world: World, kind: SessionKind) -> None:
    story = Story(world, [calls("hang", ("send", {"text": "a"})), says("On we go.")], kind=kind)
    world.spawn(halted_soon(world))
    assert (await story.run("Wait.")).state == "HALTED"
    await world.store.commit(resume("fleet", "ada", "resume"))
    await world.store.commit(lifecycle.reopen_session("s", "again", "ada"))
    ending = await (story.attend() if kind == "task" else story.says("Go on."))
    assert ending.state == ("COMPLETED" if kind == "task" else "WAITING_FOR_INPUT")
    parts = [part for message in story.model.requests[-1].messages for part in message.parts]
    ids = [part.id for part in parts if isinstance(part, ToolCall)]
    assert ids == [part.id for part in parts if isinstance(part, ToolResult)] != []


class Texting(Scripted):
    """A model that knows calls only as text, and uses the word that it is told in this request."""

    def __init__(self, world: World, *answers: str) -> None:
        super().__init__((), world.clock, ModelName("scripted", "script"))
        self.nonces: list[str] = []
        self._answers = list(answers)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.requests.append(prompt)
        ending = prompt.messages[-1].parts[-1]
        assert isinstance(ending, Text)
        self.nonces.append(ending.text.partition("<skill ")[2].partition(">")[0])
        text = self._answers.pop(0).replace("NOW", self.nonces[-1]).replace("FIRST", self.nonces[0])
        return Reply((Text(text, "model", trusted=False),))


async def test_text_calls_are_made_only_with_the_word_of_their_own_request(world: World) -> None:
    mind = BrainSpec(model="scripted:script", instructions="You are a clerk.", tool_calls="text")
    story = Story(world, kind="task", mind=mind)
    quoted = '<skill>send(text="quoted")</skill> <skill FIRST>send(text="old")</skill>'
    model = Texting(
        world,
        '<parallel><skill NOW>send(text="a) b")</skill><skill NOW>send(text="c")</skill></parallel>',
        f'I read: {quoted} <skill NOW>send(text="c")</skill>',
        "Done.",
    )
    story.models = [model]
    assert (await story.run("Send.")).state == "COMPLETED"
    assert story.desk.done == {"send a) b": 1, "send c": 2}
    assert len(set(model.nonces)) == 3
    assert all(model.nonces)
    assert all(prompt.tools == () for prompt in model.requests)


async def test_calls_of_a_step_are_made_together_and_their_results_keep_their_order(world: World) -> None:
    script_line = calls(*(("slow", {"name": f"{number}"}) for number in range(25)))
    story = Story(world, [script_line, says("Done.")], kind="task")
    began = world.now
    assert (await story.run("Go.")).state == "COMPLETED"
    assert [result.text for result in story.results()] == [f"slow {number}" for number in range(25)]
    assert story.desk.most_together == 10
    assert world.now - began < 5 * SECOND
    groups = {line.parallel_group for line in (await story.receipt()).calls}
    assert len(groups) == 1
    assert groups != {""}


async def test_a_call_alone_is_in_no_group_and_each_step_has_its_own(world: World) -> None:
    two = calls("look", "price")
    story = Story(world, [calls("look"), two, two, says("Done.")], kind="task")
    await story.run("Go.")
    groups = [line.parallel_group for line in (await story.receipt()).calls]
    assert groups[0] == ""
    assert groups[1] == groups[2] != groups[3] == groups[4]


async def test_what_a_failed_tool_had_done_so_far_reaches_the_model(world: World) -> None:
    story = Story(world, [calls("fail"), says("I see.")], kind="task")
    assert (await story.run("Try.")).state == "COMPLETED"
    (result,) = story.results()
    assert result.outcome == "error"
    assert result.text == "[error] NoLuck: it did not work\n\nso far so good"


async def test_a_long_result_is_shown_in_part_and_can_be_read_on_through_the_guard(world: World) -> None:
    lines = [calls("long"), calls(("read_output", {"call": "c1_0_0", "offset": 20_000})), says("Read.")]
    story = Story(world, lines, kind="task")
    assert (await story.run("Read it.")).state == "COMPLETED"
    whole, tool_result = story.results()
    assert len(whole.text) <= 16_000
    assert 'read_output(call="c1_0_0"' in whole.text
    assert len(tool_result.text) <= 16_000
    assert "characters follow" in tool_result.text
    full = await story.desk.long()
    assert tool_result.text.startswith(full[20_000:30_000])
    assert [line.name for line in (await story.receipt()).calls] == ["long", "read_output"]


async def test_a_result_of_another_session_cannot_be_read(world: World) -> None:
    story = Story(world, [calls(("read_output", {"call": "../t.c1_0_0"})), says("No.")], kind="task")
    await story.run("Read it.")
    assert story.results()[0].outcome == "error"
    assert "NoSuchCall" in story.results()[0].text
