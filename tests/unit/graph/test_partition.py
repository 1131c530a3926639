"""Forward and backward through AOTAutograd: gradients like eager's, and few bytes kept."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.facts import output_leaves
from tests.unit.graph.joint import partition_joint
from tests.unit.graph.tracing import after_passes

Halves = tuple[GraphModule, GraphModule]


class Watch:
    """Compiles with our passes and partition, and keeps what they made."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.halves: list[Halves] = []

    def partition(
        self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> Halves:
        halves = partition_joint(
            after_passes(joint), inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        for half in halves:
            half.graph.lint()
        saved = output_leaves(halves[0].graph)[num_fwd_outputs:]
        activations = [n.meta["val"] for n in saved if n.op != "placeholder"]
        self.kept = [v for v in activations if isinstance(v, Tensor)]
        self.halves.append(halves)
        return halves

    def compile(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        def run(gm: GraphModule, _: Any) -> Any:
            return after_passes(gm).forward

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            partition_fn=self.partition,
            decompositions=decomposition_table(),
        )
        return torch.compile(fn, backend=backend, dynamic=dynamic)

    def num_bytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.kept)


def gradients(fn: Any, args: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The result of `fn`, and the gradients of its inputs and parameters, new buffers included."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    torch.manual_seed(0)
    result = fn(*inputs)
    result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype))
    grads = [x.grad for x in inputs if x.grad is not None]
    if isinstance(fn, nn.Module):
        grads += [p.grad for p in fn.parameters() if p.grad is not None]
        grads += [b.clone() for b in fn.buffers()]
    return grads, result.detach()


def check(fn: Any, *args: Tensor, dynamic: bool | None = None) -> Watch:
    watch = Watch()
    twin = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    exact = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    wide = [x.double() if x.is_floating_point() else x for x in args]
    truth, true_result = gradients(exact, wide)
    eager, eager_result = gradients(fn, list(args))
    ours, our_result = gradients(watch.compile(twin, dynamic), list(args))
    assert watch.halves, "nothing was partitioned"
    if isinstance(fn, nn.Module):  # the compiled wrapper shares its module's parameters
        ours += [p.grad for p in twin.parameters() if p.grad is not None]
        ours += [b.clone() for b in twin.buffers()]
        ours = ours[: len(args)] + ours[-(len(eager) - len(args)) :]
    for a, b, t in zip(
        [*eager, eager_result], [*ours, our_result], [*truth, true_result], strict=True
    ):
        assert_as_good_as_eager(b, a, t)
    return watch


def assert_as_good_as_eager(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most twice eager's largest error, plus a few roundings of the largest value."""
    assert got.dtype == eager.dtype and got.shape == eager.shape
    if not got.is_floating_point():
        assert torch.equal(got, eager)
        return
    ulp = torch.finfo(got.dtype).eps * float(exact.abs().max())
    limit = 2 * float((eager.double() - exact).abs().max()) + 4 * ulp
    assert float((got.double() - exact).abs().max()) <= limit


def test_pointwise_chain_keeps_only_its_input() -> None:
    assert check(lambda x: F.gelu(F.silu(x) * 2).sin(), torch.randn(8, 8)).num_bytes() == 0


def test_layer_norm_keeps_two_numbers_a_row() -> None:
    assert check(nn.LayerNorm(64), torch.randn(16, 64)).num_bytes() == 16 * 2 * 4


def test_cross_entropy_keeps_per_row_values() -> None:
    target = torch.randint(0, 50, (32,))
    watch = check(lambda x, t: F.cross_entropy(x, t, ignore_index=3), torch.randn(32, 50), target)
    assert watch.num_bytes() <= 32 * 2 * 4 + 8


def test_activation_is_recomputed_from_the_product() -> None:
    mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    assert check(mlp, torch.randn(8, 32)).num_bytes() == 8 * 64 * 4


def test_cast_is_not_kept_beside_its_source() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w).to(torch.bfloat16)
        return (y.float().sin() * y.float()).sum()

    watch = Watch()
    gradients(watch.compile(f), [torch.randn(8, 8), torch.randn(8, 8)])
    assert watch.num_bytes() == 8 * 8 * 2


def test_batch_norm_in_training_updates_its_buffers() -> None:
    # No bias before the norm: its gradient is zero but for rounding, so eager's error says little.
    first = nn.Conv2d(3, 8, 3, bias=False)
    net = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    check(net, torch.randn(4, 3, 8, 8))


@pytest.mark.parametrize("dynamic", [None, True])
def test_transformer_layer(dynamic: bool | None) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    check(layer, torch.randn(2, 8, 32), dynamic=dynamic)


def test_group_and_rms_norm() -> None:
    check(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Mish()), torch.randn(2, 3, 8, 8))
    check(nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32), nn.SiLU()), torch.randn(4, 16))


def test_dropout_keeps_its_seed_and_draws_twice() -> None:
    watch = Watch()
    x = torch.randn(64, 64)
    grads, result = gradients(watch.compile(lambda x: F.dropout(x, 0.5)), [x])
    assert watch.num_bytes() == 8
    assert torch.equal(grads[0] != 0, result != 0)


class Counting(nn.Module):
    """Changes a buffer, and reads the new value where the backward needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y: Tensor = self.linear(x)
        return (y * self.count.sin()).exp()


def test_mutated_buffer_is_not_recomputed_from() -> None:
    check(Counting(), torch.randn(4, 16))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpointed_regions_keep_only_their_inputs() -> None:
    watch = check(Checkpointed(), torch.randn(4, 16))
    assert max((v.shape[-1] for v in watch.kept), default=0) <= 16


def test_names_and_order_of_the_backwards_inputs() -> None:
    watch = Watch()
    fn = watch.compile(lambda x, w: torch.mm(x, w).sin() * x.shape[0], dynamic=True)
    gradients(fn, [torch.randn(4, 8), torch.randn(8, 8)])
    forward, backward = watch.halves[0]
    placeholders = backward.graph.find_nodes(op="placeholder")
    is_size = [not isinstance(n.meta["val"], Tensor) for n in placeholders]
    assert is_size == sorted(is_size, reverse=True), "sizes come first"
    assert placeholders[-1].name.startswith("tangents")
    saved = [n.name for n in output_leaves(forward.graph)[1:]]
    assert sorted(saved) == sorted(n.name for n in placeholders[:-1])
