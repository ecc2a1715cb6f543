"""Who reduces what with whom, and what it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun import arch
from hetrun.errors import ConfigError
from hetrun.model import Link, LinkKind, ModelSpec, RankPlan, ReplicaPlan, StagePlan
from hetrun.schedule import all_reduce_s, find_link, gradient_buckets, link_between

MODEL = ModelSpec(num_layers=6, hidden_size=8, num_heads=2, ffn_size=16, vocab_size=32)
TIED = ModelSpec(
    num_layers=6, hidden_size=8, num_heads=2, ffn_size=16, vocab_size=32, tied_embeddings=True
)


def rank(number: int, vendor: str = "acme", host: str = "h1") -> RankPlan:
    return RankPlan(
        rank=number,
        host=host,
        local_rank=0,
        device_index=0,
        vendor=vendor,
        model="m",
        replica=0,
        stage=0,
        torch_device="cpu",
    )


def replica(cuts: list[int], first_rank: int) -> ReplicaPlan:
    """A replica whose stages hold `cuts` layers each, on consecutive ranks."""
    stages = []
    first = 0
    for index, count in enumerate(cuts):
        stages.append(
            StagePlan(
                ranks=(first_rank + index,),
                first_layer=first,
                num_layers=count,
                has_embedding=index == 0,
                has_head=index == len(cuts) - 1,
                window=len(cuts) - index,
                forward_s=1.0,
                backward_s=2.0,
                send_s=0.0,
                optimizer_s=0.0,
                memory_bytes=0,
                memory_limit_bytes=None,
            )
        )
        first += count
    return ReplicaPlan(first_row=0, microbatch_rows=1, num_microbatches=4, stages=tuple(stages))


def test_units_with_the_same_owners_share_a_bucket_in_backward_order() -> None:
    replicas = [replica([3, 3], 0), replica([2, 4], 2)]
    buckets = gradient_buckets([rank(i) for i in range(4)], replicas, MODEL, 4)
    assert [(b.units, b.ranks) for b in buckets] == [
        (("head", "layer.5", "layer.4", "layer.3"), (1, 3)),
        (("layer.2",), (0, 3)),
        (("layer.1", "layer.0", "embedding"), (0, 2)),
    ]
    layer = arch.layer_parameters(MODEL)
    head, embedding = arch.head_parameters(MODEL), arch.embedding_parameters(MODEL)
    assert [b.num_bytes for b in buckets] == [
        4 * (head + 3 * layer),
        4 * layer,
        4 * (2 * layer + embedding),
    ]


def test_one_replica_needs_no_sync_unless_embeddings_are_tied() -> None:
    ranks = [rank(0), rank(1)]
    assert gradient_buckets(ranks, [replica([3, 3], 0)], MODEL, 4) == ()
    (bucket,) = gradient_buckets(ranks, [replica([3, 3], 0)], TIED, 4)
    assert (bucket.units, bucket.ranks) == (("embedding",), (0, 1))
    assert bucket.num_bytes == 4 * 32 * 8


def test_tied_head_reduces_only_its_norm_beside_the_embedding() -> None:
    replicas = [replica([3, 3], 0), replica([6], 2)]
    buckets = gradient_buckets([rank(i) for i in range(3)], replicas, TIED, 2)
    assert buckets[0].units == ("head", "layer.5", "layer.4", "layer.3")
    assert buckets[0].num_bytes == 2 * (8 + 3 * arch.layer_parameters(TIED))
    assert (buckets[-1].units, buckets[-1].ranks) == (("embedding",), (0, 1, 2))


def test_rank_that_nobody_knows_is_our_bug() -> None:
    with pytest.raises(ValueError, match="unknown"):
        gradient_buckets([rank(0)], [replica([3, 3], 0)], MODEL, 4)


@st.composite
def splits(draw: st.DrawFn) -> list[ReplicaPlan]:
    replicas, first_rank = [], 0
    for _ in range(draw(st.integers(1, 4))):
        marks = draw(st.lists(st.integers(0, 6), max_size=3).map(sorted))
        cuts = [b - a for a, b in zip([0, *marks], [*marks, 6], strict=True)]
        replicas.append(replica(cuts, first_rank))
        first_rank += len(cuts)
    return replicas


@given(splits(), st.sampled_from([MODEL, TIED]))
def test_every_shared_parameter_is_reduced_once(
    replicas: list[ReplicaPlan], model: ModelSpec
) -> None:
    num_ranks = sum(len(r.stages) for r in replicas)
    buckets = gradient_buckets([rank(i) for i in range(num_ranks)], replicas, model, 1)
    units = [unit for bucket in buckets for unit in bucket.units]
    assert len(units) == len(set(units))
    assert len({bucket.ranks for bucket in buckets}) == len(buckets)
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    if len(replicas) > 1:
        assert num_bytes == arch.total_parameters(model)
    assert all(list(bucket.ranks) == sorted(set(bucket.ranks)) for bucket in buckets)


LINKS = (
    Link(kind=LinkKind.INSIDE_HOST, latency_s=1e-6, bytes_per_s=1e9),
    Link(kind=LinkKind.INSIDE_ISLAND, latency_s=1e-5, bytes_per_s=1e8, a="acme", b="acme"),
    Link(kind=LinkKind.INSIDE_ISLAND, latency_s=2e-5, bytes_per_s=2e8),
    Link(kind=LinkKind.ACROSS, latency_s=1e-3, bytes_per_s=1e7),
    Link(kind=LinkKind.ACROSS, latency_s=2e-3, bytes_per_s=2e7, a="zeta", b="acme"),
    Link(kind=LinkKind.ACROSS, latency_s=3e-3, bytes_per_s=3e7, b="zeta"),
)


@pytest.mark.parametrize(
    ("kind", "a", "b", "latency_s"),
    [
        (LinkKind.INSIDE_HOST, "acme", "acme", 1e-6),
        (LinkKind.INSIDE_ISLAND, "acme", "acme", 1e-5),
        (LinkKind.INSIDE_ISLAND, "zeta", "zeta", 2e-5),
        (LinkKind.ACROSS, "acme", "zeta", 2e-3),
        (LinkKind.ACROSS, "zeta", "beta", 3e-3),
        (LinkKind.ACROSS, "beta", "acme", 1e-3),
    ],
)
def test_most_specific_link_wins_in_both_directions(
    kind: LinkKind, a: str, b: str, latency_s: float
) -> None:
    assert find_link(LINKS, kind, a, b).latency_s == latency_s
    assert find_link(LINKS, kind, b, a).latency_s == latency_s


def test_link_without_figures_is_named() -> None:
    with pytest.raises(ConfigError, match="across between acme and zeta") as caught:
        find_link(LINKS[:3], LinkKind.ACROSS, "acme", "zeta")
    assert "links:" in (caught.value.hint or "")


def test_link_between_ranks_follows_host_and_vendor() -> None:
    here = rank(0)
    assert link_between(LINKS, here, rank(1)).kind is LinkKind.INSIDE_HOST
    assert link_between(LINKS, here, rank(1, host="h2")).kind is LinkKind.INSIDE_ISLAND
    assert link_between(LINKS, here, rank(1, "zeta")).kind is LinkKind.ACROSS


def test_all_reduce_adds_the_slowest_island_and_the_ring_of_islands() -> None:
    alone = [rank(0)]
    assert all_reduce_s(1e6, alone, LINKS) == 0.0
    inside = 2 * (1e-6 + 1e6 / 2 / 1e9)
    assert all_reduce_s(1e6, [rank(0), rank(1)], LINKS) == pytest.approx(inside)
    spread = [rank(0), rank(1), rank(2, host="h2")]
    island = 2 * 2 * (1e-5 + 1e6 / 3 / 1e8)
    assert all_reduce_s(1e6, spread, LINKS) == pytest.approx(island)
    across = 2 * (2e-3 + 1e6 / 2 / 2e7)
    two = [*spread, rank(3, "zeta"), rank(4, "zeta")]
    assert all_reduce_s(1e6, two, LINKS) == pytest.approx(island + across)
    slowest = 1e-3 + 1e6 / 3 / 1e7  # acme - beta
    three = [rank(0), rank(1, "beta"), rank(2, "zeta")]
    assert all_reduce_s(1e6, three, LINKS) == pytest.approx(2 * 2 * slowest)


def test_all_reduces_at_once_share_what_lies_between_hosts_and_nothing_inside_one() -> None:
    host = [rank(0), rank(1)]
    assert all_reduce_s(1e6, host, LINKS, at_once=4) == all_reduce_s(1e6, host, LINKS)
    spread = [rank(0), rank(1, host="h2")]
    assert all_reduce_s(1e6, spread, LINKS, at_once=4) == pytest.approx(
        2 * (1e-5 + 4 * 1e6 / 2 / 1e8)
    )
    vendors = [rank(0), rank(1, "zeta", host="h2")]
    assert all_reduce_s(1e6, vendors, LINKS, at_once=2) == pytest.approx(
        2 * (2e-3 + 2 * 1e6 / 2 / 2e7)
    )
