"""What must hold for every plan, whatever the cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.errors import NoPlanError
from hetrun.model import GIB, MIB, Facts, Order, Plan, PlanLimits
from hetrun.planner import plan
from hetrun.planner.check import check_split
from hetrun.planner.recost import recost
from hetrun.schedule import layers_of
from tests.effort import examples
from tests.unit.planner_lab import LINKS, WHOLE, Chips, Lab, small_model

pytestmark = pytest.mark.slow

DEMO = Lab(
    chips=[
        Chips(vendor="fast", num_devices=2, gflops=2.0, memory=16 * GIB),
        Chips(vendor="slow", num_devices=2, gflops=1.2, memory=32 * GIB),
    ]
)


def as_bytes(result: Plan) -> str:
    """Everything that would be written."""
    return json.dumps(asdict(result), default=str)


def many(num_hosts: int) -> Facts:
    """The demo's kinds on many hosts, named so that text order and number order differ."""
    hosts = []
    for number in range(num_hosts):
        host = DEMO.facts.hosts[number % 2]
        spec = replace(host.spec, name=f"h{number + 7}")
        hosts.append(replace(host, spec=spec, devices=host.devices[:1]))
    return replace(DEMO.facts, hosts=tuple(hosts))


@settings(max_examples=examples(3), deadline=None)
@given(st.permutations(range(4)))
def test_order_of_the_inventory_changes_nothing(order: list[int]) -> None:
    facts = many(4)
    other = replace(facts, hosts=tuple(facts.hosts[i] for i in order))
    first = plan(facts, DEMO.profile, DEMO.recipe, targets={})
    second = plan(other, DEMO.profile, DEMO.recipe, targets={})
    assert as_bytes(first) == as_bytes(second)
    assert [h.name for h in first.hosts] == ["h7", "h9", "h8", "h10"]


def test_same_input_gives_the_same_bytes() -> None:
    assert as_bytes(DEMO.plan()) == as_bytes(DEMO.plan())


@st.composite
def labs(draw: st.DrawFn) -> Lab:
    chips = [
        Chips(
            vendor=name,
            num_devices=draw(st.integers(1, 3)),
            gflops=draw(st.sampled_from([0.5, 0.8, 1.0, 2.0])),
            memory=draw(st.sampled_from([0.6 * MIB, 1.2 * MIB, 2.5 * MIB, 6 * MIB, None])),
            per_host=draw(st.integers(1, 3)),
        )
        for name in ("x", "y", "z")[: draw(st.integers(1, 3))]
    ]
    across_s = draw(st.sampled_from([0.0, 1e-4, 2e-3]))
    links = tuple(
        replace(link, latency_s=across_s, bytes_per_s=draw(st.sampled_from([1e7, 1e8, 1e10])))
        for link in LINKS
    )
    model = small_model(draw(st.integers(1, 8)), vocab_size=draw(st.sampled_from([32, 257])))
    return Lab(
        chips=chips,
        model=replace(model, tied_embeddings=draw(st.booleans())),
        batch=draw(st.integers(1, 24)),
        rows=draw(st.sampled_from([(1,), (1, 2)])) if draw(st.booleans()) else (1,),
        seq_len=16,
        links=links,
        limits=PlanLimits(
            max_stages=draw(st.sampled_from([None, 1, 2])),
            orders=draw(st.sampled_from([WHOLE.orders, tuple(Order)])),
            fractional=draw(st.booleans()),
        ),
    )


def plan_or_none(lab: Lab) -> Plan | None:
    """The plan, or None where the lab cannot train at all."""
    try:
        return lab.plan()
    except NoPlanError as error:
        return None if "iB to use" in error.message and error.hint else pytest.fail(str(error))


@settings(max_examples=examples(8), deadline=None)
@given(labs())
def test_every_plan_is_whole_fits_and_costs_what_it_says(lab: Lab) -> None:
    if max(lab.rows) > lab.batch:
        return
    result = plan_or_none(lab)
    if result is None:
        return
    splits = [result.split] if result.even_split is None else [result.split, result.even_split]
    for split in splits:
        check_split(split, lab.facts, lab.profile, lab.recipe)
        again_s = recost(split, lab.profile, lab.recipe)
        assert again_s == pytest.approx(split.cost.step_s, rel=1e-9)
        assert sum(replica.num_rows for replica in split.replicas) == lab.batch
        for replica in split.replicas:
            for microbatch in range(replica.num_microbatches):
                layers = [
                    layer
                    for index in range(len(replica.stages))
                    for layer in layers_of(replica, index, microbatch)
                ]
                assert layers == list(range(lab.model.num_layers))
            for stage in replica.stages:
                memory = split.ranks[stage.ranks[0]].memory_bytes
                assert memory is None or stage.memory_bytes <= 0.92 * memory
    assert result.split.cost.step_s >= result.bound_s * (1 - 1e-12)
    u = result.split.efficiency.u.value
    assert u is not None
    assert u <= 1 + 1e-12
    if result.even_split is not None:
        assert result.split.cost.step_s <= result.even_split.cost.step_s * (1 + 1e-9)


@settings(max_examples=examples(4), deadline=None)
@given(labs())
def test_more_memory_never_makes_a_plan_slower_than_the_bound_of_less(lab: Lab) -> None:
    if max(lab.rows) > lab.batch:
        return
    tight = plan_or_none(lab)
    roomy = Lab(
        chips=[replace(chips, memory=None) for chips in lab.chips],
        model=lab.model,
        batch=lab.batch,
        rows=lab.rows,
        seq_len=lab.seq_len,
        links=lab.links,
        limits=lab.limits,
    ).plan()
    if tight is not None:
        assert roomy.split.cost.step_s <= tight.split.cost.step_s * 1.02
        assert roomy.bound_s == pytest.approx(tight.bound_s)
