"""A history that outgrows its window, and a prompt whose beginning stays the same."""

from decimal import Decimal
from itertools import count, pairwise, takewhile
from typing import Any

import msgspec
import pytest

from halter.core.events import ContextCut
from halter.core.messages import Message, Prompt, Text, ToolCall, ToolResult, bound_prompt_tokens
from halter.core.ports import read_body
from halter.core.usage import ModelName, Price, Usage
from halter.loop.history import SessionHistory
from halter.loop.observer import LiveContext
from halter.models.scripted import Scripted
from halter.spec.models import BrainSpec
from halter.testing.world import World
from tests.story.loops import Story, calls, fails, says

WINDOW = 20_000
WORDS = "These are the words of the task, which must never be lost."


def mind(strategy: Any) -> BrainSpec:
    return BrainSpec(
        model="scripted:script", instructions="You are a clerk.", context_strategy=strategy, max_output_tokens=500
    )


def long_task(world: World, strategy: Any, steps: int = 30, **more: Any) -> Story:
    lines = [calls(("send", {"text": f"{number} {'word ' * 150}"})) for number in range(steps)]
    story = Story(world, [*lines, says("Done.")], kind="task", mind=mind(strategy), **more)
    story.window = WINDOW
    return story


def parts(prompt: Prompt) -> list[Any]:
    return [part for message in prompt.messages for part in message.parts]


async def cuts(story: Story) -> list[ContextCut]:
    return [stored.event for stored in await story.events() if isinstance(stored.event, ContextCut)]


def sound(story: Story) -> None:
    """Each prompt fits, has the task, and shows each call with its result."""
    for prompt in story.model.requests:
        assert bound_prompt_tokens(prompt) + prompt.max_output_tokens <= WINDOW
        assert isinstance(prompt.messages[0].parts[0], Text)
        assert prompt.messages[0].parts[0].text == WORDS
        ids = [result.id for result in parts(prompt) if isinstance(result, ToolCall)]
        assert ids == [result.id for result in parts(prompt) if isinstance(result, ToolResult)]
        roles = [message.role for message in prompt.messages]
        assert all(before != after for before, after in pairwise(roles))


@pytest.mark.parametrize("strategy", ["sliding_window", "compact"])
async def test_a_long_task_stays_within_its_window_and_never_loses_its_task(world: World, strategy: str) -> None:
    story = long_task(world, strategy)
    assert (await story.run(WORDS)).state == "COMPLETED"
    sound(story)
    context_cuts = await cuts(story)
    assert 1 <= len(context_cuts) <= 10
    assert {cut.strategy for cut in context_cuts} == {strategy}
    marked = any(
        isinstance(result, Text) and result.reason == "compacted" for result in parts(story.model.requests[-1])
    )
    assert marked == (strategy == "compact")


async def test_a_summary_is_asked_for_as_such_and_stands_in_place_of_what_is_left_out(world: World) -> None:
    story = long_task(world, "summarize")
    story.summarizer = Scripted(
        [says(f"Summary {n}.") for n in range(20)], world.clock, ModelName("scripted", "script")
    )
    assert (await story.run(WORDS)).state == "COMPLETED"
    sound(story)
    summaries = [line for line in (await story.receipt()).requests if line.purpose == "summary"]
    assert len(summaries) == len(await cuts(story)) >= 1
    texts = [
        result
        for result in parts(story.model.requests[-1])
        if isinstance(result, Text) and result.reason == "summarized"
    ]
    assert [(result.origin, result.trusted) for result in texts] == [("model", False)]
    assert f"Summary {len(summaries) - 1}." in texts[0].text


async def test_a_summary_that_fails_leaves_a_mark_and_the_task_continues(world: World) -> None:
    story = long_task(world, "summarize")
    story.summarizer = Scripted([fails(retry=False)] * 20, world.clock, ModelName("scripted", "script"))
    assert (await story.run(WORDS)).state == "COMPLETED"
    sound(story)
    assert any(isinstance(result, Text) and result.reason == "compacted" for result in parts(story.model.requests[-1]))


async def test_a_summary_that_costs_more_than_the_cap_stops_the_session(world: World) -> None:
    story = long_task(world, "summarize", policy_yaml="limits: {max_cost_usd: 100, max_cost_usd_per_day: 100}")
    story.price = Price(Decimal(1), Decimal(1))
    dear = says("Dear.", usage=Usage(100, 150_000_000))
    story.summarizer = Scripted([dear], world.clock, ModelName("scripted", "script"))
    ending = await story.run(WORDS)
    assert (ending.state, ending.terminal_reason) == ("BUDGET_EXCEEDED", "overrun")


