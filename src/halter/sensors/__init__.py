"""Sensors: polling, files and folders, and streams."""
