"""A server as its authors mean it, made with the official library: over its pipes, or over HTTP on a given socket."""

import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("honest")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False))
def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def shout(text: str) -> str:
    """Say something loudly."""
    return text.upper()


@server.tool()
def fail(reason: str) -> str:
    """Fail for a reason."""
    raise ToolError(reason)


@server.tool()
def picture() -> list[Image | str]:
    """Give a picture and a word."""
    return [Image(data=b"\x89PNG" * 100, format="png"), "a caption"]


@server.tool()
def environment() -> dict[str, str]:
    """Tell everything that the environment holds."""
    return dict(os.environ)


def over_http(descriptor: int) -> None:
    import socket

    import uvicorn

    listening = socket.socket(fileno=descriptor)
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    if sys.argv[1:]:
        over_http(int(sys.argv[1]))
    else:
        server.run("stdio")
