"""How a plan selects the chip of a rank: what its numbering relies on, and ids that only a tool can tell."""

from __future__ import annotations

import pytest

from hetrun.errors import NoPlanError
from hetrun.launch.files import rank_env
from hetrun.model import Device, Facts, HostFacts, HostSpec, Quantity, RankPlan, Source
from hetrun.planner import torch_targets


def _facts(vendor: str, *, visible_id: str | None) -> Facts:
    memory = Quantity(value=None, source=Source.ASSUMED)
    device = Device(index=0, vendor=vendor, model=None, memory=memory, visible_id=visible_id)
    host = HostFacts(spec=HostSpec(name="h1"), devices=(device,))
    return Facts(created="2030-01-01T00:00:00+00:00", inventory="lab", hosts=(host,))


def test_variables_that_a_vendors_numbering_relies_on_reach_its_ranks() -> None:
    target = torch_targets(_facts("nvidia", visible_id="0"))["nvidia"]
    assert dict(target.env) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    rank = RankPlan(
        rank=0,
        host="h1",
        local_rank=0,
        device_index=0,
        vendor="nvidia",
        model="X",
        replica=0,
        stage=0,
        torch_device=target.torch_device,
        visible_env=target.visible_env,
        visible_id="3",
        env=dict(target.env),
    )
    env = rank_env(rank, {}, {}, None)
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "3")
    overridden = rank_env(rank, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {}, None)
    assert overridden["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"  # the user's word comes last


@pytest.mark.parametrize(
    ("vendor", "what"), [("gaudi", "module id"), ("neuron", "cores")], ids=["modules", "cores"]
)
def test_device_whose_id_nobody_told_is_never_selected_by_its_index(vendor: str, what: str) -> None:
    with pytest.raises(NoPlanError, match=f"has no {what}"):
        torch_targets(_facts(vendor, visible_id=None))
    assert torch_targets(_facts(vendor, visible_id="4"))[vendor].visible_by == what.replace(
        " ", "_"
    )
