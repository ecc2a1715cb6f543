"""When a silent host is given up, on a clock that is played."""

from __future__ import annotations

import queue
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hetrun.errors import HetrunError
from hetrun.launch import supervise
from hetrun.launch.monitor import Monitor
from hetrun.launch.rundir import RunDir
from hetrun.launch.supervise import Signals, Supervisor
from hetrun.model import HostSpec, LaunchSpec
from tests.ssh.plans import Recorder, make_plan


class Clock:
    """Stands still but for waits."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


class SilentHosts:
    """Take pings and never answer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pings_s: list[float] = []
        self.heard = self

    def get(self, timeout: float) -> object:
        self.clock.now_s += timeout
        raise queue.Empty

    def tell(self, what: Callable[..., None], *, but: frozenset[str]) -> list[HetrunError]:
        self.pings_s.append(self.clock.now_s)
        return []


@pytest.mark.parametrize(("lease_s", "num_pings"), [(5.0, 4), (15.0, 8), (3600.0, 1800)])
def test_a_silent_host_is_given_up_with_its_lease_after_several_pings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_s: float, num_pings: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(supervise, "time", clock)
    now = datetime(2030, 1, 2, tzinfo=timezone.utc)
    recorder = Recorder()
    monitor = Monitor(
        make_plan([(HostSpec(name="a"), 1)]), RunDir(tmp_path, "tiny", now, []), recorder
    )
    hosts = SilentHosts(clock)
    limits = LaunchSpec(lease_s=lease_s, start_timeout_s=1e6)
    supervisor = Supervisor(
        hosts,  # type: ignore[arg-type]
        monitor,
        limits=limits,
        signals=Signals(),
        observer=recorder,
    )
    while not monitor.evidence:
        supervisor._turn()
    assert clock.now_s - 1000.0 == pytest.approx(lease_s, abs=0.15)
    assert monitor.evidence[0].what.startswith("lost contact: silent for")
    assert len(hosts.pings_s) == pytest.approx(num_pings, rel=0.1)