@pytest.mark.parametrize("strategy", ["sliding_window", "compact"])
async def test_a_long_chat_that_is_resumed_for_each_message_stays_within_its_window(
    world: World, strategy: str
) -> None:
    lines = [says(f"Answer {number}: {'word ' * 100}") for number in range(60)]
    story = Story(world, lines, mind=mind(strategy))
    story.window = WINDOW
    await story.begin()
    await story.says(WORDS)
    for number in range(59):
        ending = await story.says(f"Question {number}: {'why ' * 50}")
        assert ending.sentence == ""
    sound(story)
    assert all(f"Question {n}:" in str(prompt.messages[-1]) for n, prompt in enumerate(story.model.requests[1:]))


async def test_what_is_true_only_now_has_its_room_too(world: World) -> None:
    story = long_task(world, "compact")
    story.senses = LiveContext(read_volatile=lambda: "the door is open; " * 300)
    assert (await story.run(WORDS)).state == "COMPLETED"
    sound(story)
    assert await cuts(story)


async def test_a_model_that_finds_the_prompt_too_long_is_sent_less(world: World) -> None:
    lines = [says(f"Answer {n}: {'word ' * 200}") for n in range(5)]
    story = Story(world, [*lines, fails("ContextOverflow", retry=False), says("Now it fits.")], mind=mind("compact"))
    await story.begin()
    for number in range(6):
        ending = await story.says(f"Question {number}: {'why ' * 100}")
    assert ending.sentence == ""
    assert len(await cuts(story)) == 1
    assert bound_prompt_tokens(story.model.requests[-1]) < bound_prompt_tokens(story.model.requests[-2])


def test_a_cut_at_the_same_place_that_keeps_less_is_remembered_as_well() -> None:
    async def program(world: World, steps: int) -> list[ContextCut]:
        lines = [calls(("send", {"text": f"{n} {'word ' * 80}"})) for n in range(steps)]
        story = Story(world, [says("Yes."), *lines, says("Sent."), says("Good.")], mind=mind("compact"))
        story.window = WINDOW
        await story.begin()
        for text in (WORDS, f"Do it. {'big ' * 2200}", f"And now? {'why ' * 300}"):
            assert (await story.says(text)).sentence == ""
        sound(story)
        session_history = SessionHistory("s")
        await session_history.apply(await story.events(), lambda stored: read_body(world.journal, stored))
        assert str(tuple(session_history.transcript.sent[:-1])) == str(without_ending(story.model.requests[-1]))
        return await cuts(story)

    places: list[list[int]] = []
    for steps in range(27, 32):
        with World(steps) as world:
            places.append([cut.through for cut in world.run(program(world, steps))])
    assert any(len(each) > len(set(each)) for each in places), str(places)


def without_ending(prompt: Prompt) -> tuple[Message, ...]:
    *before, last = prompt.messages
    kept = tuple(part for part in last.parts if not isinstance(part, Text) or part.reason != "volatile")
    return (*before, Message(last.role, kept))


def wire(prompt: Prompt) -> bytes:
    """A prompt as it goes over a wire: the system text, the tools, then the messages in order."""
    tools = b"".join(msgspec.json.encode((spec.name, spec.description)) + spec.schema for spec in prompt.tools)
    body = b"".join(
        msgspec.json.encode({"role": message.role, "content": [{"type": "text", "text": word.text} for word in words]})
        for message in prompt.messages
        if (words := [word for word in message.parts if isinstance(word, Text)])
    )
    return prompt.system.encode() + tools + body


def common(body: bytes, content: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(body, content, strict=False)))


async def test_over_fifty_turns_most_of_each_prompt_repeats_the_one_before(world: World) -> None:
    numbers = count()
    lines = [says(f"Answer {number}: {'word ' * 40}") for number in range(51)]
    system = "You are a clerk. " + "You know the house and its rules. " * 190
    story = Story(world, lines, mind=BrainSpec(model="scripted:script", instructions=system))
    story.senses = LiveContext(
        read_volatile=lambda: f"Hot state {next(numbers)}: " + "the door is open; " * 16,
        read_facts=lambda: {"turn": next(numbers)},
    )
    await story.begin()
    for number in range(51):
        await story.says(f"Question {number}: {'why ' * 50}")
    bodies = [wire(prompt) for prompt in story.model.requests]
    shares = [common(before, after) / len(after) for before, after in pairwise(bodies)]
    assert 7500 <= len(bodies[0]) <= 9000
    assert len(shares) == 50
    assert min(shares) >= 0.9, (min(shares), len(bodies[0]))
    assert all(prompt.messages[-1].parts[-1].reason == "volatile" for prompt in story.model.requests)
    assert all("Hot state" not in str(prompt.messages[:-1]) for prompt in story.model.requests)
