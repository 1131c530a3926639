"""Linear layers with quantised weights on a CPU: processor time of one thread.

python -m benchmarks.weight_only_cpu [--forms group int4] [--dtype float32] [--rows 1 8]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.experts_cpu import BACKENDS, measure

K = N = 2048
GROUP = 128


def dense(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w)


def scaled_after(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return linear(x, w.to(x.dtype)) * s[:, 0]


def scaled_before(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return linear(x, w.to(x.dtype) * s[:, :1])


def group(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return linear(x, (w.view(N, -1, GROUP).to(x.dtype) * s[..., None]).view(N, K))


def group_zero(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    wide = (w.view(N, -1, GROUP).to(x.dtype) - 3) * s[..., None]
    return linear(x, wide.view(N, K))


def int4(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    pairs = torch.stack([w & 15, w >> 4], -1).view(N, -1, GROUP)
    return linear(x, ((pairs.to(x.dtype) - 8) * s[..., None]).view(N, K))


def packed(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.ops.aten._weight_int8pack_mm(x, w, s[:, 0].contiguous())


FORMS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (dense, scaled_after, scaled_before, group, group_zero, int4, packed)
}


def operands(form: str, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(rows, K, dtype=dtype)
    if form == "dense":
        return x, torch.randn(N, K, dtype=dtype)
    scales = (torch.rand(N, K // GROUP) / 64).to(dtype)
    if form == "int4":
        return x, torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), scales
    return x, torch.randint(-128, 128, (N, K), dtype=torch.int8), scales


def steps_of(form: str, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    given = operands(form, rows, dtype)
    steps: dict[str, Callable[[], Tensor]] = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        fn = FORMS[form]
        call = fn if backend == "eager" else torch.compile(fn, backend=backend)
        steps[backend] = lambda call=call: call(*given)
        for _ in range(3):
            steps[backend]()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| form | rows | eager | peer | Perfuse | eager / Perfuse | peer / Perfuse |")
    print("|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for form in arguments.forms:
            for rows in arguments.rows:
                steps = steps_of(form, rows, getattr(torch, arguments.dtype))
                eager, peer, ours = (1e3 * t for t in measure(steps, arguments.seconds).values())
                times = f"{eager:.0f} | {peer:.0f} | {ours:.0f}"
                print(
                    f"| {form} | {rows} | {times} | {eager / ours:.2f} | {peer / ours:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
