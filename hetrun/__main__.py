"""`python -m hetrun` is the command line. Everything else is left to `hetrun.cli`."""

from hetrun.cli.app import main

main()
