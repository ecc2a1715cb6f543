"""What all tests share: in CI a skipped test is a failed run."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow to make examples and to run them; neither is a fault of the code. CI draws the same examples in
# every run, as hypothesis itself would there: what a change breaks shows with the change. Others draw new ones.
settings.register_profile(
    "busy",
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("busy")

# A shell starts what it puts into the background with SIGINT ignored, and every child would inherit that: no Ctrl-C
# of a test would arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The runner's processes share the cores. torch's threads wait for each other while they spin, so two processes with a
# thread for each core take ten times as long as two with one. What a test starts inherits this; launch sets its own.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a pipe, also where the test runner says how wide its own screen is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    if reporter.stats.get("skipped"):
        reporter.write_line("CI=true: no test may be skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
