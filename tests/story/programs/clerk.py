"""A clerk that sends a letter and looks around. Killed at its second call and started again, it goes on from there."""

import asyncio
import sys

from halter import Agent
from halter.core.clock import SystemClock
from halter.core.messages import Reply, Text, ToolCall
from halter.core.usage import ModelName
from halter.models.scripted import Scripted, ScriptLine

AGAIN = sys.argv[2:] == ["again"]


def asks(tool: str) -> ScriptLine:
    return ScriptLine(reply=Reply((ToolCall("m", tool, "{}"),), "calls"))


SAYS = ScriptLine(reply=Reply((Text("I sent it, and all is well.", "model", trusted=False),)))
model = Scripted([SAYS] if AGAIN else [asks("send"), asks("look")], SystemClock(), ModelName("scripted", "clerk"))
agent = Agent("clerk", store=sys.argv[1], model=model, lease=0.5)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@agent.tool(level="SAFE")
async def send() -> str:
    """Send the letter."""
    say("sent")
    return "sent"


@agent.tool(level="SAFE", effect="read")
async def look() -> str:
    """Look around."""
    say("looking")
    if not AGAIN:
        await asyncio.Event().wait()
    return "all is well"


result = agent.run_sync("send it, then look", id="the-letter")
sends = [line for line in result.receipt.calls if line.name == "send"]
say(f"{result.state}: {result.text} asked {len(model.requests)} times, sent once: {len(sends) == 1}")
