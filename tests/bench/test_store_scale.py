"""How long a plan of 100,000 ranks takes to write and to read, and how much memory. Results in docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest

from hetrun import store
from hetrun.model import Plan
from hetrun.planner import plan
from tests.bench.test_planner_scale import lab

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

MOST_S = 10  # of CPU, each way
MOST_MIB = 1024
ROOT = Path(__file__).parents[2]


def measure(path: Path, *, saving: bool) -> dict[str, float]:
    """Read a plan once in this process, or read it and write it beside itself: seconds of CPU and peak memory."""
    begin = time.process_time()
    read = store.load(Plan, path)
    load_s = time.process_time() - begin
    begin = time.process_time()
    if saving:
        store.save(read, path.with_suffix(".again"))
    return {
        "load_s": load_s,
        "save_s": time.process_time() - begin,
        "peak_mib": getrusage(RUSAGE_SELF).ru_maxrss / 1024,
    }


def test_a_plan_of_100000_ranks_is_written_and_read_in_seconds(tmp_path: Path) -> None:
    made = lab(100_000, 2)
    path = tmp_path / "plan.json"
    large = plan(made.facts, made.profile, made.recipe, targets={})
    store.save(large, path)
    sys.stderr.write(f"{path.stat().st_size / 1e6:.0f} MB\n")
    for way in ("load", "save"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.test_store_scale", str(path), way],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        sys.stderr.write(f"{done.stdout}\n")
        result = json.loads(done.stdout)
        assert max(result["load_s"], result["save_s"]) <= MOST_S
        assert result["peak_mib"] <= MOST_MIB
    assert store.load(Plan, path.with_suffix(".again")) == large


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]), saving=sys.argv[2] == "save")))
