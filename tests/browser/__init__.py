"""A package, so that its browser and its house end with its last test."""
