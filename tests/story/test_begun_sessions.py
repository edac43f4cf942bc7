"""A session that a process has just begun is not read back, and still misses nothing that others did meanwhile."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest
from library_bench import PRICED, Bench
from loops import calls, says, used
from msgspec.structs import replace

from halter import Agent
from halter.core.errors import ConfigError
from halter.core.ids import WorkerId, session_stream
from halter.core.messages import Message, Prompt, Reply, Text, TextListener
from halter.core.money import Account
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.core.tools import Permit
from halter.core.vocabulary import SessionKind
from halter.guard.halts import halt
from halter.guard.ledger import change_cap
from halter.loop.decide import End, Park
from halter.loop.history import find_calling_session
from halter.loop.turn import FINAL_ANSWER
from halter.models.scripted import Scripted
from halter.runtime.session_runner import attend_session, claim_session
from halter.runtime.session_start import open_session, post_message
from halter.state import lifecycle
from halter.tasks.conversation import AttendedTurnPolicy, Conversation, Inbox, OpenTurn
from halter.testing.fakes import Crash
from halter.testing.world import World
from halter.tools.function_tool import FunctionTool, tool
from tests.story.fronts import THINKS, front

TWO_WORDS = "- {text: First.}\n- {text: Second.}\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def list_person_texts(messages: tuple[Message, ...]) -> list[str]:
    """What people said in a run."""
    return [part.text for each in messages for part in each.parts if isinstance(part, Text) and part.origin == "person"]


@pytest.mark.parametrize("kind", ["task", "chat"])
async def test_the_row_of_a_begun_session_is_that_of_the_store(world: World, tmp_path: Path, kind: SessionKind) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        session = await open_session(desk.context, "Look.", kind, "s")
        (row,) = await world.journal.ask(Query("session", SessionRow, {"session": "s"}))
        assert session.row() == row
        assert [event.hash for event in session.events] == [event.hash for event in await world.events("session:s")]
        new_session = await open_session(desk.context, "Look.", kind, "s")
        assert (new_session.row(), new_session.events) == (None, ())


async def test_a_begun_session_stands_as_one_that_was_read_back(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        session = await open_session(desk.context, "Look.", "chat", "s")
        running = (await claim_session(desk.context, session)).runtime
        assert await running.resume(start_events=session.events) == session.events
        began, state = running.began, running.state
        async with asyncio.timeout(1):
            await running.wait_until_recovered()
        await running.load_history()
        assert (began, state) == (running.began, running.state) == (session.events[0].event, "RUNNING")


async def owner_of(world: World, session: str) -> tuple[str, int]:
    (row,) = await world.journal.ask(Query("session", SessionRow, {"session": session}))
    return row.owner, row.generation


async def test_a_session_that_is_attended_where_it_begins_is_owned_from_its_first_event(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        new_session = await open_session(desk.context, "Look.", "chat", takes_lease=True)
        assert await owner_of(world, new_session.session) == (desk.context.worker, 1)
        assert await world.store.claim(WorkerId("other"), 1, new_session.session) == []
        live_session = await claim_session(desk.context, new_session)
        assert (await live_session.conversation.run_until_parked()).state == "WAITING_FOR_INPUT"


async def test_a_task_is_there_and_owned_before_its_model_is_asked(bench: Bench) -> None:
    found: list[tuple[str, str, int]] = []

    class Looks(Scripted):
        async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
            with closing(sqlite3.connect(bench.file)) as file:
                found.extend(file.execute("SELECT state, owner, generation FROM sessions").fetchall())
            return await super().ask(prompt, permit, on_text)

    async with bench.agent(model=Looks([says("Done.")], bench.clock)) as agent:
        assert (await agent.run("Look.")).ok
    ((state, owner, generation),) = found
    assert (state, bool(owner), generation) == ("RUNNING", True, 1)


class Transactions:
    """The kinds of the events that were committed together."""

    interval_seconds = 60.0

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_commit(self, events: Sequence[Stored]) -> None:
        self.seen.append([event.kind for event in events])

    def flush(self) -> None: ...


async def test_a_task_begins_with_its_first_step_in_one_commit(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        new_session = await open_session(desk.context, "Look.", "task", takes_lease=True)
        live_session = await claim_session(desk.context, new_session)
        assert await world.events(session_stream(new_session.session)) == []
        foreseen = [
            (each.stream, each.seq, each.kind, each.version, each.key, each.body) for each in new_session.events
        ]
        world.journal.observe(transactions := Transactions())
        await live_session.conversation.run_until_parked()
        events = await world.events(session_stream(new_session.session))
        stored = [(each.stream, each.seq, each.kind, each.version, each.key, each.body) for each in events]
        assert foreseen == stored[: len(foreseen)]
        assert transactions.seen == [
            ["session_started", "turn_started", "request_started"],
            ["request_settled", "turn_ended", "session_ended"],
        ]


class Stopped(AttendedTurnPolicy):
    """The pace of a session whose caller is cancelled before it takes a turn."""

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        raise asyncio.CancelledError


async def test_a_run_that_is_cancelled_before_its_first_step_has_begun_and_may_be_gone_on_with(
    world: World, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        new_session = await open_session(desk.context, "Look.", "task", takes_lease=True)
        live_session = await claim_session(desk.context, new_session)
        running, clock = live_session.runtime, desk.context.app.clock
        stopped = Conversation(
            running,
            live_session.loop,
            clock,
            Stopped(live_session.loop),
            start_events=new_session.events,
            start=new_session.start_write,
        )
        with pytest.raises(asyncio.CancelledError):
            await stopped.run_until_parked()
        assert await owner_of(world, new_session.session) == (desk.context.worker, 1)
        await stopped.release(asyncio.CancelledError())
        ending, _ = await attend_session(desk.called("ada").context, new_session.session)
        assert ending.state == "COMPLETED"


async def test_one_of_two_calls_with_the_same_id_attends_the_session(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        new_sessions = [await open_session(desk.context, "Look.", "task", "s", takes_lease=True) for _ in range(2)]
        assert await owner_of(world, "s") == ("", 0)
        impatient = replace(desk.context, hold_timeout=0)
        await claim_session(impatient, new_sessions[0])
        with pytest.raises(ConfigError, match="another process runs it"):
            await claim_session(impatient, new_sessions[1])


def test_a_session_is_attended_where_it_begins_though_the_answer_to_its_start_was_lost(tmp_path: Path) -> None:
    with World(crash=Crash(1, "answer_lost")) as world:

        async def run() -> list[str]:
            async with AsyncExitStack() as stack:
                desk = await front(stack, world, tmp_path)
                new_session = await open_session(desk.context, "Look.", "task", takes_lease=True)
                live_session = await claim_session(desk.context, new_session)
                assert (await live_session.conversation.run_until_parked()).state == "COMPLETED"
                return [event.kind for event in await world.events(session_stream(new_session.session))]

        kinds = world.run(run())
    assert (kinds.count("session_started"), kinds[-1]) == (1, "session_ended")


async def test_a_program_is_known_to_its_store_before_it_owns_a_session(bench: Bench) -> None:
    """The store finds only those dead that it has heard of."""
    async with bench.agent(says("Done.")) as agent:
        with closing(sqlite3.connect(bench.file)) as file:
            assert file.execute("SELECT COUNT(*) FROM workers WHERE alive_until > 0").fetchone() == (1,)
        assert (await agent.run("Look.")).ok


async def test_what_another_worker_did_to_a_begun_session_is_read(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, replies_yaml=TWO_WORDS)
        session = await open_session(desk.context, "Look.", "chat", "s")
        agent_context = desk.called("ada").context
        await attend_session(agent_context, "s")
        await post_message(agent_context, "s", "Look again.")
        live_session = await claim_session(desk.context, session)
        assert live_session.runtime.lease.generation == 2
        await live_session.conversation.run_until_parked()
        assert [event.kind for event in await world.events("session:s")].count("session_woken") == 1
        assert live_session.loop.turn.number == 2
        assert list_person_texts(tuple(live_session.loop.messages)) == ["Look.", "Look again."]


async def test_what_was_read_of_a_session_is_not_taken_for_what_it_is_later(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, replies_yaml=TWO_WORDS)
        session = await open_session(desk.context, "Look.", "chat", "s")
        await attend_session(desk.called("ada").context, "s")
        live_session = await claim_session(desk.context, session)
        before = await live_session.runtime.load_history()
        await post_message(desk.context, "s", "Look again.")
        await live_session.conversation.run_until_parked()
        assert await live_session.runtime.load_history() == await world.events("session:s") != before


async def test_a_cap_that_was_set_while_a_session_rested_is_known_when_it_wakes(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, replies_yaml=TWO_WORDS)
        session = await open_session(desk.context, "Look.", "chat", "s")
        await attend_session(desk.called("ada").context, "s")
        await world.store.commit(change_cap(Account("session:s", "", "usd"), 1_234_567, "ada", "cap"))
        await post_message(desk.context, "s", "Look again.")
        live_session = await claim_session(desk.context, session)
        await live_session.conversation.run_until_parked()
        running = live_session.runtime
        assert running.remaining_budget()[0] == 1_234_567 - running.context.reserve_usd - running.spent_usd


async def test_a_message_that_comes_during_the_only_turn_of_a_task_is_answered(bench: Bench) -> None:
    agent = bench.agent(calls("look"), says("Nothing."), says("And here neither."))

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        await bench.person(lifecycle.post_message("mine", "m1", b"Look here, too.", "ada"))
        return "nothing"

    result = await agent.run("look", id="mine")
    assert (result.state, result.text) == ("COMPLETED", "And here neither.")
    assert list_person_texts(result.messages) == ["look", "Look here, too."]


async def halt_while_waiting(bench: Bench, agent: Agent, event: asyncio.Event) -> None:
    """Halt an agent that waits for a decision: its question must be withdrawn."""
    async with agent:
        running = asyncio.ensure_future(agent.run("go"))
        await event.wait()
        await bench.person(halt("agent:desk", "ada", "h1"))
        result = await running
    assert (result.state, len(bench.facts("decision_asked"))) == ("HALTED", 1)
    assert len(bench.facts("decision_withdrawn")) == 1


async def test_a_question_that_is_open_when_a_begun_session_ends_is_withdrawn(bench: Bench) -> None:
    agent = bench.agent(calls("send"), says("Done."), waits=lambda *_: event.set())
    event = asyncio.Event()

    @agent.tool(level="RESTRICTED", effect="write")
    async def send() -> str:
        """Send."""
        return "sent"

    await halt_while_waiting(bench, agent, event)


@pytest.mark.parametrize(
    ("call", "session"),
    [
        ("s.c1_0_0", "s"),
        ("clerk.papers-1.c2_13_0", "clerk.papers-1"),
        ("orders/17.c1_0_0", "orders/17"),
        ("s.c1_0_0/3", "s"),
        ("s.c1_0_0/3.agent.c1_2_0/1", "s.c1_0_0/3.agent"),
        ("s.poll_1", ""),
    ],
)
def test_a_call_tells_its_session(call: str, session: str) -> None:
    assert find_calling_session(call) == session


async def test_tools_that_change_between_two_runs_are_those_of_the_next_session(bench: Bench) -> None:
    agent = bench.agent(says("One."), says("Two."))

    @agent.toolset
    def tools(deps: str) -> list[FunctionTool]:
        async def look() -> str:
            """Look."""
            return deps

        look.__name__ = f"look_{deps}"
        return [tool(look, level="SAFE", effect="read")]

    async with agent:
        await agent.run("go", deps="here")
        await agent.run("go", deps="there")
    offered = [{spec.name for spec in prompt.tools} for prompt in bench.models[0].requests]
    assert offered == [{"ask_user", "read_output", "look_here"}, {"ask_user", "read_output", "look_there"}]


async def test_a_run_whose_answer_has_a_form_leaves_none_to_the_next(bench: Bench) -> None:
    agent = bench.agent(calls((FINAL_ANSWER, {"value": 3})), says("Three."), calls((FINAL_ANSWER, {"value": 4})))
    async with agent:
        results = [await agent.run("Count.", output_type=kind) for kind in (int, None, int)]
    assert [result.output or result.text for result in results] == [3, "Three.", 4]
    offered = [{spec.name for spec in prompt.tools} for prompt in bench.models[0].requests]
    assert [FINAL_ANSWER in names for names in offered] == [True, False, True]


async def test_what_one_run_asks_of_another_agent_is_not_asked_for_the_next(bench: Bench) -> None:
    words = [says("Here."), says("There.")]
    scout = Agent("scout", model=Scripted(words, bench.clock), store=bench.file, environ={"HOME": str(bench.folder)})
    lines = [calls(("ask_scout", {"task": "Look."})), says("Done.")]
    async with bench.agent(*lines, *lines, agents=[scout]) as agent:
        for name in ("one", "two"):
            await agent.run("Look.", id=name)
    assert [fact["parent"] for fact in bench.facts("session_started") if fact["agent"] == "scout"] == ["one", "two"]


async def test_a_question_for_more_money_that_is_open_when_a_begun_session_ends_is_withdrawn(bench: Bench) -> None:
    event = asyncio.Event()
    agent = bench.agent(
        calls("look", usage=used(4000, 99_500)),
        says("Never said."),
        fleet=PRICED,
        max_cost_usd=1,
        limits={"on_cap": "ask"},
        waits=lambda *_: event.set(),
    )

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        return "nothing"

    await halt_while_waiting(bench, agent, event)


async def test_what_an_agent_declares_of_a_tool_holds_for_none_of_the_same_name(world: World, tmp_path: Path) -> None:
    believes = f"{THINKS}policy: {{tools: {{look: {{reads: trusted}}}}}}\n"
    async with AsyncExitStack() as stack:
        texts: list[str] = []
        for name, text in (("one", believes), ("two", THINKS), ("three", believes)):
            home = tmp_path / name
            home.mkdir()
            desk = await front(stack, world, home, text)
            for _ in range(2):
                session = await open_session(desk.context, "Look.", "task", takes_lease=True)
                brake = (await claim_session(desk.context, session)).loop.provenance_check
                assert brake is not None
                texts.append(brake.declaration("look").reads)
    assert texts == ["trusted", "trusted", "anyone", "anyone", "trusted", "trusted"]


async def test_what_is_hidden_from_models_is_salted_by_the_hash_of_the_first_event(
    world: World, tmp_path: Path
) -> None:
    """Another process that takes the task over must hide it under the same names."""
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, f"{THINKS}anonymize: {{enabled: true}}\n")
        new_session = await open_session(desk.context, "Look.", "task", takes_lease=True)
        hidden = (await claim_session(desk.context, new_session)).runtime.context.anonymize
        first = (await world.events(session_stream(new_session.session)))[0]
        assert hidden is not None
        assert hidden.salt == first.hash.hex()
