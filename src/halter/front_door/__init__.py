"""Routes messages by exact grammars, without a model."""
