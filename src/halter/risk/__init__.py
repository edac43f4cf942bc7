"""The risk of a call, from its parsed arguments."""
