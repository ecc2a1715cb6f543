"""Finds the newest complete checkpoint over all hosts and gives every rank its part of it, whatever plan wrote it.

One rank of each host looks into the directory and tells all others what is there; all choose alike. A rank reads what
its own host has; the rest comes from the looking rank of a host that has it. Saving is left to `checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetrun.errors import ConfigError, HetrunError, StorageError
from hetrun.model import (
    CheckpointIndex,
    CheckpointSpec,
    Event,
    Plan,
    RankPlan,
    TrainSpec,
    WarningEvent,
    plan_sha,
)
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime.boxes import Box, box_of, covers
from hetrun.runtime.checkpoint import Checkpoints, domain_of
from hetrun.runtime.checkpoint_exchange import Exchange
from hetrun.runtime.checkpoint_files import BadCheckpointError
from hetrun.runtime.checkpoint_load import Sources, load
from hetrun.runtime.job import decode
from hetrun.runtime.state import State
from hetrun.schedule.holders import lost_with

_SAME = ("seed", "global_batch_rows", "dtype")  # of train: another value is another run
_SEEN_WITHIN_S = 10.0  # a shared file system may show new files late


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint on one host: its index, and which parts of which tensors are there."""

    folder: Path
    index: CheckpointIndex
    parts: Mapping[str, Sequence[Box]]

    @property
    def key(self) -> tuple[int, str]:
        """Parts with the same key belong together; the newest is the largest."""
        return self.index.step, self.index.run


@dataclass(frozen=True, slots=True)
class _Looked:
    """What one host has; `problems` are folders that cannot be used."""

    found: tuple[_Found, ...]
    problems: tuple[str, ...]


def open_checkpoints(
    plan: Plan, rank: RankPlan, *, state: State, text_sha: str, write: Callable[[Event], None]
) -> Checkpoints | None:
    """Load the checkpoint to resume from, if there is one, and return the object that saves; None without a recipe for it.

    Every rank must call it at the same point. `text_sha` is of the training text.

    Raises:
        BadCheckpointError: nothing complete is there although something is, or it is of another run.
        ConfigError: the directory is shared and the recipe says no, or the other way round; or it is of another run.
        StorageError: a directory cannot be used.
    """
    spec = plan.recipe.checkpoint
    if spec is None:
        return None
    exchange = Exchange()
    looks = {host: ranks[0] for host, ranks in _by_host(plan).items()}
    word = _check_directories(spec, rank, looks, exchange)
    looked = _look_everywhere(spec, rank, looks, exchange)
    needed = [_boxes(said) for said in exchange.all_say(_numbers(state.needs))]
    about = CheckpointIndex(
        run=word, step=0, next_row=0, text_sha=text_sha, seq_len=plan.recipe.data.seq_len,
        plan_sha=plan_sha(plan), learning_rate=0.0, model=plan.recipe.model,
        train=plan.recipe.train, files={}, weights=plan.recipe.weights,
    )  # fmt: skip
    key, warnings = _choose(spec, looked, needed)
    if key is not None:
        parts = {
            host: part for host, there in looked.items() for part in there.found if part.key == key
        }
        for part in parts.values():
            _check_fits(part, about)
        load(rank, Sources.of(parts, looks), needed=needed, state=state, exchange=exchange)
        about = replace(about, step=key[0])
    for host in looks if len(looks) > 1 else ():
        if units := lost_with(plan, spec, {host}):
            warnings.append(
                f"if host {host} is lost, so are {_short(units)} of all checkpoints: no other host holds all of them;"
                " a shared file system with checkpoint.shared: true would keep them"
            )
    if rank.rank == 0:
        for text in warnings:
            write(WarningEvent(rank=0, wall_s=time.time(), step=about.step, message=text))
    domain = domain_of(plan, spec, rank.rank)
    return Checkpoints(
        spec, rank=rank.rank, domain=domain, state=state, exchange=exchange, about=about
    )


