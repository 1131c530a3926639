"""An explanation as text (rich) and as an HTML page (jinja2)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

WIDTH = 110
MAX_ROWS = 40

PAGE = """<!doctype html>
<meta charset="utf-8"><title>Perfuse: what was compiled</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem; text-align: left; }
tr:nth-child(even) { background: #f3f3f3; } td.n { text-align: right; }
pre { background: #f7f7f7; padding: .7rem; overflow: auto; max-height: 30rem; font-size: 12px; }
</style>
<h1>{{ e.num_kernels }} kernels in {{ e.graphs | length }} graphs</h1>
{% for t in e.training %}
<h2>Memory of a training step</h2><p>{{ t.headline() }}<pre>{{ t.sparkline() }}</pre>
{% for title, rows in [("Saved", t.saved), ("Recomputed", t.recomputed)] %}
<h3>{{ title }}</h3><table><tr><th>value<th>made by<th>bytes<th>flops<th>source
{% for r in rows %}<tr><td>{{ r.name }}<td>{{ r.what }}
<td class=n>{{ "{:,}".format(r.num_bytes) }}<td class=n>{{ "{:,}".format(r.num_flops) }}
<td>{{ r.origin }}{% endfor %}</table>{% endfor %}{% endfor %}
{% for g in e.graphs %}
<h2>{{ g.name }}</h2>
<table><tr><th>kernel<th>bytes<th>flops<th>fused<th>source
{% for k in g.kernels %}
<tr><td>{{ k.name }}<td class=n>{{ "{:,}".format(k.num_bytes) }}
<td class=n>{{ "{:,}".format(k.num_flops) }}<td>{{ k.members | join(", ") }}
<td>{{ k.origins | join(", ") }}
{% endfor %}</table>
{% if g.fallbacks %}<h3>Calls of ATen</h3><table><tr><th>operator<th>reason<th>source
{% for f in g.fallbacks %}<tr><td>{{ f.op }}<td>{{ f.reason }}<td>{{ f.origin }}
{% endfor %}</table>{% endif %}
{% if g.refusals %}<h3>Fusions refused</h3><ul>
{% for r in g.refusals %}<li>{{ r }}{% endfor %}</ul>{% endif %}
{% for title, text in [("Graph", g.graph), ("Program", g.program), ("Plan", g.plan)] %}
<details><summary>{{ title }}</summary><pre>{{ text }}</pre></details>{% endfor %}
{% for text in g.sources %}
<details><summary>Source {{ loop.index }}</summary><pre>{{ text }}</pre></details>{% endfor %}
{% endfor %}
"""


def html_page(explanation: Any) -> str:
    """The explanation as one page that needs nothing else."""
    return Environment(autoescape=True).from_string(PAGE).render(e=explanation)


def rendered(explanation: Any) -> str:
    """The explanation as text for a terminal or a file."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    kernels, graphs = explanation.num_kernels, len(explanation.graphs)
    console.print(
        f"{kernels} kernels in {graphs} graphs, {explanation.seconds:.2f} s", markup=False
    )
    for training in explanation.training:
        _print_training(console, training)
    for graph in explanation.graphs:
        _print_graph(console, graph)
    _print_rows(console, "counters", ("name", "count"), explanation.counters.items())
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def _print_training(console: Console, report: Any) -> None:
    console.rule("memory of a training step")
    console.print(report.headline(), markup=False, soft_wrap=True)
    console.print(f"over time: {report.sparkline()}", markup=False, soft_wrap=True)
    heads = ("value", "made by", "bytes", "flops", "source")
    for title, rows in (("saved", report.saved), ("recomputed", report.recomputed)):
        cells = [
            (r.name, r.what, f"{r.num_bytes:,}", f"{r.num_flops:,}", _short(r.origin)) for r in rows
        ]
        _print_rows(console, title, heads, cells)


def _print_graph(console: Console, graph: Any) -> None:
    console.rule(graph.name)
    _print_text(console, "graph", graph.graph)
    _print_text(console, "program", graph.program)
    kernels = [
        (
            k.name,
            f"{k.num_bytes:,}",
            f"{k.num_flops:,}",
            ", ".join(k.members),
            ", ".join(map(_short, k.origins)),
        )
        for k in graph.kernels
    ]
    _print_rows(console, "kernels", ("kernel", "bytes", "flops", "fused", "source"), kernels)
    calls = [(f.op, f.reason, _short(f.origin)) for f in graph.fallbacks]
    _print_rows(console, "calls of ATen", ("operator", "reason", "source"), calls)
    _print_rows(console, "fusions refused", ("what and why",), [(r,) for r in graph.refusals])
    stages = [(name, f"{1e3 * seconds:.1f} ms") for name, seconds in graph.seconds.items()]
    _print_rows(console, "time per stage", ("stage", "time"), stages)


def _print_text(console: Console, title: str, text: str) -> None:
    lines = text.splitlines()
    console.print(f"{title}:", markup=False)
    for line in lines[:MAX_ROWS]:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if len(lines) > MAX_ROWS:
        console.print(f"  ... and {len(lines) - MAX_ROWS} more lines", markup=False)


def _print_rows(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    kept = list(rows)
    if not kept:
        return
    table = Table(title=title, title_justify="left", box=None, header_style="")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in kept[:MAX_ROWS]:
        table.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    console.print(table)
    if len(kept) > MAX_ROWS:
        console.print(f"... and {len(kept) - MAX_ROWS} more", markup=False)


def _short(origin: str) -> str:
    """The last two parts of a path are enough to find a line."""
    return "/".join(origin.split("/")[-2:])
