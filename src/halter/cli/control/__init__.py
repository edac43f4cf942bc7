"""The commands of the panel `Control`."""
