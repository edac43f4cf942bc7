"""How long a guarded agent's answers may be: as its framework's settings have it, or else as long as its model's."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from agent_framework import Agent as ChatAgent
from agent_framework import ChatResponse, Content, Message
from agents import Agent, ModelSettings
from langchain_core.language_models import BaseChatModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from halter.adapters import agent_framework, langchain, openai_agents, pydantic_ai
from halter.adapters.attachments import find_limit, lower_limit
from halter.core.events import RequestStarted
from halter.core.ids import session_stream
from halter.core.ports import read_stream
from halter.external.dialect import DEFAULT_MAX_OUTPUT
from tests.adapters import test_agent_framework, test_langchain, test_openai_agents
from tests.adapters.conftest import Desk

ANSWER = 9_000
"""Tokens of the answer that the model of each framework writes, unless its limit is lower."""

Limits = list[int | None]
Run = Callable[[Desk, int | None, float], Awaitable[Limits]]
"""Runs an agent with its framework's own setting and a cap, and returns the limits that its model was sent."""


async def run_pydantic_ai(desk: Desk, setting: int | None, cap: float) -> Limits:
    sent: Limits = []

    def answer(_: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        sent.append((info.model_settings or {}).get("max_tokens"))
        usage = RequestUsage(input_tokens=100, output_tokens=min(ANSWER, sent[-1] or ANSWER))
        return ModelResponse([TextPart("Done.")], usage=usage)

    settings: Any = {} if setting is None else {"max_tokens": setting}
    agent = PydanticAgent(FunctionModel(answer, model_name="desk", settings=settings))
    await pydantic_ai.guard(agent, guard=desk.guard(cap)).run("Write.")
    return sent


class WritingChatModel(test_langchain.FunctionChatModel):
    """A model with a field of its own for the limit, as Gemini's has: it reads no other name."""

    max_output_tokens: int | None = None

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        limit = options.get("max_output_tokens", self.max_output_tokens)
        self.requests.append({"limit": limit})
        self.output = min(ANSWER, limit or ANSWER)
        returned = [test_langchain.ToolMessage("", tool_call_id="c1")]
        return super()._generate([*messages, *returned], max_tokens=self.output)


async def run_langchain(desk: Desk, setting: int | None, cap: float) -> Limits:
    model = WritingChatModel(requests=[], max_output_tokens=setting)
    agent: Any = langchain.create_agent(model, guard=desk.guard(cap))
    await agent.ainvoke(test_langchain.ASK)
    return [request["limit"] for request in model.requests if "limit" in request]


class WritingModel(test_openai_agents.FunctionModel):
    def __init__(self) -> None:
        super().__init__(ANSWER)
        self.sent: Limits = []

    async def get_response(self, system: Any, result: Any, settings: Any, *_: Any, **__: Any) -> Any:
        self.sent.append(settings.max_tokens)
        written = min(ANSWER, settings.max_tokens or ANSWER)
        answered = [{"type": "function_call_output", "call_id": "c1", "output": "ok"}]
        return await super().get_response(system, answered, ModelSettings(max_tokens=written))


async def run_openai_agents(desk: Desk, setting: int | None, cap: float) -> Limits:
    model = WritingModel()
    agent = Agent(name="desk", model=model, model_settings=ModelSettings(max_tokens=setting))
    await openai_agents.guard(agent, guard=desk.guard(cap)).run("Write.")
    return model.sent


class WritingClient(test_agent_framework.FunctionClient):
    async def _answer(self, messages: Any) -> ChatResponse[Any]:
        written = min(ANSWER, self.requests[-1].get("max_tokens") or ANSWER)
        usage: Any = {"input_token_count": 100, "output_token_count": written, "total_token_count": 100 + written}
        return ChatResponse(messages=Message("assistant", [Content.from_text("Done.")]), usage_details=usage)


async def run_agent_framework(desk: Desk, setting: int | None, cap: float) -> Limits:
    client = WritingClient()
    options: Any = {} if setting is None else {"max_tokens": setting}
    agent = ChatAgent(client, default_options=options)
    await agent_framework.guard(agent, guard=desk.guard(cap)).run("Write.")
    return [each.get("max_tokens") for each in client.requests]


FRAMEWORKS: Mapping[str, Run] = {
    "pydantic_ai": run_pydantic_ai,
    "langchain": run_langchain,
    "openai_agents": run_openai_agents,
    "agent_framework": run_agent_framework,
}
each_framework = pytest.mark.parametrize("run", FRAMEWORKS.values(), ids=FRAMEWORKS)


async def list_held_limits(desk: Desk) -> list[int]:
    async with desk.guard() as guarded:
        receipts = await guarded.receipts()
    store = desk.store()
    events = [each.event for one in receipts for each in await read_stream(store, session_stream(one.session))]
    await store.close()
    return [event.max_output_tokens for event in events if isinstance(event, RequestStarted)]


@each_framework
async def test_the_limit_of_the_framework_s_own_settings_is_sent_and_held_as_it_is(desk: Desk, run: Run) -> None:
    assert await run(desk, 20_000, 1.0) == [20_000]
    assert await list_held_limits(desk) == [20_000]


@each_framework
async def test_without_a_limit_none_is_sent_and_the_longest_answer_is_held(desk: Desk, run: Run) -> None:
    assert await run(desk, None, 2.0) == [None]
    assert await list_held_limits(desk) == [DEFAULT_MAX_OUTPUT]


@each_framework
async def test_an_answer_that_the_caps_cut_is_reported_with_what_to_set(desk: Desk, run: Run) -> None:
    with pytest.warns(UserWarning, match=r"cut at \d,\d+ tokens.*max_cost_usd"):
        (sent,) = await run(desk, None, 0.05)
    assert await list_held_limits(desk) == [sent]
    assert sent is not None
    assert 2_000 < sent < ANSWER


@each_framework
async def test_an_answer_that_its_own_limit_cuts_is_not_reported(desk: Desk, run: Run) -> None:
    assert await run(desk, 500, 1.0) == [500]


NESTED = {"temperature": 1, "extra_body": {"max_completion_tokens": 9_000, "seed": 1}}


@pytest.mark.parametrize(
    ("settings", "limit", "lowered"),
    [
        ({}, None, {"max_tokens": 700}),
        ({"max_tokens": None}, None, {"max_tokens": 700}),
        ({"max_tokens": 9_000}, 9_000, {"max_tokens": 700}),
        ({"max_output_tokens": 9_000, "max_tokens": 500}, 9_000, {"max_output_tokens": 700, "max_tokens": 500}),
        (NESTED, 9_000, {"temperature": 1, "extra_body": {"max_completion_tokens": 700, "seed": 1}}),
        ({"extra_args": {"max_tokens": 80}}, 80, {"extra_args": {"max_tokens": 80}}),
    ],
)
def test_a_limit_is_found_and_lowered_wherever_the_settings_have_it(
    settings: Mapping[str, Any], limit: int | None, lowered: Mapping[str, Any]
) -> None:
    assert find_limit(settings) == limit
    assert lower_limit(settings, None) == settings
    assert lower_limit(settings, 700) == lowered


def test_a_chat_model_of_langchain_is_an_ordinary_one() -> None:
    assert isinstance(WritingChatModel(requests=[]), BaseChatModel)


async def test_a_limit_that_was_bound_to_a_chat_model_is_its_own_too(desk: Desk) -> None:
    model: Any = WritingChatModel(requests=[]).bind(max_output_tokens=700)
    agent: Any = langchain.create_agent(model, guard=desk.guard())
    await agent.ainvoke(test_langchain.ASK)
    assert await list_held_limits(desk) == [700]


async def test_what_a_chat_model_knows_of_its_longest_answer_is_sent_and_held(desk: Desk) -> None:
    model = WritingChatModel(requests=[], profile={"max_output_tokens": 64_000})
    agent: Any = langchain.create_agent(model, guard=desk.guard())
    await agent.ainvoke(test_langchain.ASK)
    assert model.requests[0] == {"limit": 64_000}
    assert await list_held_limits(desk) == [64_000]


async def test_runs_without_a_limit_take_turns_on_one_cap(desk: Desk) -> None:
    desk.policy = {"limits": {"max_cost_usd_per_day": 1}}
    sent = await asyncio.gather(*(run_pydantic_ai(desk, None, 1.0) for _ in range(4)))
    assert all(limit is not None and limit > ANSWER for (limit,) in sent)
