"""The only place that writes to the terminal: data on stdout, talk on stderr. What tables hold is left to `tables.py`.

Colour and live lines appear on terminals only, and never where NO_COLOR asks for none.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from rich.console import Console, RenderableType
from rich.text import Text

from hetrun import store
from hetrun.cli.answers import comparison_view, explanation_view
from hetrun.cli.hosts import changes_view, facts_view
from hetrun.cli.preflight import preflight_view
from hetrun.cli.progress import HostProgress, LaunchView
from hetrun.cli.results import plan_view, report_view
from hetrun.cli.streams import Talk, write_data
from hetrun.cli.tables import cell, profile_view
from hetrun.errors import HetrunError, StorageError
from hetrun.model import (
    Facts,
    Failure,
    LeftOver,
    LeftOvers,
    Noun,
    Plan,
    PreflightReport,
    Profile,
    RunList,
    RunOutcome,
    RunReport,
    RunState,
)
from hetrun.probe import compare
from hetrun.report.words import (
    DONE,
    count,
    format_bytes,
    format_percent,
    format_quantity,
    format_seconds,
    printable,
    some,
)

if TYPE_CHECKING:
    from hetrun.launch.files import HostCommand
    from hetrun.planner.explain import Explanation
    from hetrun.planner.export import Export
    from hetrun.planner.whatif import Comparison

__all__ = [
    "ask_line",
    "format_bytes",
    "format_percent",
    "format_quantity",
    "format_seconds",
    "host_progress",
    "live_view",
    "print_json",
    "print_text",
    "say",
    "set_up_logging",
    "show_changes",
    "show_dry_run",
    "show_error",
    "show_facts",
    "show_internal_error",
    "show_outcome",
    "show_plan",
    "show_preflight",
    "show_profile",
    "show_report",
]

T = TypeVar("T", bound=Noun)

PLAIN_WIDTH = 120  # of tables in a file or a pipe
_MOST_FAILURES = 20
_MOST_LINES = 20
_MOST_CHARS = 1 << 20


@functools.cache
def talk() -> Console:
    """Return the console on stderr; one for all, so that tables, warnings and live lines do not mix."""
    stderr = Talk()
    plain = not stderr.isatty() and "COLUMNS" not in os.environ
    width = PLAIN_WIDTH if plain else None
    return Console(
        file=cast("TextIO", stderr), markup=False, highlight=False, emoji=False, width=width
    )


def print_text(text: str) -> None:
    """Write one line of data to stdout."""
    _write(text + "\n")


def print_json(noun: Noun) -> None:
    """Write an object to stdout as the JSON that was saved."""
    _write(store.dumps(noun))


def say(text: str) -> None:
    """Write one line of talk to stderr."""
    _say(cell(text))


def ask_line(question: str) -> str:
    """Ask a person on the terminal and return what was typed; only where both ends are terminals."""
    talk().print(cell(question), end="")
    return sys.stdin.readline().strip()


def show_error(error: HetrunError) -> None:
    """Say what went wrong and what to do next, on stderr."""
    _say(Text.assemble(("error: ", "bold red"), printable(str(error))))
    if error.hint:
        _say(Text.assemble(("hint: ", "bold"), printable(error.hint)))


def show_internal_error(error: BaseException) -> None:
    """Say that hetrun itself failed, and how to show us where."""
    what = f"{type(error).__name__}: {error}"
    _say(Text.assemble(("error: ", "bold red"), f"this is a bug in hetrun: {printable(what)}"))
    _say(
        Text.assemble(
            ("hint: ", "bold"), "run it again with HETRUN_DEBUG=1 and report the traceback"
        )
    )


def show_facts(facts: Facts, path: Path, *, as_json: bool) -> None:
    """Show what probe found."""
    _show(facts, facts_view, path, as_json=as_json)


def show_changes(old: Facts | None, new: Facts, path: Path | None) -> None:
    """Show what changed since the facts that stood in a file, on stderr; nothing where none was named."""
    if old is not None:
        talk().print(changes_view(compare(old, new), f"{path} of {old.created}"))


def show_profile(profile: Profile, path: Path, *, as_json: bool) -> None:
    """Show what profile measured."""
    _show(profile, profile_view, path, as_json=as_json)


def show_plan(plan: Plan, path: Path, *, as_json: bool) -> None:
    """Show what plan chose."""
    _show(plan, plan_view, path, as_json=as_json)


def show_comparison(comparison: Comparison, *, as_json: bool) -> None:
    """Show a plan beside one for changed hosts or links."""
    if as_json:
        print_json(comparison)
    else:
        talk().print(comparison_view(comparison))


def show_explanation(explanation: Explanation, *, as_json: bool) -> None:
    """Show where the numbers of a plan come from."""
    if as_json:
        print_json(explanation)
    else:
        talk().print(explanation_view(explanation))


def show_export(export: Export, *, to_stdout: bool, as_json: bool) -> None:
    """Write a plan in the words of another trainer to stdout, and on stderr what those leave out."""
    if as_json:
        print_text(json.dumps(asdict(export), indent=1, ensure_ascii=False))
    elif to_stdout:
        _write(export.text)
    for line in export.lost:
        _say(cell(f"not in it: {line}", "yellow"))


def show_preflight(report: PreflightReport, *, as_json: bool) -> None:
    """Show what preflight found: tables on stderr, or the object on stdout."""
    if as_json:
        print_json(report)
    else:
        talk().print(preflight_view(report))


def show_report(report: RunReport, page: Path, *, as_json: bool) -> None:
    """Show what the run was worth, and where the page is."""
    _show(report, report_view, page, as_json=as_json)


def show_outcome(outcome: RunOutcome, run_dir: Path, *, as_json: bool) -> None:
    """Say how the run ended: root cause first, what followed below; the run folder goes to stdout."""
    took = f"after {format_seconds(outcome.wall_s)}"
    style = "bold green" if outcome.status == DONE else "bold red"
    _say(cell(f"{outcome.status} {took}: {run_dir}", style))
    if outcome.failures:
        root, *others = outcome.failures
        _say(cell(_failure("first failure: ", root), "red"))
        for line in root.last_lines[-_MOST_LINES:]:
            _say(cell(f"  | {line}"))
        for failure in others[:_MOST_FAILURES]:
            _say(cell(_failure("then: ", failure)))
        if len(others) > _MOST_FAILURES:
            _say(Text(f"and {count(len(others) - _MOST_FAILURES, 'more failure')}, in launch.json"))
    for restart in outcome.restarts:
        cause = "" if restart.failure is None else _failure(": ", restart.failure)
        code = restart.exit_code
        _say(cell(f"restart {restart.number} from {restart.origin}, after exit code {code}{cause}"))
    for warning in outcome.warnings:
        _say(cell(f"warning: {warning}", "yellow"))
    for host in outcome.not_clean:
        _say(cell(f"not clean: could not confirm that nothing is left running on {host}", "red"))
    if outcome.failures:
        root = outcome.failures[0]
        rank = "" if root.rank is None else f" --rank {root.rank}"
        _say(cell(f"hint: hetrun logs {run_dir}{rank} shows all of {_log_of(root, run_dir)}"))
    if outcome.not_clean:
        _say(cell(f"hint: hetrun clean {run_dir} looks there again, and ends what is left"))
    _print_outcome(outcome, run_dir, as_json=as_json)


def _print_outcome(outcome: RunOutcome, run_dir: Path, *, as_json: bool) -> None:
    try:
        if as_json:
            print_json(outcome)
        else:
            print_text(printable(str(run_dir)))
    except (BrokenPipeError, StorageError):
        if as_json and outcome.exit_code == 0:
            raise
        # How the run ended counts for more than who still reads; the folder was named on stderr.


def _log_of(failure: Failure, run_dir: Path) -> Path:
    """Where the first failure left all that it said."""
    if failure.rank is None:
        return run_dir / "all.log"
    return run_dir / "logs" / f"rank-{failure.rank:04d}.log"


def show_dry_run(commands: Sequence[HostCommand], *, as_json: bool) -> None:
    """Show each host's files and exact command, on stdout; nothing was started."""
    if as_json:
        rows = [asdict(command) for command in commands]
        print_text(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    print_text("\n\n".join(printable(str(command), max_chars=_MOST_CHARS) for command in commands))


def show_runs(runs: Sequence[RunState], *, as_json: bool) -> None:
    """Show how runs stand."""
    if as_json:
        print_json(RunList(runs=tuple(runs)))
        return
    width = max((len(run.run_id) for run in runs), default=0)
    for run in runs:
        done = 0 if run.step is None else run.step + 1
        pid = "" if run.pid is None else f", process {run.pid}"
        steps = f"step {done}/{run.num_steps}"
        print_text(
            printable(f"{run.run_id:{width}}  {run.status}{pid}, {steps}, on {some(run.hosts)}")
        )
    if not runs:
        say("no runs")


def show_left_overs(found: Sequence[LeftOver], *, as_json: bool) -> None:
    """Show what a cleaning ended; progress has told people already."""
    if as_json:
        print_json(LeftOvers(hosts=tuple(found)))


@contextmanager
def host_progress(name: str, num_hosts: int, *, what: str = "hosts") -> Iterator[HostProgress]:
    """Show how many hosts are through while the block runs."""
    progress = HostProgress(talk(), name, num_hosts, what=what)
    with progress:
        yield progress


@contextmanager
def live_view(plan: Plan) -> Iterator[LaunchView]:
    """Show how far a run has got while the block runs; what it yields is launch's observer."""
    view = LaunchView(talk(), plan, clock=time.monotonic)
    with view:
        yield view


def set_up_logging(level: int) -> None:
    """Write our own log records as lines on stderr; libraries stay silent, what they raise is reported."""
    log = logging.getLogger("hetrun")
    for handler in [handler for handler in log.handlers if isinstance(handler, _TalkHandler)]:
        log.removeHandler(handler)
    log.addHandler(_TalkHandler())
    log.setLevel(level)


class _TalkHandler(logging.Handler):
    """Log records through the one console, so that they do not tear a live line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a broken stderr is no reason to stop."""
        try:
            style = "yellow" if record.levelno >= logging.WARNING else "dim"
            _say(cell(f"{record.levelname.lower()}: {record.getMessage()}", style))
        except (OSError, ValueError):
            self.handleError(record)


def _show(noun: T, view: Callable[[T], RenderableType], path: Path, *, as_json: bool) -> None:
    """Tables on stderr, or the object on stdout."""
    if as_json:
        print_json(noun)
        return
    talk().print(view(noun))
    _say(cell(f"saved: {path}", "dim"))


def _failure(start: str, failure: Failure) -> str:
    rank = "" if failure.rank is None else f", rank {failure.rank}"
    return f"{start}{failure.host}{rank}: {failure.what}"


def _say(text: RenderableType) -> None:
    talk().print(text, soft_wrap=True)  # the terminal wraps; a copied line stays one line


def _write(text: str) -> None:
    write_data(text)
