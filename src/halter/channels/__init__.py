"""Ways to tell people something. Each sends one letter, and says in a sentence why it could not."""
