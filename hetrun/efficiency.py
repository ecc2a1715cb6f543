"""How much of the summed compute a step used: E1, E2 and U, for plan and report alike. Baselines come from `planner/`."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.model import Baseline, Efficiency, Share, Source


def efficiency(
    step_s: float, global_batch_rows: int, baselines: Sequence[Baseline], *, kind: Source
) -> Efficiency:
    """Relate one step of the mix to what its vendors reach alone; 1.0 = all of it, never clamped.

    E1 divides by the vendors' summed throughput at the same global batch, E2 at a batch scaled to each one's
    share of the compute, U by the summed speeds without bubble or traffic. E1 and E2 have no value where a
    vendor cannot train the model alone.
    """
    rows_per_s = global_batch_rows / step_s
    return Efficiency(
        e1=_share(rows_per_s, [(b, b.rows_per_s) for b in baselines], kind),
        e2=_share(rows_per_s, [(b, b.scaled_rows_per_s) for b in baselines], kind),
        u=_share(rows_per_s, [(b, b.ideal_rows_per_s) for b in baselines], kind),
    )


def _share(
    rows_per_s: float, alone: Sequence[tuple[Baseline, float | None]], kind: Source
) -> Share:
    """Divide by the sum over vendors, or say which of them has none."""
    why = [
        f"{baseline.vendor} has no baseline: {baseline.why or 'it cannot train the model alone'}"
        for baseline, rate in alone
        if rate is None
    ]
    total = sum(rate for _, rate in alone if rate is not None)
    if not why and total <= 0:
        why = ["no baseline is known"]
    if why:
        return Share(value=None, kind=kind, why="; ".join(why))
    return Share(value=rows_per_s / total, kind=kind)
