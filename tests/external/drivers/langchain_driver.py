"""LangChain: `create_agent`, with a chat model that a mind speaks for."""
# pyright: reportMissingTypeStubs=false

from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import msgspec
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from halter.adapters.langchain import create_agent
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Order, Turn

ASK: Any = {"messages": [{"role": "user", "content": TASK}]}


class MindChatModel(BaseChatModel):
    mind: Any

    @property
    def _llm_type(self) -> str:
        return "function"

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
        return {"ls_provider": "function", "ls_model_name": "desk"}

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        results = [message.content for message in messages if isinstance(message, ToolMessage)]
        turn = await self.mind.think(results, options.get("max_tokens"))
        return ChatResult(generations=[ChatGeneration(message=self._write(turn))])

    def _write(self, turn: Turn) -> AIMessage:
        tokens = turn.output_tokens
        usage: Any = {"input_tokens": INPUT_TOKENS, "output_tokens": tokens, "total_tokens": INPUT_TOKENS + tokens}
        calls: Any = [{"name": turn.name, "args": turn.arguments, "id": turn.id}] if turn.name else []
        if not calls and self.mind.is_structured:
            calls = [{"name": "Order", "args": msgspec.json.decode(turn.text), "id": "order"}]
        return AIMessage(turn.text, tool_calls=calls, usage_metadata=usage)


class LangChain(Driver):
    package = "langchain"
    LACKS: ClassVar = {"hand_off": "Each agent of a graph is a session of its own: tests/adapters/test_langchain.py."}

    def make_agent(self, **options: Any) -> Any:
        tools = [StructuredTool.from_function(each) for each in (self.pay, self.read_mail, self.send_mail)]
        model = MindChatModel(mind=self.mind)
        options = {**self.limit, **options}
        return create_agent(model, tools, guard=self.guard, tool_options=self.tool_options, **options)

    async def run(self, conversation: str = "") -> str:
        thread: Any = {"configurable": {"thread_id": conversation}}
        agent = self.make_agent(checkpointer=InMemorySaver() if conversation else None)
        return (await agent.ainvoke(ASK, thread))["messages"][-1].content

    def run_blocking(self) -> str:
        return self.make_agent().invoke(ASK)["messages"][-1].content

    async def read(self) -> AsyncGenerator[str]:
        async for update in self.make_agent().astream(ASK, stream_mode="updates"):
            yield str(update)

    async def ask(self) -> Any:
        saver = InMemorySaver()
        result = await self.make_agent(checkpointer=saver).ainvoke(ASK, {"configurable": {"thread_id": "t1"}})
        assert result["__interrupt__"]
        return saver

    async def resume(self, state: Any) -> str:
        agent = self.make_agent(checkpointer=state)
        return (await agent.ainvoke(Command(resume=True), {"configurable": {"thread_id": "t1"}}))["messages"][
            -1
        ].content

    def save(self, state: Any) -> bytes:
        # LangGraph's savers for databases are packages of their own.
        threads = {thread: dict(spaces) for thread, spaces in state.storage.items()}
        return msgspec.msgpack.encode((threads, dict(state.writes), state.blobs))

    def load(self, saved: bytes) -> Any:
        saver = InMemorySaver()
        threads, writes, blobs = msgspec.msgpack.decode(saved)
        saver.storage.update({thread: defaultdict(dict, spaces) for thread, spaces in threads.items()})
        saver.writes.update(writes)
        saver.blobs.update(blobs)
        return saver

    async def run_structured(self) -> Order:
        return (await self.make_agent(response_format=Order).ainvoke(ASK))["structured_response"]
