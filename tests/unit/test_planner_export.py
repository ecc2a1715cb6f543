"""Exports against the rules that the targets state, and word for word on small plans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml

from hetrun.errors import ConfigError
from hetrun.model import GIB, Decay, Plan, ReplicaPlan, StagePlan
from hetrun.planner.export import TARGETS, export
from hetrun.planner.export.megatron import layout_of
from tests.unit.planner_lab import FREE_LINKS, Chips, Lab, small_model

MODEL = small_model(8, vocab_size=64)


def pipeline_plan(num_replicas: int = 1) -> Plan:
    """Chips that only hold the model together; `num_replicas` equal pipelines of both vendors."""
    chips = [
        Chips(vendor="emu-a", num_devices=num_replicas, layer_s=1.0, per_host=num_replicas),
        Chips(vendor="emu-b", num_devices=num_replicas, layer_s=3.0, per_host=num_replicas),
    ]
    plan = Lab(chips=chips, model=MODEL, batch=8, rows=(1,), links=FREE_LINKS).plan()
    return cut(plan, [6, 2], num_replicas)


def cut(plan: Plan, layers: list[int], num_replicas: int) -> Plan:
    """The plan with these layers per stage in every replica, whatever the planner chose."""
    ranks = plan.split.ranks
    a = [rank.rank for rank in ranks if rank.vendor == "emu-a"]
    b = [rank.rank for rank in ranks if rank.vendor == "emu-b"]
    stage = plan.split.replicas[0].stages[0]
    replicas = []
    for number in range(num_replicas):
        owners = [(a[number],), (b[number],)]
        replicas.append(
            ReplicaPlan(
                first_row=number * 8 // num_replicas,
                microbatch_rows=1,
                num_microbatches=8 // num_replicas,
                stages=tuple(stages(stage, owners, layers)),
            )
        )
    split = replace(plan.split, replicas=tuple(replicas))
    return replace(plan, split=split)


def stages(
    like: StagePlan, owners: Sequence[tuple[int, ...]], layers: Sequence[int]
) -> list[StagePlan]:
    made, first = [], 0
    for index, (ranks, count) in enumerate(zip(owners, layers, strict=True)):
        made.append(
            replace(
                like,
                ranks=ranks,
                first_layer=first,
                num_layers=count,
                has_embedding=index == 0,
                has_head=index == len(layers) - 1,
                window=len(layers) - index,
            )
        )
        first += count
    return made


def rows_plan() -> Plan:
    """One vendor four times as fast, every device holds the model: replicas of uneven rows."""
    chips = [
        Chips(vendor="emu-a", num_devices=2, layer_s=1.0),
        Chips(vendor="emu-b", num_devices=2, layer_s=4.0),
    ]
    return Lab(chips=chips, model=MODEL, batch=20, rows=(1, 2), links=FREE_LINKS).plan()


def flags_of(text: str) -> dict[str, list[str]]:
    """The flags of a shell array, with their values."""
    inside = re.search(r"FLAGS=\(\n(.*)\n\)\n", text, re.DOTALL)
    assert inside is not None
    flags: dict[str, list[str]] = {}
    for word in shlex.split(inside[1]):
        if word.startswith("--"):
            assert word not in flags
            flags[word] = []
        else:
            flags[next(reversed(flags))].append(word)
    return flags


def numbers(words: list[str]) -> list[int]:
    return [int(word) for word in words]


def test_synerfuse_layers_keep_its_sums() -> None:
    plan = pipeline_plan(2)
    flags = flags_of(export(plan, "synerfuse").text)
    values = numbers(flags["--hetero-pipeline-stages"])
    num_stages, layers = [], []
    while values:
        count, values = values[0], values[1:]
        num_stages.append(count)
        layers += values[:count]
        values = values[count:]
    assert sum(num_stages) == numbers(flags["--pipeline-model-parallel-size"])[0] == 2
    assert sum(layers) == numbers(flags["--num-layers"])[0] == 8
    assert (num_stages, layers) == ([1, 1], [6, 2])
    assert "--use-tp-pp-dp-mapping" not in flags
    assert numbers(flags["--micro-batch-size"]) == [1]


def test_synerfuse_rows_keep_its_sums() -> None:
    plan = rows_plan()
    assert len({replica.num_rows for replica in plan.split.replicas}) > 1
    flags = flags_of(export(plan, "synerfuse").text)
    sizes = numbers(flags["--micro-batch-size-per-dp"])
    counts = numbers(flags["--num-micro-batches-per-dp"])
    assert sizes[::2] == counts[::2]
    assert sum(sizes[::2]) == len(plan.split.replicas)
    total = sum(n * s * c for n, s, c in zip(sizes[::2], sizes[1::2], counts[1::2], strict=True))
    assert total == numbers(flags["--global-batch-size"])[0] == 20
    assert flags["--use-tp-pp-dp-mapping"] == []
    assert "--micro-batch-size" not in flags


def test_synerfuse_says_where_uneven_layers_meet_uneven_rows() -> None:
    plan = pipeline_plan(2)
    first, second = plan.split.replicas
    uneven = (
        replace(first, num_microbatches=5),
        replace(second, first_row=5, num_microbatches=3),
    )
    plan = replace(plan, split=replace(plan.split, replicas=uneven))
    with pytest.raises(ConfigError, match="split host emu-a-0 up"):
        export(plan, "synerfuse")  # replica by replica, and both first stages share a host
    ranks = [replace(rank, host=f"{rank.host}-{rank.rank}") for rank in plan.split.ranks]
    plan = replace(plan, split=replace(plan.split, ranks=tuple(ranks)))
    result = export(plan, "synerfuse")
    assert any("apart" in line for line in result.lost)
    assert flags_of(result.text)["--num-micro-batches-per-dp"] == ["1", "5", "1", "3"]


def test_megatron_layout_holds_every_layer_once() -> None:
    flags = flags_of(export(pipeline_plan(2), "megatron").text)
    layout = flags["--pipeline-model-parallel-layout"][0]
    assert layout == "Et*6|t*2,L"
    unrolled = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    assert unrolled.split("|") == ["Etttttt", "ttL"]
    batch, rows = (numbers(flags[f"--{what}-batch-size"])[0] for what in ("global", "micro"))
    assert batch % (rows * 2) == 0


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        ([8], "Et*8,L"),
        ([1, 7], "Et|t*7,L"),
        ([3, 5, 0], "Et*3|t*5|L"),
        ([0, 8], "E|t*8,L"),
        ([4, 3, 1], "Et*4|t*3|t,L"),
    ],
)
def test_megatron_layouts(layers: list[int], layout: str) -> None:
    like = pipeline_plan().split.replicas[0].stages[0]
    owners = [(index,) for index in range(len(layers))]
    assert layout_of(stages(like, owners, layers)) == layout


def test_megatron_has_no_words_for_uneven_rows_or_mixed_replicas() -> None:
    with pytest.raises(ConfigError, match="megatron cannot express this plan") as caught:
        export(rows_plan(), "megatron")
    assert caught.value.hint
    plan = pipeline_plan(2)
    first, second = plan.split.replicas
    other = replace(second, stages=tuple(stages(second.stages[0], [(1,), (3,)], [5, 3])))
    plan = replace(plan, split=replace(plan.split, replicas=(first, other)))
    for target in TARGETS:
        with pytest.raises(ConfigError, match="replica 1 "):
            export(plan, target)


def test_synerfuse_knows_one_cut_for_all_replicas_whatever_their_rows() -> None:
    plan = pipeline_plan(2)
    first, second = plan.split.replicas
    other = replace(
        second,
        first_row=5,
        num_microbatches=3,
        stages=tuple(stages(second.stages[0], [(1,), (3,)], [5, 3])),
    )
    split = replace(plan.split, replicas=(replace(first, num_microbatches=5), other))
    with pytest.raises(ConfigError, match=r"replica 1 has layers \[5, 3\], replica 0 has \[6, 2\]"):
        export(replace(plan, split=split), "synerfuse")


def test_megatron_middle_stage_needs_a_layer() -> None:
    like = pipeline_plan().split.replicas[0].stages[0]
    with pytest.raises(ConfigError, match="between others holds no layer"):
        layout_of(stages(like, [(0,), (1,), (2,)], [4, 0, 4]))


@pytest.mark.parametrize("target", ["synerfuse", "flagscale"])
def test_stage_of_the_head_alone_is_refused(target: str) -> None:
    plan = cut(pipeline_plan(), [8, 0], 1)
    with pytest.raises(ConfigError, match="holds no layer"):
        export(plan, target)


def test_flagscale_meshes_keep_its_rules() -> None:
    plan = pipeline_plan(2)
    result = export(plan, "flagscale")
    content = yaml.safe_load(result.text)
    system, model = content["system"], content["model"]
    hetero = system["hetero"]
    flat = hetero["hetero_process_meshes"]
    assert len(flat) % 5 == 0
    meshes = [flat[at : at + 5] for at in range(0, len(flat), 5)]
    assert len(meshes) == len(hetero["hetero_device_types"])
    assert hetero["hetero_current_device_type"] in hetero["hetero_device_types"]
    assert sum(mesh[4] for mesh in meshes) == system["pipeline_model_parallel_size"]
    assert sum(hetero["hetero_pipeline_layer_split"]) == model["num_layers"]
    assert len(hetero["hetero_pipeline_layer_split"]) == system["pipeline_model_parallel_size"]
    rows = meshes[0][3] * model["micro_batch_size"]
    assert all(rows % mesh[3] == 0 for mesh in meshes)
    assert {(mesh[1], mesh[2]) for mesh in meshes} == {(1, 1)}
    assert sum(mesh[0] * mesh[3] * mesh[4] for mesh in meshes) == len(plan.split.ranks)
    assert model["global_batch_size"] % rows == 0
    assert "virtual" not in result.text


def test_flagscale_meshes_may_differ_in_tensor_parallelism_where_nothing_is_tied() -> None:
    plan = pipeline_plan(2)
    ranks = plan.split.ranks
    a = [rank.rank for rank in ranks if rank.vendor == "emu-a"]
    b = [rank.rank for rank in ranks if rank.vendor == "emu-b"]
    whole = replace(
        plan.split.replicas[0],
        num_microbatches=8,
        stages=tuple(stages(plan.split.replicas[0].stages[0], [tuple(a), (b[0],)], [6, 2])),
    )
    split = replace(plan.split, ranks=(*ranks[:2], ranks[b[0]]), replicas=(whole,))
    plan = replace(plan, split=split)
    meshes = yaml.safe_load(export(plan, "flagscale").text)["system"]["hetero"]
    assert meshes["hetero_process_meshes"] == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    for target in ("megatron", "synerfuse"):
        with pytest.raises(ConfigError, match=r"tensor parallelism \[1, 2\]"):
            export(plan, target)
    tied = replace(plan.recipe, model=replace(plan.recipe.model, tied_embeddings=True))
    with pytest.raises(ConfigError, match="tied embeddings"):
        export(replace(plan, recipe=tied), "flagscale")


def test_equal_devices_swap_places_where_a_host_would_be_split() -> None:
    """Two hosts of one vendor, each holding one whole pipeline: stage by stage, each stage takes a host."""
    chips = [Chips(vendor="emu-a", num_devices=4, layer_s=1.0, per_host=2, memory=4 * GIB)]
    plan = Lab(chips=chips, model=MODEL, batch=8, rows=(1,), links=FREE_LINKS).plan()
    like = plan.split.replicas[0].stages[0]
    replicas = tuple(
        ReplicaPlan(
            first_row=4 * number,
            microbatch_rows=1,
            num_microbatches=4,
            stages=tuple(stages(like, [(2 * number,), (2 * number + 1,)], [5, 3])),
        )
        for number in range(2)
    )
    plan = replace(plan, split=replace(plan.split, replicas=replicas))
    result = export(plan, "megatron")
    assert "# node 0: emu-a-0, 2 ranks\n# node 1: emu-a-1, 2 ranks\n" in result.text
    assert any("host by host" in line for line in result.lost)


def test_what_is_lost_stands_in_the_text_too() -> None:
    plan = pipeline_plan()
    (replica,) = plan.split.replicas
    wide = tuple(replace(stage, window=stage.window + 1) for stage in replica.stages)
    split = replace(plan.split, replicas=(replace(replica, stages=wide),))
    plan = replace(plan, split=split, idle_devices=("b9/1",))
    for target in TARGETS:
        result = export(plan, target)
        assert any("windows [3, 2]" in line for line in result.lost)
        assert any("b9/1" in line for line in result.lost)
        for line in result.lost:
            assert f"# lost: {line}\n" in result.text


def test_name_of_a_device_cannot_end_a_comment() -> None:
    plan = pipeline_plan()
    ranks = tuple(replace(rank, model='x\nsystem: "evil') for rank in plan.split.ranks)
    text = export(replace(plan, split=replace(plan.split, ranks=ranks)), "flagscale").text
    types = yaml.safe_load(text)["system"]["hetero"]["hetero_device_types"]
    assert set(types) == {'xsystem: "evil'}


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no export to 'megatorn'") as caught:
        export(pipeline_plan(), "megatorn")
    assert caught.value.hint == "did you mean megatron?"


GOLDEN_SYNERFUSE = """\
# hetrun plan lab for SynerFuse
# lost: predicted step 0 s (modelled) is of hetrun's own engine
# lost: data and tokenizer: give the target's own flags
# node 0: emu-a-0, 1 ranks
# node 1: emu-b-0, 1 ranks
FLAGS=(
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 2
  --global-batch-size 8
  --micro-batch-size 1
  --hetero-pipeline-stages 1 6 1 2
  --num-layers 8
  --hidden-size 32
  --num-attention-heads 2
  --seq-length 64
  --max-position-embeddings 64
  --ffn-hidden-size 64
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --position-embedding-type rope
  --rotary-base 10000
  --disable-bias-linear
  --attention-dropout 0
  --hidden-dropout 0
  --untie-embeddings-and-output-weights
  --train-iters 1
  --lr 0.0003
  --lr-decay-style constant
  --lr-warmup-iters 0
  --weight-decay 0
  --adam-beta1 0.9
  --adam-beta2 0.95
  --adam-eps 1e-08
  --clip-grad 1
  --seed 0
)
"""

GOLDEN_FLAGSCALE = """\
system:
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 2
  hetero:
    enable_hetero: true
    hetero_device_types: ["emu-a-chip", "emu-b-chip"]
    hetero_current_device_type: "emu-a-chip"  # the type of the node that reads this
    hetero_process_meshes: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]  # tp, cp, ep, dp, pp of each
    hetero_pipeline_layer_split: [6, 2]
model:
  num_layers: 8
"""


def test_golden_texts() -> None:
    plan = pipeline_plan()
    plan = replace(plan, split=replace(plan.split, cost=replace(plan.split.cost, step_s=0.0)))
    assert export(plan, "synerfuse").text == GOLDEN_SYNERFUSE
    assert GOLDEN_FLAGSCALE in export(plan, "flagscale").text
    megatron = export(plan, "megatron").text
    layered = GOLDEN_SYNERFUSE.replace("--hetero-pipeline-stages 1 6 1 2", "")
    assert set(layered.splitlines()[6:]) - set(megatron.splitlines()) == {"  "}


def test_decay_of_the_learning_rate_is_exported() -> None:
    """Megatron's own default would fall to zero where the recipe says nothing."""
    plan = pipeline_plan()
    train = replace(plan.recipe.train, decay=Decay.COSINE, final_fraction=0.5, steps=9)
    text = export(replace(plan, recipe=replace(plan.recipe, train=train)), "synerfuse").text
    assert "  --lr-decay-style cosine\n  --min-lr 0.00015\n" in text
