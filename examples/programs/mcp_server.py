"""A library as an MCP server, for `mcp_tools.py`."""

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

SHELF = {"Astrid Lindgren": ["Ronja", "Pippi"], "Michael Ende": ["Momo"]}

server = MCPServer("library")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_books(author: str) -> list[str]:
    """List the books of an author that can be borrowed."""
    return SHELF.get(author, [])


@server.tool()
def reserve(book: str) -> str:
    """Reserve a book for the reader."""
    return f"{book} is reserved."


if __name__ == "__main__":
    server.run("stdio")
