"""A LangChain agent under the guard: the framework's own agent, with a model that is a function."""
# pyright: reportMissingTypeStubs=false

import asyncio
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt

from halter.adapters.langchain import create_agent
from halter.core.errors import ConfigError
from halter.external.effects import EffectRefused
from halter.guard.halts import halt
from tests.adapters.conftest import Desk

ASK: Any = {"messages": [{"role": "user", "content": "Pay the bill."}]}


class FunctionChatModel(BaseChatModel):
    """Answers as a provider does: it calls the tool once, and is never longer than it may be."""

    output: int = 10
    requests: list[dict[str, Any]]
    gate: Any = None

    @property
    def _llm_type(self) -> str:
        return "function"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return {"ls_provider": "function", "ls_model_name": "desk"}

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        self.requests.append(kwargs)
        output = min(self.output, kwargs.get("max_tokens") or self.output)
        usage: Any = {"input_tokens": 100, "output_tokens": output, "total_tokens": 100 + output}
        returned = [each for each in messages if isinstance(each, ToolMessage) and each.tool_call_id == "c1"]
        if returned:
            aimessage = AIMessage(f"Done: {returned[-1].content}", usage_metadata=usage)
        else:
            calls: Any = [{"name": "pay", "args": {"amount": 7}, "id": "c1"}]
            aimessage = AIMessage("", tool_calls=calls, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=aimessage)])

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        if self.gate is not None:
            self.gate.set()
            await asyncio.Event().wait()
        return self._generate(*args, **kwargs)


def make_agent(desk: Desk, level: Any = "CONTROLLED", cap: float = 1.0, **options: Any) -> Any:
    @tool
    def pay(amount: int) -> str:
        """Pay an amount."""
        desk.paid.append(amount)
        return f"paid {amount}"

    model = options.pop("model", None) or FunctionChatModel(requests=[])
    return create_agent(model, [pay], guard=desk.guard(cap), tool_options={"pay": {"level": level}}, **options)


