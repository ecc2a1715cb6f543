"""Checks hosts before anything is started: `hetrun doctor`, and the first thing that a launch does.

checks.py (which there are) -> ask.py (one script per host) -> onmeet.py, onhost.py, onpair.py (run there) ->
compare.py (hosts beside each other) -> run.py (all of it).
"""

from hetrun.preflight.checks import CHECKS, check_skips
from hetrun.preflight.run import SavedState, Wants, preflight, refuse

__all__ = ["CHECKS", "SavedState", "Wants", "check_skips", "preflight", "refuse"]
