"""The console script. It imports the command line itself, so that Ctrl-C meanwhile is a message too; the rest is in `app.py`."""

from __future__ import annotations

import sys
from typing import NoReturn

_INTERRUPTED = 130  # `ExitCode`, whose module is not imported yet


def main() -> NoReturn:
    """Run the command line."""
    try:
        from hetrun.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; nothing was written\n")
        sys.exit(_INTERRUPTED)
    run()
