"""A person interrupts an answer: the turn ends there, the session goes on, and no cent is in doubt."""

import asyncio
from decimal import Decimal
from functools import partial

import pytest

from halter.core.clock import SECOND
from halter.core.events import TurnEnded
from halter.core.messages import Prompt, Reply, Text, TextListener
from halter.core.ports import Query
from halter.core.rows import SpendRow
from halter.core.tools import Permit
from halter.core.usage import ModelName, Price
from halter.models.scripted import Scripted
from halter.redaction.redact import Redactor, StreamRedactor
from halter.testing.world import World
from tests.crash.test_loop_crashes import recalled
from tests.story.loops import Story, calls, says


class Hesitant(Scripted):
    """A model that begins its first answer, and does not come to its end."""

    async def ask(self, prompt: Prompt, permit: Permit, hear: TextListener | None = None) -> Reply:
        if not self.asked and hear is not None:
            hear("The report has three parts. " * 40)
            permit.use()
            self.asked.append(prompt)
            await self._clock.sleep(600 * SECOND)
        return await super().ask(prompt, permit, hear)


async def interrupted(world: World, story: Story, text: str) -> None:
    story.interrupted = True
    answering = world.spawn(story.says(text))
    await world.advance(30 * SECOND)
    answering.cancel()
    await answering


def roles(story: Story) -> list[tuple[str, str]]:
    return [
        (message.role, "".join(part.text for part in message.parts if isinstance(part, Text)))
        for message in story.messages
    ]


async def test_what_was_said_is_kept_and_paid_for_and_the_chat_goes_on(world: World) -> None:
    story = Story(world)
    story.models = [Hesitant([says("Well.")], world.clock, ModelName("scripted", "script"))]
    story.stream_mask = partial(StreamRedactor, Redactor({}, {}))
    story.price = Price(Decimal(10), Decimal(10))
    await story.begin()
    await interrupted(world, story, "Read the report.")
    assert story.came is not None
    assert story.came.state == "WAITING_FOR_INPUT"
    shown = "".join(chunk.text for chunk in story.chunks)
    assert shown.startswith("The report has three parts. ")
    assert roles(story) == [("user", "Read the report."), ("assistant", shown)]
    assert (await recalled(world)).transcript.messages == story.messages
    ends = [each.event.why for each in await story.events() if isinstance(each.event, TurnEnded)]
    assert ends == ["cancelled"]
    assert not (await world.session("s")).in_flight
    (spend,) = await world.store.ask(Query("all_spends", SpendRow))
    assert spend.usd > 0
    story.interrupted = False
    assert (await story.says("Go on.")).state == "WAITING_FOR_INPUT"
    assert roles(story)[2:] == [("user", "Go on."), ("assistant", "Well.")]
    assert (await recalled(world)).transcript.messages == story.messages


@pytest.mark.parametrize("asked", [["hang", "look"], [("wipe", {"path": "a"}), "look"]])
async def test_calls_that_were_interrupted_have_results_and_are_not_made_later(world: World, asked: list[str]) -> None:
    """Also those that wait for a person."""
    story = Story(world, [calls(*asked), says("Well.")])
    await story.begin()
    await interrupted(world, story, "Do it.")
    assert [part.outcome for part in story.results()] == ["cancelled", "ok"]
    story.interrupted = False
    await asyncio.wait_for(story.says("Never mind."), 60)
    assert roles(story)[-1] == ("assistant", "Well.")
    assert story.desk.done["wipe a"] == 0
    assert (await recalled(world)).transcript.messages == story.messages


async def test_a_task_that_is_cancelled_by_no_person_keeps_its_turn_open(world: World) -> None:
    story = Story(world)
    story.models = [Hesitant([says("Well.")], world.clock, ModelName("scripted", "script"))]
    await story.begin()
    answering = world.spawn(story.says("Read the report."))
    await world.advance(30 * SECOND)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    again = await recalled(world)
    assert not again.turn.over
    assert [message.role for message in again.transcript.messages] == ["user"]
