"""What a session waits for: its tools, its person, an approval, its next turn. None of it counts as its own time."""

import asyncio

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import SessionParked, WakePosted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.messages import Text
from halter.core.vocabulary import Outcome, SessionKind
from halter.guard.approvals import PendingDecision, answer_decision, approve_edited, list_pending_decisions
from halter.guard.guard import GuardRuntime
from halter.guard.halts import cancel, halt
from halter.guard.prepare import Call
from halter.loop.session_runtime import SessionRuntime
from halter.models.prices import Prices
from halter.redaction.secrets import GivenSecrets
from halter.state import lifecycle
from halter.tasks.conversation import Conclusion
from halter.testing.world import World
from tests.story.autonomous import CALM
from tests.story.loops import Story, calls, fails, redact, says


async def wait_for_decision(world: World) -> PendingDecision:
    """Wait until something needs a person."""
    while not (waiting := await list_pending_decisions(world.journal)):
        await world.clock.sleep(SECOND)
    return waiting[0]


async def parks(story: Story) -> list[SessionParked]:
    return [stored.event for stored in await story.events() if isinstance(stored.event, SessionParked)]


async def wakes(world: World, story: Story, ending: Conclusion) -> Conclusion:
    """Let the session sleep until its time, and go on."""
    assert ending.state == "SLEEPING"
    assert ending.wake_at is not None
    await world.advance(ending.wake_at - world.now)
    return await story.attend()


