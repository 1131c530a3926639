"""PyTorch's own database of optimisers: four compiled steps, the learning rate changed between."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.devices import use_carried_packages
from tests.sweep.subject import Call, Compile, NotMade, Subject, accepted, noise, numbers

NUM_STEPS = 4
SHAPES = ((5, 7), (7,), (3, 2, 4), (6, 6))
LEFT_OUT = {
    "LBFGS": "calls a closure that runs autograd, which torch.compile does not take",
    "SparseAdam": "takes sparse gradients only",
}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for_loop": {"foreach": False},
    "foreach": {"foreach": True},
}


def names() -> list[str]:
    return [
        f"{info.optim_cls.__name__}-{implementation}-{index}"
        for info in database()
        for implementation in IMPLEMENTATIONS
        if implementation != "foreach" or "foreach" in info.supported_impls
        for index in range(len(info.optim_inputs_func(device="cpu")))
    ]


def database() -> list[Any]:
    use_carried_packages()
    from torch.testing._internal.common_optimizers import optim_db

    return list(optim_db)


def make(name: str, variant: str) -> Subject:
    optimiser, implementation, index = name.split("-")
    if optimiser in LEFT_OUT:
        raise NotMade(LEFT_OUT[optimiser])
    info = next(i for i in database() if i.optim_cls.__name__ == optimiser)
    sample = info.optim_inputs_func(device="cpu")[int(index)]
    settings = dict(sample.kwargs)
    if "foreach" in info.supported_impls:
        settings |= IMPLEMENTATIONS[implementation]
    shapes = [s for s in SHAPES if len(s) == 2] if optimiser == "Muon" else SHAPES
    model = nn.ParameterList([nn.Parameter(noise(*s)) for s in shapes])
    run = functools.partial(steps, info.optim_cls, settings, variant == "tensor_lr")
    subject = Subject(model, (tuple(gradients(shapes)), {}), sample.desc, run, counts_graphs=False)
    try:
        return accepted(subject)
    except (ValueError, RuntimeError, TypeError) as error:
        raise NotMade(f"eager: {' '.join(str(error).split())[:160]}") from None


def gradients(shapes: Any) -> list[list[Tensor]]:
    """Gradients of each step: no two alike."""
    return [[noise(*s) * (1 + step) - 0.2 * step for s in shapes] for step in range(NUM_STEPS)]


def steps(
    kind: Any, settings: dict[str, Any], has_tensor: bool, model: Any, call: Call, compile_it: Any
) -> list[Tensor]:
    """Parameters and states after each step; the rate is a float, or a tensor written in place."""
    given = dict(settings)
    first = next(iter(model.parameters()))
    rate = given.get("lr", 0.01)
    if has_tensor:
        if isinstance(rate, Tensor):
            raise ValueError("the sample has a tensor for a rate anyway")
        given["lr"] = torch.tensor(float(rate), dtype=first.dtype)
    optimiser = kind(model.parameters(), **given)
    step: Any = one_step(optimiser, compile_it)
    results = []
    for index, grads in enumerate(call[0]):
        for parameter, gradient in zip(model.parameters(), grads, strict=True):
            parameter.grad = gradient.clone()
        if index:
            change_rate(optimiser)
        step()
        results += [p.detach().clone() for p in model.parameters()]
    states = [numbers(state) for state in optimiser.state.values()]
    return results + [value.detach().clone() for state in states for value in state]


def one_step(optimiser: Any, compile_it: Compile) -> Any:
    def step() -> None:
        optimiser.step()

    return compile_it(step)


def change_rate(optimiser: Any) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.7)
        else:
            group["lr"] = group["lr"] * 0.7
