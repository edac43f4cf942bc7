"""Answers that a program checks: what does not fit is asked for again, a bounded number of times."""

from pathlib import Path
from typing import Any

import pytest
from library_bench import Bench
from loops import calls, says
from pydantic import BaseModel

from halter import Retry
from halter.core.messages import ToolResult


class Weather(BaseModel):
    city: str
    rain_mm: float


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def answers(value: Any) -> Any:
    return calls(("final_answer", {"value": value}))


def list_tool_results(result: Any) -> list[tuple[str, str]]:
    tool_results = [part for message in result.messages for part in message.parts if isinstance(part, ToolResult)]
    return [(part.outcome, part.text) for part in tool_results]


async def test_an_answer_that_a_check_rejects_is_asked_for_again_with_the_reason(bench: Bench) -> None:
    agent = bench.agent(answers({"city": "Oslo", "rain_mm": -1}), answers({"city": "Oslo", "rain_mm": 3}))

    @agent.output_validator
    def positive(weather: Weather) -> Weather:
        if weather.rain_mm < 0:
            raise Retry("rain is never negative")
        return weather

    result = await agent.run("How much rain?", output_type=Weather)
    assert result.output == Weather(city="Oslo", rain_mm=3)
    assert list_tool_results(result) == [("error", "[error] Retry: rain is never negative"), ("ok", "Answer accepted.")]


async def test_checks_follow_each_other_may_change_the_answer_and_take_what_the_run_was_given(bench: Bench) -> None:
    agent = bench.agent(answers({"city": "oslo", "rain_mm": 3}))

    @agent.output_validator
    async def capital(weather: Weather) -> Weather:
        return weather.model_copy(update={"city": weather.city.title()})

    @agent.output_validator
    def greet(weather: Weather, deps: str) -> str:
        return f"{deps}, it rains in {weather.city}."

    result = await agent.run("How much rain?", output_type=Weather, deps="Ada")
    assert result.output == "Ada, it rains in Oslo."


async def test_a_model_that_never_fits_ends_in_an_error_and_not_in_a_loop(bench: Bench) -> None:
    """The attack on money: a check that nothing passes."""
    agent = bench.agent(*[answers("no")] * 20)

    @agent.output_validator
    def never(_: str) -> str:
        raise Retry("not this one")

    result = await agent.run("Say something.")
    assert (result.ok, result.state, result.terminal_reason, result.output) == (False, "ERROR", "model_error", None)
    assert len(bench.facts("request_settled")) == 4


async def test_a_check_without_a_type_checks_a_text(bench: Bench) -> None:
    agent = bench.agent(says("Hm."), answers("Fine."))

    @agent.output_validator
    def short(text: str) -> str:
        return text.upper()

    assert (await agent.run("How are you?")).output == "FINE."


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_tool_may_ask_for_another_try(bench: Bench, kind: str) -> None:
    agent = bench.agent(calls(("find", {"name": "x"})), says("Nobody."))
    if kind == "async":

        @agent.tool(level="SAFE", effect="read")
        async def find(name: str) -> str:
            """Find somebody."""
            raise Retry(f"there is no {name}, try a whole name")
    else:

        @agent.tool(level="SAFE", effect="read")
        def find(name: str) -> str:
            """Find somebody."""
            raise Retry(f"there is no {name}, try a whole name")

    result = await agent.run("Find x.")
    assert list_tool_results(result) == [("error", "[error] Retry: there is no x, try a whole name")]
