"""What the hosts' frames say about a run: progress, output, evidence of failure. Acting on it: `supervise.py`.

Everything here comes from ranks and is text to distrust: sizes are bounded, unknown events are counted and left.
"""

from __future__ import annotations

import json
import linecache
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

import hetrun
from hetrun.launch.diagnose import Evidence, Kind, RankProgress, main_frame, name_hang
from hetrun.launch.files import ranks_by_host
from hetrun.launch.observer import Observer
from hetrun.launch.patience import Pace
from hetrun.launch.rundir import Lines, RunDir, clean_line
from hetrun.model import (
    CheckpointEvent,
    ComparisonEvent,
    EndEvent,
    ErrorEvent,
    EvaluationEvent,
    Event,
    Plan,
    StartEvent,
    StepEvent,
    TraceEvent,
    WarningEvent,
)
from hetrun.transport.guard_frames import Meta
from hetrun.transport.jobs import describe_exit

log = logging.getLogger(__name__)

_KINDS: dict[str, TypeAdapter[Any]] = {
    "start": TypeAdapter(StartEvent),
    "step": TypeAdapter(StepEvent),
    "trace": TypeAdapter(TraceEvent),
    "evaluation": TypeAdapter(EvaluationEvent),
    "checkpoint": TypeAdapter(CheckpointEvent),
    "comparison": TypeAdapter(ComparisonEvent),
    "warning": TypeAdapter(WarningEvent),
    "error": TypeAdapter(ErrorEvent),
    "end": TypeAdapter(EndEvent),
}
_NUM_LAST_LINES = 40
_MOST_WARNINGS = 200
_DUMP_LINES = 400
_MAX_LOG = 512 << 20  # bytes of one log here; the host has all of it
_MAX_LOG_LINE = 1 << 16
_WAITS = re.compile(r"wait|recv|receive|reduce|barrier|broadcast|store|meet|poll|join")
_AGENT_SAID = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(slots=True)
class _Rank:
    host: str
    started: bool = False
    last_step: int | None = None
    current_step: int | None = None  # from its heartbeat
    in_step: bool = False
    ended: bool = False
    state: str = "?"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_DUMP_LINES))

    @property
    def step(self) -> int | None:
        """The step that it is in, as far as known."""
        if self.current_step is not None:
            return self.current_step
        return None if not self.started else 0 if self.last_step is None else self.last_step + 1


@dataclass(slots=True)
class _Host:
    offset_s: float = 0.0  # its clock minus ours
    round_trip_s: float = float("inf")
    empty: bool = False
    left: tuple[int, ...] = ()
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_LAST_LINES))
    said: dict[int, int] = field(default_factory=dict)  # local rank -> exit code, by torchrun
    mode: str = ""


