"""Figures for every link that a plan may use: declared, measured, or assumed where nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetrun.model import CurveKind, Facts, HostFacts, Link, LinkCurve, LinkKind, Source
from hetrun.profile.collectives import (
    HOST_MEMORY,
    TeamResult,
    host_memory_team,
    measure_team,
    native_team,
)
from hetrun.profile.curves import (
    derived_all_reduce,
    disagreement,
    link_of,
    p2p_curve,
    team_curve,
)
from hetrun.profile.links import (
    NeededLink,
    assumed_link,
    declared_link,
    describe,
    needed_links,
)
from hetrun.profile.pairs import FULL, GLANCE, QUICK, PairResult, measure_pair

UNLIKE = 1.25  # pairs and directions that differ by more are named

Progress = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """All links, the curves behind those that were measured, and what was odd."""

    links: tuple[Link, ...] = ()
    curves: tuple[LinkCurve, ...] = ()
    warnings: tuple[str, ...] = ()


def measure_network(facts: Facts, *, quick: bool, progress: Progress | None = None) -> Network:
    """Measure what the inventory does not declare, one pair of hosts after the other so that none disturbs another.

    `quick` measures the one pair that stands for a link and no others.

    Raises:
        HetrunError: a pair could not be measured; names both hosts and their addresses.
    """
    survey = _Survey(quick=quick, say=progress)
    found = []
    for needed in needed_links(facts):
        link = declared_link(facts, needed)
        found.append(survey.measure(needed) if link is None else Network(links=(link,)))
    return Network(
        links=tuple(link for part in found for link in part.links),
        curves=tuple(curve for part in found for curve in part.curves),
        warnings=tuple(warning for part in found for warning in part.warnings),
    )


def assumed_network(facts: Facts) -> Network:
    """Return the links as declared, else from the interfaces' speed or assumed; nothing is measured."""
    links: list[Link] = []
    warnings: list[str] = []
    for needed in needed_links(facts):
        link = declared_link(facts, needed)
        if link is None:
            link = assumed_link(needed)
            warnings.append(_not_measured(needed, link))
        links.append(link)
    return Network(links=tuple(links), warnings=tuple(warnings))


def _not_measured(needed: NeededLink, link: Link) -> str:
    return f"link {needed.name} was not measured: {describe(link)}, {link.source.value}"


class _Survey:
    """Measures link after link; hosts that stand for several of them are measured once."""

    def __init__(self, *, quick: bool, say: Progress | None) -> None:
        self._effort = QUICK if quick else FULL
        self._quick = quick
        self._say = say
        self._pairs: dict[frozenset[str], PairResult] = {}
        self._teams: dict[frozenset[str], TeamResult] = {}

    def measure(self, needed: NeededLink) -> Network:
        """Measure one link: single messages, all-reduces, and other pairs of hosts at a glance.

        Raises:
            HetrunError: the hosts that stand for it could not be measured.
        """
        team = native_team(needed)
        native = measure_team(team, self._effort) if team else None
        warnings = [_no_native(needed, native)] if native and native.why else []
        curves = _native_curves(needed, native) if native and not native.why else []
        pairs = needed.pairs()[: 1 if self._quick else None]
        results: list[PairResult] = []
        if needed.kind is LinkKind.INSIDE_HOST and curves:
            p2p = curves[0]
        else:
            results = [self._pair(pair, is_first=at == 0) for at, pair in enumerate(pairs)]
            p2p = p2p_curve(needed, results[0])
            curves = [p2p, *(curve for curve in curves if curve.kind is CurveKind.ALL_REDUCE)]
        reduced, said = self._all_reduce(needed, pairs[0], p2p)
        self._tell(needed, p2p, reduced)
        for curve in (*curves, reduced):
            if curve.kind is CurveKind.ALL_REDUCE and _is_same_way(curve, p2p):
                warnings += disagreement(needed, curve, p2p)
        warnings += said + (compare(needed, results) if results else [])
        return Network(links=(link_of(p2p),), curves=(*curves, reduced), warnings=tuple(warnings))

    def _pair(self, pair: tuple[HostFacts, HostFacts], *, is_first: bool) -> PairResult:
        effort = self._effort if is_first else GLANCE
        key = frozenset(host.spec.name for host in pair)
        known = self._pairs.get(key)
        if known is None or len(known.points) < min(len(effort.sizes), 4):
            known = self._pairs[key] = measure_pair(*pair, effort)
        return known

    def _all_reduce(
        self, needed: NeededLink, pair: tuple[HostFacts, HostFacts], p2p: LinkCurve
    ) -> tuple[LinkCurve, list[str]]:
        """Return the curve over host memory, as runs add up; derived from single messages only where torch is missing."""
        key = frozenset(host.spec.name for host in pair)
        if key not in self._teams:
            self._teams[key] = measure_team(host_memory_team(*pair), self._effort)
        result = self._teams[key]
        if not result.why:
            return team_curve(needed, result, CurveKind.ALL_REDUCE), []
        said = f"link {needed.name}: its all-reduce is derived, not measured: {result.why}"
        return derived_all_reduce(p2p, why=result.why), [said]

    def _tell(self, needed: NeededLink, p2p: LinkCurve, reduced: LinkCurve) -> None:
        if self._say is None:
            return
        rate = f"{_rate(p2p)}, {p2p.points[0].seconds * 1e6:.3g} us"
        derived = "" if reduced.source is Source.MEASURED else " (derived)"
        what = needed.kind.value.replace("_", " ")
        self._say(" - ".join(p2p.hosts), f"{what}: {rate}; all-reduce {_rate(reduced)}{derived}")


