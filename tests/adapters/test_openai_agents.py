"""An agent of the OpenAI Agents SDK under the guard: the SDK's own runner, with a model that is a function."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from agents import (
    Agent,
    Model,
    ModelProvider,
    ModelResponse,
    ModelSettings,
    RunConfig,
    Runner,
    RunState,
    Usage,
    WebSearchTool,
    function_tool,
    handoff,
)
from agents.exceptions import UserError
from agents.mcp import MCPServer
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as MCPTool
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)

from halter.adapters.guarded_runs import NO_TOOLS, GuardedRuns
from halter.adapters.openai_agents import GuardedRunner, _AgentWrapper, guard  # pyright: ignore[reportPrivateUsage]
from halter.core.errors import ConfigError
from halter.external.effects import EffectRefused
from halter.guard.halts import halt
from tests.adapters.conftest import Desk


class FunctionModel(Model):
    """Answers as a provider does: it calls the tool once, and is never longer than it may be."""

    model = "function:desk"

    def __init__(self, output: int = 10, gate: asyncio.Event | None = None) -> None:
        self.output = output
        self.gate = gate
        self.most: list[int] = []

    async def get_response(
        self, system: Any, result: Any, settings: ModelSettings, *_: Any, **__: Any
    ) -> ModelResponse:
        if self.gate is not None:
            self.gate.set()
            await asyncio.Event().wait()
        self.most.append(settings.max_tokens or 0)
        written = min(self.output, self.most[-1] or self.output)
        usage = Usage(requests=1, input_tokens=100, output_tokens=written, total_tokens=100 + written)
        return ModelResponse(output=[self._answer(result)], usage=usage, response_id=None)

    def _answer(self, result: Any) -> Any:
        items: list[Any] = [] if isinstance(result, str) else result
        returned = [item for item in items if "c1" in str(item) and item["type"] == "function_call_output"]
        if returned:
            text = ResponseOutputText(text=f"Done: {returned[-1]['output']}", type="output_text", annotations=[])
            return ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
        return ResponseFunctionToolCall(arguments='{"amount": 7}', call_id="c1", name="pay", type="function_call")

    async def stream_response(
        self, system: Any, result: Any, settings: ModelSettings, *_: Any, **__: Any
    ) -> AsyncIterator[Any]:
        answer = await self.get_response(system, result, settings)
        usage: Any = {
            "input_tokens": answer.usage.input_tokens,
            "output_tokens": answer.usage.output_tokens,
            "total_tokens": answer.usage.total_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        response = Response(
            id="r",
            created_at=0,
            model="desk",
            object="response",
            output=answer.output,
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=False,
            usage=ResponseUsage.model_validate(usage),
        )
        yield ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)


def make_agent(desk: Desk, model: FunctionModel | None = None, **options: Any) -> Agent[Any]:
    @function_tool
    def pay(amount: int, currency: str = "EUR") -> str:
        """Pay an amount."""
        desk.paid.append(amount)
        return f"paid {amount} {currency}"

    return Agent(name="desk", model=model or FunctionModel(), tools=[pay], **options)


def make_runner(desk: Desk, level: Any = "CONTROLLED", cap: float = 1.0, **options: Any) -> GuardedRunner:
    agent = make_agent(desk, options.pop("model", None))
    return guard(agent, guard=desk.guard(cap), tools={"pay": {"level": level}}, **options)


class OneModel(ModelProvider):
    def get_model(self, model_name: str | None) -> Model:
        return FunctionModel()


@pytest.mark.parametrize(
    "config", [RunConfig(model=FunctionModel()), RunConfig(model="desk", model_provider=OneModel())]
)
async def test_a_model_that_only_the_run_names_is_held_as_well(desk: Desk, config: RunConfig) -> None:
    await make_runner(desk).run("Pay the bill.", run_config=config)
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


async def test_agents_that_a_handoff_makes_anew_are_not_taken_for_each_other(desk: Desk) -> None:
    """The attack: an agent of one hand-off has the place in memory of another one's, which is gone."""
    texts = iter(f"desk {number}" for number in range(20))

    async def invoke(_: Any, __: str) -> Agent[Any]:
        return Agent(name=next(texts))

    anew = handoff(Agent(name="desk"))
    anew.on_invoke_handoff = invoke
    wrapper = _AgentWrapper(GuardedRuns(desk.guard(), NO_TOOLS))
    (guarded,) = wrapper.wrap(Agent(name="front", handoffs=[anew])).handoffs
    names = [(await cast("Any", guarded).on_invoke_handoff(None, "")).name for _ in range(20)]
    assert names == [f"desk {number}" for number in range(20)]


async def test_a_state_is_run_in_its_conversation_alone(desk: Desk) -> None:
    runner = make_runner(desk, "PRIVILEGED")
    first = await runner.run("Pay the bill.", conversation="one")
    (question,) = first.interruptions
    assert question.name == "pay"
    with pytest.raises(ConfigError, match="conversation"):
        await runner.run(first.to_state())


