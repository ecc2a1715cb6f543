"""Numbers, states and other people's text as a person reads them. Where they stand on a page or a terminal is left to the callers.

Everything that came from a host is untrusted: `printable` takes out what could drive a terminal or turn text around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hetrun.model import (
    GIB,
    MIB,
    Efficiency,
    Pacing,
    Quantity,
    ReplicaPlan,
    RunReport,
    Share,
    Source,
    StagePlan,
)
from hetrun.model.base import UNPRINTABLE

NOT_KNOWN = "n/a"
DONE = "done"  # status of a run that did all its steps

_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")


def printable(text: str, *, max_chars: int = 4000) -> str:
    """Return the text with control characters replaced and its length bounded."""
    cut = text if len(text) <= max_chars else text[:max_chars] + " [cut]"
    return _UNPRINTABLE.sub("\ufffd", cut)


def format_bytes(num_bytes: float | None) -> str:
    """Return such as "64.0 GiB", "512 MiB", "812 bytes"."""
    if num_bytes is None:
        return NOT_KNOWN
    if num_bytes >= 0.9995 * GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
    if num_bytes >= 0.9995 * MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    if num_bytes >= 1024:
        return f"{num_bytes / 1024:.0f} KiB"
    return f"{num_bytes:.0f} bytes"


def format_seconds(seconds: float | None) -> str:
    """Return such as "1 h 02 min", "2 min 05 s", "3.21 s", "12.3 ms", "45.0 µs"."""
    if seconds is None:
        return NOT_KNOWN
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if round(seconds) >= 3600:
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours} h {rest // 60:02d} min"
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    nanoseconds = f"{seconds / 1e-9:.0f} ns"
    return "0 s" if nanoseconds == "0 ns" else nanoseconds


def format_percent(share: float | None, digits: int = 1) -> str:
    """Return such as "94.8 %"; shares above 1 are shown as they are."""
    if share is None:
        return NOT_KNOWN
    return f"{100 * share:.{digits}f} %"


def format_change(share: float | None) -> str:
    """Return a relative difference with its sign, such as "+0.4 %"."""
    if share is None:
        return NOT_KNOWN
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def format_rate(per_s: float | None, unit: str) -> str:
    """Return such as "12,345 tokens/s"."""
    if per_s is None:
        return NOT_KNOWN
    number = f"{per_s:,.0f}" if abs(per_s) >= 100 else _three_digits(per_s)
    return f"{number} {unit}/s"


def format_flops(per_s: float) -> str:
    """Return such as "312 TFLOP/s"."""
    for unit, scale in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if per_s >= 0.9995 * scale:
            return f"{_three_digits(per_s / scale)} {unit}"
    return f"{per_s:.0f} FLOP/s"


def format_quantity(quantity: Quantity, show: Callable[[float], str]) -> str:
    """Return the value as `show` writes it with its source, unless it was measured; "n/a" where unknown."""
    if quantity.value is None:
        return NOT_KNOWN
    label = "" if quantity.source is Source.MEASURED else f" ({quantity.source.value})"
    return show(quantity.value) + label


def format_share(share: Share) -> str:
    """Return a share of the summed compute as a percentage with its kind, "n/a" where it has none."""
    if share.value is None:
        return NOT_KNOWN
    return f"{format_percent(share.value, 2)} ({share.kind.value})"


def format_loss(loss: float) -> str:
    """Return a loss with four significant digits."""
    return f"{loss:.4g}"


def count(number: int, one: str, many: str = "") -> str:
    """Return such as "1 rank", "2 ranks"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: Sequence[object], most: int = 8) -> str:
    """Return names joined by commas; runs of whole numbers as ranges, the rest counted once there are many."""
    parts = _ranges(names)
    if len(parts) <= most:
        return ", ".join(parts)
    return f"{', '.join(parts[:most])} and {len(parts) - most} more"


def shape_of(replicas: Sequence[ReplicaPlan]) -> str:
    """Return such as "2 replicas x 3 stages" or "3 replicas x 1-2 stages with shared updates" (ZeRO 1)."""
    depths = sorted({len(replica.stages) for replica in replicas})
    deep = str(depths[0]) if len(depths) == 1 else f"{depths[0]}-{depths[-1]}"
    stages = "stage" if depths == [1] else "stages"
    shared = " with shared updates" if replicas[0].zero else ""
    return f"{count(len(replicas), 'replica')} x {deep} {stages}{shared}"