class Monitor:
    """State of one run."""

    def __init__(self, plan: Plan, run_dir: RunDir, observer: Observer) -> None:
        self.evidence: list[Evidence] = []
        self.warnings: list[str] = []
        self.checkpoint_step: int | None = None  # of the newest complete one that was written
        self.pace = Pace()
        self.progressed = False  # something moved since it was last set to False
        self.hosts = {spec.name: _Host() for spec in plan.hosts}
        self.ranks = {rank.rank: _Rank(rank.host) for rank in plan.split.ranks}
        self._local = {
            (host, place): rank.rank
            for host, ranks in ranks_by_host(plan).items()
            for place, rank in enumerate(ranks)
        }
        self._run_dir = run_dir
        self._observer = observer
        self._lines: dict[tuple[str, str], Lines] = {}
        self._bad_events = 0

    @property
    def all_started(self) -> bool:
        """Say whether every rank is up."""
        return all(rank.started for rank in self.ranks.values())

    @property
    def in_steps(self) -> bool:
        """Say whether every rank that has not ended is inside a step."""
        return all(rank.in_step for rank in self.ranks.values() if not rank.ended)

    @property
    def all_ended(self) -> bool:
        """Say whether every rank did its last step."""
        return all(rank.ended for rank in self.ranks.values())

    @property
    def all_done(self) -> bool:
        """Say whether every host is through, and well."""
        return all(host.empty for host in self.hosts.values())

    def on_frame(self, host: str, meta: Meta, data: bytes, now_s: float) -> None:
        """Take one frame of a host's guard."""
        handlers: dict[str, Callable[[], None]] = {
            "chunk": lambda: self._on_chunk(host, meta, data),
            "rank": lambda: self._on_rank(host, meta),
            "agent": lambda: self._on_agent(host, meta),
            "lost": lambda: self._add(
                Kind.DIED, host, "the job's first process was killed", when_s=now_s
            ),
            "empty": lambda: self._on_empty(host, meta),
            "up": lambda: self._on_up(host, meta),
            "note": lambda: self.warn(f"{host}: {meta['what']}"),
            "fault": lambda: self._add(Kind.AGENT, host, str(meta["what"]), when_s=now_s),
            "states": lambda: self._on_states(host, meta),
            "progress": lambda: self._on_progress(host, meta),
        }
        handler = handlers.get(str(meta["t"]))
        if handler is not None:
            handler()

    def on_clock(self, host: str, wall_s: float, sent_s: float, received_s: float) -> None:
        """Take one answer to a ping: the host's clock at about the middle of the round trip."""
        found = self.hosts[host]
        if received_s - sent_s < found.round_trip_s:
            found.round_trip_s = received_s - sent_s
            found.offset_s = wall_s - (sent_s + received_s) / 2

    def on_lost(self, host: str, what: str, now_s: float) -> None:
        """A host does not answer any more."""
        self._add(Kind.LOST, host, what, when_s=now_s)

    def warn(self, text: str) -> None:
        """Keep a warning for the end, once."""
        if text not in self.warnings:
            self.warnings.append(text)
            log.warning("%s", text)

    def hang(self, silent_s: float, now_s: float) -> None:
        """Nothing moves: name who is to blame, from what states and tracebacks show."""
        ranks = [
            self._progress(number, rank) for number, rank in self.ranks.items() if not rank.ended
        ]
        for piece in name_hang(ranks, silent_s, now_s):
            self._add(Kind.HANG, piece.host, piece.what, rank=piece.rank, when_s=now_s)
        if not ranks:
            for host in [host for host, found in self.hosts.items() if not found.empty]:
                self._add(Kind.HANG, host, "torchrun hangs though its ranks are done", when_s=now_s)

    def flush(self) -> None:
        """Take unfinished last lines as lines."""
        for (host, name), lines in list(self._lines.items()):
            for line in lines.flush():
                self._on_line(host, name, line)
        if self._bad_events:
            self.warn(f"{self._bad_events} lines of event files could not be read")

    # Frames.

    def _on_chunk(self, host: str, meta: Meta, data: bytes) -> None:
        name = str(meta["file"])
        is_event = name.startswith("events/")
        lines = self._lines.setdefault((host, name), Lines() if is_event else Lines(_MAX_LOG_LINE))
        if meta["dropped"]:
            text = f"[hetrun: {meta['dropped']} bytes skipped here; the file on {host} holds more]"
            self._on_line(host, name, text.encode())
        for line in lines.feed(data):
            self._on_line(host, name, line)

    def _on_line(self, host: str, name: str, line: bytes) -> None:
        line = self._run_dir.hide(line)
        if name == "agent":
            self._on_text(host, None, line)
            return
        number = int(name[name.index("-") + 1 :].partition(".")[0])
        if self.ranks[number].host != host:
            raise ValueError(f"{host} speaks for rank {number}")
        if name.startswith("events/"):
            self._run_dir.append(f"events/rank-{number:04}.jsonl", line)
            self._on_event(host, number, line)
        else:
            self._on_text(host, number, line)

    def _on_text(self, host: str, number: int | None, line: bytes) -> None:
        text = clean_line(line)
        who = host if number is None else f"{host}/{number}"
        own = f"{host}-agent" if number is None else f"rank-{number:04}"
        self._run_dir.append(f"logs/{own}.log", text.encode(), limit=_MAX_LOG)
        self._run_dir.append("all.log", f"{who} {text}".encode(), limit=_MAX_LOG)
        if number is None:
            self.hosts[host].lines.append(text)
            for code, local_rank in _AGENT_SAID.findall(text):
                self.hosts[host].said[int(local_rank)] = int(code)
        else:
            self.ranks[number].lines.append(text)
        self._observer.on_line(host, number, text)

    def _on_event(self, host: str, number: int, line: bytes) -> None:
        try:
            fields = json.loads(line)
            event: Event = _KINDS[fields["event"]].validate_python(fields)
        except (ValueError, TypeError, KeyError, ValidationError, RecursionError):
            self._bad_events += 1
            return
        if event.rank != number:
            self._bad_events += 1
            return
        rank = self.ranks[number]
        self.progressed = True
        match event:
            case StartEvent():
                rank.started = True
            case StepEvent():
                rank.started, rank.last_step = True, event.step
                self.pace.step_ended(number, event.wall_s)
            case EndEvent():
                rank.ended = True
            case ErrorEvent():
                what = f"raised {clean_line(f'{event.kind}: {event.message}'.encode())}"
                when_s = self._ours(host, event.wall_s)
                self._add(Kind.RAISED, host, what, rank=number, when_s=when_s)
            case WarningEvent():
                self._on_warning(host, event.message)
            case CheckpointEvent():  # all hosts have their parts of it by then
                self.checkpoint_step = max(event.step, self.checkpoint_step or 0)
            case TraceEvent() | EvaluationEvent() | ComparisonEvent():
                pass
        self._observer.on_event(event)

    def _on_warning(self, host: str, message: str) -> None:
        if len(self.warnings) < _MOST_WARNINGS:
            self.warn(clean_line(f"{host}: {message}".encode()))

    def _on_rank(self, host: str, meta: Meta) -> None:
        number, status = int(meta["rank"]), meta["status"]
        if status is None:  # torchrun collected it before we could look
            code = self.hosts[host].said.get(int(meta["local_rank"]))
            status = None if code is None else -code if code < 0 else code << 8
        if status == 0 and self.ranks[number].ended:
            return
        if status is None and self.ranks[number].ended:
            return
        what = describe_exit(status) + (" (out of memory)" if meta["oom"] else "")
        if status == 0:
            what += " before its last step"
        signal = (status or 0) & 0x7F
        when_s = self._ours(host, meta["wall_s"])
        self._add(Kind.DIED, host, what, rank=number, when_s=when_s, signal=signal or None)
        if meta["oom"]:
            self.evidence[-1] = replace(self.evidence[-1], out_of_memory=True)

    def _on_agent(self, host: str, meta: Meta) -> None:
        found = self.hosts[host]
        if meta["status"] != 0:
            what = f"torchrun {describe_exit(meta['status'])}"
            if any(_PORT_TAKEN.search(line) for line in found.lines):
                what += ": its port was taken in between, start again"
            self._add(Kind.AGENT, host, what, when_s=self._ours(host, meta["wall_s"]))
        elif not all(rank.ended for rank in self.ranks.values() if rank.host == host):
            what = "torchrun ended before its ranks did"
            self._add(Kind.AGENT, host, what, when_s=self._ours(host, meta["wall_s"]))

    def _on_empty(self, host: str, meta: Meta) -> None:
        self.hosts[host].left = tuple(int(pid) for pid in meta["left"])
        self.hosts[host].empty = True
        self._observer.on_status(host, "nothing left running")

    def _on_up(self, host: str, meta: Meta) -> None:
        self.hosts[host].mode = str(meta["mode"])
        self._observer.on_status(host, f"torchrun started ({meta['mode']})")

    def _on_states(self, host: str, meta: Meta) -> None:
        for local_rank, state in meta["states"].items():
            self.ranks[self._local[host, int(local_rank)]].state = str(state)

    def _on_progress(self, host: str, meta: Meta) -> None:
        for number, step, _count, outside in meta["ranks"]:
            rank = self.ranks[int(number)]
            if rank.host != host:
                raise ValueError(f"{host} speaks for rank {number}")
            rank.current_step = int(step) if step >= 0 else None
            rank.in_step = not outside
            self.progressed = True

    # Evidence.

    def _add(
        self,
        kind: Kind,
        host: str,
        what: str,
        *,
        when_s: float,
        rank: int | None = None,
        signal: int | None = None,
    ) -> None:
        self.evidence.append(
            Evidence(kind=kind, host=host, rank=rank, when_s=when_s, what=what, signal=signal)
        )

    def _ours(self, host: str, wall_s: float) -> float:
        """Return a time on a host's clock as one on ours."""
        return wall_s - self.hosts[host].offset_s

    def last_lines(self, piece: Evidence) -> tuple[str, ...]:
        """Return the end of the log that belongs to a failure."""
        lines = self.hosts[piece.host].lines if piece.rank is None else self.ranks[piece.rank].lines
        return tuple(lines)[-_NUM_LAST_LINES:]

    def _progress(self, number: int, rank: _Rank) -> RankProgress:
        frame = main_frame(list(rank.lines))
        return RankProgress(
            host=rank.host,
            rank=number,
            started=rank.started,
            last_step=rank.last_step,
            current_step=rank.current_step if rank.in_step else None,
            state=rank.state,
            frame=f"{Path(frame[0]).name}:{frame[1]} in {frame[2]}" if frame else None,
            waits_for_peers=frame is not None and waits_for_peers(*frame),
        )


def waits_for_peers(file: str, line: int, function: str) -> bool:
    """Say whether this place in the code waits for other ranks: inside torch.distributed, or one of our own waits."""
    if "torch/distributed" in file or _WAITS.search(function):
        return True
    place = file.rpartition("/hetrun/")[2]
    source = linecache.getline(str(Path(hetrun.__file__).parent / place), line)
    return bool(_WAITS.search(source))
