"""`hetrun plan` and its questions: what if, why, and in whose words. Choosing is left to `planner/`, looks to `render.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Optional

import typer

from hetrun import planner, store
from hetrun import recipe as recipes
from hetrun.cli import render
from hetrun.cli.options import FactsFile, Json, ProfileFile, RecipeFile
from hetrun.cli.streams import no_stdout
from hetrun.errors import ConfigError
from hetrun.launch.remaining import Replan
from hetrun.model import Facts, LostHost, Plan, Profile, Recipe
from hetrun.planner.explain import explain as explain_plan
from hetrun.planner.export import TARGETS, known_target
from hetrun.planner.export.within import export_within
from hetrun.planner.whatif import change, compare
from hetrun.report.plan_page import to_page

EPILOG = (
    "Example: hetrun plan recipes/tiny-llama.yaml --facts facts.json --profile profile.json --html plan.html"
    ' -- or: hetrun plan recipes/tiny-llama.yaml --what-if "plus 4 of VENDOR" --what-if "10 Gb/s across"'
)
_PLAN = Path("plan.json")

Words = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10
    typer.Option("--export", metavar="TARGET", help=f"Write flags for {', '.join(TARGETS)}."),
]
WhatIf = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--what-if",
        metavar="CHANGE",
        help="Compare with a plan for changed hosts or links; may be given often. Saved with -o only.",
    ),
]
PinFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--pin", metavar="PINS", help="Keep to these pins, a YAML file; prints their price."
    ),
]
Why = Annotated[bool, typer.Option("--explain", help="Show the source of every number.")]
Page = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--html", help="Also write a page with stages and timeline."),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", "-o", help="Where to save (plan.json; for --export stdout)."),
]
MaxShapes = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-shapes", min=1, help="Most different replicas; the price is printed."),
]


def plan(
    recipe: RecipeFile,
    facts: FactsFile = Path("facts.json"),
    profile: ProfileFile = Path("profile.json"),
    out: Out = None,
    max_shapes: MaxShapes = None,
    pin: PinFile = None,
    what_if: WhatIf = None,
    export: Words = None,
    explain: Why = False,
    html: Page = None,
    json: Json = False,
) -> None:
    """Choose who holds which layers and takes which rows; say how far that is from the optimum."""
    _check_asked(what_if=bool(what_if), export=export, explain=explain)
    found, measured = store.load(Facts, facts), store.load(Profile, profile)
    wanted = _wanted(recipe, pin, max_shapes)
    chosen = _choose(found, measured, wanted)
    if what_if:
        chosen = _what_if(chosen, (found, measured), what_if, out, as_json=json)
    elif export is not None:
        chosen = _export(chosen, (found, measured), export, out, as_json=json)
    else:
        _save(chosen, out or _PLAN, measured if explain else None, as_json=json)
    if html is not None:
        store.save_text(to_page(chosen), html)


def _check_asked(*, what_if: bool, export: str | None, explain: bool) -> None:
    """Refuse two questions at once and a target that nobody knows, before any search."""
    asked = {"--what-if": what_if, "--export": export is not None, "--explain": explain}
    given = [flag for flag, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} at once", hint="ask for one of them at a time")
    if export is not None:
        known_target(export)


def _wanted(recipe: Path, pin: Path | None, max_shapes: int | None) -> Recipe:
    """Return the recipe within the limits of the command line."""
    wanted = planner.limited(recipes.load_recipe(recipe), max_shapes)
    if pin is None:
        return wanted
    return replace(wanted, plan=replace(wanted.plan, pins=recipes.load_pins(pin)))


def _choose(found: Facts, measured: Profile, wanted: Recipe) -> Plan:
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    targets = planner.torch_targets(found)
    with no_stdout():
        return planner.plan(found, measured, wanted, targets=targets, created=created)


def replanner(chosen: Plan, facts: Path, profile: Path) -> Replan | None:
    """Return what plans again without lost hosts, from the facts and the profile of a plan; None where its recipe wants none.

    Raises:
        ConfigError: one of them is missing, or is not what the plan was made from.
    """
    if chosen.recipe.launch.on_lost_host is not LostHost.REPLAN:
        return None
    found, measured = store.load(Facts, facts), store.load(Profile, profile)
    specs = {host.spec.name: host.spec for host in found.hosts}
    for spec in chosen.hosts:
        if specs.get(spec.name) != spec:
            raise _others(f"{facts}: host {spec.name} is not as the plan has it")
    if (measured.model, measured.seq_len) != (chosen.recipe.model, chosen.recipe.data.seq_len):
        raise _others(f"{profile}: measured for another model than that of the plan")

    def replan(gone: tuple[str, ...]) -> Plan:
        texts = [f"without host {host}" for host in gone]
        return _choose(*change(found, measured, texts), chosen.recipe)

    return replan


def _others(what: str) -> ConfigError:
    return ConfigError(
        what,
        hint="launch.on_lost_host: replan needs the facts and the profile that the plan was made from:"
        " name them with --facts and --profile, or plan again",
    )


def _save(chosen: Plan, out: Path, measured: Profile | None, *, as_json: bool) -> None:
    """Save and show a plan; with a profile, the source of its numbers instead of the plan."""
    store.save(chosen, out)
    if measured is None:
        render.show_plan(chosen, out, as_json=as_json)
    else:
        render.show_explanation(explain_plan(chosen, measured), as_json=as_json)


def _what_if(
    before: Plan,
    things: tuple[Facts, Profile],
    texts: Sequence[str],
    out: Path | None,
    *,
    as_json: bool,
) -> Plan:
    """Compare with a plan for changed things, and return that."""
    after = _choose(*change(*things, texts), before.recipe)
    render.show_comparison(compare(before, after, texts), as_json=as_json)
    if out is not None:
        store.save(after, out)
    return after


def _export(
    best: Plan, things: tuple[Facts, Profile], target: str, out: Path | None, *, as_json: bool
) -> Plan:
    """Write the plan, or the best one that the target can express; what is lost goes to stderr as well."""
    own = export_within(best, target, lambda recipe: _choose(*things, recipe))
    if out is not None:
        store.save_text(own.export.text, out)
    render.show_export(own.export, to_stdout=out is None, as_json=as_json)
    return own.plan
