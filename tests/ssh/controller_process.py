"""A launch in a process of its own, for tests that kill, stop or interrupt it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from hetrun import store
from hetrun.model import Plan, RunOutcome
from tests.ssh.lab import die_with_parent
from tests.ssh.launches import GONE_S, run_dir

REPOSITORY = Path(__file__).parents[2]


class Controller:
    """A launch in a process of its own."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        store.save(plan, folder / "plan.json")
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ssh.controller", "plan.json", "runs"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=die_with_parent,
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"the controller ended without {text!r}")

    def outcome(self) -> RunOutcome:
        return store.load(RunOutcome, run_dir(self.folder) / "launch.json")

    def end(self) -> None:
        """Kill it and forget it."""
        self.process.kill()
        self.process.wait(timeout=GONE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Start(Protocol):
    """What the fixture `start` does."""

    def __call__(self, plan: Plan, folder: Path = ...) -> Controller: ...
