"""Messages understood by exact grammars, without a model."""
