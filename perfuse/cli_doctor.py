"""`perfuse doctor`: the state of this machine, as tables or as JSON."""

import importlib
import json
from typing import Annotated

import typer
from rich.console import Console

console = Console()


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Report what is installed, what is missing and how to fix it; fail if no CPU code can run."""
    report = importlib.import_module("perfuse.diagnosis.examine").doctor()
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        console.print(report)
    if not report.is_usable:
        raise typer.Exit(1)
