"""Overhead of the guard in agents of other frameworks: the same agent, bare and guarded, in one interleaved run.

A model that is a function calls a tool that adds two numbers, twenty times, and then answers. The guard writes to
SQLite, so each request and each call is durable before it starts. Frameworks that conflict with Halter's requirements
run in the environments of `make frameworks`, if these exist (`bench/adapters_apart.py`).
"""

import asyncio
import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import Contender, Measured, Sample, compare
from halter import Guard

ENVIRONMENTS = Path(__file__).parents[1] / ".frameworks"
STEPS = 20
RUNS = 5
APART = {"Google ADK": "google_adk", "Claude Agent SDK": "claude_sdk", "CrewAI": "crewai"}
PRICES = {"models": {"function:bench": {"price": {"input": 1, "output": 1}}}}
SAFE: Any = {"add": {"level": "SAFE", "effect": "read"}}

Run = Callable[[], Awaitable[Any]]
Make = Callable[[Guard | None], Run]


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    makers: dict[str, Make] = {
        "Pydantic AI": _make_pydantic_ai,
        "LangChain": _make_langchain,
        "OpenAI Agents": _make_openai_agents,
        "agent-framework": _make_agent_framework,
    }
    measures: dict[str, Callable[[str], Sample]] = {name: partial(measure, make) for name, make in makers.items()}
    for name, folder in APART.items():
        if (python := ENVIRONMENTS / folder / "bin" / "python").exists():
            measures[name] = partial(_measure_apart, python, name)
        else:
            report(f"Skipped {name}. Run `make frameworks` first.")
    contenders = [
        Contender(f"{name}, {kind}", name, "step", partial(measure_one, kind))
        for name, measure_one in measures.items()
        for kind in ("bare", "guarded")
    ]
    return compare(contenders, rounds, report), {"steps": STEPS, "runs": RUNS}


def _measure_apart(python: Path, name: str, kind: str) -> Sample:
    command = [python, "-m", "bench.adapters_apart", APART[name], kind]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ENVIRONMENTS.parent)
    return Sample(**json.loads(process.stdout.splitlines()[-1]))


def measure(make: Make, kind: str) -> Sample:
    return asyncio.run(_measure_runs(make, guarded=kind == "guarded"))


async def _measure_runs(make: Make, *, guarded: bool) -> Sample:
    with tempfile.TemporaryDirectory(prefix="halter-") as folder:
        async with AsyncExitStack() as stack:
            guard = None
            if guarded:
                guard = Guard(Path(folder) / "runs.db", agent="bench", max_cost_usd=10, fleet=PRICES, environ={})
                guard.allow_external_tools()
                await stack.enter_async_context(guard)
            go = make(guard)
            await go()
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(RUNS):
                await go()
            return Sample(STEPS * RUNS, time.perf_counter() - wall, time.process_time() - cpu)


def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


def _make_pydantic_ai(guard: Guard | None) -> Run:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import FunctionModel
    from pydantic_ai.usage import RequestUsage

    from halter.adapters import pydantic_ai as adapter

    def answer(messages: list[Any], _: Any) -> Any:
        done_count = sum(isinstance(part, ToolReturnPart) for message in messages for part in message.parts)
        parts: list[Any] = [TextPart("Done.")]
        if done_count < STEPS:
            parts = [ToolCallPart("add", {"one": done_count, "other": 1}, tool_call_id=f"c{done_count}")]
        return ModelResponse(parts, usage=RequestUsage(input_tokens=10, output_tokens=10))

    agent: Any = Agent(FunctionModel(answer, model_name="bench"), tools=[add])
    agent = agent if guard is None else adapter.guard(agent, guard=guard, tools=SAFE)
    return lambda: agent.run("Add.")


def _make_langchain(guard: Guard | None) -> Run:
    from langchain import agents
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    from halter.adapters import langchain as adapter

    class Model(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "function"

        def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
            return {"ls_provider": "function", "ls_model_name": "bench"}

        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self.bind(tools=tools, **kwargs)

        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            done_count = sum(isinstance(message, ToolMessage) for message in messages)
            calls: Any = [{"name": "add", "args": {"one": done_count, "other": 1}, "id": f"c{done_count}"}]
            usage: Any = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
            reply = AIMessage("Done.", tool_calls=calls if done_count < STEPS else [], usage_metadata=usage)
            return ChatResult(generations=[ChatGeneration(message=reply)])

        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            return self._generate(*args, **kwargs)

    agents_module: Any = agents
    agent = (
        agents_module.create_agent(Model(), [add])
        if guard is None
        else adapter.create_agent(Model(), [add], guard=guard, tool_options=SAFE)
    )
    ask: Any = {"messages": [{"role": "user", "content": "Add."}]}
    return lambda: agent.ainvoke(ask, {"recursion_limit": 10 * STEPS})


def _make_openai_agents(guard: Guard | None) -> Run:
    import agents
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    from halter.adapters import openai_agents as adapter

    agents.set_tracing_disabled(disabled=True)

    class Model(agents.Model):
        model = "function:bench"

        async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002 It is the SDK's name.
            done_count = sum("output" in item for item in input if isinstance(item, dict))
            text = ResponseOutputText(text="Done.", type="output_text", annotations=[])
            output_item: Any = ResponseOutputMessage(
                id="m", content=[text], role="assistant", status="completed", type="message"
            )
            if done_count < STEPS:
                arguments = f'{{"one": {done_count}, "other": 1}}'
                output_item = ResponseFunctionToolCall(
                    arguments=arguments, call_id=f"c{done_count}", name="add", type="function_call"
                )
            usage = agents.Usage(requests=1, input_tokens=10, output_tokens=10, total_tokens=20)
            return agents.ModelResponse(output=[output_item], usage=usage, response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    agent: Any = agents.Agent(name="bench", model=Model(), tools=[agents.function_tool(add)])
    if guard is None:
        return lambda: agents.Runner.run(agent, "Add.", max_turns=2 * STEPS)
    guarded = adapter.guard(agent, guard=guard, tools=SAFE)
    return lambda: guarded.run("Add.", max_turns=2 * STEPS)


def _make_agent_framework(guard: Guard | None) -> Run:
    import agent_framework as af

    from halter.adapters import agent_framework as adapter

    class Client(af.FunctionInvocationLayer[Any], af.ChatMiddlewareLayer[Any], af.BaseChatClient[Any]):
        OTEL_PROVIDER_NAME = "function"
        model = "bench"

        async def _inner_get_response(self, *, messages: Any, **_: Any) -> Any:
            done_count = sum(each.type == "function_result" for message in messages for each in message.contents)
            content = af.Content.from_text("Done.")
            if done_count < STEPS:
                content = af.Content.from_function_call(
                    f"c{done_count}", "add", arguments={"one": done_count, "other": 1}
                )
            usage: Any = {"input_token_count": 10, "output_token_count": 10, "total_token_count": 20}
            return af.ChatResponse(messages=af.Message("assistant", [content]), usage_details=usage)

    client = Client(function_invocation_configuration={"max_iterations": 2 * STEPS})
    agent: Any = af.Agent(client, tools=[af.tool(add)])
    agent = agent if guard is None else adapter.guard(agent, guard=guard, tools=SAFE)
    return lambda: agent.run("Add.")
