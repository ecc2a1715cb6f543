"""Seconds over message sizes, as latency + bytes / bandwidth. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from hetrun.model import CurvePoint

_OUTLIER = 3.0  # times the median error
_SMALL_ERROR = 0.02  # nothing this close is an outlier
_LARGE_ERROR = 0.10  # everything further off is


@dataclass(frozen=True, slots=True)
class Fit:
    """seconds = latency_s + bytes / bytes_per_s; `error` is the median share by which points are off."""

    latency_s: float
    bytes_per_s: float
    error: float

    def seconds(self, num_bytes: float) -> float:
        """Return what the fit says of one size."""
        return self.latency_s + num_bytes / self.bytes_per_s


def fit_line(points: Sequence[CurvePoint]) -> Fit:
    """Fit a line to points of ascending sizes. Errors count as shares, at most 1, and outliers do not count.

    Points weigh as the square of their rank, since the messages of training are large, and loopback and caches
    are faster below a mebibyte than above. First the line with the least weighted sum of errors, among those
    through two of the points (or through one and the origin, since latency is 0 or more). Then weighted least
    squares over the points that it meets.

    Raises:
        ValueError: fewer than two sizes, or no time that grows with the size.
    """
    lines = [(0.0, point.seconds / point.num_bytes) for point in points]
    for a, b in combinations(points, 2):
        slope = (b.seconds - a.seconds) / (b.num_bytes - a.num_bytes)
        lines.append((a.seconds - slope * a.num_bytes, slope))
    lines = [(start, slope) for start, slope in lines if start >= 0 and slope > 0]
    if len(points) < 2 or not lines:
        raise ValueError(f"{len(points)} points, need two sizes of which the larger takes longer")
    weights = [float(rank**2) for rank in range(1, len(points) + 1)]

    def cost(line: tuple[float, float]) -> float:
        errors = _errors(line, points)
        return sum(weight * error for weight, error in zip(weights, errors, strict=True))

    best = min(lines, key=cost)
    errors = _errors(best, points)
    limit = min(max(_OUTLIER * statistics.median(errors), _SMALL_ERROR), _LARGE_ERROR)
    met = [
        (weight, point)
        for weight, point, error in zip(weights, points, errors, strict=True)
        if error <= limit
    ]
    line = _least_squares(met) or best
    error = statistics.median(_errors(line, points))
    return Fit(latency_s=line[0], bytes_per_s=1.0 / line[1], error=error)


def _errors(line: tuple[float, float], points: Sequence[CurvePoint]) -> list[float]:
    start, slope = line
    fitted = [start + slope * point.num_bytes for point in points]
    return [abs(s - p.seconds) / max(s, p.seconds) for s, p in zip(fitted, points, strict=True)]


def _least_squares(weighted: Sequence[tuple[float, CurvePoint]]) -> tuple[float, float] | None:
    """Minimise the sum of w * ((start + slope * n) / t - 1)^2; None where that is no latency and bandwidth."""
    uu = uv = vv = u = v = 0.0
    for weight, point in weighted:
        one, size = 1 / point.seconds, point.num_bytes / point.seconds
        uu += weight * one * one
        uv += weight * one * size
        vv += weight * size * size
        u += weight * one
        v += weight * size
    determinant = uu * vv - uv * uv
    if determinant <= 0:
        return None
    start, slope = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    return (start, slope) if start >= 0 and slope > 0 else None
