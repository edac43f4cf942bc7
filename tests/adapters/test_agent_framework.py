"""An agent of Microsoft's agent-framework under the guard: its own agent and loop, with a client that is a function."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
    ResponseStream,
    tool,
)

from halter.adapters.agent_framework import GuardedChatAgent, guard
from halter.core.errors import ConfigError
from tests.adapters.conftest import Desk


class FunctionClient(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], BaseChatClient[Any]):
    """Answers as a provider does: it calls the tool once, and is never longer than it may be."""

    OTEL_PROVIDER_NAME = "function"
    model = "desk"

    def __init__(self, output: int = 10, gate: asyncio.Event | None = None) -> None:
        super().__init__()
        self.output = output
        self.gate = gate
        self.requests: list[Mapping[str, Any]] = []

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **_: Any
    ) -> Any:
        self.requests.append(options)
        return (
            ResponseStream(self._stream(messages), finalizer=ChatResponse.from_updates)
            if stream
            else self._answer(messages)
        )

    async def _answer(self, messages: Sequence[Message]) -> ChatResponse[Any]:
        if self.gate is not None:
            self.gate.set()
            await asyncio.Event().wait()
        output = min(self.output, self.requests[-1].get("max_tokens") or self.output)
        return ChatResponse(
            messages=Message("assistant", [self._say(messages)]),
            usage_details={"input_token_count": 100, "output_token_count": output, "total_token_count": 100 + output},
        )

    async def _stream(self, messages: Sequence[Message]) -> AsyncGenerator[ChatResponseUpdate]:
        answer = await self._answer(messages)
        yield ChatResponseUpdate(role="assistant", contents=answer.messages[0].contents)
        assert answer.usage_details is not None
        yield ChatResponseUpdate(role="assistant", contents=[Content.from_usage(answer.usage_details)])

    def _say(self, messages: Sequence[Message]) -> Content:
        returned = [each for message in messages for each in message.contents if each.type == "function_result"]
        if returned:
            return Content.from_text(f"Done: {returned[-1].result}")
        return Content.from_function_call("c1", "pay", arguments={"amount": 7})


def make_agent(
    desk: Desk, level: Any = "CONTROLLED", cap: float = 1.0, client: Any = None, tools: Any = (), **options: Any
) -> GuardedChatAgent:
    @tool
    def pay(amount: int) -> str:
        """Pay an amount."""
        if amount < 0:
            raise ValueError("less than nothing")
        desk.paid.append(amount)
        return f"paid {amount}"

    agent = Agent(client or FunctionClient(), tools=[pay, *tools])
    return guard(agent, guard=desk.guard(cap), tools={"pay": {"level": level}}, **options)


class Demanding(FunctionClient):
    def _say(self, messages: Sequence[Message]) -> Content:
        content = super()._say(messages)
        return Content.from_function_call("c1", "pay", arguments={"amount": -7}) if content.type != "text" else content


async def test_an_error_of_the_tool_is_reported_to_the_model(desk: Desk) -> None:
    result = await make_agent(desk, client=Demanding()).run("Pay the bill.")
    assert result.text.startswith("Done: Error")
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


async def test_an_error_of_the_guard_ends_the_run_and_is_not_reported_to_the_model(desk: Desk) -> None:
    """The framework tells a model of what its middleware raises, and goes on: a guard that cannot decide must not."""
    own, client = desk.guard(), FunctionClient()

    @own.tool
    async def pay(amount: int) -> str:
        """The guard's own tool of the same name."""
        raise NotImplementedError(amount)

    agent = Agent(client, tools=[tool(desk.paid.append, name="pay")])
    with pytest.raises(ConfigError, match="pay is already a tool of this guard"):
        await guard(agent, guard=own).run("Pay the bill.")
    assert (desk.paid, len(client.requests)) == ([], 1)


class PlainClient(BaseChatClient[Any]):
    def _inner_get_response(self, **_: Any) -> Any:
        raise NotImplementedError


def test_what_goes_round_the_guard_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigError, match="web_search"):
        make_agent(desk, tools=[{"type": "web_search"}])
    with pytest.raises(ConfigError, match="clerk"):
        make_agent(desk, tools=[Agent(FunctionClient(), name="clerk").as_tool()])
    with pytest.raises(ConfigError, match="PlainClient"):
        make_agent(desk, client=PlainClient())
    make_agent(desk, tools=[{"type": "web_search"}], allow_native=["web_search"])


async def test_a_tool_of_the_providers_that_comes_later_is_refused_before_the_model_is_asked(desk: Desk) -> None:
    client = FunctionClient()
    with pytest.raises(ConfigError, match="web_search"):
        await make_agent(desk, client=client).run("Pay the bill.", tools=[{"type": "web_search"}])
    assert client.requests == []


class AwayOnce(FunctionClient):
    """A provider that is away once, after the call."""

    was_away = False

    def _say(self, messages: Sequence[Message]) -> Content:
        content = super()._say(messages)
        if content.type == "text" and not self.was_away:
            self.was_away = True
            raise ConnectionError("the provider is away")
        return content


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_is_not_made_again_when_its_approval_is_sent_again_after_an_error(
    desk: Desk, *, streamed: bool
) -> None:
    agent = make_agent(desk, "PRIVILEGED", client=AwayOnce(), max_output_tokens=100)
    session = AgentSession(session_id="one")
    first = await agent.run("Pay the bill.", session=session)
    await desk.decide("approve")
    saved = session.to_dict()
    message = Message("user", [first.user_input_requests[0].to_function_approval_response(approved=True)])

    async def run_saved() -> str:
        stored_session = AgentSession.from_dict(saved)
        if not streamed:
            return (await agent.run(message, session=stored_session)).text
        return "".join([each.text async for each in agent.run(message, session=stored_session, stream=True)])

    with pytest.raises(ConnectionError, match="away"):
        await run_saved()
    assert "paid 7" in await run_saved()
    assert desk.paid == [7]
