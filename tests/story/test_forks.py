"""A session that begins with what was said in another one: what it takes along, and what it does not."""

import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from library_bench import PRICED, Bench
from loops import Story, calls, policy, says, used

from halter import Agent
from halter.core.errors import ConfigError, NotDone
from halter.core.events import DecisionAsked, HistoryGiven, SessionStarted
from halter.core.ids import SortableIds, StreamId, session_stream
from halter.core.messages import Message, Prompt, Text, ToolCall, ToolResult
from halter.core.ports import Draft, Stored, Write, read_body
from halter.journal.open import open_store
from halter.journal.retention import erase_session_bodies
from halter.loop.history import SessionHistory
from halter.loop.transcript import MAX_RESULT_LENGTH
from halter.loop.transcript_reader import number_calls, read_past
from halter.models.scripted import ScriptLine
from halter.operations import forks
from halter.operations.actor import Actor, Principal
from halter.provenance.check import ProvenanceCheck
from halter.runtime.runtime import open_runtime
from halter.settings import read_settings
from halter.testing.models import FunctionModel
from halter.testing.world import World
from tests.story.test_provenance import READ, TO_MALLORY, run, story_of

MALLORY = b'{"to":"mallory@evil.example","text":"the report"}'
WEATHER = calls(("weather", {"city": "Oslo"}), usage=used(1000, 100))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def weather_agent(bench: Bench, *lines: ScriptLine, **more: Any) -> Agent:
    agent = bench.agent(*lines, fleet=PRICED, **more)

    @agent.tool(level="SAFE", effect="read")
    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}" * (2000 if city == "everywhere" else 1)

    return agent


def seq_of(bench: Bench, kind: str, number: int = 0) -> int:
    with closing(sqlite3.connect(bench.file)) as file:
        rows = file.execute("SELECT seq FROM events WHERE kind = ? ORDER BY position", (kind,)).fetchall()
    return int(rows[number][0])


def words(prompt: Prompt) -> list[str]:
    return [
        f"{message.role}: {part.arguments if isinstance(part, ToolCall) else part.text}"
        for message in prompt.messages
        for part in message.parts
        if not (isinstance(part, Text) and part.reason)
    ]


async def test_a_fork_begins_with_what_was_said_and_spends_its_own_money(bench: Bench) -> None:
    rains, boat = says("It rains.", usage=used(2000, 10)), says("Take a boat.", usage=used(3000, 10))
    agent = weather_agent(bench, WEATHER, rains, boat)
    first = await agent.run("Is it going to rain in Oslo?")
    second = await agent.fork(first.session, "What shall I take along?")
    assert (second.text, second.state) == ("Take a boat.", "COMPLETED")
    assert second.session != first.session
    assert words(bench.models[0].requests[-1]) == [
        "user: Is it going to rain in Oslo?",
        'assistant: {"city":"Oslo"}',
        "user: rain in Oslo",
        "assistant: It rains.",
        "user: What shall I take along?",
    ]
    assert (first.cost_usd, second.cost_usd) == (Decimal("0.0041"), Decimal("0.0031"))
    (fields,) = bench.facts("history_given")
    assert (fields["session"], fields["messages"]) == (first.session, 4)
    assert [line.name for line in second.receipt.calls] == []


async def test_a_fork_from_the_middle_knows_only_what_was_said_until_then(bench: Bench) -> None:
    agent = weather_agent(bench, WEATHER, says("It rains."), says("Sun."))
    first = await agent.run("Is it going to rain in Oslo?")
    await agent.fork(first.session, "Say it otherwise.", at=seq_of(bench, "call_settled"))
    assert words(bench.models[0].requests[-1])[-2:] == ["user: rain in Oslo", "user: Say it otherwise."]


@pytest.mark.parametrize("kind", ["request_settled", "call_started"])
async def test_an_unfinished_step_is_left_out(bench: Bench, kind: str) -> None:
    agent = weather_agent(bench, WEATHER, says("It rains."), says("Sun."))
    first = await agent.run("Is it going to rain in Oslo?")
    await agent.fork(first.session, at=seq_of(bench, kind))
    assert words(bench.models[0].requests[-1]) == ["user: Is it going to rain in Oslo?", "user: Continue from here."]


