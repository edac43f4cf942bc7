"""The commands of the panel `Plan`."""
