"""What a session does with its turns: it thinks, acts, waits, and stops."""
