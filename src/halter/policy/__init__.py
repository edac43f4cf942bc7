"""The order of policies: which of two is the stricter, what holds if both apply, and what that means for a call."""
