"""Theory: what should happen."""
