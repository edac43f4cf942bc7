"""What nobody meant to happen: crashes at the worst moment, erased pasts, tools and models that do as they like."""

import asyncio
from decimal import Decimal
from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND, SystemClock
from halter.core.errors import ConfigError
from halter.core.events import RequestStarted
from halter.core.ids import SessionId, make_worker_id
from halter.core.messages import Prompt, Reply, Text, TextListener
from halter.core.money import Account, Spender, make_legs
from halter.core.ports import Lease
from halter.core.tools import Permit
from halter.core.usage import ModelName, Price
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.ledger import ActualResult, change_cap
from halter.journal.retention import erase_session_bodies
from halter.loop.observer import LiveContext
from halter.models.scripted import Scripted, ScriptLine
from halter.runtime.agent import Agent
from halter.spec.models import BrainSpec, ContextStrategy
from halter.state import lifecycle
from halter.state.session import InFlight
from halter.testing.fakes import HoldTaken, hold
from halter.testing.world import World
from halter.tools.function_tool import tool
from tests.crash.test_loop_crashes import recalled, timeless
from tests.story.loops import Desk, Story, calls, says, used


async def same_again(world: World, story: Story) -> None:
    """Another process that reads the events knows what this one knows."""
    session_history = await recalled(world)
    assert story.loop is not None
    assert timeless(session_history.turn) == timeless(story.loop.turn)
    assert session_history.transcript.messages == story.messages


def cut_off() -> ScriptLine:
    return says("Half of ", stop="max_tokens")


class Echoing(Scripted):
    """A model that writes its calls as text, with the key of the request that it is asked by."""

    def __init__(self, world: World, *texts: str) -> None:
        super().__init__((), world.clock, ModelName("scripted", "script"))
        self._texts = iter(texts)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.requests.append(prompt)
        prompt_text = prompt.messages[-1].parts[-1].text
        key = prompt_text.partition("<skill ")[2].partition(">")[0]
        return Reply((Text(next(self._texts, "Done.").replace("{k}", key), "model", trusted=False),))


async def attend_story(story: Story) -> None:
    await story.attend()


async def test_calls_that_ended_before_the_timeout_are_reported_as_done(world: World) -> None:
    async def archive() -> str:
        await asyncio.sleep(25)
        return "an old page"

    lines = [calls(("send", {"text": "x"}), "archive"), says("Done.")]
    story = Story(world, lines, policy_yaml="limits: {timeout: 20s}")
    story.extra = [tool(archive, level="SAFE", effect="read")]
    await story.begin("Send it.")
    world.spawn(attend_story(story))
    await world.advance(5 * SECOND)
    await world.restart()
    await world.advance(MINUTE)
    ending = await story.attend()
    assert ending.sentence.startswith("The turn exceeded its limit")
    assert [(tool_result.tool, tool_result.outcome) for tool_result in story.results()] == [
        ("send", "ok"),
        ("archive", "ok"),
    ]
    assert story.desk.done == {"send x": 1}
    await same_again(world, story)


async def test_of_calls_in_a_row_none_starts_after_the_timeout(world: World) -> None:
    text = "<skill {k}>slow(name='a')</skill><skill {k}>slow(name='b')</skill><skill {k}>send(text='late')</skill>"
    story = Story(
        world, kind="task", policy_yaml="limits: {timeout: 1500ms}", mind=BrainSpec(model="m:m", tool_calls="text")
    )
    story.models = [Echoing(world, text)]
    ending = await story.run("Go.")
    assert (ending.state, ending.terminal_reason) == ("TIMED_OUT", "timed_out")
    assert [tool_result.outcome for tool_result in story.results()] == ["ok", "timeout", "cancelled"]
    assert story.desk.done == {}
    await same_again(world, story)


async def test_a_tool_that_is_called_like_a_verb_cannot_break_its_session(world: World) -> None:
    async def give(mode: int = 0) -> str:
        return "given"

    story = Story(world, [calls(("yield", {"mode": 5})), says("Well.")])
    story.extra = [tool(give, name="yield", level="SAFE", effect="read")]
    ending = await story.run("Give way.")
    assert (ending.state, ending.has_ended) == ("WAITING_FOR_INPUT", False)


