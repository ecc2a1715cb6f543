"""Run the command line as a user does, on a short version of the demo's recipe. What it must answer is in the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 50.0


def argv(*args: str | Path) -> list[str]:
    """Command line of `hetrun` under the interpreter of the tests."""
    return [sys.executable, "-m", "hetrun", *map(str, args)]


def hetrun(*args: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        argv(*args),
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )


def done(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one command that must succeed."""
    result = hetrun(*args, cwd=cwd)
    assert result.returncode == 0, f"{args}: {result.stderr[-3000:]}"
    return result


def short_recipe(folder: Path, *, steps: int = 12, more: str = "") -> Path:
    """Write the demo's recipe with fewer steps; `more` is added at the end."""
    lines = (ROOT / "recipes" / "tiny-llama.yaml").read_text().splitlines()
    short = [f"  steps: {steps}" if line.startswith("  steps:") else line for line in lines]
    assert short != lines
    path = folder / "tiny-llama.yaml"
    path.write_text("\n".join([*short, more, ""]))
    return path


def plan_chain(folder: Path, inventory: Path, *, steps: int = 12, more: str = "") -> Path:
    """Go from an inventory to a plan, by the default file names; `more` is added to the recipe, whose last section is launch."""
    recipe = short_recipe(folder, steps=steps, more=more)
    done("probe", inventory, cwd=folder)
    done("profile", recipe, cwd=folder)
    done("plan", recipe, cwd=folder)
    return folder / "plan.json"
