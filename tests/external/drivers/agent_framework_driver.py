"""Microsoft's agent-framework: its own agent and loop, with a client that a mind speaks for."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

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
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Mind, Order


class MindClient(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], BaseChatClient[Any]):
    OTEL_PROVIDER_NAME = "function"
    model = "desk"

    def __init__(self, mind: Mind) -> None:
        super().__init__()
        self._mind = mind

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **_: Any
    ) -> Any:
        if stream:
            return ResponseStream(self._stream(messages, options), finalizer=ChatResponse.from_updates)
        return self._answer(messages, options)

    async def _write(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[Content, Any]:
        contents = [content for message in messages for content in message.contents]
        results = [str(content.result) for content in contents if content.type == "function_result"]
        turn = await self._mind.think(results, options.get("max_tokens"))
        tokens = turn.output_tokens
        usage = {
            "input_token_count": INPUT_TOKENS,
            "output_token_count": tokens,
            "total_token_count": INPUT_TOKENS + tokens,
        }
        if turn.name:
            return Content.from_function_call(turn.id, turn.name, arguments=turn.arguments), usage
        return Content.from_text(turn.text), usage

    async def _answer(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatResponse[Any]:
        content, usage = await self._write(messages, options)
        return ChatResponse(messages=Message("assistant", [content]), usage_details=usage)

    async def _stream(
        self, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> AsyncGenerator[ChatResponseUpdate]:
        content, usage = await self._write(messages, options)
        yield ChatResponseUpdate(role="assistant", contents=[content])
        yield ChatResponseUpdate(role="assistant", contents=[Content.from_usage(usage)])


class AgentFramework(Driver):
    package = "agent_framework"
    LACKS: ClassVar = {
        "run_blocking": "The framework runs agents in event loops alone.",
        "hand_off": "An agent as a tool makes requests of its own and is rejected.",
    }

    def make_agent(self) -> GuardedChatAgent:
        tools = [tool(each) for each in (self.pay, self.read_mail, self.send_mail)]
        agent = Agent(MindClient(self.mind), tools=tools)
        return guard(agent, guard=self.guard, tools=self.tool_options, **self.limit)

    async def run(self, conversation: str = "") -> str:
        options: Any = {"session": AgentSession(session_id=conversation)} if conversation else {}
        return (await self.make_agent().run(TASK, **options)).text

    async def read(self) -> AsyncGenerator[str]:
        async for update in self.make_agent().run(TASK, stream=True):
            yield str([content.to_dict() for content in update.contents])

    async def ask(self) -> Any:
        session = AgentSession(session_id="one")
        result = await self.make_agent().run(TASK, session=session)
        message = Message("user", [result.user_input_requests[0].to_function_approval_response(approved=True)])
        return {"session": session.to_dict(), "message": message.to_dict()}

    async def resume(self, state: Any) -> str:
        session, message = AgentSession.from_dict(state["session"]), Message.from_dict(state["message"])
        return (await self.make_agent().run(message, session=session)).text

    def save(self, state: Any) -> bytes:
        return json.dumps(state).encode()

    def load(self, saved: bytes) -> Any:
        return json.loads(saved)

    async def run_structured(self) -> Order:
        return (await self.make_agent().run(TASK, options={"response_format": Order})).value
