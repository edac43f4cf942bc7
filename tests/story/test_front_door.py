"""What is said to an agent and needs no model is answered at the door: at once, for nothing, and from the store."""

from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.events import DecisionAsked, MessageRouted
from halter.core.ids import FLEET
from halter.core.ports import Draft, Query, Write
from halter.core.rows import DecisionRow, HaltRow, SessionRow, TriggerRow
from halter.core.text import decode_body
from halter.core.vocabulary import DecisionKind
from halter.models.scripted import Scripted
from halter.runtime.message_router import ForwardedMessage, HandledMessage
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session
from halter.spec.triggers import Schedule
from halter.testing.world import World
from tests.story.autonomous import CALM
from tests.story.fronts import THINKS, front

FAST = {
    "help": "help",
    "what time is it": "time",
    "15% of 80": "arithmetic",
    "status": "status",
    "how much have you spent today": "spending",
    "stop": "halt",
    "resume": "resume",
    "what needs me": "needs_me",
    "approve": "decide",
    "schedules": "schedules",
    "cancel schedule nightly": "cancel_schedule",
    "hot state": "hot_state",
    "last receipt": "last_receipt",
}


async def list_kinds_without_routings(world: World) -> list[str]:
    """All that happened but routings: what a fast path must leave as it is."""
    return [event.kind for event in world.history if event.kind != "message_routed"]


