"""The commands of the panel `Run unattended`."""
