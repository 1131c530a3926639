"""An explanation as text (rich) and as an HTML page (jinja2)."""

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

from perfuse.report.screen import short_line

WIDTH = 110  # tables are for readers who want more than fits a screen

Rows = Iterable[tuple[str, ...]]

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
<table><tr><th>kernel<th>bytes<th>flops<th>fused<th>module<th>source
{% for k in g.kernels %}
<tr><td>{{ k.name }}<td class=n>{{ "{:,}".format(k.num_bytes) }}
<td class=n>{{ "{:,}".format(k.num_flops) }}<td>{{ k.members | join(", ") }}
<td>{{ k.modules | join(", ") }}<td>{{ k.origins | join(", ") }}
{% endfor %}</table>
{% if g.calls %}<h3>Library calls and fallbacks</h3><table><tr><th>operator<th>reason<th>source
{% for f in g.calls %}<tr><td>{{ f.op }}<td>{{ f.reason }}<td>{{ f.origin }}
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
    """The explanation as one self-contained page."""
    return Environment(autoescape=True).from_string(PAGE).render(e=explanation)


def stage_text(explanation: Any, stage: str, number: int | None) -> str:
    """One stage as text, for each graph under a heading, or for one graph only."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    if stage == "memory":
        for training in explanation.training:
            _print_training(console, training)
    elif stage == "counters":
        _print_rows(console, "counters", ("name", "count"), explanation.counters.items())
    else:
        graphs = explanation.graphs if number is None else [explanation.graphs[number]]
        for graph in graphs:
            if number is None:
                console.print(f"# {graph.name}", markup=False)
            _print_stage(console, graph, stage)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def _print_stage(console: Console, graph: Any, stage: str) -> None:
    if stage in TABLES:
        columns, rows = TABLES[stage]
        _print_rows(console, "", columns, rows(graph))
        return
    texts = {"sources": graph.sources[:-1], "host": graph.sources[-1:]}
    text = "\n".join(texts[stage]) if stage in texts else getattr(graph, stage)
    console.file.write(text.rstrip("\n") + "\n")


def _kernel_rows(graph: Any) -> Rows:
    for k in graph.kernels:
        lists = (k.members, k.modules, map(short_line, k.origins))
        yield (k.name, f"{k.num_bytes:,}", f"{k.num_flops:,}", *map(", ".join, lists))


def _call_rows(graph: Any) -> Rows:
    return ((c.op, c.kind, c.reason, c.module, short_line(c.origin)) for c in graph.calls)


def _decision_rows(graph: Any) -> Rows:
    for d in graph.decisions:
        for r in d.rivals:
            yield (d.subject, "chosen" if r.choice == d.chosen else "", r.choice, r.measured())


def _time_rows(graph: Any) -> Rows:
    return ((name, f"{1e3 * seconds:.1f} ms") for name, seconds in graph.seconds.items())


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Any], Rows]]] = {
    "kernels": (("kernel", "bytes", "flops", "fused", "modules", "source"), _kernel_rows),
    "calls": (("operator", "kind", "reason", "module", "source"), _call_rows),
    "decisions": (("what", "", "implementation", "measured"), _decision_rows),
    "refusals": (("what and why",), lambda graph: zip(graph.refusals, strict=True)),
    "times": (("stage", "time"), _time_rows),
}


def _print_training(console: Console, report: Any) -> None:
    console.print("memory of a training step", markup=False)
    console.print(report.headline(), markup=False, soft_wrap=True)
    console.print(f"over time: {report.sparkline()}", markup=False, soft_wrap=True)
    heads = ("value", "made by", "bytes", "flops", "source")
    for title, rows in (("saved", report.saved), ("recomputed", report.recomputed)):
        cells = [
            (r.name, r.what, f"{r.num_bytes:,}", f"{r.num_flops:,}", short_line(r.origin))
            for r in rows
        ]
        _print_rows(console, title, heads, cells)


def _print_rows(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    kept = list(rows)
    if not kept:
        return
    table = Table(title=title or None, title_justify="left", box=None, header_style="")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in kept:
        table.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    console.print(table)
