"""Where the time went: loss, cost parts, timeline, shares, stages, the vendors alone. The top is left to `summary.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from hetrun.model import Cost, RankTrace, RankUse, RunReport, StageUse
from hetrun.report.markup import Child, Html, el
from hetrun.report.style import NUM_COLOURS
from hetrun.report.svg import loss_chart, share_bars, swatch, timeline
from hetrun.report.words import (
    NOT_KNOWN,
    compared,
    count,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
    layers_of,
    paced,
    some,
)

_Ranked = TypeVar("_Ranked", RankUse, RankTrace)

MOST_LANES = 64
MOST_ROWS = 256
_MOST_ROWS_ON_A_SHEET = 12
_PARTS = (
    ("compute", "forwards and backwards of the slowest stage"),
    ("optimizer", "update of the parameters"),
    ("bubble", "waiting for other stages to fill and drain the pipeline"),
    ("p2p", "activations and gradients between stages that compute does not hide"),
    ("sync", "gradient sum over replicas, and waiting for it"),
)


def loss_section(report: RunReport) -> Html:
    """The loss curve."""
    words = "Mean over the tokens of the global batch, per step."
    if report.held_out:
        words += " Rings: mean over the tokens of the held-out rows, after that step."
    if report.num_comparisons:
        words += f" {compared(report)}."
    if report.pacing:
        words += f" {paced(report.pacing)}."
    return _section(
        "Loss", words, loss_chart(report.loss.values, report.first_step, report.held_out)
    )


def cost_section(report: RunReport) -> Html:
    """Predicted seconds of a step with their parts, beside the run and the even split."""
    even = report.even_split.cost if report.even_split else None
    use = max(report.ranks, key=lambda use: use.busy) if report.ranks else None
    heads: list[Child] = ["Part of a step", "Predicted", f"This run ({report.kind})"]
    rows = [_cost_row(name, what, report.predicted, even) for name, what in _PARTS]
    if (
        use is not None
    ):  # one cell of the run spans two predicted parts, which a rank cannot tell apart
        cells = {
            "compute": _run_cell(report, use.busy, "busy", 2),
            "bubble": _run_cell(report, use.idle, "idle", 2),
            "sync": _run_cell(report, use.communication, "communication", 1),
        }
        for row, (name, _) in zip(rows, _PARTS, strict=True):
            if name in cells:
                row.insert(2, cells[name])
        heads[2] = f"This run ({report.kind}), rank {use.rank}"
    else:
        for row in rows:
            row.insert(2, el("td", NOT_KNOWN, class_="r"))
    total = [el("td", "step"), _seconds(report.predicted.step_s), _seconds(report.step_s)]
    if even is not None:
        heads.append("Even split, predicted")
        total.append(_seconds(even.step_s))
    body = [*[el("tr", *row) for row in rows], el("tr", *total, class_="total")]
    bound = (
        f"No split can be faster than {format_seconds(report.bound_s)} within the cost model; "
        f"this one is {format_percent(report.gap)} above that bound"
    )
    reason = f": {report.gap_reason}." if report.gap_reason else "."
    foot = [el("p", bound + reason, class_="note")]
    if report.runner_up:
        foot.append(el("p", f"Runner-up: {report.runner_up}", class_="note"))
    note = (
        "Predictions are simulated; parts are those of the slowest replica and add up to the step. "
        "The run is shown by its busiest rank."
    )
    return _section("Predicted and achieved", note, _table(heads, body), *foot)


def timeline_section(report: RunReport) -> Html | None:
    """One lane per rank of the traced step."""
    if not report.timeline:
        return None
    use_of = {use.rank: use for use in report.ranks}
    traces = [trace for trace in report.timeline if trace.rank in use_of]
    shown = _spread(traces, {trace.rank: use_of[trace.rank] for trace in traces})
    uses = [use_of[trace.rank] for trace in shown]
    colours = vendor_colours(report)
    kinds = {span.kind for trace in shown for span in trace.spans}
    legend = _legend(uses, colours, kinds=kinds)
    note = f"Step {report.timeline[0].step}, {report.kind} time. {_shown(len(shown), len(traces))}"
    traced = {trace.rank for trace in traces}
    without = [rank for stage in report.stages for rank in stage.ranks if rank not in traced]
    if without:
        note = f"{note.strip()} No trace of this step from rank {some(without)}."
    lanes = timeline(shown, [_label(use) for use in uses], [colours[use.vendor] for use in uses])
    return _section("Timeline of a step", note, legend, lanes, class_=_card(len(shown)))


def shares_section(report: RunReport) -> Html | None:
    """Busy, communicating, idle per rank."""
    if not report.ranks:
        return None
    shown = _spread(report.ranks, {use.rank: use for use in report.ranks})
    colours = vendor_colours(report)
    note = f"Mean over all steps but the first. {_shown(len(shown), len(report.ranks))}"
    bars = share_bars(shown, [_label(use) for use in shown], [colours[use.vendor] for use in shown])
    legend = _legend(shown, colours)
    return _section("Where each rank's time went", note, legend, bars, class_=_card(len(shown)))


def stages_section(report: RunReport) -> Html | None:
    """Layers, rows and memory of each stage."""
    if not report.stages:
        return None
    colours = vendor_colours(report)
    heads = ("Stage", "Devices", "Layers", "Rows", "Memory, predicted", "Reported peak", "Busy")
    rows = [_stage_row(stage, colours) for stage in report.stages[:MOST_ROWS]]
    note = "Who holds which layers, and how many rows of each global batch pass through them."
    if len(report.stages) > MOST_ROWS:
        note += f" The first {MOST_ROWS} of {len(report.stages)} stages; all are in report.json."
    idle = None
    if report.idle_devices:
        devices = f"Left idle, since they would not help: {some(report.idle_devices)}."
        idle = el("p", devices, class_="note")
    return _section("The split", note, _table(heads, rows), idle, class_=_card(len(rows)))


def baselines_section(report: RunReport) -> Html | None:
    """What each vendor reaches alone, or why it cannot."""
    if not report.baselines:
        return None
    heads = ("Vendor alone", "Devices", "Same batch", "Scaled batch", "Ideal", "Its best plan")
    colours = vendor_colours(report)
    rows = []
    for base in report.baselines:
        scaled = el("td", format_rate(base.scaled_rows_per_s, "rows"), class_="r")
        if base.scaled_rows_per_s is not None:
            batch = f"batch of {count(base.scaled_batch_rows, 'row')}"
            scaled = el(
                "td",
                f"{format_rate(base.scaled_rows_per_s, 'rows')}",
                el("br"),
                el("i", batch),
                class_="r",
            )
        row = el(
            "tr",
            el("td", _swatch(base.vendor, colours), base.vendor, class_="t"),
            el("td", str(base.num_devices), class_="r"),
            el("td", format_rate(base.rows_per_s, "rows"), class_="r"),
            scaled,
            el("td", format_rate(base.ideal_rows_per_s, "rows"), class_="r"),
            el("td", base.shape or NOT_KNOWN, *([el("br"), el("i", base.why)] if base.why else [])),
        )
        rows.append(row)
    note = (
        "Simulated with the same cost model (modelled): what E1, E2 and U compare with. "
        "Ideal = summed speeds, no bubble, no traffic."
    )
    return _section("Each vendor alone", note, _table(heads, rows, right=(1, 2, 3, 4)))


def warnings_section(report: RunReport) -> Html | None:
    """Everything that a reader should know before trusting a figure."""
    if not report.warnings:
        return None
    items = [el("li", warning) for warning in report.warnings]
    return _section("Warnings", "", el("ul", *items), class_="card warnings")


def vendor_colours(report: RunReport) -> dict[str, int]:
    """Return a colour number per vendor, the same on the whole page: by name, so that runs compare."""
    vendors = {stage.vendor for stage in report.stages} | {use.vendor for use in report.ranks}
    vendors |= {base.vendor for base in report.baselines}
    return {vendor: index % NUM_COLOURS for index, vendor in enumerate(sorted(vendors))}


def _section(title: str, note: str, *children: Child, class_: str = "card") -> Html:
    words = el("p", note.strip(), class_="note") if note else None
    return el("section", el("h2", title), words, *children, class_=class_)


def _card(num_rows: int) -> str:
    """A card that is kept on one sheet of paper unless it is long."""
    return "card" if num_rows <= _MOST_ROWS_ON_A_SHEET else "card long"


def _table(heads: Sequence[Child], rows: Sequence[Html], *, right: Sequence[int] = ()) -> Html:
    cells = [
        el("th", head, scope="col", class_="r" if index in right else None)
        for index, head in enumerate(heads)
    ]
    table = el("table", el("thead", el("tr", *cells)), el("tbody", *rows))
    return el("div", table, class_="scroll")


def _cost_row(name: str, what: str, predicted: Cost, even: Cost | None) -> list[Html]:
    """Cells of one part; the run's own cell is put between them by the caller."""
    row = [el("td", name, el("br"), el("i", what)), _part(name, predicted)]
    return row if even is None else [*row, _part(name, even)]