@pytest.mark.parametrize("text", FAST)
async def test_a_fast_path_asks_no_model_spends_nothing_and_is_written_down(
    world: World, tmp_path: Path, text: str
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        before = await list_kinds_without_routings(world)
        message = await desk.says(text)
        assert isinstance(message, HandledMessage)
        assert (message.routed.route, message.ok, bool(message.answer)) == (FAST[text], True, True)
        (routed,) = await desk.routed()
        assert isinstance(routed.event, MessageRouted)
        assert (routed.event.route, routed.event.strategy) == (FAST[text], "")
        assert msgspec.json.decode(routed.body or b"") == {"text": text, "answer": message.answer}
        assert (await list_kinds_without_routings(world))[len(before) :] == (
            ["halt_requested"] if text == "stop" else []
        )
        assert await desk.spends() == 0
        assert await world.journal.ask(Query("all_sessions", SessionRow)) == []


async def test_where_a_session_has_begun_the_routing_stands_in_its_inbox_and_does_not_wake_it(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await begin_session(desk.context, "hello there", "chat", "chat")
        await attend_session(desk.context, "chat")
        (before,) = await world.journal.ask(Query("session", SessionRow, {"session": "chat"}))
        await desk.says("status")
        (after,) = await world.journal.ask(Query("session", SessionRow, {"session": "chat"}))
        assert after == before
        assert after.due_at is None
        assert len(await desk.routed("chat")) == 1
        assert await desk.routed() == []


async def test_the_status_shows_open_sessions_and_halts(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await begin_session(desk.context, "hello there", "chat", "chat")
        await attend_session(desk.context, "chat")
        await world.advance(5 * MINUTE)
        text = await desk.answer("status")
        spent = "$0.04 spent of $1.00 ($0.10 reserved for the wrap-up)"
        assert text.splitlines() == [
            "desk was never switched on. 1 session is open.",
            f"- chat (chat, this one): WAITING_FOR_INPUT, started 5m ago, {spent}",
        ]
        await desk.answer("stop")
        assert "agent:desk was halted by ada." in await desk.answer("status")


REPLY = "- {text: Done., usage: {input_tokens: 1000, output_tokens: 100}}\n"


@CALM
async def test_the_spending_is_shown_for_a_day_a_week_and_a_month_against_the_caps(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, replies_yaml=REPLY)
        await begin_session(desk.context, "tell me more", "task", "one")
        await attend_session(desk.context, "one")
        for text in ("today", "this week", "this month"):
            texts = (await desk.answer(f"how much have you spent {text}")).splitlines()
            assert texts[0] == f"desk has spent $0.002 {text}: $0.002 for turn."
            assert texts[1].startswith("- agent:desk day/")
            assert texts[1].endswith(": $0.002 against a cap of $5.00")
            assert texts[2].startswith("- fleet day/")
        await world.advance(24 * HOUR)
        assert (await desk.answer("how much have you spent today")).startswith("desk has spent $0.00 today.")


async def read_halted_scopes(world: World) -> dict[str, bool]:
    return {row.scope: bool(row.halted) for row in await world.journal.ask(Query("all_halts", HaltRow))}


async def test_a_word_halts_and_another_lifts_the_halt_and_both_stand_in_the_journal(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        assert "agent:desk is halted" in await desk.answer("stop")
        assert await read_halted_scopes(world) == {"agent:desk": True}
        assert "Resumed" in await desk.answer("resume")
        assert await read_halted_scopes(world) == {"agent:desk": False}
        assert await desk.answer("resume") == "agent:desk is not halted."
        assert "fleet is halted" in await desk.answer("halt everything")
        assert await desk.answer("resume everything") == "Resumed fleet."
        said = [stored for stored in await world.events(FLEET) if stored.kind.startswith("halt_")]
        assert [stored.event.by for stored in said] == ["ada"] * 4  # type: ignore[union-attr]


async def test_a_session_is_halted_by_the_beginning_of_its_name_and_none_is_guessed(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        for name in ("chat-1", "chat-2"):
            await begin_session(desk.context, "hello there", "chat", name)
        assert "nothing was halted" in await desk.answer("halt session chat-")
        assert await read_halted_scopes(world) == {}
        await desk.answer("halt session chat-2")
        assert await read_halted_scopes(world) == {"session:chat-2": True}


async def test_an_agent_neither_halts_nor_resumes_nor_decides_nor_cancels_by_a_word(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every day at 9 check the mail")
        agent = desk.called("agent:desk")
        for text in ("stop", "halt everything", "resume", "approve", "deny", "cancel schedule nightly"):
            assert await agent.answer(text) == "Only a person can do that, and an agent sent this message."
        assert await read_halted_scopes(world) == {}
        assert [row.verdict for row in (await desk.decisions()).values()] == [""]


async def record_questions(world: World, *decisions: DecisionAsked) -> None:
    for event in decisions:
        rows = [(DecisionRow, event.decision)]
        await world.store.commit(
            Write(FLEET, f"ask/{event.decision}", lambda _, event=event: [Draft(event, b"wipe /tmp/x")], rows)
        )


def question(
    world: World, decision: str, decision_kind: DecisionKind = "approval", agent: str = "desk"
) -> DecisionAsked:
    return DecisionAsked(
        decision=decision,
        about=decision_kind,
        subject="s",
        name="wipe",
        digest="d=1",
        expires_at=world.now + HOUR,
        agent=agent,
    )


async def test_a_plain_word_decides_only_what_cannot_be_mistaken(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        assert await desk.answer("what needs me") == "Nothing needs you."
        await record_questions(
            world, question(world, "first-11"), question(world, "second-22"), question(world, "x-33", agent="b")
        )
        text = await desk.answer("what needs me")
        assert text.startswith("3 decisions need you.")
        assert "- first-11: desk wants to wipe. (0ms ago)\n  wipe /tmp/x" in text
        assert "Several decisions are pending" in await desk.answer("approve")
        assert "Denied: first-11" in await desk.answer("deny first-11")
        assert "Approved: second-22" in await desk.answer("approve")
        verdicts = {name: row.verdict for name, row in (await desk.decisions()).items()}
        assert verdicts == {"first-11": "deny", "second-22": "approve", "x-33": ""}
        assert await desk.answer("approve") == "This agent has no pending decision."


async def test_a_plain_yes_is_for_what_was_shown_and_for_nothing_that_came_since(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await record_questions(world, question(world, "first-11"))
        assert "first-11" in await desk.answer("what needs me")
        await desk.answer("deny first-11")
        await record_questions(world, question(world, "second-22"))
        text = await desk.answer("approve")
        assert text.startswith("This decision is pending:\n- second-22: desk wants to wipe.")
        assert (await desk.decisions())["second-22"].verdict == ""
        assert "Approved: second-22" in await desk.answer("approve")


async def test_a_cap_is_not_raised_by_a_plain_yes(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await record_questions(world, question(world, "cap-11", "cap_raise"))
        assert await desk.answer("approve") == "A higher cap needs an amount. Run: halter approve cap-11 --cap AMOUNT"
        assert (await desk.decisions())["cap-11"].verdict == ""
        await world.advance(2 * HOUR)
        assert await desk.answer("deny") == "This agent has no pending decision."
        assert (await desk.decisions())["cap-11"].verdict == ""


async def test_a_schedule_of_the_file_is_not_cancelled_and_one_of_a_person_is(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = (await front(stack, world, tmp_path)).with_schedules(Schedule(name="nightly", cron="0 3 * * *"))
        assert "nightly: in agent.yaml, starts with halter up" in await desk.answer("schedules")
        assert "Remove it there." in await desk.answer("cancel schedule nightly")
        await desk.answer("every day at 9 check the mail")
        await desk.answer("approve")
        assert "- check-the-mail: at 09:00 every day, UTC, next in " in await desk.answer("schedules")
        assert "Ended check-the-mail." in await desk.answer("cancel schedule check-the-mail")
        (row,) = await world.journal.ask(Query("all_triggers", TriggerRow))
        assert (row.trigger, row.ended_at is not None) == ("desk/check-the-mail", True)
        assert "There is no schedule" in await desk.answer("cancel schedule check-the-mail")


async def test_hot_state_is_shown_as_it_was_kept_last_whole_or_one_field(world: World, tmp_path: Path) -> None:
    text = f"{THINKS}hot_state: {{fields: {{price: {{type: number}}, mood: {{type: string}}}}}}\n"
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, text)
        await begin_session(desk.context, "", "autonomous", "desk-1")
        (lease,) = await world.store.claim(desk.context.worker, 1)
        body = b'{"price": {"value": 7, "at": %d}}' % world.now
        await world.store.beat(lease.worker, {lease.session: body})
        await world.advance(2 * MINUTE)
        output = await desk.answer("hot state")
        assert "price: 7 (stale: 2m ago)" in output
        assert "mood: not yet loaded" in output
        assert "mood" not in await desk.answer("price")


async def test_the_last_receipt_tells_what_the_newest_session_did_and_cost(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, replies_yaml=REPLY)
        assert await desk.answer("last receipt") == "No session of desk has ended yet."
        await begin_session(desk.context, "tell me more", "task", "one")
        await attend_session(desk.context, "one")
        texts = (await desk.answer("last receipt")).splitlines()
        assert texts[0].endswith("COMPLETED, completed.")
        assert texts[1] == "It took 0ms and cost $0.002."
        assert texts[2] == "It made 1 request and 0 calls."


async def test_what_no_grammar_reads_goes_to_the_model_and_is_not_said_to_it_twice(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        message = await desk.says("Look at the mail, and tell me what is new.")
        assert isinstance(message, ForwardedMessage)
        assert (message.routed.strategy, message.is_posted) == ("GOAL", False)
        assert await world.journal.ask(Query("all_sessions", SessionRow)) == []


async def test_an_answer_to_a_question_of_the_agent_goes_to_it_unless_it_is_a_halt(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        assert isinstance(await desk.says("approve", is_answer=True), ForwardedMessage)
        assert isinstance(await desk.says("stop", is_answer=True), HandledMessage)
        assert await read_halted_scopes(world) == {"agent:desk": True}


async def test_no_secret_stands_in_what_is_written_of_a_routing(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.says("use sk-ant-api03-AAAAbbbbCCCCddddEEEEffffGGGGhhhhIIIIjjjjKKKKllll1234567890 to look around")
        (routed,) = await desk.routed("chat")
        assert b"AAAAbbbb" not in (routed.body or b"")
        assert "AAAAbbbb" not in decode_body(routed.facts)


async def test_an_agent_without_tools_is_offered_none_and_makes_one_request(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, tools="")
        message = await desk.says("Tell me a story about a fox and a goose.")
        assert message.routed.strategy == "DIRECT_RESPONSE"
        await begin_session(desk.context, "Tell me a story about a fox and a goose.", "chat", "chat")
        await attend_session(desk.context, "chat")
        model = desk.context.models.get("scripted:script")
        assert isinstance(model, Scripted)
        (prompt,) = model.requests
        assert prompt.tools == ()
