"""PyTorch's own database of modules: every sample of every module, forward or a training step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.devices import use_carried_packages
from tests.sweep.subject import Call, Compile, NotMade, Subject, accepted, forward, training_step

MAX_SAMPLES = 12
LEFT_OUT = {
    "FractionalMaxPool2d": "draws random numbers that differ between float32 and float64",
    "FractionalMaxPool3d": "draws random numbers that differ between float32 and float64",
}


def names() -> list[str]:
    found = dict.fromkeys(name_of(info.module_cls) for info in database())
    return list(found)


def database() -> list[Any]:
    use_carried_packages()
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def name_of(cls: type) -> str:
    return cls.__name__ if cls.__module__.startswith("torch.nn.modules") else module_path(cls)


def module_path(cls: type) -> str:
    return f"{cls.__module__.removeprefix('torch.').replace('.modules', '')}.{cls.__name__}"


def make(name: str, variant: str) -> Subject:
    """All samples of the module in one: a module that calls each with its own arguments."""
    if name in LEFT_OUT:
        raise NotMade(LEFT_OUT[name])
    info = next(i for i in database() if name_of(i.module_cls) == name)
    train = variant == "train"
    torch.manual_seed(0)  # samples draw from the default generator
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=train, training=train
    )
    parts, calls = [], []
    for sample in samples[:MAX_SAMPLES] if isinstance(samples, list) else list(samples):
        made, given = sample.constructor_input, sample.forward_input
        part = info.module_cls(*made.args, **made.kwargs).train(train)
        parts.append(part)
        calls.append((tuple(given.args), dict(given.kwargs)))
    run = functools.partial(each, training_step if train else forward)
    subject = Subject(nn.ModuleList(parts[:MAX_SAMPLES]), (tuple(calls[:MAX_SAMPLES]), {}), run=run)
    try:
        return accepted(subject)
    except RuntimeError as error:
        raise NotMade(f"eager: {' '.join(str(error).split())[:160]}") from None


def each(run: Any, parts: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
    """Results of each module, compiled by itself: samples differ in rank and in options."""
    assert isinstance(parts, nn.ModuleList)
    results = []
    for part, given in zip(parts, call[0], strict=True):
        torch._dynamo.reset()
        results += run(part, given, compile_it)
    return results
