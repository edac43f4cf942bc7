"""A server of the elder protocol that does what the protocol knows. Its argument is a file, in which it notes acts."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    EmptyResult,
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
    SamplingMessage,
    SubscribeRequestParams,
    TextContent,
    ToolAnnotations,
    UnsubscribeRequestParams,
)
from pydantic import BaseModel

server = MCPServer("helpful")
notes = Path(sys.argv[1])
READ = ToolAnnotations(read_only_hint=True)


def note(words: str) -> None:
    with notes.open("a") as file:
        file.write(words + "\n")


class Answer(BaseModel):
    colour: str


@server.tool()
def act(what: str) -> str:
    """Change something."""
    note(f"act {what}")
    return f"did {what}"


@server.tool(annotations=READ)
def look(what: str) -> dict[str, str]:
    """Look at something."""
    note(f"look {what}")
    return {"seen": what}


@server.tool(annotations=READ)
async def steps(context: Context, count: int) -> str:
    """Report how far it is."""
    for number in range(count):
        await context.report_progress(number + 1, count, f"step {number + 1}")
    return "arrived"


@server.tool(annotations=READ)
async def ask(context: Context, question: str) -> str:
    """Ask the person at the client."""
    outcome = await context.elicit(question, Answer)
    if outcome.action != "accept":
        return f"they said {outcome.action}"
    note(f"colour {outcome.data.colour}")
    return f"they like {outcome.data.colour}"


@server.tool()
async def ask_twice(context: Context) -> str:
    """Ask two questions at once."""
    outcome = await asyncio.gather(context.elicit("First?", Answer), context.elicit("Second?", Answer))
    return " ".join(each.data.colour if each.action == "accept" else each.action for each in outcome)


@server.tool(annotations=READ)
async def think(context: Context, about: str) -> str:
    """Have the client's model asked."""
    params = CreateMessageRequestParams(
        messages=[SamplingMessage(role="user", content=TextContent(text=about))], max_tokens=50
    )
    session: Any = context.session
    try:
        outcome = await session.send_request(CreateMessageRequest(params=params), CreateMessageResult)
    except MCPError as refused:
        return f"refused: {refused.message}"
    return f"it thinks {outcome.content.text}"


@server.tool()
async def slow(what: str) -> str:
    """Begin, and never end by itself."""
    note(f"began {what}")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        note(f"stopped {what}")
        raise
    return "never"


@server.tool()
async def grow(context: Context) -> str:
    """Offer one more tool from now on."""

    def grown() -> str:
        """Be new."""
        note("grown")
        return "new"

    server.add_tool(grown)
    await context.session.send_tool_list_changed()
    return "grew"


@server.tool(annotations=READ)
async def murmur(context: Context, words: str) -> str:
    """Write a line of a log, and tell that the notes have changed."""
    params = LoggingMessageNotificationParams(level="warning", logger="inner", data={"words": words})
    await context.session.send_notification(LoggingMessageNotification(params=params))
    await context.session.send_resource_updated("notes://all")
    return "murmured"


async def follow(_: object, params: SubscribeRequestParams) -> EmptyResult:
    note(f"follow {params.uri}")
    return EmptyResult()


async def unfollow(_: object, params: UnsubscribeRequestParams) -> EmptyResult:
    note(f"unfollow {params.uri}")
    return EmptyResult()


# The library's friendlier server knows no subscriptions.
lower: Any = vars(server)["_lowlevel_server"]
lower.add_request_handler("resources/subscribe", SubscribeRequestParams, follow)
lower.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, unfollow)


@server.resource("notes://all")
def read_notes() -> str:
    """All notes, and a key that should not be there."""
    note("read")
    return "the key is " + "sk-ant-api03-" + "a1b2c3d4e5" * 9 + "abc-AA"


@server.prompt()
def greet(name: str) -> str:
    """Greet someone."""
    return f"Say hello to {name}."


if __name__ == "__main__":
    server.run("stdio")
