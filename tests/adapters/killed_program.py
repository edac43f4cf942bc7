"""A program with an agent of another framework that is killed while its question waits, and started again.

    python -m tests.adapters.killed_program FRAMEWORK FOLDER

The first time it runs until the question, keeps what the framework needs to go on, and kills itself. The second time it
goes on from there.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tests.adapters.conftest import Desk


class Payments(list[int]):
    """What was paid, in a file: it outlives the process."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def append(self, amount: int) -> None:
        with self._file.open("a") as file:
            file.write(f"{amount}\n")


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = folder / "kept.json"

    def at_desk(self, kind: Callable[[Path], Any] = Desk) -> Any:
        desk = kind(self.folder)
        desk.paid = Payments(self.folder / "paid.txt")
        return desk

    def load(self) -> Any:
        return json.loads(self._kept.read_bytes()) if self._kept.exists() else None

    def keep_and_die(self, body: bytes) -> NoReturn:
        self._kept.write_bytes(body)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("A process outlived kill -9.")


async def run_pydantic_ai(program: Program) -> str:
    from pydantic_ai.messages import ModelMessagesTypeAdapter
    from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults

    from tests.adapters import test_pydantic_ai

    world = program.at_desk(test_pydantic_ai.World)
    agent = world.agent("PRIVILEGED", output_type=[str, DeferredToolRequests])
    if (result := program.load()) is None:
        program.keep_and_die((await agent.run("Pay the bill.")).all_messages_json())
    history = ModelMessagesTypeAdapter.validate_python(result)
    results = DeferredToolResults(approvals={"c1": True})
    return (await agent.run(message_history=history, deferred_tool_results=results)).output


async def run_langchain(program: Program) -> str:
    from collections import defaultdict

    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    from tests.adapters import test_langchain

    # LangGraph's savers for databases are packages of their own; this one is written to a file instead.
    saver, file = InMemorySaver(), program.folder / "checkpoints"
    agent = test_langchain.make_agent(program.at_desk(), "PRIVILEGED", checkpointer=saver)
    thread = {"configurable": {"thread_id": "t1"}}
    if program.load() is None:
        assert (await agent.ainvoke(test_langchain.ASK, thread))["__interrupt__"]
        threads = {thread: dict(spaces) for thread, spaces in saver.storage.items()}
        file.write_bytes(msgspec.msgpack.encode((threads, dict(saver.writes), saver.blobs)))
        program.keep_and_die(b"{}")
    threads, writes, blobs = msgspec.msgpack.decode(file.read_bytes())
    saver.storage.update({thread: defaultdict(dict, spaces) for thread, spaces in threads.items()})
    saver.writes.update(writes)
    saver.blobs.update(blobs)
    return (await agent.ainvoke(Command(resume=True), thread))["messages"][-1].content


async def run_openai_agents(program: Program, *, within_a_tool: bool = False) -> str:
    from agents import RunState

    from tests.adapters import test_openai_agents

    make_runner = test_openai_agents.make_boss if within_a_tool else test_openai_agents.make_runner
    runner = make_runner(program.at_desk(), "PRIVILEGED")
    if (result := program.load()) is None:
        first = await runner.run("Pay the bill.", conversation="one")
        program.keep_and_die(json.dumps(first.to_state().to_json()).encode())
    state: RunState[Any] = await RunState.from_json(runner.agent, result)
    state.approve(state.get_interruptions()[0])
    return (await runner.run(state, conversation="one")).final_output


async def run_agent_framework(program: Program) -> str:
    from agent_framework import AgentSession, Message

    from tests.adapters import test_agent_framework

    agent = test_agent_framework.make_agent(program.at_desk(), "PRIVILEGED")
    if (result := program.load()) is None:
        session = AgentSession(session_id="one")
        first = await agent.run("Pay the bill.", session=session)
        message = Message("user", [first.user_input_requests[0].to_function_approval_response(approved=True)])
        program.keep_and_die(json.dumps({"session": session.to_dict(), "said": message.to_dict()}).encode())
    session, message = AgentSession.from_dict(result["session"]), Message.from_dict(result["said"])
    return (await agent.run(message, session=session)).text


async def run_google_adk(program: Program) -> str:
    from google.adk.sessions.sqlite_session_service import SqliteSessionService
    from google.genai import types

    from tests.adapters import test_google_adk as adk

    sessions = SqliteSessionService(str(program.folder / "adk.db"))
    runner = adk.make_runner(program.at_desk(), "PRIVILEGED", sessions=sessions)
    if (result := program.load()) is None:
        question = adk.find_question(await adk.run(runner))
        program.keep_and_die(question.model_dump_json().encode())
    return adk.text_of(await adk.run(runner, adk.answer(types.FunctionCall.model_validate(result))))


async def run_claude_sdk(program: Program) -> str:
    from tests.adapters import test_claude_sdk as sdk
    from tests.clients.providers import Provider, text

    with Provider([sdk.CALL, text("Done: paid 7")]) as provider:
        agent = sdk.make_agent(program.at_desk(), provider, "PRIVILEGED")
        if (kept := program.load()) is None:
            program.keep_and_die(json.dumps((await sdk.run(agent)).session_id).encode())
        return (await sdk.run(agent, "Go on.", resume=kept)).result or ""


async def run_crewai(program: Program, way: str = "kickoff", *, made_first: bool = False) -> str:
    """A crew has no pause: it is killed while it waits, or after a call, and the same kickoff takes its session up."""
    os.environ |= {"CREWAI_STORAGE_DIR": str(program.folder / "crewai"), "HOME": str(program.folder)}
    from tests.adapters import test_crewai

    class Dying(test_crewai.FunctionModel):
        def _say(self, text: str) -> Any:
            if "Observation: paid 7" in text and program.load() is None:
                program.keep_and_die(b"{}")
            return super()._say(text)

    desk = program.at_desk()
    desk.lease = 1.0
    crew = test_crewai.make_guarded(desk, "SAFE" if made_first else "PRIVILEGED", model=Dying(max_tokens=4096))
    kickoff = asyncio.create_task(test_crewai.kickoff(crew, way, conversation="one"))
    if program.load() is None and not made_first:
        await test_crewai.wait_for_question(desk)
        program.keep_and_die(b"{}")
    return await kickoff


FRAMEWORKS: Mapping[str, Callable[[Program], Coroutine[Any, Any, str]]] = {
    "pydantic_ai": run_pydantic_ai,
    "langchain": run_langchain,
    "openai_agents": run_openai_agents,
    "agent_framework": run_agent_framework,
    "google_adk": run_google_adk,
    "claude_sdk": run_claude_sdk,
    "crewai": run_crewai,
}
AFTER_A_CALL = {way: partial(run_crewai, way=way, made_first=True) for way in ("kickoff", "akickoff")}
"""The ways to run a crew, which alone begins again from its beginning."""
WITHIN_A_TOOL = {"openai_agents": partial(run_openai_agents, within_a_tool=True)}
"""Frameworks that run an agent as a tool in the same session, with its questions."""
WAYS = {"--after-a-call": AFTER_A_CALL, "--within-a-tool": WITHIN_A_TOOL}

if __name__ == "__main__":
    known = WAYS.get(sys.argv[-1], FRAMEWORKS)
    sys.stdout.write(asyncio.run(known[sys.argv[1]](Program(Path(sys.argv[2])))))
