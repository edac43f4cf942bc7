"""A crash at any commit while several calls of one step wait for a person: each is made once, as the person decided."""

from collections import Counter
from typing import Any, Final

import pytest

from halter.core.clock import SECOND
from halter.core.messages import Prompt, Reply
from halter.core.usage import ModelName
from halter.core.vocabulary import Verdict
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.models.scripted import Scripted
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from tests.crash.test_loop_crashes import EVERY, TEN, Sensible, check_outcome, last, reply
from tests.story.loops import Story, calls, says, used
from tests.story.test_question_holds import DIME, buys, check_books, make_buyer

DID: Final = ("wipe a", "send 1", "wipe b", "wipe c")
"""Action of each call of the step, by position."""
LATE: Final = 40 * SECOND


def clerk(prompt: Prompt, _: int) -> Reply:
    if "result:wipe" in last(prompt):
        return reply(says("Done."))
    result: Any = [(did[:4], {"text" if did[:4] == "send" else "path": did[5:]}) for did in DID]
    return reply(calls(*result))


async def answer_truly(world: World, story: Story) -> None:
    """Allow the first wipe, deny the second, allow the last one late; say truly what was done before a crash."""
    while True:
        for waiting in await list_pending_decisions(world.journal):
            if waiting.subject.endswith("_3"):
                await world.clock.sleep(LATE)
            store = world.store.patient(world.clock)
            await store.commit(answer_decision(waiting, verdict(story, waiting), "ada", world.ids.make()))
        await world.clock.sleep(SECOND)


def verdict(story: Story, waiting: PendingDecision) -> Verdict:
    if waiting.about == "unknown_call":
        return "approve" if story.desk.done[DID[int(waiting.subject[-1])]] else "deny"
    return "deny" if waiting.subject.endswith("_2") else "approve"


@pytest.mark.parametrize("predicted", [False, True])
@EVERY
def test_calls_that_wait_together_are_each_made_once_whatever_crashes(*, predicted: bool, every: int) -> None:
    stories: list[Story] = []

    async def program(world: World) -> None:
        answering = world.spawn(answer_truly(world, stories[-1]))
        await stories[-1].begin("Clean up.")
        if not (await world.session("s")).ended:
            await stories[-1].attend()
        answering.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash)
        story = Story(world, kind="task", policy_yaml="policy: {simulate: asked}")
        story.models, story.price = [Sensible(world, clerk)], TEN
        if predicted:
            foresees = [says("It will be gone.", usage=used(100, 20))] * 50
            story.simulates = Scripted(foresees, world.clock, ModelName("scripted", "m9"))
        stories.append(story)
        return world

    for world in crash_everywhere(program, new_world, every=every):
        story = stories[-1]
        assert max(story.desk.done.values()) == 1
        assert story.desk.done["wipe b"] == 0
        assert world.run(check_outcome(world, story)).state == "COMPLETED"
        for did, result in zip(DID, story.results(), strict=True):
            assert story.desk.done[did] == (result.outcome == "ok"), world


def buyer(prompt: Prompt, _: int) -> Reply:
    return reply(says("Done.")) if "result:buy" in last(prompt) else reply(buys("a", "b", "c"))


async def answer_purchases(world: World, story: Story, denied: list[str]) -> None:
    """Deny the first purchase that is asked about, and allow the others; say truly what was done before a crash."""
    while True:
        for waiting in await list_pending_decisions(world.journal):
            denied += [] if denied else [waiting.decision]
            is_yes = waiting.decision not in denied
            if waiting.about == "unknown_call":
                is_yes = bool(story.desk.done[f"buy {'abc'[int(waiting.subject[-1])]}"])
            store = world.store.patient(world.clock)
            await store.commit(answer_decision(waiting, "approve" if is_yes else "deny", "ada", world.ids.make()))
        await world.clock.sleep(SECOND)


@EVERY
def test_the_money_of_questions_is_exact_whatever_crashes(*, every: int) -> None:
    stories: list[Story] = []
    denied_by_run: list[list[str]] = []

    async def program(world: World) -> None:
        answering = world.spawn(answer_purchases(world, stories[-1], denied_by_run[-1]))
        await stories[-1].begin("Buy three things.")
        if not (await world.session("s")).ended:
            await stories[-1].attend()
        answering.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash)
        story = make_buyer(world, ())
        story.models = [Sensible(world, buyer)]
        stories.append(story)
        denied_by_run.append([])
        return world

    for world in crash_everywhere(program, new_world, every=every):
        story = stories[-1]
        assert max(story.desk.done.values()) == 1, world
        assert world.run(check_outcome(world, story)).state == "COMPLETED"
        assert Counter(result.outcome for result in story.results())["approval_denied"] == 1, world
        world.run(check_books(world, 4 * DIME * sum(story.desk.done.values())))
