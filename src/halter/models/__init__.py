"""The wires to models, and what their tokens cost."""
