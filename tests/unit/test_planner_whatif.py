"""What-if: changes on paper are those that the text names, and both plans stand beside each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.errors import ConfigError
from hetrun.model import Facts, LinkKind, Source
from hetrun.planner import plan
from hetrun.planner.whatif import change, compare
from tests.unit.planner_lab import Chips, Lab, small_model

LAB = Lab(
    chips=(
        Chips(vendor="emu-a", num_devices=3, layer_s=1.0),
        Chips(vendor="emu-b", num_devices=2, layer_s=3.0),
    ),
    model=small_model(6),
    batch=12,
    rows=(1,),
)


def changed(*texts: str) -> Facts:
    return change(LAB.facts, LAB.profile, texts)[0]


def counts(facts: Facts) -> dict[str, int]:
    """Devices per host."""
    return {host.spec.name: len(host.devices) for host in facts.hosts}


def rate(kind: LinkKind, *texts: str) -> float:
    profile = change(LAB.facts, LAB.profile, texts)[1]
    return next(link.bytes_per_s for link in profile.links if link.kind is kind)


def test_more_devices_come_on_hosts_like_the_fullest() -> None:
    assert counts(changed("plus 5 of emu-b")) == {
        "emu-a-0": 2,
        "emu-a-1": 1,
        "emu-b-0": 2,
        "emu-b-0-more1": 2,
        "emu-b-0-more2": 2,
        "emu-b-0-more3": 1,
    }


def test_devices_may_be_named_by_their_model() -> None:
    assert counts(changed("plus 1 of emu-a-chip"))["emu-a-0-more1"] == 1


def test_imagined_hosts_lead_nowhere() -> None:
    """A saved what-if must not start anything on the host that it was copied from."""
    host = changed("plus 1 of emu-b").hosts[-1]
    assert host.spec.addr == "emu-b-0-more1.invalid"
    assert host.spec.connection.value == "ssh"
    assert all(device.uuid is None and device.visible_id is None for device in host.devices)


def test_plus_twice_makes_different_hosts() -> None:
    names = [host.spec.name for host in changed("plus 1 of emu-b", "plus 1 of emu-b").hosts]
    assert len(set(names)) == len(names) == 5


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("without host emu-a-0", {"emu-a-1": 1, "emu-b-0": 2}),
        ("without emu-b", {"emu-a-0": 2, "emu-a-1": 1, "emu-b-0": 0}),
        ("without 2 of emu-a", {"emu-a-0": 1, "emu-a-1": 0, "emu-b-0": 2}),
    ],
)
def test_devices_taken_away(text: str, left: dict[str, int]) -> None:
    assert counts(changed(text)) == left


@pytest.mark.parametrize(
    ("text", "kind", "bytes_per_s"),
    [
        ("10 Gb/s across", LinkKind.ACROSS, 1.25e9),
        ("1.5 GB/s between islands", LinkKind.ACROSS, 1.5e9),
        ("100Mb/s inside islands", LinkKind.INSIDE_ISLAND, 12.5e6),
        ("2 TB/s inside hosts", LinkKind.INSIDE_HOST, 2e12),
    ],
)
def test_rates_of_links(text: str, kind: LinkKind, bytes_per_s: float) -> None:
    assert rate(kind, text) == pytest.approx(bytes_per_s)
    untouched = next(k for k in LinkKind if k is not kind)
    assert rate(untouched, text) == rate(untouched)


def test_changed_links_are_assumed_whatever_they_were() -> None:
    measured = tuple(replace(link, source=Source.MEASURED) for link in LAB.links)
    profile = replace(LAB.profile, links=measured)
    links = change(LAB.facts, profile, ["50 us across"])[1].links
    across = next(link for link in links if link.kind is LinkKind.ACROSS)
    assert across.latency_s == pytest.approx(50e-6)
    assert across.source is Source.ASSUMED
    assert sum(link.source is Source.MEASURED for link in links) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("more chips", "not understood"),
        ("plus 0 of emu-b", "need 1 to"),
        ("plus 4 of emu-c", "no devices of such a vendor or model"),
        ("without host z9", "no such host"),
        ("without 9 of emu-a", "there are 3"),
        ("10 parsec/s across", "not a unit"),
        ("0 Gb/s across", "need more than 0"),
    ],
)
def test_text_that_means_nothing_here_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        changed(text)
    assert caught.value.hint


def test_vendor_of_two_models_has_to_be_named_by_model() -> None:
    first, *others = LAB.facts.hosts
    other = replace(first.devices[0], model="emu-a-big")
    facts = replace(LAB.facts, hosts=(replace(first, devices=(other, *first.devices[1:])), *others))
    with pytest.raises(ConfigError, match="it has emu-a-big, emu-a-chip"):
        change(facts, LAB.profile, ["plus 1 of emu-a"])


def test_comparison_is_of_both_plans() -> None:
    before = LAB.plan()
    texts = ["plus 2 of emu-a", "10 Gb/s across"]
    facts, profile = change(LAB.facts, LAB.profile, texts)
    after = plan(facts, profile, LAB.recipe, targets={})
    found = compare(before, after, texts)
    assert (found.before.num_devices, found.after.num_devices) == (5, 7)
    assert found.before.step_s == before.split.cost.step_s
    assert found.after.tokens_per_s == pytest.approx(12 * 64 / after.split.cost.step_s)
    assert found.speedup == pytest.approx(before.split.cost.step_s / after.split.cost.step_s)
    assert found.speedup > 1
    assert found.after.verdict == after.verdict


def test_a_second_host_of_a_vendor_gets_the_link_that_the_inventory_declares() -> None:
    lab = Lab(chips=[Chips(vendor="x", num_devices=2), Chips(vendor="y", num_devices=2)])
    declared = next(link for link in lab.links if link.kind is LinkKind.INSIDE_ISLAND)
    measured = tuple(link for link in lab.links if link is not declared)
    facts = replace(lab.facts, links=(declared,))
    profile = replace(lab.profile, links=measured)
    after, figures = change(facts, profile, ["plus 2 of x"])
    assert figures.links == (*measured, declared)
    assert plan(after, figures, lab.recipe, targets={}).split.cost.step_s > 0


def test_a_second_host_of_a_vendor_is_assumed_to_be_as_far_as_other_vendors() -> None:
    lab = Lab(chips=[Chips(vendor="x", num_devices=2), Chips(vendor="y", num_devices=2)])
    across = next(link for link in lab.links if link.kind is LinkKind.ACROSS)
    measured = tuple(link for link in lab.links if link.kind is not LinkKind.INSIDE_ISLAND)
    facts, profile = replace(lab.facts, links=()), replace(lab.profile, links=measured)
    _, figures = change(facts, profile, ["plus 2 of x"])
    (new,) = figures.links[len(measured) :]
    assert (new.kind, new.a, new.b) == (LinkKind.INSIDE_ISLAND, "x", "x")
    assert (new.bytes_per_s, new.latency_s) == (across.bytes_per_s, across.latency_s)
    assert new.source is Source.ASSUMED
