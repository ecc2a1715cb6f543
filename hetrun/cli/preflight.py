"""What preflight found as rich renderables: one row per host, then what is wrong with its hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from hetrun.cli.tables import cell, new_table, stack
from hetrun.model import CheckedHost, Finding, PairTiming, PreflightReport, Severity
from hetrun.report.words import NOT_KNOWN, count, format_bytes, format_seconds, some

MOST_NAMES = 3
_STYLES = {
    Severity.ERROR: "red",
    Severity.WARNING: "yellow",
    Severity.SKIPPED: "yellow",
    Severity.NOTE: "dim",
}
_ORDER = (Severity.ERROR, Severity.SKIPPED, Severity.WARNING, Severity.NOTE)


def preflight_view(report: PreflightReport) -> RenderableType:
    """A row per host, findings below: worst first, the same words of several hosts only once."""
    table = new_table("Host", "State", "Torch", "Data address", ">Clock", ">Free", ">Slowest pair")
    for host in report.hosts:
        table.add_row(*_row(host, report))
    lines = [line for severity in _ORDER for line in _lines(report, severity)]
    return stack(table, *lines, _summary(report))


def _row(host: CheckedHost, report: PreflightReport) -> tuple[Text, ...]:
    mine = [finding for finding in report.findings if finding.host == host.name]
    worst = next((s for s in _ORDER if any(finding.severity is s for finding in mine)), None)
    words = {
        Severity.ERROR: "not fit",
        Severity.WARNING: "fit, with warnings",
        Severity.SKIPPED: "errors skipped",
    }
    is_fit = worst in (None, Severity.NOTE)
    state = "fit" if is_fit or worst is None else words[worst]
    style = "green" if is_fit or worst is None else _STYLES[worst]
    where = f"{host.addr} on {host.nic}" if host.addr else NOT_KNOWN
    off_s = host.clock_offset_s
    return (
        cell(host.name),
        cell(state, style),
        cell(host.torch or NOT_KNOWN),
        cell(where),
        cell(NOT_KNOWN if off_s is None else f"{off_s:+.1f} s"),
        cell(format_bytes(host.free_bytes)),
        cell(_slowest([pair for pair in report.pairs if pair.a == host.name])),
    )


def _slowest(pairs: Sequence[PairTiming]) -> str:
    if not pairs:
        return ""
    pair = min(pairs, key=lambda pair: pair.bytes_per_s)
    return f"{format_bytes(pair.bytes_per_s)}/s, {format_seconds(pair.latency_s)} to {pair.b}"


def _lines(report: PreflightReport, severity: Severity) -> Iterator[Text]:
    """Yield what is wrong, and after the last of a kind what to do."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for finding in report.findings:
        if finding.severity is severity:
            hosts.setdefault(_key(finding), []).append(finding.host)
    for (check, what, fix), names in hosts.items():
        word = f"{severity.value}: {check}: {some(names, MOST_NAMES)}: {what}"
        yield cell(word, _STYLES[severity])
        if fix:
            yield cell(f"  hint: {fix}")


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.check, finding.what, finding.fix


def _summary(report: PreflightReport) -> Text:
    unfit = {finding.host for finding in report.errors}
    fit = len(report.hosts) - len(unfit)
    words = f"{fit} of {count(len(report.hosts), 'host')} fit for a run"
    if report.pairs:
        size = format_bytes(report.echo_bytes)
        words += f"; {count(len(report.pairs), 'pair')} of hosts met with an echo of {size}"
    if report.skipped:
        words += f"; skipped: {', '.join(report.skipped)}"
    words += f"; {format_seconds(report.seconds)}"
    return Text(words, style="bold red" if unfit else "bold green")
