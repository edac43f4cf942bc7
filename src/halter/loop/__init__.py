"""The agent loop: what a session does with its turns."""
