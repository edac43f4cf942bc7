"""A halt reaches a session wherever it is: within a second nothing runs, and it ends with nothing left open."""

import asyncio
from collections import Counter
from collections.abc import Callable
from decimal import Decimal

import pytest

from halter.core.clock import SECOND
from halter.core.usage import ModelName, Price
from halter.guard.halts import cancel, halt
from halter.models.scripted import Scripted
from halter.spec.models import BrainSpec
from halter.testing.world import World
from tests.story.loops import Story, calls, fails, says, used
from tests.story.test_loop_hostile import Echoing, attend_story, same_again

TEN = Price(Decimal(10), Decimal(10))
SUMMARIZES = BrainSpec(model="scripted:script", context_strategy="summarize", max_output_tokens=500)


def before_a_retry(world: World) -> Story:
    return Story(world, [fails(after=50 * SECOND), says("Never said.")], kind="task")


def in_a_summary(world: World) -> Story:
    story = Story(world, [calls(("long", {"size": 9000 + n})) for n in range(9)], kind="task", mind=SUMMARIZES)
    story.window = 30_000
    slow = [says("Pages.", takes=100 * SECOND)] * 5
    story.summarizer = Scripted(slow, world.clock, ModelName("scripted", "script"))
    return story


def in_a_prediction(world: World) -> Story:
    story = Story(world, [calls(("wipe", {"path": "a"}), "hang")], kind="task", policy_yaml="policy: {simulate: asked}")
    slow = [says("It will be gone.", takes=25 * SECOND)] * 5
    story.simulates = Scripted(slow, world.clock, ModelName("scripted", "m9"))
    return story


def between_calls_in_a_row(world: World) -> Story:
    story = Story(world, kind="task", mind=BrainSpec(model="m:m", tool_calls="text"))
    story.models = [Echoing(world, "".join(f"<skill {{k}}>slow(name='{n}')</skill>" for n in range(30)))]
    return story


def with_calls_that_wait_for_room(world: World) -> Story:
    return Story(world, [calls(*["hang"] * 30)], kind="task")


def before_two_approvals(world: World) -> Story:
    return Story(world, [calls(("wipe", {"path": "a"}), ("wipe", {"path": "b"}))], kind="task")


def before_a_raise(world: World) -> Story:
    story = Story(world, [calls("look", usage=used(4000, 95_000))], kind="task", policy_yaml="limits: {on_cap: ask}")
    story.price = TEN
    return story


def asleep_until_tomorrow(world: World) -> Story:
    text = "limits: {max_cost_usd: 5, max_cost_usd_per_day: 0.5}"
    story = Story(world, [calls("look", usage=used(4000, 44_000))], kind="task", policy_yaml=text)
    story.price = TEN
    return story


def in_a_stream(world: World) -> Story:
    return Story(world, [says("word " * 50, takes=60 * SECOND)])


PLACES = [
    *(before_a_retry, in_a_summary, in_a_prediction, between_calls_in_a_row, with_calls_that_wait_for_room),
    *(before_two_approvals, before_a_raise, asleep_until_tomorrow, in_a_stream),
]
HALTS = {
    "session": halt("session:s", "ada", "h"),
    "agent": halt("agent:desk", "ada", "h"),
    "cancel": cancel("s", "ada", "h"),
}


async def clean(world: World, story: Story, state: str) -> None:
    """It is over, knows what its events say, holds nothing, and each stream had one end."""
    assert story.came is not None
    assert story.came.state == (await story.receipt()).state == state
    assert (await story.receipt()).in_doubt == ()
    assert (await world.session("s")).in_flight == {}
    await same_again(world, story)
    ends = Counter(chunk.request for chunk in story.chunks if chunk.finished)
    assert all(number == 1 for number in ends.values())
    assert {chunk.request for chunk in story.chunks} == {*ends}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stop", HALTS)
async def test_within_a_second_of_a_halt_nothing_runs(world: World, place: Callable[[World], Story], stop: str) -> None:
    story = place(world)
    await story.begin("Go.")
    running = world.spawn(attend_story(story))
    await world.advance(5 * SECOND + SECOND // 3)
    assert not running.done()
    halted = world.now
    await world.store.commit(HALTS[stop])
    await asyncio.wait([running], timeout=5)
    assert running.done()
    assert world.now - halted <= SECOND
    await clean(world, story, "CANCELLED" if stop == "cancel" else "HALTED")


@pytest.mark.parametrize("place", PLACES)
async def test_a_session_whose_process_was_stopped_can_be_cancelled(
    world: World, place: Callable[[World], Story]
) -> None:
    story = place(world)
    await story.begin("Go.")
    running = world.spawn(attend_story(story))
    await world.advance(5 * SECOND + SECOND // 3)
    running.cancel()
    await asyncio.wait([running])
    await world.store.commit(HALTS["cancel"])
    async with asyncio.timeout(5):
        await story.attend()
    await clean(world, story, "CANCELLED")
