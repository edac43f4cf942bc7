"""The journal: stores of events, their hash chains, and signed checkpoints outside the stores."""
