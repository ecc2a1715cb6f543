"""A plan that a person edited is refused before anything starts, with the place that is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun.arch.hf import from_config
from hetrun.errors import ConfigError
from hetrun.launch import dry_run, launch
from hetrun.launch.check import check_plan
from hetrun.model import HostSpec, ModelSpec, Order, Plan
from tests.ssh.plans import Recorder, make_plan
from tests.unit import report_factory
from tests.unit.hf_lab import keys_of

ONE = HostSpec(name="a1", data_addr="10.0.0.1")
TWO = HostSpec(name="b1", data_addr="10.0.0.2")


def _plan(**launch: Any) -> Plan:
    return make_plan([(ONE, 2), (TWO, 1)], **launch)


def _with_rank(number: int, **changes: Any) -> Plan:
    plan = _plan()
    ranks = [replace(rank, **changes) if rank.rank == number else rank for rank in plan.split.ranks]
    return replace(plan, split=replace(plan.split, ranks=tuple(ranks)))


def _with_stage(index: int, **changes: Any) -> Plan:
    plan = _plan()
    replica = plan.split.replicas[0]
    stages = [
        replace(stage, **changes) if number == index else stage
        for number, stage in enumerate(replica.stages)
    ]
    replicas = (replace(replica, stages=tuple(stages)),)
    return replace(plan, split=replace(plan.split, replicas=replicas))


def _with_first_row(row: int) -> Plan:
    plan = _plan()
    replicas = (replace(plan.split.replicas[0], first_row=row),)
    return replace(plan, split=replace(plan.split, replicas=replicas))


def test_whole_plans_pass() -> None:
    check_plan(_plan(env={"OMP_NUM_THREADS": "2"}))
    check_plan(report_factory.make_plan())


BROKEN = {
    "stages hold ranks [0, 1, 99], need each of 0 to 2 once": _with_stage(2, ranks=(99,)),
    "stages hold ranks [0, 0, 2], need each": _with_stage(1, ranks=(0,)),
    "replica 0: first_row 1, need 0": _with_first_row(1),
    "replica 0, stage 0: has_embedding False, need True": _with_stage(0, has_embedding=False),
    "replica 0, stage 1: has_head True, need False": _with_stage(1, has_head=True),
    "rank 1: says replica 3, stage 1, is held by replica 0, stage 1": _with_rank(1, replica=3),
    "rank 1: device a1/0 is that of rank 0 already": _with_rank(1, device_index=0),
    "rank 1: local_rank 5, need 1": _with_rank(1, local_rank=5),
    "rank 2: num_threads 0, need at least 1": _with_rank(2, num_threads=0),
    "rank 0: torch_device 'cuda; rm' is no name": _with_rank(0, torch_device="cuda; rm"),
    "rank 0: torch_plugin 'os; x' is no name": _with_rank(0, torch_plugin="os; x"),
    "rank 0: visible_env 'A B' is no name": _with_rank(0, visible_env="A B"),
    "rank 0: env 'A=B' is no name": _with_rank(0, env={"A=B": "1"}),
    "recipe: launch.env: RANK is set by torchrun": _plan(env={"RANK": "7"}),
    "host a1: env: MASTER_ADDR is set by torchrun": make_plan(
        [(replace(ONE, env={"MASTER_ADDR": "x"}), 1)]
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_contradiction_is_named(message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_plan(BROKEN[message])
    assert message in caught.value.message
    assert caught.value.hint


def test_zero_bubble_and_lanes_pass() -> None:
    plan = _plan()
    (replica,) = plan.split.replicas
    held = [replace(stage, most_held=stage.window) for stage in replica.stages]
    first, second = held[0], replace(held[-1], ranks=(1, 2), lanes=2)
    merged = replace(second, first_layer=first.num_layers)
    merged = replace(merged, num_layers=sum(stage.num_layers for stage in held[1:]))
    ranks = tuple(replace(rank, stage=min(rank.stage, 1)) for rank in plan.split.ranks)
    other = replace(replica, order=Order.ZERO_BUBBLE, stages=(first, merged))
    check_plan(replace(plan, split=replace(plan.split, ranks=ranks, replicas=(other,))))


def _shared(model: ModelSpec | None = None) -> Plan:
    """The same ranks as one stage whose layers all three share."""
    plan = make_plan([(ONE, 3)])
    (replica,) = plan.split.replicas
    num_layers = (model or plan.recipe.model).num_layers
    whole = replace(replica.stages[0], ranks=(0, 1, 2), num_layers=num_layers, has_head=True)
    ranks = tuple(replace(rank, stage=0) for rank in plan.split.ranks)
    split = replace(plan.split, ranks=ranks, replicas=(replace(replica, stages=(whole,)),))
    recipe = plan.recipe if model is None else replace(plan.recipe, model=model)
    return replace(plan, split=split, recipe=recipe)


def test_ranks_that_share_layers_must_divide_them_evenly_on_one_host() -> None:
    model = replace(_plan().recipe.model, num_heads=6, num_kv_heads=3, hidden_size=48, ffn_size=48)
    check_plan(_shared(model))
    with pytest.raises(ConfigError, match=r"plan\.tp: 3 devices cannot share a layer evenly"):
        check_plan(_shared(replace(model, num_kv_heads=2)))
    plan = _shared(model)
    other = replace(plan.hosts[0], name="other")
    ranks = (*plan.split.ranks[:2], replace(plan.split.ranks[2], host="other", local_rank=0))
    split = replace(plan.split, ranks=ranks)
    with pytest.raises(ConfigError, match=r"share layers, on \['a1', 'other'\]"):
        check_plan(replace(plan, hosts=(*plan.hosts, other), split=split))


def test_layers_of_transformers_are_shared_where_their_config_says_how() -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4, "hidden_size": 12}
    check_plan(_shared(from_config({**keys_of("qwen3"), **sizes})))
    with pytest.raises(ConfigError, match="3 ranks share layers of transformers' gpt2") as caught:
        check_plan(_shared(from_config(keys_of("gpt2"))))
    assert "plan.tp" in (caught.value.hint or "")


def test_launch_and_dry_run_refuse_it_before_anything_is_made(tmp_path: Path) -> None:
    broken = _with_stage(2, ranks=(99,))
    with pytest.raises(ConfigError, match="stages hold ranks"):
        dry_run(broken)
    with pytest.raises(ConfigError, match="stages hold ranks"):
        launch(broken, run_root=tmp_path / "runs", observer=Recorder(), environ={})
    assert not (tmp_path / "runs").exists()
