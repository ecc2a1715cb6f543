"""Answers to questions about a plan as rich renderables: what if, and where the numbers come from."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from hetrun.cli.tables import cell, new_table, stack
from hetrun.planner.explain import Explanation, Term
from hetrun.planner.whatif import Comparison, PlanFigures
from hetrun.report.words import (
    NOT_KNOWN,
    definitions,
    format_bytes,
    format_change,
    format_rate,
    format_seconds,
    format_share,
    numbers_of,
)


def comparison_view(comparison: Comparison) -> RenderableType:
    """Both plans beside each other, a line per figure."""
    before, after = comparison.before, comparison.after
    table = new_table("Modelled", ">As it is", ">What if", ">Change")
    table.add_row("devices used", _used(before), _used(after), "")
    table.add_row("replicas", cell(before.shape), cell(after.shape), "")
    table.add_row(
        "step", format_seconds(before.step_s), format_seconds(after.step_s), _of_step(comparison)
    )
    rates = [format_rate(figures.tokens_per_s, "tokens") for figures in (before, after)]
    table.add_row("throughput", *rates, format_change(comparison.speedup - 1))
    bounds = [format_seconds(figures.bound_s) for figures in (before, after)]
    table.add_row("bound", *bounds, format_change(after.bound_s / before.bound_s - 1))
    pairs = zip(numbers_of(before.efficiency), numbers_of(after.efficiency), strict=True)
    for (key, _, _), (old, new) in zip(definitions(), pairs, strict=True):
        table.add_row(key, format_share(old), format_share(new), "")
    title = Text("What if " + ", ".join(comparison.changes), style="bold")
    verdicts = [
        cell(f"as it is: {before.verdict}"),
        cell(f"what if: {after.verdict}", "bold"),
    ]
    note = Text("On paper only: no host was asked, and nothing is saved without -o.", style="dim")
    return stack(title, table, *verdicts, note)


def explanation_view(explanation: Explanation) -> RenderableType:
    """A line per number: value, source, and how it was reached."""
    table = new_table("Number", "Of", ">Value", "Source", "How")
    previous = ""
    for term in explanation.terms:
        of = term.of if term.of != previous else ""
        previous = term.of
        table.add_row(cell(term.what), cell(of), _value(term), term.source.value, cell(term.how))
    title = Text(f"{explanation.recipe}: where the plan's numbers come from", style="bold")
    return stack(title, table)


def _used(figures: PlanFigures) -> str:
    return f"{figures.num_used} of {figures.num_devices}"


def _of_step(comparison: Comparison) -> str:
    return format_change(comparison.after.step_s / comparison.before.step_s - 1)


def _value(term: Term) -> str:
    if term.value is None:
        return NOT_KNOWN
    if term.unit == "s":  # what one parameter costs is less than any clock counts
        return f"{term.value:.3g} s" if 0 < term.value < 1e-8 else format_seconds(term.value)
    if term.unit == "bytes":
        return format_bytes(term.value)
    if term.unit == "bytes/s":
        return f"{format_bytes(term.value)}/s"
    if term.unit == "rows/s":
        return format_rate(term.value, "rows")
    return f"{term.value:,.0f}" if float(term.value).is_integer() else f"{term.value:.4g}"
