"""Sensors: polled URLs, files and folders, and streams."""
