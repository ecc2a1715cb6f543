"""What each host of a plan gets, word by word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun.errors import ConfigError
from hetrun.launch import dry_run
from hetrun.launch.files import (
    Meeting,
    host_files,
    ranks_by_host,
    read_by_ranks,
    read_secrets,
)
from hetrun.model import DataKind, HostSpec, Plan, plan_sha
from tests.ssh.plans import make_plan

MEETING = Meeting(addr="10.0.0.1", port=23456, rdzv_id="c0ffee")
ONE = HostSpec(name="a1", data_addr="10.0.0.1", python="/opt/v/bin/python", env={"X": "of host"})
TWO = HostSpec(name="b1", data_addr="10.0.0.2", env={"OMP_NUM_THREADS": "4"})


def _plan(**launch: Any) -> Plan:
    return make_plan([(ONE, 3), (TWO, 1)], **launch)


def test_files_that_every_host_must_have_are_known_before_the_start() -> None:
    recipe = _plan().recipe
    assert read_by_ranks(recipe) == ()
    megatron = replace(recipe.data, kind=DataKind.MEGATRON, path="/d/books")
    assert read_by_ranks(replace(recipe, data=megatron)) == ("/d/books.bin", "/d/books.idx")
    text = replace(
        recipe.data, kind=DataKind.TEXT, path="/d/t", tokenizer="/d/tok.json", end_token="<e>"
    )
    both = replace(recipe, data=text, weights="/d/llama")
    assert read_by_ranks(both) == ("/d/t", "/d/tok.json", "/d/llama")


def test_torchrun_gets_exactly_these_arguments() -> None:
    files = host_files(_plan(), 1, meeting=MEETING, nic="ens3", secrets={})
    assert " ".join(files.args) == (
        "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank=1"
        " --rdzv-backend=static --master-addr=10.0.0.1 --master-port=23456"
        " --rdzv-conf=timeout=50 --max-restarts=0 --log-dir=@JOBDIR/logs -r 3"
        " -m hetrun.runtime.worker @JOBDIR"
    )
    assert files.ranks == (3,)


def test_host_and_recipe_override_our_variables_in_this_order() -> None:
    plan = _plan(env={"X": "of recipe", "GLOO_SOCKET_IFNAME": "own"})
    one = host_files(plan, 0, meeting=MEETING, nic="ens3", secrets={})
    assert one.env == {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "own",
        "NCCL_SOCKET_IFNAME": "=ens3",
        "X": "of recipe",
        "HETRUN_HOST": "a1",
        "HETRUN_PLAN_SHA": plan_sha(plan),
        "HETRUN_ATTEMPT": "1",
        "PET_RDZV_ID": "c0ffee",
    }
    two = host_files(plan, 1, meeting=MEETING, nic="eth0", secrets={})
    assert (two.env["OMP_NUM_THREADS"], two.env["NCCL_SOCKET_IFNAME"]) == ("4", "=eth0")


def test_ranks_get_the_threads_of_their_device_unless_the_user_says_otherwise() -> None:
    plan = _plan()
    ranks = tuple(replace(rank, num_threads=2) for rank in plan.split.ranks)
    plan = replace(plan, split=replace(plan.split, ranks=ranks))
    threads = [
        json.loads(data)["OMP_NUM_THREADS"]
        for node_rank in (0, 1)
        for path, data in host_files(
            plan, node_rank, meeting=MEETING, nic="lo", secrets={}
        ).files.items()
        if path.startswith("env/")
    ]
    assert threads == ["2", "2", "2", "4"]  # the inventory gives the second host 4


def test_secrets_stand_in_the_ranks_files_only() -> None:
    files = host_files(_plan(), 0, meeting=MEETING, nic="lo", secrets={"TOKEN": "abc-secret"})
    names = [f"env/rank-000{rank}.json" for rank in range(3)]
    assert sorted(files.files) == [*names, "plan.json"]
    assert json.loads(files.files["env/rank-0002.json"])["TOKEN"] == "abc-secret"
    assert b"abc-secret" not in files.files["plan.json"]
    assert "abc-secret" not in str((files.args, files.env))


def test_each_rank_sees_its_own_device() -> None:
    plan = _plan()
    ranks = tuple(
        replace(rank, visible_env="SOME_VISIBLE", visible_id=str(rank.local_rank))
        for rank in plan.split.ranks
    )
    plan = replace(plan, split=replace(plan.split, ranks=ranks))
    files = host_files(plan, 0, meeting=MEETING, nic="lo", secrets={}).files
    seen = [json.loads(files[f"env/rank-000{rank}.json"])["SOME_VISIBLE"] for rank in range(3)]
    assert seen == ["0", "1", "2"]


def test_a_dry_run_shows_each_host_and_hides_secrets() -> None:
    one, two = dry_run(_plan(secrets=("TOKEN",)))
    text = str(two)
    assert text.splitlines()[0] == "b1 (rank 3)"
    assert str(one).splitlines()[0] == "a1 (ranks 0-2)"
    assert "  env   GLOO_SOCKET_IFNAME=<interface of 10.0.0.2>" in text
    assert "  env   of rank 3: TOKEN=***" in text
    assert "python3 -m torch.distributed.run --nnodes=2" in text
    assert "'--master-port=<free port>'" in text
    assert "  shell echo hetrun-ready; exec /bin/sh (then, on its stdin:) exec python3 -I" in text
    files = [line.split()[1:] for line in text.splitlines() if " file " in line]
    assert [(path, sha256 == "***") for path, _, sha256 in files] == [
        ("plan.json", False),
        ("env/rank-0003.json", True),
    ]


def test_each_rank_gets_its_interface_in_the_words_of_its_vendors_library() -> None:
    plan = _plan()
    vendors = ("ascend", "nvidia", "metax", "nvidia")
    ranks = tuple(
        replace(rank, vendor=vendor, emulated=number == 3)
        for number, (rank, vendor) in enumerate(zip(plan.split.ranks, vendors, strict=True))
    )
    plan = replace(plan, split=replace(plan.split, ranks=ranks))
    plan = replace(plan, hosts=(plan.hosts[0], replace(TWO, env={"GLOO_SOCKET_IFNAME": "mine"})))
    envs: dict[str, dict[str, str]] = {}
    for node_rank, nic in enumerate(("ens3", "eth0")):
        files = host_files(plan, node_rank, meeting=MEETING, nic=nic, secrets={}).files
        envs |= {p: json.loads(data) for p, data in files.items() if p.startswith("env/")}
    words = [
        {key: value for key, value in envs[f"env/rank-000{rank}.json"].items() if "IFNAME" in key}
        for rank in range(4)
    ]
    common = {"GLOO_SOCKET_IFNAME": "ens3", "NCCL_SOCKET_IFNAME": "=ens3"}
    assert words[0] == {**common, "HCCL_SOCKET_IFNAME": "=ens3"}
    assert words[1] == common
    assert words[2] == {**common, "MCCL_SOCKET_IFNAME": "ens3"}
    assert words[3] == {"GLOO_SOCKET_IFNAME": "mine", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_a_dry_run_asks_no_name_service() -> None:
    plan = make_plan([(HostSpec(name="a1", data_addr="no.such.host.example"), 1)])
    assert "--master-addr=no.such.host.example" in dry_run(plan)[0].argv


def test_a_dry_run_with_secrets_needs_none_of_them() -> None:
    with pytest.raises(ConfigError, match="secret TOKEN is not set"):
        read_secrets(_plan(secrets=("TOKEN",)), {})
    assert read_secrets(_plan(secrets=("TOKEN",)), {"TOKEN": "x", "Y": "z"}) == {"TOKEN": "x"}


def test_a_secret_may_stand_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    plan, path = _plan(secrets=("TOKEN",)), tmp_path / "token"
    path.write_bytes(b"abc def\xff\n")
    path.chmod(0o600)
    environ = {"TOKEN_FILE": str(path)}
    assert read_secrets(plan, environ) == {"TOKEN": "abc def\udcff"}
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may read .* \(mode 640\)") as caught:
        read_secrets(plan, environ)
    assert "abc" not in f"{caught.value}{caught.value.hint}"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secrets(plan, environ)


def test_a_plan_whose_ranks_torchrun_cannot_give_is_refused() -> None:
    plan = _plan()
    with pytest.raises(ConfigError, match=r"ranks host by host are \[3, 0, 1, 2\]"):
        ranks_by_host(replace(plan, hosts=plan.hosts[::-1]))
    with pytest.raises(ConfigError, match="host c1 runs no rank"):
        ranks_by_host(replace(plan, hosts=(*plan.hosts, HostSpec(name="c1"))))