async def test_a_fork_can_be_forked_and_no_two_calls_have_the_same_id(bench: Bench) -> None:
    agent = weather_agent(bench, WEATHER, says("It rains."), WEATHER, says("Still."), WEATHER, says("Yes."))
    first = await agent.run("Is it going to rain in Oslo?")
    second = await agent.fork(first.session, "And now?")
    third = await agent.fork(second.session, "And now?")
    ids = [part.id for each in third.messages for part in each.parts if isinstance(part, ToolCall)]
    assert len(ids) == len({*ids}) == 3
    results = [part.id for each in third.messages for part in each.parts if isinstance(part, ToolResult)]
    assert results == ids


async def test_a_long_result_of_before_is_shortened_anew_and_can_be_read_on(bench: Bench) -> None:
    long = calls(("weather", {"city": "everywhere"}))
    reading = calls(("read_output", {"call": "h0", "offset": 0}))
    agent = weather_agent(bench, long, says("It rains."), reading, says("I read it."))
    first = await agent.run("Where does it rain?")
    second = await agent.fork(first.session, "Read on.")
    (tool_result,) = [
        part for each in second.messages for part in each.parts if isinstance(part, ToolResult) and part.id == "h0"
    ]
    assert len(tool_result.text) <= MAX_RESULT_LENGTH
    assert 'read_output(call="h0"' in tool_result.text
    assert second.messages[-2].parts[0].text.startswith("rain in everywhererain")  # type: ignore[union-attr]


async def test_forks_are_no_way_around_the_cap_of_an_agent(bench: Bench) -> None:
    """Each fork has a fresh cap of its own; what all of them spend counts against that of the agent's day."""
    lines = [says("One.", usage=used(0, 40_000)), says("Two.", usage=used(0, 40_000))]
    agent = weather_agent(bench, *lines, limits={"max_cost_usd_per_day": 0.85}, max_cost_usd=0.45)
    async with agent:
        first = await agent.run("Tell me much.")
        assert not await agent.is_near_budget()
        second = await agent.fork(first.session, "More.")
        assert (first.cost_usd, second.cost_usd) == (Decimal("0.4"), Decimal("0.4"))
        assert await agent.is_near_budget()


async def test_what_others_wrote_stays_theirs_in_a_fork(world: World) -> None:
    story, _ = story_of(world, "ask", [READ, says("Read.")])
    await run(world, story)
    brake = await fork_brake(story)
    assert not brake.clean
    assert [(flaw.argument, flaw.reason) for flaw in brake.judge("send_letter", MALLORY)] == [("to", "unsaid")]
    assert brake.judge("send_letter", b'{"to":"bob@house.example","text":"the report"}') == ()


async def test_an_approval_is_not_inherited_by_a_fork(world: World) -> None:
    story, post = story_of(world, "ask", [READ, TO_MALLORY, says("Done.")])
    await run(world, story, "approve")
    assert post.sent == ["mallory@evil.example"]
    assert story.loop is not None
    assert story.loop.provenance_check is not None
    assert not [flaw for flaw in story.loop.provenance_check.judge("send_letter", MALLORY) if flaw.reason == "unsaid"]
    brake = await fork_brake(story)
    assert "unsaid" in [flaw.reason for flaw in brake.judge("send_letter", MALLORY)]


async def test_a_session_that_a_denial_locked_is_locked_in_its_fork(world: World) -> None:
    story, _ = story_of(world, "ask", [READ, TO_MALLORY, says("Done.")], "policy: {lock_after_denial: true}")
    await run(world, story, "deny")
    assert (await fork_brake(story)).locked
    before = next(stored.seq for stored in await story.events() if isinstance(stored.event, DecisionAsked))
    assert not (await fork_brake(story, before)).locked


