"""Charts as inline SVG whose text keeps its size on any width. Words and tables are left to `html.py`.

Positions are percentages of the drawing, or live in a nested drawing that is stretched; nothing here needs a script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetrun.model import HeldOutLoss, RankTrace, RankUse, Span
from hetrun.report.markup import Child, Html, el, join
from hetrun.report.words import format_loss, format_percent, format_seconds

_WIDE = 10000.0  # units of a stretched drawing
_MOST_POINTS = 800
_MOST_RINGS = 200
_MOST_SINGLE_SPANS = 4000  # more than that are drawn as one path per lane and kind, without titles
_LANE_HEIGHT = 22
_CLASS_OF = {"F": "f", "B": "b", "W": "w", "sync": "sync", "optimizer": "opt"}
_NAME_OF = {
    "F": "forward",
    "B": "backward",
    "W": "gradients of weights",
    "sync": "gradient sync",
    "optimizer": "optimizer",
}


def hatch() -> Html:
    """The pattern that marks idle time; drawn once per page, used by reference."""
    line = el("line", x1=0, y1=0, x2=0, y2=6, class_="hatch")
    pattern = el(
        "pattern",
        line,
        id="idle",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return el("svg", el("defs", pattern), width=0, height=0, class_="defs", aria_hidden="true")


def loss_chart(
    values: Sequence[float], first_step: int, held_out: Sequence[HeldOutLoss] = ()
) -> Html:
    """A line of the loss over steps and rings for the held-out rows, with round numbers on both axes."""
    points_at = [(item.step - first_step, item.loss) for item in held_out]
    points_at = [(at, loss) for at, loss in points_at if 0 <= at < len(values)]
    seen = [*values, *(loss for _, loss in points_at)]
    ticks = round_ticks(min(seen), max(seen), 4)
    low, high = ticks[0], ticks[-1]
    height = 220.0

    def y_of(value: float) -> float:
        return height * (high - value) / (high - low)

    lines = [
        el("line", x1="0%", x2="100%", y1=y_of(tick), y2=y_of(tick), class_="grid")
        for tick in ticks
    ]
    labels = [
        el("text", f"{tick:g}", x=44, y=y_of(tick) + 4, text_anchor="end", class_="axis")
        for tick in ticks
    ]
    last = len(values) - 1
    steps = sorted({round(tick) for tick in round_ticks(0, max(last, 1), 6) if tick <= last})
    feet = [
        _foot(100.0 * step / max(last, 1), f"{first_step + step:,}", height + 20) for step in steps
    ]
    feet.append(el("text", "step", x="50%", y=height + 40, text_anchor="middle", class_="axis"))
    points = [f"{_WIDE * at / max(last, 1):.0f},{y_of(value):.2f}" for at, value in thin(values)]
    dot = el(
        "circle",
        el("title", f"step {first_step + last}: {format_loss(values[-1])}"),
        cx="100%" if last else "0%",
        cy=y_of(values[-1]),
        r=4,
        class_="dot",
    )
    rings = [
        el(
            "circle",
            el("title", f"held out, after step {first_step + at}: {format_loss(loss)}"),
            cx=f"{100.0 * at / max(last, 1):.2f}%",
            cy=y_of(loss),
            r=4,
            class_="ring",
        )
        for at, loss in _some(points_at)
    ]
    plot = el(
        "svg",
        *lines,
        el(
            "svg",
            el("polyline", points=" ".join(points), class_="loss"),
            viewBox=f"0 0 {_WIDE:.0f} {height:.0f}",
            preserveAspectRatio="none",
            width="100%",
            height=height,
            overflow="visible",
        ),
        *rings,
        dot,
        *feet,
        width="100%",
        height=height + 44,
        class_="plot",
    )
    axis = el("svg", *labels, width=48, height=height + 44, class_="yaxis", aria_hidden="true")
    text = f"Loss from {format_loss(values[0])} to {format_loss(values[-1])}"
    if points_at:
        text += f", {format_loss(points_at[-1][1])} on held-out rows"
    return el("div", axis, plot, class_="chart", role="img", aria_label=text)


def timeline(traces: Sequence[RankTrace], labels: Sequence[Html], colours: Sequence[int]) -> Html:
    """One lane per rank: forwards, backwards, gradient sync, optimizer; hatched where the rank is idle.

    `labels` and `colours` belong to the traces in order.
    """
    end_s = max((span.end_s for trace in traces for span in trace.spans), default=0.0) or 1.0
    single = sum(len(trace.spans) for trace in traces) <= _MOST_SINGLE_SPANS
    rows = [
        el("div", label, _lane(trace.spans, end_s, colour, single=single), class_="lane")
        for trace, label, colour in zip(traces, labels, colours, strict=True)
    ]
    return el("div", *rows, _time_axis(end_s), class_="lanes")


def share_bars(uses: Sequence[RankUse], labels: Sequence[Html], colours: Sequence[int]) -> Html:
    """One stacked bar per rank: busy, communication, idle."""
    rows = [
        el("div", label, _share_bar(use, colour), _share_text(use), class_="lane bars")
        for use, label, colour in zip(uses, labels, colours, strict=True)
    ]
    return el("div", *rows, class_="lanes")


def percent_bar(share: float | None, longest: float, class_: str) -> Html:
    """A bar on a scale from 0 to `longest`, with a mark at 100 %."""
    scale = 100.0 / longest
    bar = None
    if share is not None:
        bar = el(
            "rect", x=0, y=0, width=f"{max(0.0, share) * scale:.2f}%", height=10, class_=class_
        )
    return el(
        "svg",
        el("rect", x=0, y=0, width="100%", height=10, class_="track"),
        bar,
        el("line", x1=f"{scale:.2f}%", x2=f"{scale:.2f}%", y1=-1, y2=11, class_="mark"),
        width="100%",
        height=10,
        class_="meter",
        aria_hidden="true",
    )


def swatch(class_: str, letter: str = "") -> Html:
    """A small sample of a colour for a legend."""
    text = el("text", letter, x=9, y=10, text_anchor="middle", class_="letter") if letter else None
    return el(
        "svg",
        el("rect", width=18, height=13, rx=2, class_=class_),
        text,
        width=18,
        height=13,
        class_="swatch",
        aria_hidden="true",
    )


def round_ticks(low: float, high: float, about: int) -> tuple[float, ...]:
    """Return evenly spaced round numbers that enclose low and high; about so many of them, at least two."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        high, low = high + (abs(high) / 10 or 1.0), low - abs(low) / 10
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999999 * raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(index * step, 12) for index in range(first, max(last, first + 1) + 1))