def _by_host(plan: Plan) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank in plan.split.ranks:
        ranks.setdefault(rank.host, []).append(rank.rank)
    return ranks


def _check_directories(
    spec: CheckpointSpec, rank: RankPlan, looks: Mapping[str, int], exchange: Exchange
) -> str:
    """Make the directory, and find out which hosts see the same one. Return a random word, the same on all ranks."""
    folder = Path(spec.dir)
    is_looking = rank.rank in looks.values()
    cleans = rank.rank == min(looks.values()) if spec.shared else is_looking
    word = os.urandom(8).hex()
    mark = folder / f".host-{rank.rank}-{word}"
    failure = ""
    if is_looking:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if cleans:
                files.remove_unfinished(folder)
            mark.touch()
        except OSError as error:
            failure = f"{rank.host}: cannot use checkpoint.dir {spec.dir}: {error.strerror}"
    said = exchange.all_say([mark.name if is_looking else "", failure])
    failures = [words for _, words in said if words]
    try:
        if failures:
            raise StorageError(
                failures[0], hint="choose another checkpoint.dir, or make room and give permission"
            )
        marks = {name for name, _ in said if name}
        seen = _see(folder, marks, all_of_them=spec.shared) if is_looking else None
        counts = [count for count in exchange.all_say(seen) if count is not None]
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)
    _check_sharing(spec, counts, num_hosts=len(looks))
    words: list[str] = exchange.all_say(word)
    return words[0]


def _see(folder: Path, marks: set[str], *, all_of_them: bool) -> int:
    """Count the hosts whose marks are here; wait a while where all of them should be."""
    end_s = time.monotonic() + _SEEN_WITHIN_S
    while True:
        seen = len(marks & {path.name for path in folder.iterdir()})
        if seen == len(marks) or not all_of_them or time.monotonic() > end_s:
            return seen
        time.sleep(0.2)


def _check_sharing(spec: CheckpointSpec, counts: Sequence[int], *, num_hosts: int) -> None:
    if spec.shared and min(counts) < num_hosts:
        raise ConfigError(
            f"checkpoint.dir {spec.dir}: not all of the {num_hosts} hosts see the same directory",
            hint="write checkpoint.shared: false, or mount the same file system on all hosts",
        )
    if not spec.shared and max(counts) > 1:
        raise ConfigError(
            f"checkpoint.dir {spec.dir}: {max(counts)} hosts see the same directory",
            hint="write checkpoint.shared: true",
        )


def _look_everywhere(
    spec: CheckpointSpec, rank: RankPlan, looks: Mapping[str, int], exchange: Exchange
) -> dict[str, _Looked]:
    """What each host has, told to all ranks."""
    mine: dict[str, Any] | None = None
    if rank.rank in looks.values():
        mine = {"found": [], "problems": []}
        for folder in _folders(spec):
            try:
                index = files.read_index(folder)
                pieces = files.read_pieces(folder, index)
            except HetrunError as error:
                mine["problems"].append(f"{rank.host}: {error.message}")
                continue
            parts = {name: [piece.box for piece in here] for name, here in pieces.items()}
            mine["found"].append([str(folder), asdict(index), _numbers(parts)])
    said = exchange.all_say(mine)
    return {
        host: _Looked(
            found=tuple(
                _Found(Path(folder), decode(CheckpointIndex, index, where=folder), _boxes(parts))
                for folder, index, parts in said[looking]["found"]
            ),
            problems=tuple(said[looking]["problems"]),
        )
        for host, looking in looks.items()
    }


def _folders(spec: CheckpointSpec) -> list[Path]:
    """Folders to look at: those in the directory, and the one that the recipe names."""
    folders = [path for _, path in sorted(files.step_folders(Path(spec.dir)).items())]
    if spec.resume.startswith("/") and (Path(spec.resume) / files.INDEX).is_file():
        folders.append(Path(spec.resume))
    return folders


