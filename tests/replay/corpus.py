"""The corpus of the replay: programs whose generated code is kept as hashes, by name.

    headers                   what every C++ kernel includes
    kernel/softmax            a case of the benchmarks
    plain/17, training/17     a random program
    model/gpt2                a model of the zoo, forward and training step

Nothing in it draws on the clock or on the machine: a name means the same program everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.kernels import kernels
from tests.models.check import forward, training_step
from tests.models.zoo import FURTHER, NAMED
from tests.random_programs.check import evaluate, fresh
from tests.random_programs.kinds import program_of

# Compiles a function as the replay does: what it generates is recorded.
Compile = Callable[..., Any]
HEADERS = "headers"
NUM_PROGRAMS = {"plain": 150, "training": 150}
MODELS = {architecture.name: architecture for architecture in (*NAMED, *FURTHER)}


def names() -> list[str]:
    return [
        HEADERS,
        *(f"kernel/{case.name}" for case in kernels()),
        *(f"{kind}/{seed}" for kind, count in NUM_PROGRAMS.items() for seed in range(count)),
        *(f"model/{name}" for name in MODELS),
    ]


def play(name: str, compiled: Compile) -> None:
    """Call the program of this name as its users do, compiled by `compiled`."""
    kind, _, rest = name.partition("/")
    torch.manual_seed(0)
    if kind == "kernel":
        play_kernel(rest, compiled)
    elif kind == "model":
        play_model(rest, compiled)
    else:
        play_program(kind, int(rest), compiled)


def play_kernel(name: str, compiled: Compile) -> None:
    problem = {case.name: case for case in kernels()}[name].build()
    problem.step(compiled(problem.function))


def play_model(name: str, compiled: Compile) -> None:
    architecture = MODELS[name]
    forward(compiled(architecture.build().eval()), architecture.inputs())
    training_step(compiled(architecture.build().train()), architecture.inputs())


def play_program(kind: str, seed: int, compiled: Compile) -> None:
    program = program_of(kind, seed)
    inputs, function = program.functions()
    candidate = compiled(function, dynamic=program.is_dynamic)
    for values in runnable(program.sizes, inputs, functools.partial(evaluate, program, function)):
        evaluate(program, candidate, fresh(values))


def runnable(sizes: Any, inputs: Callable[..., Any], run: Callable[..., Any]) -> Iterator[Any]:
    """The inputs of every size that eager runs."""
    for size in sizes:
        try:
            values = inputs(*size)
            run(fresh(values))
        except Exception:
            continue
        yield values