async def fork_brake(story: Story, at: int | None = None) -> ProvenanceCheck:
    """Fold the first events of a fork, as its own loop does."""
    events = [event for event in await story.events() if at is None or event.seq <= at]
    past = await read_past("s", events, story.world.store)
    given = HistoryGiven(messages=len(past.messages), session="s", through=events[-1].seq, denied=past.has_denial)
    started = SessionStarted(session=f"fork{at}", agent="desk", kind="task", started_by="ada")
    drafts = [Draft(started, b"Go on."), Draft(given, msgspec.json.encode(number_calls(past.messages)))]
    await story.world.store.commit(Write(StreamId(f"session:fork{at}"), f"fork/{at}", lambda _: drafts))
    brake = story.brake()
    assert brake is not None
    read: list[Stored] = list(await story.world.store.read(StreamId(f"session:fork{at}"), 0, 2))

    async def body(event: Stored) -> bytes:
        return event.body or b""

    await SessionHistory(f"fork{at}", provenance_check=brake).apply(read, body)
    return brake


async def test_where_the_words_are_erased_nothing_is_forked_and_an_erased_fork_trusts_nothing(bench: Bench) -> None:
    agent = weather_agent(bench, WEATHER, says("It rains."), says("Sun."))
    first = await agent.run("Is it going to rain in Oslo?")
    second = await agent.fork(first.session, "And now?")
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    await erase_session_bodies(store, [first.session, second.session], "ada")
    brake = Heard()
    await SessionHistory(second.session, provenance_check=brake).apply(
        await store.read(session_stream(second.session), 0, 2), lambda stored: read_body(store, stored)
    )
    assert (brake.clean, brake.erased) == (False, 1)
    await store.close()
    for session in (first.session, second.session):
        with pytest.raises(ConfigError, match="cannot be forked: its messages were erased, in whole or in part"):
            await agent.fork(session)


class Heard(ProvenanceCheck):
    """Counts what it heard of that is erased."""

    erased = 0

    def __init__(self) -> None:
        super().__init__("ask", policy(), {})

    def mark_erased(self) -> None:
        self.erased += 1
        super().mark_erased()


async def test_an_event_that_is_not_there_and_a_session_without_a_word_are_refused(bench: Bench) -> None:
    agent = weather_agent(bench, says("Sun."))
    first = await agent.run("Hello.")
    with pytest.raises(ConfigError, match="has no event 99"):
        await agent.fork(first.session, at=99)
    with pytest.raises(ConfigError, match="has no messages up to its event"):
        await agent.fork(first.session, at=1)
    with pytest.raises(ConfigError, match="There is no session nosuch"):
        await agent.fork("nosuch")


async def test_only_a_person_who_may_steer_forks(bench: Bench) -> None:
    agent = weather_agent(bench, says("Sun."))
    first = await agent.run("Hello.")
    async with open_runtime(read_settings({}, bench.folder, str(bench.file)), bench.clock) as app:
        with pytest.raises(NotDone, match="The role operator is required"):
            await forks.fork(Actor(app, Principal("bob", "approver")), first.session)
        with pytest.raises(NotDone, match="Only a person can fork a session"):
            await forks.fork(Actor(app, Principal("agent:desk", "admin")), first.session)
        with pytest.raises(NotDone, match="There is no session"):
            await forks.fork(Actor(app, Principal("bob", "operator", ("other",))), first.session)
        session_forked = await forks.fork(Actor(app, Principal("bob", "operator")), first.session, text="And now?")
        assert (session_forked.session, session_forked.messages) == (first.session, 2)
    with agent.override(model=FunctionModel(lambda prompt: " | ".join(words(prompt)))):
        gone_on = await agent.resume(session_forked.subject)
    assert gone_on.text == "user: Hello. | assistant: Sun. | user: And now?"


def test_a_history_that_no_provider_takes_is_refused() -> None:
    call, result = ToolCall("1", "look", "{}"), ToolResult("1", "look", "ok", "seen")
    with pytest.raises(ConfigError, match="a call without its result"):
        number_calls([Message("assistant", (call,))])
    with pytest.raises(ConfigError, match="a result of look without its call"):
        number_calls([Message("user", (result,))])
    assert number_calls([Message("assistant", (call,)), Message("user", (result,))])[1].parts[0].id == "h0"  # type: ignore[union-attr]
