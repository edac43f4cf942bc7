"""LangGraph: the agent that `create_agent` of langchain makes of it, tracing off."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from bench.peers.workloads import DONE, Run, Script, main

KEPT = (
    'AsyncSqliteSaver with durability="sync": a checkpoint after the model and one after the tool, each before '
    "anything goes on, and what each of them wrote besides; four commits for each step, with syncs"
)


class Fake(BaseChatModel):
    script: Any

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        done_count = len(messages) // 2
        arguments = await self.script.answer(done_count)
        message = (
            AIMessage(DONE)
            if arguments is None
            else AIMessage("", tool_calls=[{"name": "add", "args": arguments, "id": f"call-{done_count}"}])
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


@asynccontextmanager
async def opened(script: Script, folder: Path | None) -> AsyncGenerator[Run]:
    async with AsyncExitStack() as stack:
        saver = None
        if folder is not None:
            saver = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(str(folder / "runs.db")))
        agent = create_agent(Fake(script=script), [script.tool()], checkpointer=saver)
        input_messages = {"messages": [{"role": "user", "content": "go"}]}

        async def run(name: str) -> str:
            config = {"configurable": {"thread_id": name}}
            state = await agent.ainvoke(input_messages, config, durability=None if saver is None else "sync")
            return state["messages"][-1].content

        yield run


if __name__ == "__main__":
    main(opened, KEPT)
