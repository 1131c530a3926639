"""The `perfuse` command."""

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfuse import config
from perfuse.cache.access import open_store
from perfuse.cli_artefact import app as artefact_app
from perfuse.cli_doctor import doctor
from perfuse.cli_function import ARGUMENTS, FUNCTION, fail, found_call, mistake, writing
from perfuse.cli_lock import app as lock_app
from perfuse.cli_rank import rank
from perfuse.context import Context
from perfuse.errors import PerfuseError, UnknownOption
from perfuse.precision.recipe import PRECISIONS
from perfuse.report.stages import STAGES
from perfuse.version import VERSION

app = typer.Typer(no_args_is_help=True)
cache_app = typer.Typer(help="The cache of built code.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(artefact_app, name="artefact")
app.add_typer(lock_app, name="lock")
app.command()(rank)
console = Console()

BENCHMARKS = Path(__file__).parent.parent / "benchmarks" / "cpu.py"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def command(
    is_version_asked: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the versions."
        ),
    ] = False,
) -> None:
    """Perfuse: a tensor compiler for PyTorch."""


@app.command()
def version() -> None:
    """Print the versions of Perfuse, PyTorch and Python."""
    console.print(f"perfuse {VERSION}, torch {torch.__version__}, python {sys.version.split()[0]}")


_MOST_NAME_COLUMNS = 40  # for a setting and its value, so that descriptions have as many


@app.command("config")
def show_config(
    words: Annotated[
        list[str] | None, typer.Argument(help="Only settings whose name contains one of these.")
    ] = None,
) -> None:
    """List every setting with its value and description; * marks a value that was changed."""
    settings = config.snapshot()
    shown = [r for r in config.describe() if not words or any(word in r.name for word in words)]
    if not shown:
        fail(
            f"no name of a setting contains {' or '.join(words or ())}; `perfuse config` lists all"
        )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(max_width=_MOST_NAME_COLUMNS, overflow="fold")
    table.add_column(ratio=1)
    for row in shown:
        value = settings.get(row.name)
        mark = " " if value == row.default else "*"
        table.add_row(
            Text(f"{mark} {row.name} = {_shown(value)}", "bold" if mark == "*" else ""),
            Text(f"{row.sentence} ({row.type})"),
        )
    console.print(table, width=min(console.width, 110))
    console.print("Environment variables: PERFUSE_ and the name, as in PERFUSE_CPU_THREADS=4.")


def _shown(value: Any) -> str:
    """A value as it may be shown to others: without the password of an address."""
    return re.sub(r"://[^@/]*@", "://...@", repr(value))


@app.command()
def explain(
    function: Annotated[str, FUNCTION],
    arguments: Annotated[str, ARGUMENTS] = "example_args",
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also plot memory over time.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="The setting memory_budget: 14GiB, 300MB, 0.5.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help=f"Compile the model in this precision: {', '.join(PRECISIONS)}."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(help=f"Print one stage instead of the summary: {', '.join(STAGES)}."),
    ] = None,
    sources: Annotated[bool, typer.Option(help="Also print the generated sources.")] = False,
) -> None:
    """Compile a function and show the kernels, library calls and memory of the result."""
    if stage is not None and stage not in STAGES:
        raise UnknownOption(stage, STAGES, what="stage")
    report = importlib.import_module("perfuse.report.explain")
    fn, given = found_call(function, arguments)
    if precision is not None:
        fn = importlib.import_module("perfuse.api").compile(fn, precision=precision)
    overrides = {} if memory_budget is None else {"memory_budget": memory_budget}
    with config.patch(overrides):
        explanation = report.explain(fn, *given)
    if stage is not None:
        print(explanation.stage(stage), end="")
    else:
        console.print(explanation)
    if explanation.layers is not None:
        print(explanation.layers)
    if sources:
        print(*explanation.sources, sep="\n")
    for path, write in ((html, explanation.to_html), (png, explanation.to_png)):
        if path is not None:
            with writing(path):
                console.print(f"written: {write(path)}")


@app.command()
def codegen(
    function: Annotated[str, FUNCTION],
    target: Annotated[str, typer.Option(help="Target: cuda:80, cuda:90, hip:gfx942, cpu, ...")],
    arguments: Annotated[str, ARGUMENTS] = "example_args",
    out: Annotated[Path | None, typer.Option(help="Folder for sources and machine code.")] = None,
    plan: Annotated[bool, typer.Option(help="Also print the plan of each graph.")] = False,
) -> None:
    """Cross-compile a function, for example for a GPU you do not have."""
    cross_compile = importlib.import_module("perfuse.capture.cross_compile")
    fn, given = found_call(function, arguments)
    made = cross_compile.codegen_for(fn, given, target=target)
    console.print(str(made.target), markup=False)
    for graph in made.graphs:
        if plan:
            print(graph.plan)
        console.print(_code_table(graph.kind, graph.objects))
        for report in graph.candidates:
            print(report)
            for each in report.legal if out is None else ():
                print(f"\n{each.source}")
    if out is not None:
        with writing(out):
            console.print(f"written: {len(made.written_to(out))} files in {out}")


def _code_table(kind: str, objects: Sequence[Any]) -> Table:
    heads = ("kernel", "threads", "registers", "shared bytes", "stack bytes", "code bytes")
    table = Table(title=f"{kind}: {len(objects)} kernels", title_justify="left", box=None)
    for head in heads:
        table.add_column(head, justify="left" if head == "kernel" else "right")
    for o in objects:
        cells = (o.num_threads, o.num_registers, o.shared_bytes, o.stack_bytes, len(o.code))
        table.add_row(o.name, *(f"{cell:,}" for cell in cells))
    return table


@cache_app.command("info")
def cache_info() -> None:
    """Show where the cache is, and its size."""
    store = open_store(Context.default())
    usages = store.usages()
    num_bytes = sum(usage.num_bytes for usage in usages)
    limit = config.snapshot().cache.max_bytes
    where = store.root.path if store.root is not None else "no cache on disk"
    console.print(f"{where}: {len(usages)} entries, {num_bytes / 2**20:.1f} MiB")
    console.print(f"limit: {limit / 2**20:.0f} MiB (cache.max_bytes)")


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every entry. Compiled code is rebuilt when it is needed."""
    store = open_store(Context.default())
    where = store.root.path if store.root is not None else "memory"
    console.print(f"{store.clear()} entries removed from {where}")


app.command()(doctor)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Run the benchmarks of a repository checkout; options are passed on to them."""
    if not BENCHMARKS.exists():
        fail("benchmarks are part of the repository, not of the installed package")
    command = [sys.executable, str(BENCHMARKS), *context.args]
    raise typer.Exit(subprocess.run(command, cwd=BENCHMARKS.parent.parent, check=False).returncode)


def main() -> None:
    """The entry point of the command."""
    try:
        app()
    except Exception as error:
        own = getattr(error, "inner_exception", error)  # what Dynamo wraps
        is_ours = isinstance(own, PerfuseError)
        message = str(own) if is_ours else mistake(error)
        console.print(f"error: {message}", style="red", markup=False, soft_wrap=not is_ours)
        sys.exit(1)


if __name__ == "__main__":
    main()
