"""What to train. Reading the YAML is left to `hetrun/recipe.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hetrun.model.base import ENV_NAME, Noun, check_name, check_text, need
from hetrun.model.decoder import ModelSpec
from hetrun.model.limits import PlanLimits

MAX_STEPS = 10**9
MAX_BATCH_ROWS = 1 << 20


UNHURRIED_S = 300.0  # without movement, where nothing says how long a step takes


class DataKind(str, Enum):
    """Where training text comes from."""

    STDLIB_SOURCE = "stdlib_source"  # the Python sources that every interpreter carries
    TEXT = "text"  # a file, or every .txt below a folder, on every host
    JSONL = "jsonl"  # a file, or every .jsonl below a folder: one JSON object per line
    TOKENS = "tokens"  # one file of token ids
    MEGATRON = "megatron"  # PATH.bin and PATH.idx


class TokenDtype(str, Enum):
    """Number format of a token file that does not say it itself; little-endian."""

    UINT16 = "uint16"
    UINT32 = "uint32"


class Dtype(str, Enum):
    """Number format of parameters and arithmetic."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    BF16_MIXED = (
        "bf16-mixed"  # matrices, activations and messages; parameters, gradients, moments fp32
    )


class Decay(str, Enum):
    """How the learning rate falls after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec(Noun):
    """Rows of `seq_len` tokens, cut from one stream: all documents in order, joined. Paths are those on every host."""

    seq_len: int
    kind: DataKind = DataKind.STDLIB_SOURCE
    path: str | None = None  # for every kind but stdlib_source
    field: str | None = None  # kind jsonl: which field of each object is the text
    tokenizer: str | None = None  # tokenizer.json or a sentencepiece .model; bytes when None
    end_token: str | None = None  # after each document; None: the .model's own
    token_dtype: TokenDtype | None = None  # kind tokens: of a file without a header
    held_out_rows: int = 0  # the last rows of the stream, which are never trained on

    def __post_init__(self) -> None:
        kind = self.kind
        need(self.seq_len >= 2, f"data: seq_len {self.seq_len}, need at least 2")
        need(
            (self.path is None) == (kind is DataKind.STDLIB_SOURCE),
            f"data: path {self.path!r} with kind {kind.value}; kind stdlib_source takes none, others need one",
        )
        need(
            self.path is None or self.path.startswith("/"),
            f"data: path {self.path!r}, need an absolute path: it is looked up on every host",
        )
        need(
            (self.field is None) == (kind is not DataKind.JSONL),
            f"data: field {self.field!r} with kind {kind.value}; kind jsonl needs the field of the text, others take none",
        )
        need(
            self.token_dtype is None or kind is DataKind.TOKENS,
            f"data: token_dtype with kind {kind.value}; only kind tokens takes it",
        )
        need(self.held_out_rows >= 0, f"data: held_out_rows {self.held_out_rows}, need 0 or more")
        self._check_tokenizer()

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are the bytes of a text."""
        return self.tokenizer is None and self.kind not in (DataKind.TOKENS, DataKind.MEGATRON)

    def _check_tokenizer(self) -> None:
        need(
            self.tokenizer is None or self.kind in (DataKind.TEXT, DataKind.JSONL),
            f"data: tokenizer with kind {self.kind.value}; kinds text and jsonl take one",
        )
        need(
            self.tokenizer is None
            or (self.tokenizer.startswith("/") and self.tokenizer.endswith((".json", ".model"))),
            f"data: tokenizer {self.tokenizer!r}, need the absolute path of a tokenizer.json or a .model",
        )
        need(
            self.end_token is None or self.tokenizer is not None,
            f"data: end_token {self.end_token!r} without a tokenizer; documents of bytes end with the last id",
        )
        need(
            self.end_token is not None
            or self.tokenizer is None
            or not self.tokenizer.endswith(".json"),
            "data: end_token is missing: a tokenizer.json does not say which token ends a document",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec(Noun):
    """One AdamW training run; `global_batch_rows` rows per optimizer step, whatever the plan."""

    steps: int
    global_batch_rows: int
    microbatch_rows: tuple[int, ...] = (1,)  # sizes that the planner may choose from
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    decay: Decay = (
        Decay.CONSTANT
    )  # of the learning rate, from the end of warm-up to that of training
    final_fraction: float = 0.0  # of learning_rate, where a decay ends
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    seed: int = 0
    dtype: Dtype = Dtype.FP32
    eval_every: int | None = None  # steps between losses of the held-out rows; None: never
    compare_every: int | None = None  # steps between comparisons of what several ranks hold
    repair: bool = False  # where they differ, all take those of the lowest rank

    def __post_init__(self) -> None:
        need(1 <= self.steps <= MAX_STEPS, f"train: steps {self.steps}, need 1 to {MAX_STEPS}")
        need(
            1 <= self.global_batch_rows <= MAX_BATCH_ROWS,
            f"train: global_batch_rows {self.global_batch_rows}, need 1 to {MAX_BATCH_ROWS}",
        )
        need(
            bool(self.microbatch_rows)
            and all(1 <= rows <= self.global_batch_rows for rows in self.microbatch_rows),
            f"train: microbatch_rows {list(self.microbatch_rows)}, need 1 to {self.global_batch_rows}",
        )
        for what in ("warmup_steps", "weight_decay", "seed"):
            need(getattr(self, what) >= 0, f"train: {what} {getattr(self, what)}, need 0 or more")
        for what in ("beta1", "beta2"):
            need(
                0 <= getattr(self, what) < 1,
                f"train: {what} {getattr(self, what)}, need 0 to below 1",
            )
        need(self.eps > 0, f"train: eps {self.eps}, need more than 0")
        need(self.learning_rate > 0, f"train: learning_rate {self.learning_rate}, need more than 0")
        self._check_decay()
        need(
            self.clip_norm is None or self.clip_norm > 0,
            f"train: clip_norm {self.clip_norm}, need more than 0",
        )
        for what in ("eval_every", "compare_every"):
            every = getattr(self, what)
            need(every is None or every >= 1, f"train: {what} {every}, need at least 1")
        need(
            self.compare_every is not None or not self.repair,
            "train: repair without compare_every; what differs is not known",
        )

    def _check_decay(self) -> None:
        need(
            0 <= self.final_fraction <= 1,
            f"train: final_fraction {self.final_fraction}, need 0 to 1",
        )
        if self.decay is Decay.CONSTANT:
            need(
                self.final_fraction == 0,
                f"train: final_fraction {self.final_fraction} with decay constant; linear and cosine take one",
            )
            return
        need(
            self.warmup_steps < self.steps,
            f"train: warmup_steps {self.warmup_steps} leave no step for decay {self.decay.value};"
            f" need fewer than steps {self.steps}",
        )


class LostHost(str, Enum):
    """What is done about a host that was lost, once there is a checkpoint to go on from."""

    WAIT = "wait"  # it has host_wait_s to come back
    REPLAN = "replan"  # the others go on without it, under a new plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec(Noun):
    """How a run is started and watched. `env` goes to every rank; `secrets` names variables of the controller."""

    start_timeout_s: float = 120.0
    # no progress on any rank for so long is a hang; None: 60 s or 5 steps
    step_timeout_s: float | None = None
    lease_s: float = 15.0  # a host that hears nothing for so long stops its ranks
    stop_grace_s: float = 5.0
    save_grace_s: float = 60.0  # after the first Ctrl-C, for the step and its checkpoint
    max_restarts: int = 3  # from the newest checkpoint, after a failure; only with `checkpoint`
    host_wait_s: float = 120.0  # before a restart, for a host that was lost
    on_lost_host: LostHost = LostHost.WAIT
    pace: float | None = None  # emulated chips: real seconds per modelled one; None: as they come
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what in ("start_timeout_s", "step_timeout_s", "stop_grace_s", "save_grace_s"):
            value = getattr(self, what)
            need(value is None or value > 0, f"launch: {what} {value}, need more than 0")
        for what in ("max_restarts", "host_wait_s"):
            need(getattr(self, what) >= 0, f"launch: {what} {getattr(self, what)}, need 0 or more")
        need(
            self.on_lost_host is LostHost.WAIT or self.max_restarts > 0,
            "launch: on_lost_host replan with max_restarts 0; need at least one restart",
        )
        need(self.pace is None or self.pace > 0, f"launch: pace {self.pace}, need more than 0")
        need(5 <= self.lease_s <= 3600, f"launch: lease_s {self.lease_s}, need 5 to 3600")
        for key in (*self.env, *self.secrets):
            need(
                bool(ENV_NAME.fullmatch(key)),
                f"launch: variable {key!r}, need letters, digits and '_'",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(Noun):
    """Where and how often the state of training is saved. Paths are those on every host."""

    dir: str
    every_steps: int
    keep: int = 2  # newest checkpoints
    shared: bool = False  # `dir` is one shared file system; else every host has its own
    resume: str = "auto"  # newest complete one in `dir`, "never", or from this step-N folder where `dir` has none

    def __post_init__(self) -> None:
        need(
            self.dir.startswith("/"),
            f"checkpoint: dir {self.dir!r}, need an absolute path: it is written on every host",
        )
        check_text("checkpoint: dir", self.dir)
        for what in ("every_steps", "keep"):
            need(getattr(self, what) >= 1, f"checkpoint: {what} {getattr(self, what)}, need >= 1")
        need(
            self.resume in ("auto", "never") or self.resume.startswith("/"),
            f"checkpoint: resume {self.resume!r}, need auto, never, or the absolute path of a step-N folder",
        )
        check_text("checkpoint: resume", self.resume)
        need(
            not self.resume.startswith(self.dir.rstrip("/") + "/"),
            f"checkpoint: resume {self.resume!r} lies in dir: its newest goes on anyway; to go back, name another dir",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Noun):
    """What to train."""

    name: str
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    plan: PlanLimits = field(default_factory=PlanLimits)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    checkpoint: CheckpointSpec | None = None  # None: nothing is saved
    weights: str | None = (
        None  # folder of safetensors on every host to begin from; None: from scratch
    )

    def __post_init__(self) -> None:
        check_name("recipe", self.name)
        check_text("weights", self.weights)
        need(
            self.weights is None or self.weights.startswith("/"),
            f"weights: {self.weights!r}, need an absolute path: it is looked up on every host",
        )
        need(
            self.launch.on_lost_host is LostHost.WAIT or self.checkpoint is not None,
            "launch: on_lost_host replan without checkpoint; need one to go on from",
        )
        need(
            self.train.eval_every is None or self.data.held_out_rows >= 1,
            f"train: eval_every {self.train.eval_every} without data.held_out_rows; need rows to evaluate on",
        )
