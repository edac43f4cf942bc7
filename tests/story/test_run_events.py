"""Events that a program receives during a run: text, calls, results, questions and costs, in order."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from library_bench import PRICED, Bench
from loops import calls, says, used
from pydantic import BaseModel

from halter import CallBegan, CallEnded, DecisionRequested, ModelAnswered, Result, StreamChunk
from halter.core.ids import SortableIds
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.journal.open import open_store


class Weather(BaseModel):
    city: str


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def collect(agent: Any, message: str, **more: Any) -> tuple[list[Any], Result[Any]]:
    *events, last = [event async for event in agent.stream_events(message, **more)]
    assert isinstance(last, Result)
    return events, last


async def test_words_calls_results_and_costs_come_in_order(bench: Bench) -> None:
    agent = bench.agent(
        calls(("weather", {"city": "Oslo"}), text="I look.", usage=used(1000, 100)),
        says("It rains.", usage=used(2000, 10)),
        fleet=PRICED,
    )

    @agent.tool(level="SAFE", effect="read", cost=0.01)
    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    events, result = await collect(agent, "Is it going to rain in Oslo?")
    words = "".join(event.text for event in events if isinstance(event, StreamChunk))
    assert words == "I look.It rains."
    results = [event for event in events if not isinstance(event, StreamChunk)]
    assert [type(event) for event in results] == [ModelAnswered, CallBegan, CallEnded, ModelAnswered]
    first, started, ended, last = results
    assert (first.text, first.cost_usd) == ("I look.", Decimal("0.002"))
    assert (started.tool, started.arguments) == ("weather", '{"city":"Oslo"}')
    assert (ended.call, ended.outcome, ended.text, ended.cost_usd) == (
        started.call,
        "ok",
        "rain in Oslo",
        Decimal("0.01"),
    )
    assert last.spent_usd == result.cost_usd == Decimal("0.0141")


async def test_events_of_a_run_are_in_the_journal_before_they_are_shown(bench: Bench) -> None:
    """A program that acts on an event must not act on something that a crash undoes."""
    agent = bench.agent(calls("look"), says("Nothing."))

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        return "nothing"

    values = {ModelAnswered: "request_settled", CallEnded: "call_settled"}
    number_by_type: dict[type[Any], int] = {}
    async for event in agent.stream_events("Look around."):
        if type(event) in values:
            number_by_type[type(event)] = number_by_type.get(type(event), 0) + 1
            assert len(bench.facts(values[type(event)])) >= number_by_type[type(event)]
    assert number_by_type == {ModelAnswered: 2, CallEnded: 1}


async def test_a_question_is_an_event_and_the_run_continues_with_its_answer(bench: Bench) -> None:
    agent = bench.agent(calls("wipe"), says("Wiped."), waits=lambda *_: None)

    @agent.tool(level="RESTRICTED")
    async def wipe() -> str:
        """Wipe the desk."""
        return "wiped"

    person_askeds: list[DecisionRequested] = []
    outcomes: list[str] = []
    async for event in agent.stream_events("Wipe the desk."):
        if isinstance(event, DecisionRequested):
            person_askeds.append(event)
            store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
            (waiting,) = await list_pending_decisions(store)
            assert waiting.decision == event.decision
            await store.commit(answer_decision(waiting, "deny", "ada", "answer"))
            await store.close()
        elif isinstance(event, CallEnded):
            outcomes.append(event.outcome)
    assert ([event.state for event in person_askeds], outcomes) == (["WAITING_FOR_APPROVAL"], ["approval_denied"])


async def test_no_event_shows_a_secret(bench: Bench) -> None:
    """The attack: a tool that prints its key, and a model that repeats it."""
    agent = bench.agent(
        calls("look"), says("It is hunter2-hunter2-hunter2."), secrets={"KEY": "hunter2-hunter2-hunter2"}
    )

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        return "the key is hunter2-hunter2-hunter2"

    events, result = await collect(agent, "Look around.")
    assert "hunter2" not in repr([*events, result.messages])
    assert any(isinstance(event, CallEnded) for event in events)


async def test_a_program_that_stops_listening_leaves_a_session_that_can_be_resumed(bench: Bench) -> None:
    agent = bench.agent(calls("look"), says("Nothing."))
    started = asyncio.Event()

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        if not started.is_set():
            started.set()
            await asyncio.Event().wait()
        return "nothing"

    stream = agent.stream_events("Look around.", id="monday", kind="task")
    async for event in stream:
        if isinstance(event, CallBegan):
            await started.wait()
            break
    await stream.aclose()
    result = await agent.resume("monday")
    assert (result.text, result.state) == ("Nothing.", "COMPLETED")


async def test_an_answer_in_a_form_comes_with_the_result(bench: Bench) -> None:
    agent = bench.agent(calls(("final_answer", {"value": {"city": "Oslo"}})))
    events, result = await collect(agent, "Where?", output_type=Weather, kind="task")
    assert result.output == Weather(city="Oslo")
    assert [event.tool for event in events if isinstance(event, CallEnded)] == ["final_answer"]
