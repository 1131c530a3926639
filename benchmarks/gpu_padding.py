"""The cost of unaligned rows in a matmul on a GPU, and of padding: the numbers behind
`perfuse/graph/pad_matmuls.py`.

    python -m benchmarks.gpu_padding --rows 8192 --depth 768 --columns 50257
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse  # noqa: F401  (a checkout that is not installed makes itself known)
from perfuse.graph import aligned_matmul as aligned_op

Run = Callable[[], object]
ALIGNED = 8  # elements of two bytes in sixteen


def milliseconds(run: Run, repeats: int = 20) -> float:
    """The median of single runs, by the GPU's clock."""
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for before, after in zip(marks[::2], marks[1::2], strict=True):
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True))
    return times[len(times) // 2]


def in_parts(x: Tensor, weight: Tensor, out: Tensor, num_parts: int) -> None:
    """The padded product a few rows at a time, each part cut off while it is in the cache."""
    size = -(-len(x) // num_parts)
    for some, into in zip(x.split(size), out.split(size), strict=True):
        into.copy_((some @ weight.t())[:, : out.shape[1]])


def cases(rows: int, depth: int, columns: int) -> dict[str, Run]:
    """`y = x @ w.t()` and its two gradients, as they are and padded."""
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    x, w = torch.randn(rows, depth, **half), torch.randn(columns, depth, **half)
    y, grad = torch.empty(rows, columns, **half), torch.randn(rows, columns, **half)
    wide = -columns % ALIGNED
    padded_w, padded_grad = F.pad(w, (0, 0, 0, wide)), F.pad(grad, (0, wide))
    cut_grad = padded_grad[:, :columns]
    return {
        "result, as it is": lambda: torch.mm(x, w.t(), out=y),
        "result, by rows that start alike": lambda: aligned_matmul(x, w.t()),
        "result, padded": lambda: x @ padded_w.t(),
        "result, padded and cut off": lambda: y.copy_((x @ padded_w.t())[:, :columns]),
        "result, in 8 parts": lambda: in_parts(x, padded_w, y, 8),
        "result, in 16 parts": lambda: in_parts(x, padded_w, y, 16),
        "gradient of x, as it is": lambda: grad @ w,
        "gradient of x, padded": lambda: padded_grad @ padded_w,
        "gradient of x, aligned rows": lambda: cut_grad @ w,
        "gradient of w, as it is": lambda: grad.t() @ x,
        "gradient of w, padded": lambda: padded_grad.t() @ x,
        "gradient of w, aligned rows": lambda: cut_grad.t() @ x,
        "padding of the gradient": lambda: F.pad(grad, (0, wide)),
        "padding of w": lambda: F.pad(w, (0, 0, 0, wide)),
    }


@torch.compile(backend="perfuse")
def aligned_matmul(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = aligned_op.aligned_matmul(x, weight)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("rows", 8192), ("depth", 768), ("columns", 50257)):
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    for name, run in cases(given.rows, given.depth, given.columns).items():
        print(f"{name:<32}{milliseconds(run):9.3f} ms", flush=True)


if __name__ == "__main__":
    main()
