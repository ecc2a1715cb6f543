"""A true profile of this machine's processor, by the command line, and Ctrl-C in the middle of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chain import argv, done, short_recipe

pytestmark = pytest.mark.dist

CPUS = "hosts:\n  one: { connection: local, cpu_devices: 2 }\n  two: { connection: local }\n"
DECLARED = """links:
  - { kind: inside_host, latency_us: 10, gbit_per_s: 80 }
  - { kind: inside_island, latency_us: 10, gbit_per_s: 80 }
"""
PARTS = ("_forward_s", "_backward_s")
SHARED = "plan: { tp: [1, 2], recompute: true }"


def write_lab(folder: Path) -> Path:
    (folder / "lab.yaml").write_text(CPUS)
    recipe = short_recipe(folder)
    lines = recipe.read_text().splitlines()
    kept = [
        line for line in lines if not line.startswith("plan:") and "memory_fraction" not in line
    ]
    recipe.write_text("\n".join([*kept, SHARED, ""]))
    return recipe


def run(folder: Path, *args: str) -> tuple[dict[str, Any], str]:
    """Profile with a cache in the test's own folder; return what was saved and what was said."""
    result = subprocess.run(
        argv("profile", "tiny-llama.yaml", *args),
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    return found, result.stderr


@pytest.mark.timeout(150)
def test_processor_is_measured_truly_and_its_figures_are_kept(tmp_path: Path) -> None:
    recipe = write_lab(tmp_path)
    done("probe", "lab.yaml", cwd=tmp_path)
    found, _ = run(tmp_path, "--quick")
    (cpu,) = found["devices"]
    assert (cpu["vendor"], cpu["source"], cpu["hosts"]) == ("cpu", "measured", ["one", "two"])
    assert found["quick"] is True
    timings = {(t["tp"], t["recompute"], t["rows"]): t for t in cpu["timings"]}
    assert set(timings) == {
        (tp, again, rows) for tp in (1, 2) for again in (False, True) for rows in (1, 4)
    }
    for timing in timings.values():
        assert all(value > 0 for name, value in timing.items() if name.endswith(PARTS))
        assert timing["layer_peak_bytes"] is None
    few_s, many_s = (  # all together: one part alone takes less than what disturbs it
        sum(t[name] for key, t in timings.items() if key[2] == rows for name in t if name.endswith(PARTS))
        for rows in (1, 4)
    )
    assert many_s > few_s
    assert cpu["optimizer_s_per_parameter"] > 0
    assert cpu["matmul_flops_per_s"]["value"] > 1e9
    assert cpu["copy_bytes_per_s"]["value"] > 1e8
    links = {link["kind"]: link for link in found["links"]}
    assert {kind: link["source"] for kind, link in links.items()} == {
        "inside_host": "measured",
        "inside_island": "measured",
    }
    assert all(link["bytes_per_s"] > 1e8 and link["latency_s"] < 1e-2 for link in links.values())
    reduced = {c["link"]: c for c in found["curves"] if c["kind"] == "all_reduce"}
    assert {link: (c["source"], c["backend"], c["hosts"]) for link, c in reduced.items()} == {
        "inside_host": ("measured", "gloo", ["one"]),
        "inside_island": ("measured", "gloo", ["one", "two"]),
    }

    (tmp_path / "lab.yaml").write_text(CPUS + DECLARED)  # devices alone count from here
    done("probe", "lab.yaml", cwd=tmp_path)
    again, said = run(tmp_path, "--quick")
    assert again["devices"][0]["timings"] == cpu["timings"]
    assert "figures from the cache" in said
    recipe.write_text(recipe.read_text().replace(SHARED, "plan: { tp: [1] }"))  # takes less time
    anew, said = run(tmp_path, "--quick", "--no-cache")
    assert [t for t in anew["devices"][0]["timings"] if t in cpu["timings"]] == []
    assert "from the cache" not in said


def test_estimate_runs_nothing_and_says_so(tmp_path: Path) -> None:
    write_lab(tmp_path)
    done("probe", "lab.yaml", cwd=tmp_path)
    found, said = run(tmp_path, "--from-spec")
    assert {device["source"] for device in found["devices"]} == {"assumed"}
    assert {link["source"] for link in found["links"]} == {"assumed"}
    assert "were measured nowhere" in said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", ["runtime.bench", "runtime.collectivebench"])
def test_interrupt_leaves_no_process(tmp_path: Path, module: str) -> None:
    write_lab(tmp_path)
    done("probe", "lab.yaml", cwd=tmp_path)
    marker = f"HETRUN_TEST_MARK={tmp_path}"
    process = subprocess.Popen(
        argv("profile", "tiny-llama.yaml", "--no-cache", "--quick"),
        cwd=tmp_path,
        env={**os.environ, "HETRUN_TEST_MARK": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _until(lambda: any(module in line for line in _marked(marker).values()), timeout_s=60.0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        _until(lambda: not _marked(marker))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _marked(marker: str) -> dict[int, str]:
    """Processes with the marker in their environment: pid and command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if marker.encode() in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = line.decode(errors="replace")
        except OSError:
            continue
    return found


def _until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.05)
