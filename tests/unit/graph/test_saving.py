"""Values that the forward saves: the minimum cut, its costs, its bounds, the levels of it."""

import itertools
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node

from perfuse.config import Settings
from perfuse.graph.saving.choose import MAX_CHAIN, kept_bytes
from perfuse.graph.saving.costs import Work, num_flops, work_of
from perfuse.graph.saving.min_cut import INFINITE, SINK, SOURCE, Network
from perfuse.graph.saving.roles import Roles
from perfuse.ir.program import View
from tests.unit.graph.joint import Builder, aten, kept, roles_of, run_halves, traced_joint
from tests.unit.planning import plans_of

EDGES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 50) | st.just(INFINITE)),
    max_size=16,
    unique_by=lambda edge: edge[:2],
)


def cut_size(edges: list[tuple[int, int, float]], side: tuple[bool, ...]) -> float:
    return sum(c for a, b, c in edges if side[a] and not side[b])


@settings(max_examples=60, deadline=None)
@given(EDGES, st.sampled_from([1, 1 << 40]))
def test_no_cut_is_smaller(edges: list[tuple[int, int, float]], scale: int) -> None:
    edges = [(a, b, c * scale) for a, b, c in edges if a != b and b != SOURCE and a != SINK]
    network = Network(num_vertices=7)
    for edge in edges:
        network.edge(*edge)
    sides = [(True, False, *rest) for rest in itertools.product((False, True), repeat=5)]
    least = min(cut_size(edges, side) for side in sides)
    if least < INFINITE:
        found = network.source_side(max(least, 1.0))
        assert cut_size(edges, tuple(found)) == least


def names(nodes: list[Node]) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in nodes]


def kept_of(fn: Callable[..., Tensor], *args: Tensor, level: int = Work.LOOP) -> list[Node]:
    return kept(traced_joint(fn, args).graph, level)


