"""TODO schedule."""
