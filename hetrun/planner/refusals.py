"""What is said where nothing fits or the batch does not come out even: which devices lack how much, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, permutations

from hetrun.errors import NoPlanError
from hetrun.model import GIB, MIB
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import ShapeMaker
from hetrun.planner.words import plural

_KIB = 1 << 10
_MOST_ORDERS = 24


def check_batch(problem: Problem) -> None:
    """Refuse a batch that no number of whole microbatches makes up."""
    reachable = {0}
    for rows in problem.row_choices:
        for total in range(rows, problem.batch_rows + 1):
            if total - rows in reachable:
                reachable.add(total)
    if problem.batch_rows not in reachable:
        raise NoPlanError(
            f"{problem.batch_rows} rows per step cannot be made of microbatches of"
            f" {list(problem.row_choices)} rows",
            hint="add a divisor of train.global_batch_rows to train.microbatch_rows",
        )


def no_microbatches(problem: Problem) -> NoPlanError:
    """Return the error of a batch that no replicas can share out."""
    hint = "add 1 to train.microbatch_rows, or change train.global_batch_rows"
    if problem.max_shapes is not None:
        hint += ", or raise plan.max_shapes"
    return NoPlanError(
        f"no whole microbatches of {list(problem.row_choices)} rows share out"
        f" {problem.batch_rows} rows",
        hint=hint,
    )


def shortage(maker: ShapeMaker) -> NoPlanError:
    """Return the error that names the group which lacks memory, how much, and what would help."""
    problem = maker.problem
    deep = [number for number, kind in enumerate(problem.kinds) if kind.lanes == 1]
    lean = {problem.places[number]: number for number in deep}  # the last of each group
    orders = islice(permutations(lean.values()), _MOST_ORDERS)
    lacking, kind_number, held = min(_lacking(maker, order) for order in orders)
    kind = problem.kinds[kind_number]
    have = "; ".join(
        f"{len(k.seats)} x {k.name} with {_size(k.limit_bytes or 0)} to use" for k in problem.groups
    )
    rows = problem.row_choices[0]
    knobs = ["add devices", "lower data.seq_len", "train in a smaller dtype"]
    if not problem.recompute:
        knobs.insert(0, "allow plan.recompute")
    elif not any(own.recompute for own in problem.kinds if own.is_like(kind)):
        again = "run `hetrun profile` again with this recipe"
        knobs.insert(0, f"{again}: recomputation is allowed and {kind.name} has no figures of it")
    if rows > 1:
        knobs.insert(0, "allow smaller train.microbatch_rows")
    if problem.max_stages < min(problem.num_devices, problem.model.num_layers):
        knobs.insert(0, f"raise plan.max_stages (now {problem.max_stages})")
    return NoPlanError(
        f"no split fits: {kind.name} lacks {_size(max(lacking, 1))} ({have}; together they"
        f" hold {held} of {problem.model.num_layers} layers with {plural(rows, 'row')} per microbatch)",
        hint=", or ".join(knobs),
    )


def _size(num_bytes: int) -> str:
    """Return bytes in the unit that fits."""
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / _KIB:.3g} KiB"


def _lacking(maker: ShapeMaker, order: Sequence[int]) -> tuple[int, int, int]:
    """Return bytes that the deepest pipeline in this order lacks, the tightest kind, and layers held."""
    problem = maker.problem
    stages = [
        kind
        for kind in order
        for _ in range(len(problem.kinds[kind].seats) // problem.kinds[kind].width)
    ][: problem.max_stages]
    rows = problem.row_choices[0]
    lacking = held = 0
    room: dict[int, int] = {}
    for index, kind in enumerate(stages):
        window = len(stages) - index
        spare = maker.spare_bytes(kind, rows, window=window, first=index == 0) or 0
        lacking += max(0, -spare)
        held += max(0, maker.cap(kind, rows, window=window, first=index == 0))
        room[kind] = min(room.get(kind, spare), spare)
    missing = max(0, problem.model.num_layers - held)
    lacking += missing * maker.layer_bytes(stages[-1], rows, window=1)
    tightest = min(room, key=lambda kind: (room[kind], kind))
    return lacking, tightest, min(held, problem.model.num_layers)
