"""Every unit is saved once in each directory, and what the loss of a host would take is said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetrun.arch import BYTES_PER_ELEMENT
from hetrun.model import CheckpointSpec, ModelSpec, Plan
from hetrun.runtime import checkpoint_files as files
from hetrun.runtime.boxes import covers, whole_box
from hetrun.runtime.checkpoint import domain_of
from hetrun.runtime.checkpoint_files import BadCheckpointError
from hetrun.runtime.export_hf import export
from hetrun.runtime.network import initial_value
from hetrun.runtime.state import Saved, State, entries
from hetrun.schedule.holders import held_units, lost_with
from hetrun.schedule.sync import gradient_buckets
from tests.dist.plans import MODEL, Pipeline, make_plan
from tests.dist.saving import on_hosts
from tests.unit.checkpoint_lab import MODEL as SMALL
from tests.unit.checkpoint_lab import an_index, shared_stage, whole_stage

TIED = replace(MODEL, tied_embeddings=True)
THREE = (Pipeline((5, 3), 1, 2), Pipeline((8,), 1, 2), Pipeline((2, 3, 3), 1, 2))
UNITS = {"embedding", "head", *(f"layer.{layer}" for layer in range(8))}
LOCAL = CheckpointSpec(dir="/checkpoints", every_steps=1)
SHARED = replace(LOCAL, shared=True)


def plan_of(pipelines: tuple[Pipeline, ...], hosts: str, model: ModelSpec = MODEL) -> Plan:
    return on_hosts(make_plan(pipelines, model=model), list(hosts))


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["plain", "tied"])
def test_units_are_held_as_gradients_are_shared(model: ModelSpec) -> None:
    plan = plan_of(THREE, "aabccc", model)
    held = held_units(plan)
    train = plan.recipe.train
    buckets = gradient_buckets(
        plan.split.ranks, plan.split.replicas, model, BYTES_PER_ELEMENT[train.dtype]
    )
    assert buckets
    for bucket in buckets:
        for unit in bucket.units:
            assert {rank for rank, units in enumerate(held) if unit in units} == set(bucket.ranks)


@pytest.mark.parametrize("spec", [LOCAL, SHARED], ids=["local", "shared"])
@pytest.mark.parametrize("hosts", ["aaaaaa", "aabccc", "abcdef", "bababa"])
def test_every_unit_is_saved_once_in_each_directory(spec: CheckpointSpec, hosts: str) -> None:
    plan = plan_of(THREE, hosts)
    held = held_units(plan)
    for rank in range(6):
        domain = domain_of(plan, spec, rank)
        assert rank in domain.ranks
        assert set(domain.ranks) == (
            set(range(6)) if spec.shared else {r for r in range(6) if hosts[r] == hosts[rank]}
        )
        saved = [unit for member in domain.ranks for unit in domain.units[member]]
        assert len(saved) == len(set(saved))
        assert set(saved) == set().union(*(held[member] for member in domain.ranks))


def test_what_only_one_host_has_is_named() -> None:
    whole = plan_of(THREE, "abcdef")
    assert [lost_with(whole, LOCAL, {host}) for host in "abcdef"] == [[]] * 6
    assert lost_with(whole, LOCAL, {"a", "c"}) == []
    assert lost_with(whole, LOCAL, {"a", "c", "d"}) == ["embedding", "layer.0", "layer.1"]
    cut = plan_of(THREE[:1], "ab")
    lost = {host: lost_with(cut, LOCAL, {host}) for host in "ab"}
    assert {unit for units in lost.values() for unit in units} == UNITS
    assert lost["b"] == ["head", "layer.5", "layer.6", "layer.7"]
    assert lost_with(cut, SHARED, {"b"}) == []


def test_moments_go_where_their_parameter_is() -> None:
    stage = whole_stage()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    state = State(stage, optimizer)
    assert len(state.needs) == 4 * len(list(stage.parameters()))
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.empty(box.shape, dtype=dtype).uniform_(1, 2, generator=generator)
        for name, needs in state.needs.items()
        for box, dtype in needs.items()
    }
    for name, value in values.items():
        state.put(name, whole_box(value.shape), value)
    copies = values_of(state, "embedding", "head", "layer.0", "layer.1", "layer.2")
    assert set(copies) == set(values)
    for name, value in values.items():
        assert torch.equal(copies[name], value)
    assert set(values_of(state, "layer.1")) == {n for n in values if "layer.1." in n}
    wrong = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(BadCheckpointError, match=r"head\.norm\.weight: the checkpoint has \(3,\)"):
        state.put("head.norm.weight", whole_box((32,)), wrong)


def values_of(state: State, *units: str) -> dict[str, torch.Tensor]:
    """What a rank saves of these units."""
    return {saved.name: saved.value for saved in state.copy(frozenset(units))}


def test_ranks_that_share_layers_save_them_together_and_the_rest_once() -> None:
    stages = [shared_stage(place) for place in range(2)]
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=0.1) for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        for parameter in stage.parameters():
            parameter.grad = parameter.detach() + 1.0
        optimizer.step()
    states = [
        State(stage, optimizer, is_first=place == 0)
        for place, (stage, optimizer) in enumerate(zip(stages, optimizers, strict=True))
    ]
    units = frozenset(stages[0].units())
    saved = [saved for state in states for saved in state.copy(units)]
    first, second = ({s.name for s in state.copy(units) if s.box.is_whole} for state in states)
    assert {name for name in second if not name.endswith(".step")} == set()
    assert "layer.0.attention_norm.weight.exp_avg" in first
    for name, parameter in whole_stage(SMALL).named_parameters():
        boxes = [s.box for s in saved if s.name == name]
        assert sum(math.prod(box.shape) for box in boxes) == parameter.numel()
        assert covers(boxes, whole_box(parameter.shape))
        assert {f"{name}.exp_avg", f"{name}.exp_avg_sq", f"{name}.step"} < {s.name for s in saved}
    tensors, parts = entries(states[1].copy(units))
    assert len(tensors) == len(states[1].copy(units))
    assert all(tensors[entry].shape == box.shape for entry, (_, box) in parts.items())


def test_copies_do_not_change_with_the_next_step() -> None:
    stage = whole_stage()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    stage(torch.arange(24).reshape(1, 24)).sum().backward()
    optimizer.step()
    copies = values_of(State(stage, optimizer), "layer.1")
    before = {name: value.clone() for name, value in copies.items()}
    optimizer.step()
    assert all(torch.equal(copies[name], before[name]) for name in before)
    name = "layer.1.q.weight"
    assert not torch.equal(copies[name], dict(stage.named_parameters())[name])


def test_shares_of_layers_are_exported_as_whole_matrices(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "step-6"
    folder.mkdir()
    sizes = {}
    for place in range(2):
        stage = shared_stage(place)
        held = [
            Saved(name, stage.boxes.get(name) or whole_box(p.shape), p.detach())
            for name, p in stage.named_parameters()
            if place == 0 or name in stage.boxes
        ]
        tensors, parts = entries(held)
        path = folder / files.shard_name(place)
        sizes[path.name] = files.write_shard(path, tensors, files.metadata_of(parts))
    files.write_index(folder, replace(an_index(SMALL), files=sizes))
    export([folder], tmp_path / "model")
    model = load_file(tmp_path / "model" / "model.safetensors")
    for name, theirs in (
        ("layer.2.o.weight", "model.layers.2.self_attn.o_proj.weight"),
        ("layer.1.k.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("embedding.weight", "model.embed_tokens.weight"),
    ):
        shape = model[theirs].shape
        value = initial_value(name, shape, model=SMALL, seed=5).to(torch.float64)
        assert torch.equal(model[theirs], value)
