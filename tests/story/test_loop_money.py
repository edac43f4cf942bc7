"""What a budget does to a turn: the paid answer is kept, calls get results, and there are last words if so wished."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import CostCapReached, RequestSettled, SessionParked
from halter.core.money import Account, format_usd, micros_to_usd
from halter.core.ports import read_body
from halter.core.usage import Price
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions, raise_cap
from halter.guard.ledger import change_cap
from halter.guard.request import MODEL_REQUEST_TIMEOUT
from halter.loop.history import SessionHistory
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Facts
from halter.tasks.conversation import Conclusion
from halter.testing.world import World
from tests.story.loops import Story, calls, fails, says, used

TEN = Price(Decimal(10), Decimal(10))
"""Ten micro-dollars for each token."""
DEAR = used(4000, 85_000)
"""What costs 89 cents at that price, of the dollar that a session may spend."""
CAP = Account("session:s", "", "usd")


def make_priced_story(world: World, lines: Any, text: str = "", **settings: Any) -> Story:
    story = Story(world, lines, kind="task", policy_yaml=text, **settings)
    story.price = TEN
    return story


async def wait_for_decision(world: World) -> PendingDecision:
    while not (waiting := await list_pending_decisions(world.journal)):
        await world.clock.sleep(SECOND)
    return waiting[0]


async def exact(story: Story, ending: Conclusion, state: str, reason: str) -> None:
    """An end that says why, and money that adds up."""
    made = await story.receipt()
    assert (ending.state, ending.terminal_reason, made.state, made.terminal_reason) == (state, reason, state, reason)
    events = [stored.event for stored in await story.events()]
    charges = [event.charge for event in events if hasattr(event, "charge") and event.charge is not None]
    assert made.cost_usd == micros_to_usd(sum(charge.usd for charge in charges))
    assert made.in_doubt == ()


async def test_at_the_cap_the_paid_answer_is_kept_and_the_model_has_last_words(world: World) -> None:
    lines = [calls(("send", {"text": "one"}), text="I send it.", usage=DEAR), says("Sent; the rest is open.")]
    story = make_priced_story(world, lines)
    ending = await story.run("Send it.")
    await exact(story, ending, "BUDGET_EXCEEDED", "cost_cap_reached")
    assert story.desk.done == {"send one": 1}
    assert [tool_result.outcome for tool_result in story.results()] == ["ok"]
    assert story.told()[-1] == "wrap_up"
    assert story.model.requests[-1].tools == ()
    assert story.messages[-1].parts[0].text == "Sent; the rest is open."
    assert (await story.receipt()).cost_usd <= 1


async def test_calls_that_are_asked_for_in_last_words_are_answered_and_not_made(world: World) -> None:
    lines = [calls("look", usage=DEAR), calls(("send", {"text": "late"}))]
    story = make_priced_story(world, lines)
    await exact(story, await story.run("Look."), "BUDGET_EXCEEDED", "cost_cap_reached")
    assert story.desk.done == {"look": 1}
    assert [tool_result.outcome for tool_result in story.results()] == ["ok", "cost_cap_reached"]


async def test_with_stop_there_are_no_last_words(world: World) -> None:
    story = make_priced_story(
        world, [calls("look", usage=used(4000, 95_000)), says("Never said.")], "limits: {on_cap: stop}"
    )
    ending = await story.run("Look.")
    await exact(story, ending, "BUDGET_EXCEEDED", "cost_cap_reached")
    assert story.told() == ["near_budget"]
    assert len(story.model.requests) == 1
    assert "session:s" in ending.sentence


@pytest.mark.parametrize("kind", ["chat", "task", "autonomous"])
async def test_a_call_that_the_cap_does_not_cover_ends_any_session(world: World, kind: Any) -> None:
    lines = [*(calls("pay", ("look", {"at": f"{n}"})) for n in range(9)), says("All spent.", when="last answer")]
    story = Story(world, [lines[-1], *lines[:-1]], kind=kind)
    ending = await story.run("Pay.")
    await exact(story, ending, "BUDGET_EXCEEDED", "cost_cap_reached")
    assert story.desk.done["pay"] == 3
    assert [tool_result.outcome for tool_result in story.results() if tool_result.tool == "pay"] == [
        "ok",
        "ok",
        "ok",
        "cost_cap_reached",
    ]
    assert [tool_result.outcome for tool_result in story.results() if tool_result.tool == "look"] == ["ok"] * 4
    assert story.messages[-1].parts[0].text == "All spent."


async def test_a_token_budget_is_a_budget_too(world: World) -> None:
    lines = [calls(("look", {"at": f"{n}"}), usage=used(2000, 100)) for n in range(12)]
    story = Story(world, lines, kind="task", policy_yaml="limits: {token_budget: 20000}")
    ending = await story.run("Look.")
    assert (ending.state, ending.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")
    events = [stored.event for stored in await story.events()]
    assert {event.unit for event in events if isinstance(event, CostCapReached)} == {"tokens"}
    assert sum(event.charge.tokens for event in events if isinstance(event, RequestSettled) and event.charge) <= 20_000


ASK = "limits: {on_cap: ask}"


@pytest.mark.parametrize("by", ["decision", "budget"])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_raised_cap_lets_the_session_go_on_in_place(world: World, by: str, *, restart: bool) -> None:
    lines = [calls("look", usage=used(4000, 95_000)), calls(("look", {"at": "b"})), says("Done.")]
    story = make_priced_story(world, lines, ASK)
    running = world.spawn(run_or_attend(story, "Look."))
    waiting = await wait_for_decision(world)
    assert (waiting.about, waiting.subject) == ("cap_raise", "session:s")
    assert (await world.session("s")).state == "WAITING_FOR_BUDGET"
    await world.advance(HOUR)
    if restart:
        await world.restart()
        await world.advance(HOUR)
        running = world.spawn(run_or_attend(story))
        await world.advance(MINUTE)
        assert len(await list_pending_decisions(world.journal)) == 1
    raised = raise_cap(waiting, CAP, 10_000_000, "ada", "raise")
    await world.store.commit(raised if by == "decision" else change_cap(CAP, 10_000_000, "ada", "raise"))
    await running
    await exact(story, came_of(story), "COMPLETED", "completed")
    assert story.desk.done == {"look": 1, "look b": 1}


async def test_a_call_that_meets_a_cap_is_made_once_it_is_raised_and_counts(world: World) -> None:
    story = make_priced_story(world, [calls("pay", usage=used(4000, 85_000)), says("Paid.")], ASK)
    running = world.spawn(run_or_attend(story, "Pay."))
    await world.store.commit(raise_cap(await wait_for_decision(world), CAP, 10_000_000, "ada", "raise"))
    await running
    await exact(story, came_of(story), "COMPLETED", "completed")
    assert story.desk.done == {"pay": 1}
    assert story.loop is not None
    assert story.loop.spent == (await world.session("s")).spent


async def test_what_a_call_cost_counts_at_once(world: World) -> None:
    story = make_priced_story(world, [calls("pay"), says("Paid.")])
    await story.run("Pay.")
    assert story.loop is not None
    assert story.loop.spent == (await world.session("s")).spent
    assert story.loop.spent.usd > 250_000


async def run_or_attend(story: Story, task: str = "") -> None:
    await (story.run(task) if task else story.attend())


def came_of(story: Story) -> Conclusion:
    assert story.came is not None
    return story.came


@pytest.mark.parametrize("restart", [False, True])
async def test_a_cap_that_nobody_raises_is_the_end(world: World, *, restart: bool) -> None:
    story = make_priced_story(world, [calls("look", usage=used(4000, 95_000)), says("Never said.")], ASK)
    running = world.spawn(run_or_attend(story, "Look."))
    waiting = await wait_for_decision(world)
    if restart:
        await world.restart()
        running = world.spawn(run_or_attend(story))
        await world.advance(MINUTE)
    await world.store.commit(answer_decision(waiting, "deny", "ada", "no"))
    await running
    await exact(story, came_of(story), "BUDGET_EXCEEDED", "cost_cap_reached")
    assert len(story.model.requests) == 1


@pytest.mark.parametrize("crash", ["none", "asleep", "after"])
async def test_at_the_cap_of_a_day_the_session_sleeps_until_tomorrow_and_continues(world: World, crash: str) -> None:
    text = "limits: {max_cost_usd: 5, max_cost_usd_per_day: 0.5}"
    lines = [calls("look", usage=used(4000, 44_000)), calls(("slow", {"name": "b"})), says("Done.")]
    story = make_priced_story(world, lines, text)
    began = world.now
    running = world.spawn(run_or_attend(story, "Look."))
    await world.advance(MINUTE)
    assert (await world.session("s")).state == "SLEEPING"
    if crash == "asleep":
        await world.restart()
        await world.advance(DAY)
        running = world.spawn(run_or_attend(story))
    if crash == "after":
        await world.advance(DAY - world.now % DAY - SECOND)
        while not story.desk.together:
            await world.advance(SECOND // 4)
        await world.restart()
        await world.advance(MINUTE)
        running = world.spawn(run_or_attend(story))
    await running
    await exact(story, came_of(story), "COMPLETED", "completed")
    assert world.now >= began + DAY - began % DAY
    parks = [stored.event for stored in await story.events() if isinstance(stored.event, SessionParked)]
    assert {park.state for park in parks} == {"SLEEPING"}
    assert "wrap_up" not in story.told()
    session_history = SessionHistory("s")
    await session_history.apply(await story.events(), lambda stored: read_body(world.journal, stored))
    assert (session_history.turn.capped, session_history.turn.refusal) == (False, "")


async def test_after_a_raise_the_model_is_shown_what_is_left_now(world: World) -> None:
    lines = [calls("look", usage=used(4000, 95_000)), calls(("look", {"at": "b"})), says("Done.")]
    story = make_priced_story(world, lines, ASK)
    running = world.spawn(run_or_attend(story, "Look."))
    await world.store.commit(raise_cap(await wait_for_decision(world), CAP, 10_000_000, "ada", "raise"))
    await running
    assert "Left to spend: $8" in story.model.requests[-1].messages[-1].parts[-1].text


async def test_the_model_is_warned_once_in_a_session_that_its_budget_is_nearly_used_up(world: World) -> None:
    lines = [says("One.", usage=used(4000, 76_500)), *(says(f"{n}.", usage=used(100, 10)) for n in range(5))]
    story = Story(world, lines)
    story.price = TEN
    await story.begin()
    for number in range(5):
        await story.says(f"Question {number}?")
        await world.restart()
    assert story.told() == ["near_budget"]


async def test_the_model_is_shown_what_is_left_and_it_is_the_same_after_a_restart(world: World) -> None:
    more = "limits: {token_budget: 200000}"
    lines = [calls("pay"), says("One.", usage=used(4000, 1000)), says("Two.")]
    story = Story(world, lines, policy_yaml=more)
    story.price = TEN
    await story.begin()
    await story.says("First?")
    assert story.loop is not None
    await story.says("Second?")
    part = story.model.requests[2].messages[-1].parts[-1]
    assert part.reason == "volatile"
    assert "Left to spend: $" in part.text
    assert story.loop.spent == (await world.session("s")).spent


async def test_what_costs_more_than_the_cap_stops_the_session_and_is_charged_in_full(world: World) -> None:
    story = make_priced_story(world, [calls("look", usage=used(4000, 200_000)), says("Never said.")])
    ending = await story.run("Look.")
    await exact(story, ending, "BUDGET_EXCEEDED", "overrun")
    assert (await story.receipt()).cost_usd == micros_to_usd(2_040_000)
    assert [tool_result.outcome for tool_result in story.results()] == ["ok"]
    assert len(story.model.requests) == 1


async def test_a_window_that_never_holds_enough_is_not_slept_for(world: World) -> None:
    story = Story(world, [says("Never asked.")], kind="task", policy_yaml="limits: {max_cost_usd_per_day: 0.001}")
    story.price = TEN
    async with asyncio.timeout(3 * DAY / SECOND):
        ending = await story.run("Look.")
    assert (ending.state, ending.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")
    assert story.model.requests == []


@pytest.mark.parametrize("limits", ["limits: {}", "limits: {on_cap: stop, max_cost_usd: 0.9}"])
@pytest.mark.parametrize("kind", ["BadAnswer", "ConnectionLost", "CutStream"])
async def test_answers_that_cannot_be_used_and_use_up_the_cap_are_named_as_what_stopped_the_session(
    world: World, kind: str, limits: str
) -> None:
    bad = fails(kind, usage=used(4000, 40_000))
    story = make_priced_story(world, [bad, bad, says("Never asked.")], limits)
    ending = await story.run("Look.")
    await exact(story, ending, "ERROR", "model_error")
    assert ending.sentence.startswith(f"{kind}: the provider says no")
    assert "2 requests without a usable answer were charged" in ending.sentence
    assert len(story.model.requests) == 2


async def test_a_failure_that_was_not_charged_is_not_named_as_what_used_up_the_cap(world: World) -> None:
    lines = [calls("look", usage=used(4000, 85_000)), fails(billed=False), says("All spent.", when="last answer")]
    story = make_priced_story(world, lines, "limits: {min_output_tokens: 1000}")
    await exact(story, await story.run("Look."), "BUDGET_EXCEEDED", "cost_cap_reached")


async def test_a_provider_that_hangs_is_charged_all_that_was_held_and_the_receipt_says_so(world: World) -> None:
    story = make_priced_story(
        world, [says("Too late.", takes=2 * MODEL_REQUEST_TIMEOUT), says("Here.", usage=used(1000, 100))]
    )
    await story.run("Look.")
    late, receipt_line = (await story.receipt()).requests
    assert (late.outcome, late.cost_usd, late.usage) == ("timeout", late.held_usd, None)
    assert (receipt_line.outcome, receipt_line.cost_usd < receipt_line.held_usd) == ("ok", True)
    sheet = build_receipt_sheet(await story.receipt())[0]
    assert isinstance(sheet, Facts)
    facts = dict(sheet.facts)
    assert facts["charged as held"].startswith(f"{format_usd(late.held_usd)} for 1 request without an answer: ")
