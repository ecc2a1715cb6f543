"""Sentences of a plan: shapes, verdict, runner-up. Numbers come from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.model import Baseline, RankPlan, ReplicaPlan
from hetrun.planner.drafts import Candidate


def plural(count: int, word: str) -> str:
    """Return "1 stage", "2 stages", "2 microbatches"."""
    many = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{count} {word if count == 1 else many}"


def shape_words(replicas: Sequence[ReplicaPlan]) -> str:
    """Return how many replicas have how many stages, such as "2 replicas x 2 stages + 1 replica x 1 stage"."""
    depths: dict[int, int] = {}
    for replica in replicas:
        depths[len(replica.stages)] = depths.get(len(replica.stages), 0) + 1
    return " + ".join(
        f"{plural(count, 'replica')} x {plural(depth, 'stage')}" for depth, count in depths.items()
    )


def blocks_words(ranks: Sequence[RankPlan], replicas: Sequence[ReplicaPlan]) -> str:
    """Return layers per stage and vendor of each different replica, such as "2 x (emu-a 7, emu-b 3)"."""
    seen: dict[str, int] = {}
    for replica in replicas:
        stages = ", ".join(
            f"{ranks[stage.ranks[0]].vendor} {share:.4g}"
            + (f" in {stage.lanes} lanes" if stage.lanes > 1 else "")
            for stage, share in zip(replica.stages, replica.layer_shares, strict=True)
        )
        seen[stages] = seen.get(stages, 0) + 1
    return " + ".join(f"{count} x ({stages})" for stages, count in seen.items())


def order_notes(best: Candidate, plain: Candidate | None) -> tuple[str, ...]:
    """Return what another order or real cuts gain, and what they take, where the plan has some."""
    if plain is None or plain.step_s <= best.step_s:
        return ()
    replicas = best.layout.replicas
    names = " and ".join(dict.fromkeys(replica.way for replica in replicas))
    gain = plain.step_s / best.step_s - 1
    twice = sum(cut % 1 != 0 for replica in replicas for cut in replica.cuts)
    price = f", {plural(twice, 'layer')} held and reduced twice" if twice else ""
    more = max(_held(best)) - max(_held(plain))
    if more > 0:
        price += f", up to {plural(more, 'microbatch')} more held at once"
    name = names[0].upper() + names[1:]
    return (f"{name}: {gain:.2%} quicker than the best 1F1B with whole layers{price}",)


def lane_notes(best: Candidate, turnless: Candidate | None) -> tuple[str, ...]:
    """Return what stages of several lanes gain, where the plan has some."""
    if turnless is None or turnless.step_s <= best.step_s:
        return ()
    lanes = max(stage.lanes for replica in best.layout.replicas for stage in replica.stages)
    gain = turnless.step_s / best.step_s - 1
    return (f"Stages in up to {lanes} lanes: {gain:.2%} quicker than the best with one for each",)


def zero_notes(
    best: Candidate, whole: Candidate | None, *, choices: Sequence[int]
) -> tuple[str, ...]:
    """Return what it gains that holders of a parameter share out its update, where they do and need not."""
    if not best.layout.replicas[0].zero or 0 not in choices:
        return ()
    if whole is None:
        return ("Updates are shared out (ZeRO 1): nothing fits without",)
    gain = whole.step_s / best.step_s - 1
    return (f"Updates shared out (ZeRO 1): {gain:.2%} quicker than the best without",)


def _held(candidate: Candidate) -> list[int]:
    """Return how many microbatches each stage may hold."""
    stages = [stage for replica in candidate.layout.replicas for stage in replica.stages]
    return [stage.most_held or stage.window for stage in stages]


def runner_up_words(best: Candidate, other: Candidate | None) -> str:
    """Return the best split that is built otherwise, and what it costs more."""
    if other is None:
        return ""
    layout = other.layout
    more = other.step_s / best.step_s - 1
    cost = "equally quick" if more < 5e-5 else f"{more:.2%} slower"
    blocks = blocks_words(layout.ranks, layout.replicas)
    return f"{shape_words(layout.replicas)}, layers {blocks}: {cost}"


def verdict_words(
    best: Candidate,
    batch_rows: int,
    baselines: Sequence[Baseline],
    *,
    free: Candidate,
    notes: Sequence[str],
) -> str:
    """Return whether mixing pays against the best single vendor, and what the figures leave open.

    `free` is the best without pins: what these leave alone does not show that mixing does not pay.
    """
    words = _mixing(best, batch_rows, baselines, free=free)
    return " ".join([words, *(f"{note}." for note in notes)])


def _mixing(
    best: Candidate, batch_rows: int, baselines: Sequence[Baseline], *, free: Candidate
) -> str:
    if len(baselines) == 1:
        return f"All devices are {baselines[0].vendor}: there is nothing to mix."
    rows_per_s = batch_rows / best.step_s
    able = [b for b in baselines if b.rows_per_s is not None]
    if not able:
        return "Mixing is the only way: no vendor can train this model alone."
    alone = max(able, key=lambda b: b.rows_per_s or 0.0)
    ratio = rows_per_s / (alone.rows_per_s or 1.0)
    used = {rank.vendor for rank in best.layout.ranks}
    pinned = used != {rank.vendor for rank in free.layout.ranks}
    compared = f"{rows_per_s:.4g} rows/s against {alone.rows_per_s:.4g} of {alone.vendor} alone"
    if len(used) == 1 and pinned:
        return f"The pins leave {', '.join(used)} alone ({rows_per_s:.4g} rows/s), the other devices stay idle."
    if len(used) == 1:
        return (
            f"Mixing does not pay: {', '.join(sorted(used))} alone is quickest"
            f" ({rows_per_s:.4g} rows/s), the other devices stay idle."
        )
    if ratio < 1.05:
        return f"Mixing hardly pays: {ratio:.2f}x the best single vendor ({compared})."
    return f"Mixing pays: {ratio:.2f}x the best single vendor ({compared})."
