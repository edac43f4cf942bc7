"""The commands of the panel `Trust`."""
