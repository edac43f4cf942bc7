"""A person interrupts an answer: the turn ends there, the session goes on, and no cent is in doubt."""

import asyncio
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import NotDone
from halter.core.events import DecisionWithdrawn, TurnEnded
from halter.core.ids import session_stream
from halter.core.messages import Prompt, Reply, Text, TextListener
from halter.core.ports import Query
from halter.core.rows import DecisionRow, SpendRow
from halter.core.tools import Permit
from halter.core.usage import ModelName, Price
from halter.guard.approvals import list_pending_decisions
from halter.journal.checkpoints import Checkpointer
from halter.models.scripted import Scripted
from halter.operations import control
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import get_open_decision
from halter.redaction.redact import Redactor
from halter.redaction.stream_redactor import StreamRedactor
from halter.runtime.runtime import Runtime
from halter.settings import Settings
from halter.testing.world import World
from tests.crash.test_loop_crashes import recalled
from tests.story.loops import Story, calls, says


class Hesitant(Scripted):
    """A model that begins its first answer, and does not come to its end."""

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        if not self.requests and on_text is not None:
            on_text("The report has three parts. " * 40)
            permit.use()
            self.requests.append(prompt)
            await self._clock.sleep(600 * SECOND)
        return await super().ask(prompt, permit, on_text)


async def interrupt_answer(world: World, story: Story, text: str) -> None:
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


async def test_an_interrupted_answer_is_kept_and_paid_for_and_the_chat_continues(world: World) -> None:
    story = Story(world)
    story.models = [Hesitant([says("Well.")], world.clock, ModelName("scripted", "script"))]
    story.stream_mask = partial(StreamRedactor, Redactor({}, {}))
    story.price = Price(Decimal(10), Decimal(10))
    await story.begin()
    await interrupt_answer(world, story, "Read the report.")
    assert story.came is not None
    assert story.came.state == "WAITING_FOR_INPUT"
    output = "".join(chunk.text for chunk in story.chunks)
    assert output.startswith("The report has three parts. ")
    assert roles(story) == [("user", "Read the report."), ("assistant", output)]
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


@pytest.mark.parametrize(
    ("tool_calls", "outcome"), [(["hang", "look"], "unknown"), ([("wipe", {"path": "a"}), "look"], "cancelled")]
)
async def test_calls_that_were_interrupted_have_results_and_are_not_made_later(
    world: World, tool_calls: list[str], outcome: str
) -> None:
    """Also those that wait for a person, and so have not begun."""
    story = Story(world, [calls(*tool_calls), says("Well.")])
    await story.begin()
    await interrupt_answer(world, story, "Do it.")
    assert [tool_result.outcome for tool_result in story.results()] == [outcome, "ok"]
    story.interrupted = False
    await asyncio.wait_for(story.says("Never mind."), 60)
    assert roles(story)[-1] == ("assistant", "Well.")
    assert story.desk.done["wipe a"] == 0
    assert (await recalled(world)).transcript.messages == story.messages


async def test_the_question_of_a_call_that_was_interrupted_is_withdrawn(world: World) -> None:
    story = Story(world, [calls(("wipe", {"path": "a"})), says("Well.")])
    await story.begin()
    asking = world.spawn(story.says("Do it."))
    await world.advance(30 * SECOND)
    assert len(await list_pending_decisions(world.journal, world.now)) == 1
    story.interrupted = True
    asking.cancel()
    await asking
    assert await list_pending_decisions(world.journal, world.now) == []
    assert [each.why for each in await withdrawn(world)] == ["A person interrupted the answer."]


@pytest.mark.parametrize("owned", [True, False], ids=["by its owner", "where no process has it"])
async def test_the_question_of_a_session_that_is_over_is_withdrawn(
    world: World, tmp_path: Path, *, owned: bool
) -> None:
    """After Ctrl-C the session could go on, and its question stays; once it is cancelled, nothing waits for it."""
    story = Story(world, [calls(("wipe", {"path": "a"})), says("Well.")], kind="task")
    await story.begin()
    asking = world.spawn(story.says("Do it."))
    await world.advance(30 * SECOND)
    if not owned:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await world.advance(MINUTE)
        assert len(await list_pending_decisions(world.journal, world.now)) == 1
    desk = Actor(make_runtime(world, tmp_path), Principal("ada"))
    world.spawn(control.cancel(desk, "s"))
    await world.advance(2 * MINUTE)
    assert (await world.session("s")).state == "CANCELLED"
    assert [each.why for each in await withdrawn(world)] == ["Session s has ended: CANCELLED."]
    (row,) = await world.journal.ask(Query("all_decisions", DecisionRow))
    assert row.verdict == "withdrawn"
    with pytest.raises(NotDone, match=r"s.*/approval was withdrawn: the session no longer needs it\."):
        await get_open_decision(desk, row.decision)
    assert story.desk.done["wipe a"] == 0


def make_runtime(world: World, home: Path) -> Runtime:
    settings = Settings("memory:", home / "checkpoints", home / "key", "ada", home / "trust.json")
    checkpointer = Checkpointer(settings.checkpoints, settings.signing_key, "test", world.clock.now)
    return Runtime(settings, world.clock, world.ids, world.journal, checkpointer, world.ledger, {})


async def withdrawn(world: World) -> list[DecisionWithdrawn]:
    events = [stored.event for stored in await world.events(session_stream("s"))]
    return [event for event in events if isinstance(event, DecisionWithdrawn)]


async def test_a_task_that_is_cancelled_by_no_person_keeps_its_turn_open(world: World) -> None:
    story = Story(world)
    story.models = [Hesitant([says("Well.")], world.clock, ModelName("scripted", "script"))]
    await story.begin()
    answering = world.spawn(story.says("Read the report."))
    await world.advance(30 * SECOND)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    session_history = await recalled(world)
    assert not session_history.turn.is_over
    assert [message.role for message in session_history.transcript.messages] == ["user"]
