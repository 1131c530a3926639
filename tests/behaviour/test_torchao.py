"""torchao's float8 training and weight-only inference, compiled: full graphs, eager's results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fp8_block import Block
from perfuse import config
from perfuse.capture.cross_compile import cross_compile
from perfuse.capture.request import Request
from perfuse.pipeline import plan_graph
from perfuse.schedule.plan import Plan
from tests.harness.backend import compiled
from tests.harness.float8 import cpu_takes_row_scales
from tests.harness.torchao import needs_torchao, quantised, with_recipe
from tests.unit.schedule.test_transposed import assert_no_copies, scaled_matmuls

pytestmark = needs_torchao

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
WEIGHT_ONLY = ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig"]


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def gradients(block: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    result = call(given)
    wanted = [given, *block.parameters()]
    return [result.detach(), *torch.autograd.grad(result, wanted, torch.ones_like(result))]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.silu(self.up(x)))
        return result


def check_training_step(module: nn.Module, recipe: str) -> None:
    """At most a few values are rounded to another code: norms add in another order than eager."""
    if recipe.startswith("rowwise") and not cpu_takes_row_scales():
        pytest.skip("eager has no scales of rows on a CPU")
    module, x = with_recipe(module.bfloat16(), recipe), torch.randn(2, 16, 64).bfloat16()
    got = gradients(module, compiled(module, fullgraph=True), x)
    for mine, theirs in zip(got, gradients(module, module, x), strict=True):
        # One element in a hundred differs by a step of e5m2, a quarter of its value.
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < 0.1 * 0.25


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_step(recipe: str) -> None:
    with config.patch({"cpu.opt_level": 1}):
        check_training_step(Mlp(), recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_step_of_a_block(recipe: str) -> None:
    check_training_step(Block(64, 96, 2), recipe)


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@torch.no_grad()
def test_weight_only(scheme: str) -> None:
    model, x = quantised(Mlp().bfloat16(), scheme), torch.randn(16, 64).bfloat16()
    got, eager = compiled(model, fullgraph=True)(x), model(x)
    # Eager rounds to bfloat16 after each of four ops, the compiled program after two.
    assert float((got - eager).float().norm() / eager.float().norm()) < 4 * 2**-8


def plans_for_gpu(module: nn.Module, x: Tensor) -> list[Plan]:
    found: list[Plan] = []
    request = Request.of(copy.deepcopy(module), None, None)
    take = lambda _, graph, context: found.append(plan_graph(graph, context).plan)  # noqa: E731
    cross_compile(request, [x], {}, "cuda:90", False, take)
    return found


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@torch.no_grad()
def test_weight_only_for_a_gpu(scheme: str) -> None:
    """Weights of eight bits are inputs of the program: subclasses are taken apart, not dropped."""
    model, x = quantised(Mlp().bfloat16(), scheme), torch.randn(16, 64).bfloat16()
    (plan,) = plans_for_gpu(model, x)
    inputs = [plan.program.buffers[name] for name in plan.program.inputs]
    matrices = [buffer for buffer in inputs if len(buffer.shape) == 2 and 96 in buffer.shape]
    assert [buffer.dtype.num_bytes for buffer in matrices if 64 in buffer.shape] == [1, 1], str(
        plan
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_for_a_gpu(recipe: str) -> None:
    """Operands are quantised in the layout that the matmul reads, by tiles of two axes."""
    model = with_recipe(Mlp().bfloat16(), recipe)
    backward, forward = plans_for_gpu(model, torch.randn(2, 16, 64).bfloat16().requires_grad_())
    is_full = recipe != "rowwise_with_gw_hp"  # which leaves gradients of weights in bfloat16
    assert len(scaled_matmuls(forward)) == 2 and len(scaled_matmuls(backward)) == 2 + 2 * is_full
    assert_no_copies(forward)
    assert_no_copies(backward)