def _choose(
    spec: CheckpointSpec,
    looked: Mapping[str, _Looked],
    needed: Sequence[Mapping[str, Sequence[Box]]],
) -> tuple[tuple[int, str] | None, list[str]]:
    """The newest checkpoint that is complete over all hosts, and warnings of what is passed over; None to begin at 0.

    Raises:
        ConfigError: the directory must be empty and is not.
        BadCheckpointError: there are some, and none is complete; or the one that the recipe names is not there.
    """
    problems = [problem for host in looked.values() for problem in host.problems]
    there: dict[tuple[int, str], dict[str, set[Box]]] = {}
    for host in looked.values():
        for part in host.found:
            parts = there.setdefault(part.key, {})
            for name, boxes in part.parts.items():
                parts.setdefault(name, set()).update(boxes)
    if spec.resume == "never" and (there or problems):
        raise ConfigError(
            f"checkpoint.dir {spec.dir} holds checkpoints, and checkpoint.resume is never",
            hint="name another checkpoint.dir, or remove them",
        )
    lacks = {key: _missing(parts, needed) for key, parts in there.items()}
    best = max((key for key, missing in lacks.items() if not missing), default=None)
    for (step, run), missing in sorted(lacks.items()):
        if missing and (best is None or (step, run) > best):
            problems.append(f"the checkpoint of step {step} lacks {_short(missing)}")
    if best is None and (problems or spec.resume.startswith("/")):
        raise BadCheckpointError(
            f"no complete checkpoint to resume from: {problems[-1] if problems else spec.resume + ' is not there'}",
            hint="bring back the host that has the rest, or copy its folders; to begin at step 0, name another"
            " checkpoint.dir",
        )
    return best, [f"{problem}, passed over" for problem in problems]


def _check_fits(part: _Found, about: CheckpointIndex) -> None:
    """Compare a checkpoint with the recipe.

    Raises:
        BadCheckpointError: it is of another model, text or batch, or has no step left.
    """
    there = part.index
    pairs: dict[str, tuple[object, object]] = {
        "model": (there.model, about.model),
        "seq_len": (there.seq_len, about.seq_len),
        "training text": (there.text_sha, about.text_sha),
    }
    for key in _SAME:
        pairs[f"train.{key}"] = (getattr(there.train, key), getattr(about.train, key))
    for what, (has, needs) in pairs.items():
        if has != needs:
            raise BadCheckpointError(
                f"{part.folder}: another {what}: {str(has)[:60]}, the recipe has {str(needs)[:60]}",
                hint="name another checkpoint.dir for another run",
            )
    _check_steps(part, about.train)


def _check_steps(part: _Found, train: TrainSpec) -> None:
    if part.index.next_row != part.index.step * train.global_batch_rows:
        raise BadCheckpointError(
            f"{part.folder}: row {part.index.next_row} at step {part.index.step}"
        )
    if part.index.step >= train.steps:
        raise BadCheckpointError(
            f"{part.folder}: {part.index.step} steps are done, the recipe has train.steps {train.steps}",
            hint="raise train.steps to go on, or name another checkpoint.dir to begin anew",
        )


def _missing(
    there: Mapping[str, Iterable[Box]], needed: Sequence[Mapping[str, Sequence[Box]]]
) -> list[str]:
    """Names of tensors of which something that a rank needs is nowhere."""
    wanted: dict[str, set[Box]] = {}
    for needs in needed:
        for name, boxes in needs.items():
            wanted.setdefault(name, set()).update(boxes)
    return sorted(
        name
        for name, boxes in wanted.items()
        if not all(covers(there.get(name, ()), box) for box in boxes)
    )


def _numbers(parts: Mapping[str, Iterable[Box]]) -> dict[str, Any]:
    """Parts of tensors for JSON, each once."""
    return {name: [box.numbers() for box in dict.fromkeys(bs)] for name, bs in parts.items()}


def _boxes(said: Mapping[str, Any]) -> dict[str, tuple[Box, ...]]:
    return {name: tuple(map(box_of, numbers)) for name, numbers in said.items()}


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