async def test_approving_in_the_framework_alone_is_not_enough(desk: Desk) -> None:
    runner = make_runner(desk, "PRIVILEGED")
    first = await runner.run("Pay the bill.", conversation="one")
    state = first.to_state()
    state.approve(first.interruptions[0])
    with pytest.raises(Exception, match="waits for the decision"):
        await runner.run(state, conversation="one")
    assert desk.paid == []


async def test_what_goes_round_the_guard_is_refused(desk: Desk) -> None:
    strange = make_agent(desk).as_tool("desk", "Ask the desk.")
    strange.on_invoke_tool = refuse_to_run
    nested = Agent(name="inner", tools=[WebSearchTool()]).as_tool("inner", "Ask the web.")
    for tool in (WebSearchTool(), strange, nested):
        with pytest.raises(ConfigError, match="The guard cannot see"):
            guard(Agent(name="web", tools=[tool]), guard=desk.guard())
    with pytest.raises((ConfigError, UserError), match="outside a session"):
        await Runner.run(make_runner(desk).agent, "Pay the bill.")
    assert desk.paid == []


async def refuse_to_run(*_: Any) -> None:
    """Stand for a way to run an agent that the adapter does not know."""
    raise AssertionError


class Bank(MCPServer):
    """An MCP server with one tool."""

    def __init__(self, desk: Desk, **options: Any) -> None:
        super().__init__(**options)
        self._desk = desk

    @property
    def name(self) -> str:
        return "bank"

    async def connect(self) -> None: ...

    async def cleanup(self) -> None: ...

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Any]:
        schema = {"type": "object", "properties": {"amount": {"type": "integer"}}}
        return [MCPTool(name="pay", description="Pay an amount.", input_schema=schema)]

    async def call_tool(self, tool_name: str, arguments: dict[str, Any] | None, meta: Any = None) -> Any:
        self._desk.paid.append((arguments or {})["amount"])
        return CallToolResult(content=[TextContent(type="text", text="paid by the bank")])

    async def list_prompts(self) -> Any:
        raise NotImplementedError

    async def get_prompt(self, name: str, arguments: Any = None) -> Any:
        raise NotImplementedError


def make_bank_runner(desk: Desk, level: Any = "CONTROLLED", **options: Any) -> GuardedRunner:
    agent = Agent(name="desk", model=FunctionModel(), mcp_servers=[Bank(desk, **options)])
    return guard(agent, guard=desk.guard(), tools={"pay": {"level": level}})


async def test_a_tool_of_an_mcp_server_is_a_call_like_any_other(desk: Desk) -> None:
    result = await make_bank_runner(desk).run("Pay the bill.")
    assert ("paid by the bank" in result.final_output, desk.paid) == (True, [7])
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


async def test_a_refused_tool_of_an_mcp_server_does_not_run(desk: Desk) -> None:
    desk.policy = {"policy": {"disabled": ["pay"]}}
    result = await make_bank_runner(desk).run("Pay the bill.")
    assert ("disabled" in result.final_output, desk.paid) == (True, [])


async def test_a_question_about_a_tool_of_an_mcp_server_interrupts_the_run(desk: Desk) -> None:
    first = await make_bank_runner(desk, "PRIVILEGED").run("Pay the bill.", conversation="one")
    assert (len(first.interruptions), desk.paid) == (1, [])
    await desk.decide("approve")
    runner = make_bank_runner(desk, "PRIVILEGED")
    state: RunState[Any] = await RunState.from_json(runner.agent, first.to_state().to_json())
    state.approve(state.get_interruptions()[0])
    last = await runner.run(state, conversation="one")
    assert ("paid by the bank" in last.final_output, desk.paid) == (True, [7])


async def test_an_approval_that_the_tool_itself_needs_is_asked_for_as_well(desk: Desk) -> None:
    runner = make_bank_runner(desk, require_approval="always")
    first = await runner.run("Pay the bill.", conversation="one")
    assert (len(first.interruptions), desk.paid) == (1, [])
    state = first.to_state()
    state.approve(first.interruptions[0])
    await runner.run(state, conversation="one")
    assert desk.paid == [7]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


class Boss(FunctionModel):
    """Asks the desk, and repeats what it said."""

    def _answer(self, result: Any) -> Any:
        items: list[Any] = [] if isinstance(result, str) else result
        returned = [item for item in items if item.get("type") == "function_call_output"]
        if returned:
            text = ResponseOutputText(text=f"It said: {returned[-1]['output']}", type="output_text", annotations=[])
            return ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
        return ResponseFunctionToolCall(
            arguments='{"input": "Pay."}', call_id="b1", name="ask_desk", type="function_call"
        )


def make_boss(
    desk: Desk, level: Any = "CONTROLLED", cap: float = 1.0, model: FunctionModel | None = None, **options: Any
) -> GuardedRunner:
    asks_desk = make_agent(desk, model).as_tool("ask_desk", "Ask the desk.", **options)
    boss = Agent(name="boss", model=Boss(), tools=[asks_desk])
    return guard(boss, guard=desk.guard(cap), tools={"pay": {"level": level}})


