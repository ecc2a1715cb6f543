"""Equal devices and the ways in which they may work, each with its figures. Grouping devices is left to `problem.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from hetrun import arch
from hetrun.errors import NoPlanError
from hetrun.model import Device, DeviceProfile, Link, LinkKind, Recipe, RowTiming
from hetrun.planner.cost import (
    is_extrapolated,
    measured_rows,
    model_seconds,
    shared_timing,
    timing_at,
)
from hetrun.planner.targets import TorchTarget
from hetrun.schedule import find_link

UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """One device and the host that it sits in; `host_number` counts in canonical order."""

    host: str
    host_number: int
    device: Device
    target: TorchTarget

    @property
    def name(self) -> str:
        """The device as people see it."""
        return f"{self.host}/{self.device.index}"


@dataclass(frozen=True, eq=False)
class Kind:
    """Devices that are equal to the planner: vendor, model and memory. Seats in canonical order."""

    vendor: str
    model: str
    memory_bytes: int | None
    limit_bytes: int | None  # what a plan may count on
    optimizer_s_per_parameter: float
    timings: Mapping[int, RowTiming]  # by rows of a microbatch
    seats: tuple[Seat, ...]  # shared by all kinds of one group
    group: int = 0  # kinds of one group are the same devices, used in other ways
    tp: int = 1  # devices that share each layer of a stage
    lanes: int = 1  # copies of a stage that take microbatches in turn; timings are those of one
    recompute: bool = False  # the backward runs the forward again and holds only the layers' inputs

    @property
    def name(self) -> str:
        """Vendor and model, for people."""
        return f"{self.vendor} {self.model}"

    @property
    def width(self) -> int:
        """Devices of a stage."""
        return self.tp * self.lanes

    def is_like(self, other: Kind) -> bool:
        """Whether both are the same devices, or parts of them."""
        mine = self.vendor, self.model, self.memory_bytes
        return mine == (other.vendor, other.model, other.memory_bytes)

    @cached_property
    def most_on_one_host(self) -> int:
        """Most of these devices that sit in one host."""
        return max(Counter(seat.host_number for seat in self.seats).values())

    def rows_per_s(self, num_layers: int) -> float:
        """Rows per second of one device that holds the whole model, at its best microbatch size."""
        return max(rows / model_seconds(t, num_layers) for rows, t in self.timings.items())


def output_bytes(recipe: Recipe, rows: int) -> int:
    """Return the bytes of one layer's output for a microbatch."""
    return arch.boundary_bytes(recipe.model, recipe.train.dtype, rows, recipe.data.seq_len)


def ways_of(
    plain: Kind,
    figures: DeviceProfile,
    recipe: Recipe,
    choices: Sequence[int],
    *,
    links: Sequence[Link],
) -> Iterator[Kind]:
    """Yield the ways in which devices may work: each tp, each number of lanes, without and with recomputation.

    tp stays inside a host. Where hosts have no multiple of tp devices, those that are left over are a group of their
    own, for smaller tp; `plain.group` is the number of the first group.

    Raises:
        NoPlanError: the profile has figures for none of them.
        ConfigError: tp above 1 is allowed and the link inside the host has no figures.
    """
    usable = [
        tp
        for tp in sorted(recipe.plan.tp, reverse=True)
        if recipe.model.num_heads % tp == 0 and figures.timings_of(tp=tp)
    ]
    number = 0
    for group, (tps, seats) in enumerate(parts_by_tp(plain.seats, usable)):
        part = replace(plain, seats=seats, group=plain.group + group)
        for tp, recompute in product(sorted(tps), (False, True)[: 1 + recipe.plan.recompute]):
            if figures.timings_of(tp=tp, recompute=recompute):
                timings = _timings(part, figures, recipe, choices, way=(tp, recompute), links=links)
                for lanes in sorted(recipe.plan.lanes):
                    if tp * lanes <= len(seats):
                        number += 1
                        yield replace(
                            part, timings=timings, tp=tp, lanes=lanes, recompute=recompute
                        )
    if not number:
        raise NoPlanError(
            f"{plain.name}: no figures for any tp of {list(recipe.plan.tp)} that fits into a host"
            f" of {plain.most_on_one_host}",
            hint="add 1 to plan.tp, or run `hetrun profile` again with this recipe",
        )


def parts_by_tp(
    seats: Sequence[Seat], tps: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[Seat, ...]]]:
    """Split devices so that any mix of the tps of a part fills its hosts: yield these tps, and the devices.

    `tps` descend. Each host gives the first part a multiple of the largest, the next part a multiple of the next, and
    so on. The tps of a part divide each other, so that whatever is placed first, the rest stays a multiple.
    """
    left: dict[int, list[Seat]] = {}
    for seat in seats:
        left.setdefault(seat.host_number, []).append(seat)
    for place, tp in enumerate(tps):
        taken: list[Seat] = []
        for host, held in left.items():
            count = len(held) // tp * tp
            taken += held[:count]
            left[host] = held[count:]
        chain = [tp]
        for smaller in tps[place + 1 :]:
            if chain[-1] % smaller == 0:
                chain.append(smaller)
        if taken:
            yield tuple(chain), tuple(taken)


def _timings(
    part: Kind,
    figures: DeviceProfile,
    recipe: Recipe,
    choices: Sequence[int],
    *,
    way: tuple[int, bool],
    links: Sequence[Link],
) -> dict[int, RowTiming]:
    """Return the seconds of devices that work in one way (tp, recompute), by rows of a microbatch."""
    tp, recompute = way
    timings = {rows: timing_at(figures, rows, tp=tp, recompute=recompute) for rows in choices}
    if tp == 1:
        return timings
    link = find_link(links, LinkKind.INSIDE_HOST, part.vendor, part.vendor)
    return {
        rows: shared_timing(timing, link, output_bytes(recipe, rows))
        for rows, timing in timings.items()
    }


def row_notes(figures: DeviceProfile, choices: Sequence[int]) -> list[str]:
    """Say which microbatch sizes were never measured."""
    beyond = [rows for rows in choices if is_extrapolated(figures, rows)]
    if not beyond:
        return []
    measured = ", ".join(str(rows) for rows in measured_rows(figures))
    sizes = ", ".join(str(rows) for rows in beyond)
    return [
        f"{figures.vendor} {figures.model}: times for microbatches of {sizes} rows are"
        f" extrapolated from {measured}"
    ]
