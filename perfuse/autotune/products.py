"""Matrix products: which library call is fastest here, for these sizes and strides.

Two libraries come with PyTorch on the CPU and neither wins everywhere, so each distinct product is
raced once and the decision kept on disk. A challenger must be about as exact as the default,
judged against float64, and beat it by a margin, so that noise cannot flip a decision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.cache.store import Store
from perfuse.context import Context
from perfuse.decision import library
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import LINEAR
from perfuse.ir.program import Matmul, Program
from perfuse.logs import channel
from perfuse.torch_compat import disable_dispatch_modes, disabled_autocast

# A challenger has to be this much faster than the default.
_MARGIN = 0.96
# And by this much, for what the race does not see: its result is new memory, not a place of ours.
_UNSEEN_S = 1e-5
_BUDGET_S = 0.12
# Of short products so many rounds that no disturbance decides: by twelve mobilebert lost 5 %.
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 60
# Its error may be this many times the default's: one library sums long rows in a single chain.
_MOST_ERROR = 2.0
_EXACT_ROWS = 64
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
    # Below this the call itself costs more than any choice saves.
    least = max(1, context.settings.thresholds.tuned_matmul_work)
    for node in program.nodes:
        product = _product_of(node, program, least) if isinstance(node, Matmul) else None
        if product is not None and decide(product, context).chosen == LINEAR:
            assert isinstance(node, Matmul)
            buffers[node.out] = replace(buffers[node.out], role="extern")
            reason = "measured fastest of the libraries here"
            node = replace(node, choice=library(LINEAR), reason=reason)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes), buffers=buffers)


def _has_linear() -> bool:
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _product_of(node: Matmul, program: Program, least_work: int) -> Product | None:
    a, b, bias = node.operands.a, node.operands.b, node.operands.bias
    if len(b.shape) != 2 or not node.into_out or node.window is not None or node.kwargs:
        return None
    views = [v for v in (bias, a, b) if v is not None]
    if any(program.buffers[v.buffer].dtype is not DType.F32 for v in views):
        return None
    dims = [d for v in views for d in (*v.shape, *v.strides)]
    if not all(isinstance(d, int) for d in dims) or (bias is not None and len(bias.shape) != 1):
        return None
    known: Any = (*a.shape, b.shape[1], a.strides, b.strides)
    rows, depth, columns, a_strides, b_strides = known
    if rows * depth * columns < least_work:
        return None
    return Product(rows, columns, depth, a_strides, b_strides, bias is not None)


def decide(product: Product, context: Context) -> Decision:
    """The stored decision for a product on this machine, or a new one."""
    store = open_store(context)
    key = _key(product, context)
    found = _stored(store, key) if context.settings.cache.enabled else None
    if found is not None:
        context.counters.inc("autotune.cache_hit")
        return found
    with disable_dispatch_modes(), disabled_autocast():
        decision = race(candidates(product), exact=exact_rows(product))
    context.counters.inc("autotune.products_measured")
    told = (product, decision.chosen, decision.milliseconds, decision.reason)
    channel("tuning").info("%s: %s; milliseconds %s; %s", *told)
    text = json.dumps(asdict(decision), indent=1)
    store.put(key, {_FILE: text.encode()}, {"product": repr(product)})
    return decision


def _stored(store: Store, key: str) -> Decision | None:
    entry = store.get(key)
    if entry is None:
        return None
    try:
        found = Decision(**entry.read_json(_FILE))
        if found.chosen in ("library", LINEAR):
            return found
    except (CacheDamaged, *MALFORMED):
        pass
    store.discard(key)
    return None


def _key(product: Product, context: Context) -> str:
    machine = (context.target, torch.get_num_threads(), torch.__version__)
    rules = (_MARGIN, _UNSEEN_S, _MOST_ROUNDS, _MOST_ERROR)
    return key_of(keys.PRODUCT, machine, rules, product)


def race(
    runs: dict[str, Run], clock: Clock = time.perf_counter, exact: torch.Tensor | None = None
) -> Decision:
    """Run the candidates in turns and take the fastest that is right.

    `exact`: the first rows of the result in float64; without, the default's result is the measure.
    """
    refusal = _refusal(runs["library"](), runs[LINEAR](), exact)
    if refusal is not None:
        return Decision("library", {}, refusal)
    best = dict.fromkeys(runs, float("inf"))
    start, rounds = clock(), 0
    while rounds < _FEWEST_ROUNDS or (rounds < _MOST_ROUNDS and clock() - start < _BUDGET_S):
        for name, run in runs.items():
            begin = clock()
            run()
            best[name] = min(best[name], clock() - begin)
        rounds += 1
    wins = best[LINEAR] + _UNSEEN_S < _MARGIN * best["library"]
    times = {name: round(1e3 * seconds, 4) for name, seconds in best.items()}
    reason = f"best of {rounds} rounds; a challenger must win by {1 - _MARGIN:.0%}"
    return Decision(LINEAR if wins else "library", times, reason)


def _refusal(
    default: torch.Tensor, challenger: torch.Tensor, exact: torch.Tensor | None
) -> str | None:
    """Why a challenger's result cannot be taken, if so. NaN never passes."""
    scale = float(default.abs().max()) or 1.0
    if not float((challenger - default).abs().max()) <= 1e-4 * scale:
        return "the challenger's result differs"
    if exact is None:
        return None
    errors = [
        float((r[: len(exact)] - exact).square().mean().sqrt()) for r in (default, challenger)
    ]
    if not errors[1] <= _MOST_ERROR * errors[0]:
        return f"the challenger's error is {errors[1] / errors[0]:.1f} times the default's"
    return None


def exact_rows(product: Product) -> torch.Tensor:
    """The first rows of the product of the same operands, in float64."""
    a, b, bias = _operands(product)
    exact = a[:_EXACT_ROWS].double() @ b.double()
    return exact if bias is None else exact + bias


def _operands(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same numbers each time, by a generator that is not the user's."""
    generator = torch.Generator().manual_seed(0)
    a = _random((product.rows, product.depth), product.a_strides, generator)
    b = _random((product.depth, product.columns), product.b_strides, generator)
    bias = torch.randn(product.columns, generator=generator) if product.has_bias else None
    return a, b, bias


def candidates(product: Product) -> dict[str, Run]:
    """Every way to compute a product, on operands of its sizes and strides."""
    a, b, bias = _operands(product)
    out = torch.empty(product.rows, product.columns)
    linear: Any = torch.ops.mkldnn._linear_pointwise

    def library() -> torch.Tensor:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

    return {"library": library, LINEAR: lambda: linear(a, b.t(), bias, "none", [], "")}


def _random(
    shape: tuple[int, int], strides: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.randn(span, generator=generator).as_strided(shape, strides)