def thin(values: Sequence[float], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """Return (index, value) pairs, at most `most`: of each run of values its lowest and highest are kept."""
    if len(values) <= most:
        return list(enumerate(values))
    size = math.ceil(2 * len(values) / (most - 2))
    kept = {0, len(values) - 1}
    for start in range(0, len(values), size):
        run = range(start, min(start + size, len(values)))
        kept.add(min(run, key=lambda index: values[index]))
        kept.add(max(run, key=lambda index: values[index]))
    return [(index, values[index]) for index in sorted(kept)]


def _some(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of many points those that `thin` keeps."""
    return [points[index] for index, _ in thin([loss for _, loss in points], _MOST_RINGS)]


def _lane(spans: Sequence[Span], end_s: float, colour: int, *, single: bool) -> Html:
    scale = _WIDE / end_s
    inner = [_one_span(span, scale) for span in spans] if single else _paths(spans, scale)
    letters = [_letter(span, end_s) for span in spans] if single else []
    return el(
        "svg",
        el("rect", width="100%", height=_LANE_HEIGHT, class_="track"),
        el("rect", width="100%", height=_LANE_HEIGHT, fill="url(#idle)"),
        el(
            "svg",
            *inner,
            viewBox=f"0 0 {_WIDE:.0f} {_LANE_HEIGHT}",
            preserveAspectRatio="none",
            width="100%",
            height=_LANE_HEIGHT,
        ),
        *letters,
        width="100%",
        height=_LANE_HEIGHT,
        class_=f"track v{colour}",
    )


def _one_span(span: Span, scale: float) -> Html:
    name = _NAME_OF.get(span.kind, span.kind)
    of = "" if span.microbatch is None else f" of microbatch {span.microbatch}"
    took = f"{format_seconds(span.start_s)} to {format_seconds(span.end_s)}"
    return el(
        "rect",
        el("title", f"{name}{of}: {took}"),
        x=round(span.start_s * scale, 1),
        width=round(max(span.end_s - span.start_s, 0) * scale, 1),
        height=_LANE_HEIGHT,
        class_=f"s {_CLASS_OF.get(span.kind, 'sync')}",
    )


def _letter(span: Span, end_s: float) -> Html | None:
    """The microbatch's number, where it fits on a wide page; style hides it on a narrow one."""
    width = (span.end_s - span.start_s) / end_s
    if span.microbatch is None or width < 0.012 + 0.008 * len(str(span.microbatch)):
        return None
    middle = 50.0 * (span.start_s + span.end_s) / end_s
    kind = _CLASS_OF.get(span.kind, "sync")
    return el(
        "text",
        str(span.microbatch),
        x=f"{middle:.2f}%",
        y=15,
        text_anchor="middle",
        class_=f"n n{kind}",
    )


def _paths(spans: Sequence[Span], scale: float) -> list[Html]:
    """All spans of a kind as one path; spans that touch are one piece."""
    pieces: dict[str, list[list[float]]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        runs = pieces.setdefault(_CLASS_OF.get(span.kind, "sync"), [])
        start, end = span.start_s * scale, span.end_s * scale
        if runs and start - runs[-1][1] < 0.5:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    return [
        el(
            "path",
            d="".join(f"M{a:.1f} 0H{b:.1f}V{_LANE_HEIGHT}H{a:.1f}z" for a, b in runs),
            class_=kind,
        )
        for kind, runs in pieces.items()
    ]


def _time_axis(end_s: float) -> Html:
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
        if end_s >= scale or unit == "ns"
    )
    total = end_s / scale
    ticks = [tick for tick in round_ticks(0, total, 6) if tick <= total * 1.0001]
    marks: list[Child] = []
    for tick in ticks:
        at = 100.0 * tick / total
        label = f"{tick:g} {unit}" if tick in (ticks[0], ticks[-1]) else f"{tick:g}"
        marks.append(el("line", x1=f"{at:.2f}%", x2=f"{at:.2f}%", y1=0, y2=5, class_="tick"))
        marks.append(_foot(at, label, 18))
    axis = el("svg", *marks, width="100%", height=24, class_="plot")
    return el("div", el("span", "time in the step", class_="label axisname"), axis, class_="lane")


def _foot(at: float, label: str, y: float) -> Html:
    """A label under an axis; those at the ends stay inside the drawing."""
    anchor = "start" if at < 3 else "end" if at > 97 else "middle"
    return el("text", label, x=f"{at:.2f}%", y=y, text_anchor=anchor, class_="axis")


def _share_bar(use: RankUse, colour: int) -> Html:
    pieces: list[Html] = []
    at = 0.0
    for share, class_ in ((use.busy, "f"), (use.communication, "sync")):
        pieces.append(
            el("rect", x=f"{100 * at:.3f}%", width=f"{100 * share:.3f}%", height=14, class_=class_)
        )
        at += share
    return el(
        "svg",
        el("rect", width="100%", height=14, class_="track"),
        el("rect", width="100%", height=14, fill="url(#idle)"),
        join(pieces),
        width="100%",
        height=14,
        class_=f"track v{colour}",
        aria_hidden="true",
    )


def _share_text(use: RankUse) -> Html:
    parts = (("busy", use.busy), ("comm.", use.communication), ("idle", use.idle))
    return el(
        "span",
        *[
            el("span", f"{name} ", el("b", format_percent(share)), class_="share")
            for name, share in parts
        ],
        class_="shares",
    )
