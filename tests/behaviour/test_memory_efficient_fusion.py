"""`perfuse.memory_efficient_fusion` and `perfuse.fx_graph_cse`, as their users call them."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import perfuse
from benchmarks import memory_cases as programs
from tests.harness.compare import complaints

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]

ACTIVATIONS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "gelu_bias": (programs.gelu_bias, [(1024,), (1024,)]),
    "mish": (programs.mish, [(1024,)]),
    "swish": (programs.swish, [(1024,)]),
    "hard_sigmoid": (programs.hard_sigmoid, [(1024,)]),
    "hard_swish": (programs.hard_swish, [(1024,)]),
    "hard_mish": (programs.hard_mish, [(1024,)]),
    "layer_norm": (programs.layer_norm, [(10, 16), (16,), (16,)]),
    "rms_norm": (programs.T5LayerNorm(1024), [(256, 256, 1024)]),
}


def result_and_gradients(fn: Any, args: list[Tensor], num_calls: int = 1) -> list[Tensor]:
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    wanted = [*args, *parameters]
    for _ in range(num_calls):
        for leaf in wanted:
            leaf.grad = None
        result = fn(*args)
        result.sum().backward()
    return [result.detach(), *(leaf.grad for leaf in wanted if leaf.grad is not None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_five_calls_like_eager(name: str, device: str) -> None:
    fn, shapes = ACTIVATIONS[name]
    fn = copy.deepcopy(fn).to(device) if isinstance(fn, nn.Module) else fn
    args = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    twins = [x.detach().clone().requires_grad_() for x in args]
    eager = result_and_gradients(fn, args)
    torch._dynamo.reset()
    ours = result_and_gradients(perfuse.memory_efficient_fusion(fn), twins, num_calls=5)
    num_compared = 1 + len(args)  # sums of 65,536 rows are held against float64 below
    torch.testing.assert_close(ours[:num_compared], eager[:num_compared])


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)),
        programs.T5LayerNorm(32),
        programs.Mlp(32).eval(),
    ],
    ids=["sequential", "rms_norm", "mlp"],
)
def test_modules_with_parameters(module: nn.Module) -> None:
    torch.manual_seed(0)
    fused = perfuse.memory_efficient_fusion(module)
    assert isinstance(fused, nn.Module)
    x = torch.randn(512, 32)
    exact = result_and_gradients(copy.deepcopy(module).double(), [x.double().requires_grad_()])
    eager = result_and_gradients(copy.deepcopy(module), [x.clone().requires_grad_()])
    ours = result_and_gradients(fused, [x.clone().requires_grad_()], num_calls=3)
    assert not complaints(ours, eager, exact)


def test_a_graph_break_is_told_not_hidden() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        perfuse.memory_efficient_fusion(broken)(torch.randn(4, requires_grad=True))


def check(gm: fx.GraphModule, x: Tensor | None, num_fewer: int | None) -> None:
    """The graph shrinks by so many nodes (None: any number), and a second run changes nothing."""
    graph = perfuse.fx_graph_cse(gm.graph)
    before, after = len(gm.graph.nodes), len(graph.nodes)
    assert after <= before if num_fewer is None else before - after == num_fewer, str(graph)
    assert len(perfuse.fx_graph_cse(graph).nodes) == after
    if x is not None:
        expected, got = gm(x), fx.GraphModule(gm, graph)(x)
        assert (expected is None and got is None) or torch.equal(expected, got)


def unequal(x: Tensor) -> Tensor:
    b = x + (x + 1)
    return b + (x + x)


def sums(x: Tensor) -> Tensor:
    a, b = x.sum(dim=1), x.sum(dim=1, keepdim=True)
    c, d = x.sum(dim=1, keepdim=True), x.sum(dim=1)
    return a + b + c + d


COUNTS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "nochange": (unequal, 0),
    "empty": (lambda x: None, 0),
    "two_args": (sums, 2),
    "simple_multiple_same_ops": (lambda x: x.sum() + x.sum() + x.sum() + x.sum(), 3),
    "nested_immutable_list_type": (lambda x: torch.cat((x, x)) + torch.cat((x, x)), 1),
    "kwarg": (lambda x: torch.ones_like(x) + torch.ones_like(x), 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    fn, num_fewer = COUNTS[name]
    x = torch.randn(2, 2)
    check(make_fx(fn)(x), x, num_fewer)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.rand_like(x) + torch.rand_like(x),
        lambda x: torch.randn(4) + torch.randn(4),
    ],
    ids=["rand_like", "randn"],
)
def test_random_ops_stay_two(fn: Callable[[Tensor], Tensor]) -> None:
    check(make_fx(fn)(torch.randn(2, 2)), None, 0)


def test_hash_with_numbers() -> None:
    graphs: list[fx.GraphModule] = []

    def resized(x: Tensor, size: int) -> Tensor:
        width = x.shape[-1]
        last, scaled = width - 1, width - 1.0
        return scaled / (size - 1.0) * torch.clamp(x, 0, last)

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(backend=keep, dynamic=True)(resized)(torch.rand(3, 100), 50)
    assert len(graphs) == 1
    check(graphs[0], None, 0)


def test_random_programs() -> None:
    rng = random.Random(0)
    ops: list[Callable[[Tensor], Tensor]] = [
        torch.clone,
        torch.cos,
        torch.tanh,
        torch.nn.functional.gelu,
    ]

    def program(x: Tensor) -> Tensor:
        values = [x]
        for _ in range(100):
            values.append(rng.choice(ops)(rng.choice(values)))
        return values[-1]

    x = torch.randn(2, 2)
    for _ in range(30):
        gm = fx.symbolic_trace(program)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        check(gm, x, None)
