"""The command `profile`: parse, call one function, render."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hetrun import profile as profiler
from hetrun import recipe as recipes
from hetrun import store
from hetrun.cli import render
from hetrun.cli.options import FactsFile, Json, RecipeFile
from hetrun.errors import ConfigError
from hetrun.model import Facts, Profile, Recipe


def profile(
    recipe: RecipeFile,
    facts: FactsFile = Path("facts.json"),
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to save.")] = Path("profile.json"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute's answer: fewer repeats, sizes and pairs.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure devices that were measured before, too.")
    ] = False,
    from_spec: Annotated[
        bool,
        typer.Option("--from-spec", help="Run nothing: published peaks, labelled assumed."),
    ] = False,
    json: Json = False,
) -> None:
    """Measure each device model on the recipe's layers, and each link between hosts.

    What the inventory declares of a link is not measured. Emulated chips yield their declared figures.
    """
    if from_spec and (quick or no_cache):
        raise ConfigError("--from-spec measures nothing, so --quick and --no-cache mean nothing")
    found, wanted = store.load(Facts, facts), recipes.load_recipe(recipe)
    if from_spec:
        result = profiler.profile_from_spec(found, wanted)
    else:
        result = _measure(found, wanted, quick=quick, no_cache=no_cache)
    store.save(result, out)
    render.show_profile(result, out, as_json=json)


def _measure(facts: Facts, recipe: Recipe, *, quick: bool, no_cache: bool) -> Profile:
    cache = None if no_cache else profiler.cache_folder(os.environ)
    num_steps = profiler.num_steps(facts, quick=quick)
    with render.host_progress("profile", num_steps, what="hosts and links") as progress:
        return profiler.profile(facts, recipe, quick=quick, cache=cache, progress=progress)
