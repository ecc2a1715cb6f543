"""RunReport -> one HTML file that needs nothing else: no script, no font, no request. Sections are left to the files beside it."""

from __future__ import annotations

from hetrun import __version__
from hetrun.model import RunReport
from hetrun.report.details import (
    baselines_section,
    cost_section,
    loss_section,
    shares_section,
    stages_section,
    timeline_section,
    warnings_section,
)
from hetrun.report.markup import Html, el
from hetrun.report.page import page
from hetrun.report.summary import banner, efficiency_section, header, key_figures
from hetrun.report.words import DONE, definitions

_READ = (
    (
        "measured, modelled, spec, assumed",
        "Where a number comes from, best first. Modelled numbers come from simulation, or from emulated chips that "
        "do real arithmetic but keep a modelled clock; they say what the split is worth, not what a machine did.",
    ),
    (
        "even split",
        "What a framework that takes all chips for equal would do: equal layers per stage, equal rows per replica.",
    ),
    (
        "n/a",
        "Nobody knows the number, or it cannot exist: a vendor that cannot hold the model alone has no throughput alone.",
    ),
    (
        "above 100 %",
        "E1 and E2 can pass 100 % where a vendor alone is short of memory or needs a deeper pipeline; U cannot. Read them together.",
    ),
    (
        "busy, communication, idle",
        "Busy is forward, backward and optimizer; communication is the gradient sum and waiting for it; idle is waiting for other stages.",
    ),
    (
        "step time",
        "Median over all steps but the first, which pays for set-up; of the slowest rank in each step.",
    ),
)


def to_html(report: RunReport) -> str:
    """Return the whole page; every text of the report is escaped."""
    sections = (
        header(report),
        banner(report),
        key_figures(report),
        warnings_section(report) if report.status != DONE else None,
        efficiency_section(report),
        timeline_section(report),
        shares_section(report),
        cost_section(report),
        stages_section(report),
        baselines_section(report),
        loss_section(report),
        warnings_section(report) if report.status == DONE else None,
        _how_to_read(),
        el("footer", f"Made by hetrun {__version__} from run {report.run_id}."),
    )
    return page(f"hetrun report: {report.recipe}, {report.run_id}", *sections)


def _how_to_read() -> Html:
    terms = [(key, line) for key, _, line in definitions()]
    items = [child for term, text in (*terms, *_READ) for child in (el("dt", term), el("dd", text))]
    return el("section", el("h2", "How to read this"), el("dl", *items), class_="card read")
