"""How risky single programs are, by their words: one module for each kind of program."""
