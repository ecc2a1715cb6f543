"""A checkpoint as a model folder for Hugging Face: `python -m hetrun.runtime.export_hf CHECKPOINT... OUT`.

CHECKPOINT is a step-N folder; where hosts have directories of their own, give the folders of all of them, copied to one
machine. OUT gets config.json and model.safetensors with the names that Hugging Face publishes: transformers' Llama for our
own decoder, the model's own otherwise. Moments of the optimizer stay behind. It needs torch, and transformers for models
that it builds.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetrun.arch import num_kv_heads
from hetrun.errors import ConfigError, HetrunError, StorageError
from hetrun.model import CheckpointIndex, Dtype
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime import hf_export
from hetrun.runtime.checkpoint_files import BadCheckpointError, Piece
from hetrun.runtime.hf_names import llama_names

log = logging.getLogger(__name__)

_DTYPE = {
    Dtype.FP64: "float64",
    Dtype.FP32: "float32",
    Dtype.BF16: "bfloat16",
    Dtype.BF16_MIXED: "float32",
}


def export(checkpoints: Sequence[Path], out: Path) -> None:
    """Write the model of a checkpoint to a new folder.

    Raises:
        BadCheckpointError: the folders are damaged, of different saves, or some parameter is in none of them.
        PreflightError: the model takes transformers, which is missing or too old.
        StorageError: a folder cannot be read, or `out` cannot be written or is there already.
    """
    index, pieces = _read(checkpoints)
    model = index.model
    theirs = None if model.config is None else hf_export.Published(model)
    names = llama_names(model) if theirs is None else theirs.names
    missing = [name for name in names if name not in pieces]
    if missing:
        raise BadCheckpointError(
            f"{', '.join(map(str, checkpoints))}: {missing[0]} and {len(missing) - 1} more are in none of them",
            hint="give the step folders of all hosts",
        )
    tensors = {hf_name: files.assemble(pieces[name]) for name, hf_name in names.items()}
    config = hf_config(index)
    if theirs is not None:
        tensors = theirs.tensors(tensors, index.weights)
        config = theirs.config | {"torch_dtype": config["torch_dtype"]}
    part = out.with_name(f"{out.name}.tmp")
    try:
        if out.exists():
            raise StorageError(f"{out} is there already", hint="name a folder that is not there")
        part.mkdir(parents=True, exist_ok=True)
        files.write_shard(part / "model.safetensors", tensors, metadata={"format": "pt"})
        text = json.dumps(config, indent=1) + "\n"
        (part / "config.json").write_text(text, encoding="utf-8")
        part.rename(out)
    except OSError as error:
        raise StorageError(f"cannot write {part}: {error.strerror}") from error


def hf_config(index: CheckpointIndex) -> dict[str, Any]:
    """config.json; positions are those that were trained."""
    model = index.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": model.hidden_size // model.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": index.seq_len,
        "torch_dtype": _DTYPE[index.train.dtype],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def main() -> int:
    """Run the command line; return its exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        if len(sys.argv) < 3:
            raise ConfigError(
                f"got {len(sys.argv) - 1} arguments, need CHECKPOINT... OUT",
                hint="python -m hetrun.runtime.export_hf /data/run1/step-100 my-model",
            )
        *checkpoints, out = map(Path, sys.argv[1:])
        export(checkpoints, out)
    except HetrunError as error:
        log.error("error: %s", error)  # noqa: TRY400 - the message says all
        if error.hint:
            log.error("hint: %s", error.hint)  # noqa: TRY400
        return int(error.exit_code)
    log.info("saved: %s", out)
    return 0


def _read(checkpoints: Sequence[Path]) -> tuple[CheckpointIndex, dict[str, list[Piece]]]:
    """Read the index of a save and the pieces of all its folders."""
    found = [(folder, files.read_index(folder)) for folder in checkpoints]
    first = found[0][1]
    pieces: dict[str, list[Piece]] = {}
    for folder, index in found:
        if (index.run, index.step) != (first.run, first.step):
            raise BadCheckpointError(
                f"{folder}: step {index.step} of run {index.run}, {checkpoints[0]} is step {first.step}"
                f" of run {first.run}"
            )
        for name, parts in files.read_pieces(folder, index).items():
            pieces.setdefault(name, []).extend(parts)
    return first, pieces


if __name__ == "__main__":
    sys.exit(main())
