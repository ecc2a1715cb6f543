"""The command line. What a command does is left to the module of its name."""
