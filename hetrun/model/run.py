"""What a run leaves behind: events of the ranks, the outcome of launch, the report's answer.

Each line of `runs/<id>/events/rank-NNNN.jsonl` is one event: `{"event": "step", ...}` with the fields below.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.model.base import SCHEMA_VERSION, Noun
from hetrun.model.decoder import ModelSpec
from hetrun.model.plan import Baseline, Cost, Efficiency
from hetrun.model.recipe import TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent(Noun):
    """A rank is up and agrees with all others on the plan."""

    event: str = "start"
    rank: int
    host: str
    pid: int
    wall_s: float  # seconds since the epoch, on that host's clock
    torch_version: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Noun):
    """One optimizer step. All *_s but wall_s are on the run's clock: modelled time if the plan is emulated."""

    event: str = "step"
    rank: int
    step: int  # from 0
    wall_s: float  # seconds since the epoch when the step ended
    step_s: float  # start of the first action to end of the optimizer
    busy_s: float  # forward, backward, optimizer
    communication_s: float  # gradient sync and exposed waiting for it
    idle_s: float  # waiting for inputs of other stages
    loss: float  # mean over the valid tokens of the global batch; equal on all ranks
    num_tokens: int  # valid tokens of the global batch
    grad_norm: float
    learning_rate: float
    peak_memory_bytes: int | None = None
    real_s: float | None = None  # paced runs: real seconds of the step
    late_s: float | None = None  # paced runs: most that real time was behind the pace in the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Noun):
    """One action of a traced step; seconds from the start of that step on the run's clock."""

    kind: str  # "F", "B", "W", "sync", "optimizer"
    microbatch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent(Noun):
    """All actions of one step on one rank; written for a few steps only."""

    event: str = "trace"
    rank: int
    step: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent(Noun):
    """A rank raised; its last words."""

    event: str = "error"
    rank: int
    host: str
    wall_s: float
    step: int | None
    kind: str  # exception class
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent(Noun):
    """A rank did all its steps. `parameters_sha` is a hash over the final parameters that it holds."""

    event: str = "end"
    rank: int
    wall_s: float
    steps: int
    parameters_sha: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent(Noun):
    """The loss of the held-out rows after a step; equal on all ranks, whatever the plan."""

    event: str = "evaluation"
    rank: int
    step: int  # the last one before it, from 0
    wall_s: float
    loss: float  # mean over the tokens of all held-out rows
    num_tokens: int
    evaluation_s: float  # on the run's clock; no part of any step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Noun):
    """A checkpoint is complete on all hosts; seconds are real ones, on emulated chips too, and no part of any step."""

    event: str = "checkpoint"
    rank: int
    step: int  # steps done, as in the folder's name
    wall_s: float
    blocked_s: float  # training stood still on this rank: waiting for the save before, and the copy
    saved_s: float  # from then until all hosts had it, beside training
    num_bytes: int  # written by this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(Noun):
    """Ranks that hold the same parameters, or the same slices of them, hold different values."""

    unit: str  # such as "layer.3"
    groups: tuple[tuple[int, ...], ...]  # of ranks that agree, that of the lowest rank first
    largest: float | None  # difference of an element between any two; None where one is not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonEvent(Noun):
    """Parameters were compared between the ranks that hold them; told for each by the lowest of its ranks."""

    event: str = "comparison"
    rank: int
    step: int  # the last one before it, from 0
    wall_s: float
    compared_s: float  # real seconds, on emulated chips too, and no part of any step
    num_parts: int  # units, or slices of units, that this rank tells of
    drifts: tuple[Drift, ...]
    repaired: bool  # all took the values of the lowest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningEvent(Noun):
    """Something that the user should know, and training goes on."""

    event: str = "warning"
    rank: int
    wall_s: float
    step: int  # steps done
    message: str


