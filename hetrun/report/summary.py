"""Top of the page: verdict, banner of a run that did not end well, key figures, efficiency. Details are left to `details.py`."""

from __future__ import annotations

from hetrun.model import Failure, RunReport, Share, Source
from hetrun.report.markup import Html, el
from hetrun.report.svg import percent_bar
from hetrun.report.words import (
    DONE,
    count,
    definitions,
    ending,
    format_change,
    format_loss,
    format_percent,
    format_rate,
    format_seconds,
    headline,
    numbers_of,
)

_MOST_LINES = 40
_MOST_OTHERS = 20


def header(report: RunReport) -> Html:
    """Brand line, the one-sentence verdict, and what the planner thought of mixing."""
    done = report.status == DONE
    state = el("span", report.status, class_="pill good" if done else "pill bad")
    clock = el("span", f"{report.kind} time", class_="pill warn" if _modelled(report) else "pill")
    facts = (report.recipe, report.shape, report.run_id, report.started)
    top = el(
        "div",
        el("span", "hetrun report", class_="brand"),
        state,
        clock,
        *[el("span", fact) for fact in facts if fact],
        class_="top",
    )
    below = report.verdict if done else f"Until then {headline(report)} {report.verdict}"
    verdict = el("p", below, class_="verdict") if below else None
    return el("header", top, el("h1", headline(report) if done else ending(report)), verdict)


def banner(report: RunReport) -> Html | None:
    """Loud words about a run that was not done, with its root cause."""
    if report.status == DONE and not report.failures:
        return None
    children = [el("b", _failed("First failure: ", report.failures[0]))] if report.failures else []
    if report.failures and report.failures[0].last_lines:
        children.append(el("pre", "\n".join(report.failures[0].last_lines[-_MOST_LINES:])))
    others = report.failures[1:]
    if others:
        shown = [_failed("", failure) for failure in others[:_MOST_OTHERS]]
        if len(others) > _MOST_OTHERS:
            shown.append(f"and {len(others) - _MOST_OTHERS} more, in report.json")
        children.append(el("p", f"What followed ({count(len(others), 'failure')}):"))
        children.append(el("pre", "\n".join(shown)))
    words = f"Status: {report.status}. All figures below are of the steps that were finished."
    children.append(el("p", words))
    return el("div", *children, class_="banner", role="alert")


def key_figures(report: RunReport) -> Html:
    """Throughput, step, loss, steps and wall time in a row."""
    change = format_change(report.prediction_error)
    against = "as predicted" if change == "0.0 %" else f"{change} against the prediction"
    of_steps = f"of {report.planned_steps:,} planned" if report.planned_steps else ""
    loss = f"{format_loss(report.loss.first)} → {format_loss(report.loss.last)}"
    rows = f"batch of {count(report.global_batch_rows, 'row')}" if report.global_batch_rows else ""
    facts = (
        ("Throughput", format_rate(report.tokens_per_s, "tokens"), report.kind),
        ("Step time", format_seconds(report.step_s), against),
        ("Loss", loss, "first and last step"),
        ("Steps", f"{report.steps:,}", of_steps),
        ("Wall time", format_seconds(report.wall_s), rows),
    )
    return el("div", *[_fact(*fact) for fact in facts], class_="facts")


def efficiency_section(report: RunReport) -> Html:
    """E1, E2 and U of the run and of the even split beside each other."""
    even = report.even_split
    runs = numbers_of(report.efficiency)
    evens = numbers_of(even.efficiency) if even else (None, None, None)
    values = [q.value for q in (*runs, *evens) if q is not None and q.value is not None]
    longest = max([1.0, *values]) * 1.02
    metrics = [
        el(
            "div",
            el("div", el("b", key), f" {title}", class_="name"),
            _pair("hetrun's split", run, longest, "run"),
            _pair("even split", other, longest, "even"),
            el("p", line, class_="def"),
            *_whys(run, other),
            class_="metric",
        )
        for (key, title, line), run, other in zip(definitions(), runs, evens, strict=True)
    ]
    intro = (
        "How much of the summed compute was used. The mark is at 100 %; nothing is clamped there."
    )
    if even is None:
        missing = el(
            "p",
            f"There is no even split beside it: {report.even_split_why or 'not simulated'}.",
            class_="note",
        )
    else:
        shape = f"Even split: equal layers and equal rows, {even.shape}, simulated with the same cost model."
        missing = el("p", shape, class_="note")
    return el(
        "section",
        el("h2", "Efficiency"),
        el("p", intro, class_="note"),
        el("div", *metrics, class_="three"),
        missing,
        class_="card",
    )


def _failed(start: str, failure: Failure) -> str:
    rank = "" if failure.rank is None else f", rank {failure.rank}"
    return f"{start}{failure.host}{rank}: {failure.what}"


def _fact(key: str, value: str, detail: str) -> Html:
    return el(
        "div",
        el("div", key, class_="k"),
        el("div", value, class_="v"),
        el("div", detail, class_="d"),
        class_="fact",
    )


def _pair(who: str, share: Share | None, longest: float, class_: str) -> Html:
    value = share.value if share else None
    label = None
    if share is not None and share.value is not None:
        label = el("span", share.kind.value, class_=_pill(share.kind))
    return el(
        "div",
        el("span", who, label, class_="who"),
        el("span", format_percent(value, 2), class_="val"),
        percent_bar(value, longest, "run" if class_ == "run" else "evn"),
        class_=f"pair {class_}",
    )


def _pill(source: Source) -> str:
    return "pill" if source is Source.MEASURED else "pill warn"


def _whys(*shares: Share | None) -> list[Html]:
    """Why a number is missing, each reason once; reasons for a weaker label stay in the JSON."""
    whys = [
        share.why for share in shares if share is not None and share.value is None and share.why
    ]
    return [el("p", f"n/a: {why}", class_="why") for why in dict.fromkeys(whys)]


def _modelled(report: RunReport) -> bool:
    return report.kind == Source.MODELLED.value
