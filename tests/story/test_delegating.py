"""A task for another agent: a part of the session, with a part of its money and of its tools."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from halter.core.errors import ConfigError
from halter.core.events import SessionStarted, WakePosted
from halter.core.ids import inbox_stream, session_stream
from halter.core.messages import ToolResult
from halter.core.money import Account, BudgetRow
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.core.text import decode_body
from halter.guard.ledger import change_cap
from halter.loop.observer import NO_OBSERVER
from halter.runtime.message_router import ForwardedMessage, HandledMessage
from halter.runtime.session_origin import read_session_row
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session, resume_delegation
from halter.runtime.sub_sessions import SUB_SESSION_DIVISOR, begin_sub_session
from halter.testing.fakes import CRASH_KINDS, Crash, CrashKind
from halter.testing.world import World
from tests.story.autonomous import Fleet
from tests.story.fronts import PRICED, THINKS, TOOLS, Front, front, written

SCOUT_TOOLS = TOOLS.replace("async def count", "async def wander")
ANSWER = "- {text: The mail is empty., usage: {input_tokens: 1000, output_tokens: 100}}\n"


async def with_scout(stack: AsyncExitStack, world: World, home: Path, text: str = THINKS, reply: str = ANSWER) -> Front:
    written(Fleet(world, home, PRICED), "scout", THINKS, SCOUT_TOOLS, replies_yaml=reply)
    return await front(stack, world, home, text)


async def children(world: World) -> list[SessionRow]:
    return [row for row in await world.journal.ask(Query("all_sessions", SessionRow)) if row.parent]


async def budget(world: World, session: str) -> BudgetRow:
    params = {"scope": session_stream(session), "window": "", "unit": "usd"}
    (row,) = await world.journal.ask(Query("budget", BudgetRow, params))
    return row


async def read_start(world: World, session: str) -> SessionStarted:
    event = (await world.events(session_stream(session)))[0].event
    assert isinstance(event, SessionStarted)
    return event


async def test_a_task_for_a_neighbour_is_done_by_a_part_of_the_session_and_its_end_wakes_it(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path)
        message = await desk.says("@scout check the mail")
        assert isinstance(message, HandledMessage)
        assert (message.routed.strategy, message.answer, message.ok) == ("SUB_AGENT", "The mail is empty.", True)
        (child,) = await children(world)
        assert (child.session, child.agent, child.parent, child.kind) == (message.session, "scout", "chat", "task")
        assert (child.state, child.terminal_reason) == ("COMPLETED", "completed")
        inbox = await world.events(inbox_stream("chat"))
        wakes = [stored for stored in inbox if isinstance(stored.event, WakePosted)]
        assert [(one.event.cause, one.event.origin, one.event.trusted) for one in wakes] == [("child", "agent", False)]  # type: ignore[union-attr]
        assert decode_body(wakes[0].body or b"") == "The mail is empty."
        kinds = [stored.kind for stored in world.history]
        assert kinds[kinds.index("session_ended") + 1] == "wake_posted"
        ended = next(stored for stored in world.history if stored.kind == "session_ended")
        assert (ended.key, ended.at) == (wakes[0].key, wakes[0].at)


async def test_its_cap_is_exactly_half_of_what_is_left_and_what_it_spent_is_its_parents(
    world: World, tmp_path: Path
) -> None:
    text = f"{THINKS}limits: {{max_cost_usd: 0.5}}\n"
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path, text)
        message = await desk.says("@scout check the mail")
        assert isinstance(message, HandledMessage)
        assert (
            sum(leg.amount for leg in (await read_start(world, message.session)).carved)
            == 500_000 // SUB_SESSION_DIVISOR
            == 250_000
        )
        parent = await budget(world, "chat")
        assert (parent.spent, parent.held) == (2_000, 0)
        again = await desk.says("@scout check the mail")
        assert isinstance(again, HandledMessage)
        assert sum(leg.amount for leg in (await read_start(world, again.session)).carved) == (500_000 - 2_000) // 2
        assert (await budget(world, again.session)).cap == 249_000


async def test_a_part_does_its_work_with_the_little_that_was_carved_out_for_it(world: World, tmp_path: Path) -> None:
    dear = "- {text: Dear., usage: {input_tokens: 1000, output_tokens: 100}}\n"
    text = f"{THINKS}limits: {{max_cost_usd: 0.02}}\n"
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path, text, dear)
        message = await desk.says("@scout check the mail")
        assert isinstance(message, HandledMessage)
        child = await budget(world, message.session)
        assert (child.cap, child.spent, message.answer) == (10_000, 2_000, "Dear.")
        assert (await budget(world, "chat")).spent == child.spent


async def test_with_too_little_money_nothing_begins_and_it_is_said(world: World, tmp_path: Path) -> None:
    text = f"{THINKS}limits: {{max_cost_usd: 0.019999}}\n"
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path, text)
        message = await desk.says("@scout check the mail")
        assert isinstance(message, HandledMessage)
        assert not message.ok
        assert message.answer.startswith("Too little budget for a sub-session: $0.019999 is left in chat")
        assert await children(world) == []
        await world.store.commit(change_cap(Account("session:chat", "", "usd"), 1_000_000, "ada", "raise"))
        assert isinstance(await desk.says("@scout check the mail"), HandledMessage)
        assert len(await children(world)) == 1


async def test_it_may_use_only_what_both_have_and_its_parent_may_use(world: World, tmp_path: Path) -> None:
    text = f"{THINKS}policy: {{disabled: [count]}}\n"
    calls = "- calls: [{tool: wander, arguments: {}}, {tool: look, arguments: {}}]\n- {text: Done.}\n"
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path, text, calls)
        message = await desk.says("@scout check the mail")
        assert isinstance(message, HandledMessage)
        assert (await read_start(world, message.session)).grants == ("look",)
        events = await world.events(session_stream(message.session))
        refused = [stored.event for stored in events if stored.kind == "call_refused"]
        assert [(event.tool, event.outcome) for event in refused] == [("wander", "tool_not_granted")]  # type: ignore[union-attr]
        own = await desk.says("have a separate agent check the mail")
        assert isinstance(own, HandledMessage)
        assert (await read_start(world, own.session)).grants == ("look",)


async def test_who_was_given_a_task_answers_with_what_the_other_found(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path)
        done = await desk.says("@scout check the mail", "task", kind="task")
        assert done == ForwardedMessage(done.routed, is_posted=True)
        ending, _ = await attend_session(desk.context, "task")
        assert ending.state == "COMPLETED"
        (prompt,) = desk.context.models.get("scripted:script").requests  # type: ignore[attr-defined]
        texts = [part.text for message in prompt.messages for part in message.parts]
        assert "@scout check the mail" in texts
        assert any("The mail is empty." in text for text in texts)


async def test_a_neighbour_that_nobody_trusts_does_nothing_and_it_is_said(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path)
        (tmp_path / "scout" / "tools.py").write_text(TOOLS)
        message = await desk.says("@scout check the mail")
        assert isinstance(message, HandledMessage)
        assert "halter trust" in message.answer
        assert await world.journal.ask(Query("all_sessions", SessionRow)) == []


async def test_what_a_dead_process_left_behind_is_resumed_by_the_next(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await with_scout(stack, world, tmp_path)
        await desk.says("@scout check the mail", "chat")
        parent = await read_session_row(desk.context, "chat")
        child = await begin_sub_session(desk.context, parent, desk.context, "count the sheep")
        held = (await budget(world, "chat")).held
        assert held == (await budget(world, child)).cap
        (sub_session_outcome,) = [
            sub_session_outcome
            async for sub_session_outcome in resume_delegation(desk.context, "chat", NO_OBSERVER, lambda _, __: None)
        ]
        assert (sub_session_outcome.session, sub_session_outcome.text, sub_session_outcome.ok) == (
            child,
            "All is well.",
            True,
        )
        assert (await budget(world, "chat")).held == 0


@pytest.mark.parametrize("kind", CRASH_KINDS)
def test_a_crash_at_any_commit_neither_loses_the_part_nor_its_money(tmp_path: Path, kind: CrashKind) -> None:
    for commit in range(1, 30):
        home = tmp_path / str(commit)
        home.mkdir()
        with World(7, crash=Crash(commit, kind)) as world:
            crashed = world.run(_delegated_through(world, home))
        if not crashed:
            return
    raise AssertionError("It has more commits than were looked at.")


async def _delegated_through(world: World, home: Path) -> bool:
    """Delegate; after the crash go on with what is left, and see that all is told and nothing is held."""

    async def program(*, again: bool) -> None:
        async with AsyncExitStack() as stack:
            desk = await with_scout(stack, world, home)
            if not again:
                await desk.says("@scout check the mail")
                return
            rows = await world.journal.ask(Query("all_sessions", SessionRow))
            if not any(row.session == "chat" for row in rows):
                return
            [_ async for _ in resume_delegation(desk.context, "chat", NO_OBSERVER, lambda _, __: None)]

    await asyncio.wait([world.spawn(program(again=False))])
    crashed = world.store.dead
    if crashed:
        await world.restart()
        await asyncio.wait([world.spawn(program(again=True))])
    for child in await children(world):
        assert child.state == "COMPLETED"
        inbox = await world.events(inbox_stream("chat"))
        wakes = [stored for stored in inbox if isinstance(stored.event, WakePosted) and stored.event.cause == "child"]
        assert len(wakes) == 1
        parent = await budget(world, "chat")
        assert (parent.held, parent.spent) == (0, (await budget(world, child.session)).spent)
    return crashed


async def test_a_file_names_whom_its_model_can_ask(world: World, tmp_path: Path) -> None:
    more = f"{THINKS}agents: [{{name: scout, description: Reads mail., max_cost_usd: 0.10}}]\n"
    replies = "- {calls: [{tool: ask_scout, arguments: {task: check the mail}}]}\n- {text: Nothing new.}\n"
    written(Fleet(world, tmp_path, PRICED), "scout", THINKS, SCOUT_TOOLS, replies_yaml=ANSWER)
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, more, replies_yaml=replies)
        session = await begin_session(desk.context, "Is there any mail?", "task")
        ending, loop = await attend_session(desk.context, session)
        assert ending.state == "COMPLETED"
        (child,) = await children(world)
        assert (child.agent, child.parent, child.state) == ("scout", session, "COMPLETED")
        began = await read_start(world, child.session)
        assert (sum(leg.amount for leg in began.carved), began.trusted, began.grants) == (
            100_000,
            False,
            ("look", "wander"),
        )
        parts = [part for message in loop.messages for part in message.parts]
        assert [part.text for part in parts if isinstance(part, ToolResult)] == ["The mail is empty."]


async def test_a_file_that_names_an_agent_that_is_not_there_is_refused(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"`agents.1..name` is `scuot`, but no neighbouring folder"):
            await with_scout(stack, world, tmp_path, f"{THINKS}agents: [{{name: scuot}}]\n")
