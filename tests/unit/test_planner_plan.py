"""plan() as a whole: worked cases, what must hold for every plan, and what it says where none fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.errors import ConfigError, NoPlanError
from hetrun.model import GIB, MIB, HostFacts, LinkKind, Plan, PlanLimits, Source
from hetrun.planner import TorchTarget, plan
from hetrun.planner.targets import torch_targets
from tests.unit.planner_lab import FREE_LINKS, LINKS, MODEL, WHOLE, Chips, Lab, small_model

FAST = Chips(vendor="fast", num_devices=2, gflops=2.0, memory=16 * GIB)
SLOW = Chips(vendor="slow", num_devices=2, gflops=1.2, memory=32 * GIB)
DEMO = Lab(chips=[FAST, SLOW])


def e1(result: Plan) -> float:
    value = result.split.efficiency.e1.value
    assert value is not None
    return value


@pytest.fixture(scope="module")
def demo() -> Plan:
    return DEMO.plan()


def test_demo_uses_nearly_all_of_the_summed_compute_and_the_even_split_does_not(demo: Plan) -> None:
    assert e1(demo) > 0.95
    assert demo.even_split is not None
    even = demo.even_split.efficiency.e1.value
    assert even is not None
    assert even < 0.85
    assert demo.emulated
    assert demo.split.efficiency.e1.kind is Source.MODELLED
    assert demo.idle_devices == ()


def test_of_equally_quick_splits_that_with_larger_microbatches_is_chosen() -> None:
    lab = replace(DEMO, batch=32, rows=(1, 2))
    assert [(r.microbatch_rows, r.num_rows) for r in lab.plan().split.replicas] == [
        (2, 10),
        (2, 10),
        (2, 6),
        (2, 6),
    ]


def test_three_numbers_bound_and_words_stand_beside_each_other(demo: Plan) -> None:
    efficiency = demo.split.efficiency
    assert efficiency.e2.value is not None
    assert efficiency.u.value is not None
    assert efficiency.u.value <= 1
    assert demo.gap == pytest.approx(demo.split.cost.step_s / demo.bound_s - 1)
    assert demo.gap >= 0
    assert "%" in demo.gap_reason
    assert demo.verdict.startswith("Mixing pays: 1.60x the best single vendor")
    assert "slower" in demo.runner_up
    assert [b.vendor for b in demo.baselines] == ["fast", "slow"]
    assert [b.scaled_batch_rows for b in demo.baselines] == [30, 18]
    assert demo.baselines[0].shape == "2 replicas x 1 stage"


def test_baselines_are_the_plans_of_each_vendor_alone(demo: Plan) -> None:
    fast, slow = demo.baselines
    for baseline, chips in ((fast, FAST), (slow, SLOW)):
        alone = Lab(chips=[chips]).plan()
        scaled = Lab(chips=[chips], batch=baseline.scaled_batch_rows).plan()
        assert baseline.rows_per_s == pytest.approx(48 / alone.split.cost.step_s)
        assert baseline.scaled_rows_per_s == pytest.approx(
            baseline.scaled_batch_rows / scaled.split.cost.step_s
        )
    assert slow.ideal_rows_per_s / fast.ideal_rows_per_s == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("batch", "step_s", "share"), [(16, 72.0, 8 / 9), (64, 264.0, 32 / 33)], ids=["J1", "J1-64"]
)
def test_four_fast_and_four_half_as_fast_devices_reach_the_known_optimum(
    batch: int, step_s: float, share: float
) -> None:
    lab = Lab(
        chips=[
            Chips(vendor="x", num_devices=4, layer_s=1.0, memory=None, per_host=4),
            Chips(vendor="y", num_devices=4, layer_s=2.0, memory=None, per_host=4),
        ],
        model=small_model(24),
        batch=batch,
        rows=(1,),
        links=FREE_LINKS,
        limits=WHOLE,
    )
    result = lab.plan()
    alone = [b.rows_per_s for b in result.baselines]
    assert alone == pytest.approx([batch / (6 * batch), batch / (12 * batch)])
    assert result.bound_s == pytest.approx(4 * batch)
    assert result.split.cost.step_s <= step_s * (1 + 1e-9)
    assert e1(result) >= share * (1 - 1e-9)
    assert "integrality" in result.gap_reason


def test_gap_of_whole_rows_is_named_as_such() -> None:
    lab = Lab(
        chips=[
            Chips(vendor=name, num_devices=1, layer_s=1 / speed, memory=None)
            for name, speed in (("a", 1.0), ("b", 0.9), ("c", 0.8))
        ],
        model=small_model(1),
        batch=10,
        rows=(1,),
        links=FREE_LINKS,
    )
    result = lab.plan()
    assert [r.num_microbatches for r in result.split.replicas] == [4, 3, 3]
    assert result.split.cost.step_s == pytest.approx(4.0)
    assert result.bound_s == pytest.approx(3.704, abs=5e-4)
    assert result.gap_reason == "integrality (whole layers and rows) 8.0%"


def test_memory_decides_for_a_mixed_pipeline() -> None:
    model = small_model(12)
    chips = [
        Chips(vendor="big", num_devices=2, gflops=1.0, memory=8 * MIB),
        Chips(vendor="tiny", num_devices=2, gflops=2.0, memory=1.2 * MIB),
    ]
    result = Lab(chips=chips, model=model, rows=(1,), seq_len=16).plan()
    assert result.baselines[1].rows_per_s is None
    assert "lacks" in result.baselines[1].why
    assert result.split.efficiency.e1.value is None
    assert "tiny has no baseline" in result.split.efficiency.e1.why
    assert {rank.vendor for rank in result.split.ranks} == {"big", "tiny"}
    assert any(len(replica.stages) > 1 for replica in result.split.replicas)
    assert "memory" in result.gap_reason
    assert "iB" in result.baselines[1].why


def test_slow_link_moves_the_sync_inside_the_vendors() -> None:
    chips = [
        Chips(vendor="x", num_devices=4, gflops=2.0, per_host=4),
        Chips(vendor="y", num_devices=4, gflops=1.0, per_host=4),
    ]
    quick = Lab(chips=chips, batch=64, links=FREE_LINKS, limits=WHOLE).plan()
    narrow = tuple(
        replace(link, bytes_per_s=2e6) if link.kind is LinkKind.ACROSS else link for link in LINKS
    )
    slow = Lab(chips=chips, batch=64, links=narrow, limits=WHOLE).plan()
    assert all(len(replica.stages) == 1 for replica in quick.split.replicas)
    crossing = [
        {slow.split.ranks[rank].vendor for stage in replica.stages for rank in stage.ranks}
        for replica in slow.split.replicas
    ]
    assert all(vendors == {"x", "y"} for vendors in crossing)
    assert slow.split.cost.sync_s < 0.5 * slow.split.cost.step_s


@pytest.mark.parametrize(("latency_s", "windows"), [(0.0, [2, 1]), (2e-4, [3, 1])])
def test_windows_are_wide_only_where_a_link_is_slow(latency_s: float, windows: list[int]) -> None:
    links = tuple(replace(link, latency_s=latency_s) for link in FREE_LINKS)
    chips = [Chips(vendor="x", num_devices=2, memory=1.2 * MIB)]
    lab = Lab(chips=chips, model=small_model(8), batch=32, rows=(1,), seq_len=16, links=links)
    (replica,) = replace(lab, limits=WHOLE).plan().split.replicas
    assert [stage.window for stage in replica.stages] == windows


def test_devices_too_slow_to_help_stay_idle_and_are_named() -> None:
    chips = [FAST, Chips(vendor="snail", num_devices=1, gflops=0.001)]
    result = Lab(chips=chips, batch=4, rows=(1,)).plan()
    assert result.idle_devices == ("snail-0/0",)
    assert result.verdict.startswith("Mixing does not pay: fast alone is quickest")
    assert [host.name for host in result.hosts] == ["fast-0"]


def test_single_vendor_has_nothing_to_mix_and_full_efficiency() -> None:
    result = Lab(chips=[FAST]).plan()
    assert "nothing to mix" in result.verdict
    assert e1(result) == pytest.approx(1.0)
    assert result.split.efficiency.e2.value == pytest.approx(1.0)


def test_vendors_that_cannot_train_alone_are_told_that_mixing_is_the_only_way() -> None:
    chips = [
        Chips(vendor=name, num_devices=1, memory=2.0 * MIB, gflops=speed)
        for name, speed in (("x", 1.0), ("y", 2.0))
    ]
    result = Lab(chips=chips, model=small_model(10), rows=(1,), seq_len=16).plan()
    assert "only way" in result.verdict


def test_plan_that_is_hardly_better_says_so() -> None:
    chips = [FAST, Chips(vendor="snail", num_devices=1, gflops=0.08)]
    assert "hardly pays" in Lab(chips=chips, batch=300).plan().verdict


def test_no_plan_names_group_shortfall_and_knob() -> None:
    chips = [replace(FAST, memory=1 * MIB), replace(SLOW, memory=1 * MIB)]
    with pytest.raises(NoPlanError) as caught:
        Lab(chips=chips, rows=(2, 4), limits=PlanLimits(max_stages=2)).plan()
    text = caught.value.message
    assert "lacks" in text
    assert "MiB" in text
    assert "2 x fast fast-chip" in text
    hint = caught.value.hint or ""
    assert hint.startswith("raise plan.max_stages (now 2), or allow smaller train.microbatch_rows")


def test_max_stages_is_kept() -> None:
    lab = Lab(chips=[FAST, SLOW], batch=2, rows=(1,), limits=PlanLimits(max_stages=1))
    assert all(len(replica.stages) == 1 for replica in lab.plan().split.replicas)


def test_batch_that_no_microbatches_make_up_is_refused_with_a_hint() -> None:
    with pytest.raises(NoPlanError, match="cannot be made of microbatches") as caught:
        Lab(chips=[FAST], batch=5, rows=(2, 4)).plan()
    assert "divisor" in (caught.value.hint or "")


def test_mixed_microbatch_sizes_make_up_an_odd_batch() -> None:
    result = Lab(chips=[replace(FAST, num_devices=1)], batch=6, rows=(4, 6)).plan()
    assert [(r.microbatch_rows, r.num_microbatches) for r in result.split.replicas] == [(6, 1)]
    result = Lab(chips=[FAST], batch=10, rows=(4, 6)).plan()
    assert sorted(r.num_rows for r in result.split.replicas) == [4, 6]


def test_sizes_that_only_two_replicas_could_share_need_two_devices() -> None:
    with pytest.raises(NoPlanError, match="share out 5 rows"):
        Lab(chips=[replace(FAST, num_devices=1)], batch=5, rows=(2, 3)).plan()
    shared = Lab(chips=[FAST], batch=5, rows=(2, 3)).plan().split.replicas
    assert sorted(replica.num_rows for replica in shared) == [2, 3]


def test_profile_of_another_model_is_refused() -> None:
    other = replace(DEMO.profile, model=replace(MODEL, num_layers=11))
    with pytest.raises(NoPlanError, match="another model") as caught:
        plan(DEMO.facts, other, DEMO.recipe, targets={})
    assert "hetrun profile" in (caught.value.hint or "")


def test_device_without_figures_is_named() -> None:
    profile = replace(DEMO.profile, devices=DEMO.profile.devices[:1])
    with pytest.raises(NoPlanError, match="no figures for slow slow-chip on slow-0/0"):
        plan(DEMO.facts, profile, DEMO.recipe, targets={})


def test_link_without_figures_is_named() -> None:
    lab = replace(DEMO, links=LINKS[:2])
    with pytest.raises(ConfigError, match="across between fast and slow"):
        lab.plan()


def test_no_devices_is_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    silent = HostFacts(spec=DEMO.facts.hosts[0].spec, error="ssh refused the key")
    facts = replace(DEMO.facts, hosts=(silent,))
    with pytest.raises(NoPlanError, match="no devices on the 1 hosts of lab"):
        plan(facts, DEMO.profile, DEMO.recipe, targets={})
    assert "ssh refused the key" in caplog.text


REAL = Lab(chips=[replace(FAST, emulated=False)])


def test_real_device_without_torch_target_is_refused() -> None:
    with pytest.raises(NoPlanError, match="how torch names the devices of fast"):
        REAL.plan()


@pytest.mark.parametrize(
    ("visible_by", "ids"), [("index", ["0", "1"]), ("uuid", ["fast-0-0", "fast-0-1"])]
)
def test_real_devices_carry_their_torch_names(visible_by: str, ids: list[str]) -> None:
    target = TorchTarget(
        torch_device="xpu",
        torch_plugin="torch_x",
        visible_env="X_VISIBLE",
        visible_by=visible_by,
        env={"X_ORDER": "bus"},
    )
    result = REAL.plan({"fast": target})
    assert all(rank.env == {"X_ORDER": "bus"} for rank in result.split.ranks)
    assert not result.emulated
    assert [rank.visible_id for rank in result.split.ranks] == ids
    assert {(r.torch_device, r.torch_plugin, r.visible_env) for r in result.split.ranks} == {
        ("xpu", "torch_x", "X_VISIBLE")
    }


def test_device_without_uuid_is_selected_by_index_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = REAL.facts
    (host,) = facts.hosts
    nameless = tuple(replace(d, uuid=None, vendor_index=None) for d in host.devices)
    facts = replace(facts, hosts=(replace(host, devices=nameless),))
    target = TorchTarget(torch_device="xpu", visible_env="X_VISIBLE", visible_by="uuid")
    result = plan(facts, REAL.profile, REAL.recipe, targets={"fast": target})
    assert [rank.visible_id for rank in result.split.ranks] == ["0", "1"]
    assert "has no uuid" in caplog.text


def test_torch_names_come_from_the_vendor_files() -> None:
    facts = Lab(chips=[Chips(vendor="cpu", num_devices=1, emulated=False), FAST]).facts
    targets = torch_targets(facts)
    assert list(targets) == ["cpu"]
    assert targets["cpu"].torch_device == "cpu"


def test_unknown_way_to_select_devices_is_our_bug() -> None:
    with pytest.raises(ValueError, match="need one of"):
        TorchTarget(torch_device="xpu", visible_by="colour")


def test_sizes_that_were_never_measured_are_mentioned() -> None:
    lab = Lab(chips=[FAST])
    recipe = replace(lab.recipe, train=replace(lab.recipe.train, microbatch_rows=(1, 8)))
    result = plan(lab.facts, lab.profile, recipe, targets={})
    assert "fast fast-chip: times for microbatches of 8 rows are extrapolated" in result.verdict


def test_ranks_of_a_host_are_contiguous_and_hosts_follow() -> None:
    chips = [replace(FAST, num_devices=4), replace(SLOW, num_devices=4)]
    result = Lab(chips=chips, batch=64).plan()
    hosts = [rank.host for rank in result.split.ranks]
    assert list(dict.fromkeys(hosts)) == [host.name for host in result.hosts]
    assert [r.local_rank for r in result.split.ranks] == [0, 1] * 4
