"""`hetrun ps, logs, attach, stop, clean`: runs after they were launched. What they do is left to `launch/runs.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer

from hetrun.cli import render
from hetrun.cli.elsewhere import ask_there
from hetrun.cli.options import Json
from hetrun.errors import ExitCode, LostContactError
from hetrun.launch import runs
from hetrun.launch.detach import detach
from hetrun.launch.files import read_secrets
from hetrun.launch.move import Parcel, note_moved, start_there
from hetrun.model import Facts, LostHost, Plan, Profile, RunOutcome
from hetrun.store import load

Run = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10
    typer.Argument(metavar="[RUN]", help="Its id or directory; the newest one when left out."),
]
Named = Annotated[str, typer.Argument(metavar="RUN", help="Its id or directory.")]
Root = Annotated[Path, typer.Option("--run-root", help="Where run directories are.")]
RUNS = Path("runs")


def ps(root: Root = RUNS, json: Json = False) -> None:
    """List the runs of a folder: which go on, how far they are, how the others ended."""
    render.show_runs(runs.states(root), as_json=json)


def logs(
    run: Run = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends.")
    ] = False,
    rank: Annotated[
        Optional[int],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option("--rank", help="Only what this rank wrote."),
    ] = None,
    root: Root = RUNS,
) -> None:
    """Print what the ranks of a run wrote, host and rank in front of each line."""
    folder = runs.find_run(root, run)
    of_rank = [] if rank is None else ["--rank", str(rank)]
    ask_there(folder, ["logs", *of_rank, *_given(follow=follow)])
    for line in runs.lines(folder, rank, follow=follow):
        render.print_text(line)


def attach(run: Run = None, root: Root = RUNS, json: Json = False) -> None:
    """Follow a run that goes on until it ends, as launch does, with its exit code; Ctrl-C leaves it running."""
    folder = runs.find_run(root, run)
    ask_there(folder, ["attach", *_given(json=json)])
    for line in runs.lines(folder, None, follow=True):
        render.say(line)
    outcome = folder / "launch.json"
    if not outcome.is_file():
        raise LostContactError(
            f"{folder.name}: its controller is gone", hint=f"hetrun clean {folder.name}"
        )
    ended = load(RunOutcome, outcome)
    render.show_outcome(ended, folder, as_json=json)
    raise typer.Exit(ended.exit_code)


def stop(
    run: Named,
    force: Annotated[bool, typer.Option("--force", help="At once, without a checkpoint.")] = False,
    root: Root = RUNS,
    json: Json = False,
) -> None:
    """Stop a run in order: ranks finish their step and save it, then all ends on every host."""
    folder = runs.find_run(root, run)
    ask_there(folder, ["stop", *_given(force=force, json=json)])
    now = runs.stop(folder, force=force)
    render.show_runs((now,), as_json=json)
    if now.status == runs.GONE:
        raise typer.Exit(int(ExitCode.NOT_CLEAN))
    clean = not load(RunOutcome, folder / "launch.json").not_clean
    raise typer.Exit(int(ExitCode.DONE if clean else ExitCode.NOT_CLEAN))


def clean(run: Named, root: Root = RUNS, json: Json = False) -> None:
    """End on all hosts what a dead controller left of a run; other runs and their processes are not touched.

    Exit code: 0 nothing is left, 8 something does not end, 4 a host cannot be reached.
    """
    folder = runs.find_run(root, run)
    ask_there(folder, ["clean", *_given(json=json)])
    with render.host_progress("clean", len(runs.hosts(folder))) as progress:
        found = runs.clean(folder, done=progress)
    render.show_left_overs(found, as_json=json)
    raise typer.Exit(int(runs.clean_code(found)))


def _given(**flags: bool) -> list[str]:
    return [f"--{name}" for name, is_given in flags.items() if is_given]


@dataclass(frozen=True)
class Start:
    """What the command line says of a run that is to go on by itself."""

    plan: Path
    facts: Path
    profile: Path
    run_root: Path
    skip: tuple[str, ...]

    @property
    def skips(self) -> list[str]:
        """As `hetrun launch` takes them."""
        return [word for check in self.skip for word in ("--skip", check)]


def detached(start: Start, on: str | None) -> int:
    """Start launch on its own, here or on a host of the plan, and print the run directory once there is one."""
    if on is not None:
        return _moved(start, on)
    sources = ["--facts", str(start.facts), "--profile", str(start.profile)]
    places = ["--run-root", str(start.run_root)]
    found = detach(["launch", str(start.plan), *sources, *places, *start.skips], start.run_root)
    if isinstance(found, tuple):
        render.say(found[0])
        return found[1]
    render.say(
        f"runs on its own: hetrun attach {found.name} follows it, hetrun stop {found.name} ends it"
    )
    render.print_text(str(found))
    return 0


def _moved(start: Start, host: str) -> int:
    chosen = load(Plan, start.plan)
    parcel = Parcel(plan=chosen)
    if chosen.recipe.launch.on_lost_host is LostHost.REPLAN:
        facts, profile = load(Facts, start.facts), load(Profile, start.profile)
        parcel = Parcel(plan=chosen, facts=facts, profile=profile)
    hidden = read_secrets(chosen, os.environ)
    folder, said, code = start_there(parcel, host, hidden=hidden, args=start.skips)
    for line in said.splitlines():
        render.say(f"{host}: {line}")
    if code == 0:
        render.print_text(str(note_moved(start.run_root, chosen, host, folder)))
    return code
