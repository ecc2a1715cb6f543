"""`hetrun doctor`: preflight without a run. What it looks at is left to `hetrun/preflight/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetrun import inventory
from hetrun import preflight as checking
from hetrun.cli import render
from hetrun.cli.options import Json
from hetrun.model import HostSpec
from hetrun.transport.bundle import build_bundle
from hetrun.vendors import all_vendors

EPILOG = "Example: hetrun doctor inventories/lab-example.yaml --skip clock"
Skip = Annotated[
    list[str],
    typer.Option("--skip", metavar="ID", help="Pass over errors of this check; repeatable."),
]
AllowPublic = Annotated[
    bool, typer.Option("--allow-public", help="Train over public addresses: --skip public.")
]
AllowSkew = Annotated[
    bool, typer.Option("--allow-skew", help="Go on with clocks over 10 s apart: --skip clock.")
]


def skips(skip: list[str], *, allow_public: bool, allow_skew: bool) -> tuple[str, ...]:
    """Return all checks that the command line asks to pass over."""
    named = [("public", allow_public), ("clock", allow_skew)]
    return checking.check_skips([*skip, *(name for name, wanted in named if wanted)])


def doctor(
    path: Annotated[Path, typer.Argument(metavar="INVENTORY", help="The hosts, a YAML file.")],
    skip: Skip = [],  # noqa: B006 - typer reads it
    allow_public: AllowPublic = False,
    allow_skew: AllowSkew = False,
    json: Json = False,
) -> None:
    """Check whether hosts could run a job together, as launch does first; starts and changes nothing.

    Exit code: 0 all could, 3 something is wrong, 4 a host cannot be reached.
    """
    passed = skips(skip, allow_public=allow_public, allow_skew=allow_skew)
    loaded = inventory.load_inventory(path)
    with render.host_progress("doctor", len(loaded.hosts)) as progress:
        found = checking.preflight(
            [_wants(spec) for spec in loaded.hosts],
            bundle=build_bundle(),
            skip=passed,
            progress=progress,
        )
    render.show_preflight(found, as_json=json)
    error = checking.refuse(found)
    raise typer.Exit(0 if error is None else int(error.exit_code))


def _wants(spec: HostSpec) -> checking.Wants:
    """Without a plan every vendor's plug-in that is installed has to import, and no device may be held."""
    vendors = [] if spec.emulate else list(all_vendors().values())
    return checking.Wants(
        spec=spec,
        plugins=tuple(sorted({v.torch_plugin for v in vendors if v.torch_plugin is not None})),
        nodes=tuple(sorted({node for v in vendors for node in v.device_nodes})),
    )
