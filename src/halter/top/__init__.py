"""`halter status --live`: the fleet in a live terminal."""
