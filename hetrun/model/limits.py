"""What the planner must keep to: limits and pins of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hetrun.model.base import Noun, need


class Order(str, Enum):
    """Order of forwards and backwards on the stages of a pipeline."""

    ONE_F_ONE_B = "1f1b"
    ZERO_BUBBLE = "zero-bubble"  # the backward of the weights waits for a gap, up to a bound


class Role(str, Enum):
    """What a vendor's devices must do."""

    IDLE = "idle"
    FIRST = "first"  # the first stage of every replica is theirs
    LAST = "last"  # the last stage of every replica is theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins(Noun):
    """What the user insists on; what is left out stays free. `hetrun plan` prints what the pins cost."""

    layers: tuple[int, ...] = ()  # of each stage, of every replica
    order: tuple[str, ...] = ()  # vendors that share a pipeline stand in this order
    roles: dict[str, Role] = field(default_factory=dict)  # by vendor
    rows: tuple[int, ...] = ()  # of each replica, in any order
    tp: dict[str, int] = field(default_factory=dict)  # devices that share each layer, by vendor
    lanes: dict[str, int] = field(default_factory=dict)  # copies of each stage, by vendor

    def __post_init__(self) -> None:
        need(
            all(count >= 1 for count in self.layers),
            f"pins: layers {list(self.layers)}, need 1 each",
        )
        need(all(count >= 1 for count in self.rows), f"pins: rows {list(self.rows)}, need 1 each")
        need(all(tp >= 1 for tp in self.tp.values()), f"pins: tp {self.tp}, need 1 each")
        need(all(n >= 1 for n in self.lanes.values()), f"pins: lanes {self.lanes}, need 1 each")
        need(
            len(set(self.order)) == len(self.order),
            f"pins: order {list(self.order)}, need each vendor once",
        )
        for role in (Role.FIRST, Role.LAST):
            who = sorted(vendor for vendor, own in self.roles.items() if own is role)
            need(len(who) <= 1, f"pins: {' and '.join(who)} cannot both be {role.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits(Noun):
    """What the planner must keep to."""

    orders: tuple[Order, ...] = tuple(Order)  # of forwards and backwards, to choose from
    fractional: bool = (
        True  # a layer may live on two stages, so that their shares match their speeds
    )

    max_stages: int | None = None
    max_shapes: int | None = None  # different kinds of replicas; fewer are simpler to run elsewhere
    memory_fraction: float = (
        0.92  # of a device's memory; the rest is for libraries and fragmentation
    )
    tp: tuple[int, ...] = (1,)  # numbers of devices that may share a layer, to choose from
    lanes: tuple[int, ...] = (1,)  # numbers of copies that a stage may have, to choose from
    recompute: bool = False  # the planner may choose to run forwards again in the backward
    zero: tuple[int, ...] = (0,)  # ZeRO stages to choose from; 1 shares out the optimizer's states
    pins: Pins | None = None

    def __post_init__(self) -> None:
        need(
            self.max_stages is None or self.max_stages >= 1,
            f"plan: max_stages {self.max_stages}, need at least 1",
        )
        need(
            self.max_shapes is None or self.max_shapes >= 1,
            f"plan: max_shapes {self.max_shapes}, need at least 1",
        )
        need(
            Order.ONE_F_ONE_B in self.orders and len(set(self.orders)) == len(self.orders),
            f"plan: orders {[order.value for order in self.orders]}, need 1f1b and others once each",
        )
        need(
            0 < self.memory_fraction <= 1,
            f"plan: memory_fraction {self.memory_fraction}, need 0 to 1",
        )
        need(
            bool(self.tp) and all(tp >= 1 for tp in self.tp) and len(set(self.tp)) == len(self.tp),
            f"plan: tp {list(self.tp)}, need different numbers of at least 1",
        )
        need(
            1 in self.lanes and min(self.lanes) >= 1 and len(set(self.lanes)) == len(self.lanes),
            f"plan: lanes {list(self.lanes)}, need 1 and other numbers of at least 1 once each",
        )
        need(
            self.zero in ((0,), (1,), (0, 1), (1, 0)),
            f"plan: zero {list(self.zero)}, need 0, 1 or both",
        )
