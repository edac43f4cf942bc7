"""How risky a call is, from its parsed arguments."""
