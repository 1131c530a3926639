"""Frozen parameters: what they decide is computed once, and again as soon as they change."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.errors import PerfuseError
from perfuse.runtime.prepared import prepared_call
from tests.harness.compare import assert_as_good_as_eager

Module = nn.Module


def stirred(module: Module) -> Module:
    """The module in inference, with statistics and factors that are not zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor, low in ((norm.running_mean, -1.0), (norm.running_var, 0.5)):
                assert tensor is not None
                tensor.uniform_(low, 1.5, generator=generator)
            with torch.no_grad():
                for parameter in norm.parameters():
                    parameter.uniform_(-1.5, 1.5, generator=generator)
    return module.eval()


class Block(nn.Module):
    """Convolutions with and without a bias, norms, a residual and a layer scale."""

    def __init__(self, channels: int = 16, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(channels, affine=False)
        self.scale = nn.Parameter(torch.linspace(-1, 1, channels).view(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.scale * self.second_norm(self.second(inner)))


def network() -> Module:
    torch.manual_seed(1)
    stem = [nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)]
    return stirred(nn.Sequential(*stem, Block(), Block(groups=16), Block(groups=4), *head))


def image(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def frozen(module: Module, **more: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(
        module, backend="perfuse", options={"freeze": True, **more.pop("options", {})}, **more
    )
    return compiled


def check(compiled: Callable[..., Any], module: Module, x: Tensor) -> None:
    exact = copy.deepcopy(module).double()
    with torch.no_grad():
        assert_as_good_as_eager(compiled(x), module(x), exact(x.double()))


@pytest.mark.parametrize("simd", ["auto", "avx2", "scalar"])
@pytest.mark.parametrize("verify", [True, "memory"])
def test_network(simd: str, verify: Any) -> None:
    module = network()
    compiled = frozen(module, options={"cpu.simd": simd, "verify": verify})
    for seed in range(3):
        check(compiled, module, image(seed))


def test_norms_are_folded() -> None:
    module, x = network(), image()
    with torch.no_grad():
        explained = perfuse.explain(frozen(module), x)
    graph = str(explained.stage("graph"))
    assert "sqrt" not in graph
    assert "prepared_0" in graph


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_dynamic_batch(batch: int) -> None:
    module = network()
    compiled = frozen(module, dynamic=True)
    for size in (batch, batch + 2):
        check(compiled, module, image(batch=size))


def in_place(module: Module) -> None:
    module[0].weight.mul_(1.5)  # type: ignore[index, operator, union-attr]


def statistics(module: Module) -> None:
    module[3].first_norm.running_var.add_(1)  # type: ignore[index, operator, union-attr]


def new_memory(module: Module) -> None:
    weight = module[3].second.weight  # type: ignore[index, union-attr]
    weight.data = weight.data * 2  # type: ignore[union-attr, operator, assignment]


def new_parameter(module: Module) -> None:
    conv = module[3].first  # type: ignore[index, union-attr]
    conv.weight = nn.Parameter(conv.weight * 3)  # type: ignore[union-attr, operator, assignment]


def loaded(module: Module) -> None:
    state = {name: value * 0.5 for name, value in module.state_dict().items()}
    module.load_state_dict({k: v.to(module.state_dict()[k].dtype) for k, v in state.items()})


@pytest.mark.parametrize("change", [in_place, statistics, new_memory, new_parameter, loaded])
def test_changes_are_noticed(change: Callable[[Module], None]) -> None:
    module, x = network(), image()
    compiled = frozen(module)
    check(compiled, module, x)
    with torch.no_grad():
        change(module)
    check(compiled, module, x)
    check(compiled, module, x)


def test_new_memory_at_the_old_address_is_noticed() -> None:
    """Memory that is freed is given out again: twice replaced, a weight may be where it was."""
    module, x = network(), image()
    compiled, weight = frozen(module), module[0].weight  # type: ignore[index, union-attr]
    for _ in range(5):
        check(compiled, module, x)
        for _ in range(2):
            weight.data = torch.randn(weight.shape)  # type: ignore[union-attr, arg-type, assignment]
    check(compiled, module, x)


def test_a_write_during_the_preparation_is_noticed() -> None:
    """By another thread, for example: the prepared value is of the old version."""
    weight, num_runs = torch.ones(3), 0

    def prepare(held: Sequence[Tensor]) -> Sequence[Any]:
        nonlocal num_runs
        doubled = held[0] * 2
        num_runs += 1
        if num_runs == 1:
            held[0].add_(1)
        return (doubled,)

    call = prepared_call(prepare, tuple, [0], [])
    call([weight])
    assert torch.equal(call([weight])[0], weight * 2)
    call([weight])
    assert num_runs == 2


def test_one_graph_serves_many_modules() -> None:
    blocks = [stirred(Block()) for _ in range(3)]
    for i, block in enumerate(blocks):
        with torch.no_grad():
            block.first.weight.mul_(i + 1)
        block.compile(backend="perfuse", options={"freeze": True})
    x = torch.randn(2, 16, 6, 6)
    for _ in range(2):
        for block in blocks:
            exact = copy.deepcopy(block).double()
            with torch.no_grad():
                assert_as_good_as_eager(block(x), block.forward(x), exact.forward(x.double()))


def test_training_is_not_frozen() -> None:
    module, reference = network(), network()
    compiled = frozen(module)
    for _ in range(2):
        compiled(image()).sum().backward()
        reference(image()).sum().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            p.grad = q.grad = None
            with torch.no_grad():
                p.mul_(0.9)
                q.mul_(0.9)


class Results(nn.Module):
    """Results that depend on a parameter alone, a view of one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.calls.add_(1)
        doubled = self.weight * 2
        return doubled, doubled.t(), x @ doubled.sin(), self.calls * 3


def test_results_are_the_callers_own() -> None:
    module, reference, x = Results(), Results(), torch.ones(2, 3)
    compiled = frozen(module)
    with torch.no_grad():
        for _ in range(3):
            got, wanted = compiled(x), reference(x)
            torch.testing.assert_close(got, wanted)
            for result in got:
                result.zero_()
    torch.testing.assert_close(module.weight, reference.weight)


def test_nan_is_not_lost() -> None:
    module, x = network(), image()
    x[0, 0, 3, 3] = torch.nan
    with torch.no_grad():
        assert torch.equal(frozen(module)(x).isnan(), module(x).isnan())


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module, x = network(), image()
        compiled = frozen(module)
        compiled(x)
        module[0].weight.mul_(2)  # type: ignore[index, operator, union-attr]
        torch.testing.assert_close(compiled(x), module(x))


def test_autocast() -> None:
    module, x = network(), image()
    compiled = frozen(module)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compiled(x)
        got, eager = compiled(x), module(x)
        assert got.dtype == eager.dtype
        exact = copy.deepcopy(module).double()
        with torch.autocast("cpu", enabled=False):
            wanted = exact(x.double())
    limit = 2 * (eager.double() - wanted).norm() + 2**-8 * wanted.norm()
    assert (got.double() - wanted).norm() <= limit


def test_values_go_with_their_module() -> None:
    torch._dynamo.reset()
    block = stirred(Block())
    alive = weakref.ref(block.first.weight)
    block.compile(backend="perfuse", options={"freeze": True})
    with torch.no_grad():
        block(torch.randn(2, 16, 6, 6))
    del block
    gc.collect()
    assert alive() is None


def test_refused_where_parameters_are_inputs(tmp_path: Any) -> None:
    with torch.no_grad(), pytest.raises(PerfuseError, match="freeze"):
        perfuse.aot_compile(frozen(network()), (image(),), tmp_path / "net.perfuse")
