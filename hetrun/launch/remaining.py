"""Goes on without hosts that are lost: under a new plan over the others, where they have the checkpoints.

Making that plan is left to the caller of `launch`, who has facts and profile; when it is asked for, to `attempts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from hetrun.arch import need_trainable
from hetrun.errors import ConfigError, HetrunError, HostError, LostContactError
from hetrun.launch.check import check_plan
from hetrun.model import LostHost, Plan
from hetrun.schedule.holders import lost_with

Replan = Callable[[tuple[str, ...]], Plan]  # without these hosts, from the same facts and profile
_MOST_NAMED = 3


def away(error: HetrunError) -> tuple[str, ...]:
    """Return the hosts that did not answer, where that is what the error says; none where one refuses us."""
    if isinstance(error, HostError):
        alone = (error.host,) if error.host and error.check == HostError.check else ()
        return error.away or alone
    return (error.host,) if isinstance(error, LostContactError) and error.host else ()


class Remaining:
    """The plan of a run as hosts are lost; `left_out` are those that it does without."""

    def __init__(self, plan: Plan, replan: Replan | None) -> None:
        self.plan = plan
        self.left_out: tuple[str, ...] = ()
        self._replan = replan
        self._saved_by: Plan | None = None

    @property
    def may_shrink(self) -> bool:
        """Say whether the recipe wants runs to go on without lost hosts."""
        return self.plan.recipe.launch.on_lost_host is LostHost.REPLAN

    def saved(self) -> None:
        """A checkpoint was completed under the plan as it is."""
        self._saved_by = self.plan

    def leave_out(self, hosts: tuple[str, ...]) -> str:
        """Plan again without these hosts too; return what that means, in words.

        Raises:
            HetrunError: there is no such plan, or the others do not have the newest checkpoint.
        """
        gone = (*self.left_out, *hosts)
        self._need_checkpoint(gone)
        if self._replan is None:  # `launch` has seen to it
            raise ValueError("nothing to plan from")
        new = self._replan(gone)
        need_trainable(new)
        check_plan(new)
        before_s, after_s = self.plan.split.cost.step_s, new.split.cost.step_s
        self.plan, self.left_out = new, gone
        return (
            f"left out, planned again over {', '.join(spec.name for spec in new.hosts)}:"
            f" {after_s:.3g} s per step predicted, {before_s:.3g} s before"
        )

    def _need_checkpoint(self, gone: tuple[str, ...]) -> None:
        checkpoint = self.plan.recipe.checkpoint
        if self._saved_by is None or checkpoint is None:  # ranks look for older ones, or begin at 0
            return
        lost = lost_with(self._saved_by, checkpoint, gone)
        if lost:
            more = f" and {len(lost) - _MOST_NAMED} more" if lost[_MOST_NAMED:] else ""
            raise ConfigError(
                f"no other host has {', '.join(lost[:_MOST_NAMED])}{more} of the checkpoints;"
                " checkpoint.shared: true on a shared file system keeps them"
            )
