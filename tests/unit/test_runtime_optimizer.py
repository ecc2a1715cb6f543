"""The learning rate of a step is that of torch's own schedulers, and needs nothing but the step's number."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.optim import lr_scheduler

from hetrun.model import Decay, TrainSpec
from hetrun.runtime.optimizer import learning_rate_at, make_optimizer

PEAK = 0.4
STEPS = 23


def spec(**changes: object) -> TrainSpec:
    known: dict[str, object] = {"steps": STEPS, "global_batch_rows": 1, "learning_rate": PEAK}
    return TrainSpec(**{**known, **changes})  # type: ignore[arg-type]


def of_torch(decay: Decay, *, warmup: int, fraction: float) -> list[float]:
    """The rates of all steps, by schedulers of torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    falling: lr_scheduler.LRScheduler
    match decay:
        case Decay.CONSTANT:
            falling = lr_scheduler.ConstantLR(optimizer, factor=1.0)
        case Decay.LINEAR:
            falling = lr_scheduler.LinearLR(
                optimizer, start_factor=1.0, end_factor=fraction, total_iters=STEPS - warmup
            )
        case _:
            falling = lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=STEPS - warmup, eta_min=PEAK * fraction
            )
    if warmup:
        rising = lr_scheduler.LinearLR(
            optimizer, start_factor=1 / warmup, end_factor=1.0, total_iters=warmup - 1
        )
        falling = lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[warmup])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        falling.step()
    return rates


@pytest.mark.parametrize(
    ("decay", "warmup", "fraction"),
    [
        (decay, warmup, fraction)
        for decay, warmup, fraction in itertools.product(Decay, (0, 5), (0.0, 0.1))
        if decay is not Decay.CONSTANT or fraction == 0.0
    ],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")  # SequentialLR's own
def test_rates_are_those_of_torchs_schedulers(decay: Decay, warmup: int, fraction: float) -> None:
    train = spec(decay=decay, warmup_steps=warmup, final_fraction=fraction)
    rates = [learning_rate_at(train, step) for step in range(STEPS)]
    assert rates == pytest.approx(of_torch(decay, warmup=warmup, fraction=fraction), rel=1e-12)


def test_rates_rise_in_equal_parts_then_fall_towards_the_final_one() -> None:
    train = spec(steps=8, warmup_steps=4, decay=Decay.LINEAR, final_fraction=0.5)
    rates = [learning_rate_at(train, step) for step in range(8)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.35, 0.3, 0.25])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decay": Decay.COSINE, "final_fraction": 1.5}, "final_fraction 1.5, need 0 to 1"),
        ({"final_fraction": 0.1}, "final_fraction 0.1 with decay constant"),
        ({"decay": Decay.LINEAR, "warmup_steps": STEPS}, "leave no step for decay linear"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(**changes)


def test_adamw_is_as_the_recipe_says() -> None:
    train = spec(beta1=0.8, beta2=0.7, eps=1e-3, weight_decay=0.2)
    (group,) = make_optimizer([torch.nn.Parameter(torch.ones(1))], train).param_groups
    said = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    assert said == {"lr": PEAK, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.2}
