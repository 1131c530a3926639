"""The summary: one screen of 80 columns and 40 lines, for the author of a model."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfuse.precision.conversion import Conversion
from perfuse.report.rows import CallRow, GraphReport, KernelRow
from perfuse.sizes import spell_bytes

WIDTH, HEIGHT = 80, 40
MAX_KERNELS, MIN_KERNELS = 6, 3  # two lines each
MAX_FALLBACKS, MAX_GRAPHS, MAX_REASONS, MAX_SAVED = 4, 4, 2, 2
MAX_LEFT_ALONE = 3

STAGE_NAMES = {
    "passes": "graph passes",
    "lower": "lowering",
    "fuse": "fusion",
    "tune": "tuning",
    "place": "placing memory",
    "codegen": "code generation",
    "host": "code generation",
    "load": "loading",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen, clipped to its width."""

    text: str
    is_title: bool = False


def title(text: str) -> Line:
    return Line(clip(text, WIDTH), is_title=True)


def body(text: str) -> Line:
    return Line(clip(text, WIDTH).rstrip())


def screen(explanation: Any) -> list[Line]:
    """The whole screen; kernels get the lines that the other sections leave free."""
    graphs: Sequence[GraphReport] = explanation.graphs
    head = [*_headline(graphs), *_graph_lines(graphs), *_dynamo_lines(explanation)]
    head += _layer_lines(explanation.layers)
    sections = [
        _library_lines(graphs),
        _fallback_lines(graphs),
        _decision_lines(graphs),
        _training_lines(explanation.training),
        _compile_lines(explanation),
    ]
    tail = [line for section in sections if section for line in (Line(""), *section)]
    room = HEIGHT - len(head) - len(tail) - 2  # a blank line and a title
    return [*head, *_kernel_lines(graphs, max(room // 2, MIN_KERNELS)), *tail]


def _headline(graphs: Sequence[GraphReport]) -> list[Line]:
    if not graphs:
        return [title("Nothing was compiled: the function has no tensor operations")]
    lines = [title(f"{sum(g.num_ops for g in graphs):,} ops -> {_counted(graphs)}")]
    lines.append(body(f"  for {graphs[0].target}"))
    settings = dict.fromkeys(s for graph in graphs for s in graph.settings)
    if settings:
        lines.append(body(f"  with {', '.join(settings)}"))
    sizes = {name: size for graph in graphs for name, size in graph.sizes.items()}
    if sizes:
        likely = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        lines.append(body(f"  dynamic sizes; figures below are for {likely}"))
    return lines


def _layer_lines(layers: Conversion | None) -> list[Line]:
    """How many layers run in FP8, and why the others do not."""
    if layers is None:
        return []
    lines = [body(f"  {layers.headline()}")]
    shown = sorted(layers.reasons.items(), key=lambda row: -row[1])[:MAX_LEFT_ALONE]
    return [*lines, *(body(f"    {count} left alone: {reason}") for reason, count in shown)]


def _counted(graphs: Sequence[GraphReport]) -> str:
    counts = {
        "kernel": sum(len(g.kernels) for g in graphs),
        "library call": sum(len(g.library_calls) for g in graphs),
        "fallback": sum(len(g.fallbacks) for g in graphs),
    }
    return ", ".join(_number(n, noun) for noun, n in counts.items() if n or noun == "kernel")


def _graph_lines(graphs: Sequence[GraphReport]) -> list[Line]:
    """A line for each graph where there are several."""
    if len(graphs) < 2:
        return []
    shown = [f"  {g.name + ':':20} {g.num_ops:>5,} ops -> {_counted([g])}" for g in graphs]
    rest = len(shown) - MAX_GRAPHS
    more = [f"  ... and {_number(rest, 'graph')} more"] if rest > 0 else []
    return [body(text) for text in (*shown[:MAX_GRAPHS], *more)]


def _dynamo_lines(explanation: Any) -> list[Line]:
    """Graph breaks, recompiles, and graphs that run eagerly."""
    events = explanation.events
    lines = _reasons("graph break", events.graph_breaks)
    lines += _reasons("recompile", events.recompiles)
    num_eager = explanation.counters.get("graph.eager", 0)
    if num_eager:
        lines.append(body(f"  {_number(num_eager, 'graph')} failed to compile and run eagerly"))
    for name, count in explanation.counters.items():
        kind, _, reason = name.removeprefix("cudagraph.").partition(".")
        if name.startswith("cudagraph.") and kind in ("refused", "plain"):
            lines.append(body(f"  no CUDA graph for {count}: {reason.replace('_', ' ')}"))
    return lines


def _reasons(what: str, reasons: Sequence[str]) -> list[Line]:
    counted = Counter(reasons).most_common()
    lines = [body(f"  {_number(count, what)}: {reason}") for reason, count in counted[:MAX_REASONS]]
    if len(counted) > MAX_REASONS:
        rest = sum(count for _, count in counted[MAX_REASONS:])
        lines.append(body(f"  ... and {_number(rest, what)} more"))
    return lines


def _kernel_lines(graphs: Sequence[GraphReport], room: int) -> list[Line]:
    groups = alike([kernel for graph in graphs for kernel in graph.kernels])
    if not groups:
        return []
    shown = groups[: min(room, MAX_KERNELS)]
    total = sum(row.seconds for group in groups for row in group)
    head = "Most expensive kernels (fused ops)"
    lines = [Line(""), title(f"{head:<40}{'est. time':>10}{'share':>7}{'bytes':>11}{'flops':>11}")]
    for group in shown:
        first, seconds = group[0], sum(row.seconds for row in group)
        share = f"{100 * seconds / total:.0f} %" if total else ""
        count = f"{len(group)}x " if len(group) > 1 else ""
        moved = spell_bytes(sum(row.num_bytes for row in group))
        computed = spell_flops(sum(row.num_flops for row in group))
        what = clip(f"  {count}{', '.join(first.ops) or first.name}", 39)
        figures = f"{spell_seconds(seconds):>10}{share:>7}{moved:>11}{computed:>11}"
        lines += [
            body(f"{what:<40}{figures}"),
            body(f"      {where(first.modules, first.origins)}"),
        ]
    return lines


def alike(kernels: Sequence[KernelRow]) -> list[list[KernelRow]]:
    """Group kernels by what they compute, so that equal layers share a row; sort by time."""
    groups: dict[Any, list[KernelRow]] = defaultdict(list)
    for row in kernels:
        kinds = tuple(member.partition(": ")[2] for member in row.members)
        groups[row.num_bytes, row.num_flops, row.ops, kinds].append(row)
    return sorted(groups.values(), key=lambda group: -sum(row.seconds for row in group))


def where(modules: Sequence[str], origins: Sequence[str]) -> str:
    """The user's module and line, and the number of further ones."""
    parts = []
    for names, spell in ((modules, str), (origins, short_line)):
        if names:
            more = f" +{len(names) - 1}" if len(names) > 1 else ""
            parts.append(f"{spell(names[0])}{more}")
    return "  ".join(parts) or "no source line known"


def _library_lines(graphs: Sequence[GraphReport]) -> list[Line]:
    calls = [call for graph in graphs for call in graph.library_calls]
    if not calls:
        return []
    lines = [title("Library calls (the vendor's kernels are faster than generated ones)")]
    for kind, count in Counter(call.kind for call in calls).most_common():
        flops = sum(graph.library_flops.get(kind, 0) for graph in graphs)
        names = dict.fromkeys(_op(call) for call in calls if call.kind == kind)
        spent = f"{spell_flops(flops)} flops" if flops else ""
        lines.append(body(f"  {count:>4}x {kind:<12}{spent:<16}{', '.join(names)}"))
    return lines


def _fallback_lines(graphs: Sequence[GraphReport]) -> list[Line]:
    calls = [call for graph in graphs for call in graph.fallbacks]
    if not calls:
        return []
    counted = Counter((call.op, call.reason) for call in calls).most_common()
    lines = [title("Fallbacks (ordinary PyTorch ops inside the program)")]
    for (op, reason), count in counted[:MAX_FALLBACKS]:
        call = next(call for call in calls if (call.op, call.reason) == (op, reason))
        place = f"  {call.module or short_line(call.origin)}"
        text = f"  {count:>4}x {_op(call)}: {reason}"
        lines.append(body(f"{clip(text, WIDTH - min(len(place), 30))}{clip(place, 30)}"))
    if len(counted) > MAX_FALLBACKS:
        rest = len(calls) - sum(count for _, count in counted[:MAX_FALLBACKS])
        lines.append(body(f'  ... and {rest} more: .stage("calls")'))
    return lines


def _decision_lines(graphs: Sequence[GraphReport]) -> list[Line]:
    decisions = [decision for graph in graphs for decision in graph.decisions]
    if not decisions:
        return []
    num_changed = sum(d.chosen != d.rivals[0].choice for d in decisions if d.rivals)
    found = f"{_number(len(decisions), 'choice')}, {num_changed} other than the default"
    return [title(f'Measured: {found}; .stage("decisions")')]


def _op(call: CallRow) -> str:
    return call.op.removesuffix(".default").removesuffix(".out")


def _training_lines(reports: Sequence[Any]) -> list[Line]:
    lines: list[Line] = []
    for report in reports[:MAX_REASONS]:
        lines += _training(report, is_only=len(reports) == 1)
    if len(reports) > MAX_REASONS:
        rest = len(reports) - MAX_REASONS
        lines.append(body(f'  ... and {_number(rest, "graph")} more: .stage("memory")'))
    return lines


def _training(report: Any, is_only: bool) -> list[Line]:
    kept = [row for row in report.saved if row.num_bytes]
    saved = f"{_number(len(kept), 'value')} saved ({spell_bytes(report.timeline.saved_bytes)})"
    again = f"{len(report.recomputed)} recomputed ({spell_flops(report.recomputed_flops)} flops)"
    lines = [title(f"Backward: {saved}, {again}"), body(f"  {report.peak_text()}")]
    if not is_only:
        return lines
    lines += [_value_line("saved", spell_bytes(row.num_bytes), row) for row in kept[:MAX_SAVED]]
    for row in report.recomputed[:1]:
        lines.append(_value_line("recomputed", f"{spell_flops(row.num_flops)} flops", row))
    return [*lines, body(f"  {report.sparkline()}")]


def _value_line(label: str, amount: str, row: Any) -> Line:
    what = row.what.removeprefix("aten.").replace(".default", "").replace(".Tensor", "")
    text = clip(f"  {label:<11}{amount:>12}  {what}", WIDTH - 32)
    return body(f"{text:<{WIDTH - 30}}{clip(row.module or short_line(row.origin), 30)}")


def _compile_lines(explanation: Any) -> list[Line]:
    spent: Counter[str] = Counter()
    for graph in explanation.graphs:
        compiler = "C++ compiler" if graph.target.startswith("cpu") else "Triton"
        for stage, seconds in graph.seconds.items():
            spent[STAGE_NAMES.get(stage, compiler)] += seconds
    spent["PyTorch's capture"] = max(explanation.seconds - sum(spent.values()), 0.0)
    slowest = [f"{name} {seconds:.1f} s" for name, seconds in spent.most_common(4)]
    return [
        title(f"First call: {explanation.seconds:.2f} s"),
        body(f"  {', '.join(slowest)}"),
        body('  more: .stage("plan"), also "graph", "program", "sources", "host"'),
    ]


def clip(text: str, width: int) -> str:
    """The text on one line, truncated to a width."""
    flat = " ".join(text.splitlines())
    return flat if len(flat) <= width else f"{flat[: width - 2]}.."


def short_line(origin: str) -> str:
    """The last two parts of a path, enough to find a line."""
    return "/".join(origin.split("/")[-2:])


def spell_seconds(seconds: float) -> str:
    """Format a time: 1.2 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return "< 1 ns"


def spell_flops(count: float) -> str:
    """Format a number of operations: 12.9 G."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} P"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
