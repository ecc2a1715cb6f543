"""One reference and one comparison that all equality tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from hetrun.model import Plan, StagePlan
from hetrun.runtime.boxes import Box
from hetrun.runtime.data import ByteText, TokenStream
from hetrun.runtime.loop import join
from hetrun.runtime.network import Stage
from hetrun.runtime.optimizer import learning_rate_at
from hetrun.runtime.precision import Precision
from hetrun.runtime.trainer import LossScale, Trainer, per_valid_token
from tests.dist.plans import SEQ_LEN
from tests.dist.ranks import run_ranks

TEXT = tuple(b"chapter %d: " % n + b"a rose is a rose is a rose. " * (20 + n) for n in range(6))


def ragged(row: int) -> int:
    """Valid targets of a row: 2 to SEQ_LEN, far from even over the replicas."""
    return 2 + (row * row + 3 * row) % (SEQ_LEN - 1)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank ended with."""

    losses: list[float]
    gradient_norms: list[float]
    step_s: list[float]
    spans: list[tuple[Any, ...]]
    parameters: dict[str, list[float]]
    boxes: dict[str, Box]  # of what is no whole parameter
    num_moments: int  # elements of AdamW's first moments


@dataclass(frozen=True)
class Reference:
    """What one process, one batch and plain torch end with."""

    losses: list[float]
    gradient_norms: list[float]
    parameters: dict[str, list[float]]
    model: Stage


def open_test_stream(plan: Plan, is_ragged: bool) -> TokenStream:
    """The stream of a test; masks are ragged or full."""
    return TokenStream(
        ByteText(TEXT, vocab_size=plan.recipe.model.vocab_size),
        seq_len=SEQ_LEN,
        held_out_rows=plan.recipe.data.held_out_rows,
        seed=plan.recipe.train.seed,
        row_length=ragged if is_ragged else None,
    )


def train_rank(
    rank: int, store_path: Path, plan: Plan, is_ragged: bool, loss_scale: LossScale
) -> RankAnswer:
    """Body of one rank's process."""
    store = dist.FileStore(str(store_path), len(plan.split.ranks))
    join(plan, plan.split.ranks[rank], store)
    trainer = Trainer(
        plan,
        rank,
        stream=open_test_stream(plan, is_ragged),
        device=torch.device("cpu"),
        loss_scale=loss_scale,
    )
    results = [trainer.step(step) for step in range(plan.recipe.train.steps)]
    return RankAnswer(
        losses=[result.event.loss for result in results],
        gradient_norms=[result.event.grad_norm for result in results],
        step_s=[result.event.step_s for result in results],
        spans=[result.spans for result in results],
        parameters=_values(trainer.stage),
        boxes=trainer.stage.boxes,
        num_moments=sum(s["exp_avg"].numel() for s in trainer._optimizer.state.values()),
    )


def train_all(
    plan: Plan, folder: Path, *, is_ragged: bool, loss_scale: LossScale = per_valid_token
) -> list[RankAnswer]:
    """Run a plan in real processes."""
    return run_ranks(train_rank, len(plan.split.ranks), folder, plan, is_ragged, loss_scale)


def train_reference(plan: Plan, *, is_ragged: bool) -> Reference:
    """A plain loop: the whole model, one batch, mean over valid tokens, torch's own clipping and AdamW."""
    train = plan.recipe.train
    model, precision = whole_model(plan)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )
    stream = open_test_stream(plan, is_ragged)
    losses, norms = [], []
    for step in range(train.steps):
        rows = stream.rows(step * train.global_batch_rows, train.global_batch_rows)
        targets = rows.targets.masked_fill(rows.valid == 0, -100)
        with precision.arithmetic():
            logits = model(rows.inputs).to(
                torch.promote_types(precision.activations, torch.float32)
            )
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert train.clip_norm is not None
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(train, step)
        optimizer.step()
        losses.append(loss.item())
    return Reference(losses=losses, gradient_norms=norms, parameters=_values(model), model=model)


def whole_model(plan: Plan) -> tuple[Stage, Precision]:
    """All of a plan's model on one device, with its first values, and what to compute it in."""
    recipe = plan.recipe
    whole = StagePlan(
        ranks=(0,), first_layer=0, num_layers=recipe.model.num_layers, has_embedding=True,
        has_head=True, window=1, forward_s=0, backward_s=0, send_s=0, optimizer_s=0,
        memory_bytes=0, memory_limit_bytes=None,
    )  # fmt: skip
    precision = Precision(recipe.train.dtype, torch.device("cpu"))
    model = Stage(recipe.model, whole, seq_len=recipe.data.seq_len).initialise(
        seed=recipe.train.seed, device=torch.device("cpu"), dtype=precision.parameters
    )
    precision.prepare(model)
    return model, precision


def largest_difference(answers: Sequence[RankAnswer], reference: Reference) -> float:
    """Largest difference of any parameter on any rank; fails if some parameter is held by nobody."""
    held = {name for answer in answers for name in answer.parameters}
    assert held == set(reference.parameters)

    def right(answer: RankAnswer, name: str) -> list[float]:
        box = answer.boxes.get(name)
        if box is None:
            return reference.parameters[name]
        whole = torch.tensor(reference.parameters[name], dtype=torch.float64)
        return box.of(whole.view(box.whole)).flatten().tolist()

    return max(
        abs(a - b)
        for answer in answers
        for name, values in answer.parameters.items()
        for a, b in zip(values, right(answer, name), strict=True)
    )


def _values(model: Stage) -> dict[str, list[float]]:
    return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}
