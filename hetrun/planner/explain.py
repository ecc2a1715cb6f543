"""Where each number of a plan comes from: figures, links, memory, bound, in the units of the plan. Rendering is left to `cli/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetrun import arch
from hetrun.model import (
    DeviceProfile,
    ModelSpec,
    Noun,
    Plan,
    Profile,
    Recipe,
    RowTiming,
    Source,
    StagePlan,
)
from hetrun.planner.cost import Piece, is_extrapolated, stage_parameters, timing_at
from hetrun.planner.memory import Load, stage_bytes, state_bytes
from hetrun.planner.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Term(Noun):
    """One number: what it is, of whom, its value and unit, where it comes from, and how it was reached."""

    what: str
    of: str
    value: float | None
    unit: str  # s, bytes, bytes/s, 1 or rows
    source: Source
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Noun):
    """All numbers that a plan rests on."""

    recipe: str
    terms: tuple[Term, ...]


def explain(plan: Plan, profile: Profile) -> Explanation:
    """Return the source of every number that went into a plan, in the order in which they are used."""
    terms = [
        *_model_terms(plan.recipe),
        *_device_terms(plan, profile),
        *_link_terms(plan),
        *_stage_terms(plan),
        *_step_terms(plan),
    ]
    return Explanation(recipe=plan.recipe.name, terms=tuple(terms))


def _term(what: str, of: str, value: float | None, unit: str, how: str) -> Term:
    """A number that the cost model computed."""
    return Term(what=what, of=of, value=value, unit=unit, source=Source.MODELLED, how=how)


def _model_terms(recipe: Recipe) -> Iterator[Term]:
    model = recipe.model
    where = "the recipe's sizes" if model.counts is None else f"the {model.family} config"
    total = arch.total_parameters(model)
    yield _term("parameters", "model", total, "1", f"counted from {where}, a tied matrix once")
    first = 0
    for run in arch.layer_runs(model):
        of = _run_words(model, first, run.num_layers)
        yield _term("parameters", of, run.parameters, "1", f"counted from {where}")
        first += run.num_layers


def _run_words(model: ModelSpec, first: int, count: int) -> str:
    """Return "one layer", and which where layers differ."""
    if not arch.layers_differ(model):
        return "one layer"
    return f"one layer of {first}-{first + count - 1}" if count > 1 else f"layer {first}"


def _device_terms(plan: Plan, profile: Profile) -> Iterator[Term]:
    """Yield the timings that stages are made of, per device model and microbatch size in use."""
    used: dict[tuple[str, str, int, int, bool], None] = {}
    for replica in plan.split.replicas:
        for stage in replica.stages:
            rank = plan.split.ranks[stage.ranks[0]]
            tp = len(stage.ranks) // stage.lanes
            key = (rank.vendor, rank.model, replica.microbatch_rows, tp)
            used[(*key, stage.recompute)] = None
    figures = {(device.vendor, device.model): device for device in profile.devices}
    for vendor, model, rows, tp, recompute in used:
        yield from _timings(_way(figures[vendor, model], tp=tp, recompute=recompute), rows)


def _way(figures: DeviceProfile, *, tp: int, recompute: bool) -> DeviceProfile:
    """Return the figures of one way to use a device, as if there were no other."""
    timings = figures.timings_of(tp=tp, recompute=recompute)
    words = f" x {tp}" * (tp > 1) + ", recomputing" * recompute
    own = tuple(replace(timing, tp=1, recompute=False) for timing in timings)
    return replace(figures, model=f"{figures.model}{words}", timings=own)


def _timings(figures: DeviceProfile, rows: int) -> Iterator[Term]:
    timing = timing_at(figures, rows)
    measured = [point.rows for point in figures.timings_of()]
    if rows in measured:
        how = f"profile of {figures.model} at {rows} rows"
    elif is_extrapolated(figures, rows):
        how = f"profile of {figures.model}, extrapolated from {measured} rows"
    else:
        how = f"profile of {figures.model}, interpolated between {measured} rows"
    if figures.source is Source.MEASURED:
        how += f", spread {timing.spread:.1%}"
    of = f"{figures.vendor} {figures.model}, {rows} rows"
    for what, seconds in (
        *_layer_seconds(timing),
        (
            "embedding forward and backward",
            timing.embedding_forward_s + timing.embedding_backward_s,
        ),
        ("head forward and backward", timing.head_forward_s + timing.head_backward_s),
        ("layer gradients of weights", timing.layer_weights_s),
    ):
        if seconds is None:
            continue
        yield Term(what=what, of=of, value=seconds, unit="s", source=figures.source, how=how)
    yield Term(
        what="optimizer per parameter",
        of=f"{figures.vendor} {figures.model}",
        value=figures.optimizer_s_per_parameter,
        unit="s",
        source=figures.source,
        how=f"profile of {figures.model}",
    )


def _layer_seconds(timing: RowTiming) -> Iterator[tuple[str, float]]:
    """Yield forward and backward of a layer, of each run of equal ones where layers differ."""
    if not timing.runs:
        yield "layer forward", timing.layer_forward_s
        yield "layer backward", timing.layer_backward_s
    first = 0
    for run in timing.runs:
        last = first + run.num_layers - 1
        which = f"layer {first}" if first == last else f"layer of {first}-{last}"
        yield f"{which} forward", run.forward_s
        yield f"{which} backward", run.backward_s
        first = last + 1


def _link_terms(plan: Plan) -> Iterator[Term]:
    for link in plan.links:
        ends = [end for end in (link.a, link.b) if end is not None]
        of = f"{link.kind.value} {' - '.join(ends)}".strip()
        how = "profile's link, seconds for n bytes = latency + n / rate"
        for what, value, unit in (
            ("latency", link.latency_s, "s"),
            ("rate", link.bytes_per_s, "bytes/s"),
        ):
            yield Term(what=what, of=of, value=value, unit=unit, source=link.source, how=how)


def _stage_terms(plan: Plan) -> Iterator[Term]:
    """Yield seconds and bytes of each different stage; equal ones once."""
    seen: set[tuple[object, ...]] = set()
    for number, replica in enumerate(plan.split.replicas):
        for index, stage in enumerate(replica.stages):
            rank = plan.split.ranks[stage.ranks[0]]
            key: tuple[object, ...] = (
                rank.vendor,
                rank.model,
                index,
                replica.microbatch_rows,
                stage.first_layer,
                stage.num_layers,
            )
            key += (stage.window, stage.most_held, stage.memory_bytes, stage.send_s, stage.lanes)
            if key not in seen:
                seen.add(key)
                of = f"replica {number} stage {index} ({rank.vendor} {rank.model})"
                yield from _one_stage(plan, stage, of, rows=replica.microbatch_rows)


def _one_stage(plan: Plan, stage: StagePlan, of: str, *, rows: int) -> Iterator[Term]:
    ends = " + embedding" * stage.has_embedding + " + head" * stage.has_head
    parts = plural(stage.num_layers, "layer") + ends
    if stage.lanes > 1:
        how = "copies of the stage, which take microbatches in turn and share gradients"
        yield _term("lanes", of, stage.lanes, "1", how)
    yield _term("forward", of, stage.forward_s, "s", f"{parts}, per microbatch")
    yield _term("backward", of, stage.backward_s, "s", f"{parts}, per microbatch")
    if stage.most_held is not None:
        how = "the part of the backward that only the weights need, put off to fill gaps"
        yield _term("gradients of weights", of, stage.weights_s, "s", how)
    if not stage.has_head:
        sent = arch.boundary_bytes(
            plan.recipe.model, plan.recipe.train.dtype, rows, plan.recipe.data.seq_len
        )
        yield _term(
            "send", of, stage.send_s, "s", f"{sent:,} bytes over the slowest link to the next stage"
        )
    yield _term(
        "optimizer", of, stage.optimizer_s, "s", "parameters of the stage x seconds per parameter"
    )
    yield from _memory_terms(plan.recipe, stage, of, rows=rows)


def _memory_terms(recipe: Recipe, stage: StagePlan, of: str, *, rows: int) -> Iterator[Term]:
    piece = Piece(
        first_layer=stage.first_layer,
        num_layers=stage.num_layers,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    dtype, held = recipe.train.dtype, stage.most_held or stage.window
    each, tp = state_bytes(dtype), len(stage.ranks) // stage.lanes
    parameters = stage_parameters(recipe.model, piece, tp=tp)
    load = Load(
        rows=rows, seq_len=recipe.data.seq_len, window=held, tp=tp, recompute=stage.recompute
    )
    whole = each.of(parameters, 0)
    in_flight = stage_bytes(recipe.model, dtype, piece, load, updated=0) - whole
    states = stage.memory_bytes - in_flight
    updated = (states - whole) // each.optimizer
    how = f"{parameters:,} parameters x {each.of(1, 0)} bytes (weight {each.weight}, gradient {each.gradient})"
    own = "each" if updated == parameters else f"of {updated:,} that this device updates"
    how += f", and {each.optimizer} {own} (AdamW's moments, master copies)"
    yield _term("memory: states", of, states, "bytes", how)
    kept = "inputs of layers" if stage.recompute else "activations"
    how = f"{kept} of {held} x {plural(rows, 'row')} in flight, messages, loss"
    yield _term("memory: in flight", of, in_flight, "bytes", how)
    yield _term(
        "memory: all", of, stage.memory_bytes, "bytes", "what the plan counts on, per device"
    )
    if stage.memory_limit_bytes is not None:
        how = f"plan.memory_fraction {recipe.plan.memory_fraction:g} of what probe found"
        yield _term("memory: limit", of, stage.memory_limit_bytes, "bytes", how)


def _step_terms(plan: Plan) -> Iterator[Term]:
    cost = plan.split.cost
    slowest = "of the slowest replica, simulated"
    for what, seconds, how in (
        ("compute", cost.compute_s, f"microbatches x busiest stage {slowest}"),
        ("p2p", cost.p2p_s, f"what free links would save {slowest}"),
        ("bubble", cost.bubble_s, f"the rest of the pipeline {slowest}"),
        (
            "sync",
            cost.sync_s,
            "gradient all-reduces after the slowest pipeline, hierarchical over vendors",
        ),
        ("optimizer", cost.optimizer_s, "slowest stage's optimizer after the sync"),
        ("step", cost.step_s, "sum of these; a second evaluator agrees to 1e-9"),
        (
            "bound",
            plan.bound_s,
            "no split is faster within this cost model: summed speeds, and more where proven",
        ),
    ):
        yield _term(what, "step", seconds, "s", how)
    yield _term("gap", "step", plan.gap, "1", f"step / bound - 1: {plan.gap_reason}")
    for base in plan.baselines:
        how = f"own best plan, {base.shape}" if base.shape else f"none: {base.why}"
        yield _term("alone", base.vendor, base.rows_per_s, "rows/s", how)