Event = (
    StartEvent
    | StepEvent
    | TraceEvent
    | EvaluationEvent
    | CheckpointEvent
    | ComparisonEvent
    | WarningEvent
    | ErrorEvent
    | EndEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex(Noun):
    """index.json of a checkpoint's folder, written last: what the folder is, and which files are whole."""

    format_version: int = 1
    run: str  # a random word: parts with the same word and step belong together
    step: int  # optimizer steps done
    next_row: int  # of the sample stream
    text_sha: str  # of the training text
    seq_len: int
    plan_sha: str
    learning_rate: float  # of the last step
    model: ModelSpec
    train: TrainSpec  # with the seed
    files: dict[str, int]  # name -> bytes
    weights: str | None = None  # folder of the weights that training began from


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Noun):
    """One thing that went wrong, with the time on the controller's clock."""

    host: str
    rank: int | None
    when_s: float
    what: str  # such as "raised ValueError: ...", "killed by signal 9"
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Noun):
    """One restart of a run: what ended the attempt before, and the newest checkpoint that this launch had written by then."""

    number: int  # 1 is the first restart
    when_s: float
    exit_code: int  # as it would have been without a restart
    failure: Failure | None  # its root cause
    checkpoint_step: int | None
    left_out: tuple[str, ...] = ()  # lost hosts, which the plan does without from here on

    @property
    def origin(self) -> str:
        """Where training goes on, in words."""
        step = self.checkpoint_step
        point = "the newest checkpoint" if step is None else f"the checkpoint of step {step}"
        return f"{point} without {', '.join(self.left_out)}" if self.left_out else point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome(Noun):
    """launch.json in the run directory; the first failure is the root cause, the rest followed."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    plan_sha: str
    started: str  # ISO 8601, UTC
    wall_s: float
    exit_code: int
    status: str  # "done", "failed", "interrupted", "lost contact", "hang", "no progress"
    failures: tuple[Failure, ...] = ()
    warnings: tuple[str, ...] = ()
    not_clean: tuple[str, ...] = ()  # hosts that could not be confirmed empty
    skipped: tuple[str, ...] = ()  # checks of preflight that the user asked to pass over
    restarts: tuple[Restart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve(Noun):
    """Loss of the global batch at each step."""

    first: float
    last: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss(Noun):
    """Loss of the held-out rows after a step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse(Noun):
    """Mean share of a step that one rank spent busy, communicating and idle; the three add up to 1."""

    rank: int
    host: str
    vendor: str
    replica: int
    stage: int
    num_layers: int
    busy: float
    communication: float
    idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse(Noun):
    """What one stage held, and how busy its ranks were on average (None where none reported)."""

    replica: int
    stage: int
    vendor: str
    models: tuple[str, ...]
    ranks: tuple[int, ...]
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    rows: int  # of each global batch
    microbatch_rows: int
    window: int
    memory_bytes: int  # predicted
    memory_limit_bytes: int | None
    peak_memory_bytes: int | None  # largest that one of its ranks reported
    busy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing(Noun):
    """How well real time followed modelled time in a paced run; the first step is left out."""

    pace: float  # real seconds wanted per modelled one
    error: float  # median over steps of real_s / (pace x step_s) - 1, of the slowest rank
    late_s: float  # most that a rank was behind


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace(Noun):
    """Timeline of one rank in the traced step."""

    rank: int
    step: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSplitReport(Noun):
    """The naive split, simulated with the same cost model."""

    efficiency: Efficiency
    cost: Cost
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(Noun):
    """report.json: the answer of `hetrun report`. `kind` says on which clock the times are."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    recipe: str
    kind: str  # "measured" or "modelled": of tokens_per_s, step_s, ranks, timeline
    status: str
    steps: int
    loss: LossCurve
    tokens_per_s: float
    step_s: float  # median, first step left out
    predicted_step_s: float
    prediction_error: float  # step_s / predicted_step_s - 1
    wall_s: float
    efficiency: Efficiency
    even_split: EvenSplitReport | None
    even_split_why: str
    predicted: Cost
    bound_s: float
    gap: float
    gap_reason: str
    baselines: tuple[Baseline, ...]
    verdict: str
    ranks: tuple[RankUse, ...]
    timeline: tuple[RankTrace, ...]
    warnings: tuple[str, ...] = ()
    started: str = ""  # ISO 8601, UTC; empty where launch left no record
    shape: str = ""  # such as "2 replicas x 2 stages"
    planned_steps: int = 0
    first_step: int = 0  # of `loss`
    global_batch_rows: int = 0
    predicted_efficiency: Efficiency | None = None
    stages: tuple[StageUse, ...] = ()
    failures: tuple[Failure, ...] = ()  # the first is the root cause
    skipped: tuple[str, ...] = ()  # checks of preflight that the user asked to pass over
    idle_devices: tuple[str, ...] = ()
    runner_up: str = ""
    held_out: tuple[HeldOutLoss, ...] = ()
    num_comparisons: int = 0  # steps after which shared parameters were compared
    num_drifts: int = 0  # parts that differed, over all comparisons
    pacing: Pacing | None = None  # None where the run was not paced
