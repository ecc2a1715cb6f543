"""The two visits to a host: look at it alone, then let it meet the others. Standard library only; sent as source."""

from __future__ import annotations

from typing import Any

# Whole names, since what was sent is no package there.
from hetrun.preflight.onhost import Examination
from hetrun.preflight.onhost_tools import look_for_marks, take_marks_away
from hetrun.preflight.onpair import run as meet


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Do the visit that the controller asks for."""
    if config["visit"] == "alone":
        return Examination(config).run()
    try:
        marks = look_for_marks(config)
        met = meet(config) if config["peers"] else {"pairs": []}
    finally:
        take_marks_away(config)
    return {**marks, **met}
