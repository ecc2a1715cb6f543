"""How many examples a costly property test draws: few in every run, many in `make soak`."""

from __future__ import annotations

import os


def examples(few: int) -> int:
    """Return `few`, times EFFORT where that is set: whoever changes the planner lets it run for an hour."""
    return few * int(os.environ.get("EFFORT", "1"))