def test_the_source_of_a_cast_is_kept() -> None:
    def wide(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin((x @ w).float())

    x = torch.randn(32, 32, dtype=torch.bfloat16)
    (node,) = kept_of(wide, x, x)
    assert node.meta["val"].dtype is torch.bfloat16


def test_an_input_is_cast_once_for_both_halves() -> None:
    """In the backward, a library call reads the cast: recomputed, it would be a kernel there."""

    def mixed(x: Tensor, w: Tensor) -> Tensor:
        return x.bfloat16() @ w.bfloat16()

    x = torch.randn(32, 32)
    saved = kept_of(mixed, x, x.clone())
    assert [n.meta["val"].dtype for n in saved] == [torch.bfloat16] * 2
    assert all(n.op == "placeholder" for n in kept_of(mixed, x, x.clone(), level=Work.PASS))


def test_a_cast_that_loops_read_is_recomputed() -> None:
    def mixed(x: Tensor) -> Tensor:
        return torch.sin(x.bfloat16())

    assert all(n.op == "placeholder" for n in kept_of(mixed, torch.randn(32, 32)))


def test_a_result_is_kept_instead_of_a_value_of_its_size() -> None:
    """A model returns its logits beside the loss: they are there, log-probabilities are not."""

    def logits_and_loss(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x @ w).view(4, 8, -1)
        return F.cross_entropy(logits.view(-1, w.shape[1]), labels), logits

    x, w = (torch.randn(n, m).bfloat16().requires_grad_() for n, m in ((32, 16), (16, 512)))
    forward, _ = plans_of(logits_and_loss, x, w, torch.zeros(32, dtype=torch.int64))
    made = [o.buffer for o in forward.program.outputs if isinstance(o, View)]
    large = {n for n in made if forward.program.buffers[n].num_elements == 32 * 512}
    assert len(large) == 1, str(forward)


def test_a_mask_is_kept_as_bytes() -> None:
    def masked(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(x @ w) * 2

    (node,) = kept_of(masked, torch.randn(32, 32), torch.randn(32, 32))
    assert node.meta["val"].dtype is torch.bool


def test_a_part_of_what_is_in_memory_keeps_all_of_it() -> None:
    def halves(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ w).chunk(2, dim=1)
        return a.sin() * b.sin()

    assert names(kept_of(halves, torch.randn(32, 32), torch.randn(32, 32))) == ["mm.default"]


def test_a_sum_of_products_is_kept_as_one_tensor() -> None:
    def residual(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (x @ w + x @ v).sin()

    made = [torch.randn(64, 64) for _ in range(3)]
    assert names(kept_of(residual, *made)) == ["add.Tensor"]


def test_sums_of_rows_stay_where_the_row_is_kept_anyway() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, (256,), w)

    found = kept_of(norm, torch.randn(64, 256), torch.randn(256))
    assert sum(map(kept_bytes, found)) == 2 * 64 * 4


def products(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        y = x @ w
        x = torch.cumsum(torch.tanh(y) * torch.sigmoid(y), 1)
    return x.sum(1)


def test_each_level_keeps_less_and_the_last_keeps_nothing() -> None:
    args = (torch.randn(32, 32), torch.randn(32, 32))
    sizes = [sum(map(kept_bytes, kept_of(products, *args, level=level))) for level in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[3]
    assert sizes[3] == 0


@pytest.mark.parametrize("level", range(4))
def test_every_level_computes_the_same(level: int) -> None:
    args = (torch.randn(16, 16), torch.randn(16, 16))
    gm = traced_joint(products, args)
    tangent = torch.randn(16)
    got, _ = run_halves(gm, args, tangent, settings=Settings(recompute_level=level))
    torch.testing.assert_close(got, list(gm(*args, tangent)))


def test_random_values_are_kept_at_any_level() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    assert names(kept_of(noisy, torch.randn(8, 8), level=3)) == ["rand_like.default"]


def test_flops_of_a_product() -> None:
    graph = traced_joint(products, (torch.randn(32, 32), torch.randn(32, 32))).graph
    (product, *_) = (n for n in graph.nodes if n.target is aten.mm.default)
    assert num_flops(product) == 2 * 32**3


def test_flops_of_attention() -> None:
    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    graph = traced_joint(attend, (torch.randn(2, 3, 16, 8),)).graph
    calls = [n for n in graph.nodes if "flash_attention" in str(n.target)]
    assert [num_flops(n) for n in calls[:1]] == [2 * 2 * (2 * 3) * 16 * 16 * 8]
    assert all(work_of(n) is Work.PRODUCT for n in calls)


def chain(num_steps: int, is_read_at_each: bool) -> Graph:
    """x -> tanh -> tanh ..., whose backward reads every step, or the last one alone."""
    build = Builder()
    x, tangent = build.input("primals_1"), build.input("tangents_1")
    steps = [x]
    for _ in range(num_steps):
        steps.append(build.call(aten.tanh.default, steps[-1]))
    gradient = tangent
    for step in reversed(steps if is_read_at_each else steps[-1:]):
        gradient = build.call(aten.mul.Tensor, gradient, step)
    return build.finish(steps[-1], gradient)


@pytest.mark.parametrize("is_read_at_each", [False, True])
def test_chains_are_bounded(is_read_at_each: bool) -> None:
    graph = chain(1000, is_read_at_each)
    found = set(kept(graph))
    length = longest = 0
    for node in graph.nodes:
        if node.target is aten.tanh.default:
            length = 0 if node in found else length + 1
            longest = max(longest, length)
    assert longest <= MAX_CHAIN if is_read_at_each else len(found) == 1
    assert len(found) <= 1000 // MAX_CHAIN + 1


def layers(num_layers: int) -> Graph:
    """Norm-like chains between products, a residual over each, and a backward that reads all."""
    build = Builder()
    x, w, tangent = (build.input(n) for n in ("primals_1", "primals_2", "tangents_1"))
    read = []
    for _ in range(num_layers):
        h = build.call(aten.tanh.default, build.call(aten.mul.Tensor, x, x))
        wide = build.call(aten.mm.default, build.call(aten.add.Tensor, h, 1.0), w)
        mask = build.call(aten.gt.Scalar, wide, 0.0, dtype=torch.bool)
        x = build.call(aten.add.Tensor, x, build.call(aten.mul.Tensor, wide, mask))
        read += [h, wide, mask, x]
    gradient = tangent
    for value in reversed(read):
        gradient = build.call(aten.mul.Tensor, gradient, value)
    return build.finish(x, gradient)


@pytest.mark.parametrize(
    "build", [lambda: chain(10_000, True), lambda: chain(20_000, False), lambda: layers(1_820)]
)
def test_twenty_thousand_nodes_take_seconds(build: Callable[[], Graph]) -> None:
    graph = build()
    assert len(graph.nodes) >= 20_000
    began = time.process_time()
    assert kept(graph)
    assert time.process_time() - began < 10  # about one on a quiet core


OPS = (aten.tanh.default, aten.mm.default, aten.mul.Tensor, aten.gt.Scalar, aten.neg.default)
STEPS = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=6
)


def built(steps: list[tuple[object, int, int]], reads: list[bool]) -> Graph:
    build = Builder()
    values, tangent = [build.input("primals_1")], build.input("tangents_1")
    for op, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        if op is aten.gt.Scalar:
            values.append(build.call(op, a, 0.0, dtype=torch.bool))
        else:
            args = (a, b) if op in (aten.mm.default, aten.mul.Tensor) else (a,)
            values.append(build.call(op, *args))
    gradient = tangent
    for value, is_read in zip(values, [*reads, True], strict=False):
        if is_read:
            gradient = build.call(aten.mul.Tensor, gradient, value)
    return build.finish(values[-1], gradient)


def is_enough(graph: Graph, roles: Roles, chosen: set[Node]) -> bool:
    """The backward can be computed from these and the inputs, by loops alone."""
    known = set(chosen)
    for node in graph.nodes:
        is_input = node.op == "placeholder" and node not in roles.backward
        is_made = work_of(node) <= Work.LOOP and all(n in known for n in node.all_input_nodes)
        if is_input or (node.op == "call_function" and is_made):
            known.add(node)
    read = {n for node in roles.backward for n in node.all_input_nodes}
    return all(n in known for n in read if n not in roles.backward)


@settings(max_examples=30, deadline=None)
@given(STEPS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_no_other_choice_keeps_much_less(
    steps: list[tuple[object, int, int]], reads: list[bool]
) -> None:
    graph = built(steps, reads)
    chosen, roles = set(kept(graph)), roles_of(graph)
    assert is_enough(graph, roles, chosen)
    before = [n for n in graph.nodes if n.op == "call_function" and n not in roles.backward]
    every = itertools.chain.from_iterable(
        itertools.combinations(before, size) for size in range(len(before) + 1)
    )
    least = min(sum(map(kept_bytes, c)) for c in every if is_enough(graph, roles, set(c)))
    # The price of reads, writes and steps may be a few sixteenths, never a tensor.
    assert sum(map(kept_bytes, chosen)) <= least * 1.5
