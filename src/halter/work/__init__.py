"""What a session does: its calls and its waits, and the playbooks that it walks through."""
