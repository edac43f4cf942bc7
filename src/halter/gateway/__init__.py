"""`halter gateway`: an MCP server before other MCP servers, whose every call passes the guard."""
