"""`halter gateway`: an MCP server in front of other MCP servers; every call passes the guard."""
