"""Which of many failures came first: root cause, then what followed. Collecting them is left to `monitor.py`.

A rank that dies takes its peers along within milliseconds, and they say so louder than it did. So time, corrected
for the hosts' clocks, decides first; but a peer that only lost its connection yields to a rank that died silently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hetrun.model import Failure

# How exceptions speak when it was a peer that went away.
_PEER_LOST = re.compile(
    r"connection|peer|socket|broken pipe|reset|timed?[ -]?out|remote|closed|dist\w*error|store|gloo|nccl",
    re.IGNORECASE,
)
_NEAR_S = 5.0  # a silent death this soon after a lost connection is its cause, seen late
_SIGTERM = 15


class Kind(Enum):
    """How a failure was noticed."""

    RAISED = "raised"  # an error event
    DIED = "died"  # a rank's process ended too early, or the one that holds all of a host's
    AGENT = "agent"  # torchrun ended with an error
    LOST = "lost"  # no contact with the host
    HANG = "hang"  # no progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One failure as it was noticed, at a time on the controller's clock."""

    kind: Kind
    host: str
    rank: int | None
    when_s: float
    what: str
    signal: int | None = None
    out_of_memory: bool = False
    last_lines: tuple[str, ...] = ()

    @property
    def is_symptom(self) -> bool:
        """Say whether it may be nothing but the loss of a peer."""
        return self.kind is Kind.RAISED and bool(_PEER_LOST.search(self.what))

    @property
    def is_silent(self) -> bool:
        """Say whether nothing was said about the reason."""
        return self.kind in (Kind.DIED, Kind.LOST)


def root_first(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """Return one piece per rank or host, root cause first, the rest by time."""
    pieces = sorted(_merge(evidence), key=lambda piece: piece.when_s)
    pieces = [piece for piece in pieces if not _is_echo(piece, pieces)]
    if pieces and pieces[0].is_symptom:
        for piece in pieces[1:]:
            if piece.is_silent and piece.when_s - pieces[0].when_s <= _NEAR_S:
                pieces.remove(piece)
                pieces.insert(0, piece)
                break
    return tuple(pieces)


def to_failure(piece: Evidence) -> Failure:
    """Return the form that launch.json and the report hold."""
    return Failure(
        host=piece.host,
        rank=piece.rank,
        when_s=piece.when_s,
        what=piece.what,
        last_lines=piece.last_lines,
    )


def _merge(evidence: Sequence[Evidence]) -> list[Evidence]:
    """One piece per rank: what it raised says more than that its process ended."""
    found: dict[tuple[str, int | None, Kind], Evidence] = {}
    for piece in sorted(evidence, key=lambda piece: piece.when_s):
        own_kind = piece.kind if piece.rank is None else Kind.RAISED
        key = (piece.host, piece.rank, own_kind)
        before = found.get(key)
        if before is None:
            found[key] = piece
        elif piece.kind is Kind.RAISED and before.kind is not Kind.RAISED:
            found[key] = replace(piece, when_s=before.when_s)
    return list(found.values())


def _is_echo(piece: Evidence, pieces: Sequence[Evidence]) -> bool:
    """Say whether it only follows from another one on its host: torchrun's own end, ranks that torchrun ended."""
    others = [other for other in pieces if other is not piece and other.host == piece.host]
    if piece.kind is Kind.AGENT:
        return bool(others)
    if piece.kind is Kind.DIED and piece.signal == _SIGTERM:
        return any(other.when_s <= piece.when_s for other in others if other.kind is not Kind.AGENT)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far a rank is, when nothing moves."""

    host: str
    rank: int
    started: bool
    last_step: int | None
    state: str  # the kernel's letter: T stopped, D in a driver, S and R alive
    frame: str | None  # "file.py:12 in function", where its main thread is
    waits_for_peers: bool
    current_step: int | None = None  # that it is inside, where its heartbeat says so


def name_hang(ranks: Sequence[RankProgress], silent_s: float, when_s: float) -> list[Evidence]:
    """Return one piece per suspect: stopped or stuck ones, else the rearmost, else those not waiting for others."""
    unfinished = list(ranks)
    suspects = [rank for rank in unfinished if rank.state in "TtD"]
    if not suspects:
        late = [rank for rank in unfinished if not rank.started]
        rearmost = min((_steps(rank) for rank in unfinished), default=0)
        behind = [rank for rank in unfinished if _steps(rank) == rearmost]
        pool = late or behind
        busy = [rank for rank in pool if rank.frame and not rank.waits_for_peers]
        suspects = busy or pool
    return [
        Evidence(
            kind=Kind.HANG,
            host=rank.host,
            rank=rank.rank,
            when_s=when_s,
            what=_hang_text(rank, silent_s, len(suspects)),
        )
        for rank in suspects
    ]


def _steps(rank: RankProgress) -> int:
    if rank.current_step is not None:
        return rank.current_step - 1
    return -1 if rank.last_step is None else rank.last_step


def _hang_text(rank: RankProgress, silent_s: float, num_suspects: int) -> str:
    states = {"T": "is stopped (SIGSTOP)", "t": "is held by a debugger", "D": "hangs in a driver"}
    how = states.get(rank.state, "hangs" if num_suspects == 1 else "made no progress")
    if not rank.started:
        where = "before it was ready"
    elif rank.current_step is not None:
        where = f"in step {rank.current_step}"
    elif rank.last_step is None:
        where = "in its first step"
    else:
        where = f"after step {rank.last_step}"
    frame = f", at {rank.frame}" if rank.frame else ""
    return f"{how} {where}: nothing for {silent_s:.0f} s{frame}"


_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_HEADS = re.compile(r"^(Current thread|Thread) .*most recent call first")


def main_frame(lines: Sequence[str]) -> tuple[str, int, str] | None:
    """Return (file, line, function) of the main thread's innermost frame in a faulthandler dump.

    The dump lists threads newest first, so the main thread's block is the last one.
    """
    heads = [index for index, line in enumerate(lines) if _HEADS.match(line)]
    if not heads:
        return None
    for line in lines[heads[-1] + 1 :]:
        found = _FRAME.match(line)
        if found:
            return found["file"], int(found["line"]), found["name"]
    return None
