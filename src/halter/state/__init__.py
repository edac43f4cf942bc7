"""The state of sessions and channels as pure folds of their events, and the writes that change it."""