def _rate(curve: LinkCurve) -> str:
    """The rate of the largest message."""
    return f"{curve.points[-1].num_bytes / curve.points[-1].seconds / 1e9:.3g} GB/s"


def _native_curves(needed: NeededLink, result: TeamResult) -> list[LinkCurve]:
    """The curve of one message first."""
    kinds = (CurveKind.P2P, CurveKind.ALL_REDUCE)
    return [team_curve(needed, result, kind) for kind in kinds]


def _is_same_way(all_reduce: LinkCurve, p2p: LinkCurve) -> bool:
    """True where one can be held against the other: both through the vendor's library, or both through host memory."""
    through_host_memory = (None, HOST_MEMORY)
    if all_reduce.source is not Source.MEASURED:
        return False
    return all_reduce.backend == p2p.backend or {all_reduce.backend, p2p.backend} <= set(
        through_host_memory
    )


def _no_native(needed: NeededLink, result: TeamResult) -> str:
    way = (
        "figures are of the way through host memory"
        if needed.kind is LinkKind.INSIDE_HOST
        else "there is no all-reduce of the vendor's own library"
    )
    return f"link {needed.name}: {result.team.backend} was not measured, {way}: {result.why}"


def compare(needed: NeededLink, results: list[PairResult]) -> list[str]:
    """Name pairs that are not like the first, which stands for the link, and directions that are not alike.

    Pairs are compared at the largest size that both have seen.
    """
    first = results[0]
    said = []
    for result in dict.fromkeys(results):
        if result.asymmetry > UNLIKE:
            said.append(
                f"{' - '.join(result.hosts)}: what {result.slower_from} sends takes"
                f" {result.asymmetry:.2f} times as long as what it gets"
            )
        ratio = _seconds_ratio(result, first)
        if ratio > UNLIKE or ratio < 1 / UNLIKE:
            how = f"{ratio:.2f} times as slow" if ratio > 1 else f"{1 / ratio:.2f} times as fast"
            said.append(
                f"link {needed.name}: {' - '.join(result.hosts)} is {how} as"
                f" {' - '.join(first.hosts)}, whose figures count"
            )
    return said


def _seconds_ratio(a: PairResult, b: PairResult) -> float:
    seconds = [{p.num_bytes: p.seconds for p in result.points} for result in (a, b)]
    size = max(set(seconds[0]) & set(seconds[1]))
    return seconds[0][size] / seconds[1][size]
