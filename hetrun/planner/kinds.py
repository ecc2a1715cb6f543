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
    """Yield the ways in which a group of devices may work: each tp that fits into a host, each number of lanes that
    there are devices for, without and with recomputation.

    Raises:
        NoPlanError: the profile has figures for none of them.
        ConfigError: tp above 1 is allowed and the link inside the host has no figures.
    """
    found = False
    for tp, recompute in product(
        sorted(recipe.plan.tp), (False, True)[: 1 + recipe.plan.recompute]
    ):
        fits = tp <= plain.most_on_one_host and recipe.model.num_heads % tp == 0
        if fits and figures.timings_of(tp=tp, recompute=recompute):
            found = True
            timings = {
                rows: timing_at(figures, rows, tp=tp, recompute=recompute) for rows in choices
            }
            if tp > 1:
                link = find_link(links, LinkKind.INSIDE_HOST, plain.vendor, plain.vendor)
                timings = {
                    rows: shared_timing(timing, link, output_bytes(recipe, rows))
                    for rows, timing in timings.items()
                }
            for lanes in sorted(recipe.plan.lanes):
                if tp * lanes <= len(plain.seats):
                    yield replace(plain, timings=timings, tp=tp, lanes=lanes, recompute=recompute)
    if not found:
        raise NoPlanError(
            f"{plain.name}: no figures for any tp of {list(recipe.plan.tp)} that fits into a host"
            f" of {plain.most_on_one_host}",
            hint="add 1 to plan.tp, or run `hetrun profile` again with this recipe",
        )


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
