"""`perfuse rank`: matmul templates, compiled and ranked for a GPU you do not have."""

import importlib
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from perfuse.cli_function import ARGUMENTS, fail, found_call

console = Console()


def rank(
    function: Annotated[
        str, typer.Argument(help="Rank for the matmuls of this function: model.py:function.")
    ] = "",
    matmul: Annotated[
        list[str] | None,
        typer.Option(help="Rank for this matmul, rows x columns x depth: 4096x4096x1024:bf16:NT."),
    ] = None,
    target: Annotated[
        str, typer.Option(help="GPU to rank for: cuda:90, hip:gfx942, ...")
    ] = "cuda:90",
    arguments: Annotated[str, ARGUMENTS] = "example_args",
    best: Annotated[int, typer.Option(min=1, help="The number of candidates to show.")] = 5,
    lock: Annotated[
        str, typer.Option(help="Pin the first of each ranking in this lock file.")
    ] = "",
) -> None:
    """Compile matmul templates for a GPU, and rank them by a model: nothing is measured."""
    ranks = importlib.import_module("perfuse.capture.rank")
    calls = [found_call(function, arguments)] if function else []
    calls += [(torch.matmul, ranks.matmul_inputs(text)) for text in matmul or ()]
    if not calls:
        fail("name a function, or a matmul: perfuse rank --matmul 4096x4096x1024:bf16:NT")
    rankings = [row for fn, given in calls for row in ranks.rank_for(fn, given, target=target)]
    if not rankings:
        fail(f"no matmul here has templates for {target}")
    for ranking in rankings:
        console.print(_table(ranking, best))
    if lock:
        decisions = [made for ranking in rankings if (made := ranking.decision(best)) is not None]
        pinned = importlib.import_module("perfuse.autotune.lock").pin_decisions(lock, decisions)
        console.print(f"written: {lock}, {len(pinned.entries)} choices", soft_wrap=True)


def _table(ranking: Any, best: int) -> Table:
    columns = ("predicted us", "registers", "spilled bytes", "shared bytes", "template")
    table = Table(*columns, title=ranking.subject, title_justify="left", box=None, pad_edge=False)
    for row in ranking.candidates[:best]:
        needs = (f"{row.predicted_us:,}", str(row.num_registers), str(row.spilled_bytes))
        shown = f"{row.choice} ({row.failure})" if row.failure else str(row.choice)
        table.add_row(*needs, f"{row.shared_bytes:,}", shown)
    return table
