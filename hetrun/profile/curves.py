"""Curves and figures of one link, from what its ends measured. Pure; measuring is left to `pairs.py` and `collectives.py`."""

from __future__ import annotations

import logging
from dataclasses import replace

from hetrun.errors import JobError
from hetrun.model import CurveKind, CurvePoint, Link, LinkCurve, Source
from hetrun.profile.collectives import TeamResult
from hetrun.profile.fit import Fit, fit_line
from hetrun.profile.links import NeededLink
from hetrun.profile.pairs import PairResult

log = logging.getLogger(__name__)

APART = 1.5  # measured and derived all-reduces that differ by more are named
_POOR_FIT = 0.25


def p2p_curve(needed: NeededLink, result: PairResult) -> LinkCurve:
    """Return the curve of one message over one TCP stream.

    Raises:
        JobError: no bandwidth in what was measured.
    """
    return _fitted(
        LinkCurve(
            link=needed.kind,
            a=needed.a,
            b=needed.b,
            hosts=result.hosts,
            addresses=result.addresses,
            kind=CurveKind.P2P,
            source=Source.MEASURED,
            points=result.points,
            latency_s=0.0,
            bytes_per_s=1.0,
            why=f"one TCP stream, sent by {result.slower_from}, the slower of both directions",
        )
    )


def team_curve(needed: NeededLink, result: TeamResult, kind: CurveKind) -> LinkCurve:
    """Return a curve of what a team of ranks measured.

    Raises:
        JobError: no bandwidth in what was measured.
    """
    team = result.team
    where = "device memory" if team.is_native else "host memory"
    who = "ranks 0 and 1 of" if kind is CurveKind.P2P else "all of"
    return _fitted(
        LinkCurve(
            link=needed.kind,
            a=needed.a,
            b=needed.b,
            hosts=tuple(host.spec.name for host in team.hosts),
            addresses=result.addresses,
            kind=kind,
            source=Source.MEASURED,
            points=result.all_reduce if kind is CurveKind.ALL_REDUCE else result.p2p,
            latency_s=0.0,
            bytes_per_s=1.0,
            why=f"{team.backend} in {where}, {who} {len(team.members)} ranks",
            backend=team.backend,
            num_ranks=len(team.members),
        )
    )


def _fitted(curve: LinkCurve) -> LinkCurve:
    """Put the fit into a curve; no message is quicker than the smallest."""
    try:
        fit = fit_line(curve.points)
    except ValueError as error:
        raise JobError(
            f"link between {' and '.join(curve.hosts)}: no bandwidth in what was measured: {error}",
            hint="measure again when the hosts are quiet",
        ) from error
    # a limiter lets small messages through at once, which would leave nothing for the latency
    fit = replace(fit, latency_s=max(fit.latency_s, curve.points[0].seconds))
    if fit.error > _POOR_FIT:
        ends, kind = " - ".join(curve.hosts), curve.kind.value.replace("_", "-")
        log.warning("%s: the %s fit is off by %.0f %%", ends, kind, 100 * fit.error)
    return replace(curve, latency_s=fit.latency_s, bytes_per_s=fit.bytes_per_s)


def link_of(p2p: LinkCurve) -> Link:
    """Return the figures that a plan counts with."""
    return Link(
        kind=p2p.link,
        a=p2p.a,
        b=p2p.b,
        latency_s=p2p.latency_s,
        bytes_per_s=p2p.bytes_per_s,
        source=p2p.source,
    )


def derived_all_reduce(p2p: LinkCurve, *, num_ranks: int = 2, why: str) -> LinkCurve:
    """Derive an all-reduce from single messages: a ring of n makes 2 (n - 1) hops with 1/n of the bytes in each."""
    fit = Fit(latency_s=p2p.latency_s, bytes_per_s=p2p.bytes_per_s, error=0.0)
    hops = 2 * (num_ranks - 1)
    points = tuple(
        CurvePoint(num_bytes=p.num_bytes, seconds=hops * fit.seconds(p.num_bytes / num_ranks))
        for p in p2p.points
    )
    return replace(
        p2p,
        kind=CurveKind.ALL_REDUCE,
        source=Source.MODELLED,
        points=points,
        latency_s=hops * fit.latency_s,
        bytes_per_s=fit.bytes_per_s * num_ranks / hops,
        why=f"derived from the p2p fit, a ring of {num_ranks} with {hops} hops of 1/{num_ranks} of the bytes: {why}",
        backend=None,
        num_ranks=num_ranks,
    )


def disagreement(needed: NeededLink, measured: LinkCurve, p2p: LinkCurve) -> list[str]:
    """Say where an all-reduce takes much more or less than single messages would make one expect, at the largest size."""
    point = measured.points[-1]
    derived = derived_all_reduce(p2p, num_ranks=measured.num_ranks, why="")
    derived_s = derived.latency_s + point.num_bytes / derived.bytes_per_s
    if max(point.seconds / derived_s, derived_s / point.seconds) <= APART:
        return []
    return [
        f"link {needed.name}: an all-reduce of {point.num_bytes / 1e6:.3g} MB with {measured.backend}"
        f" takes {point.seconds * 1e3:.3g} ms, from single messages it would be {derived_s * 1e3:.3g} ms"
    ]
