"""The best plan that a target has words for: where hetrun's own best needs more, it is planned again within those words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hetrun.errors import ConfigError, NoPlanError
from hetrun.model import Order, Pins, Plan, Recipe
from hetrun.planner.export import Export, export, flagscale, synerfuse
from hetrun.planner.export.common import plain_step_s, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The plan that was written, and how; `export.lost` begins with what it costs not to have the best one."""

    plan: Plan
    export: Export


def export_within(best: Plan, target: str, again: Callable[[Recipe], Plan]) -> Exported:
    """Return the best plan as `target` reads it, or the best that it can read; `again` plans another recipe.

    Raises:
        ConfigError: no plan that was found can be written; says what stood in the way of the last.
    """
    try:
        return Exported(plan=best, export=export(best, target))
    except ConfigError as error:
        refused = error
    found: list[Exported] = []
    for recipe in _within(best.recipe, target):
        try:
            found.append(_written(recipe, target, again))
        except NoPlanError as error:
            hint = error.hint or "plan for the target's words alone to see what lacks"
            refused = refuse(target, f"within its words {error.message}", hint)
        except ConfigError as error:
            refused = error
    if not found:
        raise refused
    quickest = min(found, key=lambda own: plain_step_s(own.plan))
    return replace(quickest, export=_priced(quickest, best))


def _within(recipe: Recipe, target: str) -> Iterator[Recipe]:
    """Yield the recipe without what `target` never has words for, in each way that it may have words for."""
    limits = replace(recipe.plan, orders=(Order.ONE_F_ONE_B,), fractional=False, lanes=(1,))
    one_tp = target != flagscale.TARGET  # its meshes have one each
    for tp in [(size,) for size in limits.tp] if one_tp else [limits.tp]:
        if target == synerfuse.TARGET and limits.max_shapes != 1:  # replicas of unequal rows
            yield replace(recipe, plan=replace(limits, tp=tp))
        yield replace(recipe, plan=replace(limits, tp=tp, max_shapes=1))


def _written(recipe: Recipe, target: str, again: Callable[[Recipe], Plan]) -> Exported:
    """Plan and write; where rows that differ stand in the way, with equal ones."""
    plan = again(recipe)
    try:
        return Exported(plan=plan, export=export(plan, target))
    except ConfigError:
        even = _even_rows(plan)
        if even is None:
            raise
    plan = again(even)
    return Exported(plan=plan, export=export(plan, target))


def _even_rows(plan: Plan) -> Recipe | None:
    """Return the recipe with equal rows for as many of the plan's replicas as can have them; None where they are."""
    recipe, replicas = plan.recipe, plan.split.replicas
    pins = recipe.plan.pins or Pins()
    if len({replica.num_rows for replica in replicas}) == 1 or pins.rows:
        return None
    batch, size = recipe.train.global_batch_rows, replicas[0].microbatch_rows
    count = next(n for n in range(len(replicas), 0, -1) if batch % (n * size) == 0 or n == 1)
    pins = replace(pins, rows=(batch // count,) * count)
    return replace(recipe, plan=replace(recipe.plan, pins=pins))


def _priced(own: Exported, best: Plan) -> Export:
    """Return the export with what it costs beside hetrun's own best plan, also as the text's first comment."""
    own_s, best_s = plain_step_s(own.plan), best.split.cost.step_s
    price = (
        f"hetrun's own best plan, which {own.export.target} has no words for: this one is {own_s / best_s - 1:.2%}"
        f" slower, {own_s:.4g} s per step against {best_s:.4g} s (both modelled)"
    )
    title, rest = own.export.text.split("\n", 1)
    text = f"{title}\n# lost: {price}\n{rest}"
    return replace(own.export, text=text, lost=(price, *own.export.lost))
