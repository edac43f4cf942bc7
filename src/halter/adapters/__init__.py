"""Guards for agents of other frameworks, one module for each framework."""
