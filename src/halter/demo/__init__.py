"""The demo: the worst night, without and with Halter; then an agent that watches this machine."""
