"""A Pydantic AI agent under the guard: the framework's own agent, with its own test models."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.capabilities import WebSearch
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults
from pydantic_ai.usage import RequestUsage

from halter.adapters.pydantic_ai import GuardedAgent, guard
from halter.core.errors import ConfigError
from tests.adapters.conftest import Desk


class World(Desk):
    """An agent with one tool, a model that calls it once, and the store that both leave behind."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.usage = RequestUsage(input_tokens=100, output_tokens=10)
        self.request_count = 0

    def answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        """Answer as a provider does: never longer than it may be."""
        self.request_count += 1
        most = (info.model_settings or {}).get("max_tokens") or self.usage.output_tokens
        usage = RequestUsage(input_tokens=self.usage.input_tokens, output_tokens=min(self.usage.output_tokens, most))
        returned = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        if returned:
            return ModelResponse([TextPart(f"Done: {returned[-1].content}")], usage=usage)
        return ModelResponse([ToolCallPart("pay", {"amount": 7}, tool_call_id="c1")], usage=usage)

    def agent(self, level: Any = "CONTROLLED", cap: float = 1.0, **options: Any) -> GuardedAgent:
        model = FunctionModel(self.answer, model_name="desk")
        made: Agent[None, Any] = Agent(model, **options)

        @made.tool_plain
        def pay(amount: int) -> str:
            """Pay an amount."""
            self.paid.append(amount)
            return f"paid {amount}"

        return guard(made, guard=self.guard(cap), tools={"pay": {"level": level}})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_streamed_run_is_held_and_settled_too(world: World) -> None:
    async def stream(messages: list[ModelMessage], _: AgentInfo) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
        if any(isinstance(part, ToolReturnPart) for message in messages for part in message.parts):
            yield "All "
            yield "done."
        else:
            yield {0: DeltaToolCall("pay", '{"amount": 7}', tool_call_id="c1")}

    made: Agent[None, str] = Agent(FunctionModel(stream_function=stream, model_name="desk"))

    @made.tool_plain
    def pay(amount: int) -> str:
        """Pay an amount."""
        world.paid.append(amount)
        return "paid"

    agent = guard(made, guard=world.guard())
    async with agent.run_stream("Pay the bill.") as run:
        texts = [text async for text in run.stream_text(delta=True)]
    assert "".join(texts) == "All done."
    async with world.guard() as guarded:
        (receipt,) = await guarded.receipts()
    assert (len(receipt.requests), world.paid) == (2, [7])
    assert all(line.outcome == "ok" for line in receipt.requests)


async def test_a_tool_that_raises_is_settled_as_an_error_and_the_framework_gets_its_exception(world: World) -> None:
    made: Agent[None, str] = Agent(FunctionModel(world.answer, model_name="desk"))

    @made.tool_plain
    def pay(amount: int) -> str:
        """Pay an amount."""
        raise LookupError(f"no account for {amount}")

    with pytest.raises(LookupError, match="no account for 7"):
        await guard(made, guard=world.guard()).run("Pay the bill.")
    async with world.guard() as guarded:
        (receipt,) = await guarded.receipts()
    assert [line.outcome for line in receipt.calls] == ["error"]


async def test_a_tool_that_the_provider_runs_is_named_and_no_model_is_asked(world: World) -> None:
    made: Agent[None, str] = Agent(FunctionModel(world.answer, model_name="desk"), capabilities=[WebSearch()])
    with pytest.raises(ConfigError, match="web_search"):
        await guard(made, guard=world.guard()).run("Look it up.")
    assert world.request_count == 0


class Order(BaseModel):
    number: int


@pytest.mark.parametrize("result", [Order(number=4711), {(1, 2): 4711}, {1: 4711}, b"4711", 4711.5])
async def test_whatever_a_tool_returns_is_held_for_and_kept(desk: Desk, result: Any) -> None:
    answers = iter([[ToolCallPart("look", {})], [TextPart("Done.")]])
    usage = RequestUsage(input_tokens=100, output_tokens=10)

    def answer(*_: Any) -> ModelResponse:
        return ModelResponse(next(answers), usage=usage)

    agent = Agent(FunctionModel(answer, model_name="desk"))

    @agent.tool_plain
    def look() -> Any:  # pyright: ignore[reportUnusedFunction]  The agent calls it.
        """Look."""
        return result

    assert (await guard(agent, guard=desk.guard()).run("Look.")).output == "Done."
    await desk.expect_receipt("COMPLETED", ["look"], requests=2)


async def test_a_call_is_not_made_again_when_its_history_is_run_again_after_an_error(world: World) -> None:
    agent = world.agent(
        "PRIVILEGED", output_type=[str, DeferredToolRequests], model_settings=ModelSettings(max_tokens=100)
    )
    history = (await agent.run("Pay the bill.")).all_messages()
    await world.decide("approve")
    results, answer = DeferredToolResults(approvals={"c1": True}), world.answer

    def be_away(_: list[ModelMessage], __: AgentInfo) -> ModelResponse:
        raise ConnectionError("the provider is away")

    with pytest.raises(ConnectionError, match="away"):
        await agent.run(
            message_history=history, deferred_tool_results=results, model=FunctionModel(be_away, model_name="desk")
        )
    model = FunctionModel(answer, model_name="desk")
    last = await agent.run(message_history=history, deferred_tool_results=results, model=model)
    assert (last.output, world.paid) == ("Done: paid 7", [7])
