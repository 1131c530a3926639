"""`python -m perfuse`: the `perfuse` command, where scripts are not on the path."""

from perfuse.cli import main

main()
