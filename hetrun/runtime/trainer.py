"""One rank of a plan: its stage, its neighbours and its optimizer, one step at a time.

Which steps are run and what is written about them is left to `loop.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hetrun.errors import ConfigError, JobError
from hetrun.model import (
    EvaluationEvent,
    Event,
    Plan,
    RankPlan,
    ReplicaPlan,
    Span,
    StagePlan,
    StepEvent,
    WarningEvent,
)
from hetrun.runtime import drift
from hetrun.runtime.data import TokenStream
from hetrun.runtime.device import peak_memory_bytes, synchronize
from hetrun.runtime.emulate import Clock, PacedClock, check_memory, make_clock
from hetrun.runtime.engine import Microbatch, PipelineEngine, Timeline, lane_of
from hetrun.runtime.evaluate import evaluate, held_out_batches
from hetrun.runtime.groups import connect_neighbours, connect_sync, create_groups
from hetrun.runtime.hf_stage import build_stage
from hetrun.runtime.hf_weights import first_values
from hetrun.runtime.optimizer import learning_rate_at, make_optimizer
from hetrun.runtime.precision import Precision
from hetrun.runtime.state import State
from hetrun.runtime.tensor_parallel import share_layers
from hetrun.schedule.replica import simulate_replica
from hetrun.schedule.step import update_s

LossScale = Callable[["MicrobatchShare"], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchShare:
    """How much of a step one microbatch is."""

    valid_tokens: int
    batch_valid_tokens: int  # of the whole global batch
    rows: int
    batch_rows: int
    replica: int
    replica_valid_tokens: int
    num_replicas: int
    batch_microbatches: int  # of all replicas


def per_valid_token(share: MicrobatchShare) -> float:
    """Factor of a microbatch's summed loss: 1 / valid tokens of the global batch, however it is cut."""
    return 1.0 / share.batch_valid_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one rank knows after a step."""

    event: StepEvent
    spans: tuple[Span, ...]
    stop: bool = False  # some rank was asked to stop: all of them know it after the same step


class Trainer:
    """One rank of a plan, connected to the others. The default process group must exist."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        stream: TokenStream,
        device: torch.device,
        loss_scale: LossScale = per_valid_token,
    ) -> None:
        self.plan = plan
        self.rank = plan.split.ranks[rank]
        self.replica, self.stage_plan = find_stage(plan, self.rank)
        self._stream = stream
        self._device = device
        self._loss_scale = loss_scale
        recipe = plan.recipe
        check_memory(self.stage_plan, self.rank)
        precision = Precision(recipe.train.dtype, device)
        groups = create_groups(plan, self.rank)
        self.stage = build_stage(recipe.model, self.stage_plan, seq_len=recipe.data.seq_len)
        share_layers(self.stage, groups.share)
        self.stage.initialise(
            seed=recipe.train.seed,
            device=device,
            dtype=precision.parameters,
            weights=first_values(self.stage, recipe.weights),
        )
        precision.prepare(self.stage)
        self._clock: Clock = make_clock(plan, lambda: synchronize(device))
        run = simulate_replica(self.replica)
        self._lane = lane_of(run, self.replica, self.rank)
        self._engine = PipelineEngine(
            self.stage,
            self._lane,
            neighbours=connect_neighbours(plan, self.rank, groups, run=run, device=device),
            device=device,
            precision=precision,
        )
        self._sync = connect_sync(plan, self.rank, groups, stage=self.stage)
        self._optimizer = make_optimizer(self._sync.updated, recipe.train)
        self._planned_update_s = planned_update_s(plan)
        self._shared = drift.shared_parts(self._sync.buckets, self.stage.units())

    def step(
        self,
        number: int,
        *,
        stop_wanted: Callable[[], bool] = lambda: False,
        tick: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Run one optimizer step on rows [number * G, (number + 1) * G) of the stream; `tick` hears of each action."""
        train = self.plan.recipe.train
        batch_start = number * train.global_batch_rows
        num_tokens = self._stream.num_valid_tokens(batch_start, train.global_batch_rows)
        microbatches = self._microbatches(batch_start, num_tokens)
        learning_rate = learning_rate_at(train, number)
        clock = self._clock
        clock.start_step()
        timeline = Timeline(clock, tick=tick)
        loss = self._engine.run(microbatches, timeline)
        computed_s = clock.now_s()
        self._sync.reduce(timeline)
        totals = self._sync.totals(loss, timeline, stop=stop_wanted())
        synced_s = clock.now_s()
        if not (math.isfinite(totals.loss) and math.isfinite(totals.gradient_norm)):
            raise JobError(
                f"step {number}: loss {totals.loss}, gradient norm {totals.gradient_norm}",
                hint="lower learning_rate, lengthen warmup_steps or set clip_norm in the recipe",
            )
        self._sync.clip(totals.gradient_norm, train.clip_norm)
        self._update(learning_rate)
        clock.spend(self.stage_plan.optimizer_s)
        timeline.close_span("optimizer", None, synced_s)
        updated_s = clock.now_s()
        self._sync.gather(timeline)
        communication_s = synced_s - computed_s + clock.now_s() - updated_s
        clock.wait_until(synced_s + self._planned_update_s)
        step_s = clock.now_s()
        paced = clock if isinstance(clock, PacedClock) else None
        busy_s = timeline.seconds("F", "B", "W", "optimizer")
        event = StepEvent(
            rank=self.rank.rank,
            step=number,
            wall_s=time.time(),
            step_s=step_s,
            busy_s=busy_s,
            communication_s=communication_s,
            idle_s=max(0.0, step_s - busy_s - communication_s),
            loss=totals.loss,
            num_tokens=num_tokens,
            grad_norm=totals.gradient_norm,
            learning_rate=learning_rate,
            peak_memory_bytes=self._peak_memory_bytes(),
            real_s=paced.real_s() if paced else None,
            late_s=paced.late_s if paced else None,
        )
        return StepResult(event=event, spans=tuple(timeline.spans), stop=totals.stop)

    def evaluate(self, number: int) -> EvaluationEvent:
        """Loss of the held-out rows after step `number`."""
        batch_rows = self.plan.recipe.train.global_batch_rows
        loss, seconds = evaluate(
            held_out_batches(self._stream, self.replica, self._lane, batch_rows=batch_rows),
            engine=self._engine,
            sync=self._sync,
            clock=self._clock,
        )
        return EvaluationEvent(
            rank=self.rank.rank,
            step=number,
            wall_s=time.time(),
            loss=loss,
            num_tokens=self._stream.num_held_out * self._stream.seq_len,
            evaluation_s=seconds,
        )

    def compare(self, number: int) -> list[Event]:
        """Compare shared parameters with the ranks that hold them too, after step `number`; return what to tell of it."""
        repair = self.plan.recipe.train.repair
        found = drift.compare(self._shared, self.rank.rank, step=number, repair=repair)
        if found is None:
            return []
        ranks = self.plan.split.ranks
        warnings = [
            WarningEvent(
                rank=self.rank.rank,
                wall_s=found.wall_s,
                step=number + 1,
                message=drift.words(one, ranks, repaired=repair),
            )
            for one in found.drifts
        ]
        return [found, *warnings]

    def state(self) -> State:
        """What a checkpoint has to hold of this rank."""
        return State(
            self.stage, self._optimizer, parts=self._sync.parts, is_first=self._lane.is_first
        )

    def parameters_sha(self) -> str:
        """Hash over names and values of all parameters that this rank holds."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.stage.named_parameters()):
            digest.update(name.encode())
            digest.update(_bytes(parameter))
        return digest.hexdigest()

    def _microbatches(self, batch_start: int, num_tokens: int) -> dict[int, Microbatch]:
        """The lane's part of the global batch, by number; stages between the first and the last need no rows."""
        replica, stage = self.replica, self.stage_plan
        if not (stage.has_embedding or stage.has_head):
            return dict.fromkeys(self._lane.parts, Microbatch(None, 0.0))
        starts = {
            index: batch_start + replica.first_row + index * replica.microbatch_rows
            for index in self._lane.parts
        }
        return {
            index: Microbatch(
                self._stream.rows(start, replica.microbatch_rows),
                self._loss_scale(self._share(start, batch_start, num_tokens)),
            )
            for index, start in starts.items()
        }

    def _share(self, start: int, batch_start: int, num_tokens: int) -> MicrobatchShare:
        replica, replicas = self.replica, self.plan.split.replicas
        valid = self._stream.num_valid_tokens
        return MicrobatchShare(
            valid_tokens=valid(start, replica.microbatch_rows),
            batch_valid_tokens=num_tokens,
            rows=replica.microbatch_rows,
            batch_rows=self.plan.recipe.train.global_batch_rows,
            replica=self.rank.replica,
            replica_valid_tokens=valid(batch_start + replica.first_row, replica.num_rows),
            num_replicas=len(replicas),
            batch_microbatches=sum(other.num_microbatches for other in replicas),
        )

    def _update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.stage.zero_grad(set_to_none=True)  # of which it may update a part

    def _peak_memory_bytes(self) -> int | None:
        """Measured on a real device, the plan's figure on an emulated chip, else unknown."""
        if self.rank.emulated:
            return self.stage_plan.memory_bytes
        return peak_memory_bytes(self._device)


def planned_update_s(plan: Plan) -> float:
    """Seconds from the exchange of scalars, which all ranks leave together, to the end of the step."""
    recipe, split = plan.recipe, plan.split
    return update_s(
        split.ranks,
        split.replicas,
        links=plan.links,
        model=recipe.model,
        dtype=recipe.train.dtype,
    )


def find_stage(plan: Plan, rank: RankPlan) -> tuple[ReplicaPlan, StagePlan]:
    """Replica and stage of a rank.

    Raises:
        ConfigError: the plan puts the rank elsewhere.
    """
    replica = plan.split.replicas[rank.replica]
    stage = replica.stages[rank.stage]
    if rank.rank not in stage.ranks:
        raise ConfigError(
            f"plan: stage {rank.stage} of replica {rank.replica} has ranks {list(stage.ranks)},"
            f" need rank {rank.rank} among them",
            hint="write it again: hetrun plan",
        )
    return replica, stage


def _bytes(tensor: Tensor) -> bytes:
    """Raw bytes of a tensor; torch has no way for it without numpy, which a vendor's image may lack."""
    held = tensor.detach().cpu().contiguous()
    return ctypes.string_at(held.data_ptr(), held.numel() * held.element_size())