async def test_a_session_waits_for_its_tool_while_a_call_is_being_made(world: World) -> None:
    story = Story(world, [calls("look", ("slow", {"name": "a"})), says("Done.", takes=SECOND)], kind="task")
    running = asyncio.create_task(story.run("Look."))
    while not story.desk.together:
        await world.advance(SECOND // 50)
    assert (await world.session("s")).stands == "WAITING_FOR_TOOL"
    while len(story.model.requests) < 2:
        await world.advance(SECOND // 50)
    assert (await world.session("s")).state == "RUNNING"
    assert (await running).state == "COMPLETED"


@pytest.mark.parametrize("kind", ["chat", "task", "autonomous"])
async def test_a_question_to_the_person_is_answered_by_their_next_message(world: World, kind: SessionKind) -> None:
    lines = [calls(("ask_user", {"question": "Which one?"})), says("The red one, then.", when="red")]
    story = Story(world, lines, kind=kind)
    ending = await story.run("Paint it.")
    assert (ending.state, ending.has_ended) == ("WAITING_FOR_INPUT", False)
    assert [park.wake_at for park in await parks(story)] == [None]
    ending = await story.says("red")
    assert ending.state == {"chat": "WAITING_FOR_INPUT", "task": "COMPLETED", "autonomous": "SLEEPING"}[kind]
    assert [result.outcome for result in story.results()] == ["ok"]


async def test_a_call_that_waits_for_approval_stops_no_other_call_of_its_step(world: World) -> None:
    lines = [calls(("wipe", {"path": "a"}), ("send", {"text": "one"}), ("look", {"at": "b"})), says("Done.")]
    story = Story(world, lines, kind="task")
    running = asyncio.create_task(story.run("Clean up."))
    waiting = await wait_for_decision(world)
    await world.advance(SECOND)
    assert (waiting.about, waiting.name) == ("approval", "wipe")
    assert (await world.session("s")).state == "WAITING_FOR_APPROVAL"
    assert story.desk.done == {"send one": 1, "look b": 1}
    await world.store.commit(answer_decision(waiting, "approve", "ada", "yes"))
    assert (await running).state == "COMPLETED"
    assert story.desk.done == {"send one": 1, "look b": 1, "wipe a": 1}
    assert [(result.tool, result.outcome) for result in story.results()] == [
        ("wipe", "ok"),
        ("send", "ok"),
        ("look", "ok"),
    ]


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_calls_that_wait_each_continues_with_its_own_answer(world: World, first: int) -> None:
    story = Story(world, [calls(("wipe", {"path": "a"}), ("wipe", {"path": "b"})), says("Done.")], kind="task")
    running = asyncio.create_task(story.run("Clean up."))
    await wait_for_decision(world)
    await world.advance(SECOND)
    waiting = sorted(await list_pending_decisions(world.journal), key=lambda one: one.subject)
    await world.store.commit(answer_decision(waiting[first], "approve", "ada", "yes"))
    await world.advance(MINUTE)
    assert sum(story.desk.done.values()) == 1
    await world.store.commit(answer_decision(waiting[1 - first], "deny", "ada", "no"))
    assert (await running).state == "COMPLETED"
    outcomes = [result.outcome for result in story.results()]
    assert outcomes == (["ok", "approval_denied"] if first == 0 else ["approval_denied", "ok"])
    assert sum(story.desk.done.values()) == 1


async def test_a_denial_is_shown_to_the_model_as_a_denial(world: World) -> None:
    story = Story(world, [calls(("wipe", {"path": "a"})), says("Then not.")], kind="task")
    running = asyncio.create_task(story.run("Clean up."))
    await world.store.commit(answer_decision(await wait_for_decision(world), "deny", "ada", "no", "too much"))
    assert (await running).state == "COMPLETED"
    (result,) = story.results()
    assert result.outcome == "approval_denied"
    assert result.text.startswith("[approval_denied] ada denied this call")
    assert story.desk.done == {}


@CALM
async def test_an_expiry_is_shown_to_the_model_as_an_expiry(world: World) -> None:
    story = Story(world, [calls(("wipe", {"path": "a"})), says("Nobody answered.")], kind="task")
    began = world.now
    assert (await story.run("Clean up.")).state == "COMPLETED"
    (result,) = story.results()
    assert result.outcome == "approval_expired"
    assert "[approval_expired]" in result.text
    assert story.desk.done == {}
    assert DAY <= world.now - began < DAY + HOUR


async def test_the_model_is_given_what_a_person_let_be_done_instead(world: World) -> None:
    story = Story(world, [calls(("wipe", {"path": "everything"})), says("Done.")], kind="task")
    running = asyncio.create_task(story.run("Clean up."))
    await world.store.commit(approve_edited(await wait_for_decision(world), b'{"path": "a little"}', "ada", "edit"))
    assert (await running).state == "COMPLETED"
    assert story.desk.done == {"wipe a little": 1}


@pytest.mark.parametrize("stop", ["HALTED", "CANCELLED"])
async def test_a_halt_ends_a_session_that_waits_for_approval(world: World, stop: str) -> None:
    story = Story(world, [calls(("wipe", {"path": "a"}))], kind="task")
    running = asyncio.create_task(story.run("Clean up."))
    await wait_for_decision(world)
    await world.store.commit(halt("fleet", "ada", "h") if stop == "HALTED" else cancel("s", "ada", "c"))
    assert (await running).state == stop
    assert story.desk.done == {}


async def test_the_time_that_a_person_takes_is_not_the_turns_time(world: World) -> None:
    lines = [calls(("wipe", {"path": "a"})), says("Done.", takes=30 * SECOND)]
    story = Story(world, lines, kind="task", policy_yaml="limits: {timeout: 60s}")
    running = asyncio.create_task(story.run("Clean up."))
    waiting = await wait_for_decision(world)
    await world.advance(3 * HOUR)
    await world.store.commit(answer_decision(waiting, "approve", "ada", "yes"))
    assert (await running).state == "COMPLETED"


async def test_the_time_in_which_nobody_had_the_session_is_not_the_turns_time(world: World) -> None:
    story = Story(world, [says("Never said.", takes=HOUR), says("Done.", takes=30 * SECOND)], kind="task")
    story.policy = Story(world, policy_yaml="limits: {timeout: 60s}").policy
    world.spawn(run_story(story, "Go."))
    await world.advance(10 * SECOND)
    await world.restart()
    await world.advance(HOUR)
    assert (await story.attend()).state == "COMPLETED"


async def run_story(story: Story, task: str) -> None:
    await story.run(task)


async def test_after_a_restart_in_a_wait_the_turns_clock_runs_again(world: World) -> None:
    lines = [calls(("wipe", {"path": "a"})), says("Too late.", takes=5 * MINUTE)]
    story = Story(world, lines, kind="task", policy_yaml="limits: {timeout: 60s}")
    world.spawn(run_story(story, "Clean up."))
    waiting = await wait_for_decision(world)
    await world.advance(SECOND)
    await world.restart()
    await world.advance(HOUR)
    running = asyncio.create_task(story.attend())
    await world.advance(MINUTE)
    await world.store.commit(answer_decision(waiting, "approve", "ada", "yes"))
    began = world.now
    ending = await running
    assert (ending.state, ending.terminal_reason) == ("TIMED_OUT", "timed_out")
    assert world.now - began <= 61 * SECOND
    assert story.desk.done == {"wipe a": 1}


async def test_a_chat_lives_for_as_many_turns_as_its_person_likes(world: World) -> None:
    lines = [each for n in range(60) for each in (calls("look", takes=SECOND), says(f"Nothing {n}."))]
    story = Story(world, lines, policy_yaml="limits: {timeout: 60s}")
    await story.begin()
    for _ in range(60):
        assert (await story.says("Look there, please.")).sentence == ""
        await world.advance(HOUR)
    assert story.told() == []
    assert len(story.model.requests) == 120


async def test_an_autonomous_session_sleeps_as_it_yields_and_looks_again_on_waking(world: World) -> None:
    lines = [
        calls(("yield", {"mode": "sleep", "sleep": 90})),
        calls(("yield", {"mode": "continue"})),
        calls(("yield", {"mode": "shutdown", "reason": "all done"})),
    ]
    story = Story(world, lines, kind="autonomous")
    began = world.now
    ending = await story.run("Watch.")
    assert ending.wake_at == began + 90 * SECOND
    ending = await wakes(world, story, ending)
    assert (ending.state, ending.terminal_reason) == ("COMPLETED", "completed")
    assert story.told() == ["observe", "observe"]
    assert [line.name for line in (await story.receipt()).calls] == ["yield"] * 3


async def test_a_sleep_is_kept_within_what_is_allowed(world: World) -> None:
    lines = [calls(("yield", {"mode": "sleep", "sleep": seconds})) for seconds in (0, 10**6)]
    story = Story(world, lines, kind="autonomous", min_sleep=10 * SECOND, max_sleep=HOUR)
    ending = await story.run("Watch.")
    assert ending.wake_at == world.now + 10 * SECOND
    ending = await wakes(world, story, ending)
    assert ending.wake_at == world.now + HOUR


async def test_without_a_yield_the_pauses_double_until_there_is_one(world: World) -> None:
    lines = [*(says("Hm.") for _ in range(5)), calls(("yield", {"mode": "sleep", "sleep": 7})), says("Hm.")]
    story = Story(world, lines, kind="autonomous", max_sleep=10 * SECOND)
    ending = await story.run("Watch.")
    slept = [ending.wake_at]
    pauses = [(ending.wake_at or 0) - world.now]
    for _ in range(6):
        ending = await wakes(world, story, ending)
        slept.append(ending.wake_at)
        pauses.append((ending.wake_at or 0) - world.now)
    assert [pause // SECOND for pause in pauses] == [1, 2, 4, 8, 10, 7, 1]


async def test_a_message_wakes_a_sleeping_session_and_is_what_its_turn_begins_with(world: World) -> None:
    lines = [calls(("yield", {"mode": "sleep", "sleep": 9000})), says("I heard you.", when="wake up")]
    story = Story(world, lines, kind="autonomous")
    await story.run("Watch.")
    await world.advance(MINUTE)
    assert (await story.says("wake up")).state == "SLEEPING"
    texts = [part.text for message in story.messages for part in message.parts if isinstance(part, Text)]
    assert texts == ["Watch.", "wake up", "I heard you."]


async def test_a_signal_wakes_a_sleeping_session_only_if_it_was_asked_for(world: World) -> None:
    values = {"mode": "sleep", "sleep": 9000, "wake_early_if": ["door", "rain"]}
    story = Story(world, [calls(("yield", values)), says("Somebody is there.", when="rings")], kind="autonomous")
    await story.run("Watch.")
    assert [park.wake_on for park in await parks(story)] == [("door", "rain")]
    for name, heard in (("wind", False), ("door", True)):
        signal = WakePosted(cause="signal", name=name, origin="sensor", sender="bell")
        committed = await world.store.commit(lifecycle.post_wake("s", name, signal, b"it rings"))
        assert [getattr(stored.event, "wakes", None) for stored in committed.events] == [heard]
    await story.attend()
    assert len(story.model.requests) == 2


async def test_an_autonomous_session_is_shown_what_stopped_its_last_turn(world: World) -> None:
    story = Story(world, [fails("Forbidden", retry=False), calls(("yield", {"mode": "shutdown"}))], kind="autonomous")
    ending = await wakes(world, story, await story.run("Watch."))
    assert ending.state == "COMPLETED"
    assert story.told() == ["trouble", "observe"]
    assert "Your last turn was stopped: Forbidden: the provider says no" in str(story.model.requests[-1].messages)


async def test_a_bad_turn_between_good_ones_is_forgotten(world: World) -> None:
    bad = fails(retry=False)
    good = calls(("yield", {"mode": "sleep", "sleep": 1}))
    story = Story(world, [bad, bad, good, bad, bad, good], kind="autonomous")
    ending = await story.run("Watch.")
    for _ in range(5):
        ending = await wakes(world, story, ending)
    assert ending.state == "SLEEPING"


async def test_a_chat_that_is_cancelled_while_it_waits_has_ended(world: World) -> None:
    story = Story(world, [says("Hello.")])
    await story.begin()
    await story.says("Hi.")
    await world.store.commit(cancel("s", "ada", "cancel"))
    ending = await story.attend()
    assert (ending.state, ending.terminal_reason) == ("CANCELLED", "cancelled")
    assert (await story.receipt()).terminal_reason == "cancelled"


async def test_a_question_in_a_task_outlives_a_restart(world: World) -> None:
    lines = [calls(("ask_user", {"question": "Which?"})), says("Good.", when="blue")]
    story = Story(world, lines, kind="task")
    await story.run("Paint it.")
    await world.restart()
    await world.advance(DAY)
    ending = await story.says("blue")
    assert ending.state == "COMPLETED"
    assert (await world.events(session_stream("s")))[-1].kind == "session_ended"


async def test_what_is_said_while_a_task_comes_to_its_end_is_still_answered(world: World) -> None:
    story = Story(world, [says("Done.", takes=10 * SECOND), says("That, too.")], kind="task")
    await story.begin("Do it.")
    attending = asyncio.ensure_future(story.attend())
    await world.clock.sleep(SECOND)
    await world.send_message("s", "And that?")
    assert (await attending).state == "COMPLETED"
    assert [each.turn for each in (await story.receipt()).turns] == [1, 2]
    assert "And that?" in story.model.requests[1].messages[-1].parts[0].text


async def test_a_session_that_is_resumed_twice_under_one_lease_records_each_park(world: World) -> None:
    story = Story(world, kind="autonomous")
    await story.begin("Watch.")
    (lease,) = await world.journal.claim(WorkerId("w"), 1, SessionId("s"))
    guard = GuardRuntime(world.store, world.clock, redact=redact, secrets=GivenSecrets({}), prices=Prices({}))
    for nap in (HOUR, DAY):
        # As after a breakdown: the process has the session still, and begins anew with it.
        running = SessionRuntime(world.store, world.clock, guard, lease, story.standing(), {})
        await running.resume()
        assert await running.park("SLEEPING", 0, world.now + nap, resident=True)
        await running.resume_parked()
    assert [park.wake_at for park in await parks(story)] == [world.now + HOUR, world.now + DAY]
    assert (await story.kinds()).count("session_woken") == 2


async def test_a_call_made_beside_a_session_that_is_resumed_is_not_in_doubt(world: World) -> None:
    story = Story(world, kind="autonomous")
    await story.begin("Watch.")
    (lease,) = await world.journal.claim(WorkerId("w"), 1, SessionId("s"))
    guard = GuardRuntime(world.store, world.clock, redact=redact, secrets=GivenSecrets({}), prices=Prices({}))
    tools = {each.spec.name: each for each in story.desk.tools()}
    running = SessionRuntime(world.store, world.clock, guard, lease, story.standing(), tools)

    async def sense() -> Outcome:
        await running.wait_until_recovered()
        return (await running.call(Call("s.beside", "slow", b"{}"))).outcome

    task = asyncio.create_task(sense())
    await world.advance(SECOND // 50)
    assert story.desk.together == 0
    await running.resume()
    await world.advance(2 * SECOND)
    assert (await task, story.desk.most_together) == ("ok", 1)
    assert (await story.kinds()).count("call_settled") == 1
