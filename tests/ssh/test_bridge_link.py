"""The bridge over a link of its own, which breaks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrun.model import MIB
from tests.dist.bridges import join_bridge
from tests.dist.ranks import run_ranks
from tests.ssh.cable import ISLANDS, laid_cable, there
from tests.ssh.lab import can_build, die_with_parent

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(not can_build(), reason="needs root, network namespaces and iproute2"),
]


def cut(rank: int, store_path: Path, addr: str, note: str) -> tuple[str, str, float]:
    join_bridge(rank, store_path, ISLANDS, timeout_s=3.0, addrs=(addr,))
    tensor = torch.ones(8 * MIB)
    dist.all_reduce(tensor)
    start_s = time.time()
    try:
        for _ in range(100):
            start_s = time.time()
            dist.all_reduce(tensor)
            Path(note).touch()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.time() - start_s
    return "nothing", "", 0.0


def test_cut_link_is_an_error_on_all_ranks_after_the_limit(tmp_path: Path) -> None:
    note = tmp_path / "going"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
        "subprocess.run(['nsenter', '-t', sys.argv[2], '-n', 'ip', 'link', 'set', 'cable', 'down'], check=True)\n"
    )
    with laid_cable() as sides:
        argv = [sys.executable, "-c", program, str(note), str(sides[1].pid)]
        with subprocess.Popen(argv, preexec_fn=die_with_parent) as scissors:
            heard = run_ranks(there, 4, tmp_path, cut, sides, str(note))
            assert scissors.wait(10) == 0
    for kind, text, took_s in heard:
        assert kind in ("BridgeTimeoutError", "PeerGoneError"), text
        assert "rank" in text
        assert took_s < 3.0 + 1.0
