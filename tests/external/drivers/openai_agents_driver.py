"""OpenAI Agents SDK: its own runner, with a model that a mind speaks for."""

import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

from agents import Agent, Model, ModelResponse, ModelSettings, RunState, Usage, function_tool
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)

from halter.adapters.openai_agents import GuardedRunner, guard
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Mind, Order, Turn


class MindModel(Model):
    model = "function:desk"

    def __init__(self, mind: Mind) -> None:
        self._mind = mind

    async def get_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002 It is the SDK's name.
        model_settings: ModelSettings,
        *_: Any,
        **__: Any,
    ) -> ModelResponse:
        items: list[Any] = [] if isinstance(input, str) else input
        outputs = [item for item in items if item.get("type") == "function_call_output"]
        results = [str(item["output"]) for item in outputs if item["call_id"] != "h1"]
        turn = await self._mind.think(results, model_settings.max_tokens)
        tokens = turn.output_tokens
        usage = Usage(requests=1, input_tokens=INPUT_TOKENS, output_tokens=tokens, total_tokens=INPUT_TOKENS + tokens)
        return ModelResponse(output=[self._write(turn)], usage=usage, response_id=None)

    def _write(self, turn: Turn) -> Any:
        if turn.name:
            arguments = json.dumps(turn.arguments)
            return ResponseFunctionToolCall(arguments=arguments, call_id=turn.id, name=turn.name, type="function_call")
        text = ResponseOutputText(text=turn.text, type="output_text", annotations=[])
        return ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")

    async def stream_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002 It is the SDK's name.
        model_settings: ModelSettings,
        *_: Any,
        **__: Any,
    ) -> AsyncGenerator[Any]:
        answer = await self.get_response(system_instructions, input, model_settings)
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


class HandingModel(MindModel):
    def _write(self, turn: Turn) -> Any:
        return ResponseFunctionToolCall(arguments="{}", call_id="h1", name="transfer_to_desk", type="function_call")


class OpenAIAgents(Driver):
    package = "agents"
    LACKS: ClassVar = {"pulled_stream": "The SDK's own task runs ahead of the reader of `stream_events`."}

    def make_agent(self, **options: Any) -> Agent[Any]:
        tools: list[Any] = [function_tool(each) for each in (self.pay, self.read_mail, self.send_mail)]
        return Agent(name="desk", model=MindModel(self.mind), tools=tools, **options)

    def make_runner(self, agent: Agent[Any] | None = None) -> GuardedRunner:
        return guard(agent or self.make_agent(), guard=self.guard, tools=self.tool_options, **self.limit)

    async def run(self, conversation: str = "") -> str:
        return (await self.make_runner().run(TASK, conversation=conversation)).final_output

    def run_blocking(self) -> str:
        return self.make_runner().run_sync(TASK).final_output

    async def read(self) -> AsyncGenerator[str]:
        async with self.make_runner().run_streamed(TASK) as result:
            async for event in result.stream_events():
                yield str(event)

    async def ask(self) -> Any:
        result = await self.make_runner().run(TASK, conversation="one")
        assert result.interruptions
        return result.to_state().to_json()

    async def resume(self, state: Any) -> str:
        runner = self.make_runner()
        run_state: RunState[Any] = await RunState.from_json(runner.agent, state)
        run_state.approve(run_state.get_interruptions()[0])
        return (await runner.run(run_state, conversation="one")).final_output

    def save(self, state: Any) -> bytes:
        return json.dumps(state).encode()

    def load(self, saved: bytes) -> Any:
        return json.loads(saved)

    async def hand_off(self) -> str:
        front = Agent(name="front", model=HandingModel(self.mind), handoffs=[self.make_agent()])
        return (await self.make_runner(front).run(TASK)).final_output

    async def run_structured(self) -> Order:
        return (await self.make_runner(self.make_agent(output_type=Order)).run(TASK)).final_output