@pytest.mark.parametrize("strategy", ["compact", "sliding_window", "summarize"])
async def test_a_session_whose_events_were_erased_continues_and_loses_nothing_new(
    world: World, strategy: ContextStrategy
) -> None:
    mind = BrainSpec(model="scripted:script", context_strategy=strategy, max_output_tokens=500)
    turn = [*(calls(("long", {"size": 9000 + number})) for number in range(6)), cut_off(), says("Done.")]
    story = Story(world, turn * 4, kind="task", mind=mind)
    story.window = 30_000
    story.summarizer = Scripted([says("Pages were read.")] * 20, world.clock, ModelName("scripted", "m1"))
    await story.run("Read it all.")
    for _ in range(2):
        await world.store.commit(lifecycle.reopen_session("s", world.ids.make(), "ada"))
        await story.says("Read it all again.")
    assert len((await erase_session_bodies(world.journal, ["s"], "ann", "asked for it")).erased) == 1
    before = await story.kinds()
    await world.store.commit(lifecycle.reopen_session("s", world.ids.make(), "ada"))
    assert (await story.says("Read on.")).state == "COMPLETED"
    await same_again(world, story)
    assert {"context_cut", "message_added"} <= {*(await story.kinds())[len(before) :]}


@pytest.mark.parametrize("name", ["yield", "ask_user", "final_answer", "read_output"])
async def test_no_tool_may_be_called_like_one_of_halters_own(tmp_path: Path, name: str) -> None:
    model = Scripted((), SystemClock(), ModelName("scripted", "script"))
    agent = Agent("desk", model=model, store=tmp_path / "h.db", environ={"HOME": str(tmp_path)})
    agent.tool(Desk().look, name=name)
    with pytest.raises(ConfigError, match=f"The tool name {name} is reserved"):
        await agent.run("Go.")


PREDICTED = (
    "[ANTICIPATORY SIMULATION] of wipe (c1_0_0), made before the call and no part of its result: It will be gone."
)


@pytest.mark.parametrize("outputs", [50, 300_000])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_prediction_is_paid_for_and_shown_to_the_model_whichever_worker_resumes_the_session(
    world: World, outputs: int, *, restart: bool
) -> None:
    lines = [calls(("wipe", {"path": "a"}), usage=used(500, 20)), says("Done.", usage=used(500, 20))]
    story = Story(world, lines, kind="task", policy_yaml="policy: {simulate: asked}")
    story.price = Price(Decimal(10), Decimal(10))
    foresees = [says("It will be gone.", usage=used(100, outputs))]
    story.simulates = Scripted(foresees, world.clock, ModelName("scripted", "m9"))
    await story.begin("Clean up.")
    running = world.spawn(attend_story(story))
    await world.advance(MINUTE)
    if restart:
        await world.restart()
        running = world.spawn(attend_story(story))
        await world.advance(MINUTE)
    (waiting,) = await list_pending_decisions(world.journal)
    await world.store.commit(answer_decision(waiting, "approve", "ada", "yes"))
    await running
    assert story.came is not None
    assert story.came.terminal_reason == ("overrun" if outputs > 50 else "completed")
    assert [tool_result.text for tool_result in story.results()] == ["wiped"]
    assert [(tool_result.text, tool_result.origin, tool_result.trusted) for tool_result in story.predictions()] == [
        (PREDICTED, "model", False)
    ]
    assert story.loop is not None
    assert story.loop.spent == (await world.session("s")).spent
    await same_again(world, story)


