"""The work of a session: conversations, tasks with phases, playbooks and their tools."""
