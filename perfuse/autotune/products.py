"""Matrix products: which library call is fastest here, for these sizes and strides.

Two libraries come with PyTorch on the CPU and neither wins everywhere, so each distinct product is
raced once and the decision kept on disk. A challenger must agree with the default's result and
beat it by a margin, so that noise cannot flip a decision.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from perfuse.build.compiler import open_store
from perfuse.context import Context
from perfuse.ir.dtype import DType
from perfuse.ir.program import Extern, Program, View
from perfuse.torch_compat import disable_dispatch_modes, disabled_autocast

# Below this many multiplications the call itself costs more than any choice saves.
_SMALLEST = 1 << 22
# A challenger has to be this much faster than the default.
_MARGIN = 0.96
_BUDGET_S = 0.12
_LINEAR = "mkldnn._linear_pointwise.default"
_FILE = "decision.json"
Clock = Callable[[], float]
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """The problem: a @ b (+ bias) in float32, by sizes and strides."""

    rows: int
    columns: int
    depth: int
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen and what was measured, in milliseconds."""

    chosen: str
    milliseconds: dict[str, float]
    reason: str


def choose_products(program: Program, context: Context) -> Program:
    """The program with each large product replaced by the call that measured fastest."""
    if not context.settings.cpu.tune_products or not _has_linear():
        return program
    nodes, buffers = [], dict(program.buffers)
    for node in program.nodes:
        product = _product_of(node, program) if isinstance(node, Extern) else None
        if product is not None and decide(product, context).chosen == _LINEAR:
            assert isinstance(node, Extern) and node.outs[0] is not None
            name = node.outs[0]
            buffers[name] = replace(buffers[name], role="extern")
            node = _as_linear(node)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes), buffers=buffers)


def _has_linear() -> bool:
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _product_of(node: Extern, program: Program) -> Product | None:
    if node.op not in ("aten.mm.out", "aten.addmm.out") or node.kwargs:
        return None
    bias, (a, b) = (node.args[0], node.args[1:]) if len(node.args) == 3 else (None, node.args)
    views = [v for v in (bias, a, b) if v is not None]
    if any(program.buffers[v.buffer].dtype is not DType.F32 for v in views):
        return None
    dims = [d for v in views for d in (*v.shape, *v.strides)]
    if not all(isinstance(d, int) for d in dims) or (bias is not None and len(bias.shape) != 1):
        return None
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    if rows * depth * columns < _SMALLEST:
        return None
    return Product(rows, columns, depth, a.strides, b.strides, bias is not None)


def _as_linear(node: Extern) -> Extern:
    """The same product as a call that takes the second operand transposed."""
    bias, (a, b) = (node.args[0], node.args[1:]) if len(node.args) == 3 else (None, node.args)
    weight = View(b.buffer, b.shape[::-1], b.strides[::-1], b.offset)
    return replace(
        node,
        op=_LINEAR,
        args=(a, weight, bias, "none", [], ""),
        into_out=False,
        reason="measured fastest of the libraries here",
    )


def decide(product: Product, context: Context) -> Decision:
    """The stored decision for a product on this machine, or a new one."""
    store = open_store(context)
    key = _key(product, context)
    entry = store.get(key) if context.settings.cache.enabled else None
    if entry is not None:
        context.counters.inc("autotune.cache_hit")
        return Decision(**json.loads(entry.read_text(_FILE)))
    with disable_dispatch_modes(), disabled_autocast():
        decision = race(candidates(product))
    context.counters.inc("autotune.products_measured")
    text = json.dumps(asdict(decision), indent=1)
    store.put(key, {_FILE: text.encode()}, {"product": repr(product)})
    return decision


def _key(product: Product, context: Context) -> str:
    machine = (repr(context.target), torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(("product", machine, product)).encode()).hexdigest()


def race(runs: dict[str, Run], clock: Clock = time.perf_counter) -> Decision:
    """Run the candidates in turns and take the fastest that is right."""
    reference = runs["library"]()
    scale = float(reference.abs().max()) or 1.0
    linear = runs[_LINEAR]()
    if not float((linear - reference).abs().max()) <= 1e-4 * scale:  # NaN is no agreement
        return Decision("library", {}, "the challenger's result differs")
    best = dict.fromkeys(runs, float("inf"))
    start, rounds = clock(), 0
    while rounds < 3 or (rounds < 12 and clock() - start < _BUDGET_S):
        for name, run in runs.items():
            begin = clock()
            run()
            best[name] = min(best[name], clock() - begin)
        rounds += 1
    wins = best[_LINEAR] < _MARGIN * best["library"]
    times = {name: round(1e3 * seconds, 4) for name, seconds in best.items()}
    reason = f"best of {rounds} rounds; a challenger must win by {1 - _MARGIN:.0%}"
    return Decision(_LINEAR if wins else "library", times, reason)


def candidates(product: Product) -> dict[str, Run]:
    """Every way to compute a product, on operands of its sizes and strides."""
    # A generator of its own: measuring must not move the user's random numbers.
    generator = torch.Generator().manual_seed(0)
    a = _random((product.rows, product.depth), product.a_strides, generator)
    b = _random((product.depth, product.columns), product.b_strides, generator)
    bias = torch.randn(product.columns, generator=generator) if product.has_bias else None
    out = torch.empty(product.rows, product.columns)
    linear: Any = torch.ops.mkldnn._linear_pointwise

    def library() -> torch.Tensor:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

    return {"library": library, _LINEAR: lambda: linear(a, b.t(), bias, "none", [], "")}


def _random(
    shape: tuple[int, int], strides: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.randn(span, generator=generator).as_strided(shape, strides)
