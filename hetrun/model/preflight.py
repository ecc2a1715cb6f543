"""What preflight found: one finding per check and host. Which checks there are stands in `hetrun/preflight/checks.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hetrun.model.base import SCHEMA_VERSION, Noun


class Severity(str, Enum):
    """How bad a finding is; only errors keep a run from starting."""

    NOTE = "note"  # worth knowing, nothing to mend
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"  # an error that the user asked to pass over


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Noun):
    """What one check says of one host."""

    check: str  # such as "clock"; `--skip` takes it
    host: str
    severity: Severity
    what: str
    fix: str = ""  # the next thing to do; empty where nothing is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTiming(Noun):
    """How two hosts reached each other on their data addresses; `a` called `b`."""

    a: str
    b: str
    latency_s: float  # one way: half of the shortest of a few round trips
    bytes_per_s: float  # of one stream of `PreflightReport.echo_bytes` there and back


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHost(Noun):
    """One host as preflight saw it; what is None is unknown."""

    name: str
    python: str | None = None
    torch: str | None = None
    addr: str | None = None  # of training traffic
    nic: str | None = None
    mtu: int | None = None
    clock_offset_s: float | None = None  # host clock minus controller clock
    free_bytes: int | None = None  # where bundles and runs go
    seconds: float = 0.0  # until it had answered


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport(Noun):
    """The answer of `hetrun doctor`."""

    schema_version: int = SCHEMA_VERSION
    created: str  # ISO 8601, UTC
    hosts: tuple[CheckedHost, ...]
    findings: tuple[Finding, ...]
    pairs: tuple[PairTiming, ...] = ()
    echo_bytes: int = 0
    skipped: tuple[str, ...] = ()  # checks that the user asked to pass over
    seconds: float = 0.0

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that keep a run from starting."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)
