"""Gives every rank its parts of the tensors of a checkpoint, from its own host's files or from those of others.

Which checkpoint it is, is decided in `checkpoint_resume.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hetrun.model import CheckpointIndex, RankPlan
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime.boxes import Box, covers
from hetrun.runtime.checkpoint_exchange import Exchange
from hetrun.runtime.checkpoint_files import Piece
from hetrun.runtime.state import State


class Found(Protocol):
    """A checkpoint on one host."""

    @property
    def folder(self) -> Path:
        """Where its files are."""
        ...

    @property
    def index(self) -> CheckpointIndex:
        """What it says of itself."""
        ...

    @property
    def parts(self) -> Mapping[str, Sequence[Box]]:
        """Which parts of which tensors are there."""
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """What each host has of the checkpoint, and the rank that reads for others there."""

    found: Mapping[str, Found]
    readers: Mapping[str, int]

    @classmethod
    def of(cls, found: Mapping[str, Found], readers: Mapping[str, int]) -> Sources:
        """In one order on all ranks."""
        return cls(dict(sorted(found.items())), readers)

    def of_box(self, name: str, box: Box, host: str) -> Iterator[tuple[str, Box]]:
        """Hosts that a rank on `host` has a part of a tensor from, and what of it from each: itself first, else one if one has all."""
        there = {other: part.parts.get(name, ()) for other, part in self.found.items()}
        for other in (host, *there):
            if covers(there.get(other, ()), box):
                yield other, box
                return
        for other, boxes in there.items():
            for part in boxes:
                if part.whole == box.whole and part.overlaps(box):
                    yield other, part.common(box)


def load(
    rank: RankPlan,
    sources: Sources,
    *,
    needed: Sequence[Mapping[str, Sequence[Box]]],
    state: State,
    exchange: Exchange,
) -> None:
    """Read what this host has, and pass on what others lack, all in the one order by name and rank."""
    reader = _Reader(rank, sources, exchange)
    hosts = exchange.all_say(rank.host)
    for name in sorted({name for needs in needed for name in needs}):
        for other, host in enumerate(hosts):
            for box in needed[other].get(name, ()):
                parts = list(sources.of_box(name, box, host))
                if rank.rank == other:
                    dtype = state.needs[name][box]
                    state.put(name, box, reader.take(name, box, parts, dtype=dtype))
                elif host != rank.host:
                    reader.pass_on(name, parts, other)


class _Reader:
    """What one rank does with the files of its host."""

    def __init__(self, rank: RankPlan, sources: Sources, exchange: Exchange) -> None:
        self._host = rank.host
        self._readers = sources.readers
        self._passes_on = sources.readers[rank.host] == rank.rank
        self._exchange = exchange
        self._pieces: dict[str, list[Piece]] = {}
        if rank.host in sources.found:
            mine = sources.found[rank.host]
            self._pieces = files.read_pieces(mine.folder, mine.index)

    def take(
        self, name: str, box: Box, parts: Sequence[tuple[str, Box]], *, dtype: torch.dtype
    ) -> Tensor:
        """Put one box together, from this host's files and from what other hosts send."""
        values = [self._get(name, source, part, dtype) for source, part in parts]
        if len(values) == 1:
            return values[0]
        whole = torch.empty(box.shape, dtype=dtype)
        for (_, part), value in zip(parts, values, strict=True):
            part.inside(box).of(whole).copy_(value)
        return whole

    def pass_on(self, name: str, parts: Sequence[tuple[str, Box]], to: int) -> None:
        """Send a rank of another host what it takes from this one, if this rank does so here."""
        for source, part in parts if self._passes_on else ():
            if source == self._host:
                self._exchange.send(files.assemble(self._pieces[name], part), to)

    def _get(self, name: str, source: str, part: Box, dtype: torch.dtype) -> Tensor:
        if source == self._host:
            return files.assemble(self._pieces[name], part)
        value = torch.empty(part.shape, dtype=dtype)
        self._exchange.receive(value, self._readers[source])
        return value
