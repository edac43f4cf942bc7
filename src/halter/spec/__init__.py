"""The keys of `halter.yaml` and `agent.yaml` as frozen values, and what both mean for one agent."""
