"""The dashboard: pages to watch, decide and halt in a browser."""
