"""Google's ADK: its own runner and loop, with a model that a mind speaks for."""
# pyright: basic, reportMissingImports=false

from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import Agent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.apps import App
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from halter.adapters.google_adk import GuardedAdkRunner, guard
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Order, Turn

TOOLS = ("pay", "read_mail", "send_mail")


class MindLlm(BaseLlm):
    model: str = "function:desk"
    mind: Any = None

    async def generate_content_async(
        self,
        llm_request: LlmRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 It is ADK's.
    ) -> AsyncGenerator[LlmResponse, None]:
        parts = [part for content in llm_request.contents for part in content.parts or ()]
        responses = [part.function_response for part in parts if part.function_response]
        results = [str(each.response) for each in responses if each.name in TOOLS]
        turn = await self.mind.think(results, llm_request.config.max_output_tokens)
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=INPUT_TOKENS, candidates_token_count=turn.output_tokens
        )
        part = self._write(turn, llm_request)
        if stream and part.text:
            yield LlmResponse(content=types.Content(role="model", parts=[part]), partial=True)
        yield LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=usage)

    def _write(self, turn: Turn, request: LlmRequest) -> types.Part:
        if turn.name:
            call = types.FunctionCall(id=turn.id, name=turn.name, args=turn.arguments)
            return types.Part(function_call=call)
        if self.mind.is_structured and "set_model_response" in request.tools_dict:
            call = types.FunctionCall(name="set_model_response", args={"amount": 7})
            return types.Part(function_call=call)
        return types.Part(text=turn.text)


class TransferringLlm(MindLlm):
    def _write(self, turn: Turn, request: LlmRequest) -> types.Part:
        return types.Part(function_call=types.FunctionCall(name="transfer_to_agent", args={"agent_name": "desk"}))


def text_of(events: list[Any]) -> str:
    return "".join(
        part.text or "" for event in events if event.content and not event.partial for part in event.content.parts
    )


class GoogleADK(Driver):
    package = "google.adk"

    def make_agent(self, **options: Any) -> Agent:
        return Agent(
            name="desk", model=MindLlm(mind=self.mind), tools=[getattr(self, name) for name in TOOLS], **options
        )

    def make_runner(self, agent: Agent | None = None, sessions: Any = None) -> GuardedAdkRunner:
        runner = Runner(
            app=App(name="desk", root_agent=agent or self.make_agent()),
            session_service=sessions or InMemorySessionService(),
            auto_create_session=True,
        )
        return guard(runner, guard=self.guard, tools=self.tool_options, **self.limit)

    def describe_run(self, session: str = "") -> dict[str, Any]:
        message = types.Content(role="user", parts=[types.Part(text=TASK)])
        return {"user_id": "ada", "session_id": session or f"s{id(self)}", "new_message": message}

    async def run(self, conversation: str = "") -> str:
        return text_of([event async for event in self.make_runner().run_async(**self.describe_run(conversation))])

    def run_blocking(self) -> str:
        return text_of(list(self.make_runner().run(**self.describe_run())))

    async def read(self) -> AsyncGenerator[str]:
        config = RunConfig(streaming_mode=StreamingMode.SSE)
        async for event in self.make_runner().run_async(**self.describe_run(), run_config=config):
            yield str(event.content)

    def open_sessions(self) -> SqliteSessionService:
        return SqliteSessionService(str(self.desk.file.parent / "adk.db"))

    async def ask(self) -> Any:
        runner = self.make_runner(sessions=self.open_sessions())
        events = [event async for event in runner.run_async(**self.describe_run("one"))]
        calls = [call for event in events for call in event.get_function_calls()]
        (question,) = [call for call in calls if call.name == "adk_request_confirmation"]
        return question

    async def resume(self, state: Any) -> str:
        response = types.FunctionResponse(id=state.id, name=state.name, response={"confirmed": True})
        message = types.Content(role="user", parts=[types.Part(function_response=response)])
        runner = self.make_runner(sessions=self.open_sessions())
        options = {**self.describe_run("one"), "new_message": message}
        return text_of([event async for event in runner.run_async(**options)])

    def save(self, state: Any) -> bytes:
        return state.model_dump_json().encode()

    def load(self, saved: bytes) -> Any:
        return types.FunctionCall.model_validate_json(saved)

    async def hand_off(self) -> str:
        front = Agent(name="front", model=TransferringLlm(mind=self.mind), sub_agents=[self.make_agent()])
        runner = self.make_runner(front)
        return text_of([event async for event in runner.run_async(**self.describe_run())])

    async def run_structured(self) -> Order:
        runner = self.make_runner(self.make_agent(output_schema=Order))
        events = [event async for event in runner.run_async(**self.describe_run())]
        return Order.model_validate_json(text_of(events[-1:]))
