"""Job directories as launch writes them, and workers started as torchrun starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetrun.model import Plan

ROOT = Path(__file__).parents[2]
_LIMIT_S = 50.0


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    code: int
    output: str


def write_job(folder: Path, plan: Plan, env: dict[str, str] | None = None) -> Path:
    """Write plan.json and the env files of all ranks."""
    (folder / "env").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    for rank in plan.split.ranks:
        values = {"HETRUN_HOST": rank.host, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        (folder / "env" / f"rank-{rank.rank:04d}.json").write_text(json.dumps(values))
    return folder


def read_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Events of one rank so far."""
    path = folder / "events" / f"rank-{rank:04d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """Names of events, in order."""
    return [str(event["event"]) for event in events]


def run_torchrun(folder: Path, num_ranks: int) -> Ended:
    """Run a job on this host with torchrun."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=static",
        "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--max-restarts=0",
        f"--nproc-per-node={num_ranks}", "-m", "hetrun.runtime.worker", str(folder),
    ]  # fmt: skip
    with running(command, {}) as process:
        return wait(process)


def run_workers(folders: Sequence[Path]) -> list[Ended]:
    """Run one worker per job directory, all of one world, without torchrun in between."""
    with ExitStack() as stack:
        port = free_port()
        processes = [
            stack.enter_context(start_worker(folder, rank, world_size=len(folders), port=port))
            for rank, folder in enumerate(folders)
        ]
        return [wait(process) for process in processes]


@contextmanager
def start_worker(
    folder: Path, rank: int, *, world_size: int, port: int
) -> Iterator[subprocess.Popen[str]]:
    """Start one worker in its job directory, with the variables that torchrun would set."""
    command = [sys.executable, "-m", "hetrun.runtime.worker", str(folder)]
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with running(command, variables, cwd=folder) as process:
        yield process


@contextmanager
def running(
    command: Sequence[str], variables: dict[str, str], cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own; at the end all of that session is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a process and of its output."""
    output, _ = process.communicate(timeout=_LIMIT_S)
    return Ended(process.returncode, output)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