def _part(name: str, cost: Cost) -> Html:
    seconds = getattr(cost, f"{name}_s")
    share = format_percent(seconds / cost.step_s) if cost.step_s > 0 else NOT_KNOWN
    return el("td", format_seconds(seconds), " ", el("i", share))


def _run_cell(report: RunReport, share: float, name: str, num_rows: int) -> Html:
    shown = el("i", f"{format_percent(share)} {name}")
    return el("td", format_seconds(share * report.step_s), " ", shown, rowspan=num_rows)


def _seconds(seconds: float) -> Html:
    return el("td", format_seconds(seconds))


def _stage_row(stage: StageUse, colours: dict[str, int]) -> Html:
    held = layers_of(
        stage.first_layer, stage.num_layers, embedding=stage.has_embedding, head=stage.has_head
    )
    limit = "no limit known"
    if stage.memory_limit_bytes:
        share = format_percent(stage.memory_bytes / stage.memory_limit_bytes, 0)
        limit = f"{share} of {format_bytes(stage.memory_limit_bytes)}"
    ranks = f"{count(len(stage.ranks), 'rank').split()[1]} {some(stage.ranks)}"
    rows = count(stage.rows // stage.microbatch_rows, "microbatch", "microbatches")
    return el(
        "tr",
        el("td", f"replica {stage.replica}, stage {stage.stage}"),
        el(
            "td",
            _swatch(stage.vendor, colours),
            el("b", stage.vendor),
            f" {some(stage.models, 3)}",
            el("br"),
            el("i", ranks),
        ),
        el("td", count(stage.num_layers, "layer"), el("br"), el("i", held)),
        el("td", str(stage.rows), el("br"), el("i", f"{rows} of {stage.microbatch_rows}")),
        el("td", format_bytes(stage.memory_bytes), el("br"), el("i", limit)),
        el("td", format_bytes(stage.peak_memory_bytes)),
        el("td", format_percent(stage.busy)),
    )


def _swatch(vendor: str, colours: dict[str, int]) -> Html:
    return el("span", swatch("f"), class_=f"v{colours[vendor]}")


def _label(use: RankUse) -> Html:
    place = f"replica {use.replica}, stage {use.stage}, {count(use.num_layers, 'layer')}"
    name = f"rank {use.rank} · {use.host} · {use.vendor}"
    return el("span", name, el("i", place), class_="label")


def _legend(
    uses: Sequence[RankUse], colours: dict[str, int], *, kinds: Collection[str] = ()
) -> Html:
    """Vendors with their colours, then what shades and patterns mean; `kinds` of spans, none where only shares are shown."""
    items = []
    names = {"F": "forward", "B": "backward", "W": "gradients of weights"}
    seen = [kind for kind in names if kind in kinds]
    what = ", ".join(names[kind] for kind in seen) or "busy"
    for vendor in sorted({use.vendor for use in uses}):
        shades = [swatch(kind.lower(), kind) for kind in seen] or [swatch("f")]
        items.append(el("span", *shades, f"{vendor}: {what}", class_=f"v{colours[vendor]}"))
    items.append(el("span", swatch("sync"), "gradient sync" if kinds else "communication"))
    if kinds:
        items.append(el("span", swatch("opt"), "optimizer"))
    items.append(el("span", swatch("idlebox"), "idle"))
    return el("div", *items, class_="legend")


def _shown(num_shown: int, num_all: int) -> str:
    if num_shown == num_all:
        return ""
    return (
        f"{num_shown} of {num_all} ranks, at least one per kind of stage; all are in report.json."
    )


def _spread(items: Sequence[_Ranked], use_of: dict[int, RankUse]) -> list[_Ranked]:
    """All items, or so many as lanes fit: the least busy rank of each kind of stage first, then in order."""
    if len(items) <= MOST_LANES:
        return list(items)
    least: dict[tuple[str, int, int], RankUse] = {}
    for item in items:
        use = use_of[item.rank]
        key = (use.vendor, use.stage, use.num_layers)
        if key not in least or use.busy < least[key].busy:
            least[key] = use
    chosen = [use.rank for use in least.values()]
    chosen += [item.rank for item in items if item.rank not in set(chosen)]
    kept = set(chosen[:MOST_LANES])
    return [item for item in items if item.rank in kept]
