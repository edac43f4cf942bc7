"""Documents: files found on disk, read as text whatever they are, and cut into pieces."""
