"""Whether a run that failed is started again, and when. Starting it is left to `run.py`.

The controller restarts, not torchrun: everything is stopped everywhere first, and each attempt has a port and an id of
its own. It pays only if something is kept, so only runs with checkpoints are restarted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetrun.errors import ExitCode
from hetrun.launch.diagnose import Kind
from hetrun.model import LaunchSpec

BACKOFF_S = (1.0, 5.0, 15.0)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_RETRIED = (ExitCode.JOB_FAILED, ExitCode.LOST_CONTACT, ExitCode.HANG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one attempt ended. Steps are counted from 0; `checkpoint_step` is that of the newest one it wrote."""

    exit_code: ExitCode
    kind: Kind | None = None  # of the root cause
    what: str = ""
    step: int | None = None  # that the failing rank was in, where known
    out_of_memory: bool = False
    unsure: bool = False  # some host did not confirm that nothing is left there
    checkpoint_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows: another attempt after `wait_s`, or the end with this code and the reason."""

    again: bool
    exit_code: ExitCode
    why: str = ""
    wait_s: float = 0.0


def judge(endings: Sequence[Ending], limits: LaunchSpec, *, has_checkpoints: bool) -> Verdict:
    """Decide after the last of these attempts."""
    last = endings[-1]
    num_restarts = len(endings) - 1
    why = ""
    code = last.exit_code
    if code not in _RETRIED or not has_checkpoints or limits.max_restarts == 0:
        return Verdict(again=False, exit_code=code)
    if last.out_of_memory:
        why = "memory ran out, which a restart does not mend: lower micro-batches or move layers"
    elif num_restarts and _same_error(endings[-2], last):
        why = "the same error in the same step twice is one of the code or the data: not started again"
    elif num_restarts and last.checkpoint_step is None:
        why = "no new checkpoint since the last restart: not started again"
        code = ExitCode.NO_PROGRESS
    elif num_restarts >= limits.max_restarts:
        why = f"failed after {num_restarts} restarts, launch.max_restarts allows no more"
    if why:
        return Verdict(again=False, exit_code=code, why=why)
    wait_s = BACKOFF_S[min(num_restarts, len(BACKOFF_S) - 1)]
    if last.kind is Kind.LOST or last.unsure:
        wait_s = max(wait_s, limits.lease_s + 5.0)  # by then what is left there has ended by itself
    return Verdict(again=True, exit_code=code, wait_s=wait_s)


def _same_error(before: Ending, last: Ending) -> bool:
    """Say whether both raised the same in the same step; addresses and other numbers in the text may differ."""
    if not (before.kind is last.kind is Kind.RAISED) or before.step != last.step:
        return False
    return _NUMBERS.sub("#", before.what) == _NUMBERS.sub("#", last.what)
