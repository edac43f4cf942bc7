"""A LangChain agent under the guard: the framework's own agent, with a model that is a function."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from halter.adapters.langchain import GuardedGraph, create_agent
from halter.core.errors import ConfigError
from halter.guard.halts import halt
from halter.runtime.external_effects import EffectRefused
from tests.adapters.conftest import Desk

ASK: Any = {"messages": [{"role": "user", "content": "Pay the bill."}]}


class FunctionChatModel(BaseChatModel):
    """Answers as a provider does: it calls the tool once, and is never longer than it may be."""

    output: int = 10
    requests: list[dict[str, Any]]
    gate: Any = None

    @property
    def _llm_type(self) -> str:
        return "function"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return {"ls_provider": "function", "ls_model_name": "desk"}

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        self.requests.append(kwargs)
        output = min(self.output, kwargs.get("max_tokens") or self.output)
        usage: Any = {"input_tokens": 100, "output_tokens": output, "total_tokens": 100 + output}
        returned = [message for message in messages if isinstance(message, ToolMessage)]
        if returned:
            aimessage = AIMessage(f"Done: {returned[-1].content}", usage_metadata=usage)
        else:
            calls: Any = [{"name": "pay", "args": {"amount": 7}, "id": "c1"}]
            aimessage = AIMessage("", tool_calls=calls, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=aimessage)])

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        if self.gate is not None:
            self.gate.set()
            await asyncio.Event().wait()
        return self._generate(*args, **kwargs)


def make_agent(desk: Desk, level: Any = "CONTROLLED", cap: float = 1.0, **options: Any) -> GuardedGraph:
    @tool
    def pay(amount: int) -> str:
        """Pay an amount."""
        desk.paid.append(amount)
        return f"paid {amount}"

    model = options.pop("model", None) or FunctionChatModel(requests=[])
    return create_agent(model, [pay], guard=desk.guard(cap), tool_options={"pay": {"level": level}}, **options)


async def test_a_run_is_a_session_with_its_calls_its_requests_and_what_they_cost(desk: Desk) -> None:
    result = await make_agent(desk).ainvoke(ASK)
    assert (result["messages"][-1].content, desk.paid) == ("Done: paid 7", [7])
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


def test_a_program_that_is_not_async_runs_it_too(desk: Desk) -> None:
    assert make_agent(desk).invoke(ASK)["messages"][-1].content == "Done: paid 7"


async def test_a_stream_is_a_session_too(desk: Desk) -> None:
    results = [result async for result in make_agent(desk).astream(ASK, stream_mode="updates")]
    assert "paid 7" in str(results)
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


async def test_a_refused_call_is_reported_to_the_model_and_does_not_run(desk: Desk) -> None:
    desk.policy = {"policy": {"disabled": ["pay"]}}
    result = await make_agent(desk).ainvoke(ASK)
    assert desk.paid == []
    assert "disabled" in result["messages"][-1].content


async def test_parallel_runs_on_one_cap_never_pass_it(desk: Desk) -> None:
    """Twenty runs of eighty cents each, all at once, on one dollar a day."""
    desk.policy = {"limits": {"max_cost_usd_per_day": 1}}
    agent = make_agent(desk, model=FunctionChatModel(requests=[], output=39_000), max_output_tokens=40_000)
    results = await asyncio.gather(*(agent.ainvoke(ASK) for _ in range(20)), return_exceptions=True)
    refused = [each for each in results if isinstance(each, EffectRefused)]
    assert {each.outcome for each in refused} == {"cost_cap_reached"}
    assert len(refused) >= 18
    assert Decimal("0.5") < await desk.read_spending() <= 1


async def test_an_answer_is_never_longer_than_what_fits_the_cap(desk: Desk) -> None:
    model = FunctionChatModel(requests=[])
    await make_agent(desk, cap=0.03, model=model, max_output_tokens=40_000).ainvoke(ASK)
    assert 0 < model.requests[0]["max_tokens"] < 40_000


async def test_a_halt_ends_a_run_within_its_request(desk: Desk) -> None:
    event = asyncio.Event()
    run = asyncio.create_task(make_agent(desk, model=FunctionChatModel(requests=[], gate=event)).ainvoke(ASK))
    await event.wait()
    store = desk.store()
    await store.commit(halt("fleet", "ada", "halt-1"))
    with pytest.raises(EffectRefused) as refused:
        await run
    assert refused.value.outcome == "external_halt"
    await store.close()


async def test_a_question_interrupts_the_run_and_the_call_is_made_once_after_a_yes(desk: Desk) -> None:
    memory, thread = InMemorySaver(), {"configurable": {"thread_id": "t1"}}
    first = await make_agent(desk, "PRIVILEGED", checkpointer=memory).ainvoke(ASK, thread)
    (question,) = first["__interrupt__"]
    assert question.value["tool"] == "pay"
    # Approving in the framework alone is not enough.
    result = await make_agent(desk, "PRIVILEGED", checkpointer=memory).ainvoke(Command(resume=True), thread)
    assert result["__interrupt__"]
    assert desk.paid == []
    await desk.decide("approve")
    # A new agent and a new guard go on, as a new process would.
    last = await make_agent(desk, "PRIVILEGED", checkpointer=memory).ainvoke(Command(resume=True), thread)
    assert (last["messages"][-1].content, desk.paid) == ("Done: paid 7", [7])


async def test_a_denied_call_does_not_run(desk: Desk) -> None:
    memory, thread = InMemorySaver(), {"configurable": {"thread_id": "t1"}}
    agent = make_agent(desk, "PRIVILEGED", checkpointer=memory)
    await agent.ainvoke(ASK, thread)
    await desk.decide("deny")
    last = await agent.ainvoke(Command(resume=True), thread)
    assert desk.paid == []
    assert "Done: " in last["messages"][-1].content


class AddsSearch(AgentMiddleware[Any, Any]):
    """Offers a tool of the provider's beside those that the agent was made with."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(tools=[*request.tools, {"type": "web_search"}]))


async def test_a_tool_of_the_providers_that_comes_later_is_refused_before_the_model_is_asked(desk: Desk) -> None:
    model = FunctionChatModel(requests=[])
    with pytest.raises(ConfigError, match="web_search"):
        await make_agent(desk, model=model, middleware=[AddsSearch()]).ainvoke(ASK)
    assert model.requests == []


async def test_what_goes_round_the_guard_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigError, match="web_search"):
        create_agent(FunctionChatModel(requests=[]), [{"type": "web_search"}], guard=desk.guard())
    with pytest.raises(ConfigError, match="outside a session"):
        await make_agent(desk).with_config({}).ainvoke(ASK)
    with pytest.raises(ConfigError, match="guarded agent itself"):
        make_agent(desk).with_config({}).invoke(ASK)
    assert desk.paid == []