def way_of(stage: StagePlan) -> str:
    """Return how a stage uses its devices, such as ", tp 2, 3 lanes, recomputing", to stand after these or its layers."""
    tp = len(stage.ranks) // stage.lanes
    parts = [f"tp {tp}"] * (tp > 1) + [f"{stage.lanes} lanes"] * (stage.lanes > 1)
    parts += ["recomputing"] * stage.recompute
    return "".join(f", {part}" for part in parts)


def layers_of(first_layer: int, num_layers: int, *, embedding: bool, head: bool) -> str:
    """Return what a stage holds, such as "embedding, 0-6" or "7-11, head"."""
    parts = ["embedding"] if embedding else []
    if num_layers:
        last = first_layer + num_layers - 1
        parts.append(str(first_layer) if num_layers == 1 else f"{first_layer}-{last}")
    if head:
        parts.append("head")
    return ", ".join(parts) or "nothing"


def window_of(window: int, most_held: int | None) -> str:
    """Return forwards that may run ahead, such as "4", and what is held until W where that is apart: "6, holds 7"."""
    return str(window) if most_held is None else f"{window}, holds {most_held}"


def definitions() -> tuple[tuple[str, str, str], ...]:
    """Return (key, title, one line) of the three efficiency numbers, in the order in which they are shown."""
    return (
        (
            "E1",
            "against the vendors alone, same batch",
            "Throughput of the mix / sum of what each vendor reaches alone with its own best plan at the same global batch.",
        ),
        (
            "E2",
            "against the vendors alone, scaled batch",
            "The same, with each vendor's batch scaled to its share of the compute.",
        ),
        (
            "U",
            "against the summed speeds",
            "Ideal time at summed speeds / achieved time: no bubble, no traffic, no rounding. At most 100 %.",
        ),
    )


def numbers_of(efficiency: Efficiency) -> tuple[Share, Share, Share]:
    """Return E1, E2, U in the order of `definitions`."""
    return efficiency.e1, efficiency.e2, efficiency.u


def headline(report: RunReport) -> str:
    """Return one sentence: how much of the summed compute the run used, and what an even split would use."""
    vendors = {stage.vendor for stage in report.stages} or {use.vendor for use in report.ranks}
    num_devices = sum(len(stage.ranks) for stage in report.stages) or len(report.ranks)
    who = f"{count(num_devices, 'device')} of {count(len(vendors), 'vendor')}"
    run, even = report.efficiency, report.even_split
    share, against = run.e1, "of what the vendors reach alone, added up"
    other = even.efficiency.e1.value if even else None
    if share.value is None or len(vendors) == 1:
        share, against = run.u, "of their summed speeds"
        other = even.efficiency.u.value if even else None
    label = "" if share.kind is Source.MEASURED else f" ({share.kind.value})"
    if share.value is None:
        modelled = "" if report.kind == Source.MEASURED.value else f" ({report.kind})"
        return f"{who} trained {report.recipe} at {format_rate(report.tokens_per_s, 'tokens')}{modelled}."
    sentence = f"{who} reached {format_percent(share.value)} {against}{label}"
    beside = "" if other is None else f"; an even split would reach {format_percent(other)}"
    return f"{sentence}{beside}."


def paced(pacing: Pacing) -> str:
    """Such as "Paced at 2 real seconds per modelled one: steps were off by +0.3 %, a rank was 4.10 ms late at most"."""
    change = format_change(pacing.error)
    late = format_seconds(pacing.late_s)
    return f"Paced at {pacing.pace:g} real seconds per modelled one: steps were off by {change}, a rank was {late} late at most"


def compared(report: RunReport) -> str:
    """Such as "Parameters that several ranks hold were compared 4 times: all equal"."""
    result = count(report.num_drifts, "difference") if report.num_drifts else "all equal"
    times = count(report.num_comparisons, "time")
    return f"Parameters that several ranks hold were compared {times}: {result}"


def ending(report: RunReport) -> str:
    """Return one sentence on how the run ended."""
    steps = f"{report.steps} of {count(report.planned_steps, 'step')}"
    if report.first_step:
        steps += f", from the checkpoint of step {report.first_step} on"
    if report.status == DONE:
        return f"The run is done: {steps}."
    return f"This run is not complete: {report.status} after {steps}."


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def _ranges(names: Sequence[object]) -> list[str]:
    runs: list[tuple[object, object]] = []
    for name in names:
        if runs and isinstance(name, int) and runs[-1][1] == name - 1:
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
