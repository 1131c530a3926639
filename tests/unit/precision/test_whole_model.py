"""Whole models in a precision: compiled as one graph, equal to eager regions, unchanged."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer.testing
from torch import Tensor, nn

import perfuse
from perfuse import cli
from perfuse.precision import LayerRules, Recipe, Scaling, prepare

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
RULES = LayerRules(min_features=16, keeps_head=False)
WIDTH = 128


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(16, 256), torch.randn(256, 256) / 16


def recipe(scaling: str) -> Recipe:
    return Recipe(Scaling(scaling), layers=RULES)


def step(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    given = x.clone().requires_grad_()
    result = run(given)
    result.float().square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [result.detach(), given.grad, *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("scaling", Scaling)
def test_compiled_as_one_graph(model: nn.Module, x: Tensor, scaling: str) -> None:
    """Two steps: the second one of delayed scaling uses what the first one kept."""
    conversion = prepare(model, recipe(scaling))
    eager = perfuse.autocast("cpu", FP8, recipe=conversion)(model.forward)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = [step(model, eager, factor * x) for factor in (1, 8)]
    model.load_state_dict(state)
    fast = perfuse.compile(model, precision=recipe(scaling), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = [step(model, fast, factor * x) for factor in (1, 8)]
    assert got[0][0].dtype == BF16
    for mine, theirs in zip(chain(*got), chain(*expected), strict=True):
        # Tanh is the one operation whose bits may differ, by a rounding that FP8 then sees.
        assert (mine.float() - theirs.float()).norm() <= 2**-8 * theirs.float().norm()


def test_dynamic_sizes_share_a_graph(model: nn.Module, x: Tensor) -> None:
    layers = prepare(model[0], recipe("block"))  # type: ignore[index]
    fast = perfuse.compile(model[0], precision=recipe("block"), dynamic=True)  # type: ignore[index]
    eager = perfuse.autocast("cpu", FP8, recipe=layers)(model[0].forward)  # type: ignore[index]
    with torch.no_grad():
        first = fast(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            second = fast(x[:7])
        assert torch.equal(first, eager(x)) and torch.equal(second, eager(x[:7]))


def test_the_model_itself_stays_as_it_is(model: nn.Module, x: Tensor) -> None:
    before, names = model(x), list(model.state_dict())
    fast = perfuse.compile(model, precision=recipe("row"))
    with torch.no_grad():
        fast(x)
    assert type(model[0]) is nn.Linear  # type: ignore[index]
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), before)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert isinstance(fast, nn.Module)
    assert next(fast.parameters()) is next(model.parameters())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", BF16), ("fp16", torch.float16)])
def test_halves(model: nn.Module, x: Tensor, precision: str, dtype: torch.dtype) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = model(x)
    with torch.no_grad():
        got = perfuse.compile(model, precision=precision, fullgraph=True)(x)
    assert got.dtype == dtype
    assert (got.float() - expected.float()).abs().max() <= 2**-6


def test_functions_and_decorators(pair: tuple[Tensor, Tensor]) -> None:
    wide, weight = pair

    @perfuse.compile(precision="fp8-row", fullgraph=True)
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).relu()

    with perfuse.autocast("cpu", FP8, recipe="row"):
        expected = F.linear(wide, weight).relu()
    assert torch.equal(function(wide, weight), expected)
    assert function.__name__ == "function"
    around = perfuse.compile(lambda x, weight: 2 * function(x, weight), fullgraph=True)
    assert torch.equal(around(wide, weight), 2 * expected)
    assert any("f8" in text for text in perfuse.explain(function, wide, weight).sources)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def test_regions_nest(pair: tuple[Tensor, Tensor]) -> None:
    x, weight = pair
    half = F.linear(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", BF16), perfuse.autocast("cpu", FP8, recipe="row"):
        inside = linear(x, weight)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(linear(x, weight), x @ weight.t())
        with torch.autocast("cpu", torch.float16):
            assert linear(x, weight).dtype == torch.float16
        with perfuse.autocast("cpu", FP8, enabled=False, recipe="row"):
            assert linear(x, weight).dtype == torch.float32
        assert torch.equal(linear(x, weight), inside)
    assert inside.dtype == BF16 and not torch.equal(inside, half)
    with torch.autocast("cpu", BF16):
        assert torch.equal(linear(x, weight), half)
    exact = x.double() @ weight.double().t()
    assert float((inside.double() - exact).norm() / exact.norm()) < 0.05
    assert torch.equal(linear(x, weight), x @ weight.t())


def test_regions_leave_small_and_odd_layers_alone() -> None:
    for features in (128, 264):
        x, weight = torch.randn(16, features), torch.randn(features, features)
        with perfuse.autocast("cpu", FP8, recipe="row"):
            assert torch.equal(linear(x, weight), F.linear(x.bfloat16(), weight.bfloat16()))


def test_a_region_inside_of_compiled_code(pair: tuple[Tensor, Tensor]) -> None:
    def inside(x: Tensor, weight: Tensor) -> Tensor:
        with perfuse.autocast("cpu", FP8, recipe="row"):
            y = linear(x, weight)
        return y.float() + linear(x, weight)

    expected = inside(*pair)
    got = perfuse.compile(inside, fullgraph=True)(*pair)
    assert (got - expected).abs().max() <= 2**-18 * expected.abs().max()


def test_empty_and_double_inputs_are_left_alone(pair: tuple[Tensor, Tensor]) -> None:
    x, weight = pair
    with perfuse.autocast("cpu", FP8, recipe="tensor"):
        assert linear(x[:0], weight).shape == (0, 256)
        assert linear(x.double(), weight.double()).dtype == torch.float64


def test_computed_weights_are_left_alone(model: nn.Module, x: Tensor) -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, 2 * self.inner.weight)

    computed = Doubled()
    fast = perfuse.compile(computed, precision=recipe("row"), fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert torch.equal(fast(x), computed(x))


def test_an_overflow_falls_back_for_one_step(model: nn.Module, x: Tensor) -> None:
    """After small inputs, large ones are neither clipped nor infinite."""
    layers = prepare(model, recipe("delayed"))
    run = perfuse.autocast("cpu", FP8, recipe=layers)(model[0].forward)  # type: ignore[index]
    run(x / 1024)
    large = run(1024 * x).detach().double()
    exact = F.linear(1024 * x.double(), model[0].weight.detach().double())  # type: ignore[index]
    assert float((large - exact).norm() / exact.norm()) < 0.1


def test_explanations_name_the_layers(model: nn.Module, x: Tensor) -> None:
    rules = LayerRules(min_features=16)
    fast = perfuse.compile(model, precision=Recipe(Scaling.ROW, layers=rules))
    with torch.no_grad():
        explained = perfuse.explain(fast, x)
    assert explained.layers is not None and explained.layers.num_converted == 1
    assert "fp8-row: 1 of 2 linear layers, the rest in torch.bfloat16" in str(explained)
    assert "1 left alone: last layer of the model" in str(explained)
    assert any("f8" in text for text in explained.sources)


PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
def example_args():
    return torch.ones(16, 256)
"""