class AddsSearch(AgentMiddleware[Any, Any]):
    """Offers a tool of the provider's beside those that the agent was made with."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(tools=[*request.tools, {"type": "web_search"}]))


async def test_a_tool_of_the_providers_that_comes_later_is_refused_before_the_model_is_asked(desk: Desk) -> None:
    model = FunctionChatModel(requests=[])
    with pytest.raises(ConfigError, match="web_search"):
        await make_agent(desk, model=model, middleware=[AddsSearch()]).ainvoke(ASK)
    assert model.requests == []


async def test_what_goes_round_the_guard_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigError, match="web_search"):
        create_agent(FunctionChatModel(requests=[]), [{"type": "web_search"}], guard=desk.guard())
    bare = make_agent(desk).builder.compile()
    with pytest.raises(ConfigError, match="outside a session"):
        await bare.ainvoke(ASK)
    with pytest.raises(ConfigError, match="outside a session"):
        bare.invoke(ASK)
    assert desk.paid == []


class Team(TypedDict):
    """The state of a graph of its own, which the guarded agent is a part of."""

    messages: Annotated[list[Any], add_messages]


def make_team(*agents: Any, checkpointer: Any = None) -> Any:
    team: Any = StateGraph(Team)
    for number, agent in enumerate(agents):
        team.add_node(f"desk{number}", agent)
        team.add_edge(START, f"desk{number}")
    return team.compile(checkpointer=checkpointer)


def read_answer(state: Any) -> str:
    return state["messages"][-1].content


def say_over(_: Any) -> Any:
    return {"messages": [AIMessage("over")]}


async def list_states(desk: Desk) -> list[str]:
    async with desk.guard() as guarded:
        return [receipt.state for receipt in await guarded.receipts()]


async def test_an_agent_is_a_runnable_and_every_way_to_run_it_is_a_session(desk: Desk) -> None:
    agent = make_agent(desk)
    assert {Runnable, CompiledStateGraph} <= {*type(agent).__mro__}
    results = await agent.abatch([ASK, ASK])
    results += [await agent.with_config(tags=["desk"]).ainvoke(ASK)]
    results += [await agent.with_retry().with_types().ainvoke(ASK)]
    assert {result["messages"][-1].content for result in results} == {"Done: paid 7"}
    assert await (agent | read_answer).ainvoke(ASK) == "Done: paid 7"
    events = [event async for event in agent.astream_events(ASK, version="v2")]
    assert {"on_chat_model_end", "on_tool_end", "on_chain_end"} <= {event["event"] for event in events}
    assert desk.paid == [7] * 6
    assert await list_states(desk) == ["COMPLETED"] * 6


def test_every_way_to_run_it_works_in_a_program_that_is_not_async(desk: Desk) -> None:
    agent = make_agent(desk)
    results = agent.batch([ASK, ASK])
    results += list(agent.stream(ASK, stream_mode="values"))[-1:]
    assert [result["messages"][-1].content for result in results] == ["Done: paid 7"] * 3
    assert (agent | read_answer).invoke(ASK) == "Done: paid 7"
    assert asyncio.run(list_states(desk)) == ["COMPLETED"] * 4


def test_a_refusal_reaches_a_program_that_is_not_async(desk: Desk) -> None:
    with pytest.raises(EffectRefused, match="may cost"):
        make_agent(desk, cap=0.000001).invoke(ASK)


def test_a_stream_that_is_read_no_further_ends_its_run(desk: Desk) -> None:
    chunks = make_agent(desk).stream(ASK)
    next(chunks)
    chunks.close()
    assert desk.paid == []


async def test_callbacks_tags_and_metadata_reach_the_model_of_a_guarded_agent(desk: Desk) -> None:
    class Watch(AsyncCallbackHandler):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        async def on_chat_model_start(self, *_: Any, tags: Any = None, metadata: Any = None, **__: Any) -> None:
            self.seen.append((tags, metadata["order"]))

    watch = Watch()
    await make_agent(desk).ainvoke(ASK, {"callbacks": [watch], "tags": ["desk"], "metadata": {"order": 42}})
    assert [("desk" in tags, order) for tags, order in watch.seen] == [(True, 42)] * 2


async def test_agents_in_nodes_of_a_graph_are_sessions_of_their_own(desk: Desk) -> None:
    agent = make_agent(desk)
    result = await make_team(agent, agent).ainvoke(ASK)
    assert [message.content for message in result["messages"]].count("Done: paid 7") == 2
    assert await list_states(desk) == ["COMPLETED"] * 2


def test_agents_in_nodes_of_a_graph_run_in_a_program_that_is_not_async(desk: Desk) -> None:
    agent = make_agent(desk)
    result = make_team(agent, agent).invoke(ASK)
    assert [message.content for message in result["messages"]].count("Done: paid 7") == 2
    assert asyncio.run(list_states(desk)) == ["COMPLETED"] * 2


async def test_a_stream_of_a_graph_shows_what_its_guarded_agents_do(desk: Desk) -> None:
    team = make_team(make_agent(desk))
    chunks = [chunk async for chunk in team.astream(ASK, stream_mode="updates", subgraphs=True)]
    assert any(path and "tools" in update for path, update in chunks)


async def test_a_question_in_a_node_interrupts_the_graph_and_the_call_is_made_once_after_a_yes(desk: Desk) -> None:
    memory, thread = InMemorySaver(), {"configurable": {"thread_id": "t1"}}

    def team() -> Any:
        return make_team(make_agent(desk, "PRIVILEGED"), checkpointer=memory)

    first = await team().ainvoke(ASK, thread)
    (question,) = first["__interrupt__"]
    assert question.value["tool"] == "pay"
    assert (await team().ainvoke(Command(resume=True), thread))["__interrupt__"]
    assert desk.paid == []
    await desk.decide("approve")
    last = await team().ainvoke(Command(resume=True), thread)
    assert (last["messages"][-1].content, desk.paid) == ("Done: paid 7", [7])
    assert await list_states(desk) == ["COMPLETED"]


def test_a_question_in_a_node_interrupts_a_graph_that_is_not_async(desk: Desk) -> None:
    memory, thread = InMemorySaver(), {"configurable": {"thread_id": "t1"}}
    team = make_team(make_agent(desk, "PRIVILEGED"), checkpointer=memory)
    assert team.invoke(ASK, thread)["__interrupt__"]
    asyncio.run(desk.decide("approve"))
    assert team.invoke(Command(resume=True), thread)["messages"][-1].content == "Done: paid 7"
    assert desk.paid == [7]


async def test_a_halt_ends_a_graph_with_a_guarded_agent_in_it(desk: Desk) -> None:
    event = asyncio.Event()
    team = make_team(make_agent(desk, model=FunctionChatModel(requests=[], gate=event)))
    run = asyncio.create_task(team.ainvoke(ASK))
    await event.wait()
    store = desk.store()
    await store.commit(halt("fleet", "ada", "halt-1"))
    with pytest.raises(EffectRefused) as refused:
        await run
    assert refused.value.outcome == "external_halt"
    await store.close()


async def test_an_agent_that_hands_over_to_its_graph_ends_its_session(desk: Desk) -> None:
    @tool
    def pay(amount: int) -> Command[Any]:
        """Pay an amount."""
        desk.paid.append(amount)
        returned = ToolMessage("handed over", tool_call_id="c1")
        return Command(goto="end", graph=Command.PARENT, update={"messages": [returned]})

    agent: Any = create_agent(FunctionChatModel(requests=[]), [pay], guard=desk.guard())
    team: Any = StateGraph(Team)
    team.add_node("desk", agent, destinations=("end",))
    team.add_node("end", say_over)
    team.add_edge(START, "desk")
    result = await team.compile().ainvoke(ASK)
    assert (result["messages"][-1].content, desk.paid) == ("over", [7])
    assert await list_states(desk) == ["COMPLETED"]


async def test_a_guarded_agent_is_a_tool_of_a_guarded_supervisor(desk: Desk) -> None:
    desk_agent = make_agent(desk)

    @tool("pay")
    async def delegate(amount: int) -> str:
        """Let the desk pay an amount."""
        return (await desk_agent.ainvoke(ASK))["messages"][-1].content

    supervisor: Any = create_agent(FunctionChatModel(requests=[]), [delegate], guard=desk.guard(), name="supervisor")
    assert (await supervisor.ainvoke(ASK))["messages"][-1].content == "Done: Done: paid 7"
    assert (desk.paid, await list_states(desk)) == ([7], ["COMPLETED"] * 2)


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
async def test_a_guarded_agent_works_in_a_supervisor_of_langgraph(desk: Desk) -> None:
    library = pytest.importorskip("langgraph_supervisor")

    class Handing(FunctionChatModel):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self.bind(tools=[convert_to_openai_tool(each) for each in tools], **kwargs)

        def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
            returned = any(isinstance(message, ToolMessage) for message in messages)
            calls: Any = [] if returned else [{"name": "transfer_to_desk", "args": {}, "id": "h1"}]
            return ChatResult(generations=[ChatGeneration(message=AIMessage("over", tool_calls=calls))])

    team = library.create_supervisor([make_agent(desk, name="desk")], model=Handing(requests=[])).compile()
    result = await team.ainvoke(ASK)
    assert (result["messages"][-1].content, desk.paid) == ("over", [7])
    assert await list_states(desk) == ["COMPLETED"]


async def test_a_guarded_agent_is_a_subagent_of_a_deep_agent(desk: Desk) -> None:
    library = pytest.importorskip("deepagents")

    class Delegating(FunctionChatModel):
        def _generate(self, messages: Any, *args: Any, **options: Any) -> Any:
            returned = [message for message in messages if isinstance(message, ToolMessage)]
            task = {"description": "Pay the bill.", "subagent_type": "desk"}
            calls: Any = [] if returned else [{"name": "task", "args": task, "id": "t1"}]
            message = AIMessage(f"{returned[-1].content}" if returned else "", tool_calls=calls)
            return ChatResult(generations=[ChatGeneration(message=message)])

    subagent = {"name": "desk", "description": "Pays.", "runnable": make_agent(desk)}
    deep = library.create_deep_agent(Delegating(requests=[]), subagents=[subagent])
    assert "Done: paid 7" in (await deep.ainvoke(ASK))["messages"][-1].content
    assert (desk.paid, await list_states(desk)) == ([7], ["COMPLETED"])


async def test_a_tool_that_interrupts_the_run_is_called_again_when_it_is_resumed(desk: Desk) -> None:
    @tool
    def pay(amount: int) -> str:
        """Pay an amount."""
        answer = interrupt("Sure?")
        desk.paid.append(amount)
        return f"paid {amount}: {answer}"

    agent: Any = create_agent(FunctionChatModel(requests=[]), [pay], guard=desk.guard(), checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    assert (await agent.ainvoke(ASK, thread))["__interrupt__"]
    last = await agent.ainvoke(Command(resume="yes"), thread)
    assert (last["messages"][-1].content, desk.paid) == ("Done: paid 7: yes", [7])
    assert await list_states(desk) == ["COMPLETED"]


async def test_a_question_of_an_agent_in_a_tool_interrupts_both_and_its_call_is_made_once_after_a_yes(
    desk: Desk,
) -> None:
    inner = make_agent(desk, "PRIVILEGED")

    @tool("pay")
    async def delegate(amount: int) -> str:
        """Let the other agent pay."""
        return str((await inner.ainvoke(ASK))["messages"][-1].content)

    agent: Any = create_agent(
        FunctionChatModel(requests=[]), [delegate], guard=desk.guard(), checkpointer=InMemorySaver()
    )
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    assert (await agent.ainvoke(ASK, thread))["__interrupt__"]
    assert (await agent.ainvoke(Command(resume=True), thread))["__interrupt__"]
    assert desk.paid == []
    await desk.decide("approve")
    last = await agent.ainvoke(Command(resume=True), thread)
    assert (last["messages"][-1].content, desk.paid) == ("Done: Done: paid 7", [7])
    assert await list_states(desk) == ["COMPLETED", "COMPLETED"]


async def test_a_call_whose_result_the_graph_lost_is_not_made_again_and_its_result_is_told(desk: Desk) -> None:
    was_made = asyncio.Event()

    class Wait(AgentMiddleware[Any, Any]):
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            result = await handler(request)
            if not was_made.is_set():
                was_made.set()
                await asyncio.Event().wait()
            return result

    desk.lease = 1.0
    agent = make_agent(desk, middleware=[Wait()], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    run = asyncio.create_task(agent.ainvoke(ASK, thread))
    await was_made.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    last = await agent.ainvoke(None, thread)
    assert desk.paid == [7]
    assert "paid 7" in last["messages"][-1].content


class FailingSaver(InMemorySaver):
    """A saver whose database is away when the result of the call is to be saved, and back for the next run."""

    is_away = False
    has_failed = False

    def _require_database(self, *, has_result: bool) -> None:
        self.is_away = self.is_away or (has_result and not self.has_failed)
        if self.is_away:
            self.has_failed = True
            raise OSError("the database of checkpoints is away")

    def put_writes(self, config: Any, writes: Any, *args: Any, **options: Any) -> None:
        self._require_database(has_result="tool_call_id='c1'" in str(writes))
        super().put_writes(config, writes, *args, **options)

    async def aput_writes(self, config: Any, writes: Any, *args: Any, **options: Any) -> None:
        self.put_writes(config, writes, *args, **options)

    def put(self, *args: Any, **options: Any) -> Any:
        self._require_database(has_result=False)
        return super().put(*args, **options)

    async def aput(self, *args: Any, **options: Any) -> Any:
        return self.put(*args, **options)


async def invoke_in_thread(agent: Any, given: Any, config: Any) -> Any:
    return await asyncio.to_thread(agent.invoke, given, config)


async def ainvoke(agent: Any, given: Any, config: Any) -> Any:
    return await agent.ainvoke(given, config)


async def astream(agent: Any, given: Any, config: Any) -> Any:
    return [state async for state in agent.astream(given, config, stream_mode="values")][-1]


async def stream_in_thread(agent: Any, given: Any, config: Any) -> Any:
    return await asyncio.to_thread(lambda: [*agent.stream(given, config, stream_mode="values")][-1])


@pytest.mark.parametrize("run", [ainvoke, astream, invoke_in_thread, stream_in_thread])
async def test_a_call_whose_checkpoint_failed_is_not_made_again_when_the_graph_is_resumed(desk: Desk, run: Any) -> None:
    saver = FailingSaver()
    agent = make_agent(desk, checkpointer=saver)
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    with pytest.raises(OSError, match="away"):
        await run(agent, ASK, thread)
    saver.is_away = False
    last = await run(agent, None, thread)
    assert desk.paid == [7]
    assert "paid 7" in last["messages"][-1].content
    assert await list_states(desk) == ["COMPLETED"]


async def test_a_call_that_was_approved_is_not_made_again_after_its_checkpoint_failed(desk: Desk) -> None:
    saver = FailingSaver()
    agent = make_agent(desk, "PRIVILEGED", checkpointer=saver)
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    assert (await agent.ainvoke(ASK, thread))["__interrupt__"]
    await desk.decide("approve")
    with pytest.raises(OSError, match="away"):
        await agent.ainvoke(Command(resume=True), thread)
    saver.is_away = False
    last = await agent.ainvoke(None, thread)
    assert desk.paid == [7]
    assert "paid 7" in last["messages"][-1].content


class TwoCalls(FunctionChatModel):
    """Makes two calls in one step."""

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        result = super()._generate(messages, stop, run_manager, **kwargs)
        message: Any = result.generations[0].message
        if message.tool_calls:
            message.tool_calls.append({"name": "send", "args": {"text": "hello"}, "id": "c2", "type": "tool_call"})
        return result


async def test_a_call_is_not_made_again_when_another_one_of_its_step_raised(desk: Desk) -> None:
    is_paid, sent = asyncio.Event(), list[str]()

    @tool
    async def pay(amount: int) -> str:
        """Pay an amount."""
        desk.paid.append(amount)
        is_paid.set()
        return f"paid {amount}"

    @tool
    async def send(text: str) -> str:
        """Send a text."""
        await is_paid.wait()
        sent.append(text)
        if len(sent) == 1:
            raise ConnectionError("the line is busy")
        return f"sent {text}"

    saver = FailingSaver()
    agent: Any = create_agent(TwoCalls(requests=[]), [pay, send], guard=desk.guard(), checkpointer=saver)
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    with pytest.raises((OSError, ConnectionError)):
        await agent.ainvoke(ASK, thread)
    saver.is_away = False
    last = await agent.ainvoke(None, thread)
    assert (desk.paid, sent) == ([7], ["hello", "hello"])
    assert "paid 7" in last["messages"][-1].content


async def test_a_call_that_raised_is_made_again_by_a_middleware_that_retries(desk: Desk) -> None:
    attempts: list[int] = []

    @tool
    async def pay(amount: int) -> str:
        """Pay an amount."""
        attempts.append(amount)
        if len(attempts) < 3:
            raise ConnectionError("the line is busy")
        return f"paid {amount}"

    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0, jitter=False)
    agent: Any = create_agent(FunctionChatModel(requests=[]), [pay], guard=desk.guard(), middleware=[retry])
    assert (await agent.ainvoke(ASK))["messages"][-1].content == "Done: paid 7"
    assert attempts == [7, 7, 7]


async def test_a_new_message_after_an_error_gets_its_own_call(desk: Desk) -> None:
    """The model asks for the same payment again, with an id of its own."""
    saver = FailingSaver()
    ids = iter(["c1", "c2"])

    class NewIds(FunctionChatModel):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            usage: Any = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
            if isinstance(messages[-1], ToolMessage):
                message = AIMessage(f"Done: {messages[-1].content}", usage_metadata=usage)
            else:
                calls: Any = [{"name": "pay", "args": {"amount": 7}, "id": next(ids)}]
                message = AIMessage("", tool_calls=calls, usage_metadata=usage)
            return ChatResult(generations=[ChatGeneration(message=message)])

    agent = make_agent(desk, model=NewIds(requests=[]), checkpointer=saver)
    thread: Any = {"configurable": {"thread_id": "t1"}, "recursion_limit": 12}
    with pytest.raises(OSError, match="away"):
        await agent.ainvoke(ASK, thread)
    saver.is_away = False
    last = await agent.ainvoke(ASK, thread)
    assert (desk.paid, last["messages"][-1].content) == ([7, 7], "Done: paid 7")
