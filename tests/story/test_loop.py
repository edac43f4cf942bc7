"""How turns and sessions end: every end that a session can have, through the real conversation."""

import asyncio
from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import SessionParked, TurnEnded
from halter.core.usage import ModelName
from halter.core.vocabulary import SessionKind
from halter.guard.halts import cancel, halt, resume
from halter.models.scripted import Scripted
from halter.spec.models import BrainSpec
from halter.state import lifecycle
from halter.tasks.conversation import Conclusion
from halter.testing.world import World
from tests.story.loops import Story, calls, fails, says

KINDS: tuple[SessionKind, ...] = ("chat", "task", "autonomous")


async def check_end(story: Story, ending: Conclusion, state: str, reason: str) -> None:
    """An end is told to the caller, stands in the journal, and is on the receipt."""
    story_receipt = await story.receipt()
    assert (ending.state, ending.terminal_reason) == (state, reason), ending
    assert (story_receipt.state, story_receipt.terminal_reason) == (state, reason)
    assert story_receipt.ended_at == (await story.events())[-1].at
    assert story_receipt.in_doubt == ()


def turns(events: list[object]) -> list[str]:
    return [event.why for event in events if isinstance(event, TurnEnded)]


async def ends_of_turns(story: Story) -> list[str]:
    return turns([stored.event for stored in await story.events()])


def start_story(story: Story, task: str) -> asyncio.Task[Conclusion]:
    return asyncio.create_task(story.run(task))


async def test_a_task_runs_until_its_model_has_finished(world: World) -> None:
    story = Story(world, [calls(("send", {"text": "hello"})), says("It is sent.")], kind="task")
    await check_end(story, await story.run("Send hello."), "COMPLETED", "completed")
    assert story.desk.done == {"send hello": 1}
    assert [message.role for message in story.messages] == ["user", "assistant", "user", "assistant"]
    assert [tool_result.text for tool_result in story.results()] == ["sent"]


def test_a_task_runs_on_a_disk_as_well(tmp_path: Path) -> None:
    async def program() -> None:
        story = Story(world, [calls("look", ("send", {"text": "hello"})), says("Done.")], kind="task")
        await check_end(story, await story.run("Send hello."), "COMPLETED", "completed")

    with World(3, path=tmp_path / "loop.db") as world:
        world.run(program())


async def test_a_chat_answers_and_waits_for_the_next_message(world: World) -> None:
    story = Story(world, [says("Hello."), says("Seven.", when="how much")])
    await story.begin()
    ending = await story.says("Hi.")
    assert (ending.state, ending.has_ended, ending.sentence) == ("WAITING_FOR_INPUT", False, "")
    assert (await world.session("s")).state == "WAITING_FOR_INPUT"
    ending = await story.says("how much?")
    assert ending.state == "WAITING_FOR_INPUT"
    assert [part.text for message in story.messages for part in message.parts] == [
        "Hi.",
        "Hello.",
        "how much?",
        "Seven.",
    ]


def test_a_chat_on_a_disk_is_resumed_from_its_events(tmp_path: Path) -> None:
    async def program() -> None:
        story = Story(world, [says(f"Answer {number}.") for number in range(5)])
        await story.begin()
        for number in range(5):
            await story.says(f"Question {number}?")
        assert len(story.messages) == 10

    with World(4, path=tmp_path / "loop.db") as world:
        world.run(program())


async def test_a_message_that_comes_while_the_model_thinks_opens_the_next_turn_at_once(world: World) -> None:
    story = Story(world, [says("One.", takes=10 * SECOND), says("Two.")])
    await story.begin()
    thinking = asyncio.create_task(story.says("First."))
    await world.advance(SECOND)
    await world.send_message("s", "Second.")
    assert (await thinking).state == "WAITING_FOR_INPUT"
    assert await ends_of_turns(story) == ["ended", "ended"]
    assert len(story.model.requests) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancel_ends_any_session_for_good(world: World, kind: SessionKind) -> None:
    story = Story(world, [calls("hang")], kind=kind)
    running = start_story(story, "Wait.")
    await story.desk.stuck.wait()
    await world.store.commit(cancel("s", "ada", "cancel"))
    await check_end(story, await running, "CANCELLED", "cancelled")
    committed = await world.store.commit(lifecycle.reopen_session("s", "again", "ada"))
    assert not committed.events


