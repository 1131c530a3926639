"""Host cost of a forward and backward of tiny tensors: microseconds of a call, by its parts.

python -m benchmarks.host_cost --device cuda --backends nothing eager inductor perfuse

`nothing` is an autograd function that computes nothing: what PyTorch's engine takes by itself.
`step` is both in turns, which costs more than their sum where each finds the caches cold.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import perfuse  # noqa: F401  (a checkout that is not installed makes itself known)
from benchmarks import kernels as k

CALLS, ROUNDS, WARM_UP = 100, 11, 20
Function = Callable[..., Tensor]


class Nothing(torch.autograd.Function):
    """Keeps its arguments, and gives them back as their own gradients."""

    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> Tensor:
        ctx.save_for_backward(*args)
        return args[0].detach()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return tuple(ctx.saved_tensors)


def nothing(*args: Tensor) -> Tensor:
    found: Tensor = Nothing.apply(*args)  # type: ignore[no-untyped-call]
    return found


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "swish": (k.swish, ((8,),)),
    "gelu_bias": (k.gelu_bias, ((4, 8), (8,))),
    "layer_norm": (k.layer_norm, ((4, 8), (8,), (8,))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backends", nargs="+", default=["nothing", "eager", "perfuse"])
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    print(f"{'':12}{'':10}{'forward':>9}{'backward':>9}{'step':>9}  us")
    for name, (function, shapes) in CASES.items():
        args = [torch.randn(s, device=arguments.device, requires_grad=True) for s in shapes]
        for backend in arguments.backends:
            times = parts(contestant(function, backend), args)
            print(f"{name:12}{backend:10}" + "".join(f"{t:9.1f}" for t in times), flush=True)


def contestant(function: Function, backend: str) -> Function:
    if backend in ("nothing", "eager"):
        return nothing if backend == "nothing" else function
    torch._dynamo.reset()
    compiled: Function = torch.compile(function, backend=backend)
    return compiled


def parts(function: Function, args: list[Tensor]) -> list[float]:
    """Forward, backward, and both in turns: medians."""
    seed = torch.ones_like(function(*args))

    def backward(output: Tensor) -> None:
        torch.autograd.grad(output, args, seed)

    for _ in range(WARM_UP):
        backward(function(*args))
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        outputs: list[Tensor] = []
        rounds.append(
            [
                spent(args[0], lambda outputs=outputs: outputs.append(function(*args))),
                spent(args[0], lambda outputs=outputs: backward(outputs.pop())),
                spent(args[0], lambda: backward(function(*args))),
            ]
        )
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def spent(where: Tensor, step: Callable[[], Any]) -> float:
    """Microseconds of one of many calls; of the CPU's own, what this thread worked."""
    clock = time.perf_counter if where.is_cuda else time.thread_time
    if where.is_cuda:
        torch.cuda.synchronize()
    began = clock()
    for _ in range(CALLS):
        step()
    return (clock() - began) / CALLS * 1e6


if __name__ == "__main__":
    main()
