"""Microsoft's agent-framework: `Agent.run` on a chat client of our own, its instrumentation off."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    FileHistoryProvider,
    FunctionInvocationLayer,
    Message,
)
from agent_framework.observability import ChatTelemetryLayer, disable_instrumentation

from bench.peers.workloads import DONE, LONG, Run, Script, main

KEPT = (
    "FileHistoryProvider, which is experimental, with require_per_service_call_history_persistence: each answer is "
    "appended to a file of JSON lines before its call is made, the result only after the next answer; never a sync"
)


class Fake(FunctionInvocationLayer, ChatMiddlewareLayer, ChatTelemetryLayer, BaseChatClient):
    def __init__(self, script: Script) -> None:
        super().__init__(function_invocation_configuration={"max_iterations": LONG + 1})
        self._script = script

    async def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **_: Any
    ) -> ChatResponse:
        await self._validate_options(options)
        done_count = len(messages) // 2
        arguments = await self._script.answer(done_count)
        content = (
            Content.from_text(DONE)
            if arguments is None
            else Content.from_function_call(f"call-{done_count}", "add", arguments=json.dumps(arguments))
        )
        return ChatResponse(
            messages=Message("assistant", [content]), finish_reason="stop" if arguments is None else None
        )


@asynccontextmanager
async def opened(script: Script, folder: Path | None) -> AsyncGenerator[Run]:
    disable_instrumentation()
    if folder is None:
        agent = Agent(Fake(script), tools=[script.tool()])

        async def run(_: str) -> str:
            return (await agent.run("go")).text
    else:
        agent = Agent(
            Fake(script),
            tools=[script.tool()],
            context_providers=[FileHistoryProvider(folder)],
            require_per_service_call_history_persistence=True,
        )

        async def run(name: str) -> str:
            return (await agent.run("go", session=AgentSession(session_id=name))).text

    yield run


if __name__ == "__main__":
    main(opened, KEPT)
