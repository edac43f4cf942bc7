"""AgentDojo's suites over the injection brake; runs in an environment of its own."""
