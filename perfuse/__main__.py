"""`python -m perfuse`: the `perfuse` command, for environments whose scripts are not on the path."""

from perfuse.cli import main

main()
