"""The bench as profile runs it: a process that reads one file and writes one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.jobs import ROOT, Ended, running, wait

pytestmark = pytest.mark.dist

MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 24, "vocab_size": 256}
CHIP = {"vendor": "red", "model": "r1", "num_devices": 1, "flops_per_s": 1e9, "memory_bytes": 99}


def _device(model: str, **changes: Any) -> dict[str, Any]:
    device = {
        "vendor": "red", "model": model, "torch_device": "cpu", "torch_plugin": None,
        "visible_env": None, "visible_id": None, "num_threads": 1, "emulated": None,
    }  # fmt: skip
    return {**device, **changes}


def _run(folder: Path, devices: list[dict[str, Any]], **variables: str) -> Ended:
    request = {"model": MODEL, "seq_len": 8, "rows": [1, 2], "dtype": "fp32", "devices": devices}
    (folder / "bench.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "hetrun.runtime.bench", str(folder)]
    with running(command, variables) as process:
        return wait(process)


def test_emulated_chips_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')")
    ended = _run(tmp_path, [_device("r1", emulated=CHIP)], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert ended.code == 0, ended.output
    answer = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert answer["torch_version"] is None
    assert [device["source"] for device in answer["devices"]] == ["modelled"]


def test_real_and_emulated_devices_answer_in_the_order_asked(tmp_path: Path) -> None:
    devices = [
        _device("real", visible_env="RED_VISIBLE_DEVICES", visible_id="2"),
        _device("r1", emulated=CHIP),
    ]
    ended = _run(tmp_path, devices)
    assert ended.code == 0, ended.output
    answer = json.loads((tmp_path / "out" / "bench.json").read_text())
    found = [(device["model"], device["source"]) for device in answer["devices"]]
    assert found == [("real", "measured"), ("r1", "modelled")]
    assert answer["torch_version"]


def test_checks_answer_beside_the_devices(tmp_path: Path) -> None:
    request = {
        "model": MODEL, "seq_len": 8, "rows": [1], "dtype": "fp32", "quick": True,
        "devices": [_device("r1", emulated=CHIP)], "checks": [_device("real", index=3)],
    }  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(request))
    with running([sys.executable, "-m", "hetrun.runtime.bench", str(tmp_path)], {}) as process:
        ended = wait(process)
    assert ended.code == 0, ended.output
    answer = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [device["model"] for device in answer["devices"]] == ["r1"]
    (check,) = answer["checks"]
    assert (check["model"], check["index"]) == ("real", 3)
    assert check["layer_s"] > 0


def test_variable_that_selects_the_device_is_set_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os; raise SystemExit('device ' + os.environ['RED_VISIBLE_DEVICES'])"
    )
    device = _device("real", visible_env="RED_VISIBLE_DEVICES", visible_id="2")
    ended = _run(tmp_path, [device], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert ended.code == 1
    assert "device 2" in ended.output
    assert "red real: measuring it ended with code 1" in ended.output
    assert not (tmp_path / "out").exists()
