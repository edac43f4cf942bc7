"""What a session does: conversations, tasks with phases, playbooks and their tools."""
