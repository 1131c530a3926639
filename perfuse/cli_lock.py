"""`perfuse lock`: write, check and show files of pinned choices."""

import importlib
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from perfuse import config
from perfuse.cli_function import ARGUMENTS, fail, found_call

app = typer.Typer(help="Measured choices, pinned in a file.", no_args_is_help=True)
console = Console()

PATH = typer.Argument(help="The lock file; by default the setting lock_file, else perfuse.lock.")


@app.command()
def write(
    path: Annotated[str, PATH] = "",
    function: Annotated[
        str, typer.Option(help="Pin the choices of this function: model.py:function.")
    ] = "",
    arguments: Annotated[str, ARGUMENTS] = "example_args",
    max_autotune: Annotated[bool, typer.Option(help="Tune the function as max_autotune does.")] = (
        False
    ),
    replace: Annotated[bool, typer.Option(help="Drop existing entries.")] = False,
) -> None:
    """Pin what this machine remembers, or the choices of one function; keep other entries."""
    where = _path(path)
    explained = [_explained(function, arguments, max_autotune)] if function else []
    lock = _lock().write_lock(where, *explained, keeps_others=not replace)
    console.print(f"written: {where}, {len(lock.entries)} choices", soft_wrap=True)


@app.command()
def check(
    path: Annotated[str, PATH] = "",
    target: Annotated[
        str | None, typer.Option(help="Check for this target (cuda:90), not this machine.")
    ] = None,
) -> None:
    """Report which entries fit this machine; fail if one has other versions, or none fits."""
    where = _path(path)
    verdicts = _lock().check_lock(where, target)
    _print(verdicts)
    num_fitting = sum(verdict.fits for verdict in verdicts)
    console.print(f"{where}: {num_fitting} of {len(verdicts)} choices fit", soft_wrap=True)
    is_outdated = any(not v.fits and not v.is_elsewhere for v in verdicts)
    if is_outdated or (verdicts and num_fitting == 0):
        raise typer.Exit(1)


@app.command()
def show(path: Annotated[str, PATH] = "") -> None:
    """List the pinned choices, and what each was chosen among."""
    for verdict in _lock().check_lock(_path(path)):
        entry = verdict.entry
        versions = ", ".join(f"{name} {number}" for name, number in entry.versions)
        among = f"among {len(entry.candidates)}: {'; '.join(entry.candidates)}"
        rows = (entry.problem, f"    {entry.chosen}", f"    {among}")
        for row in (*rows, f"    on {entry.device}", f"    with {versions}"):
            console.print(row, highlight=False, markup=False, soft_wrap=True)


def _print(verdicts: list[Any]) -> None:
    table = Table("what", "choice", "fits", box=None, pad_edge=False)
    for verdict in verdicts:
        fits = "yes" if verdict.fits else f"NO: {verdict.problem}"
        table.add_row(verdict.entry.problem, str(verdict.entry.chosen), fits)
    if verdicts:
        console.print(table)


def _path(given: str) -> str:
    return given or config.snapshot().lock_file or "perfuse.lock"


def _lock() -> Any:
    return importlib.import_module("perfuse.autotune.lock")


def _explained(function: str, arguments: str, max_autotune: bool) -> Any:
    report = importlib.import_module("perfuse.report.explain")
    fn, given = found_call(function, arguments)
    # The choices of the file that is being written must not stand in for measured ones.
    with config.patch({"lock_file": "", **({"max_autotune": True} if max_autotune else {})}):
        explained = report.explain(fn, *given)
    if not any(graph.decisions for graph in explained.graphs):
        fail(f"{function} has nothing to choose: no matmul or kernel of it was measured")
    return explained
