"""TODO launch."""
