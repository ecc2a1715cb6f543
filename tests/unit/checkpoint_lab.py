"""A small model in a checkpoint's folder, without any training."""

from __future__ import annotations

from pathlib import Path

import torch

from hetrun.model import CheckpointIndex, Dtype, ModelSpec, StagePlan, TrainSpec
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime.network import Stage
from hetrun.runtime.precision import TORCH_DTYPE
from hetrun.runtime.tensor_parallel import Share, share_layers

MODEL = ModelSpec(
    num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=99,
    rope_theta=500.0, norm_eps=1e-4,
)  # fmt: skip
SEQ_LEN = 24


def _all_units(model: ModelSpec) -> Stage:
    plan = StagePlan(
        ranks=(0,), first_layer=0, num_layers=model.num_layers, has_embedding=True, has_head=True,
        window=1, forward_s=0, backward_s=0, send_s=0, optimizer_s=0, memory_bytes=0,
        memory_limit_bytes=None,
    )  # fmt: skip
    return Stage(model, plan, seq_len=SEQ_LEN)


def shared_stage(place: int) -> Stage:
    """All units on one stage, of whose layers two ranks have a half each."""
    stage = _all_units(MODEL)
    share_layers(stage, Share(place, 2, None))
    return stage.initialise(seed=5, device=torch.device("cpu"), dtype=torch.float64)


def whole_stage(model: ModelSpec = MODEL, dtype: Dtype = Dtype.FP64) -> Stage:
    """All units on one stage; norms differ from their first value, so that none can be mixed up."""
    stage = _all_units(model).initialise(
        seed=5, device=torch.device("cpu"), dtype=TORCH_DTYPE[dtype]
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in stage.named_parameters():
        noise = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data.add_(noise)
        else:
            parameter.data.mul_(8.0)  # far from uniform logits
    return stage


def an_index(
    model: ModelSpec = MODEL, dtype: Dtype = Dtype.FP64, **changes: object
) -> CheckpointIndex:
    """What a folder says of itself."""
    train = TrainSpec(steps=9, global_batch_rows=4, dtype=dtype)
    known: dict[str, object] = {
        "run": "word", "step": 6, "next_row": 24, "text_sha": "text", "seq_len": SEQ_LEN,
        "plan_sha": "plan", "learning_rate": 0.1, "model": model, "train": train, "files": {},
    }  # fmt: skip
    return CheckpointIndex(**{**known, **changes})  # type: ignore[arg-type]


def write_folder(
    folder: Path, tensors: dict[str, torch.Tensor], index: CheckpointIndex, *, rank: int = 0
) -> Path:
    """Write a step folder with one shard."""
    folder.mkdir(parents=True)
    name = files.shard_name(rank)
    size = files.write_shard(folder / name, tensors)
    files.write_index(folder, CheckpointIndex(**{**vars_of(index), "files": {name: size}}))  # type: ignore[arg-type]
    return folder


def vars_of(index: CheckpointIndex) -> dict[str, object]:
    """Fields of an index."""
    return {name: getattr(index, name) for name in index.__slots__}


def tensors_of(stage: Stage) -> dict[str, torch.Tensor]:
    """Parameters by name."""
    return {name: p.detach().clone() for name, p in stage.named_parameters()}
