"""A profile as rich renderables, and what all tables share. Where they are written is left to `render.py`.

Names and messages that came from hosts go through `cell`, so they are never read as markup nor as terminal controls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetrun.model import (
    CurveKind,
    DeviceProfile,
    Link,
    LinkCurve,
    Profile,
    Quantity,
    RowTiming,
    Source,
)
from hetrun.report.words import (
    count,
    format_bytes,
    format_flops,
    format_percent,
    format_quantity,
    format_seconds,
    printable,
    some,
)

_DEVICE_HEADS = (
    *("Vendor", "Model", "Hosts", ">Rows", ">Layer F", ">Layer B", ">Head F+B", ">Spread"),
    *(">Matmul", ">Copy", "Source"),
)


def cell(text: object, style: str = "") -> Text:
    """Return one cell or line; whatever it says is shown as it stands, on one line."""
    return Text(printable(str(text)).replace("\n", " ").replace("\t", " "), style=style)


def profile_view(profile: Profile) -> RenderableType:
    """Figures per device model and per link, each with its source."""
    extras = _extras(profile)
    devices = new_table(*_DEVICE_HEADS[:4], *extras, *_DEVICE_HEADS[4:])
    for device in profile.devices:
        for timing, row in zip(device.timings, _timing_rows(device), strict=True):
            more = [cell(show(timing)) for show in extras.values()]
            devices.add_row(*row[:4], *more, *row[4:])
    links = new_table(
        "Link", "Between", ">Latency", ">Rate", "Source", ">All-reduce", "Measured between"
    )
    for link in profile.links:
        added = cell(_all_reduce(link, profile.curves))
        links.add_row(*_link_row(link), added, cell(_ends(link, profile.curves)))
    told = [(f"{d.vendor} {d.model}: ", note) for d in profile.devices for note in d.warnings]
    told += [("", note) for note in profile.warnings]
    warnings = [cell(f"{who}{note}", "yellow") for who, note in told]
    return stack(devices, links, *warnings, *(Text(note, "dim") for note in _notes(profile)))


def _extras(profile: Profile) -> dict[str, Callable[[RowTiming], str]]:
    """Columns that most profiles do without: head and content."""
    timings = [timing for device in profile.devices for timing in device.timings]
    extras: dict[str, Callable[[RowTiming], str]] = {}
    if any(timing.tp > 1 for timing in timings):
        extras[">tp"] = lambda timing: str(timing.tp)
    if any(timing.recompute for timing in timings):
        extras["Layer"] = lambda timing: "recomputed" if timing.recompute else "stored"
    if any(timing.layer_peak_bytes is not None for timing in timings):
        extras[">Peak"] = lambda timing: format_bytes(timing.layer_peak_bytes)
    return extras


def _notes(profile: Profile) -> Iterable[str]:
    yield "Seconds of one microbatch. Modelled figures are those that emulated chips declare."
    timings = [timing for device in profile.devices for timing in device.timings]
    if any(timing.tp > 1 for timing in timings):
        yield "With tp, the seconds of one share; what the shares tell each other is not inside."
    for device in profile.devices:
        first = device.timings[0]
        if first.runs:
            runs = ", ".join(
                f"{run.num_layers} of {format_seconds(run.forward_s + run.backward_s)}"
                for run in first.runs
            )
            yield (
                f"{device.model}: Layer F and Layer B are means over layers that differ; with"
                f" {count(first.rows, 'row')} forward and backward of each: {runs}."
            )
    if any(device.source is Source.ASSUMED for device in profile.devices):
        yield "Assumed figures come from published peaks and were measured nowhere."
    if profile.quick:
        yield "Measured in haste (--quick): few repeats and sizes, one pair of hosts for each link."


def _ends(link: Link, curves: Iterable[LinkCurve]) -> str:
    """The hosts between which a link was measured; nothing where it was not."""
    for curve in curves:
        if (curve.link, curve.a, curve.b) == (link.kind, link.a, link.b):
            return " - ".join(curve.hosts)
    return ""


def _all_reduce(link: Link, curves: Iterable[LinkCurve]) -> str:
    """Rate of an all-reduce as runs make it, which is the last of a link's curves; nothing where there is none."""
    of_link = [
        curve for curve in curves if (curve.link, curve.a, curve.b) == (link.kind, link.a, link.b)
    ]
    reduced = [curve for curve in of_link if curve.kind is CurveKind.ALL_REDUCE]
    if not reduced:
        return ""
    source = "" if reduced[-1].source is Source.MEASURED else f", {reduced[-1].source.value}"
    return f"{_bytes_per_s(reduced[-1].bytes_per_s)}{source}"


def stack(*parts: RenderableType) -> Group:
    """Return parts below each other, tables with an empty line on both sides; a first line is their title."""
    spaced: list[RenderableType] = []
    for part in parts:
        is_below_text = isinstance(part, Table) and len(spaced) > 1
        if spaced and (isinstance(spaced[-1], Table) or is_below_text):
            spaced.append(Text())
        spaced.append(part)
    return Group(*spaced)


def new_table(*heads: str) -> Table:
    """A plain table; heads that start with ">" stand on the right. Long cells fold, nothing is cut off."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False
    )
    for head in heads:
        justify = "right" if head.startswith(">") else "left"
        table.add_column(Text(head.removeprefix(">")), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _timing_rows(device: DeviceProfile) -> Iterable[tuple[Text, ...]]:
    for index, timing in enumerate(device.timings):
        first = index == 0
        yield (
            cell(device.vendor if first else ""),
            cell(device.model if first else ""),
            cell(some(device.hosts, 3) if first else ""),
            cell(timing.rows),
            cell(format_seconds(timing.layer_forward_s)),
            cell(format_seconds(timing.layer_backward_s)),
            cell(format_seconds(timing.head_forward_s + timing.head_backward_s)),
            cell(format_percent(timing.spread)),
            cell(_ceiling(device, device.matmul_flops_per_s, format_flops) if first else ""),
            cell(_ceiling(device, device.copy_bytes_per_s, _bytes_per_s) if first else ""),
            cell(device.source.value if first else "", _source_style(device.source)),
        )


def _ceiling(device: DeviceProfile, quantity: Quantity, show: Callable[[float], str]) -> str:
    """The quantity; its source is left out where it is the device's own, which has a column."""
    if quantity.value is not None and quantity.source is device.source:
        return show(quantity.value)
    return format_quantity(quantity, show)


def _bytes_per_s(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def _link_row(link: Link) -> tuple[Text, ...]:
    between = f"{link.a or 'any'} - {link.b or 'any'}"
    return (
        cell(link.kind.value.replace("_", " ")),
        cell(between),
        cell(format_seconds(link.latency_s)),
        cell(_bytes_per_s(link.bytes_per_s)),
        cell(link.source.value, _source_style(link.source)),
    )


def _source_style(source: Source) -> str:
    return "" if source is Source.MEASURED else "yellow"
