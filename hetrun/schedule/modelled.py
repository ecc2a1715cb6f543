"""Timings that follow from FLOP counts and one speed: those of emulated chips, and estimates. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable

from hetrun.arch import head_forward_flops, layer_runs, run_forward_flops
from hetrun.model import ModelSpec, RowTiming, RunTiming

# AdamW: two moments, their corrections, the root, the quotient, the decay; roughly, and the same for every chip
OPTIMIZER_FLOPS_PER_PARAMETER = 10.0

Case = tuple[int, bool, int]  # tp, recompute, rows


def modelled_timings(
    model: ModelSpec, cases: Iterable[Case], *, seq_len: int, flops_per_s: float
) -> tuple[RowTiming, ...]:
    """FLOPs of the model's parts over a speed, for each case.

    A backward is two forwards, and one more where the forward is run again; tp chips share the FLOPs of a layer
    evenly, and what they tell each other is left to the link model. The embedding looks rows up and computes nothing.
    The gradients of the weights cost 2 FLOPs per matrix parameter and token: a forward without its attention scores; those
    of experts, and of matrices that are no plain linear maps, are had at once.
    """
    timings = []
    for tp, recompute, rows in cases:
        turns = 3 if recompute else 2
        runs = tuple(
            RunTiming(num_layers=run.num_layers, forward_s=run_s, backward_s=turns * run_s)
            for run in layer_runs(model)
            for run_s in [run_forward_flops(run, rows, seq_len) / tp / flops_per_s]
        )
        layer_s = runs[0].forward_s
        if len(runs) > 1:
            layer_s = sum(run.num_layers * run.forward_s for run in runs) / model.num_layers
        head_s = head_forward_flops(model, rows, seq_len) / flops_per_s
        layer = layer_runs(model)[0]
        matrices = layer.waiting_parameters
        matrices = layer.active_parameters if matrices is None else matrices
        weights_s = 2.0 * matrices * rows * seq_len / tp / flops_per_s
        timings.append(
            RowTiming(
                rows=rows,
                tp=tp,
                recompute=recompute,
                layer_forward_s=layer_s,
                layer_backward_s=turns * layer_s,
                embedding_forward_s=0.0,
                embedding_backward_s=0.0,
                head_forward_s=head_s,
                head_backward_s=2 * head_s,
                runs=runs if len(runs) > 1 else (),
                layer_weights_s=weights_s if len(runs) == 1 else None,
                head_weights_s=head_s,
            )
        )
    return tuple(timings)
