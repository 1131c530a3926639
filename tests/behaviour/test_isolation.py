"""Looking at a function, or compiling it ahead of time, leaves compiled functions compiled."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import perfuse
from perfuse.capture.request import Request
from perfuse.cli import app

SCRIPT = """
import torch

def function(x):
    return (x.sin() * 2).sum(-1)

def example_args():
    return (torch.ones(4, 8),)
"""


def function(x: Tensor) -> Tensor:
    return (x.sin() * 2).sum(-1)


def broken(x: Tensor) -> Tensor:
    y = x.cos() + 1
    torch._dynamo.graph_break()
    return function(y)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)).tanh().exp())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    perfuse.counters.clear()
    with perfuse.testing.fresh_cache():
        yield


def looked_at(fn: Callable[..., Any], x: Tensor, folder: Path) -> dict[str, Callable[[], Any]]:
    (folder / "script.py").write_text(SCRIPT)
    where = f"{folder / 'script.py'}:function"
    run = CliRunner().invoke
    return {
        "explain": lambda: str(perfuse.explain(fn, x)),
        "explain again": lambda: str(perfuse.explain(fn, x[:3])),
        "codegen_for": lambda: perfuse.codegen_for(fn, (x,), target="cpu"),
        "aot_compile": lambda: perfuse.aot_compile(fn, (x,), folder / "one.perfuse"),
        "command explain": lambda: run(app, ["explain", where], catch_exceptions=False),
        "command codegen": lambda: run(app, ["codegen", where, "--target", "cpu"]),
    }


@pytest.mark.parametrize("kind", ["function", "module", "library module"])
def test_live_functions_are_not_captured_again(kind: str, tmp_path: Path) -> None:
    """Nor do they learn from what was looked at: the first other size is still their first."""
    found: dict[str, Any] = {
        "function": function, "module": Layer(), "library module": torch.nn.Linear(8, 8)
    }  # fmt: skip
    fn = found[kind]
    live = torch.compile(fn, backend="perfuse")
    x = torch.randn(6, 8)
    with torch.no_grad():
        live(x)
        for name, look in looked_at(live if kind == "module" else fn, x, tmp_path).items():
            look()
            before = captures()
            assert torch.allclose(live(x), fn(x), atol=1e-6)
            assert captures() == before, name
        live(x[:5])  # with a size that changed for the first time
        live(x[:4])  # fits what is dynamic by now
        assert captures() == before + 1


def captures() -> int:
    return perfuse.counters["capture.traced"] + perfuse.counters["capture.cache_hit"]


def test_graph_breaks_are_left_as_they_were() -> None:
    live, inner = (torch.compile(f, backend="perfuse") for f in (broken, function))
    x = torch.randn(6, 8)
    live(x), inner(x)
    for n in range(12):  # more often than Dynamo compiles one function
        explanation = perfuse.explain(broken, torch.randn(n + 2, 8))
        assert len(explanation.graphs) == 2
    before = captures()
    assert torch.allclose(live(x), broken(x), atol=1e-5)
    assert torch.allclose(inner(x), function(x), atol=1e-5)
    assert captures() == before


class Holder:
    @torch.compile(backend="perfuse", options={"memory_budget": "1GiB"})
    def method(self, x: Tensor) -> Tensor:
        return function(x)


def compiled_in_place() -> torch.nn.Module:
    layer = Layer()
    layer.compile(backend="perfuse", options={"memory_budget": "1GiB"})
    return layer


OWN: dict[str, Callable[[], Any]] = {
    "torch.compile": lambda: torch.compile(
        function, backend="perfuse", options={"memory_budget": "1GiB"}
    ),
    "perfuse.compile": lambda: perfuse.compile(function, options={"memory_budget": "1GiB"}),
    "module": lambda: perfuse.memory_efficient_fusion(Layer(), memory_budget="1GiB"),
    "module.compile": compiled_in_place,
    "method": lambda: Holder().method,
}


@pytest.mark.parametrize("name", OWN)
def test_explain_has_the_options_of_its_function(name: str) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    explanation = perfuse.explain(OWN[name](), x)
    assert [report.budget for report in explanation.training] == ["1GiB"]


def test_explain_has_the_mode_and_sizes_of_its_function() -> None:
    fn = perfuse.compile(function, mode="max-autotune-no-cudagraphs", dynamic=True)
    assert Request.of(fn).overrides == {"max_autotune": True}
    assert Request.of(fn, options={"max_autotune": False}).overrides == {"max_autotune": False}
    assert re.search(r"\[s\d+, s\d+\]", perfuse.explain(fn, torch.randn(6, 8)).graphs[0].graph)


def test_another_backends_options_are_not_ours() -> None:
    fn = torch.compile(function, backend="inductor", options={"max_autotune": False})
    assert perfuse.explain(fn, torch.randn(6, 8)).num_kernels > 0


@pytest.mark.parametrize("options", [None, {"memory_budget": 0.5, "over_budget": "warn"}])
@pytest.mark.filterwarnings("ignore::perfuse.BudgetWarning")
def test_codegen_for_cuts_within_the_budget(options: dict[str, Any] | None) -> None:
    layer, x = Layer(), torch.randn(64, 8)
    perfuse.codegen_for(layer, (x,), target="cpu", options=options)
    assert (perfuse.counters["budget.simulated"] > 0) == (options is not None)
    owned = perfuse.compile(layer, options=options)
    before = perfuse.counters["budget.simulated"]
    perfuse.codegen_for(owned, (x,), target="cpu")
    assert perfuse.counters["budget.simulated"] == 2 * before


@pytest.mark.filterwarnings("ignore::perfuse.BudgetWarning")
def test_artefacts_have_the_options_of_their_function(tmp_path: Path) -> None:
    owned = perfuse.compile(Layer(), options={"memory_budget": 0.5})
    path = perfuse.aot_compile(owned, (torch.randn(64, 8),), tmp_path / "layer", training=True)
    assert perfuse.counters["budget.simulated"] > 0
    assert path.name == "layer"


def test_a_users_mistake_is_not_logged_besides() -> None:
    """PyTorch logs a failing meta function as an error, with a traceback, before it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    filters = list(logger.filters)

    def mistaken(x: Tensor) -> Tensor:
        return torch.cat([x, x[0]])

    try:
        with pytest.raises(RuntimeError, match="cat"):
            perfuse.explain(mistaken, torch.randn(3, 4))
        assert not seen and logger.filters == filters
        with pytest.raises(RuntimeError, match="cat"):
            torch.compile(mistaken, backend="eager", fullgraph=True)(torch.randn(3, 4))
        assert seen
    finally:
        logger.removeHandler(handler)
