"""The optimizer of one rank, and the learning rate of each step: a function of the step's number alone, so that resuming changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hetrun.model import Decay, TrainSpec


def make_optimizer(parameters: Iterable[nn.Parameter], train: TrainSpec) -> torch.optim.Optimizer:
    """AdamW as the recipe wants it; the learning rate of each step is set from outside."""
    return torch.optim.AdamW(
        parameters,
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )


def learning_rate_at(train: TrainSpec, step: int) -> float:
    """Learning rate of a step (from 0): up to `warmup_steps` it rises in equal parts, then it falls as `decay` says.

    `final_fraction` of it would be reached one step after the last, as in torch's and Megatron's schedules.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.decay is Decay.CONSTANT:
        return train.learning_rate
    done = (step - train.warmup_steps) / (train.steps - train.warmup_steps)
    left = 1.0 - done if train.decay is Decay.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.learning_rate * (train.final_fraction + (1.0 - train.final_fraction) * left)
