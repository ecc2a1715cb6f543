"""What there is to plan: equal devices grouped into kinds, their figures, the batch. Choosing is left to `search.py`.

Hosts are put into one canonical order here, so that the order of the inventory changes nothing later on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetrun import arch
from hetrun.errors import NoPlanError
from hetrun.model import (
    DeviceProfile,
    Dtype,
    Facts,
    HostFacts,
    Link,
    LinkKind,
    ModelSpec,
    Order,
    Profile,
    Recipe,
)
from hetrun.planner.kinds import UNKNOWN_MODEL, Kind, Seat, row_notes, ways_of
from hetrun.planner.targets import EMULATED, TorchTarget
from hetrun.schedule import find_link
from hetrun.schedule.step import KnownEnds

log = logging.getLogger(__name__)

Cuts = tuple[float, ...]  # real, between stages


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that a search looks at, and nothing else."""

    model: ModelSpec
    dtype: Dtype
    seq_len: int
    batch_rows: int
    row_choices: tuple[int, ...]  # microbatch sizes, ascending
    max_stages: int
    kinds: tuple[Kind, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    max_shapes: int | None = None  # different replicas
    left_over: tuple[Seat, ...] = ()  # on hosts without a multiple of any tp
    orders: tuple[Order, ...] = (Order.ONE_F_ONE_B,)  # to choose from
    fractional: bool = False  # a layer may live on two stages
    recompute: bool = False  # allowed; only kinds with figures of it can
    zero: tuple[int, ...] = (0,)  # ZeRO stages to choose from
    shards: int = 0  # lanes at least that share out what they know of a parameter; 0: each has all
    known_ends: KnownEnds = field(default_factory=dict)  # pipelines that were simulated already

    @cached_property
    def reduce_cache(
        self,
    ) -> dict[tuple[tuple[tuple[str, int], ...], int, tuple[str, ...], int], float]:
        """Seconds of all-reduces that were asked for, by devices per vendor and bytes."""
        return {}

    @cached_property
    def bytes_cache(self) -> dict[tuple[int, ...], int]:
        """Bytes of stages that were asked for; see `shapes.stage_memory`."""
        return {}

    @cached_property
    def cuts_cache(self) -> dict[tuple[tuple[int, ...], int, tuple[int, ...]], Cuts | None]:
        """Real cuts of shapes that were asked for; see `orders.even_cuts`."""
        return {}

    @cached_property
    def _link_cache(self) -> dict[tuple[LinkKind, str, str], Link]:
        return {}

    @cached_property
    def groups(self) -> tuple[Kind, ...]:
        """The first kind of every group: each device in exactly one of them."""
        first: dict[int, Kind] = {}
        for kind in self.kinds:
            first.setdefault(kind.group, kind)
        return tuple(first.values())

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For each kind, the place of its group in `groups`."""
        numbers = {kind.group: place for place, kind in enumerate(self.groups)}
        return tuple(numbers[kind.group] for kind in self.kinds)

    @property
    def capacity(self) -> tuple[int, ...]:
        """Devices of each group."""
        return tuple(len(kind.seats) for kind in self.groups)

    @cached_property
    def vendors(self) -> tuple[str, ...]:
        """Vendors in canonical order."""
        return tuple(sorted({kind.vendor for kind in self.kinds}))

    @cached_property
    def layers_differ(self) -> bool:
        """Whether some layers cost or hold something else than others."""
        return arch.layers_differ(self.model)

    @cached_property
    def parameter_sums(self) -> tuple[int, ...]:
        """Parameters of the first n layers, for every n."""
        sums = [0]
        for run in arch.layer_runs(self.model):
            for _ in range(run.num_layers):
                sums.append(sums[-1] + run.parameters)
        return tuple(sums)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Rows per second of one device of each kind, with the whole model to itself."""
        return tuple(kind.rows_per_s(self.model.num_layers) for kind in self.kinds)

    @cached_property
    def group_speeds(self) -> tuple[float, ...]:
        """Rows per second of one device of each group, used in its best way."""
        best: dict[int, float] = {}
        for kind, speed in zip(self.kinds, self.speeds, strict=True):
            best[kind.group] = max(best.get(kind.group, 0.0), speed / kind.tp)
        return tuple(best[kind.group] for kind in self.groups)

    @cached_property
    def inside(self) -> dict[str, LinkKind]:
        """The slowest link among the devices of each vendor."""
        hosts: dict[str, set[int]] = {}
        for kind in self.kinds:
            hosts.setdefault(kind.vendor, set()).update(seat.host_number for seat in kind.seats)
        return {
            vendor: LinkKind.INSIDE_HOST if len(numbers) == 1 else LinkKind.INSIDE_ISLAND
            for vendor, numbers in hosts.items()
        }

    @cached_property
    def fullest_host(self) -> dict[str, int]:
        """How many devices of each vendor its fullest host has; 0 where these are not all alike."""
        found: dict[str, int] = {}
        for kind in self.groups:
            found[kind.vendor] = 0 if kind.vendor in found else kind.most_on_one_host
        return found

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(len(kind.seats) for kind in self.groups)

    def link(self, kind: LinkKind, a: str, b: str) -> Link:
        """Return the figures of a link; looked up once."""
        key = (kind, a, b)
        if key not in self._link_cache:
            self._link_cache[key] = find_link(self.links, kind, a, b)
        return self._link_cache[key]

    def seat_link(self, a: Seat, b: Seat) -> Link:
        """Return the figures of the link between two devices."""
        if a.device.vendor != b.device.vendor:
            kind = LinkKind.ACROSS
        elif a.host != b.host:
            kind = LinkKind.INSIDE_ISLAND
        else:
            kind = LinkKind.INSIDE_HOST
        return self.link(kind, a.device.vendor, b.device.vendor)

    def gradient_bytes(self, first: int, end: int, *, tp: int = 1) -> int:
        """Bytes of the gradients of layers [first, end) on each of `tp` devices, with embedding and head where they belong."""
        sums = self.parameter_sums
        count = -(-(sums[end] - sums[first]) // tp)
        if first == 0:
            count += arch.embedding_parameters(self.model)
        if end == self.model.num_layers:
            count += arch.head_parameters(self.model)
        return count * arch.BYTES_PER_PARAMETER[self.dtype]

    def only(self, vendor: str) -> Problem:
        """Return the same problem with the devices of one vendor."""
        return replace(self, kinds=tuple(kind for kind in self.kinds if kind.vendor == vendor))

    @property
    def takes_turns(self) -> bool:
        """Whether a stage may have several lanes."""
        return any(kind.lanes > 1 for kind in self.kinds)

    def with_least_tp(self) -> Problem:
        """Return the same problem with every layer on as few devices as the recipe allows.

        Devices that were parted by what fills their hosts are one group again.
        """
        least: dict[str, int] = {}
        for kind in self.kinds:
            least[kind.name] = min(kind.tp, least.get(kind.name, kind.tp))
        seats = {
            kind.group: tuple(
                sorted(
                    (seat for own in self.groups if own.is_like(kind) for seat in own.seats),
                    key=lambda seat: (seat.host_number, seat.device.index),
                )
            )
            for kind in self.groups
        }
        kinds: list[Kind] = []
        for kind in self.kinds:
            alike = next((own.group for own in kinds if own.is_like(kind)), kind.group)
            if kind.tp == least[kind.name] and alike == kind.group:
                kinds.append(replace(kind, seats=seats[kind.group]))
        return replace(self, kinds=tuple(kinds))

    def without_recompute(self) -> Problem:
        """Return the same problem with no forward computed twice."""
        return replace(self, kinds=tuple(kind for kind in self.kinds if not kind.recompute))

    def without_lanes(self) -> Problem:
        """Return the same problem with one lane for every stage."""
        return replace(self, kinds=tuple(kind for kind in self.kinds if kind.lanes == 1))

    def with_lanes(self, choices: Sequence[int]) -> Problem:
        """Return the same problem with other numbers of lanes to choose from."""
        kinds = (
            replace(kind, lanes=lanes)
            for kind in self.without_lanes().kinds
            for lanes in choices
            if kind.tp * lanes <= len(kind.seats)
        )
        return replace(self, kinds=tuple(kinds))

    def with_batch(self, batch_rows: int) -> Problem:
        """Return the same problem with another global batch."""
        choices = tuple(rows for rows in self.row_choices if rows <= batch_rows)
        return replace(self, batch_rows=batch_rows, row_choices=choices)

    def without_memory_limits(self) -> Problem:
        """Return the same problem on devices whose memory never ends."""
        return replace(self, kinds=tuple(replace(kind, limit_bytes=None) for kind in self.kinds))


def read_problem(
    facts: Facts, profile: Profile, recipe: Recipe, *, targets: Mapping[str, TorchTarget]
) -> Problem:
    """Group the devices of all hosts that answered.

    Raises:
        NoPlanError: no devices, figures of another model, or a device without figures or torch target.
    """
    _check_profile(profile, recipe)
    choices = tuple(sorted(set(recipe.train.microbatch_rows)))
    seats = _seats(facts, targets)
    if not seats:
        raise NoPlanError(
            f"no devices on the {len(facts.hosts)} hosts of {facts.inventory}",
            hint="see what `hetrun probe` says about each host",
        )
    notes: list[str] = []
    kinds: list[Kind] = []
    left_over: list[Seat] = []
    for (vendor, model, memory), members in sorted(_grouped(seats).items(), key=_kind_order):
        figures = _figures(profile, members[0], vendor=vendor, model=model)
        notes += row_notes(figures, choices)
        plain = Kind(
            vendor=vendor,
            model=model,
            memory_bytes=memory,
            limit_bytes=None if memory is None else int(memory * recipe.plan.memory_fraction),
            optimizer_s_per_parameter=figures.optimizer_s_per_parameter,
            timings={},
            seats=tuple(members),
            group=len(kinds),
        )
        ways = list(ways_of(plain, figures, recipe, choices, links=profile.links))
        in_use = {seat.name for way in ways for seat in way.seats}
        spare = [seat for seat in members if seat.name not in in_use]
        left_over += spare
        if spare:
            what = f"{len(spare)} x {plain.name} left idle: what is on their hosts"
            notes.append(f"{what} is no multiple of any tp of {list(recipe.plan.tp)}")
        kinds += ways
    for note in notes:
        log.warning("%s", note)
    return Problem(
        model=recipe.model,
        dtype=recipe.train.dtype,
        seq_len=recipe.data.seq_len,
        batch_rows=recipe.train.global_batch_rows,
        row_choices=choices,
        max_stages=min(recipe.model.num_layers, recipe.plan.max_stages or len(seats), len(seats)),
        kinds=tuple(kinds),
        links=profile.links,
        notes=tuple(dict.fromkeys(notes)),
        max_shapes=recipe.plan.max_shapes,
        orders=recipe.plan.orders,
        fractional=recipe.plan.fractional,
        recompute=recipe.plan.recompute,
        zero=recipe.plan.zero,
        left_over=tuple(left_over),
    )


def _check_profile(profile: Profile, recipe: Recipe) -> None:
    """Refuse figures that were taken for another model."""
    if profile.model != recipe.model or profile.seq_len != recipe.data.seq_len:
        raise NoPlanError(
            f"the profile is of recipe {profile.recipe} with another model or seq_len"
            f" ({profile.seq_len}, now {recipe.data.seq_len})",
            hint=f"run `hetrun profile` again with recipe {recipe.name}",
        )
    runs = [run.num_layers for run in arch.layer_runs(recipe.model)]
    wanted = runs if arch.layers_differ(recipe.model) else []
    for device in profile.devices:
        if any([run.num_layers for run in timing.runs] != wanted for timing in device.timings):
            raise NoPlanError(
                f"the figures of {device.vendor} {device.model} are not of layers {runs}",
                hint=f"run `hetrun profile` again with recipe {recipe.name}",
            )


def _seats(facts: Facts, targets: Mapping[str, TorchTarget]) -> list[Seat]:
    """Return all devices of the hosts that answered, hosts in canonical order."""
    answered = []
    for host in facts.hosts:
        if host.error is None:
            answered.append(host)
        else:
            log.warning("%s is left out: %s", host.spec.name, host.error)
    seats = []
    for number, host in enumerate(sorted(answered, key=_host_order)):
        for device in sorted(host.devices, key=lambda device: device.index):
            target = EMULATED if device.emulated else targets.get(device.vendor)
            if target is None:
                raise NoPlanError(
                    f"nobody knows how torch names the devices of {device.vendor}",
                    host=host.spec.name,
                    hint="known are: " + (", ".join(sorted(targets)) or "none"),
                )
            if target.visible_env and target.visible_by == "uuid" and device.uuid is None:
                log.warning(
                    "%s: device %d has no uuid, its index selects it", host.spec.name, device.index
                )
            seats.append(Seat(host.spec.name, number, device, target))
    return seats


def _host_order(host: HostFacts) -> tuple[list[tuple[str, str]], list[tuple[int, str]]]:
    """Order hosts by what is in them, then by name (a2 before a10)."""
    inside = sorted((device.vendor, device.model or UNKNOWN_MODEL) for device in host.devices)
    parts = re.findall(r"\d+|\D+", host.spec.name)
    return inside, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _grouped(seats: Sequence[Seat]) -> dict[tuple[str, str, int | None], list[Seat]]:
    """Group seats by what the planner can tell apart."""
    groups: dict[tuple[str, str, int | None], list[Seat]] = {}
    for seat in seats:
        device = seat.device
        memory = None if device.memory.value is None else int(device.memory.value)
        key = (device.vendor, device.model or UNKNOWN_MODEL, memory)
        groups.setdefault(key, []).append(seat)
    return groups


def _kind_order(item: tuple[tuple[str, str, int | None], list[Seat]]) -> tuple[str, str, int]:
    vendor, model, memory = item[0]
    return vendor, model, -1 if memory is None else memory


def _figures(profile: Profile, seat: Seat, *, vendor: str, model: str) -> DeviceProfile:
    """Return what was measured for a device model."""
    for figures in profile.devices:
        if (figures.vendor, figures.model) == (vendor, model):
            return figures
    raise NoPlanError(
        f"no figures for {vendor} {model} on {seat.name}",
        hint="run `hetrun profile` after `hetrun probe`",
    )
