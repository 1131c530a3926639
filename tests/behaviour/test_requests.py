"""One program, asked for in four ways: `torch.compile`, `explain`, `codegen_for`, `aot_compile`.

Mode, options and memory budget are honoured by all of them: they generate the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from perfuse.capture.cross_compile import CrossCompile
from perfuse.capture.observe import observing, observing_cuts
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.graph.partition import Cut
from perfuse.pipeline import Compiled
from perfuse.target import find_compiler

pytestmark = pytest.mark.skipif(not find_compiler(""), reason="no C++ compiler")

Options = Mapping[str, Any]

# The compiler may be quick: only text is compared.
QUICK: Options = {"cpu.opt_level": 0}
ROWS: dict[str, Options] = {
    "nothing": {},
    "a budget": {"memory_budget": 0.9},  # less than can be reached, so the least is taken
    "three options": {"recompute_level": 0, "cpu.simd": "scalar", "fallback_random": True},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with perfuse.testing.fresh_cache():
        yield


def step(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = F.layer_norm((x @ w).tanh(), (32,))
    return F.dropout(x, 0.5)


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(256, 32).requires_grad_(), torch.randn(32, 32).requires_grad_()


def by_torch_compile(fn: Callable[..., Any]) -> list[str]:
    """Sources of the forward and the backward as a training step compiles them."""
    seen: list[Compiled] = []
    with observing(seen.append):
        fn(*arguments()).sum().backward()
    return sorted(text for compiled in seen for text in compiled.texts())


def by_explain(fn: Callable[..., Any]) -> list[str]:
    return sorted(perfuse.explain(fn, *arguments()).sources)


def by_codegen_for(fn: Callable[..., Any], **asked: Any) -> list[str]:
    return sorted(perfuse.codegen_for(fn, arguments(), target="cpu", **asked).sources)


def by_aot_compile(fn: Callable[..., Any], path: Path, **asked: Any) -> list[str]:
    """The host programs that an artefact holds; it has no sources of kernels."""
    perfuse.aot_compile(fn, arguments(), path, training=True, **asked)
    documents = [json.loads(file.read_text()) for file in path.glob("*-program.json")]
    return sorted(document["host"]["text"] for document in documents)


def hosts(texts: list[str]) -> list[str]:
    return [text for text in texts if "def call(" in text]


def saved_without_options() -> int:
    """How many values the forward saves; the graph is traced and cut, and runs in eager."""
    cuts: list[Cut] = []
    backend = CrossCompile([Context.default(Settings())], lambda *graph: None)
    with observing_cuts(lambda cut, context: cuts.append(cut)):
        torch.compile(step, backend=backend, dynamic=False)(*arguments())
    return len(cuts[0].saved)


@pytest.mark.filterwarnings("ignore::perfuse.BudgetWarning")
@pytest.mark.parametrize("name", ROWS)
def test_all_four_generate_the_same(name: str, tmp_path: Path) -> None:
    options = {**QUICK, **ROWS[name]}
    fn = torch.compile(step, backend="perfuse", dynamic=False, options=options)
    cuts: list[Cut] = []
    with observing_cuts(lambda cut, context: cuts.append(cut)):
        expected = by_torch_compile(fn)
        assert len(hosts(expected)) == 2, "a forward and a backward"
        assert by_explain(fn) == expected
        assert by_codegen_for(fn) == expected
        assert by_aot_compile(fn, tmp_path / "own") == hosts(expected)
        assert by_codegen_for(step, options=options) == expected
        assert by_aot_compile(step, tmp_path / "given", options=options) == hosts(expected)
    assert len(cuts) == 6
    (num_saved,) = {len(cut.saved) for cut in cuts}
    assert (num_saved < saved_without_options()) == ("memory_budget" in options)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_explain_reports_the_mode_of_the_function(mode: str) -> None:
    explained = str(perfuse.explain(perfuse.compile(lambda x: x + 1, mode=mode), torch.ones(3)))
    assert "cudagraphs=True" in explained
    assert ("max_autotune=True" in explained) == (mode == "max-autotune")
