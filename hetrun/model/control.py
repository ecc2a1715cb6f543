"""Who controls a run, how it stands, and what was left of it on hosts."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.model.base import SCHEMA_VERSION, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller(Noun):
    """controller.json in the run directory: the process that controls the run. No other one ever has all of these."""

    host: str  # for people
    pid: int
    start_ticks: int  # after boot
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Noun):
    """moved.json in the run directory: the run is controlled by one of its hosts, and all else of it lies there."""

    schema_version: int = SCHEMA_VERSION
    host: str  # of plan.json beside it
    folder: str  # on that host, below its user's home


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(Noun):
    """How a run stands."""

    run_id: str
    status: str  # that of its outcome, "running", "controller gone" or "on HOST"
    pid: int | None  # of its controller, while that runs here
    step: int | None  # the last one that rank 0 ended
    num_steps: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList(Noun):
    """Runs of a folder, oldest first."""

    schema_version: int = SCHEMA_VERSION
    runs: tuple[RunState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver(Noun):
    """What a cleaning found on one host: jobs that it ended, jobs that do not end, or why it could not look."""

    host: str
    ended: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOvers(Noun):
    """A cleaning of all hosts of a run."""

    schema_version: int = SCHEMA_VERSION
    hosts: tuple[LeftOver, ...]
