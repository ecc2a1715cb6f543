"""A plan in the words of other trainers. Pure text; each target refuses what it cannot express and says what is lost."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from hetrun.errors import ConfigError
from hetrun.model import Plan
from hetrun.planner.export.common import Export, plain_orders
from hetrun.planner.export.flagscale import to_flagscale
from hetrun.planner.export.megatron import to_megatron
from hetrun.planner.export.synerfuse import to_synerfuse

__all__ = ["TARGETS", "Export", "export", "known_target"]

TARGETS: Mapping[str, Callable[[Plan], Export]] = {
    "flagscale": to_flagscale,
    "megatron": to_megatron,
    "synerfuse": to_synerfuse,
}


def known_target(name: str) -> str:
    """Return the name of a target.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in TARGETS:
        near = difflib.get_close_matches(name.lower(), TARGETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(TARGETS)}"
        raise ConfigError(f"no export to {name!r}", hint=hint)
    return name


def export(plan: Plan, target: str) -> Export:
    """Return the plan as `target` reads it.

    Raises:
        ConfigError: no such target, or the plan needs something that the target has no words for.
    """
    writer = TARGETS[known_target(target)]
    plain_orders(plan, target)
    return writer(plan)
