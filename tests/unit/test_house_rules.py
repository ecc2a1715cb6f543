"""What no linter knows: see the shared house style."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from hetrun.cli.app import app
from hetrun.inventory import load_inventory
from hetrun.recipe import load_recipe
from hetrun.vendors import all_vendors

UNIT = Path(__file__).parent
ROOT = UNIT.parents[1]
PYTHON = sorted(path for folder in ("hetrun", "tests") for path in (ROOT / folder).rglob("*.py"))
MAX_LINES = 400
# Names of vendors that are plain words, so that their presence in a text says nothing.
PLAIN_WORDS = {"cpu", "pci", "rdma"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_long() -> None:
    long = {name_of(path): n for path in PYTHON if (n := path.read_text().count("\n")) > MAX_LINES}
    assert not long


def test_vendors_are_named_in_their_own_files_only() -> None:
    words = sorted(set(all_vendors()) - PLAIN_WORDS)
    assert "nvidia" in words
    named = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in PYTHON
        if path.is_relative_to(ROOT / "hetrun") and "vendors" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line)
    ]
    assert not found


@pytest.mark.parametrize("path", sorted((ROOT / "inventories").iterdir()), ids=name_of)
def test_shipped_inventories_load(path: Path) -> None:
    assert load_inventory(path).hosts


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=name_of)
def test_shipped_recipes_load(path: Path) -> None:
    assert load_recipe(path).train.steps > 0


def test_flags_are_those_of_the_snapshot() -> None:
    """A new flag needs a reason (most knobs belong in a file): say it where flags.txt changes."""
    assert _flags(typer.main.get_command(app)) == (UNIT / "flags.txt").read_text().splitlines()


def _flags(command: Any, name: str = "hetrun") -> list[str]:
    lines = [
        " ".join([name, *parameter.opts])
        for parameter in command.params
        if parameter.param_type_name == "option"
    ]
    for child, below in getattr(command, "commands", {}).items():
        lines += _flags(below, f"{name} {child}")
    return lines
