"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the saved object on stdout as JSON.")]
FactsFile = Annotated[Path, typer.Option("--facts", help="What probe found.")]
ProfileFile = Annotated[Path, typer.Option("--profile", help="What profile measured.")]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="What to train, a YAML file.")]
