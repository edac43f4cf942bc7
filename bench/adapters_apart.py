"""Agents of frameworks that conflict with Halter's requirements, each in its own environment.

    .frameworks/NAME/bin/python -m bench.adapters_apart NAME bare|guarded

Prints the sample of `bench.adapters` as JSON.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from typing import Any

from bench.adapters import SAFE, STEPS, Make, Run, add, measure
from halter import Guard

ADD_OF_CLAUDE = "mcp__till__add"


def make_google_adk(guard: Guard | None) -> Run:
    from itertools import count

    from google.adk.agents import Agent
    from google.adk.apps import App
    from google.adk.models import BaseLlm, LlmResponse
    from google.adk.runners import Runner
    from google.adk.sessions import InMemorySessionService
    from google.genai import types

    from halter.adapters import google_adk as adapter

    class Model(BaseLlm):
        model: str = "function:bench"

        async def generate_content_async(self, llm_request: Any, stream: bool = False) -> Any:  # noqa: FBT001, FBT002 It is ADK's.
            done_count = sum(bool(part.function_response) for each in llm_request.contents for part in each.parts)
            content_part = types.Part(text="Done.")
            if done_count < STEPS:
                content_part = types.Part(
                    function_call=types.FunctionCall(name="add", args={"one": done_count, "other": 1})
                )
            usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=10, candidates_token_count=10)
            yield LlmResponse(content=types.Content(role="model", parts=[content_part]), usage_metadata=usage)

    runner: Any = Runner(
        app=App(name="bench", root_agent=Agent(name="bench", model=Model(), tools=[add])),
        session_service=InMemorySessionService(),
        auto_create_session=True,
    )
    runner = runner if guard is None else adapter.guard(runner, guard=guard, tools=SAFE)
    numbers, message = count(), types.Content(role="user", parts=[types.Part(text="Add.")])

    async def go() -> None:
        async for _ in runner.run_async(user_id="a", session_id=f"s{next(numbers)}", new_message=message):
            pass

    return go


def make_claude_sdk(guard: Guard | None) -> Run:
    from claude_agent_sdk import ClaudeAgentOptions, create_sdk_mcp_server, query, tool

    from halter.adapters import claude_sdk as adapter
    from tests.clients.providers import Provider, calls, text

    class Model(Provider):
        def next(self, body: Any) -> Any:
            done_count = json.dumps(body["messages"]).count('"tool_result"')
            return (
                text("Done.")
                if done_count >= STEPS
                else calls((f"c{done_count}", ADD_OF_CLAUDE, {"one": done_count, "other": 1}))
            )

    @tool("add", "Add two numbers.", {"one": int, "other": int})
    async def add_them(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": str(add(**arguments))}]}

    home = tempfile.mkdtemp(prefix="halter-")
    quiet = ("DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
    environ = {"ANTHROPIC_API_KEY": "none", "HOME": home, "CLAUDE_CONFIG_DIR": home, **dict.fromkeys(quiet, "1")}
    options = ClaudeAgentOptions(
        model="claude-haiku-5-5",
        tools=[],
        mcp_servers={"till": create_sdk_mcp_server("till", tools=[add_them])},
        allowed_tools=[ADD_OF_CLAUDE],
        cwd=home,
        env={**environ, "ANTHROPIC_BASE_URL": Model([]).__enter__().url},
    )
    ask = (
        partial(query, options=options)
        if guard is None
        else lambda prompt: adapter.guard(options, guard=guard, tools={ADD_OF_CLAUDE: SAFE["add"]}).query(prompt)
    )

    async def go() -> None:
        async for _ in ask(prompt="Add."):
            pass

    return go


def make_crewai(guard: Guard | None) -> Run:
    os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
    from types import SimpleNamespace

    from crewai import Agent, BaseLLM, Crew, Task
    from crewai.tools import tool

    from halter.adapters import crewai as adapter

    class Model(BaseLLM):
        max_tokens: int | None = None

        def supports_function_calling(self) -> bool:
            return True

        def call(self, messages: Any, *_: Any, **__: Any) -> Any:
            done_count = sum(each["role"] == "tool" for each in messages)
            self._track_token_usage_internal({"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20})
            if done_count >= STEPS:
                return "Done."
            arguments = json.dumps({"one": done_count, "other": 1})
            return [SimpleNamespace(id=f"c{done_count}", function=SimpleNamespace(name="add", arguments=arguments))]

    clerk = Agent(
        role="clerk",
        goal="Add",
        backstory="A clerk",
        llm=Model(model="function:bench"),
        tools=[tool("add")(add)],
        max_iter=2 * STEPS,
    )
    crew: Any = Crew(agents=[clerk], tasks=[Task(description="Add.", expected_output="A sum", agent=clerk)])
    crew = crew if guard is None else adapter.guard(crew, guard=guard, tools=SAFE)
    return lambda: asyncio.to_thread(crew.kickoff)


MAKERS: dict[str, Make] = {"google_adk": make_google_adk, "claude_sdk": make_claude_sdk, "crewai": make_crewai}

if __name__ == "__main__":
    print(json.dumps(asdict(measure(MAKERS[sys.argv[1]], sys.argv[2]))))
