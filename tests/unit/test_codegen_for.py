"""Code for GPUs that are not there: generated, compiled, and looked at."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import perfuse
from perfuse.build.triton_compile import load_module
from perfuse.counters import counters
from perfuse.errors import CompilerMissing, ConfigError
from perfuse.testing import fresh_cache

ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    with fresh_cache():
        yield


def softmax(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.softmax(x * w, -1)[:, None] + rows[:, None, None]


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx90a", "hip:gfx942"])
def test_every_target(target: str) -> None:
    made = perfuse.codegen_for(softmax, (torch.empty(8, 96), torch.empty(96)), target=target)
    (graph,) = made.graphs
    assert graph.kind == "inference"
    assert "@triton.jit" in graph.kernels
    assert "launch(F[0], stream)" in graph.host
    assert len(graph.objects) >= 1
    for code, assembly in zip(graph.objects, graph.assembly, strict=True):
        assert code.code.startswith(ELF)
        assert code.num_registers > 0
        assert code.num_threads % (32 if target.startswith("cuda") else 64) == 0
        wanted = f"sm_{target[5:]}" if target.startswith("cuda") else target[4:]
        assert wanted in assembly
    assert "registers" in str(made)


def test_training_and_modules() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU())
    made = perfuse.codegen_for(module, (torch.empty(16, 32),), target="cuda:90")
    assert sorted(graph.kind for graph in made.graphs) == ["backward", "forward"]
    assert all(graph.objects for graph in made.graphs)
    assert next(module.parameters()).device.type == "cpu"


def test_logits_of_an_odd_vocabulary_are_held_once() -> None:
    """gpt2's head: no padded copy of its weight, nor of its 823 MB of logits."""
    hidden = torch.empty(8, 1024, 768, dtype=torch.bfloat16)
    weight = torch.empty(50257, 768, dtype=torch.bfloat16)
    made = perfuse.codegen_for(torch.nn.functional.linear, (hidden, weight), target="cuda:90")
    (graph,) = made.graphs
    sizes = re.findall(r"= empty\(\((.*?)\), ", graph.host)
    assert sorted(sizes) == ["8192, 50257", "8192, 8", "8192, 8"], graph.host
    assert graph.host.count("op_aten_mm_out(") == 8 + 2


def test_sizes_that_change() -> None:
    made = perfuse.codegen_for(
        lambda x: x.exp().sum(-1), (torch.empty(33, 65),), target="cuda:90", dynamic=True
    )
    (graph,) = made.graphs
    assert "S[1] = s" in graph.host


def test_meta_tensors_will_do() -> None:
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    made = perfuse.codegen_for(lambda x: x * 2, (x,), target="hip:gfx942")
    assert len(made.objects) == 1


def test_a_kernel_is_compiled_once() -> None:
    args = (torch.empty(8, 96), torch.empty(96))
    perfuse.codegen_for(softmax, args, target="cuda:90")
    before = counters.snapshot()
    perfuse.codegen_for(softmax, args, target="cuda:90")
    perfuse.codegen_for(softmax, args, target="cuda:80")
    after = counters.snapshot()
    built = after["build.kernels_compiled"] - before["build.kernels_compiled"]
    assert built == after["build.cache_hit"] - before.get("build.cache_hit", 0) > 0


def test_written_to_a_folder(tmp_path: Path) -> None:
    made = perfuse.codegen_for(lambda x: x + 1, (torch.empty(64),), target="cuda:90")
    names = {path.name for path in made.written_to(tmp_path)}
    assert {"0_inference_kernels.py", "0_inference_host.py", "0_inference_plan.txt"} < names
    assert any(name.endswith(".o") for name in names)


def test_an_unknown_target_is_told() -> None:
    with pytest.raises(ConfigError, match="unknown GPU"):
        perfuse.codegen_for(lambda x: x, (torch.empty(4),), target="cuda:12")


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CompilerMissing, match=r"perfuse\[gpu\]"):
        load_module("import triton\n# as a machine without it sees this module")


@pytest.mark.parametrize(
    "function",
    [lambda x: x[x > 0] * 2, lambda x: x + 1 if x.sum() > 0 else x - 1],
    ids=["a size", "a branch"],
)
def test_what_depends_on_data_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(perfuse.UnsupportedOp, match="needs the result of aten") as raised:
        perfuse.codegen_for(function, (torch.randn(4),), target="cuda:90")
    assert "torch.where" in str(raised.value)