@pytest.mark.parametrize("kind", KINDS)
async def test_a_halt_stops_a_call_that_is_being_made(world: World, kind: SessionKind) -> None:
    story = Story(world, [calls("hang", "look")], kind=kind)
    running = start_story(story, "Wait.")
    await story.desk.stuck.wait()
    await world.advance(1)
    at = world.now
    await world.store.commit(halt("agent:desk", "ada", "halt"))
    await check_end(story, await running, "HALTED", "external_halt")
    assert world.now - at < SECOND
    # The write had begun, so that its effect may be out.
    assert [(result.tool, result.outcome) for result in story.results()] == [("hang", "unknown"), ("look", "ok")]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_halt_stops_a_request_that_is_on_its_way(world: World, kind: SessionKind) -> None:
    story = Story(world, [says("Too late.", takes=5 * MINUTE)], kind=kind)
    running = start_story(story, "Wait.")
    await world.advance(SECOND)
    at = world.now
    await world.store.commit(halt("fleet", "ada", "halt"))
    ending = await running
    await check_end(story, ending, "HALTED", "external_halt")
    assert world.now - at < SECOND
    assert "halt" in ending.sentence
    assert [line.outcome for line in (await story.receipt()).requests] == ["external_halt"]


async def test_a_halt_between_two_steps_lets_no_further_step_begin(world: World) -> None:
    story = Story(world, [calls(("slow", {"name": "a"})), says("Never said.")], kind="task")
    running = start_story(story, "Go.")
    while story.desk.together == 0:
        await world.advance(SECOND // 10)
    await world.advance(SECOND - SECOND // 8)
    await world.store.commit(halt("session:s", "ada", "halt"))
    ending = await running
    await check_end(story, ending, "HALTED", "external_halt")
    assert len(story.model.requests) == 1


async def test_a_halt_ends_the_wait_before_a_retry(world: World) -> None:
    story = Story(world, [fails(after=60 * SECOND), says("Never said.")], kind="task")
    running = start_story(story, "Go.")
    await world.advance(SECOND)
    at = world.now
    await world.store.commit(halt("session:s", "ada", "halt"))
    await check_end(story, await running, "HALTED", "external_halt")
    assert world.now - at < SECOND
    assert len(story.model.requests) == 1


async def test_a_halted_session_may_be_let_go_on(world: World) -> None:
    story = Story(world, [calls("hang"), says("Now it is done.")], kind="task")
    running = start_story(story, "Wait.")
    await story.desk.stuck.wait()
    await world.store.commit(halt("session:s", "ada", "halt"))
    await running
    await world.store.commit(resume("session:s", "ada", "resume"))
    assert (await world.store.commit(lifecycle.reopen_session("s", "again", "ada"))).events
    await check_end(story, await story.attend(), "COMPLETED", "completed")
    assert story.told() == ["resumed"]


TIMEOUT = "limits: {timeout: 60s}"


@pytest.mark.parametrize("place", ["request", "call", "late call", "between", "retry", "cut"])
async def test_a_task_whose_time_is_up_is_over_wherever_it_is(world: World, place: str) -> None:
    lines = {
        "request": [says("Too late.", takes=5 * MINUTE)],
        "call": [calls("hang"), says("Too late.")],
        "late call": [calls("hang", takes=40 * SECOND), says("Too late.")],
        "between": [calls(("look", {"at": f"{number}"}), takes=25 * SECOND) for number in range(9)],
        "retry": [fails(after=40 * SECOND), says("Too late.", takes=5 * MINUTE)],
        "cut": [*(calls(("long", {"size": 9000 + number})) for number in range(2)), says("Late.", takes=5 * MINUTE)],
    }
    mind = BrainSpec(model="scripted:script", context_strategy="summarize", max_output_tokens=500)
    story = Story(world, lines[place], kind="task", policy_yaml=TIMEOUT, mind=mind)
    if place == "cut":
        story.window = 20_000
        story.summarizer = Scripted([says("Pages.", takes=40 * SECOND)], world.clock, ModelName("scripted", "m1"))
    began = world.now
    ending = await story.run("Be quick.")
    await check_end(story, ending, "TIMED_OUT", "timed_out")
    assert 60 * SECOND <= world.now - began <= 62 * SECOND
    assert "60 seconds" in ending.sentence
    if place in ("call", "late call"):
        assert [result.outcome for result in story.results()] == ["timeout"]
    if place == "between":
        assert [result.outcome for result in story.results()] == ["ok", "ok"]


async def test_a_timeout_of_zero_is_none(world: World) -> None:
    lines = [*(calls(("look", {"at": f"{number}"}), takes=9 * MINUTE) for number in range(8)), says("Done.")]
    story = Story(world, lines, kind="task", policy_yaml="limits: {timeout: 0}")
    began = world.now
    await check_end(story, await story.run("Take your time."), "COMPLETED", "completed")
    assert world.now - began >= 72 * MINUTE


async def test_a_task_ends_at_its_most_steps(world: World) -> None:
    lines = [calls(("look", {"at": f"{number}"})) for number in range(9)]
    story = Story(world, lines, kind="task", policy_yaml="limits: {max_steps: 4}")
    ending = await story.run("Look everywhere.")
    await check_end(story, ending, "MAX_STEPS", "max_steps")
    assert len(story.model.requests) == 4
    assert len(story.results()) == 4
    assert "4 steps" in ending.sentence


async def test_a_task_that_repeats_itself_gets_one_hint_and_is_then_stopped(world: World) -> None:
    story = Story(world, [calls("look") for _ in range(9)], kind="task")
    ending = await story.run("Look.")
    await check_end(story, ending, "ERROR", "repetition")
    assert story.told() == ["repetition"]
    assert len(story.model.requests) == 4
    assert "the same calls" in ending.sentence


@pytest.mark.parametrize("most", [1, 2, 3, 5])
async def test_as_many_identical_calls_are_made_as_the_limit_says(world: World, most: int) -> None:
    mind = BrainSpec(model="scripted:script", instructions="You are a clerk.", max_repeated_tool_steps=most)
    story = Story(world, [calls("look") for _ in range(9)], kind="task", mind=mind)
    ending = await story.run("Look.")
    await check_end(story, ending, "ERROR", "repetition")
    assert story.desk.done == {"look": most}
    assert [result.outcome for result in story.results()] == [*["ok"] * most, "rate_limited"]
    assert story.told() == (["repetition"] if most > 1 else [])


async def test_a_cycle_is_made_twice_and_its_next_call_is_not_made(world: World) -> None:
    lines = [calls("look" if number % 2 else ("look", {"at": "b"})) for number in range(12)]
    story = Story(world, lines, kind="task")
    await check_end(story, await story.run("Look."), "ERROR", "repetition")
    assert [result.outcome for result in story.results()] == [*["ok"] * 4, "rate_limited"]


async def test_a_hint_that_is_heeded_lets_the_task_go_on(world: World) -> None:
    lines = [*(calls("look") for _ in range(3)), calls(("look", {"at": "elsewhere"})), says("Found it.")]
    story = Story(world, lines, kind="task")
    await check_end(story, await story.run("Look."), "COMPLETED", "completed")
    assert story.told() == ["repetition"]


async def test_a_model_that_will_not_answer_ends_a_task_after_its_retries(world: World) -> None:
    story = Story(world, [fails() for _ in range(9)], kind="task", fallbacks=[[fails() for _ in range(9)]])
    ending = await story.run("Say something.")
    await check_end(story, ending, "ERROR", "model_error")
    assert ending.sentence == "Overloaded: the provider says no"
    assert [len(model.requests) for model in story.models] == [4, 4]


async def test_what_is_wrong_with_the_request_itself_is_not_tried_again(world: World) -> None:
    story = Story(world, [fails("BadRequest", retry=False), says("Never said.")], kind="task")
    await check_end(story, await story.run("Say something."), "ERROR", "model_error")
    assert len(story.model.requests) == 1


async def test_a_fallback_answers_where_the_model_does_not(world: World) -> None:
    story = Story(world, [fails("Unauthorized", retry=False)], kind="task", fallbacks=[[says("I can.")]])
    await check_end(story, await story.run("Say something."), "COMPLETED", "completed")
    assert [line.name for line in (await story.receipt()).requests] == ["scripted:script", "scripted:m1"]


TROUBLES = {
    "max_steps": ("limits: {max_steps: 2}", [calls(("look", {"at": f"{number}"})) for number in range(6)]),
    "timed_out": (TIMEOUT, [says("Late.", takes=5 * MINUTE) for _ in range(3)]),
    "repetition": ("", [calls("look") for _ in range(15)]),
    "model_error": ("", [fails(retry=False) for _ in range(3)]),
}


@pytest.mark.parametrize("why", TROUBLES)
async def test_trouble_ends_the_turn_of_a_chat_and_the_chat_lives(world: World, why: str) -> None:
    text, lines = TROUBLES[why]
    story = Story(world, [says("Fine now.", when="once more"), *lines], policy_yaml=text)
    await story.begin()
    ending = await story.says("Go.")
    assert (ending.state, ending.has_ended) == ("WAITING_FOR_INPUT", False)
    assert ending.sentence
    assert await ends_of_turns(story) == [why]
    assert (await story.says("once more")).sentence == ""
    assert await ends_of_turns(story) == [why, "ended"]


@pytest.mark.parametrize("why", TROUBLES)
async def test_an_autonomous_session_rests_after_trouble_and_gives_up_after_three(world: World, why: str) -> None:
    text, lines = TROUBLES[why]
    story = Story(world, lines, kind="autonomous", policy_yaml=text)
    ending = await story.run("Go.")
    assert ending.state == "SLEEPING"
    for _ in range(2):
        assert ending.wake_at is not None
        await world.advance(ending.wake_at - world.now)
        ending = await story.attend()
    await check_end(story, ending, "ERROR", why)
    assert await ends_of_turns(story) == [why] * 3
    parks = [stored.event for stored in await story.events() if isinstance(stored.event, SessionParked)]
    assert [park.state for park in parks] == ["SLEEPING", "SLEEPING"]
