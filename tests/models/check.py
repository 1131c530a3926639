"""A model compiled, against the same model in eager and in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.backend import Counting, eager_random
from tests.harness.compare import DIRECTIONS, complaints, moved
from tests.harness.devices import all_onto
from tests.models.zoo import Architecture, Inputs

EPS = torch.finfo(torch.float32).eps


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
    evaluate = training_step if train else forward
    eager = evaluate(copy.deepcopy(model), inputs)
    counts = []
    got: Any = None
    for name in ("eager", backend):
        torch._dynamo.reset()
        counting = Counting(name)
        with eager_random(counting.inner):
            got = evaluate(torch.compile(copy.deepcopy(model), backend=counting), inputs)
        counts.append(counting.num_graphs)
    exact, *spreads = (evaluate(widened(model, way), wide(inputs)) for way in ("", *DIRECTIONS))
    found = complaints(got, eager, exact, spreads)
    return ModelReport(found, num_graphs=counts[1], num_graphs_eager=counts[0])


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
    """The model in float64, its parameters moved by one rounding of float32."""
    wider = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in wider.parameters():
            parameter.copy_(moved(parameter, EPS, direction))
    return wider


def wide(inputs: Inputs) -> Inputs:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
