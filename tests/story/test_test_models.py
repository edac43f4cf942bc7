"""Models for tests of agents: no key, no cost, and everything else is real."""

from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from halter import Agent
from halter.core.messages import Prompt, ToolCall, ToolResult
from halter.testing.models import FunctionModel, TestModel, make_arguments


class Weather(pydantic.BaseModel):
    city: str
    rain_mm: float


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    agent = Agent("desk", model="anthropic:claude-sonnet-4-5", store=tmp_path / "runs.db", environ={})

    @agent.tool(level="SAFE", effect="read")
    async def look_up(order: int, kind: Literal["parcel", "letter"], note: str = "") -> str:
        return f"{kind} {order} was shipped"

    return agent


def test_it_tries_every_tool_once_and_says_what_they_returned(agent: Agent) -> None:
    with agent.override(model=TestModel()):
        result = agent.run_sync("Where is it?")
    assert result.text == '{"look_up": "parcel 0 was shipped"}'
    assert (result.state, result.cost_usd) == ("COMPLETED", 0)


def test_it_answers_as_it_is_told_and_calls_only_what_is_named(agent: Agent) -> None:
    with agent.override(model=TestModel("All is well.", calls=[])):
        assert agent.run_sync("Where is it?").text == "All is well."


def test_it_fills_an_answer_in_a_form(agent: Agent) -> None:
    with agent.override(model=TestModel(calls=[])):
        assert agent.run_sync("Is it raining?", output_type=Weather).output == Weather(city="a", rain_mm=0)


def test_a_function_is_a_model(agent: Agent) -> None:
    def answer(prompt: Prompt) -> Any:
        if len(prompt.messages) == 1:
            return ToolCall("", "look_up", '{"order": 42, "kind": "letter"}')
        result = prompt.messages[-1].parts[0]
        assert isinstance(result, ToolResult)
        return f"It said: {result.text}"

    model = FunctionModel(answer)
    with agent.override(model=model):
        assert agent.run_sync("Where is it?").text == "It said: letter 42 was shipped"
    assert len(model.requests) == 2


async def test_an_open_agent_is_overridden_for_the_runs_inside_the_block(agent: Agent) -> None:
    """As in an app that opens its agent once, in its lifespan."""
    with agent.override(model=TestModel("One.", calls=[])):
        async with agent:
            assert (await agent.run("Where is it?")).text == "One."
            with agent.override(model=FunctionModel(lambda _: "Two.")):
                assert (await agent.run("Where is it?")).text == "Two."
                with agent.override(model=TestModel("Three.", calls=[])):
                    assert [item async for item in agent.stream("Where is it?")][-1].text == "Three."
                assert (await agent.run("Where is it?")).text == "Two."
            assert (await agent.run("Where is it?")).text == "One."
        with agent.override(model=TestModel("Four.", calls=[])):
            assert (await agent.run("Where is it?")).text == "Four."


async def test_an_agent_that_is_closed_inside_an_override_stays_closed(agent: Agent) -> None:
    with agent.override(model=TestModel("One.", calls=[])):
        await agent.__aenter__()
        with agent.override(model=TestModel("Two.", calls=[])):
            await agent.__aexit__(None, None, None)
        assert not agent.is_open
        assert (await agent.run("Where is it?")).text == "One."


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "minLength": 3}, "aaa"),
        ({"type": "integer", "minimum": 5}, 5),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [False, False]),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/A"}}}, {"a": "x"}),
        ({"default": 7}, 7),
    ],
)
def test_made_up_arguments_fit_their_schema(schema: dict[str, Any], value: Any) -> None:
    assert make_arguments(schema, {"A": {"enum": ["x", "y"]}}) == value
