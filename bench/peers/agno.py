"""agno: `Agent.arun`, its telemetry off."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agno.agent import Agent
from agno.db.sqlite import AsyncSqliteDb
from agno.models.base import Model
from agno.models.message import Message
from agno.models.response import ModelResponse

from bench.peers.workloads import DONE, Run, Script, main

KEPT = (
    'AsyncSqliteDb with checkpoint="tool-batch": the whole run so far, written again after the call of each step; one '
    "commit for each, with a sync"
)


class Fake(Model):
    def __init__(self, script: Script) -> None:
        super().__init__(id="fake", name="fake", provider="fake")
        self._script = script

    async def ainvoke(self, messages: list[Message], *_: Any, **__: Any) -> ModelResponse:
        done_count = len(messages) // 2
        arguments = await self._script.answer(done_count)
        if arguments is None:
            return ModelResponse(role="assistant", content=DONE)
        function = {"name": "add", "arguments": json.dumps(arguments)}
        return ModelResponse(
            role="assistant", tool_calls=[{"id": f"call-{done_count}", "type": "function", "function": function}]
        )

    def invoke(self, *_: Any, **__: Any) -> ModelResponse:
        raise NotImplementedError

    def invoke_stream(self, *_: Any, **__: Any) -> Iterator[ModelResponse]:
        raise NotImplementedError

    def ainvoke_stream(self, *_: Any, **__: Any) -> AsyncIterator[ModelResponse]:
        raise NotImplementedError

    def _parse_provider_response(self, response: Any, **_: Any) -> ModelResponse:
        return response

    def _parse_provider_response_delta(self, response: Any) -> ModelResponse:
        return response


@asynccontextmanager
async def opened(script: Script, folder: Path | None) -> AsyncGenerator[Run]:
    db = None if folder is None else AsyncSqliteDb(db_file=str(folder / "runs.db"))
    agent = Agent(
        model=Fake(script),
        tools=[script.tool()],
        db=db,
        checkpoint=None if db is None else "tool-batch",
        telemetry=False,
    )

    async def run(name: str) -> str:
        return (await agent.arun("go", session_id=name)).content

    yield run
    if db is not None:
        await db.close()


if __name__ == "__main__":
    main(opened, KEPT)
