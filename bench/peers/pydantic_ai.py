"""pydantic-ai: `Agent.run`, and on disk the DBOS capability that comes with it, on a SQLite file."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart, UsageLimits
from pydantic_ai.models import Model
from pydantic_ai.usage import RequestUsage

from bench.peers.workloads import DONE, Run, Script, main

KEPT = (
    "DBOSDurability on SQLite: each answer of the model and, since it is made a DBOS step, each call of the tool, "
    "before anything goes on; two commits for each step, with syncs"
)
NO_LIMIT = UsageLimits(request_limit=None)


class Fake(Model):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    @property
    def model_name(self) -> str:
        return "fake"

    @property
    def system(self) -> str:
        return "fake"

    async def request(self, messages: list[Any], model_settings: Any, model_request_parameters: Any) -> ModelResponse:
        model_settings, model_request_parameters = self.prepare_request(model_settings, model_request_parameters)
        done_count = len(messages) // 2
        arguments = await self._script.answer(done_count)
        part = TextPart(DONE) if arguments is None else ToolCallPart("add", json.dumps(arguments), f"call-{done_count}")
        return ModelResponse([part], usage=RequestUsage(input_tokens=1, output_tokens=1), model_name="fake")


@asynccontextmanager
async def opened(script: Script, folder: Path | None) -> AsyncGenerator[Run]:
    if folder is None:
        agent = Agent(Fake(script), tools=[script.tool()])

        async def run(_: str) -> str:
            return (await agent.run("go", usage_limits=NO_LIMIT)).output

        yield run
        return

    from dbos import DBOS, SetWorkflowID
    from pydantic_ai.durable_exec.dbos import DBOSDurability

    DBOS(config={"name": "bench", "system_database_url": f"sqlite:///{folder}/runs.db", "log_level": "ERROR"})
    durable = Agent(Fake(script), name="bench", tools=[DBOS.step()(script.tool())], capabilities=[DBOSDurability()])

    @DBOS.workflow()
    async def work() -> str:
        return (await durable.run("go", usage_limits=NO_LIMIT)).output

    async def kept(name: str) -> str:
        with SetWorkflowID(name):
            return await work()

    DBOS.launch()
    try:
        yield kept
    finally:
        DBOS.destroy()


if __name__ == "__main__":
    main(opened, KEPT)
