"""Where events are kept: the stores, the hash chain and the checkpoints outside of them."""