async def test_calls_that_wait_for_room_do_not_take_longer_than_their_turn_may(world: World) -> None:
    async def nap(number: int) -> str:
        await asyncio.sleep(15)
        return f"nap {number}"

    lines = [calls(*(("nap", {"number": number}) for number in range(25)))]
    story = Story(world, lines, kind="task", policy_yaml="limits: {timeout: 20s}")
    story.extra = [tool(nap, level="SAFE", effect="read")]
    began = world.now
    assert (await story.run("Sleep.")).state == "TIMED_OUT"
    assert world.now - began < 21 * SECOND
    assert sorted(tool_result.outcome for tool_result in story.results()) == ["ok"] * 10 + ["timeout"] * 15


async def held_by_others(world: World, story: Story, usd: int) -> tuple[Lease, InFlight]:
    """Let another session of the same agent hold money."""
    store = world.store.patient(world.clock)
    await world.start("other", agent="desk")
    lease = await acquire_lease(store, world.clock, make_worker_id("other", world.ids), SessionId("other"), SECOND)
    assert lease is not None
    where = make_legs(story.standing().caps, Spender("other", "desk", ""), world.now, usd=usd)
    intent = RequestStarted(request="other.t/0", model="scripted:script", purpose="turn", legs=where)
    outcome = await hold(world.ledger, lease, intent)
    assert isinstance(outcome, HoldTaken)
    return lease, outcome.flight


async def test_a_summary_is_done_without_while_others_hold_the_money_for_it(world: World) -> None:
    mind = BrainSpec(model="scripted:script", context_strategy="summarize", max_output_tokens=500)
    lines = [*(calls(("long", {"size": 9000 + number})) for number in range(4)), says("Done.")]
    story = Story(world, lines, kind="task", mind=mind, policy_yaml="limits: {max_cost_usd_per_day: 0.6}")
    story.window, story.prices = 30_000, {"scripted:dear": Price(Decimal(10), Decimal(10))}
    story.summarizer = Scripted([says("Pages.")], world.clock, ModelName("scripted", "dear"))
    await held_by_others(world, story, 599_999)
    async with asyncio.timeout(60):
        assert (await story.run("Read.")).state == "COMPLETED"
    assert "context_cut" in await story.kinds()
    await same_again(world, story)


async def test_a_call_that_waits_for_money_does_not_wait_for_a_person_as_well(world: World) -> None:
    lines = [calls("pay", ("wipe", {"path": "a"})), says("Done.")]
    story = Story(world, lines, kind="task", policy_yaml="limits: {max_cost_usd_per_day: 0.4}")
    lease, flight = await held_by_others(world, story, 300_000)
    await story.begin("Pay.")
    world.spawn(attend_story(story))
    await world.advance(2 * MINUTE)
    assert story.desk.done == {}
    await world.ledger.settle(lease, flight, ActualResult("ok", usd=1000))
    await world.advance(2 * MINUTE)
    assert story.desk.done == {"pay": 1}
    assert len(await list_pending_decisions(world.journal)) == 1


async def test_a_secret_of_several_lines_in_what_is_known_right_now_is_not_written_down(world: World) -> None:
    story = Story(world, [says("Hello.")])
    story.senses = LiveContext(lambda: 'The door says "hunter2\nhunter2".')
    story.redact = lambda text: text.replace('"hunter2\nhunter2"', "[redacted]")
    await story.run("What do you know?")
    bodies = [event.body or b"" for event in await story.events()]
    assert any(b"The door says [redacted]" in body for body in bodies)
    assert not any(b"hunter2" in body for body in bodies)


async def test_after_a_raise_there_are_still_last_words(world: World) -> None:
    dear = [calls("look", usage=used(4000, 85_000)), calls("price", usage=used(4000, 80_000))]
    small = [calls("price", usage=used(400, 600)) for _ in range(40)]
    story = Story(world, [says("All spent.", when="last answer"), *dear, *small], kind="task")
    story.price = Price(Decimal(10), Decimal(10))
    await world.store.commit(change_cap(Account("session:s", "", "usd"), 2_000_000, "ada", "raise"))
    ending = await story.run("Look.")
    assert (ending.state, ending.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")
    assert story.told()[-1] == "wrap_up"
    assert story.messages[-1].parts[0].text == "All spent."
