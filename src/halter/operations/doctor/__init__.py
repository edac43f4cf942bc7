"""`halter doctor`: checks of agents, the machine, workers and the store, each with a remedy."""