def test_the_command_lists_layers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["explain", f"{tmp_path}/program.py:model", "--precision", "fp8-tensor"]
    result = typer.testing.CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "  0: 256 -> 256, FP8\n  1: 256 -> 256, last layer of the model" in result.output


@pytest.mark.parametrize("precision", ["bf16", recipe("row")], ids=["bf16", "row"])
def test_an_artefact_keeps_the_precision(
    model: nn.Module, x: Tensor, precision: str | Recipe, tmp_path: Path
) -> None:
    fast = perfuse.compile(model, precision=precision)
    path = perfuse.aot_compile(fast, (x,), tmp_path / "model", training=True)
    loaded = perfuse.load(path)(x)
    assert loaded.dtype == BF16
    assert torch.equal(loaded, fast(x))


def test_code_for_a_gpu_keeps_the_precision(model: nn.Module, x: Tensor) -> None:
    fast = perfuse.compile(model, precision="bf16")
    with torch.no_grad():
        code = perfuse.codegen_for(fast, (x,), target="cuda:90")
    assert any("tl.bfloat16" in text for text in code.sources)


@pytest.mark.skipif(torch.cuda.is_available(), reason="such a GPU may be here")
def test_fp8_is_not_emulated_in_code_for_a_gpu(model: nn.Module, x: Tensor) -> None:
    fast = perfuse.compile(model, precision=recipe("row"))
    with pytest.raises(perfuse.Fp8Unavailable, match="that is not there"):
        perfuse.codegen_for(fast, (x,), target="cuda:90")
