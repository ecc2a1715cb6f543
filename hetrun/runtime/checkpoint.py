"""Saves the state of training beside training, whole or not at all, and keeps the newest ones.

A save in order: every rank copies what it saves to host memory (training stands still only for that), a thread writes
it to `step-N.tmp`, all ranks say that theirs is on the disk, the first rank of each directory writes the index and
renames the folder to `step-N`, all say that this is done, and only then are older checkpoints removed. A failure at
any point leaves the older ones as they are. Loading is left to `checkpoint_resume.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hetrun.model import (
    CheckpointEvent,
    CheckpointIndex,
    CheckpointSpec,
    Event,
    Plan,
    WarningEvent,
)
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime.checkpoint_exchange import Exchange
from hetrun.runtime.state import Saved, State, entries, first_holders
from hetrun.schedule.holders import held_units
from hetrun.schedule.portions import lanes_by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The ranks that share a directory: those of a host, or all where the recipe says that it is shared."""

    ranks: tuple[int, ...]
    units: tuple[frozenset[str], ...]  # what each rank of the run saves

    @property
    def first(self) -> int:
        """The rank that looks after the directory."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class _Saved:
    """How a save ended: after how many seconds, how many bytes of this rank, and what failed where."""

    step: int
    blocked_s: float
    seconds: float
    num_bytes: int
    failures: tuple[str, ...]


class Checkpoints:
    """The checkpoints of a run, as one rank sees them."""

    def __init__(
        self,
        spec: CheckpointSpec,
        *,
        rank: int,
        domain: Domain,
        state: State,
        exchange: Exchange,
        about: CheckpointIndex,
    ) -> None:
        """`about` says what run this is, and at which step it starts."""
        self._spec = spec
        self._rank = rank
        self._domain = domain
        self._state = state
        self._exchange = exchange
        self._about = about
        self._folder = Path(spec.dir)
        self._kept = [about.step] if about.step else []
        self._started = about.step  # the last save that was begun
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[_Saved] | None = None

    @property
    def first_step(self) -> int:
        """Number of the step that comes next after the state that was loaded; 0 where none was."""
        return self._about.step

    def after_step(
        self, done: int, *, learning_rate: float, write: Callable[[Event], None], stop: bool
    ) -> None:
        """Begin a save where one is due, and write the events of the one before once it has ended.

        `done` steps are done; at the last one, and when the run is to `stop`, the save is waited for.

        Raises:
            PeerLostError: another rank is gone.
        """
        train = self._about.train
        last = stop or done == train.steps
        if self._running is not None and self._running.done():
            self._finish(write)
        if (last or done % self._spec.every_steps == 0) and done > self._started:
            start_s = time.monotonic()
            self._finish(write)
            saved = self._state.copy(self._domain.units[self._rank])
            blocked_s = time.monotonic() - start_s
            index = replace(
                self._about,
                step=done,
                next_row=done * train.global_batch_rows,
                learning_rate=learning_rate,
            )
            self._started = done
            self._running = self._thread.submit(self._save, saved, index, blocked_s)
        if last:
            self._finish(write)

    def _finish(self, write: Callable[[Event], None]) -> None:
        """Wait for the save that runs, if any, and write its events."""
        if self._running is None:
            return
        saved = self._running.result()
        self._running = None
        if not saved.failures:
            write(
                CheckpointEvent(
                    rank=self._rank,
                    step=saved.step,
                    wall_s=time.time(),
                    blocked_s=saved.blocked_s,
                    saved_s=saved.seconds,
                    num_bytes=saved.num_bytes,
                )
            )
        elif self._rank == 0:
            message = f"no checkpoint of step {saved.step}: {'; '.join(saved.failures)}"
            write(
                WarningEvent(rank=self._rank, wall_s=time.time(), step=saved.step, message=message)
            )

    def _save(self, saved: Sequence[Saved], index: CheckpointIndex, blocked_s: float) -> _Saved:
        """Runs in the thread: write, agree, commit, agree, clean up."""
        start_s = time.monotonic()
        part = self._folder / f"{files.folder_name(index.step)}.tmp"
        size, failure = 0, ""
        try:
            if saved:
                part.mkdir(parents=True, exist_ok=True)
                tensors, parts = entries(saved)
                path = part / files.shard_name(self._rank)
                size = files.write_shard(path, tensors, files.metadata_of(parts))
        except OSError as error:
            failure = _words(part, error)
        said = self._exchange.all_say([size, failure])
        sizes = {rank: int(told) for rank, (told, _) in enumerate(said)}
        failures = _failures([words for _, words in said])
        if not failures:
            failures = _failures(self._exchange.all_say(self._commit(part, index, sizes)))
        self._clean(index.step, failed=bool(failures))
        return _Saved(index.step, blocked_s, time.monotonic() - start_s, size, failures)

    def _commit(self, part: Path, index: CheckpointIndex, sizes: Mapping[int, int]) -> str:
        """On the first rank of the directory: index, then the name that counts. Return what failed."""
        if self._rank != self._domain.first:
            return ""
        held = {files.shard_name(rank): sizes[rank] for rank in self._domain.ranks if sizes[rank]}
        target = self._folder / files.folder_name(index.step)
        try:
            for name, size in held.items():
                if (part / name).stat().st_size != size:
                    return f"{part / name} is not of {size} bytes"
            files.write_index(part, replace(index, files=held))
            files.remove_folder(target)  # of a save that other hosts did not finish
            part.rename(target)
            files.sync_folder(self._folder)
        except OSError as error:
            return _words(part, error)
        return ""

    def _clean(self, step: int, *, failed: bool) -> None:
        """Remove what a failed save left, or what is older than the newest ones to keep."""
        if not failed:
            self._kept = [*self._kept, step][-self._spec.keep :]
        if self._rank != self._domain.first:
            return
        name = files.folder_name(step)
        with contextlib.suppress(
            OSError
        ):  # what stays is whole, or has no index and does not count
            if failed:
                files.remove_folder(self._folder / f"{name}.tmp")
                files.remove_folder(self._folder / name)
            else:
                files.remove_others(self._folder, self._kept)


def domain_of(plan: Plan, spec: CheckpointSpec, rank: int) -> Domain:
    """The directory of a rank."""
    ranks: dict[str, list[int]] = {}
    for other in plan.split.ranks:
        ranks.setdefault("" if spec.shared else other.host, []).append(other.rank)
    lanes = lanes_by_rank(plan.split.replicas)
    units = first_holders(held_units(plan), ranks.values(), lanes)
    (mine,) = (members for members in ranks.values() if rank in members)
    return Domain(ranks=tuple(mine), units=tuple(units))


def _failures(words: list[str]) -> tuple[str, ...]:
    return tuple(f"rank {rank}: {text}" for rank, text in enumerate(words) if text)


def _words(folder: Path, error: OSError) -> str:
    return f"cannot write {folder}: {error.strerror}"
