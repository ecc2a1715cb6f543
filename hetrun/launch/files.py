"""What each host of a plan gets: environment, files, torchrun's arguments. Sending and starting: `hosts.py`."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import ConfigError
from hetrun.model import Connection, DataKind, HostSpec, Plan, RankPlan, Recipe, plan_sha
from hetrun.store import dumps
from hetrun.transport import OPEN_SHELL
from hetrun.transport.jobs import JOB_FOLDER
from hetrun.vendors import all_vendors

WORKER = "hetrun.runtime.worker"
HIDDEN = "***"
_MAX_SECRET = 1 << 16

# Recipe and inventory may set any of these themselves.
_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # a rank's last line must not die with it
    "PYTHONFAULTHANDLER": "1",  # a hang is ended by SIGABRT, which then shows where each rank is
}


def read_by_ranks(recipe: Recipe) -> tuple[str, ...]:
    """Return files and folders that every host must have."""
    data = recipe.data
    both = data.kind is DataKind.MEGATRON
    texts = (f"{data.path}.bin", f"{data.path}.idx") if both else (data.path,)
    wanted = (*texts, data.tokenizer, recipe.weights)
    return tuple(path for path in wanted if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks meet: numeric address and free port on host 0, an id that no other run has."""

    addr: str
    port: int | str
    rdzv_id: str
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFiles:
    """What one host gets. Secrets stand in `files` only, below env/."""

    host: str
    ranks: tuple[int, ...]
    args: tuple[str, ...]  # after the interpreter
    env: dict[str, str]
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """One host of a dry run: what would be started there, with secrets hidden."""

    host: str
    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    rank_env: dict[str, dict[str, str]]  # by rank; what is not in env
    # path below the job's folder -> sha256, hidden where secrets would go into it
    files: dict[str, str]
    opened_by: str  # how the interpreter is found there

    def __str__(self) -> str:
        ranks = f"ranks {self.ranks[0]}-{self.ranks[-1]}" if self.ranks[1:] else "rank 0"
        if len(self.ranks) == 1:
            ranks = f"rank {self.ranks[0]}"
        lines = [f"{self.host} ({ranks})", f"  shell {self.opened_by}"]
        lines += [f"  env   {key}={value}" for key, value in self.env.items()]
        for rank, env in self.rank_env.items():
            lines += [f"  env   of rank {rank}: {key}={value}" for key, value in env.items()]
        lines += [f"  file  {path} sha256 {sha256}" for path, sha256 in self.files.items()]
        return "\n".join([*lines, f"  run   {shlex.join(self.argv)}"])


def ranks_by_host(plan: Plan) -> dict[str, tuple[RankPlan, ...]]:
    """Return each host's ranks, hosts in order of their node rank.

    Raises:
        ConfigError: torchrun, which numbers host by host, could not give these ranks.
    """
    found = {
        spec.name: tuple(rank for rank in plan.split.ranks if rank.host == spec.name)
        for spec in plan.hosts
    }
    for host, ranks in found.items():
        if not ranks:
            raise ConfigError(f"plan: host {host} runs no rank", hint="write it again: hetrun plan")
    in_order = [rank.rank for ranks in found.values() for rank in ranks]
    if in_order != list(range(len(plan.split.ranks))):
        raise ConfigError(
            f"plan: ranks host by host are {in_order}, need ascending numbers",
            hint="write it again: hetrun plan",
        )
    return found


