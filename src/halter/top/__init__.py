"""`halter top`: the fleet in a live terminal."""
