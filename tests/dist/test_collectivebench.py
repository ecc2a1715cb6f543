"""Ranks that add up to be timed, as profile starts them: on one host, on two, with a plug-in's backend, and ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.dist.jobs import ROOT, Ended, running, wait

pytestmark = pytest.mark.dist

# A vendor's library as far as torch sees it: a module that brings a backend of its own name.
PLUGIN = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("fakeccl", create, devices=["cpu"])
"""


def request(ranks: Sequence[int], world_size: int, **changes: Any) -> dict[str, Any]:
    return {
        "backend": "gloo",
        "world_size": world_size,
        "seats": [{"rank": rank} for rank in ranks],
        "server_addr": "127.0.0.1",
        "client_addr": "127.0.0.1",
        "p2p": False,
        "sizes": [1 << 10, 1 << 16, 1 << 20],
        "min_repeats": 2,
        "max_repeats": 4,
        "budget_s": 0.05,
        "connect_s": 10.0,
        "start_s": 30.0,
        "deadline_s": 20.0,
        **changes,
    }


def two_hosts(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two ranks, each on a host of its own that has the address 127.0.0.1."""
    same = meeting() | changes
    return request([0], 2, **same), request([1], 2, **same)


def meeting() -> dict[str, Any]:
    ports = [20000 + secrets.randbelow(12000) for _ in range(5)]
    return {"ports": ports, "token": secrets.token_hex(32)}


def command(folder: Path, wanted: dict[str, Any]) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "collective.json").write_text(json.dumps(wanted))
    return [sys.executable, "-m", "hetrun.runtime.collectivebench", str(folder)]


def run_all(folder: Path, *hosts: dict[str, Any], **variables: str) -> list[Ended]:
    """One agent for each host, all at once."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(running(command(folder / f"host-{number}", wanted), variables))
            for number, wanted in enumerate(hosts)
        ]
        return [wait(process) for process in processes]


def answer(folder: Path, host: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (folder / f"host-{host}" / "out" / "collective.json").read_text()
    )
    return found


def sizes(points: list[dict[str, float]]) -> list[float]:
    assert all(point["seconds"] > 0 for point in points)
    return [point["num_bytes"] for point in points]


def test_two_hosts_meet_over_a_port_and_only_the_first_answers_with_figures(tmp_path: Path) -> None:
    ended = run_all(tmp_path, *two_hosts())
    assert [item.code for item in ended] == [0, 0], ended
    first, second = answer(tmp_path), answer(tmp_path, 1)
    assert sizes(first["all_reduce"]) == [4, 1 << 10, 1 << 16, 1 << 20]
    assert (first["why"], first["p2p"]) == ("", [])
    assert second == {"all_reduce": [], "p2p": [], "why": ""}


def test_backend_of_a_plugin_is_measured_with_three_ranks_and_both_ways(tmp_path: Path) -> None:
    (tmp_path / "fakeccl_plugin.py").write_text(PLUGIN)
    seats = [{"rank": rank, "torch_plugin": "fakeccl_plugin"} for rank in range(3)]
    wanted = request([], 3, seats=seats, backend="fakeccl", p2p=True, **meeting())
    (ended,) = run_all(tmp_path, wanted, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert ended.code == 0, ended.output
    found = answer(tmp_path)
    assert sizes(found["all_reduce"]) == [4, 1 << 10, 1 << 16, 1 << 20]
    assert sizes(found["p2p"]) == [4, 1 << 10, 1 << 16, 1 << 20]


@pytest.mark.parametrize(
    ("seat", "backend", "says"),
    [
        ({"torch_plugin": "no_such_plugin"}, "gloo", "rank 1: cannot import no_such_plugin"),
        ({"torch_device": "cuda"}, "gloo", "rank 1: torch .* sees 0 'cuda' devices"),
        ({}, "nosuchccl", "has no backend 'nosuchccl'"),
    ],
)
def test_what_one_rank_lacks_is_the_answer_of_both_hosts(
    tmp_path: Path, seat: dict[str, Any], backend: str, says: str
) -> None:
    first, second = two_hosts(backend=backend)
    second["seats"] = [{"rank": 1, **seat}]
    ended = run_all(tmp_path, first, second)
    assert [item.code for item in ended] == [0, 0], ended
    for host in (0, 1):
        found = answer(tmp_path, host)
        assert re.search(says, found["why"]), found["why"]
        assert found["all_reduce"] == []


def test_host_without_torch_is_told_to_both_before_any_rank_starts(tmp_path: Path) -> None:
    """-S leaves out the installed packages, torch among them."""
    first, second = two_hosts()
    bare = command(tmp_path / "host-1", second)
    bare.insert(1, "-S")
    with (
        running(command(tmp_path / "host-0", first), {}) as one,
        running(bare, {"PYTHONPATH": str(ROOT)}) as two,
    ):
        ended = [wait(one), wait(two)]
    assert [item.code for item in ended] == [0, 0], ended
    assert answer(tmp_path)["why"] == "the other host: its interpreter has no torch"
    assert answer(tmp_path, 1)["why"] == "its interpreter has no torch"


def test_host_that_dies_in_the_middle_ends_the_other_soon_with_an_error(tmp_path: Path) -> None:
    first, second = two_hosts(
        sizes=[1 << 20], min_repeats=100_000, max_repeats=100_000, deadline_s=60.0
    )
    with (
        running(command(tmp_path / "host-0", first), {}) as one,
        running(command(tmp_path / "host-1", second), {}) as two,
    ):
        time.sleep(6.0)
        assert one.poll() is None
        os.kill(two.pid, signal.SIGKILL)
        started_s = time.monotonic()
        ended = wait(one)
        assert ranks_of(tmp_path) == []
    assert ended.code == 1
    assert time.monotonic() - started_s < 8.0
    assert "the other host's part ended" in ended.output or "rank 0 ended" in ended.output


def ranks_of(folder: Path) -> list[int]:
    """Processes that still run with a job below the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"{folder}/host-".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def test_host_that_nobody_joins_gives_up_in_time(tmp_path: Path) -> None:
    first, _ = two_hosts(connect_s=1.0)
    (ended,) = run_all(tmp_path, first)
    assert ended.code == 1
    assert "no client came to 127.0.0.1 within 1 s" in ended.output
