"""A new process with a full cache: nothing is traced, generated or compiled, and results agree."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.scripts import finish, start

PROGRAM = """
import json
import sys
import torch
import torch.nn.functional as F
import perfuse

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(8 * 64, 16), torch.nn.LayerNorm(16), torch.nn.GELU(),
)
x, y = torch.randn(4, 3, 8, 8), torch.randn(4, 16)

def run(candidate):
    model.load_state_dict(state)
    model.zero_grad()
    loss = F.mse_loss(candidate(x), y)
    loss.backward(retain_graph=True)
    loss.backward()  # gradients add up over two calls
    with torch.no_grad():
        after = candidate(x)
    gradients = [p.grad.clone() for p in model.parameters()]
    return [loss.detach(), after, *gradients, *map(torch.clone, model.buffers())]

state = {name: value.clone() for name, value in model.state_dict().items()}
eager, got = run(model), run(torch.compile(model, backend="perfuse"))
close = [torch.allclose(g, e, rtol=1e-4, atol=1e-5) for g, e in zip(got, eager)]
bits = [g.double().sum().item() for g in got]
counters = perfuse.counters.snapshot()
trained = {"is_right": all(close), "bits": bits, "counters": counters}

perfuse.counters.clear()

def function(x, w):
    return (x @ w).softmax(-1), x.sum()

x, w = torch.ones(8, 8), torch.eye(8)
with torch.autocast("cpu", dtype=torch.bfloat16):
    got = torch.compile(function, backend="perfuse")(x, w)
    eager = function(x, w)
pairs = list(zip(got, eager))
close = all(g.dtype == e.dtype and torch.allclose(g, e, rtol=1e-2) for g, e in pairs)
autocast = {"is_right": close, "counters": perfuse.counters.snapshot()}
modules = [name for name in sys.modules if name.startswith("perfuse.")]
print(json.dumps({"train": trained, "autocast": autocast, "modules": modules}))
"""

Runs = tuple[Path, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two processes, one after the other on one cache; the cache as the first left it."""
    cache, first = (tmp_path_factory.mktemp(name) / "cache" for name in ("cache", "first"))
    cold = finish(start(PROGRAM, cache))
    shutil.copytree(cache, first)
    return first, cold, finish(start(PROGRAM, cache))


def test_training_step_is_loaded_without_tracing(runs: Runs) -> None:
    cold, warm = (run["train"] for run in runs[1:])
    assert cold["is_right"] and warm["is_right"]
    assert cold["bits"] == warm["bits"]
    assert cold["counters"]["capture.traced"] == 2
    assert warm["counters"]["capture.cache_hit"] == 2
    assert "capture.traced" not in warm["counters"]
    assert "build.compiler_runs" not in warm["counters"]


def test_what_is_in_the_cache_needs_no_compiler(runs: Runs) -> None:
    """Its modules are not even imported."""
    cold, warm = (run["modules"] for run in runs[1:])
    assert "perfuse.pipeline" in cold and "perfuse.runtime.bind_cpu" in warm
    rooms = ("pipeline", "lower", "schedule", "autotune", "budget", "codegen.cpp", "codegen.triton")
    found = [name for name in warm for room in rooms if name.startswith(f"perfuse.{room}")]
    assert not found and len(warm) < 100


def test_autocast_is_part_of_the_key(runs: Runs) -> None:
    cold, warm = (run["autocast"] for run in runs[1:])
    assert cold["is_right"] and warm["is_right"]
    assert warm["counters"]["capture.cache_hit"] == 1


def test_damaged_captures_are_traced_again(runs: Runs) -> None:
    cache, _, _ = runs
    programs = list(cache.rglob("entries/graph-*/program.json"))
    # A forward with its backward, one for inference, and the one under autocast.
    assert len(programs) == 4
    for path in programs:
        path.write_bytes(path.read_bytes()[:-20])
    again = finish(start(PROGRAM, cache))["train"]
    assert again["is_right"]
    assert again["counters"]["cache.damaged"] > 0
    assert again["counters"]["capture.traced"] == 2
