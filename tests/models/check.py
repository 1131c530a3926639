"""A model compiled, against the same model in eager and in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.backend import Counting, eager_random
from tests.harness.compare import DIRECTIONS, complaints
from tests.harness.devices import all_onto
from tests.harness.draws import moved_model
from tests.models.zoo import Architecture, Inputs

Evaluate = Callable[[Any, Inputs], Any]


@dataclass(frozen=True, slots=True)
class ModelReport:
    problems: list[str]
    num_graphs: int
    num_graphs_eager: int


def check_model(
    architecture: Architecture, *, train: bool, backend: str | None = None, device: str = "cpu"
) -> ModelReport:
    model = architecture.build().train(train).to(device)
    inputs = all_onto(architecture.inputs(), device)
    return check(model, inputs, training_step if train else forward, backend)


def check(model: nn.Module, inputs: Inputs, evaluate: Evaluate, backend: str | None) -> ModelReport:
    """The model compiled, as `evaluate` calls it."""
    eager = evaluate(copy.deepcopy(model), inputs)
    got, num_graphs = compiled_by(backend, model, inputs, evaluate)
    num_alone = num_graphs
    if num_graphs > 1:  # Dynamo alone makes one at least
        _, num_alone = compiled_by("eager", model, inputs, evaluate)
    exact, *spreads = (evaluate(widened(model, way), wide(inputs)) for way in ("", *DIRECTIONS))
    found = complaints(got, eager, exact, spreads)
    if found:
        again = [evaluate(moved_model(model, way), inputs) for way in DIRECTIONS]
        draws = list(zip(again, spreads, strict=True))
        found = complaints(got, eager, exact, spreads, draws=draws)
    return ModelReport(found, num_graphs=num_graphs, num_graphs_eager=num_alone)


def compiled_by(
    backend: str | None, model: nn.Module, inputs: Inputs, evaluate: Evaluate
) -> tuple[Any, int]:
    """Results of the compiled model, and its number of graphs."""
    torch._dynamo.reset()
    counting = Counting(backend)
    with eager_random(counting.inner):
        got = evaluate(torch.compile(copy.deepcopy(model), backend=counting), inputs)
    return got, counting.num_graphs


def forward(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    with torch.no_grad():
        return floats(model(**inputs))


def training_step(model: Any, inputs: Inputs) -> dict[str, Any]:
    """Outputs, the gradient of every parameter, and the buffers a step may have moved."""
    outputs = floats(model(**inputs))
    loss = (
        outputs["loss"] if "loss" in outputs else sum(o.square().mean() for o in outputs.values())
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    plain = getattr(model, "_orig_mod", model)
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return {"outputs": outputs, "gradients": gradients, "buffers": dict(plain.named_buffers())}


def floats(outputs: Any) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in outputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def widened(model: nn.Module, direction: str) -> nn.Module:
    """The model in float64, its parameters moved by one rounding of their dtype."""
    return moved_model(model, direction).double()


def wide(inputs: Inputs) -> Inputs:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
