"""A controller in a process of its own, to be killed by tests: `python -m tests.ssh.controller PLAN RUN_ROOT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetrun import store
from hetrun.launch import Options, launch
from hetrun.model import Event, Plan
from tests.ssh.plans import FAKE


class Speaker:
    """Tells the test on stdout how far the run is."""

    def on_status(self, host: str, text: str) -> None:
        self._say(f"status {host} {text}")

    def on_event(self, event: Event) -> None:
        self._say(f"event {event.event} {event.rank}")

    def on_line(self, host: str, rank: int | None, line: str) -> None:
        pass

    def _say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    plan = store.load(Plan, Path(sys.argv[1]))
    outcome = launch(
        plan,
        run_root=Path(sys.argv[2]),
        observer=Speaker(),
        environ=os.environ,
        code=FAKE,
        options=Options(skip=("devices",)),  # fake ranks drive none, also where the plan says cuda
    )
    sys.exit(outcome.exit_code)
