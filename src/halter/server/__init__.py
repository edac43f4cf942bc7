"""What is reached over HTTP."""
