"""Figures for every link that a plan may use: declared, measured, or assumed where nothing can measure it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from hetrun.errors import JobError
from hetrun.model import CurveKind, CurvePoint, Facts, HostFacts, Link, LinkCurve, Source
from hetrun.profile.fit import Fit, fit_line
from hetrun.profile.links import (
    NeededLink,
    assumed_link,
    declared_link,
    describe,
    needed_links,
)
from hetrun.profile.pairs import FULL, GLANCE, QUICK, PairResult, measure_pair

log = logging.getLogger(__name__)

UNLIKE = 1.25  # pairs and directions that differ by more are named
_POOR_FIT = 0.25

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
    seen: dict[tuple[str, str], PairResult] = {}
    links: list[Link] = []
    curves: list[LinkCurve] = []
    warnings: list[str] = []
    for needed in needed_links(facts):
        link = declared_link(facts, needed)
        if link is None and needed.is_between_accelerators:
            link = assumed_link(needed)
            warnings.append(_not_measured(needed, link))
        if link is None:
            pairs = needed.pairs()[: 1 if quick else None]
            results = [
                _measure(pair, needed, is_first=number == 0, quick=quick, seen=seen, say=progress)
                for number, pair in enumerate(pairs)
            ]
            link, found = _fitted(needed, results[0])
            curves += found
            warnings += compare(needed, results)
        links.append(link)
    return Network(links=tuple(links), curves=tuple(curves), warnings=tuple(warnings))


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


def _measure(
    pair: tuple[HostFacts, HostFacts],
    needed: NeededLink,
    *,
    is_first: bool,
    quick: bool,
    seen: dict[tuple[str, str], PairResult],
    say: Progress | None,
) -> PairResult:
    a, b = pair
    key = (min(a.spec.name, b.spec.name), max(a.spec.name, b.spec.name))
    effort = (QUICK if quick else FULL) if is_first else GLANCE
    known = seen.get(key)
    if known is None or len(known.points) < min(len(effort.sizes), 4):
        known = seen[key] = measure_pair(a, b, effort)
        if say:
            rate = f"{known.bytes_per_s / 1e9:.3g} GB/s, {known.points[0].seconds * 1e6:.3g} us"
            say(" - ".join(known.hosts), f"{needed.kind.value.replace('_', ' ')}: {rate}")
    return known


def _fitted(needed: NeededLink, result: PairResult) -> tuple[Link, tuple[LinkCurve, LinkCurve]]:
    """Return the link's figures, and the curves of one message and of an all-reduce of both ends.

    No message is quicker than one of a single byte.
    """
    try:
        fit = fit_line(result.points)
    except ValueError as error:
        raise JobError(
            f"link between {' and '.join(result.hosts)}: no bandwidth in what was measured: {error}",
            hint="measure again when the hosts are quiet",
        ) from error
    # a limiter lets small messages through at once, which would leave nothing for the latency
    fit = replace(fit, latency_s=max(fit.latency_s, result.points[0].seconds))
    if fit.error > _POOR_FIT:
        log.warning("link %s: the fit is off by %.0f %%", needed.name, 100 * fit.error)
    link = Link(
        kind=needed.kind,
        a=needed.a,
        b=needed.b,
        latency_s=fit.latency_s,
        bytes_per_s=fit.bytes_per_s,
        source=Source.MEASURED,
    )
    one_message = LinkCurve(
        link=needed.kind,
        a=needed.a,
        b=needed.b,
        hosts=result.hosts,
        addresses=result.addresses,
        kind=CurveKind.P2P,
        source=Source.MEASURED,
        points=result.points,
        latency_s=fit.latency_s,
        bytes_per_s=fit.bytes_per_s,
        why=f"one TCP stream, sent by {result.slower_from}, the slower of both directions",
    )
    return link, (one_message, all_reduce_curve(one_message, fit))


def all_reduce_curve(p2p: LinkCurve, fit: Fit) -> LinkCurve:
    """Derive an all-reduce of the two ends: a ring of 2 makes 2 hops with half of the bytes in each."""
    points = tuple(
        CurvePoint(num_bytes=p.num_bytes, seconds=2 * fit.seconds(p.num_bytes / 2))
        for p in p2p.points
    )
    return LinkCurve(
        link=p2p.link,
        a=p2p.a,
        b=p2p.b,
        hosts=p2p.hosts,
        addresses=p2p.addresses,
        kind=CurveKind.ALL_REDUCE,
        source=Source.MODELLED,
        points=points,
        latency_s=2 * fit.latency_s,
        bytes_per_s=fit.bytes_per_s,
        why="derived from the measured p2p fit: ring of the two ends, 2 hops of half the bytes",
    )


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
