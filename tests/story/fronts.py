"""An agent with a front door, in a world: spoken to as a chat speaks to it."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from halter.core.clock import SECOND
from halter.core.ids import FLEET, inbox_stream, make_worker_id
from halter.core.ports import Query, Stored
from halter.core.rows import DecisionRow, SpendRow
from halter.dispatch.heartbeat import renew_leases
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.message_router import ForwardedMessage, HandledMessage, handle_message
from halter.spec.triggers import Schedule
from halter.testing.world import World
from tests.story.autonomous import Fleet

TOOLS = """
from halter import tool

@tool(level="SAFE", effect="read")
async def look(at: str = "") -> str:
    "Look."
    return f"nothing at {at}"

@tool(level="SAFE", effect="read")
async def count() -> str:
    "Count."
    return "3"
"""
THINKS = "model: scripted\nscript: replies.yaml\n"
PRICED = "models: {'scripted:script': {price: {input: 1, output: 10}}}\n"


class Front:
    """One agent at whose door somebody speaks."""

    def __init__(self, world: World, home: Path, context: AgentRuntime) -> None:
        self.world = world
        self.home = home
        self.context = context

    async def says(self, text: str, session: str = "chat", **more: Any) -> HandledMessage | ForwardedMessage:
        return await handle_message(self.context, session, text, **more)

    async def answer(self, text: str, session: str = "chat", **more: Any) -> str:
        message = await self.says(text, session, **more)
        assert isinstance(message, HandledMessage), message
        return message.answer

    async def routed(self, session: str = "") -> list[Stored]:
        events = await self.world.events(inbox_stream(session) if session else FLEET)
        return [event for event in events if event.kind == "message_routed"]

    async def decisions(self) -> dict[str, DecisionRow]:
        rows = await self.world.journal.ask(Query("all_decisions", DecisionRow))
        return {row.decision: row for row in rows}

    async def spends(self) -> int:
        return len(await self.world.journal.ask(Query("all_spends", SpendRow)))

    def called(self, person: str) -> "Front":
        """Let somebody else speak."""
        app = self.context.app
        named = replace(app.settings, person=person)
        context = replace(self.context, app=replace(app, settings=named))
        return Front(self.world, self.home, context)

    def with_schedules(self, *schedules: Schedule) -> "Front":
        """Let the agent's file name schedules."""
        definition = self.context.definition
        tasks = replace(definition.tasks, schedules=schedules)
        definition = replace(definition, tasks=tasks)
        return Front(self.world, self.home, replace(self.context, definition=definition))


async def front(stack: AsyncExitStack, world: World, home: Path, text: str = THINKS, **files: str) -> Front:
    """Put the agent `desk` together."""
    fleet = Fleet(world, home, files.pop("fleet", PRICED))
    folder = written(fleet, "desk", text, **files)
    app = fleet.app
    worker = make_worker_id("talk", world.ids)
    await stack.enter_async_context(renew_leases(app.store, app.clock, worker, world.lease - SECOND))
    agent = await stack.enter_async_context(open_folder_agent(app, folder, worker))
    return Front(world, home, replace(agent, rng=world.random))


def written(fleet: Fleet, name: str, output: str, tools: str = TOOLS, **files: str) -> Path:
    """Write an agent's folder, and trust it."""
    folder = fleet.home / name
    folder.mkdir(exist_ok=True)
    files.setdefault("replies_yaml", "- {text: All is well.}\n")
    (folder / "agent.yaml").write_text(f"name: {name}\n{output}")
    for file, text in files.items():
        path = folder / file.replace("__", "/").replace("_yaml", ".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    if tools:
        (folder / "tools.py").write_text(tools)
        fleet.trust(folder)
    return folder
