"""Commands about a run that one of its hosts controls: hetrun there answers them. How they get there is left to `launch/move.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from hetrun.cli import render
from hetrun.launch.move import moved, pass_on
from hetrun.launch.rundir import Lines, clean_line
from hetrun.transport.script import Listeners


def ask_there(run_dir: Path, args: Sequence[str]) -> None:
    """Leave with the answer of the host that controls the run, whose text is not trusted; nothing where it is this one.

    `args` are the command and its options, without the run.

    Raises:
        Exit: with the exit code there.
    """
    where = moved(run_dir)
    if where is None:
        return
    out, err = _Printer(render.print_text), _Printer(render.say)
    code = pass_on(run_dir, where, args, Listeners(out.take, err.take))
    out.flush()
    err.flush()
    raise typer.Exit(code)


class _Printer:
    """Prints whole lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lines = Lines()

    def take(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            self._show(clean_line(line))

    def flush(self) -> None:
        for line in self._lines.flush():
            self._show(clean_line(line))
