"""What reads the world: addresses asked again and again, files and folders, and streams."""
