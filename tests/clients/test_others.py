"""Other clients through the proxy: each does a task with a tool where it has tools, streamed, and stops at its cap."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

MODEL = "gpt-4o-mini"
LOOKUP = "def lookup(city: str) -> str:\n    return 'seen-by-a-tool in ' + city\n"
OPENHANDS = """
import os
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

llm = LLM(
    model=os.environ["LLM_MODEL"], base_url=os.environ["LLM_BASE_URL"], api_key=os.environ["LLM_API_KEY"], stream=True,
    num_retries=2,
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
streams = dict(token_callbacks=[lambda chunk: None])
conversation = Conversation(agent=agent, workspace=os.getcwd(), max_iteration_per_run=6, **streams)
conversation.send_message("say hello")
conversation.run()
"""
LANGCHAIN = """
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model

def lookup(city: str) -> str:
    "Look a city up."
    return "seen-by-a-tool in " + city

agent = create_agent(init_chat_model("openai:gpt-4o-mini"), [lookup])
for piece, _ in agent.stream({"messages": [("user", "Where is it?")]}, stream_mode="messages"):
    print(piece.text, end="")
"""
CLIENTS = ["llm", "opencode", "openhands", "aider", "langchain"]


async def read_environ(bench: Any, client: str, key: str) -> dict[str, str]:
    """What `halter proxy env CLIENT` prints for a shell."""
    said = await bench.halter("proxy", "env", client, "--key", key, "--url", bench.root, "--model", MODEL)
    pairs = [line.removeprefix("export ").split("=", 1) for line in said.splitlines() if line.startswith("export ")]
    return dict(pairs)


async def prepare(bench: Any, find_client: Any, client: str, key: str) -> tuple[list[str], dict[str, str]]:
    """The command of a client, and its environment."""
    if client == "opencode":
        said = await bench.halter("proxy", "env", client, "--key", key, "--url", bench.root, "--model", MODEL)
        file = Path(bench.folder) / "opencode.json"
        await asyncio.to_thread(file.write_text, "\n".join(said.splitlines()[1:]))
        return [find_client("opencode"), "run", "say hello"], {"OPENCODE_DISABLE_AUTOUPDATE": "1"}
    # What these use inside would ask another machine for its prices first.
    environ = {**await read_environ(bench, client, key), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if client == "llm":
        return [find_client("llm"), "-m", MODEL, "--functions", LOOKUP, "Where is it?"], environ
    if client == "openhands":
        return [find_client("openhands", "python"), "-c", OPENHANDS], environ
    if client == "langchain":
        return [find_client("langchain", "python"), "-c", LANGCHAIN], environ
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
    return [find_client("aider"), "--model", f"openai/{MODEL}", *quiet, "--message", "say hello"], environ


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_task_is_done_and_paid(bench: Any, find_client: Any, client: str) -> None:
    command, environ = await prepare(bench, find_client, client, await bench.key())
    code, said = await bench.run(command, environ)
    assert code == 0, said
    assert "It is seven." in said
    assert any(asked.get("stream") for asked in bench.provider.asked)
    # aider has no tools: it writes what it is told into files.
    assert client == "aider" or any("seen-by-a-tool" in str(asked["messages"][-1]) for asked in bench.provider.asked)
    assert 0 < bench.provider.billed <= bench.spent()


@pytest.mark.parametrize("client", CLIENTS)
async def test_at_its_cap_it_asks_no_second_time(bench: Any, find_client: Any, client: str) -> None:
    command, environ = await prepare(bench, find_client, client, await bench.key("0.0000001"))
    _, said = await bench.run(command, environ)
    assert "Halter: " in said
    # opencode asks for a title beside its turn.
    assert bench.count("request_refused") <= (2 if client == "opencode" else 1)
    assert not bench.provider.asked


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_halt_ends_it_in_the_middle_of_a_stream(bench: Any, find_client: Any, client: str) -> None:
    command, environ = await prepare(bench, find_client, client, await bench.key())
    bench.provider.gate = asyncio.Event()
    running = asyncio.ensure_future(bench.run(command, environ, 400))
    reached = asyncio.ensure_future(bench.provider.reached_gate.wait())
    await asyncio.wait((running, reached), timeout=300, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), running.result()
    await bench.halter("halt", "fleet")
    _, said = await running
    assert "halted" in said
    assert "It is seven." not in said
    assert len(bench.provider.asked) <= (2 if client == "opencode" else 1)
    assert bench.halt_delay() < 1