def read_secrets(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the recipe's secrets: of the variable NAME here, else of the file that NAME_FILE names.

    Raises:
        ConfigError: one is not set where hetrun runs, or its file cannot be read or is open to others.
    """
    return {name: _secret(name, environ) for name in plan.recipe.launch.secrets}


def _secret(name: str, environ: Mapping[str, str]) -> str:
    if name in environ:
        return environ[name]
    path = Path(environ.get(f"{name}_FILE", ""))
    if f"{name}_FILE" not in environ:
        raise ConfigError(
            f"secret {name} is not set in the environment",
            hint=f"export {name}=... or {name}_FILE=<path>, or take it out of launch.secrets in the recipe",
        )
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"secret {name}: {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"secret {name}: others may read {path} (mode {mode & 0o777:o})",
            hint=f"chmod 600 {path}",
        )
    if b"\0" in data or len(data) > _MAX_SECRET:
        raise ConfigError(f"secret {name}: {path} holds no value of a variable")
    return os.fsdecode(data.removesuffix(b"\n"))


def torchrun_args(
    plan: Plan, node_rank: int, meeting: Meeting, *, num_ranks: int, module: str = WORKER
) -> tuple[str, ...]:
    """Return what follows the interpreter on one host.

    Static rendezvous: c10d numbers hosts by the text of their addresses and loses those with a slow clock.
    """
    timeout_s = max(1, int(plan.recipe.launch.start_timeout_s))
    return (
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(plan.hosts)}",
        f"--nproc-per-node={num_ranks}",
        f"--node-rank={node_rank}",
        "--rdzv-backend=static",
        f"--master-addr={meeting.addr}",
        f"--master-port={meeting.port}",
        f"--rdzv-conf=timeout={timeout_s}",
        "--max-restarts=0",
        f"--log-dir={JOB_FOLDER}/logs",
        "-r",
        "3",
        "-m",
        module,
        JOB_FOLDER,
    )


def agent_env(plan: Plan, spec: HostSpec, nic: str | None, meeting: Meeting) -> dict[str, str]:
    """Return the variables that all ranks of a host share: ours, then the host's, then the recipe's.

    The id of the rendezvous is one of them: process lists show arguments to every user of the host.

    NIC names differ between hosts, so each gets its own; `=` asks for exactly this name.
    """
    nics = {"GLOO_SOCKET_IFNAME": nic, "NCCL_SOCKET_IFNAME": f"={nic}"} if nic else {}
    return {
        **_DEFAULTS,
        **nics,
        **spec.env,
        **plan.recipe.launch.env,
        "HETRUN_HOST": spec.name,
        "HETRUN_PLAN_SHA": plan_sha(plan),
        "PET_RDZV_ID": meeting.rdzv_id,  # torchrun's --rdzv-id
    }


def rank_env(
    rank: RankPlan, shared: Mapping[str, str], secrets: Mapping[str, str], nic: str | None
) -> dict[str, str]:
    """Return all variables of one rank: its device, and the interface in the words of its vendor's library."""
    device = {}
    if rank.visible_env is not None and rank.visible_id is not None:
        device[rank.visible_env] = rank.visible_id
    vendor = None if rank.emulated else all_vendors().get(rank.vendor)
    words = vendor.nic_env if vendor is not None and nic is not None else {}
    nics = {name: word.replace("{nic}", nic or "") for name, word in words.items()}
    threads = {"OMP_NUM_THREADS": str(rank.num_threads)}
    return {**threads, **nics, **rank.env, **shared, **device, **secrets}


def host_files(
    plan: Plan,
    node_rank: int,
    *,
    meeting: Meeting,
    nic: str | None,
    secrets: Mapping[str, str],
    module: str = WORKER,
) -> HostFiles:
    """Return everything for one host."""
    spec = plan.hosts[node_rank]
    ranks = ranks_by_host(plan)[spec.name]
    env = {**agent_env(plan, spec, nic, meeting), "HETRUN_ATTEMPT": str(meeting.attempt)}
    files = {"plan.json": dumps(plan).encode()}
    for rank in ranks:
        text = json.dumps(rank_env(rank, env, secrets, nic), indent=1)
        files[f"env/rank-{rank.rank:04}.json"] = text.encode()
    return HostFiles(
        host=spec.name,
        ranks=tuple(rank.rank for rank in ranks),
        args=torchrun_args(plan, node_rank, meeting, num_ranks=len(ranks), module=module),
        env=env,
        files=files,
    )


def shell_line(spec: HostSpec) -> str:
    """Return in words of a shell what becomes of the one command that SSH is given."""
    activate = f". {shlex.quote(spec.activate)} && " if spec.activate else ""
    opened = "/bin/sh" if spec.connection is Connection.LOCAL else OPEN_SHELL
    return f"{opened} (then, on its stdin:) {activate}exec {shlex.quote(spec.python)} -I"


def host_command(plan: Plan, node_rank: int, *, meeting: Meeting, nic: str) -> HostCommand:
    """Return what a dry run shows of one host."""
    spec = plan.hosts[node_rank]
    hidden = dict.fromkeys(plan.recipe.launch.secrets, HIDDEN)
    built = host_files(plan, node_rank, meeting=meeting, nic=nic, secrets=hidden)
    own: dict[str, dict[str, str]] = {}
    for rank in ranks_by_host(plan)[spec.name]:
        whole = rank_env(rank, built.env, hidden, nic)
        own[str(rank.rank)] = {
            key: value for key, value in whole.items() if built.env.get(key) != value
        }
    return HostCommand(
        host=spec.name,
        ranks=built.ranks,
        argv=(spec.python, *built.args),
        env=built.env,
        rank_env={rank: env for rank, env in own.items() if env},
        files={
            path: HIDDEN if hidden and path.startswith("env/") else hashlib.sha256(data).hexdigest()
            for path, data in built.files.items()
        },
        opened_by=shell_line(spec),
    )
