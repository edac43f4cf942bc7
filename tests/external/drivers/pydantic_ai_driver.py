"""Pydantic AI: its own agent, with its own function model."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults
from pydantic_ai.usage import RequestUsage

from halter.adapters.pydantic_ai import GuardedAgent, guard
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Order


class PydanticAI(Driver):
    package = "pydantic_ai"
    LACKS: ClassVar = {
        "run_blocking": "`run_sync` calls `run` in an event loop that it never closes.",
        "hand_off": "Its agents hand off in a tool of the program: each run is a session of its own.",
    }

    async def answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        results = [
            str(part.content) for message in messages for part in message.parts if isinstance(part, ToolReturnPart)
        ]
        turn = await self.mind.think(results, (info.model_settings or {}).get("max_tokens"))
        part: Any = TextPart(turn.text)
        if turn.name:
            part = ToolCallPart(turn.name, turn.arguments, tool_call_id=turn.id)
        elif info.output_tools and self.mind.is_structured:
            part = ToolCallPart(info.output_tools[0].name, turn.text, tool_call_id="order")
        return ModelResponse([part], usage=RequestUsage(input_tokens=INPUT_TOKENS, output_tokens=turn.output_tokens))

    def make_agent(self, *output_types: Any) -> GuardedAgent:
        model, kinds = FunctionModel(self.answer, model_name="desk"), list(output_types or [str])
        agent: Any = Agent(model, output_type=kinds, tools=[self.pay, self.read_mail, self.send_mail])
        return guard(agent, guard=self.guard, tools=self.tool_options, **self.limit)

    async def run(self, conversation: str = "") -> str:
        return (await self.make_agent().run(TASK, conversation_id=conversation or None)).output

    async def read(self) -> AsyncGenerator[str]:
        async with self.make_agent().iter(TASK) as run:
            async for node in run:
                yield str(node)

    async def ask(self) -> Any:
        result = await self.make_agent(str, DeferredToolRequests).run(TASK)
        assert isinstance(result.output, DeferredToolRequests)
        return result.all_messages()

    async def resume(self, state: Sequence[ModelMessage]) -> str:
        agent = self.make_agent(str, DeferredToolRequests)
        calls = [part.tool_call_id for part in state[-1].parts if isinstance(part, ToolCallPart)]
        answers = DeferredToolResults(approvals=dict.fromkeys(calls, True))
        return str((await agent.run(message_history=state, deferred_tool_results=answers)).output)

    def save(self, state: Any) -> bytes:
        return ModelMessagesTypeAdapter.dump_json(state)

    def load(self, saved: bytes) -> Any:
        return ModelMessagesTypeAdapter.validate_python(msgspec.json.decode(saved))

    async def run_structured(self) -> Order:
        return (await self.make_agent(Order).run(TASK)).output
