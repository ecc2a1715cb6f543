"""What launch tests over the lab share: a plan for its hosts, a launch of fake ranks, and where to look."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hetrun.launch import Options, launch
from hetrun.launch.remaining import Replan
from hetrun.model import Plan, RunOutcome
from tests.ssh.lab import LabHost, parent
from tests.ssh.plans import FAKE, Recorder, fake_env, make_plan

Hosts = tuple[LabHost, LabHost, LabHost]
LONG = {"HETRUN_FAKE_STEPS": "500"}
GONE_S = 30.0  # for processes to end on a loaded machine; an idle one needs less than one second


def lab_plan(hosts: Hosts, meet: Path, fault: str = "", **launch_spec: Any) -> Plan:
    """Three ranks on the first host, one on the second."""
    more = launch_spec.pop("env", {})
    env = fake_env(meet, fault, **more)
    return make_plan([(hosts[0].spec(), 3), (hosts[1].spec(), 1)], env=env, **launch_spec)


def launch_fake(
    plan: Plan,
    folder: Path,
    recorder: Recorder | None = None,
    *,
    skip: tuple[str, ...] = (),
    replan: Replan | None = None,
) -> RunOutcome:
    return launch(
        plan,
        run_root=folder / "runs",
        observer=recorder or Recorder(),
        environ=os.environ,
        code=FAKE,
        options=Options(skip=skip, replan=replan),
    )


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def job_folders(host: LabHost) -> list[Path]:
    return sorted((host.folder / "home/.cache/hetrun/jobs").iterdir(), key=os.path.getmtime)


def job_pids(host: LabHost) -> dict[str, int]:
    """Torchrun and the processes above it: the job's first one, and the guard."""
    found = host.processes()
    torchrun = next(pid for pid, line in found.items() if "-m torch.distributed.run" in line)
    init = parent(torchrun)
    guard = init
    while "-I -c" in found.get(parent(guard), ""):  # our own interpreters above it
        guard = parent(guard)
    return {"guard": guard, "init": init, "torchrun": torchrun}