async def test_an_agent_that_is_a_tool_runs_in_the_same_session(desk: Desk) -> None:
    result = await make_boss(desk).run("Pay the bill.")
    assert (result.final_output, desk.paid) == ("It said: Done: paid 7 EUR", [7])
    await desk.expect_receipt("COMPLETED", ["ask_desk", "pay"], requests=4)


async def test_what_an_agent_was_given_as_a_tool_stays(desk: Desk) -> None:
    async def shout(result: Any) -> str:
        return result.final_output.upper()

    config = RunConfig(model="desk", model_provider=OneModel())
    runner = make_boss(desk, custom_output_extractor=shout, run_config=config)
    assert (await runner.run("Pay the bill.")).final_output == "It said: DONE: PAID 7 EUR"
    await desk.expect_receipt("COMPLETED", ["ask_desk", "pay"], requests=4)


async def test_a_refused_agent_does_not_run(desk: Desk) -> None:
    desk.policy = {"policy": {"disabled": ["ask_desk"]}}
    result = await make_boss(desk).run("Pay the bill.")
    assert ("disabled" in result.final_output, desk.paid) == (True, [])
    desk.policy = {}
    await desk.expect_receipt("COMPLETED", [], requests=2)


async def test_a_question_inside_an_agent_that_is_a_tool_interrupts_the_run(desk: Desk) -> None:
    first = await make_boss(desk, "PRIVILEGED").run("Pay the bill.", conversation="one")
    assert ([each.name for each in first.interruptions], desk.paid) == (["pay"], [])
    await desk.decide("approve")
    runner = make_boss(desk, "PRIVILEGED")
    state: RunState[Any] = await RunState.from_json(runner.agent, first.to_state().to_json())
    state.approve(state.get_interruptions()[0])
    last = await runner.run(state, conversation="one")
    assert (last.final_output, desk.paid) == ("It said: Done: paid 7 EUR", [7])


async def test_a_question_inside_an_agent_that_is_a_tool_waits_without_a_conversation(desk: Desk) -> None:
    run = asyncio.create_task(make_boss(desk, "PRIVILEGED").run("Pay the bill."))
    await desk.wait_for_question()
    await desk.decide("approve")
    assert (await run).final_output == "It said: Done: paid 7 EUR"
    assert desk.paid == [7]


async def test_a_halt_inside_an_agent_that_is_a_tool_ends_the_run(desk: Desk) -> None:
    event = asyncio.Event()
    run = asyncio.create_task(make_boss(desk, model=FunctionModel(gate=event)).run("Pay."))
    await event.wait()
    store = desk.store()
    await store.commit(halt("fleet", "ada", "halt-1"))
    with pytest.raises(EffectRefused) as refused:
        await run
    assert refused.value.outcome == "external_halt"
    await store.close()


async def test_agents_that_are_tools_of_each_other_are_guarded(desk: Desk) -> None:
    first, second = make_agent(desk), Agent(name="boss", model=Boss())
    first.tools.append(second.as_tool("ask_boss", "Ask the boss."))
    second.tools.append(first.as_tool("ask_desk", "Ask the desk."))
    assert (await guard(second, guard=desk.guard()).run("Pay.")).final_output == "It said: Done: paid 7 EUR"
    await desk.expect_receipt("COMPLETED", ["ask_desk", "pay"], requests=4)


async def test_a_stream_that_is_broken_off_within_a_request_ends_its_session(desk: Desk) -> None:
    event = asyncio.Event()
    async with make_runner(desk, model=FunctionModel(gate=event)).run_streamed("Pay the bill."):
        await event.wait()
    async with desk.guard() as guarded:
        (receipt,) = await guarded.receipts()
    assert (receipt.state, [line.outcome for line in receipt.requests]) == ("COMPLETED", ["cancelled"])


class AwayOnce(FunctionModel):
    """A provider that is away once, after the call."""

    was_away = False

    def _answer(self, result: Any) -> Any:
        answer = super()._answer(result)
        if isinstance(answer, ResponseOutputMessage) and not self.was_away:
            self.was_away = True
            raise ConnectionError("the provider is away")
        return answer


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_is_not_made_again_when_its_state_is_run_again_after_an_error(
    desk: Desk, *, streamed: bool
) -> None:
    runner = make_runner(desk, "PRIVILEGED", model=AwayOnce(), max_output_tokens=100)
    first = await runner.run("Pay the bill.", conversation="one")
    await desk.decide("approve")
    saved = first.to_state().to_json()

    async def run_saved() -> Any:
        state: RunState[Any] = await RunState.from_json(runner.agent, saved)
        state.approve(state.get_interruptions()[0])
        if not streamed:
            return (await runner.run(state, conversation="one")).final_output
        async with runner.run_streamed(state, conversation="one") as result:
            _ = [event async for event in result.stream_events()]
        return result.final_output

    with pytest.raises(ConnectionError, match="away"):
        await run_saved()
    assert await run_saved() == "Done: paid 7 EUR"
    assert desk.paid == [7]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=3)
