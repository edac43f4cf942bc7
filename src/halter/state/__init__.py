"""What a session is now, as pure folds of what happened to it."""
