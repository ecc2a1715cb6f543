"""TODO planner."""
