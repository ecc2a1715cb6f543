"""The commands: parse, call one function, render. How things look is left to `render.py`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import typer

import hetrun
from hetrun import inventory, store
from hetrun import launch as launcher
from hetrun import probe as prober
from hetrun import report as reporter
from hetrun.cli import doctor as doctor_command
from hetrun.cli import plan as plan_command
from hetrun.cli import render, streams
from hetrun.cli import runs as run_commands
from hetrun.cli.elsewhere import ask_there
from hetrun.cli.options import FactsFile, Json, ProfileFile
from hetrun.cli.profile import profile as profile_command
from hetrun.cli.trust import hosts_app
from hetrun.errors import ExitCode, HetrunError, StoppedError
from hetrun.model import Facts, Plan

app = typer.Typer(
    name="hetrun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one PyTorch job over AI chips of different vendors: probe, profile, plan, launch, report.",
    epilog="Files are passed on by default names, so the whole chain is: hetrun probe lab.yaml && "
    "hetrun profile recipe.yaml && hetrun plan recipe.yaml && hetrun launch && hetrun report",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        render.print_text(f"hetrun {hetrun.__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also say what is going on.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - typer calls _show_version with it
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Set up what all commands share."""
    render.set_up_logging(logging.INFO if verbose else logging.WARNING)


@app.command(epilog="Example: hetrun probe inventories/lab-example.yaml -o facts.json")
def probe(
    path: Annotated[Path, typer.Argument(metavar="INVENTORY", help="The hosts, a YAML file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to save.")] = Path("facts.json"),
    diff: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option("--diff", metavar="OLD", help="Also say what changed since these facts."),
    ] = None,
    json: Json = False,
) -> None:
    """Ask each host which devices, interpreter and network it has; nothing is installed there.

    Exit code: 0 all hosts answered, 10 some did, 4 none did.
    """
    loaded = inventory.load_inventory(path)
    old = store.load(Facts, diff) if diff else None
    with render.host_progress("probe", len(loaded.hosts)) as progress:
        facts = prober.probe(loaded, progress=progress)
    store.save(facts, out)
    render.show_facts(facts, out, as_json=json)
    render.show_changes(old, facts, diff)
    raise typer.Exit(int(prober.answered(facts).exit_code))


app.command(
    epilog="Example: hetrun profile recipes/tiny-llama.yaml --facts facts.json -o profile.json"
)(profile_command)


app.command("plan", epilog=plan_command.EPILOG)(plan_command.plan)


app.add_typer(hosts_app, name="hosts")


app.command("doctor", epilog=doctor_command.EPILOG)(doctor_command.doctor)


@app.command(epilog="Example: hetrun launch plan.json --dry-run")
def launch(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="What plan chose.")] = Path(
        "plan.json"
    ),
    run_root: Annotated[Path, typer.Option("--run-root", help="Where run directories go.")] = Path(
        "runs"
    ),
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show each host's files and exact command; start nothing."),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it has begun: hetrun attach follows it.")
    ] = False,
    on: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option(
            "--on",
            metavar="HOST",
            help="Detach to this host of the plan, which has hetrun: this machine may be switched off then.",
        ),
    ] = None,
    facts: FactsFile = Path("facts.json"),
    profile: ProfileFile = Path("profile.json"),
    skip: doctor_command.Skip = [],  # noqa: B006 - typer reads it
    allow_public: doctor_command.AllowPublic = False,
    allow_skew: doctor_command.AllowSkew = False,
    json: Json = False,
) -> None:
    """Check all hosts, start torchrun on each, follow it, and stop everything on the first failure.

    --facts and --profile are read only where the recipe has launch.on_lost_host: replan.
    Prints the run directory. Ctrl-C stops the run in an orderly way; twice stops it at once.
    """
    passed = doctor_command.skips(skip, allow_public=allow_public, allow_skew=allow_skew)
    chosen = store.load(Plan, path)
    options = launcher.Options(skip=passed, replan=plan_command.replanner(chosen, facts, profile))
    if dry_run:
        render.show_dry_run(launcher.dry_run(chosen), as_json=json)
        return
    if detach or on is not None:
        start = run_commands.Start(path, facts, profile, run_root, passed)
        raise typer.Exit(run_commands.detached(start, on))
    with render.live_view(chosen) as observer:
        outcome = launcher.launch(
            chosen, run_root=run_root, observer=observer, environ=os.environ, options=options
        )
    render.show_outcome(outcome, run_root / outcome.run_id, as_json=json)
    raise typer.Exit(outcome.exit_code)


app.command(epilog="Example: hetrun ps --json")(run_commands.ps)
app.command(epilog="Example: hetrun logs -f --rank 0")(run_commands.logs)
app.command(epilog="Example: hetrun attach 20300101-120000-tiny-llama")(run_commands.attach)
app.command(epilog="Example: hetrun stop 20300101-120000-tiny-llama")(run_commands.stop)
app.command(epilog="Example: hetrun clean 20300101-120000-tiny-llama")(run_commands.clean)


@app.command(epilog="Example: hetrun report runs/20300101-120000-tiny-llama")
def report(
    run: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Argument(
            metavar="[RUN]", help="A run directory; the newest one below runs/ when left out."
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Without host names, addresses, users and paths: report-share.html."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Say how much of the summed compute was used, and where the time went; writes report.json and report.html."""
    run_dir = run or launcher.find_run(Path("runs"), None)
    ask_there(run_dir, ["report", *(["--share"] if share else []), *(["--json"] if json else [])])
    result = reporter.build_report(run_dir, share=share)
    base = run_dir / ("report-share" if share else "report")
    store.save(result, base.with_suffix(".json"))
    store.save_text(reporter.to_html(result), base.with_suffix(".html"))
    render.show_report(result, base.with_suffix(".html"), as_json=json)


def main() -> NoReturn:
    """Run the command line; every error becomes two lines on stderr and an exit code."""
    streams.fill_standard_descriptors()
    try:
        app()
    except HetrunError as error:
        render.show_error(error)
        sys.exit(int(error.exit_code))
    except SystemExit as leave:
        # typer turns both into exit codes by itself, and says nothing.
        causes = streams.causes(leave)
        if any(isinstance(cause, BrokenPipeError) for cause in causes):
            streams.leave_quietly()
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            render.show_error(StoppedError("interrupted; nothing was written"))
        raise
    except Exception as error:
        if os.environ.get("HETRUN_DEBUG"):
            raise
        render.show_internal_error(error)
        sys.exit(int(ExitCode.INTERNAL))
    raise AssertionError("typer always exits")
