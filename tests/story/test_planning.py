"""A task for later is shown back exactly, and comes to be only by a person's yes to just that."""

from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from halter.config.merge import parse_fleet
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR
from halter.core.events import TriggerMade
from halter.core.ids import trigger_stream
from halter.core.ports import Query
from halter.core.rows import TriggerRow
from halter.core.schedules import Timing
from halter.guard.approvals import (
    PendingDecision,
    PlannedTrigger,
    answer_decision,
    ask_question,
    list_pending_decisions,
    make_trigger_question,
)
from halter.policy.store_policy import adopt_first_policy
from halter.runtime.message_router import HandledMessage
from halter.runtime.runtime import make_adoption_event
from halter.spec.triggers import Schedule
from halter.state.trigger_records import TriggerRecord
from halter.testing.world import World
from tests.story.autonomous import CALM
from tests.story.fronts import Front, front

MAIL = "schedule/desk/check-the-mail"


async def list_triggers(world: World) -> list[str]:
    return [row.trigger for row in await world.journal.ask(Query("all_triggers", TriggerRow))]


async def read_only_decision(desk: Front) -> PendingDecision:
    (pending_decision,) = await list_pending_decisions(desk.world.store)
    return pending_decision


async def test_nothing_exists_before_the_yes_and_then_exactly_what_was_shown(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        message = await desk.says("Every 2 days at 9 check the mail")
        assert isinstance(message, HandledMessage)
        assert message.routed.strategy == "SCHEDULED_TASK"
        assert message.answer.splitlines() == [
            "desk would run this task: check the mail",
            "When: every 2 days at 09:00, UTC",
            "Next: Thu 2026-01-01 09:00, Sat 2026-01-03 09:00, Mon 2026-01-05 09:00",
            "Cost: at most $1.00 a run and at most $15.00 in thirty days, bounded by every cap",
            f"Nothing is scheduled yet. Say approve, or run: halter approve {MAIL}",
        ]
        assert await list_triggers(world) == []
        pending_decision = await read_only_decision(desk)
        assert (
            pending_decision.decision,
            pending_decision.about,
            pending_decision.agent,
            pending_decision.session,
        ) == (MAIL, "schedule", "desk", "")
        assert pending_decision.display_text == "\n".join(message.answer.splitlines()[:4])

        assert "Approved" in await desk.answer("approve")
        (made,) = await world.events(trigger_stream("desk/check-the-mail"))
        assert isinstance(made.event, TriggerMade)
        assert (made.event.by, made.event.agent, made.event.type) == ("ada", "desk", "schedule")
        read = msgspec.json.decode(made.body or b"", type=TriggerRecord)
        assert read.timing == Timing(days=2, time="09:00", anchor=read.timing.anchor if read.timing else 0)
        trigger = read.trigger()
        assert isinstance(trigger, Schedule)
        assert (trigger.name, trigger.prompt) == ("check-the-mail", "check the mail")
        decided, planted = world.history[-3:-1]
        assert (decided.kind, planted.kind) == ("decision_made", "trigger_made")
        assert decided.at == planted.at


@CALM
async def test_what_was_said_no_to_or_was_answered_too_late_is_not_planned(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every day at 9 check the mail")
        await desk.answer("deny")
        await desk.answer("every day at 9 check the mail")
        pending_decision = await read_only_decision(desk)
        assert pending_decision.decision == f"{MAIL}-2"
        await world.advance(DAY)
        assert (await world.store.commit(answer_decision(pending_decision, "approve", "ada", "late"))).events == ()
        assert await list_triggers(world) == []


async def test_another_proposal_than_the_one_that_was_shown_is_not_planned(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every day at 9 check the mail")
        pending_decision = await read_only_decision(desk)
        content = (pending_decision.body or b"").replace(b"check the mail", b"wipe the disk!")
        for forged in (
            msgspec.structs.replace(pending_decision, body=content),
            msgspec.structs.replace(pending_decision, body=None),
            with_own_digest(pending_decision, content),
        ):
            assert (await world.store.commit(answer_decision(forged, "approve", "ada", world.ids.make()))).events == ()
        assert await list_triggers(world) == []
        assert (await desk.decisions())[MAIL].verdict == ""


def with_own_digest(pending_decision: PendingDecision, body: bytes) -> PendingDecision:
    """A forgery whose own digest fits."""
    question = make_trigger_question("desk", msgspec.json.decode(body, type=PlannedTrigger), HOUR)
    return msgspec.structs.replace(pending_decision, body=body, digest=question.digest)


async def test_no_agent_can_say_yes_to_a_schedule(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every day at 9 check the mail")
        for by in ("agent:desk", ""):
            assert (
                await world.store.commit(answer_decision(await read_only_decision(desk), "approve", by, f"by {by}"))
            ).events == ()
        assert await list_triggers(world) == []


async def test_a_second_yes_makes_no_second_trigger(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every day at 9 check the mail")
        pending_decision = await read_only_decision(desk)
        for key in ("one", "two"):
            await world.store.commit(answer_decision(pending_decision, "approve", "ada", key))
        assert len(await world.events(trigger_stream("desk/check-the-mail"))) == 1


async def test_a_trigger_that_came_to_be_meanwhile_is_not_put_in_the_place_of(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every day at 9 check the mail")
        pending_decision = await read_only_decision(desk)
        planned = pending_decision.proposed_trigger()
        assert planned is not None
        question = msgspec.structs.replace(
            make_trigger_question("desk", msgspec.structs.replace(planned, shown="another"), HOUR), decision="other"
        )
        await world.store.commit(ask_question(question))
        (other,) = [one for one in await list_pending_decisions(world.store) if one.decision == "other"]
        await world.store.commit(answer_decision(other, "approve", "ada", "one"))
        assert (await world.store.commit(answer_decision(pending_decision, "approve", "ada", "two"))).events == ()
        assert len(await world.events(trigger_stream("desk/check-the-mail"))) == 1


async def test_once_is_asked_about_as_well_and_not_after_its_time(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        text = await desk.answer("tomorrow at 9 send the report")
        assert "When: once, on 2026-01-02 at 09:00, UTC" in text
        assert ", and not again" in text
        pending_decision = await read_only_decision(desk)
        assert pending_decision.expires_at == min(world.now + DAY, pending_decision.expires_at)
        await desk.answer("approve")
        assert await list_triggers(world) == ["desk/send-the-report"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("every month on the 31st check the mail", ""),
        ("every 2 weeks check the mail at noon or so", ""),
        ("every day at 9 post sk-ant-api03-AAAAbbbbCCCCddddEEEEffffGGGGhhhhIIIIjjjjKKKKllll1234567890", "secret"),
        (f"every day at 9 check {'the mail ' * 2_000}", ""),
    ],
)
async def test_what_is_unclear_secret_or_endless_is_answered_and_not_asked_about(
    world: World, tmp_path: Path, text: str, reason: str
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        message = await desk.says(text)
        assert await list_pending_decisions(world.store) == [] or not reason
        assert await list_triggers(world) == []
        if reason:
            assert isinstance(message, HandledMessage)
            assert reason in message.answer


async def test_a_link_to_check_is_no_schedule(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        message = await desk.says("Check this link https://example.com/every/day/at/9")
        assert message.routed.strategy == "GOAL"


async def test_the_cost_of_earlier_tasks_is_shown_next_to_the_cap(world: World, tmp_path: Path) -> None:
    from halter.runtime.session_runner import attend_session
    from halter.runtime.session_start import begin_session

    reply = "- {text: Done., usage: {input_tokens: 1000, output_tokens: 100}}\n"
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, replies_yaml=reply * 5)
        for number in range(5):
            await begin_session(desk.context, "tell me more", "task", f"one-{number}")
            await attend_session(desk.context, f"one-{number}")
        text = await desk.answer("every day at 9 check the mail")
        most = "at most $1.00 a run and at most $30.00 in thirty days, bounded by every cap"
        assert f"Cost: {most}; its last 5 tasks cost $0.002 on average" in text


async def test_its_cost_is_bounded_by_the_policy_that_the_store_has_by_now(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        tighter = parse_fleet(load_bytes(b"limits: {max_cost_usd_per_day: 0.05}", "halter.yaml"))
        await world.store.commit(adopt_first_policy(make_adoption_event(tighter, "ada")))
        text = await desk.answer("every day at 9 check the mail")
        assert "Cost: at most $1.00 a run and at most $1.50 in thirty days, bounded by every cap" in text
