"""What a person or a program can see and do."""
