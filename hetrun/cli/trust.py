"""`hetrun hosts trust`: fingerprints of unknown hosts, and a person's word for each. Pinning is left to `transport/trust.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetrun import inventory
from hetrun.cli import render
from hetrun.errors import ExitCode, HetrunError, HostKeyError

if TYPE_CHECKING:
    from hetrun.transport.trust import OfferedKey

hosts_app = typer.Typer(no_args_is_help=True, help="Keys of the hosts.")
EPILOG = "Example: hetrun hosts trust inventories/lab-example.yaml"


@hosts_app.callback()
def hosts() -> None:
    """Keys of the hosts."""


@hosts_app.command("trust", epilog=EPILOG)
def trust_hosts(
    path: Annotated[Path, typer.Argument(metavar="INVENTORY", help="The hosts, a YAML file.")],
    fingerprint: Annotated[
        list[str],
        typer.Option(
            "--fingerprint",
            metavar="SHA256:...",
            help="Accept keys with this fingerprint without asking; repeatable.",
        ),
    ] = [],  # noqa: B006 - typer reads it
) -> None:
    """Show the key of every host and jump host that is not known yet, and pin those that you vouch for.

    Compare each with `ssh-keygen -lf` on the host itself. A key that changed is refused here too.
    Exit code: 0 all are known now, 4 some are not.
    """
    from hetrun.transport.trust import Trust, trust  # only here: importing Fabric costs 0.3 s

    loaded = inventory.load_inventory(path)
    ask = _Asker(fingerprint, is_person=_is_person())
    errors: list[HetrunError] = []
    for spec in loaded.hosts:
        try:
            became = trust(spec, ask.accept)
        except HetrunError as error:
            errors.append(error)
            continue
        if became is Trust.REFUSED:
            errors.append(HostKeyError("key not accepted", host=spec.name, hint=ask.hint))
        render.say(f"{spec.name}: {became.value}")
    for each in errors:
        render.show_error(each)
    raise typer.Exit(int(ExitCode.UNREACHABLE if errors else ExitCode.DONE))


def _is_person() -> bool:
    """Say whether somebody can be asked: both ends are terminals, and this is no CI."""
    return sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get("CI")


class _Asker:
    """Decides on keys: by fingerprints that were given, else by a name that is typed."""

    def __init__(self, fingerprints: Sequence[str], *, is_person: bool) -> None:
        self._given = {word.removeprefix("SHA256:").rstrip("=") for word in fingerprints}
        self._is_person = is_person
        self._answered: dict[tuple[str, str], bool] = {}

    @property
    def hint(self) -> str:
        """What to do about keys that were not accepted."""
        if self._is_person:
            return "compare the fingerprint on the host itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
        return (
            "nobody can be asked here: give it as --fingerprint SHA256:..., read on the host itself"
        )

    def accept(self, offered: OfferedKey) -> bool:
        """Say whether this key may be pinned; a jump host of many hosts is asked for once."""
        key = (offered.known_as, offered.fingerprint)
        if key not in self._answered:
            self._answered[key] = self._decide(offered)
        return self._answered[key]

    def _decide(self, offered: OfferedKey) -> bool:
        render.say(f"{offered.hop} ({offered.known_as}) shows {offered.fingerprint}")
        if offered.fingerprint.rpartition("SHA256:")[2] in self._given:
            return True
        if not self._is_person:
            return False
        wanted = offered.hop.removeprefix("jump host ")
        return (
            render.ask_line(f"type {wanted} to trust this key, anything else to leave: ") == wanted
        )
