"""The same work in plain loops, as they are often written, and not badly: they retry, check a budget, keep a history.

What they lack is what nobody misses by day. What failed is tried again for ever, since each run has a budget of its
own. A heartbeat asks although nothing has changed. And a budget that is looked at first and spent later is looked at by
all who run beside each other.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.messages import Message, Prompt, Reply, ToolCall, ToolResult, user
from halter.core.money import DOLLAR
from halter.core.tools import ToolSpec
from halter.demo.provider import Provider

MAX_RETRIES: Final = 3
"""So many failures end a run."""
RUN_BUDGET: Final = DOLLAR // 2
"""What one run may spend."""
BUDGET: Final = DOLLAR
"""What all runs together may spend, where they share it."""
PAUSE: Final = 30 * SECOND
"""After so long, what is not done is taken up again."""
KEPT: Final = 40
"""So many messages of a history are kept, beside the first: twenty calls with their results."""

TOOLS: Final = (
    ToolSpec(
        name="read_file",
        description="Read a file as text.",
        schema=b'{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}',
    ),
    ToolSpec(
        name="emit_finding",
        description="Put down something that was found.",
        schema=b'{"type":"object","properties":{"title":{"type":"string"},"severity":{"type":"string"},'
        b'"text":{"type":"string"}},"required":["title","severity"]}',
    ),
)


class Loop:
    """A plain loop: it asks the model, makes the calls, and tells the model what came of them."""

    def __init__(self, provider: Provider, clock: Clock, instructions: str, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self._provider = provider
        self._instructions = instructions

    async def run(self, history: list[Message]) -> tuple[bool, int]:
        """Ask until there is an answer, or too much has failed or been spent; tell whether it is done, and its cost."""
        spent = failures = 0
        while failures < MAX_RETRIES and spent < RUN_BUDGET:
            reply = await self.ask(history)
            spent += self._provider.cost(reply.usage) if reply.usage else 0
            history.append(Message("assistant", reply.parts))
            if not reply.calls:
                return True, spent
            results = tuple(_called(self.folder, call) for call in reply.calls)
            failures += any(result.outcome != "ok" for result in results)
            history.append(Message("user", results))
        return False, spent

    async def ask(self, history: Sequence[Message]) -> Reply:
        """Send the history, or what is kept of it."""
        kept = (*history[:1], *history[1:][-KEPT:])
        return await self._provider.serve(Prompt(system=self._instructions, messages=kept, tools=TOOLS))


def _called(folder: Path, call: ToolCall) -> ToolResult:
    arguments = msgspec.json.decode(call.arguments, type=dict[str, str])
    if call.tool == "emit_finding":
        return ToolResult(call.id, call.tool, "ok", "Recorded.")
    try:
        return ToolResult(call.id, call.tool, "ok", (folder / arguments["path"]).read_text("utf-8"))
    except OSError as error:
        return ToolResult(call.id, call.tool, "error", f"{arguments['path']}: {error.strerror}")


def _told(file: Path) -> Message:
    return user(f"The document is {file.name}.\n{file.read_text('utf-8')}")


async def book_all(loop: Loop) -> None:
    """Book every invoice in the folder; one that could not be booked is taken up again in half a minute."""
    waiting = {file: [_told(file)] for file in sorted((loop.folder / "inbox").iterdir())}
    while waiting:
        for file, history in list(waiting.items()):
            done, _ = await loop.run(history)
            if done:
                del waiting[file]
        await loop.clock.sleep(PAUSE)


async def look_around(loop: Loop) -> None:
    """Ask every minute whether anything has to be done."""
    while True:
        begun = loop.clock.now()
        status = (loop.folder / "status.json").read_text("utf-8")
        await loop.ask([user(f"It is time to look around. The status is {status}")])
        await loop.clock.sleep(begun + MINUTE - loop.clock.now())


async def report_all(loop: Loop) -> None:
    """Write all reports beside each other, each only if the budget that they share is not spent yet."""
    spent = 0

    async def report(file: Path) -> None:
        nonlocal spent
        if spent < BUDGET:
            _, cost = await loop.run([_told(file)])
            spent += cost

    async with asyncio.TaskGroup() as runs:
        for file in sorted((loop.folder / "inbox").iterdir()):
            runs.create_task(report(file))
