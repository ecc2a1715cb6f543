"""`python -m hetrun` is the command line. Everything else is left to `hetrun.cli`."""

from hetrun.cli.entry import main

main()
