"""CrewAI: its own crew and agents, with a model that a mind speaks for."""
# pyright: basic, reportMissingImports=false

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, ClassVar

# It reads them when it is imported.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import Agent, BaseLLM, Crew, Process, Task
from crewai.events.types.llm_events import LLMCallType
from crewai.tools import tool

from halter.adapters.crewai import GuardedCrew, guard
from tests.adapters.conftest import Desk
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Order


class MindModel(BaseLLM):
    max_tokens: int | None = None
    mind: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__(model="function:desk", **options)

    def supports_function_calling(self) -> bool:
        return True

    def call(self, messages: Any, *_: Any, **__: Any) -> Any:
        turn = self.mind.think_in_thread(self._read(messages), self.max_tokens)
        tokens = turn.output_tokens
        self._track_token_usage_internal(
            {"prompt_tokens": INPUT_TOKENS, "completion_tokens": tokens, "total_tokens": INPUT_TOKENS + tokens}
        )
        if turn.name:
            arguments = json.dumps(turn.arguments)
            answer: Any = [SimpleNamespace(id=turn.id, function=SimpleNamespace(name=turn.name, arguments=arguments))]
        else:
            answer = turn.text
        if self.stream:
            self._emit_stream_chunk_event(str(answer), call_type=LLMCallType.LLM_CALL)
        return answer

    def _read(self, messages: Any) -> list[str]:
        if isinstance(messages, str):
            return []
        return [str(message["content"]) for message in messages if message.get("role") == "tool"]


class CrewAI(Driver):
    package = "crewai"
    LACKS: ClassVar = {"own_approval": "A crew has no pause: it waits for the decision."}

    def __init__(self, desk: Desk, *args: Any, **options: Any) -> None:
        home = str(desk.file.parent)
        os.environ |= {"CREWAI_STORAGE_DIR": f"{home}/crewai", "HOME": home}
        super().__init__(desk, *args, **options)

    def make_crew(self, *, task: dict[str, Any] | None = None, **options: Any) -> GuardedCrew:
        tools = [tool(each.__name__)(each) for each in (self._pay(), self._read_mail(), self._send_mail())]
        clerk = Agent(
            role="clerk",
            goal="Pay bills",
            backstory="A clerk",
            llm=MindModel(mind=self.mind),
            tools=tools,
            max_retry_limit=0,
        )
        work = Task(description=TASK, expected_output="A receipt", agent=clerk, **(task or {}))
        crew = Crew(agents=[clerk], tasks=[work], **options)
        return guard(crew, guard=self.guard, tools=self.tool_options, **self.limit)

    def _pay(self) -> Any:
        def pay(amount: int) -> str:
            """Pay an amount."""
            return self.pay(amount)

        return pay

    def _read_mail(self) -> Any:
        def read_mail() -> str:
            """Read the mail."""
            return self.read_mail()

        return read_mail

    def _send_mail(self) -> Any:
        def send_mail(to: str) -> str:
            """Send a mail."""
            return self.send_mail(to)

        return send_mail

    async def run(self, conversation: str = "") -> str:
        return (await asyncio.to_thread(self.make_crew().kickoff, conversation=conversation)).raw

    def run_blocking(self) -> str:
        return self.make_crew().kickoff().raw

    async def read(self) -> AsyncGenerator[str]:
        stream = await self.make_crew(stream=True).akickoff()
        async for chunk in stream:
            yield chunk.content

    async def ask(self) -> Any:
        """A crew has no pause: it waits for the decision."""
        run = asyncio.ensure_future(self.run("one"))
        await self.desk.wait_for_question()
        return run

    async def resume(self, state: Any) -> str:
        return await (state or self.run("one"))

    def save(self, state: Any) -> bytes:
        return b"{}"

    def load(self, saved: bytes) -> Any:
        return None

    async def hand_off(self) -> str:
        crew = self.make_crew(process=Process.hierarchical, manager_llm=MindModel(mind=self.mind))
        return (await asyncio.to_thread(crew.kickoff)).raw

    async def run_structured(self) -> Order:
        crew = self.make_crew(task={"output_pydantic": Order})
        return (await asyncio.to_thread(crew.kickoff)).pydantic
