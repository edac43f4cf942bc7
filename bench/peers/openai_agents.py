"""openai-agents: `Runner.run`, its tracing off.

Each run gets a clone of the agent: runs of one and the same agent check each other's tools all the time, which makes a
crowd of them slower than it needs to be.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, SQLiteSession, Usage, function_tool, set_tracing_disabled
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from bench.peers.workloads import DONE, Run, Script, main

KEPT = (
    "SQLiteSession: what a step added to the conversation, after its call and before the next step; one commit for "
    "each, with a sync"
)


class Fake(Model):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:  # noqa: A002 - the interface's own name
        done_count = 0 if isinstance(input, str) else len(input) // 2
        arguments = await self._script.answer(done_count)
        return ModelResponse(output=[self._said(done_count, arguments)], usage=Usage(requests=1), response_id=None)

    def _said(self, done: int, arguments: dict[str, int] | None) -> ResponseFunctionToolCall | ResponseOutputMessage:
        if arguments is not None:
            return ResponseFunctionToolCall(
                type="function_call", call_id=f"call-{done}", name="add", arguments=json.dumps(arguments)
            )
        text = ResponseOutputText(type="output_text", text=DONE, annotations=[])
        return ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


@asynccontextmanager
async def opened(script: Script, folder: Path | None) -> AsyncGenerator[Run]:
    set_tracing_disabled(disabled=True)
    agent = Agent(name="bench", model=Fake(script), tools=[function_tool(script.tool())])

    async def run(name: str) -> str:
        session = None if folder is None else SQLiteSession(name, folder / "runs.db")
        try:
            return (await Runner.run(agent.clone(), "go", session=session, max_turns=None)).final_output
        finally:
            if session is not None:
                session.close()

    yield run


if __name__ == "__main__":
    main(opened, KEPT)
