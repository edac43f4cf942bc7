"""An agent with the tools of an MCP server. Each call passes the guard, like that of any tool.

    python mcp_tools.py "Which books by Astrid Lindgren can I borrow?"

The server here is `mcp_server.py`. Any other one is named the same way, as in `.mcp.json`.
"""

import sys
from pathlib import Path

from halter import Agent

SERVER = Path(__file__).with_name("mcp_server.py")

reader = Agent(
    "reader",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    instructions="Find books for the reader, and reserve one only if the reader asks for it.",
    mcp_servers={"library": {"command": sys.executable, "args": [str(SERVER)]}},
    policy={"policy": {"tools": {"library__reserve": {"level": "RESTRICTED", "rate": "5/hour"}}}},
)


def main(question: str) -> None:
    print(reader.run_sync(question).require_output())


if __name__ == "__main__":
    main(*sys.argv[1:])
