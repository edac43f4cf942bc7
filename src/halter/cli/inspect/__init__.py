"""The commands of the panel `Inspect`."""
